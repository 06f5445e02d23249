"""Verifying statements of external witnesses about checkpoints. Only a valid statement is compared with the chain.

A statement is about this log if the log signed its checkpoint under this origin; other columns of its row are not
trusted.

A bundle has statements in its member ``anchors.json``, a receipt in its field ``anchors``: canonical JSON, described in
docs/formats/bundle.md::

    {"anchors":[{"by":..., "checkpoint":NOTE, "consistency":[64 hex digits, ...], "kind":"witness" or "rfc3161",
                 "response":"" or base64 of a TimeStampResp, "time":...}, ...]}

``consistency`` proves that the tree of the bundle's own checkpoint extends that of NOTE. The exporter could leave a
statement out, so one that agrees proves nothing; a valid one that disagrees is a rollback.

An authority stamps (RFC 3161) the SHA-256 of all bytes of the note, signatures included. The whole TimeStampResp is
kept, so that ``openssl ts -verify -data NOTE -in RESPONSE -CAfile CA`` verifies it as well.
``SignedData.certificates`` (RFC 5652, 5.1) is a SET OF, which DER sorts by bytes (X.690, 11.6). OpenSSL's authority
writes the certificates of its chain in the order of its file. No signature covers them, so sorting does not affect the
verdict; without sorting the library rejects the response. The place of the field::

    TimeStampResp  SEQUENCE { status SEQUENCE, ContentInfo SEQUENCE { OID, [0] { SignedData SEQUENCE {
        version INTEGER, digestAlgorithms SET, encapContentInfo SEQUENCE, certificates [0], ... } } } }

The library for this (rfc3161-client) is an extra, ``pip install 'tallystick[anchor]'``; without it time stamps can be
neither made nor verified, and everything else works.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
from cryptography import x509
from msgspec import Meta

from ledger import canonical, rfc3339
from ledger.chain.form import Hash
from ledger.decoding import decode
from ledger.errors import (
    BundleInvalidError,
    CanonicalError,
    ConfigurationError,
    ProofError,
    SignatureError,
    UnknownKeyError,
    refuse,
    reported_as,
)
from ledger.merkle import verify_consistency
from ledger.verification.verdict import Anchor, rollback, with_break
from signing import note as notes
from signing.checkpoint import Checkpoint, open_checkpoint
from signing.checkpoint import read as read_checkpoint
from signing.files import open_regular
from signing.keys import Keyring
from signing.manifest import CONSISTENCY_HASHES_MAX
from signing.note import WitnessKey, cosignatures_of
from signing.policy import Policy, Quorum
from signing.strict import decode_base64

Kind = Literal["rfc3161", "witness"]
WITNESS: Final = "witness"
RFC_3161: Final = "rfc3161"
KEY_FILE_BYTES_MAX: Final = 4096
"""Bytes read from a file with the verifier key of a witness."""

OpenNote = Callable[[str, datetime], Checkpoint]
"""The checkpoint in a note that this tenant's log had signed by that time; raises SignatureError for any other."""


class ExternalWitnesses(NamedTuple):
    """The witnesses and time-stamping authorities that the caller trusts to have seen the log."""

    witnesses: Sequence[WitnessKey]
    """Those of the policy among them."""
    roots: Sequence[x509.Certificate]
    policy: Policy | None = None

    @classmethod
    def load(cls, witness_keys: Sequence[str], tsa_ca: Path | None, policy: Path | None = None) -> ExternalWitnesses:
        """The witnesses of the command line; a witness's key is given as text, or as the name of a file with it.

        Raises:
            InvalidInputError: a witness key or the policy is malformed.
            ConfigurationError: the CA file is unusable, or time stamps cannot be verified here.
            OSError: the file of a witness key or of the policy cannot be read.
        """
        roots: Sequence[x509.Certificate] = ()
        if tsa_ca is not None:
            require_available()
            roots = load_authorities(tsa_ca)
        keys = [WitnessKey.parse(_key_text(given)) for given in witness_keys]
        return cls.of(keys, roots, None if policy is None else Policy.load(policy))

    @classmethod
    def of(
        cls, witnesses: Iterable[WitnessKey], roots: Sequence[x509.Certificate], policy: Policy | None
    ) -> ExternalWitnesses:
        """These witnesses and those of the policy."""
        known = {key.text(): key for key in (*witnesses, *(policy.keys if policy is not None else ()))}
        return cls([*known.values()], roots, policy)

    @property
    def are_any(self) -> bool:
        """Whether there is any witness, authority or policy."""
        return bool(self.witnesses or self.roots or self.policy)

    def pinned(self, open_note: OpenNote) -> OpenNote:
        """``open_note``, for checkpoints that one of the logs of the policy signed, if it names any."""
        logs = [] if self.policy is None else self.policy.logs

        def opened(text: str, time: datetime) -> Checkpoint:
            checkpoint = open_note(text, time)
            if logs:
                notes.signers_of(notes.parse(text), [key for key in logs if key.name == checkpoint.origin])
            return checkpoint

        return opened

    def with_quorum(
        self, verdict: dict[str, Any], anchors: Iterable[Anchor], to_seq: int | None = None
    ) -> dict[str, Any]:
        """``verdict`` with how far the quorum of the policy covers the log, by the ``anchors`` that hold; unchanged
        without a policy. It is to cover entry ``to_seq``, by default the last of the verdict."""
        if self.policy is None:
            return verdict
        return {**verdict, "policy": quorum_of(self.policy, anchors, to_seq or verdict["to_seq"]).to_json()}


NOBODY: Final = ExternalWitnesses((), ())


def quorum_of(policy: Policy, anchors: Iterable[Anchor], to_seq: int) -> Quorum:
    """How far the quorum covers a log, by the ``anchors`` that hold and are of trees of this log."""
    sizes: dict[str, int] = {}
    for each in anchors:
        if each.status == "ok" and each.kind == WITNESS:
            sizes[each.key] = max(each.size, sizes.get(each.key, 0))
    return policy.judge(sizes, to_seq)


def _key_text(given: str) -> str:
    """``given`` itself if it holds a plus, as every verifier key does; else the content of the file of that name."""
    if "+" in given:
        return given
    with open_regular(given) as file:
        return file.read(KEY_FILE_BYTES_MAX).decode("utf-8", "replace").strip()


def as_of(keyring: Keyring, time: datetime) -> Keyring:
    """``keyring`` as it was at ``time``: a checkpoint that a witness saw before its key was revoked stays valid."""
    time_ms = time.timestamp() * 1000
    keys = [
        replace(key, revoked_from_hlc=None)
        if key.revoked_from_hlc is not None and time_ms < key.revoked_from_hlc.physical_ms
        else key
        for key in keyring
    ]
    return Keyring(keys, keyring.log_verifier_keys)


def opener(keyring: Keyring, origin: str) -> OpenNote:
    """Opens notes of the log ``origin`` with the keys of ``keyring`` as they were at the time of a statement."""
    return lambda note, time: open_checkpoint(note, as_of(keyring, time), origin=origin)


class StoredAnchor(NamedTuple):
    """A stored statement about the checkpoint in ``note``. Of a witness, ``by`` is the verifier key, and its signature
    line is in the note. Of an authority, ``by`` is the address, and ``response`` holds the time stamp. ``size`` and
    ``time`` are unverified, for the report on an invalid statement."""

    kind: Kind
    by: str
    note: str
    size: int
    time: datetime
    response: bytes = b""

    @property
    def name(self) -> str:
        """Name of the witness, or address of the authority."""
        return self.by.partition("+")[0] if self.kind == WITNESS else self.by

    def bundled(self, consistency: Sequence[bytes]) -> BundledAnchor:
        """The form of a bundle or receipt, with the proof that the log still begins with these entries."""
        return BundledAnchor(
            by=self.by,
            checkpoint=self.note,
            consistency=[each.hex() for each in consistency],
            kind=self.kind,
            response=base64.b64encode(self.response).decode(),
            time=rfc3339.written(self.time),
        )

    def unjudged(self, detail: str, status: str = "not_checked") -> Anchor:
        """The statement as not verified, with the reason."""
        return Anchor(self.kind, self.name, rfc3339.written(self.time), self.size, b"", status, detail)


def judge(
    said: StoredAnchor, witnesses: Iterable[WitnessKey], roots: Sequence[x509.Certificate], open_note: OpenNote
) -> Anchor:
    """The statement, verified if it is by one of ``witnesses``, or by an authority that chains to one of ``roots``."""
    try:
        if said.kind == WITNESS:
            (found,) = cosignatures_of(notes.parse(said.note), [each for each in witnesses if each.text() == said.by])
            time = found.time
        elif not roots:
            return said.unjudged("no CA file is given for this authority")
        elif not IS_AVAILABLE:
            return said.unjudged("the package rfc3161-client is not installed")
        else:
            time = open_timestamp(said.response, said.note.encode(), roots)
        checkpoint = open_note(said.note, time)
    except UnknownKeyError as error:
        return said.unjudged(str(error))
    except (SignatureError, ValueError) as error:
        what = "the cosignature does not hold: " if said.kind == WITNESS else ""
        return said.unjudged(f"{what}{error}", "invalid")
    key = said.by if said.kind == WITNESS else ""
    return Anchor(said.kind, said.name, rfc3339.written(time), checkpoint.size, checkpoint.root, key=key)


ANCHORS_MAX: Final = 128


class BundledAnchor(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One statement as the ledger stored it. ``by`` is a witness's verifier key, or an authority's address."""

    by: Annotated[str, Meta(max_length=2048)]
    checkpoint: str
    consistency: Annotated[list[Hash], Meta(max_length=CONSISTENCY_HASHES_MAX)]
    kind: Kind
    response: str
    time: Annotated[str, Meta(max_length=64)]


class _Member(msgspec.Struct, forbid_unknown_fields=True):
    anchors: Annotated[list[BundledAnchor], Meta(min_length=1, max_length=ANCHORS_MAX)]


def encode_anchors(anchors: Iterable[BundledAnchor]) -> bytes:
    """The bytes of the member."""
    return canonical.encode(msgspec.to_builtins(_Member([*anchors])))


def decode_anchors(data: bytes) -> list[BundledAnchor]:
    """The statements in the member, not verified.

    Raises:
        BundleInvalidError: it is malformed, or not in canonical form.
    """
    with reported_as(
        BundleInvalidError, "anchors.json is malformed", msgspec.MsgspecError, UnicodeError, CanonicalError
    ):
        anchors = decode(data, _Member).anchors
        if encode_anchors(anchors) != data:
            raise BundleInvalidError("anchors.json is not in canonical form")
        return anchors


def with_anchors(
    verdict: dict[str, Any],
    anchors: Sequence[BundledAnchor],
    own: Checkpoint,
    keyring: Keyring | None,
    external: ExternalWitnesses,
    to_seq: int | None = None,
) -> dict[str, Any]:
    """``verdict`` on a file, with the statements of external witnesses about its log. ``own`` is the file's checkpoint;
    the keys of ``keyring`` verify the log's signatures. A valid statement that disagrees is a break. The quorum is to
    cover entry ``to_seq``, by default the last of the verdict."""
    results = [judge_bundled(each, own, keyring, external) for each in anchors]
    for anchor in results:
        if anchor.status == "broken":
            assert anchor.detail is not None
            root = own.root.hex() if own.size == anchor.size else None
            verdict = with_break(verdict, rollback(anchor.size, anchor.detail, anchor.root.hex(), root))
    return external.with_quorum({**verdict, "anchors": [each.to_json() for each in results]}, results, to_seq)


def judge_bundled(
    bundled: BundledAnchor, own: Checkpoint, keyring: Keyring | None, external: ExternalWitnesses
) -> Anchor:
    """The statement, verified, and compared with the log of the checkpoint ``own``: ``broken`` if that does not begin
    with what the statement is of."""
    anchor = _judged(bundled, own, keyring, external)
    try:
        if anchor.status == "ok":
            proof = [bytes.fromhex(text) for text in bundled.consistency]
            verify_consistency(anchor.size, own.size, anchor.root, own.root, proof)
    except ProofError as error:
        detail = f"the log does not begin with what the {anchor.kind} anchor by {anchor.by} is of: {error}"
        return anchor._replace(status="broken", detail=detail)
    return anchor


def _judged(bundled: BundledAnchor, own: Checkpoint, keyring: Keyring | None, external: ExternalWitnesses) -> Anchor:
    """The statement, verified; not yet compared with the log."""
    try:
        size = read_checkpoint(bundled.checkpoint).size
        stated = datetime.fromisoformat(bundled.time)
        refuse(SignatureError, (stated.tzinfo is None, "its time has no zone"))
        time = stated.astimezone(UTC)
        response = decode_base64(bundled.response, "the time stamp")
    except (SignatureError, ValueError, OverflowError) as error:
        name = bundled.by.partition("+")[0] if bundled.kind == WITNESS else bundled.by
        return Anchor(bundled.kind, name, bundled.time, 0, b"", "invalid", f"it is malformed: {error}")
    said = StoredAnchor(bundled.kind, bundled.by, bundled.checkpoint, size, time, response)
    if not 1 <= size <= own.size:
        return said.unjudged(f"it covers {size} entries, the checkpoint here {own.size}")
    if keyring is None:
        return said.unjudged("no key was given, so nobody vouches for its checkpoint")
    if said.kind == WITNESS and said.by not in {witness.text() for witness in external.witnesses}:
        return said.unjudged("its key is not among those given with --witness-key or --policy")
    return judge(said, external.witnesses, external.roots, external.pinned(opener(keyring, own.origin)))


# --- time stamps --------------------------------------------------------------------------------------

RESPONSE_BYTES_MAX = 64 * 1024
"""Longest response read; a usual one with its certificates has some five thousand bytes."""
CA_FILE_BYTES_MAX = 4 << 20
IS_AVAILABLE = find_spec("rfc3161_client") is not None

_SHA256 = x509.ObjectIdentifier("2.16.840.1.101.3.4.2.1")
_GRANTED = 0

_INTEGER, _OID, _SEQUENCE, _SET, _CONTEXT_0 = 0x02, 0x06, 0x30, 0x31, 0xA0
_PATH: Final = (
    (_SEQUENCE,),
    (_SEQUENCE, _SEQUENCE),
    (_OID, _CONTEXT_0),
    (_SEQUENCE,),
    (_INTEGER, _SET, _SEQUENCE, _CONTEXT_0),
)
"""At each level the tags up to the element to descend into."""


def require_available() -> None:
    """Raises ConfigurationError if time stamps cannot be made or verified here."""
    if not IS_AVAILABLE:
        raise ConfigurationError("time stamps need the package rfc3161-client: pip install 'tallystick[anchor]'")


def load_authorities(path: Path) -> tuple[x509.Certificate, ...]:
    """The certificates that a chain may end in, from a PEM file.

    Raises:
        ConfigurationError: it cannot be read, or holds no certificate.
    """
    with (
        reported_as(ConfigurationError, f"certificates cannot be read from {path}", OSError),
        reported_as(ConfigurationError, f"{path} holds no PEM certificate", ValueError),
        open_regular(path) as file,
    ):
        return tuple(x509.load_pem_x509_certificates(file.read(CA_FILE_BYTES_MAX)))


def make_request(note: bytes) -> tuple[bytes, int]:
    """A request to stamp ``note`` that asks for the authority's certificates, and the nonce that the answer repeats."""
    from rfc3161_client import HashAlgorithm, TimestampRequestBuilder

    request = TimestampRequestBuilder().data(note).hash_algorithm(HashAlgorithm.SHA256).cert_request(cert_request=True)
    built = request.nonce(nonce=True).build()
    assert built.nonce is not None
    return built.as_bytes(), built.nonce


def open_timestamp(
    response: bytes, note: bytes, authorities: Sequence[x509.Certificate] | None, nonce: int | None = None
) -> datetime:
    """The time at which ``note`` was stamped, once the signature is verified up to one of ``authorities``; it is not
    verified if they are None.

    Certificates inside the response are not trusted; they must have been valid at the stated time.

    Raises:
        SignatureError: malformed, not granted, of other bytes, with another nonce, or the signature is invalid.
    """
    from rfc3161_client import VerificationError, VerifierBuilder, decode_timestamp_response

    digest = hashlib.sha256(note).digest()
    if len(response) > RESPONSE_BYTES_MAX:
        raise SignatureError(f"the time stamp is longer than {RESPONSE_BYTES_MAX} bytes")
    with reported_as(SignatureError, "the time stamp is malformed", ValueError):
        decoded = decode_timestamp_response(with_sorted_certificates(response))
        status = f"status {decoded.status} {decoded.status_string}"[:200]
        refuse(SignatureError, (decoded.status != _GRANTED, f"the authority did not stamp: {status}"))
        info = decoded.tst_info
        stated = (info.message_imprint.hash_algorithm, info.message_imprint.message)
        refuse(
            SignatureError,
            (stated != (_SHA256, digest), "the time stamp is of other bytes"),
            (nonce not in (None, info.nonce), "the time stamp answers another request"),
        )
        time = info.gen_time.astimezone(UTC)
    if authorities is not None:
        with reported_as(SignatureError, "the time stamp does not hold", VerificationError, ValueError):
            VerifierBuilder(roots=list(authorities)).build().verify(decoded, digest)
    return time


def with_sorted_certificates(response: bytes) -> bytes:
    """``response`` with its certificates in DER order, of the same length; malformed input is returned unchanged."""
    content = response
    try:
        for tags in _PATH:
            elements = _elements(content)
            found = [next(elements) for _ in tags]
            if tuple(tag for tag, _, _ in found) != tags:
                return response
            content = found[-1][2]
        certificates = [element for _, element, _ in _elements(content)]
    except (ValueError, StopIteration):
        return response
    return response.replace(content, b"".join(sorted(certificates)), 1)


def _elements(data: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """The DER elements of ``data``: tag, whole element, and its content.

    Raises:
        ValueError: ``data`` is not a sequence of DER elements.
    """
    at = 0
    while at < len(data):
        if len(data) - at < 2:
            raise ValueError("an element without a length")
        length, begin = data[at + 1], at + 2
        if length >= 0x80:
            digits = length & 0x7F
            length, begin = int.from_bytes(data[begin : begin + digits]), begin + digits
        end = begin + length
        if end > len(data):
            raise ValueError("an element that goes on behind its end")
        yield data[at], data[at:end], data[begin:end]
        at = end
