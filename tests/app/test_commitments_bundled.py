"""Bundles carry verdicts: from seq 1 on they are judged again, by the rules of their tenant; in a later range nobody
can."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import pytest

from ledger.errors import BundleRefusedError
from ledger.exit_code import ExitCode, unchecked, without_jobs
from ledger.machines.commitments import Commitments
from ledger.machines.promises import RULES, Commitment
from signing.judging import BundleVerdict, refuse_unless_trusted, verify_file
from signing.keys import Keyring
from tests.app.bundles import bundle_of, exit_code, rows_of, store
from tests.app.second_verifier import twin_in
from tests.ledger.committed import RACE, committed, flipped
from tests.ledger.ledger_in_memory import SIGNER, Ledger, build
from tests.tally import run_tally

RULES_1 = Path(__file__).parents[1] / "ledger" / "rules1"
"""What a node chained before rules had versions: claims beyond a capacity, adjustments of older epochs."""

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


def test_the_second_implementation_says_that_it_judges_no_verdicts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verifier = twin_in(tmp_path)
    for ledger in (LEDGER, flipped(LEDGER, 8)):
        assert verifier(store(tmp_path, bundle_of(ledger)), RING) == ExitCode.FINE
        assert "nothing wrong was found; commitments: not judged; exit code 0" in capsys.readouterr().out


def test_a_later_range_is_not_judged_and_says_so(tmp_path: Path) -> None:
    found = verified(tmp_path, flipped(LEDGER, 8), from_seq=6)
    assert found.verdict["verdicts"]["projection"] == "not_checked"
    assert LATER in found.not_checked


def test_a_chain_from_before_rules_had_versions_verifies_and_folds_as_it_did() -> None:
    keys = Keyring.from_json(json.loads((RULES_1 / "keys.json").read_text()))
    found = asyncio.run(verify_file(RULES_1 / "bundle.tar", keys))
    assert (found.verdict["verdicts"]["projection"], exit_code(found)) == ("ok", ExitCode.FINE)
    machine = Commitments()
    for row in rows_of((RULES_1 / "bundle.tar").read_bytes()):
        machine.fold(row["seq"], row["action"], row["payload"])
    active = json.loads((RULES_1 / "active.json").read_text())
    assert machine.state.active == msgspec.convert(active, dict[int, Commitment], strict=False)
    assert machine.state.rules == {RULES: 1}


def test_what_a_chain_of_rules_1_accepted_is_told_by_a_simulation_with_rules_2(tmp_path: Path) -> None:
    by_its_own = run_tally("simulate", RULES_1 / "bundle.tar", "--json")
    assert (by_its_own.returncode, json.loads(by_its_own.stdout)["different"]) == (ExitCode.FINE, 0)
    by_rules_2 = run_tally("simulate", RULES_1 / "bundle.tar", "--json", "--rules", 2, "--state", tmp_path / "state")
    told = json.loads(by_rules_2.stdout)
    assert (by_rules_2.returncode, told["rules"], told["first_different"]) == (ExitCode.TAMPERED, 2, 4)
    assert (told["reasons"]["over-capacity"], told["reasons"]["older-epoch"]) == (5, 2)
    other = run_tally("simulate", RULES_1 / "bundle.tar", "--rules", 1, "--state", tmp_path / "state")
    assert (other.returncode, "has rules 2" in other.stderr) == (1, True)


def test_a_bundle_without_proposals_says_nothing_of_verdicts(tmp_path: Path) -> None:
    ledger = build(8, snapshots_to=(8,))
    found = verified(tmp_path, ledger)
    assert found.verdict["verdicts"]["projection"] == "not_checked"
    assert LATER not in verified(tmp_path, ledger, from_seq=3).not_checked
    assert not any(unchecked(without_jobs(found.verdict)))
