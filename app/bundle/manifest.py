"""The manifest of a bundle: a signed statement of what range it holds and which bytes make it up.

The payload is canonical JSON of an in-toto Statement, in a DSSE envelope that is canonical JSON itself, so each
has one spelling and a reader compares bytes::

    _type          https://in-toto.io/Statement/v1
    subject        one: name "{tenant}/{from_seq}-{to_seq}", digest sha256 over the digests of the parts, in order
    predicateType  https://tallystick.dev/bundle/v1
    predicate      format_version and the fields of Manifest

Invariants::

    entry_count == to_seq - from_seq + 1 == rows of all entry parts      tree_size == to_seq
    snapshot_count == rows of snapshots.ndjson
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from hashlib import sha256
from typing import Any, Final, NamedTuple

from app.bundle.format import FORMAT_VERSION, INTEGER_MAX, SNAPSHOTS, Part, check_parts
from ledger import canonical
from ledger.errors import BundleInvalidError, InvalidInputError, SignatureError
from ledger.hlc import Hlc
from ledger.names import NODE_ID, READABLE_TENANT_ID
from signing import envelope
from signing.envelope import Envelope
from signing.keys import Signer
from signing.snapshot import STATEMENT_TYPE
from signing.strict import parse_json

PREDICATE_TYPE: Final = "https://tallystick.dev/bundle/v1"
CONSISTENCY_HASHES_MAX: Final = 128

_HASH = r"[0-9a-f]{64}"
_PATTERNS: Final = {
    "node_id": re.compile(NODE_ID),
    "log_origin": re.compile(r"[!-*,-~]{1,300}"),
    "tenant_id": re.compile(READABLE_TENANT_ID),
    "to_chain_link": re.compile(_HASH),
    "tree_root": re.compile(_HASH),
}
_COUNTS: Final = ("from_seq", "to_seq", "entry_count", "tree_size")
_HLCS: Final = ("first_hlc", "last_hlc")


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


def open_manifest(data: bytes) -> tuple[Manifest, Envelope]:
    """The manifest in ``data`` and its envelope, whose signatures are not judged.

    Raises:
        BundleInvalidError: malformed, at odds with itself, or of another version.
    """
    try:
        parsed = envelope.parse(parse_json(data, "the manifest"), envelope.PAYLOAD_TYPE)
        if _spelt(parsed) != data:
            raise BundleInvalidError("the manifest's envelope is not in canonical form")
        return _manifest(parsed.payload), parsed
    except (SignatureError, InvalidInputError) as error:
        raise BundleInvalidError(f"the manifest is malformed: {error}") from error


def _spelt(parsed: Envelope) -> bytes:
    """The one spelling of an envelope, so that no byte of it is outside what is compared or signed."""
    signatures = [
        {"keyid": key_id, "sig": base64.b64encode(signature).decode()} for key_id, signature in parsed.signatures
    ]
    payload = base64.b64encode(parsed.payload).decode()
    return canonical.encode({"payload": payload, "payloadType": parsed.payload_type, "signatures": signatures})


def _manifest(payload: bytes) -> Manifest:
    value = parse_json(payload, "the statement")
    predicate = value.get("predicate") if isinstance(value, dict) else None
    if not isinstance(predicate, dict) or predicate.get("format_version") != FORMAT_VERSION:
        raise BundleInvalidError(f"the manifest is not one of a bundle of version {FORMAT_VERSION}")
    manifest = _checked(predicate)
    if statement(manifest) != payload:
        raise BundleInvalidError("the manifest's statement is not in canonical form, or its subject is another")
    return manifest


def _checked(predicate: Mapping[str, Any]) -> Manifest:
    for name, pattern in _PATTERNS.items():
        text = predicate.get(name)
        if not isinstance(text, str) or not pattern.fullmatch(text):
            raise BundleInvalidError(f"{name} of the manifest is missing or malformed")
    for name in _COUNTS:
        _check_integer(predicate, name, least=1)
    _check_integer(predicate, "snapshot_count", least=0)
    for name in _HLCS:
        if not isinstance(predicate.get(name), str):
            raise BundleInvalidError(f"{name} of the manifest is missing or malformed")
        Hlc.parse(predicate[name])
    hashes, items = predicate.get("consistency"), predicate.get("parts")
    if not isinstance(hashes, list) or len(hashes) > CONSISTENCY_HASHES_MAX:
        raise BundleInvalidError("consistency of the manifest is missing or too long")
    if not all(isinstance(text, str) and re.fullmatch(_HASH, text) for text in hashes):
        raise BundleInvalidError("consistency of the manifest is malformed")
    if not isinstance(items, list):
        raise BundleInvalidError("parts of the manifest are missing")
    parts = tuple(map(_part, items))
    manifest = Manifest(
        **{name: predicate[name] for name in Manifest._fields if name not in ("consistency", "parts")},
        consistency=tuple(hashes),
        parts=parts,
    )
    _check_counts(manifest)
    return manifest


def _part(item: object) -> Part:
    if not isinstance(item, dict):
        raise BundleInvalidError("a part of the manifest is not a JSON object")
    name, digest = item.get("name"), item.get("sha256")
    if not isinstance(name, str) or not isinstance(digest, str) or not re.fullmatch(_HASH, digest):
        raise BundleInvalidError("a part of the manifest has no name or digest")
    for count in ("bytes", "raw_bytes", "rows"):
        _check_integer(item, count, least=0)
    return Part(name, digest, item["bytes"], item["raw_bytes"], item["rows"])


def _check_integer(value: Mapping[str, Any], name: str, *, least: int) -> None:
    number = value.get(name)
    if type(number) is not int or not least <= number <= INTEGER_MAX:
        raise BundleInvalidError(f"{name} of the manifest is missing or not an integer from {least} on")


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
