"""Batch snapshots: signed statements of what a range of a tenant's chain holds.

The payload is an in-toto Statement (:mod:`signing.statement`) of type ``https://tallystick.dev/batch-snapshot/v1``; its
digest is the Merkle root of the range, its predicate the fields of ``SnapshotClaim``. It stands in a DSSE envelope.
Invariants: those of ``SnapshotClaim``; subject and predicate agree.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from ledger.errors import InvalidInputError, SignatureError, UnknownKeyError
from ledger.hlc import Hlc
from ledger.verification.snapshot_check import SnapshotClaim
from signing import envelope
from signing import statement as statements
from signing.keys import Keyring, Signer
from signing.statement import Hash, HlcText, NodeId, Seq, TenantId
from signing.strict import parse_json

PREDICATE_TYPE = "https://tallystick.dev/batch-snapshot/v1"

SignatureVerdict = Literal["ok", "broken", "unknown_key", "not_checked"]


class _Predicate(msgspec.Struct):
    """What the fields of ``SnapshotClaim`` may hold; others are ignored."""

    tenant_id: TenantId
    from_seq: Seq
    to_seq: Seq
    from_chain_link: Hash
    to_chain_link: Hash
    entry_count: Seq
    merkle_root: Hash
    tree_size: Seq
    tree_root: Hash
    snapshot_hlc: HlcText
    previous_snapshot: Hash | None
    node_id: NodeId
    key_id: Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]


assert _Predicate.__struct_fields__ == SnapshotClaim._fields


class _Statement(msgspec.Struct):
    type_: Literal["https://in-toto.io/Statement/v1"] = msgspec.field(name="_type")
    subject: Any
    predicate_type: Literal["https://tallystick.dev/batch-snapshot/v1"] = msgspec.field(name="predicateType")
    predicate: dict[str, Any]


class OpenedSnapshot(NamedTuple):
    """What a stored snapshot says and whether it was said by a key that is held.

    ``verdict``: ``ok``; ``broken``, a held key's signature does not hold; ``unknown_key``, no held key
    signed, or one revoked or outside its window; ``not_checked``, no ring was given. ``detail`` says why
    it is not ``ok``; the claim is then what somebody wrote, no more.
    """

    claim: SnapshotClaim
    payload_sha256: str
    verdict: SignatureVerdict
    detail: str | None


def statement(claim: SnapshotClaim) -> bytes:
    """The bytes that are signed for ``claim``: an in-toto Statement in canonical JSON.

    Raises:
        InvalidInputError: ``claim`` breaks an invariant.
    """
    try:
        _check(claim._asdict())
    except SignatureError as error:
        raise InvalidInputError(f"this snapshot cannot be signed: {error}") from error
    return statements.encode(_subject(claim), PREDICATE_TYPE, claim._asdict())


def sign_snapshot(claim: SnapshotClaim, signer: Signer) -> tuple[dict[str, object], str]:
    """The DSSE envelope of ``claim``, as JSON values, and SHA-256 of its payload in hex.

    That digest is what the next snapshot names as ``previous_snapshot``.

    Raises:
        InvalidInputError: ``claim`` breaks an invariant or names another key than the signer's.
        SigningUnavailableError: the signer cannot be reached.
    """
    if claim.key_id != signer.key_id:
        raise InvalidInputError(f"the snapshot names key {claim.key_id}, but {signer.key_id} would sign it")
    payload = statement(claim)
    return envelope.sign(payload, signer), hashlib.sha256(payload).hexdigest()


def open_snapshot(envelope_json: str, keyring: Keyring | None) -> OpenedSnapshot:
    """Read a stored snapshot and judge its signature; without a ring it is ``not_checked``.

    Raises:
        SignatureError: malformed: not an envelope, not a statement of this kind, or at odds with itself.
    """
    # 1. The envelope is well-formed and holds an in-toto payload.
    parsed = envelope.parse(parse_json(envelope_json, "the envelope"), envelope.PAYLOAD_TYPE)
    # 2. The payload is one batch snapshot that agrees with itself.
    claim = _claim(parsed.payload)
    # 3. A held key signed it, and held at that HLC.
    verdict, detail = _judge(parsed, claim, keyring)
    return OpenedSnapshot(claim, hashlib.sha256(parsed.payload).hexdigest(), verdict, detail)


def _judge(
    parsed: envelope.Envelope, claim: SnapshotClaim, keyring: Keyring | None
) -> tuple[SignatureVerdict, str | None]:
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
    refusals = [key.refusal(Hlc.parse(claim.snapshot_hlc)) for key in signers]
    if None in refusals:
        return "ok", None
    return "unknown_key", "; ".join(filter(None, refusals))


def _claim(payload: bytes) -> SnapshotClaim:
    try:
        said = msgspec.convert(parse_json(payload, "the statement"), _Statement)
    except msgspec.ValidationError as error:
        raise SignatureError(f"the statement is not one of a snapshot: {error}") from error
    claim = _check(said.predicate)
    if said.subject != _subject(claim):
        raise SignatureError("subject of the statement is not what its predicate says")
    return claim


def _subject(claim: SnapshotClaim) -> list[dict[str, object]]:
    return statements.subject_of(claim.tenant_id, claim.from_seq, claim.to_seq, claim.merkle_root)


def _check(predicate: dict[str, Any]) -> SnapshotClaim:
    """The claim in a predicate, its fields well-formed and its invariants kept."""
    try:
        claim = SnapshotClaim._make(msgspec.structs.astuple(msgspec.convert(predicate, _Predicate)))
        Hlc.parse(claim.snapshot_hlc)
    except (msgspec.ValidationError, InvalidInputError) as error:
        raise SignatureError(f"the predicate of the snapshot is malformed: {error}") from error
    if claim.to_seq - claim.from_seq + 1 != claim.entry_count:
        raise SignatureError("entry_count of the snapshot is not the size of its range")
    if claim.tree_size != claim.to_seq:
        raise SignatureError("tree_size of the snapshot is not its to_seq")
    if (claim.from_seq == 1) != (claim.previous_snapshot is None):
        raise SignatureError("only the snapshot that begins at seq 1 has no previous_snapshot")
    return claim
