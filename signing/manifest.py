"""Signed statements: one form for the manifests of bundles and archives, for receipts, reports, evidence and snapshots.

The payload is an in-toto Statement (github.com/in-toto/attestation, spec/v1/statement.md), canonical JSON::

    _type          https://in-toto.io/Statement/v1
    subject        exactly one, with its name and digest sha256
    predicateType  the form of the predicate
    predicate      the fields of that form

A range of a tenant's chain has the name ``{tenant_id}/{from_seq}-{to_seq}``. The DSSE envelope around the payload of a
manifest or a receipt is canonical JSON too and has exactly one signature. So each has one encoding, and a reader
compares bytes. The digest of a manifest's subject is that over the 32-byte digests, in order, of the files of the
range; its predicate begins with ``format_version``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from typing import Annotated, Any, ClassVar, Final, Generic, Self, TypeVar

import msgspec
from msgspec import Meta

from ledger import canonical
from ledger.chain.form import Hash, HlcText, NodeId, Seq, TenantId
from ledger.decoding import decode
from ledger.errors import InvalidInputError, LedgerError, SignatureError, refuse, reported_as
from ledger.exit_code import ExitCode, gravest
from ledger.hlc import Hlc
from ledger.merkle import verify_consistency
from signing import envelope
from signing.checkpoint import JudgedCheckpoint, judge_checkpoint
from signing.checkpoint import read as read_checkpoint
from signing.envelope import PAYLOAD_BYTES_MAX, PAYLOAD_TYPE, Envelope, EnvelopeSignature, Signed
from signing.keys import Keyring, Signer
from signing.strict import decode_base64, parse_json

STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"
CONSISTENCY_HASHES_MAX: Final = 128
LOG_ORIGIN: Final = r"[!-*,-~]{1,300}"
"""Regular expression of a log's origin without ``/`` and the tenant: no space, no plus."""

P = TypeVar("P")
Invalid = Callable[[str], LedgerError]
"""Makes the error for a message."""

_HEAD: Final = b'{"payload":"'
_TAIL: Final = re.compile(
    rb'","payloadType":"%b","signatures":\[\{"keyid":"([0-9a-f]{16})","sig":"([A-Za-z0-9+/]{2,254}={0,2})"\}\]\}'
    % re.escape(PAYLOAD_TYPE).encode()
)
"""The bytes after the payload: there is one encoding, so any other is rejected without parsing."""
_Name = Annotated[str, Meta(max_length=200)]
_ExitCode = Annotated[int, Meta(ge=0, le=4)]

REPORT_TYPE: Final = "https://tallystick.dev/verification-report/v1"
REPORT_SUFFIX: Final = ".dsse.json"
"""Suffix of the name of a report's envelope, after the name of the report."""
REPORT_ENVELOPE_BYTES_MAX: Final = 4 << 20


class _Digest(msgspec.Struct, forbid_unknown_fields=True):
    sha256: Hash


class Subject(msgspec.Struct, forbid_unknown_fields=True):
    """The subject of a statement."""

    name: _Name
    digest: _Digest


class Statement(msgspec.Struct, Generic[P], forbid_unknown_fields=True):
    """The payload of an envelope, with a predicate of one form."""

    type_: _Name = msgspec.field(name="_type")
    subject: tuple[Subject]
    predicate_type: _Name = msgspec.field(name="predicateType")
    predicate: P


def range_name(tenant_id: str, from_seq: int, to_seq: int) -> str:
    """The subject name of this range."""
    return f"{tenant_id}/{from_seq}-{to_seq}"


def encode(name: str, sha256: str, predicate_type: str, predicate: object) -> bytes:
    """The payload of a statement about the subject of this name and digest.

    Raises:
        CanonicalError: a field has no canonical form, such as an integer beyond 2^53 - 1.
    """
    subject = [{"name": name, "digest": {"sha256": sha256}}]
    return canonical.encode(
        {"_type": STATEMENT_TYPE, "subject": subject, "predicateType": predicate_type, "predicate": predicate}
    )


def seal(payload: bytes, signer: Signer) -> bytes:
    """The envelope around ``payload`` in its one encoding.

    Raises:
        SigningUnavailableError: the signer cannot be reached.
    """
    return canonical.encode(envelope.sign(payload, signer))


def open_envelope(data: bytes, what: str, invalid: Invalid) -> Envelope:
    """The envelope in ``data``, bounded and in its one encoding; it is not verified and its payload not parsed.

    Raises:
        LedgerError: as ``invalid``: ``data`` is no such envelope; ``what`` names it.
    """
    end = data.find(b'"', len(_HEAD))
    tail = _TAIL.fullmatch(data, end) if end >= 0 and data.startswith(_HEAD) else None
    if tail is None:
        raise invalid(f"{what} is not an envelope in canonical form with exactly one signature")
    if end - len(_HEAD) > PAYLOAD_BYTES_MAX * 4 // 3 + 4:
        raise invalid(f"{what}'s payload is over {PAYLOAD_BYTES_MAX} bytes")
    with reported_as(invalid, f"{what} is malformed", SignatureError):
        payload = decode_base64(data[len(_HEAD) : end].decode("latin-1"), "payload")
        signature = EnvelopeSignature(tail[1].decode(), decode_base64(tail[2].decode(), "sig"))
        return Envelope(PAYLOAD_TYPE, payload, (signature,))


def judge(opened: Envelope, keyring: Keyring | None, what: str, forged: Invalid) -> Signed:
    """Verify the envelope by the keys of ``keyring``.

    Raises:
        LedgerError: as ``forged``: it names a held key that did not sign it.
    """
    with reported_as(forged, f"{what}'s signature does not hold", SignatureError):
        return envelope.judge(opened, keyring)


class RangeManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The fields that the predicates of bundle and archive manifests share. Links, roots and digests are lowercase
    hex."""

    PREDICATE_TYPE: ClassVar[str]
    INVALID: ClassVar[type[LedgerError]]
    """Raised for a manifest that is malformed or contradicts itself."""
    FORGED: ClassVar[type[LedgerError]]
    """Raised for an invalid signature."""
    digests: ClassVar[Callable[[Any], Iterable[str]]]
    """Method: SHA-256 of each file of the range, hex."""
    check: ClassVar[Callable[[Any], None]]
    """Method: raises ``INVALID`` if the manifest contradicts itself."""

    node_id: NodeId
    """The node that exported the range, or signed its last snapshot."""
    log_origin: Annotated[str, Meta(pattern=rf"^{LOG_ORIGIN}\Z")]
    """Origin of the tenant's log in its checkpoints, without ``/`` and the tenant."""
    tenant_id: TenantId
    from_seq: Seq
    to_seq: Seq
    to_chain_link: Hash
    """Chain link of the last entry."""
    first_hlc: HlcText
    last_hlc: HlcText
    """HLCs of the first and the last entry, not necessarily the lowest and highest."""
    entry_count: Seq
    tree_size: Seq
    tree_root: Hash
    """Root of the tenant's whole tree at ``to_seq``."""
    consistency: Annotated[tuple[Hash, ...], Meta(max_length=CONSISTENCY_HASHES_MAX)]
    """Proof that the tree of the checkpoint extends that of ``tree_size``; empty if the sizes are equal."""

    @property
    def origin(self) -> str:
        """Origin of the tenant's log."""
        return f"{self.log_origin}/{self.tenant_id}"

    def statement(self) -> bytes:
        """The bytes that are signed.

        Raises:
            CanonicalError: a field has no canonical form, such as an integer beyond 2^53 - 1.
        """
        digest = sha256(b"".join(map(bytes.fromhex, self.digests()))).hexdigest()
        name = range_name(self.tenant_id, self.from_seq, self.to_seq)
        return encode(name, digest, self.PREDICATE_TYPE, msgspec.to_builtins(self))

    def seal(self, signer: Signer) -> bytes:
        """The bytes of the envelope around it.

        Raises:
            LedgerError: as ``INVALID``: it breaks an invariant.
            SigningUnavailableError: the signer cannot be reached.
        """
        payload = self.statement()
        self.read(payload)
        return seal(payload, signer)

    @classmethod
    def open_envelope(cls, data: bytes) -> Envelope:
        """As the function of that name."""
        return open_envelope(data, "the manifest", cls.INVALID)

    @classmethod
    def judge(cls, opened: Envelope, keyring: Keyring | None) -> Signed:
        """As the function of that name."""
        return judge(opened, keyring, "the manifest", cls.FORGED)

    @classmethod
    def read(cls, payload: bytes) -> Self:
        """The manifest in the payload of an envelope.

        Raises:
            LedgerError: as ``INVALID``: malformed, contradicting itself, or of another version.
        """
        form: Any = Statement
        with reported_as(
            cls.INVALID,
            "the manifest is malformed, or of another version",
            *(msgspec.MsgspecError, UnicodeError, InvalidInputError),
        ):
            manifest: Self = decode(payload, form[cls]).predicate
            for hlc in (manifest.first_hlc, manifest.last_hlc):
                Hlc.parse(hlc)
        manifest.check()
        if manifest.statement() != payload:
            raise cls.INVALID("the manifest's statement is not in canonical form, or its subject is another")
        return manifest


def judge_own_checkpoint(manifest: RangeManifest, text: str, keyring: Keyring | None) -> JudgedCheckpoint:
    """The checkpoint of a manifest: of its log, and of a tree that extends the manifest's.

    Raises:
        SignatureError: malformed, of another log, or it names a held key that did not sign it.
        ProofError: the manifest's proof does not lead to it.
    """
    checkpoint = read_checkpoint(text)
    if checkpoint.origin != manifest.origin:
        raise SignatureError(f"it is of log {checkpoint.origin[:200]!r}, not of {manifest.origin!r}")
    judged = judge_checkpoint(text, keyring)
    root, hashes = bytes.fromhex(manifest.tree_root), [bytes.fromhex(each) for each in manifest.consistency]
    verify_consistency(manifest.tree_size, checkpoint.size, root, checkpoint.root, hashes)
    return judged


# --- reports ------------------------------------------------------------------------------------------

# The verifier signs a report (docs/formats/report.md): the subject is the report, by SHA-256; the predicate holds the
# verified files and the verdicts. So the envelope alone states the findings.


class VerifiedBundle(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A file in the report. All but ``exit_code`` and ``file`` are None if it could not be read."""

    entries: int | None
    exit_code: _ExitCode
    file: str
    from_seq: int | None
    log: str | None
    sha256: Hash | None
    to_seq: int | None


class Findings(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The predicate of a report's statement."""

    bundles: list[VerifiedBundle]
    exit_code: _ExitCode
    verified_at: str
    verified_by: str


class SignedReport(msgspec.Struct, frozen=True):
    """The outcome of verifying a report and its envelope."""

    name: str
    """Name of the report when it was signed; the file may have been renamed since."""
    findings: Findings
    signed: Signed


def seal_report(name: str, report: bytes, findings: Findings, signer: Signer) -> bytes:
    """The envelope for ``report``, stored under ``name``.

    Raises:
        SigningUnavailableError: the signer cannot be reached.
    """
    return seal(encode(name, sha256(report).hexdigest(), REPORT_TYPE, msgspec.to_builtins(findings)), signer) + b"\n"


def open_report(report: bytes, data: bytes, keyring: Keyring | None) -> SignedReport:
    """Verify ``report`` by the envelope in ``data`` and the keys of ``keyring``.

    Raises:
        SignatureError: malformed, of another report, or it names a held key that did not sign it.
    """
    if len(data) > REPORT_ENVELOPE_BYTES_MAX:
        raise SignatureError(f"the signature is over {REPORT_ENVELOPE_BYTES_MAX} bytes")
    opened = envelope.parse(parse_json(data, "the signature"), envelope.PAYLOAD_TYPE)
    signed = envelope.judge(opened, keyring)
    with reported_as(SignatureError, "the statement is none about a report", msgspec.MsgspecError, UnicodeError):
        said = decode(opened.payload, Statement[Findings])
    (subject,) = said.subject
    is_of_report = (said.type_, said.predicate_type) == (STATEMENT_TYPE, REPORT_TYPE)
    is_other = subject.digest.sha256 != sha256(report).hexdigest()
    refuse(
        SignatureError,
        (not is_of_report, "the statement is none about a report"),
        (is_other, "the report is not the one that was signed: its digest is another"),
    )
    return SignedReport(subject.name, said.predicate, signed)


def findings_of(report: Mapping[str, Any]) -> Findings:
    """The findings to sign, from a report in its JSON form."""
    bundles = [_bundle(item) for item in report["bundles"]]
    code = gravest(ExitCode(bundle.exit_code) for bundle in bundles)
    return Findings(bundles, code.value, report["verified_at"], report["verified_by"])


def _bundle(item: Mapping[str, Any]) -> VerifiedBundle:
    about = item.get("bundle", {})
    return VerifiedBundle(
        entries=item.get("entries_checked"),
        exit_code=item["exit_code"],
        file=item["file"],
        from_seq=about.get("from_seq"),
        log=f"{about['log_origin']}/{about['tenant_id']}" if "log_origin" in about else None,
        sha256=about.get("sha256"),
        to_seq=about.get("to_seq"),
    )
