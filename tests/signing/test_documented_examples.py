"""The examples in docs/formats are real: what they show verifies with the keys they show."""

import base64
import json
import re
from pathlib import Path

import orjson

from ledger import canonical, private_fields, signed_events
from ledger.merkle import verify_consistency
from ledger.verification.snapshot_check import SNAPSHOT_COLUMNS, unsigned_digest
from signing import envelope, key_statement
from signing.checkpoint import open_checkpoint
from signing.keys import Keyring
from signing.note import VerifierKey, WitnessKey, cosignatures_of, parse
from signing.private_keys import DataKey
from signing.snapshot import open_snapshot

FORMATS = Path(__file__).parents[2] / "docs" / "formats"


def examples(name: str) -> list[str]:
    """The fenced blocks of a document, in its order."""
    return re.findall(r"```[a-z]+\n(.*?)```", (FORMATS / name).read_text(), re.DOTALL)


def documented_ring() -> Keyring:
    return Keyring.from_json(json.loads(examples("keys.md")[2]))


def test_the_forms_of_a_key_are_forms_of_one_key() -> None:
    pem, verifier_key, saved = examples("keys.md")[:3]
    (key,) = documented_ring()
    assert key.public_key_pem == pem
    assert VerifierKey.parse(verifier_key.strip()).public_key.key_id == key.key_id
    assert documented_ring().to_json() == json.loads(saved)
    assert documented_ring().log_verifier_keys == (verifier_key.strip(),)


def test_the_statement_about_a_key_is_by_the_root_and_about_what_is_shown() -> None:
    stored, shown = (json.loads(text) for text in examples("keys.md")[3:5])
    (root,) = documented_ring()
    after, facts = key_statement.Anchor(**shown["after"]), {**shown["facts"], "statement": stored}
    assert key_statement.payload(shown["action"], facts, root.key_id, after) == canonical.encode(shown)
    said = (shown["action"], facts, root.key_id)
    assert key_statement.voucher_of(*said, {root.key_id: root}, {after}) == root.key_id
    assert key_statement.voucher_of(*said, {root.key_id: root}, set()) is None


def test_the_snapshot_verifies_and_its_payload_and_digest_are_as_shown() -> None:
    stored, statement, digest = examples("snapshot.md")[:3]
    opened = open_snapshot(stored, documented_ring())
    assert (opened.verdict, opened.payload_sha256) == ("ok", digest.strip())
    assert envelope.verify(json.loads(stored), documented_ring()) == canonical.encode(json.loads(statement))


def test_the_digest_of_an_unsigned_snapshot_is_that_of_the_columns_that_are_shown() -> None:
    stored, _, _, columns, digest = examples("snapshot.md")
    claim = open_snapshot(stored, documented_ring()).claim
    row = [getattr(claim, name) for name in SNAPSHOT_COLUMNS[:-1]]
    assert canonical.encode(dict(zip(SNAPSHOT_COLUMNS, row, strict=False))) == columns.strip().encode()
    assert unsigned_digest(row) == digest.strip()


def test_the_checkpoint_opens_with_the_verifier_key_and_covers_the_snapshot() -> None:
    checkpoint_note, verifier_key = examples("checkpoint.md")[:2]
    checkpoint = open_checkpoint(checkpoint_note, [verifier_key.strip()], origin="log.example/acme")
    claim = open_snapshot(examples("snapshot.md")[0], documented_ring()).claim
    assert (checkpoint.size, checkpoint.root.hex()) == (claim.tree_size, claim.tree_root)


def test_the_cosigned_checkpoint_was_made_by_another_program_and_holds() -> None:
    """It was made with github.com/transparency-dev/formats v0.1.1, so both understand the specification alike."""
    plain, log_key, _, cosigned, witness_key = examples("checkpoint.md")[:5]
    assert cosigned.startswith(plain)
    assert open_checkpoint(cosigned, [log_key.strip()]) == open_checkpoint(plain, [log_key.strip()])
    (found,) = cosignatures_of(parse(cosigned), [WitnessKey.parse(witness_key.strip())])
    assert (found.witness.name, found.time.year) == ("witness.example/w1", 2026)
    assert found.witness.text() == witness_key.strip()


def test_the_second_signatures_hold_beside_the_first_over_the_bytes_that_are_shown() -> None:
    shown = json.loads((FORMATS / "example.second.json").read_text())
    ring = Keyring.from_json(shown)
    both = ring.demanding_both()
    first, second = ring
    assert (first.public_key_pem, second.algorithm) == (next(iter(documented_ring())).public_key_pem, "ml-dsa-44")
    note = shown["checkpoint"]
    assert note.startswith(examples("checkpoint.md")[0])
    assert open_checkpoint(note, both) == open_checkpoint(note, documented_ring())
    (verifier_key,) = map(VerifierKey.parse, shown["second_log_verifier_keys"])
    assert verifier_key.public_key.key_id == second.key_id
    assert verifier_key.signed(parse(note).text, 0).hex() == re.sub(r"\s", "", examples("checkpoint.md")[2])
    for keys in (both, documented_ring(), Keyring([second])):
        assert open_snapshot(json.dumps(shown["snapshot"]), keys).verdict == "ok"
    witness = WitnessKey.parse(shown["witness_verifier_key"])
    (found,) = cosignatures_of(parse(shown["cosigned_checkpoint"]), [witness])
    assert (found.witness.kind, found.time.year) == (6, 2026)


def test_the_private_value_opens_with_the_key_and_for_the_field_shown() -> None:
    payload, associated = (block.strip() for block in examples("private-fields.md")[:2])
    assert canonical.encode(orjson.loads(payload)) == payload.encode()
    (sealed,) = private_fields.sealed_values(orjson.loads(payload))
    _, tenant_id, hlc, key_id, path = orjson.loads(associated)
    at = private_fields.associated_data(tenant_id, hlc, key_id, path)
    assert at == associated.encode()
    assert DataKey(key_id, bytes(range(32))).open(sealed, at) == b'"alice"'
    assert sealed.nonce == bytes(range(12))


def test_the_pushed_checkpoint_extends_the_tree_that_the_witness_of_the_receipt_has_seen() -> None:
    _, head, note = examples("checkpoint.md")[5].split("\n\n", 2)
    old, *proof = head.split("\n")
    (anchor,) = orjson.loads((FORMATS / "example.receipt.json").read_bytes())["receipt"]["anchors"]
    seen, pushed = (open_checkpoint(text, documented_ring()) for text in (anchor["checkpoint"], note))
    assert old == f"old {seen.size}"
    verify_consistency(seen.size, pushed.size, seen.root, pushed.root, [base64.b64decode(line) for line in proof])


def test_the_signed_events_shown_are_signed_as_shown() -> None:
    alone, message, together, root = examples("signed-events.md")
    (key,) = documented_ring()
    for shown, signed in ((alone, message), (together, root)):
        payload = json.loads(shown)
        signature = signed_events.read(payload["signature"])
        assert signature.key_id == key.key_id
        assert signed_events.signed_message("acme", "nightly-17", payload, signature) == signed.rstrip("\n").encode()
        assert key.made(signature.raw(), signed.rstrip("\n").encode())
