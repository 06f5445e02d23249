"""Manifests of ranges, those of bundles and of archives alike: signed statements of what a range holds.

The payload is an in-toto Statement (github.com/in-toto/attestation, spec/v1/statement.md), in a DSSE envelope that is
canonical JSON itself and has exactly one signature, so each has one spelling and a reader compares bytes. The digest of
its subject is that over the 32-byte digests, in order, of the files that make up the range; its predicate begins with
``format_version``.

A statement, which snapshots are too, is canonical JSON about one range of a tenant's chain::

    _type          https://in-toto.io/Statement/v1
    subject        one: name "{tenant_id}/{from_seq}-{to_seq}", digest sha256 of what the range holds
    predicateType  which form it is
    predicate      the fields of that form
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from hashlib import sha256
from typing import Annotated, Final, Generic, TypeVar

import msgspec
from msgspec import Meta

from ledger import canonical
from ledger.canonical import INTEGER_MAX
from ledger.errors import InvalidInputError, LedgerError, SignatureError
from ledger.hlc import Hlc
from ledger.merkle import verify_consistency
from ledger.names import NODE_ID, READABLE_TENANT_ID
from signing import envelope
from signing.checkpoint import JudgedCheckpoint, judge_checkpoint
from signing.checkpoint import read as read_checkpoint
from signing.envelope import PAYLOAD_BYTES_MAX, PAYLOAD_TYPE, Envelope, EnvelopeSignature, Signed
from signing.keys import Keyring, Signer
from signing.strict import decode_base64

STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"
HLC_CHARACTERS_MAX: Final = 200

Hash = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Count = Annotated[int, Meta(ge=0, le=INTEGER_MAX)]
Seq = Annotated[int, Meta(ge=1, le=INTEGER_MAX)]
HlcText = Annotated[str, Meta(max_length=HLC_CHARACTERS_MAX)]
TenantId = Annotated[str, Meta(pattern=rf"^(?:{READABLE_TENANT_ID})\Z")]
NodeId = Annotated[str, Meta(pattern=rf"^(?:{NODE_ID})\Z")]


def subject_of(tenant_id: str, from_seq: int, to_seq: int, sha256: str) -> list[dict[str, object]]:
    """What a statement about this range is about."""
    return [{"name": f"{tenant_id}/{from_seq}-{to_seq}", "digest": {"sha256": sha256}}]


def encode(subject: list[dict[str, object]], predicate_type: str, predicate: object) -> bytes:
    """The bytes that are signed.

    Raises:
        CanonicalError: a field has no canonical form, such as an integer beyond 2^53 - 1.
    """
    return canonical.encode(
        {"_type": STATEMENT_TYPE, "subject": subject, "predicateType": predicate_type, "predicate": predicate}
    )


CONSISTENCY_HASHES_MAX: Final = 128
LOG_ORIGIN: Final = r"[!-*,-~]{1,300}"
"""What a log's origin may be, without ``/`` and the tenant, as a regular expression: no space, no plus."""

_HEAD: Final = b'{"payload":"'
_TAIL: Final = re.compile(
    rb'","payloadType":"%b","signatures":\[\{"keyid":"([0-9a-f]{16})","sig":"([A-Za-z0-9+/]{2,254}={0,2})"\}\]\}'
    % re.escape(PAYLOAD_TYPE).encode()
)
"""What stands behind the payload: there is no other spelling, so nothing has to be parsed to refuse one."""

_Name = Annotated[str, Meta(max_length=200)]


class RangeManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the manifests of all forms say, as their predicate has it. Links, roots and digests are lowercase hex."""

    node_id: NodeId
    """The node that exported the range, or signed its last snapshot."""
    log_origin: Annotated[str, Meta(pattern=rf"^{LOG_ORIGIN}\Z")]
    """With ``/`` and the tenant the origin of the tenant's log, as in its checkpoints."""
    tenant_id: TenantId
    from_seq: Seq
    to_seq: Seq
    to_chain_link: Hash
    """Chain link of the last entry."""
    first_hlc: HlcText
    last_hlc: HlcText
    """HLCs of the first and the last entry; neither need be the lowest or highest."""
    entry_count: Seq
    tree_size: Seq
    tree_root: Hash
    """Root of the tenant's whole tree at ``to_seq``."""
    consistency: Annotated[tuple[Hash, ...], Meta(max_length=CONSISTENCY_HASHES_MAX)]
    """Proof that the tree of the checkpoint extends that of ``tree_size``; empty when they have one size."""

    @property
    def origin(self) -> str:
        """Origin of the tenant's log."""
        return f"{self.log_origin}/{self.tenant_id}"


M = TypeVar("M", bound=RangeManifest)


class _Digest(msgspec.Struct, forbid_unknown_fields=True):
    sha256: Hash


class _Subject(msgspec.Struct, forbid_unknown_fields=True):
    name: _Name
    digest: _Digest


class Statement(msgspec.Struct, Generic[M], forbid_unknown_fields=True):
    """The payload of an envelope, its predicate of one form."""

    type_: _Name = msgspec.field(name="_type")
    subject: tuple[_Subject]
    predicate_type: _Name = msgspec.field(name="predicateType")
    predicate: M


def judge_own_checkpoint(manifest: RangeManifest, text: str, keyring: Keyring | None) -> JudgedCheckpoint:
    """The checkpoint that goes with a manifest: of its log, and of a tree that begins with the manifest's.

    Raises:
        SignatureError: malformed, of another log, or a held key is named that did not sign it.
        ProofError: the manifest's proof does not lead to it.
    """
    checkpoint = read_checkpoint(text)
    if checkpoint.origin != manifest.origin:
        raise SignatureError(f"it is of log {checkpoint.origin[:200]!r}, not of {manifest.origin!r}")
    judged = judge_checkpoint(text, keyring)
    root, hashes = bytes.fromhex(manifest.tree_root), [bytes.fromhex(each) for each in manifest.consistency]
    verify_consistency(manifest.tree_size, checkpoint.size, root, checkpoint.root, hashes)
    return judged


@dataclass(frozen=True)
class ManifestForm(Generic[M]):
    """One form of manifest: how it is spelled, what it must say, and which errors say what is wrong with one."""

    type_: type[Statement[M]]
    predicate_type: str
    _: KW_ONLY
    digests: Callable[[M], Iterable[str]]
    """Those of the files that make up the range, hex."""
    check: Callable[[M], None]
    """Raises ``invalid`` of what is at odds with itself."""
    invalid: Callable[[str], LedgerError]
    """What is raised of what is malformed."""
    forged: Callable[[str], LedgerError]
    """What is raised where a signature does not hold."""

    def statement(self, manifest: M) -> bytes:
        """The bytes that are signed for ``manifest``.

        Raises:
            CanonicalError: a field has no canonical form, such as an integer beyond 2^53 - 1.
        """
        digest = sha256(b"".join(map(bytes.fromhex, self.digests(manifest)))).hexdigest()
        subject = subject_of(manifest.tenant_id, manifest.from_seq, manifest.to_seq, digest)
        return encode(subject, self.predicate_type, msgspec.to_builtins(manifest))

    def seal(self, manifest: M, signer: Signer) -> bytes:
        """The bytes of the envelope around ``manifest``.

        Raises:
            LedgerError: as ``invalid``: it breaks an invariant.
            SigningUnavailableError: the signer cannot be reached.
        """
        payload = self.statement(manifest)
        self.read(payload)
        return canonical.encode(envelope.sign(payload, signer))

    def open_envelope(self, data: bytes) -> Envelope:
        """The envelope in ``data``, bounded and in its one spelling; nothing of it is judged, nor its payload parsed.

        Raises:
            LedgerError: as ``invalid``: it is another text.
        """
        end = data.find(b'"', len(_HEAD))
        tail = _TAIL.fullmatch(data, end) if end >= 0 and data.startswith(_HEAD) else None
        if tail is None:
            raise self.invalid("the manifest is not an envelope in canonical form with exactly one signature")
        if end - len(_HEAD) > PAYLOAD_BYTES_MAX * 4 // 3 + 4:
            raise self.invalid(f"the manifest's payload is over {PAYLOAD_BYTES_MAX} bytes")
        try:
            payload = decode_base64(data[len(_HEAD) : end].decode("latin-1"), "payload")
            signature = decode_base64(tail[2].decode(), "sig")
        except SignatureError as error:
            raise self.invalid(f"the manifest is malformed: {error}") from error
        return Envelope(PAYLOAD_TYPE, payload, (EnvelopeSignature(tail[1].decode(), signature),))

    def judge(self, opened: Envelope, keyring: Keyring | None) -> Signed:
        """Who signed, by the keys of ``keyring``.

        Raises:
            LedgerError: as ``forged``: a held key is named that did not sign it.
        """
        try:
            return envelope.judge(opened, keyring)
        except SignatureError as error:
            raise self.forged(f"the manifest's signature does not hold: {error}") from error

    def read(self, payload: bytes) -> M:
        """The manifest that the payload of an envelope is.

        Raises:
            LedgerError: as ``invalid``: malformed, at odds with itself, or of another version.
        """
        try:
            said = msgspec.json.decode(payload, type=self.type_).predicate
            for hlc in (said.first_hlc, said.last_hlc):
                Hlc.parse(hlc)
        except (msgspec.MsgspecError, UnicodeError, InvalidInputError) as error:
            raise self.invalid(f"the manifest is malformed, or of another version: {error}") from error
        self.check(said)
        if self.statement(said) != payload:
            raise self.invalid("the manifest's statement is not in canonical form, or its subject is another")
        return said
