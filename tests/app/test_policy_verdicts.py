"""``--policy``: below the quorum a verdict is incomplete, and it says which witnesses are missing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ledger.exit_code import ExitCode, exit_code_of_bundle, exit_code_of_receipt
from signing.anchors import ExternalWitnesses
from signing.judging import verify_file
from signing.keys import Keyring
from signing.policy import Policy
from signing.receipt_judging import judged
from tests.app.bundles import LEDGER as BUNDLED
from tests.app.bundles import bundle_of, store
from tests.app.receipts import JOB, cosigned, indexed, receipt_of, rows_of
from tests.app.second_verifier import twin_in
from tests.app.witness import Witness
from tests.cases.policies import LAST_SEQ, ONE, OWN_LOG, STRANGE_LOG, TWO, policy_text, stated
from tests.cases.receipts import LEDGER
from tests.ledger.ledger_in_memory import SIGNER
from tests.tally import run_tally

Judge = Callable[..., tuple[dict[str, Any], ExitCode]]
RING = Keyring([SIGNER.public_key])


def external(threshold: int | str = 2, log: str = "", more: Sequence[Witness] = ()) -> ExternalWitnesses:
    keys = ExternalWitnesses.load([each.verifier_key for each in more], None).witnesses
    return ExternalWitnesses.of(keys, (), Policy.parse(policy_text(threshold, log)))


@pytest.fixture
def judge(tmp_path: Path) -> Judge:
    """Judges a receipt that carries statements, under a policy; the second implementation gives the same code."""
    twin = twin_in(tmp_path)

    def run(
        said: Sequence[Any], receipt: bytes | None = None, ring: Keyring | None = RING, **given: Any
    ) -> tuple[dict[str, Any], ExitCode]:
        file = receipt_of(LEDGER, said=[*said]) if receipt is None else receipt
        verdict = judged(file, ring, external=external(**given)).verdict
        code = exit_code_of_receipt(verdict)
        text = policy_text(given.get("threshold", 2), given.get("log", ""))
        assert twin(store(tmp_path, file, "receipt.json"), ring, policy=text) == code
        return verdict, code

    return run


def test_a_receipt_that_the_quorum_cosigned_is_proved(judge: Judge) -> None:
    verdict, code = judge([cosigned(LEDGER, LAST_SEQ, witness=each) for each in (ONE, TWO)])
    assert (verdict["policy"], code) == (
        {"met": True, "quorum": "outside", "quorum_to_seq": LAST_SEQ, "missing": []},
        ExitCode.FINE,
    )


def test_below_the_quorum_a_receipt_is_incomplete_and_says_who_is_missing(judge: Judge) -> None:
    said = [cosigned(LEDGER, LAST_SEQ, witness=ONE), cosigned(LEDGER, LAST_SEQ - 1, witness=TWO)]
    verdict, code = judge(said)
    assert (verdict["valid"], code) == (True, ExitCode.INCOMPLETE)
    assert verdict["policy"] == {
        "met": False,
        "quorum": "outside",
        "quorum_to_seq": LAST_SEQ - 1,
        "missing": [f"w2: has cosigned {LAST_SEQ - 1} of {LAST_SEQ} entries", "w3: has cosigned nothing of this log"],
    }
    assert judge(said, threshold="any")[1] is ExitCode.FINE
    assert judge(said[:1], threshold="any")[1] is ExitCode.FINE
    assert judge([])[1] is ExitCode.INCOMPLETE


@pytest.mark.parametrize("covers", ["job", "absent"])
def test_the_quorum_covers_also_that_there_are_no_other_entries(judge: Judge, covers: str) -> None:
    job = JOB if covers == "job" else "job-404"
    whole = len(LEDGER.entries)
    file = {"covers": covers, "job_id": job, "rows": rows_of(LEDGER, job), "indexed": indexed(LEDGER, job)}
    for reach in (LAST_SEQ, whole):
        said = [cosigned(LEDGER, size, witness=each) for each, size in ((ONE, whole), (TWO, reach))]
        verdict, code = judge(said, receipt_of(LEDGER, said=said, **file))
        assert verdict["policy"]["met"] is (reach == whole)
        assert verdict["policy"]["quorum_to_seq"] == reach
        assert code == (ExitCode.FINE if reach == whole else ExitCode.INCOMPLETE)


def test_a_stranger_under_the_name_of_a_witness_does_not_count(judge: Judge) -> None:
    strangers = [Witness(ONE.name, 8), Witness(TWO.name, 9)]
    said = [cosigned(LEDGER, LAST_SEQ, witness=each) for each in strangers]
    assert judge(said)[1] is ExitCode.INCOMPLETE
    # Not even one that the verifier trusts for something else.
    verdict, code = judge(said, more=strangers)
    assert ({each["status"] for each in verdict["anchors"]}, code) == ({"ok"}, ExitCode.INCOMPLETE)


def test_a_policy_that_names_logs_counts_checkpoints_by_their_keys_alone(judge: Judge) -> None:
    said = [cosigned(LEDGER, LAST_SEQ, witness=each) for each in (ONE, TWO)]
    assert judge(said, log=OWN_LOG)[1] is ExitCode.FINE
    verdict, code = judge(said, log=STRANGE_LOG)
    assert (code, verdict["policy"]["quorum_to_seq"]) == (ExitCode.INCOMPLETE, 0)
    assert {each["status"] for each in verdict["anchors"]} == {"not_checked"}


async def test_a_bundle_is_incomplete_unless_the_quorum_cosigned_all_of_it(tmp_path: Path) -> None:
    last_seq, twin = len(BUNDLED.entries), twin_in(tmp_path)
    for said, code, reach in (
        ([stated(ONE, last_seq, BUNDLED), stated(TWO, last_seq, BUNDLED)], ExitCode.FINE, last_seq),
        ([stated(ONE, last_seq, BUNDLED), stated(TWO, 20, BUNDLED)], ExitCode.INCOMPLETE, 20),
        ([], ExitCode.INCOMPLETE, 0),
    ):
        path = store(tmp_path, bundle_of(BUNDLED, anchors=said))
        verdict = (await verify_file(path, RING, external=external())).verdict
        assert (exit_code_of_bundle(verdict), verdict["policy"]["quorum_to_seq"]) == (code, reach)
        assert twin(path, RING, policy=policy_text()) == code


def test_the_commands_on_files_say_what_is_missing_and_exit_with_3(tmp_path: Path) -> None:
    (tmp_path / "policy").write_text(policy_text())
    (tmp_path / "key.pem").write_text(SIGNER.public_key.public_key_pem)
    given = ("--keys", tmp_path / "key.pem", "--no-state", "--policy", tmp_path / "policy")
    said = [cosigned(LEDGER, LAST_SEQ, witness=each) for each in (ONE, TWO)]
    for count, code in ((2, 0), (1, 3)):
        (tmp_path / "receipt.json").write_bytes(receipt_of(LEDGER, said=said[:count]))
        done = run_tally("verify-proof", tmp_path / "receipt.json", *given)
        assert done.returncode == code, done.stdout + done.stderr
        assert ("below quorum" in done.stdout) == (code == 3)
        last_seq = len(BUNDLED.entries)
        anchors = [stated(each, last_seq, BUNDLED) for each in (ONE, TWO)][:count]
        bundle = store(tmp_path, bundle_of(BUNDLED, anchors=anchors))
        report = tmp_path / "report.md"
        done = run_tally("verify-bundle", bundle, *given, "--report", report)
        assert done.returncode == code, done.stdout + done.stderr
        assert ("w2: has cosigned nothing of this log" in done.stdout) == (code == 3)
        assert ("below quorum" in report.read_text()) == (code == 3)


@pytest.mark.parametrize("text", ["quorum w1", "witness", "\xff"])
def test_a_file_that_is_no_policy_ends_the_command_with_1(text: str, tmp_path: Path) -> None:
    (tmp_path / "policy").write_bytes(text.encode("latin-1"))
    (tmp_path / "receipt.json").write_bytes(receipt_of(LEDGER))
    done = run_tally("verify-proof", tmp_path / "receipt.json", "--no-state", "--policy", tmp_path / "policy")
    assert (done.returncode, "policy" in done.stderr) == (1, True), done.stdout + done.stderr
