"""``--policy``: below the quorum a verdict is incomplete, and it says which witnesses are missing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ledger.errors import InvalidInputError
from ledger.exit_code import ExitCode, exit_code_of_bundle, exit_code_of_receipt
from signing.anchors import BundledAnchor, ExternalWitnesses
from signing.judging import verify_file
from signing.keys import Keyring
from signing.note import VerifierKey
from signing.policy import Policy
from signing.receipt_judging import judged
from tests.app.bundle_cases import LEDGER as BUNDLED
from tests.app.bundle_cases import anchored
from tests.app.bundles import LOG_ORIGIN, bundle_of, store
from tests.app.receipt_cases import LEDGER, changed
from tests.app.receipts import JOB, cosigned, indexed, receipt_of, rows_of
from tests.app.second_verifier import second_verifier, twin_in
from tests.app.witness import Witness
from tests.ledger.ledger_in_memory import SIGNER, STRANGER
from tests.signing.test_policy import MALFORMED
from tests.tally import run_tally

Judge = Callable[..., tuple[dict[str, Any], ExitCode]]
RING = Keyring([SIGNER.public_key])
ONE, TWO, THREE = (Witness(f"witness.example/w{number}", number, is_ml_dsa=number > 1) for number in (1, 2, 3))
LAST_SEQ = 4
"""Of the receipt; the log has one entry more."""
OWN_LOG = VerifierKey.of(f"{LOG_ORIGIN}/{LEDGER.tenant_id}", SIGNER.public_key).text()
STRANGE_LOG = VerifierKey.of(f"{LOG_ORIGIN}/{LEDGER.tenant_id}", STRANGER.public_key).text()


def policy_text(threshold: int | str = 2, log: str = "") -> str:
    witnesses = "\n".join(f"witness w{n} {each.verifier_key}" for n, each in enumerate((ONE, TWO, THREE), 1))
    return f"{f'log {log}' if log else ''}\n{witnesses}\ngroup outside {threshold} w1 w2 w3\nquorum outside\n"


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


def test_without_keys_no_cosignature_counts(judge: Judge) -> None:
    receipt = receipt_of(LEDGER, said=[cosigned(LEDGER, LAST_SEQ, witness=each) for each in (ONE, TWO)])
    verdict, code = judge([], receipt, None)
    assert (verdict["policy"]["quorum_to_seq"], code) == (0, ExitCode.INCOMPLETE)


def test_a_stranger_under_the_name_of_a_witness_does_not_count(judge: Judge) -> None:
    strangers = [Witness(ONE.name, 8), Witness(TWO.name, 9)]
    said = [cosigned(LEDGER, LAST_SEQ, witness=each) for each in strangers]
    assert judge(said)[1] is ExitCode.INCOMPLETE
    # Not even one that the verifier trusts for something else.
    verdict, code = judge(said, more=strangers)
    assert ({each["status"] for each in verdict["anchors"]}, code) == ({"ok"}, ExitCode.INCOMPLETE)


def test_two_statements_of_one_witness_count_once(judge: Judge) -> None:
    said = [cosigned(LEDGER, size, witness=ONE) for size in (LAST_SEQ - 1, LAST_SEQ)]
    assert judge(said)[1] is ExitCode.INCOMPLETE
    assert judge(said, threshold="any")[1] is ExitCode.FINE


def test_a_cosignature_of_another_tree_is_a_rollback_whatever_the_quorum_says(judge: Judge) -> None:
    said = [cosigned(LEDGER, LAST_SEQ, witness=each) for each in (ONE, TWO)]
    other = cosigned(LEDGER, LAST_SEQ - 1, witness=THREE)
    receipt = receipt_of(LEDGER, said=[*said, other])
    # The proof of the third does not lead from what it saw to this log.
    forged = changed(lambda it: it["anchors"][2].update(consistency=["ab" * 32]), receipt)
    verdict, code = judge([], forged)
    assert (verdict["first_break"]["kind"], code) == ("rollback", ExitCode.TAMPERED)


def test_a_policy_that_names_logs_counts_checkpoints_by_their_keys_alone(judge: Judge) -> None:
    said = [cosigned(LEDGER, LAST_SEQ, witness=each) for each in (ONE, TWO)]
    assert judge(said, log=OWN_LOG)[1] is ExitCode.FINE
    verdict, code = judge(said, log=STRANGE_LOG)
    assert (code, verdict["policy"]["quorum_to_seq"]) == (ExitCode.INCOMPLETE, 0)
    assert {each["status"] for each in verdict["anchors"]} == {"not_checked"}


def stated(by: Witness, size: int) -> BundledAnchor:
    """What ``by`` said of the first entries of the bundled ledger."""
    said = anchored(size)
    note = by.cosign(said.checkpoint.rpartition("\u2014")[0], 1_704_931_300)
    return BundledAnchor(by.verifier_key, note, said.consistency, "witness", "", said.time)


async def test_a_bundle_is_incomplete_unless_the_quorum_cosigned_all_of_it(tmp_path: Path) -> None:
    last_seq, twin = len(BUNDLED.entries), twin_in(tmp_path)
    for said, code, reach in (
        ([stated(ONE, last_seq), stated(TWO, last_seq)], ExitCode.FINE, last_seq),
        ([stated(ONE, last_seq), stated(TWO, 20)], ExitCode.INCOMPLETE, 20),
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
        anchors = [stated(each, last_seq) for each in (ONE, TWO)][:count]
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


@pytest.mark.parametrize("text", [text for text, _ in MALFORMED])
def test_both_refuse_a_malformed_policy(text: str) -> None:
    with pytest.raises(InvalidInputError):
        Policy.parse(text)
    second = second_verifier()
    with pytest.raises(second.MALFORMED):
        second.read_policy(text.encode())
