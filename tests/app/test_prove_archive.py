"""``tally prove --archive``: what left the database is proved from the archive, with or without the ledger."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from signing.receipt import read
from tests.app.test_retention import Site, site
from tests.app.test_verify_with_archive import FLOOR, TENANT, manifests, pruned
from tests.pipeline.test_archive_reading import payload_of
from tests.tally import run_tally

__all__ = ["pruned", "site"]

NOWHERE = "http://127.0.0.1:9"


@pytest.fixture
def command(pruned: Site, tmp_path: Path) -> list[str | Path]:
    return ["prove", "-t", TENANT, "-o", tmp_path / "receipt.json", "--no-state", "--json"]


def own(site: Site) -> dict[str, str]:
    """The settings of the node, whose key signs."""
    return {"TALLY_DATA_DIR": str(site.folder / "data")}


def test_the_refusal_of_a_receipt_of_what_left_says_how_it_is_made_and_it_verifies_offline(
    pruned: Site, command: list[str | Path], tmp_path: Path
) -> None:
    service = ("--url", str(pruned.client.base_url))
    refused = run_tally(*command, "--job", "job-0", *service, **own(pruned))
    found = re.search(r"add (--archive \S+)", refused.stderr)
    assert (refused.returncode, found is not None) == (1, True), refused.stderr
    assert found is not None
    done = run_tally(*command, "--job", "job-0", *service, *shlex.split(found[1]), **own(pruned))
    assert done.returncode == 0, done.stderr
    receipt, _ = read((tmp_path / "receipt.json").read_bytes())
    assert (receipt.covers, receipt.seqs) == ("job", [1, 2, 3])
    assert max(receipt.seqs) <= FLOOR
    assert receipt.format_version == 2, "it proves that nothing was left out"
    verified = run_tally("verify-proof", tmp_path / "receipt.json", "--no-state", "--keys", pruned.folder / "keys.json")
    assert (verified.returncode, "PROVED" in verified.stdout) == (0, True), verified.stdout + verified.stderr


def test_an_entry_is_proved_without_the_ledger_and_compared_with_a_checkpoint_that_was_kept(
    pruned: Site, command: list[str | Path], tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    kept.write_text(payload_of(manifests(pruned.folder / "archive")[0])["predicate"]["checkpoint"])
    alone = ("--archive", pruned.folder / "archive", "--keys", pruned.folder / "keys.json", "--url", NOWHERE)
    done = run_tally(*command, "--seq", "5", *alone, "--checkpoint", kept, **own(pruned))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["receipt"]["covers"], told["compared_with"]) == ("entry", "file")
    # A key that the verifier does not trust proves nothing.
    key = tmp_path / "other.pem"
    assert run_tally("keys", "new", str(key)).returncode == 0
    by_other = run_tally(*command, "--seq", "5", *alone, "--key", f"file:{key}")
    assert by_other.returncode == 0, by_other.stderr
    verified = run_tally("verify-proof", tmp_path / "receipt.json", "--no-state", "--keys", pruned.folder / "keys.json")
    assert verified.returncode == 4


def test_a_job_is_proved_to_be_absent_by_the_archive_alone(
    pruned: Site, command: list[str | Path], tmp_path: Path
) -> None:
    keys = ("--keys", pruned.folder / "keys.json")
    alone = ("--absent", "--archive", pruned.folder / "archive", *keys, "--url", NOWHERE)
    done = run_tally(*command, "--job", "job-404", *alone, **own(pruned))
    assert done.returncode == 0, done.stderr
    receipt, _ = read((tmp_path / "receipt.json").read_bytes())
    assert (receipt.covers, receipt.job_id, receipt.entries) == ("absent", "job-404", [])
    verified = run_tally("verify-proof", tmp_path / "receipt.json", "--no-state", *keys)
    assert (verified.returncode, "no entry of job job-404" in verified.stdout) == (0, True), verified.stdout
    refused = run_tally(*command, "--job", "job-0", *alone, **own(pruned))
    assert (refused.returncode, "job job-0 has entries, the last is seq" in refused.stderr) == (1, True), refused.stderr


def test_keys_are_named_for_an_archive_alone(command: list[str | Path], pruned: Site) -> None:
    done = run_tally(*command, "--seq", "5", "--keys", pruned.folder / "keys.json", "--url", NOWHERE)
    assert (done.returncode, "--archive" in done.stderr) == (1, True)
