"""Batch snapshots: signed statements of what a range of a tenant's chain holds.

The payload is canonical JSON of an in-toto Statement (github.com/in-toto/attestation, spec/v1/statement.md)::

    _type          https://in-toto.io/Statement/v1
    subject        one: name "{tenant}/{from_seq}-{to_seq}", digest sha256 = Merkle root of the range
    predicateType  https://tallystick.dev/batch-snapshot/v1
    predicate      the fields of SnapshotClaim

and stands in a DSSE envelope. Invariants: those of ``SnapshotClaim``; subject and predicate agree.
"""

from __future__ import annotations

import hashlib
import re
from typing import Literal, NamedTuple

from ledger import canonical
from ledger.canonical import INTEGER_MAX
from ledger.errors import InvalidInputError, SignatureError, UnknownKeyError
from ledger.hlc import Hlc
from ledger.names import NODE_ID, READABLE_TENANT_ID
from ledger.verification.snapshot import SnapshotClaim
from signing import envelope
from signing.keys import Keyring, Signer
from signing.strict import parse_json

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://tallystick.dev/batch-snapshot/v1"

SignatureVerdict = Literal["ok", "broken", "unknown_key", "not_checked"]

_DIGEST = re.compile(r"[0-9a-f]{64}")
_PATTERNS = {
    "tenant_id": re.compile(READABLE_TENANT_ID),
    "from_chain_link": _DIGEST,
    "to_chain_link": _DIGEST,
    "merkle_root": _DIGEST,
    "tree_root": _DIGEST,
    "snapshot_hlc": re.compile(r".{1,128}"),
    "node_id": re.compile(NODE_ID),
    "key_id": re.compile(r"[0-9a-f]{16}"),
}
_INTEGERS = ("from_seq", "to_seq", "entry_count", "tree_size")

assert {*_PATTERNS, *_INTEGERS, "previous_snapshot"} == set(SnapshotClaim._fields)


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
    return canonical.encode(
        {
            "_type": STATEMENT_TYPE,
            "subject": [_subject(claim)],
            "predicateType": PREDICATE_TYPE,
            "predicate": claim._asdict(),
        }
    )


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
    value = parse_json(payload, "the statement")
    if not isinstance(value, dict):
        raise SignatureError("the statement is not a JSON object")
    if value.get("_type") != STATEMENT_TYPE:
        raise SignatureError(f"_type of the statement is not {STATEMENT_TYPE}")
    if value.get("predicateType") != PREDICATE_TYPE:
        raise SignatureError(f"predicateType of the statement is not {PREDICATE_TYPE}")
    predicate = value.get("predicate")
    if not isinstance(predicate, dict):
        raise SignatureError("predicate of the statement is not a JSON object")
    claim = _check(predicate)
    if value.get("subject") != [_subject(claim)]:
        raise SignatureError("subject of the statement is not what its predicate says")
    return claim


def _subject(claim: SnapshotClaim) -> dict[str, object]:
    name = f"{claim.tenant_id}/{claim.from_seq}-{claim.to_seq}"
    return {"name": name, "digest": {"sha256": claim.merkle_root}}


def _check(predicate: dict[str, object]) -> SnapshotClaim:
    """The claim in a predicate, its fields well-formed and its invariants kept; other fields are ignored."""
    for name, pattern in _PATTERNS.items():
        text = predicate.get(name)
        if not isinstance(text, str) or not pattern.fullmatch(text):
            raise SignatureError(f"{name} of the snapshot is missing or malformed")
    for name in _INTEGERS:
        number = predicate.get(name)
        if type(number) is not int or not 1 <= number <= INTEGER_MAX:
            raise SignatureError(f"{name} of the snapshot is missing or not a positive integer")
    previous = predicate.get("previous_snapshot", "")
    if previous is not None and not (isinstance(previous, str) and _DIGEST.fullmatch(previous)):
        raise SignatureError("previous_snapshot of the snapshot is missing or malformed")
    try:
        Hlc.parse(str(predicate["snapshot_hlc"]))
    except InvalidInputError as error:
        raise SignatureError(f"snapshot_hlc of the snapshot: {error}") from error
    claim = SnapshotClaim._make(predicate[name] for name in SnapshotClaim._fields)
    if claim.to_seq - claim.from_seq + 1 != claim.entry_count:
        raise SignatureError("entry_count of the snapshot is not the size of its range")
    if claim.tree_size != claim.to_seq:
        raise SignatureError("tree_size of the snapshot is not its to_seq")
    if (claim.from_seq == 1) != (claim.previous_snapshot is None):
        raise SignatureError("only the snapshot that begins at seq 1 has no previous_snapshot")
    return claim
