"""Batch snapshots: judged by the in-toto package, by their keys' windows, and after every possible flip."""

import base64
import hashlib
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import google.protobuf.json_format as protobuf_json
import in_toto_attestation.v1.statement_pb2 as statement_pb2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from in_toto_attestation.v1.statement import Statement

from ledger import canonical
from ledger.errors import InvalidInputError, SignatureError
from ledger.hlc import Hlc
from ledger.verification.snapshot_check import SnapshotClaim
from signing import envelope
from signing.keys import Keyring, PublicKey
from signing.private_keys import FileSigner
from signing.snapshot import open_snapshot, sign_snapshot, statement
from tests.conftest import spread

HLC_MS = 1704931200000
HLC_TIME = datetime.fromtimestamp(HLC_MS / 1000, UTC)

ClaimOf = Callable[..., SnapshotClaim]


def stored(claim: SnapshotClaim, signer: FileSigner) -> str:
    return json.dumps(sign_snapshot(claim, signer)[0])


def stored_statement(value: object, signer: FileSigner) -> str:
    payload = value if isinstance(value, bytes) else json.dumps(value).encode()
    return json.dumps(envelope.sign(payload, signer))


def ring(*keys: FileSigner | PublicKey) -> Keyring:
    return Keyring(key if isinstance(key, PublicKey) else key.public_key for key in keys)


# What is signed


def test_in_toto_attestation_validates_our_statements(signer: FileSigner, claim_of: ClaimOf) -> None:
    for claim in (
        claim_of(signer),
        claim_of(signer, tenant_id="_system", from_seq=1, entry_count=1003, previous_snapshot=None),
    ):
        judged = protobuf_json.Parse(statement(claim), statement_pb2.Statement())
        Statement.copy_from_pb(judged).validate()
        assert judged.subject[0].name == f"{claim.tenant_id}/{claim.from_seq}-1003"
        assert judged.subject[0].digest == {"sha256": claim.merkle_root}
        assert judged.predicate["to_seq"] == 1003


def test_a_statement_is_canonical_json(ed25519_signer: FileSigner, claim_of: ClaimOf) -> None:
    payload = statement(claim_of(ed25519_signer))
    assert canonical.encode(json.loads(payload)) == payload


def test_a_snapshot_opens_as_what_was_signed(signer: FileSigner, claim_of: ClaimOf) -> None:
    made, digest = sign_snapshot(claim_of(signer), signer)
    opened = open_snapshot(json.dumps(made), ring(signer))
    assert opened == (claim_of(signer), digest, "ok", None)
    assert digest == hashlib.sha256(base64.b64decode(str(made["payload"]))).hexdigest()
    assert envelope.verify(made, ring(signer)) == statement(claim_of(signer))


def test_a_snapshot_names_the_key_that_signs_it(
    ed25519_signer: FileSigner, other_signer: FileSigner, claim_of: ClaimOf
) -> None:
    with pytest.raises(InvalidInputError, match=ed25519_signer.key_id):
        sign_snapshot(claim_of(ed25519_signer), other_signer)


BROKEN_CLAIMS = [
    {"tenant_id": "Acme"},
    {"tenant_id": "a/b"},
    {"from_seq": 0},
    {"from_seq": 1002},
    {"from_seq": 1001.0},
    {"from_seq": True},
    {"to_seq": 1002},
    {"entry_count": 2},
    {"entry_count": "3"},
    {"tree_size": 1004},
    {"tree_size": 2**53},
    {"from_chain_link": "0A" * 32},
    {"to_chain_link": "0b" * 31},
    {"merkle_root": None},
    {"tree_root": "0d" * 32 + "\n"},
    {"snapshot_hlc": "1704931200000:7"},
    {"snapshot_hlc": f"{2**63}:7:node"},
    {"previous_snapshot": None},
    {"previous_snapshot": ""},
    {"from_seq": 1, "entry_count": 1003},
    {"node_id": ""},
    {"key_id": "0" * 15},
    {"job_index": None},
    {"job_index": "0f" * 32},
    {"job_index": []},
    {"job_index": ["0F" * 32]},
    {"job_index": ["0f" * 32] * 2},
    {"job_index_from": 1},
    {"job_index_from": 2},
    {"job_index_from": 1025},
    {"job_index_from": "1025"},
]


@pytest.mark.parametrize("changes", BROKEN_CLAIMS)
def test_a_claim_that_breaks_an_invariant_is_not_signed(
    ed25519_signer: FileSigner, claim_of: ClaimOf, changes: dict[str, object]
) -> None:
    with pytest.raises(InvalidInputError):
        statement(claim_of(ed25519_signer, **changes))


@pytest.mark.parametrize("changes", BROKEN_CLAIMS)
def test_a_claim_that_breaks_an_invariant_is_malformed_even_when_signed(
    ed25519_signer: FileSigner, claim_of: ClaimOf, changes: dict[str, object]
) -> None:
    value = json.loads(statement(claim_of(ed25519_signer)))
    value["predicate"].update(changes)
    value["subject"][0]["name"] = "{tenant_id}/{from_seq}-{to_seq}".format(**value["predicate"])
    value["subject"][0]["digest"]["sha256"] = value["predicate"]["merkle_root"]
    with pytest.raises(SignatureError):
        open_snapshot(stored_statement(value, ed25519_signer), ring(ed25519_signer))


@pytest.mark.parametrize("field", sorted({*SnapshotClaim.__struct_fields__} - {"job_index", "job_index_from"}))
def test_every_field_of_the_predicate_is_needed_but_for_the_index_of_jobs(
    ed25519_signer: FileSigner, claim_of: ClaimOf, field: str
) -> None:
    value = json.loads(statement(claim_of(ed25519_signer)))
    del value["predicate"][field]
    with pytest.raises(SignatureError, match=field):
        open_snapshot(stored_statement(value, ed25519_signer), None)


@pytest.mark.parametrize("field", ["_type", "subject", "predicateType", "predicate"])
@pytest.mark.parametrize("value", ["absent", None, [], 7, "https://in-toto.io/Statement/v0.1"])
def test_a_statement_of_another_kind_is_malformed(
    ed25519_signer: FileSigner, claim_of: ClaimOf, field: str, value: object
) -> None:
    changed = json.loads(statement(claim_of(ed25519_signer)))
    if value == "absent":
        del changed[field]
    else:
        changed[field] = value
    with pytest.raises(SignatureError, match=field):
        open_snapshot(stored_statement(changed, ed25519_signer), ring(ed25519_signer))


def test_fields_of_later_versions_are_ignored(ed25519_signer: FileSigner, claim_of: ClaimOf) -> None:
    value = json.loads(statement(claim_of(ed25519_signer)))
    value["predicate"]["witnesses"] = [0.5]
    opened = open_snapshot(stored_statement({**value, "new": None}, ed25519_signer), ring(ed25519_signer))
    assert opened.verdict == "ok"


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xff",
        b"[]",
        b"NaN",
        b"[" * 100_000,
        b"9" * 5000,
        b'{"_type": "a", "_type": "b"}',
        b"\xef\xbb\xbf{}",
    ],
)
def test_a_payload_that_is_no_statement_is_malformed(ed25519_signer: FileSigner, payload: bytes) -> None:
    with pytest.raises(SignatureError):
        open_snapshot(stored_statement(payload, ed25519_signer), ring(ed25519_signer))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32-be", "utf-8-sig"])
def test_a_statement_in_another_encoding_is_malformed(
    ed25519_signer: FileSigner, claim_of: ClaimOf, encoding: str
) -> None:
    payload = statement(claim_of(ed25519_signer)).decode().encode(encoding)
    with pytest.raises(SignatureError):
        open_snapshot(stored_statement(payload, ed25519_signer), ring(ed25519_signer))


def test_a_name_that_stands_twice_is_malformed(ed25519_signer: FileSigner, claim_of: ClaimOf) -> None:
    payload = statement(claim_of(ed25519_signer))
    doubled = payload.replace(b'"tree_size":1003', b'"tree_size":1003,"tree_size":1003')
    assert doubled != payload
    with pytest.raises(SignatureError, match="twice"):
        open_snapshot(stored_statement(doubled, ed25519_signer), ring(ed25519_signer))


# Who signed


def test_without_keys_nothing_is_checked_but_the_form(signer: FileSigner, claim_of: ClaimOf) -> None:
    opened = open_snapshot(stored(claim_of(signer), signer), None)
    assert (opened.claim, opened.verdict) == (claim_of(signer), "not_checked")


def test_a_key_that_is_not_held_is_unknown(signer: FileSigner, other_signer: FileSigner, claim_of: ClaimOf) -> None:
    opened = open_snapshot(stored(claim_of(signer), signer), ring(other_signer))
    assert opened.verdict == "unknown_key"
    assert signer.key_id in (opened.detail or "")
    assert open_snapshot(stored(claim_of(signer), signer), ring()).verdict == "unknown_key"


def test_a_changed_claim_under_an_old_signature_is_broken(signer: FileSigner, claim_of: ClaimOf) -> None:
    made = json.loads(stored(claim_of(signer), signer))
    made["payload"] = base64.b64encode(statement(claim_of(signer, tree_root="ff" * 32))).decode()
    opened = open_snapshot(json.dumps(made), ring(signer))
    assert opened.verdict == "broken"
    assert opened.claim.tree_root == "ff" * 32


def test_a_claim_that_names_a_held_key_which_did_not_sign_is_broken(
    signer: FileSigner, other_signer: FileSigner, claim_of: ClaimOf
) -> None:
    lie = json.dumps(envelope.sign(statement(claim_of(signer)), other_signer))
    opened = open_snapshot(lie, ring(signer, other_signer))
    assert opened.verdict == "broken"
    assert signer.key_id in (opened.detail or "")


def test_a_cosignature_by_a_held_key_is_enough(signer: FileSigner, other_signer: FileSigner, claim_of: ClaimOf) -> None:
    made, _ = sign_snapshot(claim_of(signer), signer)
    cosigned = envelope.sign(statement(claim_of(signer)), other_signer)
    both = json.dumps({**made, "signatures": [*made["signatures"], *cosigned["signatures"]]})
    assert open_snapshot(both, ring(other_signer)).verdict == "ok"
    revoked = PublicKey.of(signer.public_key_pem, revoked_from_hlc=Hlc(0, 0, "a"))
    assert open_snapshot(both, ring(revoked, other_signer)).verdict == "ok"
    assert open_snapshot(both, ring(revoked)).verdict == "unknown_key"


MILLISECOND = timedelta(milliseconds=1)


@pytest.mark.parametrize(
    ("bounds", "verdict", "says"),
    [
        ({"not_before": HLC_TIME}, "ok", None),
        ({"not_before": HLC_TIME + MILLISECOND}, "unknown_key", "valid from"),
        ({"not_after": HLC_TIME}, "ok", None),
        ({"not_after": HLC_TIME - MILLISECOND}, "unknown_key", "expired"),
        ({"revoked_from_hlc": Hlc(HLC_MS, 8, "a")}, "ok", None),
        ({"revoked_from_hlc": Hlc(HLC_MS, 7, "node-7f3b")}, "ok", None),
        ({"revoked_from_hlc": Hlc(HLC_MS, 7, "node-7f3a")}, "unknown_key", "revoked from HLC"),
        ({"revoked_from_hlc": Hlc(HLC_MS, 6, "z")}, "unknown_key", "revoked from HLC"),
    ],
)
def test_a_key_must_hold_at_the_snapshots_hlc(
    signer: FileSigner, claim_of: ClaimOf, bounds: dict[str, object], verdict: str, says: str | None
) -> None:
    held = PublicKey.of(signer.public_key_pem, **bounds)
    opened = open_snapshot(stored(claim_of(signer), signer), ring(held))
    assert opened.verdict == verdict
    assert (opened.detail is None) if says is None else (says in opened.detail)


def test_a_wrong_signature_by_a_revoked_key_is_broken(signer: FileSigner, claim_of: ClaimOf) -> None:
    made = json.loads(stored(claim_of(signer), signer))
    made["signatures"][0]["sig"] = base64.b64encode(bytes(64)).decode()
    revoked = PublicKey.of(signer.public_key_pem, revoked_from_hlc=Hlc(0, 0, "a"))
    assert open_snapshot(json.dumps(made), ring(revoked)).verdict == "broken"


# Whoever alters it


def signature_in(text: str) -> list[bytes]:
    parsed = envelope.parse(json.loads(text), envelope.PAYLOAD_TYPE)
    return [signature for _, signature in parsed.signatures]


@pytest.mark.exhaustive
def test_no_flip_of_any_bit_is_accepted_unless_nothing_signed_changed(signer: FileSigner, claim_of: ClaimOf) -> None:
    text = stored(claim_of(signer), signer)
    held, whole = ring(signer), open_snapshot(text, ring(signer))
    assert whole.verdict == "ok"
    refused, bits = 0, spread(range(8 * len(text)), 8 * len(text) // 3)
    for at in bits:
        index, bit = divmod(at, 8)
        flipped = text[:index] + chr(ord(text[index]) ^ (1 << bit)) + text[index + 1 :]
        try:
            opened = open_snapshot(flipped, held)
        except SignatureError:
            refused += 1
            continue
        if opened.verdict == "ok":
            assert opened == whole
            assert signature_in(flipped) == signature_in(text)
        else:
            refused += 1
    assert refused > 7 / 8 * len(bits)


@pytest.mark.exhaustive
def test_no_cut_of_the_text_is_accepted(signer: FileSigner, claim_of: ClaimOf) -> None:
    text = stored(claim_of(signer), signer)
    for end in spread(range(len(text)), len(text) // 3):
        with pytest.raises(SignatureError):
            open_snapshot(text[:end], ring(signer))


@pytest.mark.exhaustive
def test_no_flip_of_any_bit_of_payload_or_signature_verifies(signer: FileSigner, claim_of: ClaimOf) -> None:
    made, _ = sign_snapshot(claim_of(signer), signer)
    payload = base64.b64decode(str(made["payload"]))
    signature = base64.b64decode(made["signatures"][0]["sig"])
    for index in spread(range(len(payload)), len(payload) // 3):
        flipped = bytearray(payload)
        flipped[index] ^= 1 << (index % 8)
        changed = {**made, "payload": base64.b64encode(flipped).decode()}
        with pytest.raises(SignatureError):
            envelope.verify(changed, ring(signer))
    for bit in spread(range(len(signature) * 8), len(signature) * 8 // 3):
        flipped = bytearray(signature)
        flipped[bit // 8] ^= 1 << (bit % 8)
        sig = {"keyid": signer.key_id, "sig": base64.b64encode(flipped).decode()}
        with pytest.raises(SignatureError):
            envelope.verify({**made, "signatures": [sig]}, ring(signer))


@given(text=st.text())
def test_any_text_is_malformed_and_nothing_worse(ed25519_signer: FileSigner, text: str) -> None:
    with pytest.raises(SignatureError):
        open_snapshot(text, ring(ed25519_signer))


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "1" * 5000, '{"payload": 1, "payload": 2}', "\ud800", "null", "\ufeff{}"]
)
def test_hostile_json_is_malformed_and_nothing_worse(ed25519_signer: FileSigner, text: str) -> None:
    with pytest.raises(SignatureError):
        open_snapshot(text, ring(ed25519_signer))
