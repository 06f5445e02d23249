"""The manifest of a bundle: a signed statement of what range it holds and which bytes make it up.

The payload is canonical JSON of an in-toto Statement, in a DSSE envelope that is canonical JSON itself and has exactly
one signature, so each has one spelling and a reader compares bytes::

    _type          https://in-toto.io/Statement/v1
    subject        one: name "{tenant}/{from_seq}-{to_seq}", digest sha256 over the digests of the parts, in order
    predicateType  https://tallystick.dev/bundle/v1
    predicate      format_version and the fields of Manifest

Invariants::

    entry_count == to_seq - from_seq + 1 == rows of all entry parts      tree_size == to_seq
    snapshot_count == rows of snapshots.ndjson
"""

from __future__ import annotations

import re
from hashlib import sha256
from typing import Annotated, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta

from ledger import canonical
from ledger.bundle.format import FORMAT_VERSION, INTEGER_MAX, SNAPSHOTS, Part, check_parts
from ledger.errors import BundleInvalidError, BundleSignatureError, InvalidInputError, SignatureError, UnknownKeyError
from ledger.hlc import Hlc
from ledger.names import NODE_ID, READABLE_TENANT_ID
from signing import envelope
from signing.envelope import PAYLOAD_BYTES_MAX, PAYLOAD_TYPE, Envelope, EnvelopeSignature
from signing.keys import Keyring, Signer
from signing.snapshot import STATEMENT_TYPE
from signing.strict import decode_base64

PREDICATE_TYPE: Final = "https://tallystick.dev/bundle/v1"
CONSISTENCY_HASHES_MAX: Final = 128
LOG_ORIGIN: Final = r"[!-*,-~]{1,300}"
"""What a log's origin may be, without ``/`` and the tenant, as a regular expression: no space, no plus."""
HLC_CHARACTERS_MAX: Final = 200

_HEAD: Final = b'{"payload":"'
_TAIL: Final = re.compile(
    rb'","payloadType":"%b","signatures":\[\{"keyid":"([0-9a-f]{16})","sig":"([A-Za-z0-9+/]{2,254}={0,2})"\}\]\}'
    % re.escape(PAYLOAD_TYPE).encode()
)
"""What stands behind the payload: there is no other spelling, so nothing has to be parsed to refuse one."""

_Hash = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
_HlcText = Annotated[str, Meta(max_length=HLC_CHARACTERS_MAX)]
_Count = Annotated[int, Meta(ge=0, le=INTEGER_MAX)]
_Seq = Annotated[int, Meta(ge=1, le=INTEGER_MAX)]


class Manifest(NamedTuple):
    """What a bundle says it is. Links, roots and digests are lowercase hex."""

    node_id: str
    """The node that exported it."""
    log_origin: str
    """With ``/`` and the tenant the origin of the tenant's log, as in its checkpoints."""
    tenant_id: str
    from_seq: int
    to_seq: int
    first_hlc: str
    last_hlc: str
    """HLCs of the first and the last entry; neither need be the lowest or highest."""
    to_chain_link: str
    """Chain link of the last entry."""
    entry_count: int
    snapshot_count: int
    tree_size: int
    tree_root: str
    """Root of the tenant's whole tree at ``to_seq``."""
    consistency: tuple[str, ...]
    """Proof that the tree of the checkpoint extends that of ``tree_size``; empty when they have one size."""
    parts: tuple[Part, ...]

    @property
    def origin(self) -> str:
        """Origin of the tenant's log."""
        return f"{self.log_origin}/{self.tenant_id}"

    @property
    def entry_parts(self) -> tuple[Part, ...]:
        """The parts that hold entries."""
        return self.parts[:-3]


def statement(manifest: Manifest) -> bytes:
    """The bytes that are signed for ``manifest``.

    Raises:
        CanonicalError: a field has no canonical form, such as an integer beyond 2^53 - 1.
    """
    predicate: dict[str, object] = {
        **manifest._asdict(),
        "format_version": FORMAT_VERSION,
        "consistency": list(manifest.consistency),
        "parts": [part._asdict() for part in manifest.parts],
    }
    return canonical.encode(
        {
            "_type": STATEMENT_TYPE,
            "subject": [_subject(manifest)],
            "predicateType": PREDICATE_TYPE,
            "predicate": predicate,
        }
    )


def sign(manifest: Manifest, signer: Signer) -> bytes:
    """The bytes of ``manifest.dsse.json``.

    Raises:
        SigningUnavailableError: the signer cannot be reached.
    """
    return canonical.encode(envelope.sign(statement(manifest), signer))


def open_envelope(data: bytes) -> Envelope:
    """The envelope in ``data``, bounded and in its one spelling; nothing of it is judged, nor its payload parsed.

    Raises:
        BundleInvalidError: it is another text.
    """
    end = data.find(b'"', len(_HEAD))
    tail = _TAIL.fullmatch(data, end) if end >= 0 and data.startswith(_HEAD) else None
    if tail is None:
        raise BundleInvalidError("the manifest is not an envelope in canonical form with exactly one signature")
    if end - len(_HEAD) > PAYLOAD_BYTES_MAX * 4 // 3 + 4:
        raise BundleInvalidError(f"the manifest's payload is over {PAYLOAD_BYTES_MAX} bytes")
    try:
        payload = decode_base64(data[len(_HEAD) : end].decode("latin-1"), "payload")
        signature = decode_base64(tail[2].decode(), "sig")
    except SignatureError as error:
        raise BundleInvalidError(f"the manifest is malformed: {error}") from error
    return Envelope(PAYLOAD_TYPE, payload, (EnvelopeSignature(tail[1].decode(), signature),))


class Signed(NamedTuple):
    """Who signed a manifest. ``verdict`` is ``ok``, ``unknown_key``, or ``not_checked`` without keys."""

    verdict: str
    detail: str | None
    """Why it is not ok."""
    key_ids: tuple[str, ...]
    """Held keys whose signature holds."""


def judge(opened: Envelope, keyring: Keyring | None) -> Signed:
    """Who signed, by the keys of ``keyring``.

    Raises:
        BundleSignatureError: a held key is named that did not sign it.
    """
    if keyring is None:
        return Signed("not_checked", None, ())
    try:
        signers = envelope.signers_of(opened, keyring)
    except UnknownKeyError as error:
        return Signed("unknown_key", str(error), ())
    except SignatureError as error:
        raise BundleSignatureError(f"the manifest's signature does not hold: {error}") from error
    key_ids = tuple(key.key_id for key in signers)
    revoked = [key for key in signers if key.revoked_from_hlc is not None]
    if len(revoked) == len(signers):
        why = f"key {revoked[0].key_id} is revoked from HLC {revoked[0].revoked_from_hlc} on"
        return Signed("unknown_key", why, key_ids)
    return Signed("ok", None, key_ids)


class _PartItem(msgspec.Struct, forbid_unknown_fields=True):
    bytes: _Count
    name: Annotated[str, Meta(max_length=100)]
    raw_bytes: _Count
    rows: _Count
    sha256: _Hash


class _Predicate(msgspec.Struct, forbid_unknown_fields=True):
    format_version: Literal[1]
    node_id: Annotated[str, Meta(pattern=rf"^(?:{NODE_ID})\Z")]
    log_origin: Annotated[str, Meta(pattern=rf"^{LOG_ORIGIN}\Z")]
    tenant_id: Annotated[str, Meta(pattern=rf"^(?:{READABLE_TENANT_ID})\Z")]
    from_seq: _Seq
    to_seq: _Seq
    first_hlc: _HlcText
    last_hlc: _HlcText
    to_chain_link: _Hash
    entry_count: _Seq
    snapshot_count: _Count
    tree_size: _Seq
    tree_root: _Hash
    consistency: Annotated[list[_Hash], Meta(max_length=CONSISTENCY_HASHES_MAX)]
    parts: list[_PartItem]


class _Digest(msgspec.Struct, forbid_unknown_fields=True):
    sha256: _Hash


class _Subject(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, Meta(max_length=200)]
    digest: _Digest


class _Statement(msgspec.Struct, forbid_unknown_fields=True):
    type_: Annotated[str, Meta(max_length=200)] = msgspec.field(name="_type")
    subject: tuple[_Subject]
    predicate_type: Annotated[str, Meta(max_length=200)] = msgspec.field(name="predicateType")
    predicate: _Predicate


_decode = msgspec.json.Decoder(_Statement).decode


def read_manifest(payload: bytes) -> Manifest:
    """The manifest that the payload of an envelope is.

    Raises:
        BundleInvalidError: malformed, at odds with itself, or of another version.
    """
    try:
        said = _decode(payload).predicate
        for hlc in (said.first_hlc, said.last_hlc):
            Hlc.parse(hlc)
    except (msgspec.MsgspecError, UnicodeError, InvalidInputError) as error:
        raise BundleInvalidError(f"the manifest is malformed, or not of version {FORMAT_VERSION}: {error}") from error
    manifest = Manifest(
        **{name: getattr(said, name) for name in Manifest._fields if name not in ("consistency", "parts")},
        consistency=tuple(said.consistency),
        parts=tuple(Part(item.name, item.sha256, item.bytes, item.raw_bytes, item.rows) for item in said.parts),
    )
    _check_counts(manifest)
    if statement(manifest) != payload:
        raise BundleInvalidError("the manifest's statement is not in canonical form, or its subject is another")
    return manifest


def _check_counts(manifest: Manifest) -> None:
    check_parts(manifest.parts)
    rows = sum(part.rows for part in manifest.entry_parts)
    if not manifest.to_seq - manifest.from_seq + 1 == manifest.entry_count == rows:
        raise BundleInvalidError("range, entry_count and rows of the manifest do not agree")
    snapshot_rows = sum(part.rows for part in manifest.parts if part.name == SNAPSHOTS)
    if manifest.snapshot_count != snapshot_rows:
        raise BundleInvalidError("snapshot_count of the manifest is not the number of rows of its part")
    if manifest.tree_size != manifest.to_seq:
        raise BundleInvalidError("tree_size of the manifest is not its to_seq")


def _subject(manifest: Manifest) -> dict[str, object]:
    digest = sha256(b"".join(bytes.fromhex(part.sha256) for part in manifest.parts)).hexdigest()
    return {"name": f"{manifest.tenant_id}/{manifest.from_seq}-{manifest.to_seq}", "digest": {"sha256": digest}}
