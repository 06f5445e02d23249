"""Batch snapshots: signed statements about the entries of a range of a tenant's chain.

The payload of the DSSE envelope is an in-toto Statement (:mod:`signing.manifest`) of type
``https://tallystick.dev/batch-snapshot/v1``. Its digest is the Merkle root of the range, its predicate the fields of
``SnapshotClaim``.
Invariants: those of ``SnapshotClaim``; subject and predicate agree.

A node with a second key signs with both; ``key_id`` of the claim is the first.

In a bundle a snapshot is one line: an object of canonical JSON (RFC 8785) and a newline.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec import UnsetType

from ledger import canonical
from ledger.decoding import convert
from ledger.errors import (
    BundleInvalidError,
    InvalidInputError,
    LedgerError,
    SignatureError,
    UnknownKeyError,
    refuse,
    reported_as,
)
from ledger.hlc import Hlc
from ledger.job_index import begin_behind
from ledger.verification.snapshot_check import LACKS_ONE, SNAPSHOT_COLUMNS, OpenedSnapshot, SnapshotClaim
from signing import envelope
from signing.keys import Keyring, Signer
from signing.manifest import STATEMENT_TYPE, encode, range_name
from signing.strict import parse_json

PREDICATE_TYPE = "https://tallystick.dev/batch-snapshot/v1"


def statement(claim: SnapshotClaim) -> bytes:
    """The bytes that are signed for ``claim``: an in-toto Statement in canonical JSON.

    Raises:
        InvalidInputError: ``claim`` breaks an invariant.
    """
    with reported_as(InvalidInputError, "this snapshot cannot be signed", SignatureError):
        _check(msgspec.to_builtins(claim))
    name = range_name(claim.tenant_id, claim.from_seq, claim.to_seq)
    return encode(name, claim.merkle_root, PREDICATE_TYPE, msgspec.to_builtins(claim))


def sign_snapshot(claim: SnapshotClaim, signer: Signer, *more: Signer) -> tuple[dict[str, object], str]:
    """The DSSE envelope of ``claim``, signed by ``signer`` and ``more``, as JSON values, and SHA-256 of its payload in
    hex.

    The next snapshot names that digest as ``previous_snapshot``.

    Raises:
        InvalidInputError: ``claim`` breaks an invariant or names another key than the signer's.
        SigningUnavailableError: a signer cannot be reached.
    """
    if claim.key_id != signer.key_id:
        raise InvalidInputError(f"the snapshot names key {claim.key_id}, but {signer.key_id} would sign it")
    payload = statement(claim)
    return envelope.sign(payload, signer, *more), hashlib.sha256(payload).hexdigest()


def open_snapshot(envelope_json: str, keyring: Keyring | None) -> OpenedSnapshot:
    """Parse a stored snapshot and verify its signature; without a ring it is ``not_checked``.

    Raises:
        SignatureError: malformed: not an envelope, not a statement of this kind, or contradicting itself.
    """
    # 1. The envelope is well-formed and holds an in-toto payload.
    parsed = envelope.parse(parse_json(envelope_json, "the envelope"), envelope.PAYLOAD_TYPE)
    # 2. The payload is a batch snapshot that is consistent in itself.
    claim = _claim(parsed.payload)
    # 3. A held key signed it and was valid at that HLC; a first and a second one, if the ring demands both.
    verdict, detail = _judge(parsed, claim, keyring)
    return OpenedSnapshot(claim, hashlib.sha256(parsed.payload).hexdigest(), verdict, detail)


def payload_of(envelope_json: str | None) -> bytes:
    """The payload in the envelope of a snapshot, empty if there is none."""
    try:
        return envelope.parse(parse_json(envelope_json or "", "the envelope"), envelope.PAYLOAD_TYPE).payload
    except (SignatureError, InvalidInputError):
        return b""


def _judge(parsed: envelope.Envelope, claim: SnapshotClaim, keyring: Keyring | None) -> tuple[str, str | None]:
    if keyring is None:
        return "not_checked", "no key was given to check the signature with"
    try:
        signers = envelope.signers_of(parsed, keyring)
    except UnknownKeyError as error:
        return "unknown_key", str(error)
    except SignatureError as error:
        return "broken", str(error)
    if keyring.get(claim.key_id) is not None and claim.key_id not in {key.key_id for key in signers}:
        return "broken", f"it says that key {claim.key_id} signed it, which did not"
    hlc = Hlc.parse(claim.snapshot_hlc)
    valid = [key for key in signers if key.refusal(hlc) is None]
    if not valid:
        return "unknown_key", "; ".join(filter(None, (key.refusal(hlc) for key in signers)))
    return ("ok", None) if (lacking := keyring.lacks(valid)) is None else (LACKS_ONE, lacking)


def _claim(payload: bytes) -> SnapshotClaim:
    found = parse_json(payload, "the statement")
    if not isinstance(found, dict):
        raise SignatureError("the statement is not a JSON object")
    for field, expected in (("_type", STATEMENT_TYPE), ("predicateType", PREDICATE_TYPE)):
        if found.get(field) != expected:
            raise SignatureError(f"{field} of the statement is not {expected}, as a snapshot's is")
    claim = _check(found.get("predicate"))
    name = range_name(claim.tenant_id, claim.from_seq, claim.to_seq)
    if found.get("subject") != [{"name": name, "digest": {"sha256": claim.merkle_root}}]:
        raise SignatureError("subject of the statement is not what its predicate says")
    return claim


def _check(predicate: object) -> SnapshotClaim:
    """The claim in a predicate, its fields well-formed and its invariants kept."""
    with reported_as(
        SignatureError, "the predicate of the snapshot is malformed", msgspec.ValidationError, InvalidInputError
    ):
        claim = convert(predicate, SnapshotClaim)
        Hlc.parse(claim.snapshot_hlc)
    runs = None if isinstance(claim.job_index, UnsetType) else len(claim.job_index)
    begin, is_said = claim.index_begin, not isinstance(claim.job_index_from, UnsetType)
    is_begin_right = not is_said or (runs is not None and 0 < begin == begin_behind(begin) < claim.to_seq)
    size, has_previous = claim.to_seq - claim.from_seq + 1, claim.previous_snapshot is not None
    refuse(
        SignatureError,
        (claim.entry_count != size, "entry_count of the snapshot is not the size of its range"),
        (claim.tree_size != claim.to_seq, "tree_size of the snapshot is not its to_seq"),
        (
            runs not in (None, len(claim.index_places)),
            "job_index of the snapshot has not the number of runs that its to_seq needs",
        ),
        (
            not is_begin_right,
            "job_index_from of the snapshot is not behind a full block below its to_seq, or without job_index",
        ),
        ((claim.from_seq == 1) == has_previous, "only the snapshot that begins at seq 1 has no previous_snapshot"),
    )
    return claim


FROM_SEQ, TO_SEQ, SNAPSHOT_HLC, ENVELOPE = map(
    SNAPSHOT_COLUMNS.index, ("from_seq", "to_seq", "snapshot_hlc", "dsse_envelope")
)
"""Positions of these columns in a row of ``SNAPSHOT_COLUMNS``."""

_FIELDS: Final = frozenset((*SNAPSHOT_COLUMNS, "tenant_id"))
_INTEGERS: Final = ("from_seq", "to_seq", "entry_count")


def encode_snapshot(tenant_id: str, row: Sequence[Any]) -> bytes:
    """The line of one snapshot, in the order of ``SNAPSHOT_COLUMNS``; the envelope becomes an object, or null.

    Raises:
        SignatureError: the stored envelope is not unambiguous JSON.
    """
    named = dict(zip(SNAPSHOT_COLUMNS, row, strict=True))
    if named["dsse_envelope"] is not None:
        named["dsse_envelope"] = parse_json(named["dsse_envelope"], "the envelope of a snapshot")
    return canonical.encode({**named, "tenant_id": tenant_id}) + b"\n"


def encode_as_stored(tenant_id: str, row: Sequence[Any]) -> bytes:
    """The line of one snapshot of a broken chain with any column values; a value without a canonical form becomes
    text."""
    try:
        return encode_snapshot(tenant_id, row)
    except (LedgerError, TypeError, ValueError):
        stored = {
            name: None if value is None else str(value) for name, value in zip(SNAPSHOT_COLUMNS, row, strict=True)
        }
        return msgspec.json.encode({"tenant_id": tenant_id, **stored}) + b"\n"


def decode_snapshot(line: bytes, tenant_id: str) -> tuple[Any, ...]:
    """The snapshot in a line without its newline, in the order of ``SNAPSHOT_COLUMNS``; the envelope is text, or None.

    Raises:
        BundleInvalidError: not the canonical line of a snapshot of this tenant.
    """
    with reported_as(BundleInvalidError, "a row is not one of a snapshot", SignatureError, InvalidInputError):
        value = parse_json(line, "a row")
        if not isinstance(value, dict) or value.keys() != _FIELDS or canonical.encode(value) != line:
            raise BundleInvalidError("a row of a snapshot is not of its form in canonical JSON")
    if value["tenant_id"] != tenant_id:
        raise BundleInvalidError("a snapshot belongs to another tenant")
    is_signed = value["dsse_envelope"] is not None
    for name in SNAPSHOT_COLUMNS if is_signed else SNAPSHOT_COLUMNS[:-1]:
        kind: type = int if name in _INTEGERS else dict if name == "dsse_envelope" else str
        if type(value[name]) is not kind or (kind is int and value[name] < 1):
            raise BundleInvalidError(f"{name} of a snapshot is malformed")
    value["dsse_envelope"] = canonical.encode(value["dsse_envelope"]).decode() if is_signed else None
    return tuple(value[name] for name in SNAPSHOT_COLUMNS)
