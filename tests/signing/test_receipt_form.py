"""The receipt that docs/formats shows is real, and a receipt has one spelling, every byte of which is signed."""

from __future__ import annotations

import base64
import json
from pathlib import Path

from ledger import canonical
from ledger.errors import ReceiptSignatureError
from signing import manifest
from signing import receipt as form
from tests.app.receipts import example_receipt
from tests.signing.test_documented_examples import documented_ring, examples

EXAMPLE = Path(__file__).parents[2] / "docs" / "formats" / "example.receipt.json"


def test_the_example_is_what_the_code_makes_with_the_documented_key() -> None:
    assert EXAMPLE.read_bytes() == example_receipt(documented_ring())


def test_the_document_shows_the_example_and_its_statement() -> None:
    shown, statement = map(json.loads, examples("receipt.md"))
    example = json.loads(EXAMPLE.read_bytes())
    assert [entry["row"]["seq"] for entry in example["receipt"]["entries"]] == [1, 2, 4]
    del example["receipt"]["entries"][1:]
    assert shown == example
    assert base64.b64decode(example["statement"]["payload"]) == canonical.encode(statement)


def test_the_example_is_signed_by_the_documented_key() -> None:
    envelope = form.read(EXAMPLE.read_bytes())[1]
    signed = manifest.judge(envelope, documented_ring(), "the receipt", ReceiptSignatureError)
    assert (signed.verdict, signed.key_ids) == ("ok", ("06e3fd8fda29bb60",))
