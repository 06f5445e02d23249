"""Bundles carry verdicts: from seq 1 on they are judged again, in a later range nobody can."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ledger.errors import BundleRefusedError
from ledger.exit_code import ExitCode, unchecked, without_jobs
from signing.judging import BundleVerdict, refuse_unless_trusted, verify_file
from signing.keys import Keyring
from tests.app.bundles import bundle_of, exit_code, store
from tests.ledger.committed import RACE, committed, flipped
from tests.ledger.ledger_in_memory import SIGNER, Ledger, build

RING = Keyring([SIGNER.public_key])
LEDGER = committed(RACE)
LATER = "verdicts on proposals: each hangs on all entries before it, and not all are here"


def verified(folder: Path, ledger: Ledger, from_seq: int = 1) -> BundleVerdict:
    return asyncio.run(verify_file(store(folder, bundle_of(ledger, from_seq)), RING))


def test_verdicts_are_judged_again(tmp_path: Path) -> None:
    found = verified(tmp_path, LEDGER)
    assert (found.verdict["verdicts"]["projection"], exit_code(found)) == ("ok", ExitCode.FINE)
    assert LATER not in found.not_checked


@pytest.mark.parametrize("seq", [6, 8, 9, 11])
def test_a_forged_verdict_is_named_and_the_bundle_is_not_imported(tmp_path: Path, seq: int) -> None:
    found = verified(tmp_path, flipped(LEDGER, seq))
    first = found.verdict["first_break"]
    assert (first["kind"], first["seq"], exit_code(found)) == ("projection", seq, ExitCode.TAMPERED)
    assert found.verdict["verdicts"]["projection"] == "broken"
    with pytest.raises(BundleRefusedError, match="projection"):
        refuse_unless_trusted("a", found)


def test_a_later_range_is_not_judged_and_says_so(tmp_path: Path) -> None:
    found = verified(tmp_path, flipped(LEDGER, 8), from_seq=6)
    assert found.verdict["verdicts"]["projection"] == "not_checked"
    assert LATER in found.not_checked


def test_a_bundle_without_proposals_says_nothing_of_verdicts(tmp_path: Path) -> None:
    ledger = build(8, snapshots_to=(8,))
    found = verified(tmp_path, ledger)
    assert found.verdict["verdicts"]["projection"] == "not_checked"
    assert LATER not in verified(tmp_path, ledger, from_seq=3).not_checked
    assert not any(unchecked(without_jobs(found.verdict)))
