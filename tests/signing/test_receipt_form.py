"""The receipt that docs/formats shows is real, and a receipt has one spelling, every byte of which is signed."""

from __future__ import annotations

import base64
import json
from pathlib import Path

from ledger import canonical
from ledger.errors import ReceiptSignatureError
from ledger.merkle import tiles
from signing import manifest
from signing import receipt as form
from signing.entry_proof import cose_receipt, tlog_proof
from tests.app.receipts import (
    DOCUMENTED_SIGNER,
    JOB,
    cosigned,
    example_ledger,
    example_receipt,
    receipt_of,
    rows_of,
)
from tests.signing.test_documented_examples import documented_ring, examples

EXAMPLE = Path(__file__).parents[2] / "docs" / "formats" / "example.receipt.json"


def test_the_example_is_what_the_code_makes_with_the_documented_key() -> None:
    assert EXAMPLE.read_bytes() == example_receipt(documented_ring())


def test_the_document_shows_the_example_and_its_statement() -> None:
    shown, statement = map(json.loads, examples("receipt.md")[:2])
    example = json.loads(EXAMPLE.read_bytes())
    assert [entry["row"]["seq"] for entry in example["receipt"]["entries"]] == [1, 2, 4]
    del example["receipt"]["entries"][1:]
    assert shown == example
    assert base64.b64decode(example["statement"]["payload"]) == canonical.encode(statement)


def test_the_document_shows_its_first_entry_in_the_forms_of_other_programs() -> None:
    text, cose = examples("receipt.md")[2:4]
    ledger, ring = example_ledger(), documented_ring()
    file = receipt_of(ledger, JOB, DOCUMENTED_SIGNER, covers="entry", rows=rows_of(ledger, JOB)[:1], keys=ring)
    receipt, hashes = form.read(file)[0], tiles.inclusion_proof(0, 4, lambda level, index: ledger.tiles[level, index])
    note = cosigned(ledger, 4, DOCUMENTED_SIGNER).note
    assert tlog_proof(receipt.entries[0].row, hashes, note, receipt.origin, ring) == text
    assert cose_receipt(receipt, DOCUMENTED_SIGNER) == bytes.fromhex(cose)


def test_the_example_is_signed_by_the_documented_key() -> None:
    envelope = form.read(EXAMPLE.read_bytes())[1]
    signed = manifest.judge(envelope, documented_ring(), "the receipt", ReceiptSignatureError)
    assert (signed.verdict, signed.key_ids) == ("ok", ("06e3fd8fda29bb60",))
