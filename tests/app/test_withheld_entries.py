"""An operator with every key of the node that does not show all entries of a job: each way is found by the receipt
alone, without the ledger, by the product and by the second implementation."""

from __future__ import annotations

from pathlib import Path

import pytest

from ledger.exit_code import ExitCode, exit_code_of_receipt
from signing.keys import Keyring
from signing.receipt_judging import judged
from tests.app.second_verifier import twin_in
from tests.cases.receipts import cases
from tests.ledger.ledger_in_memory import SIGNER

RING = Keyring([SIGNER.public_key])
RECEIPTS = {case.name: case.file for case in cases()}


def found_by_both(receipt: bytes, folder: Path) -> str:
    """What the product says is wrong; the second implementation finds it too."""
    path = folder / "receipt.json"
    path.write_bytes(receipt)
    verdict = judged(receipt, RING).to_json()
    assert exit_code_of_receipt(verdict) == ExitCode.TAMPERED
    assert twin_in(folder)(path, RING) == ExitCode.TAMPERED
    assert verdict["verdicts"] == {**verdict["verdicts"], "receipt": "ok", "tree": "ok", "completeness": "broken"}
    assert verdict["receipt"]["complete_to_seq"] is None
    return str(verdict["first_break"]["detail"])


@pytest.mark.parametrize("name", ["an entry left out", "the first entry left out"])
def test_an_entry_that_is_left_out_is_found_by_the_receipt_alone(name: str, tmp_path: Path) -> None:
    assert "does not lead to the root" in found_by_both(RECEIPTS[name], tmp_path)


def test_an_older_run_is_found_by_the_receipt_alone(tmp_path: Path) -> None:
    assert "does not lead to the root" in found_by_both(RECEIPTS["an older run"], tmp_path)


@pytest.mark.parametrize("name", ["a job that is hidden", "a job that is there", "without neighbours"])
def test_a_job_that_is_hidden_by_other_neighbours_is_found_by_the_receipt_alone(name: str, tmp_path: Path) -> None:
    assert found_by_both(RECEIPTS[name], tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "the index of another snapshot",
        "a snapshot of another history",
        "a snapshot of another tenant",
        "a snapshot of more than the log",
        "a snapshot without an index",
    ],
)
def test_the_index_of_another_snapshot_is_found_by_the_receipt_alone(name: str, tmp_path: Path) -> None:
    assert "no other entries" in found_by_both(RECEIPTS[name], tmp_path)
