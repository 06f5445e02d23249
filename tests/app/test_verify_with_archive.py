"""A chain and what left it are verified as one from seq 1, by the service and from the database; each way in which the
two do not belong together is found."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cli import verify as command
from cli.verify import Request
from ledger.errors import ArchiveInvalidError, InvalidInputError, UnknownKeyError
from ledger.exit_code import exit_code_of_verdict
from ledger.machines.job_search import JobFilter
from objects.store import ArchiveStore
from pipeline.archive import jobs as archived
from pipeline.archive.jobs import archived_jobs
from pipeline.archive.joined import ArchivedPart, archived_part
from signing.keys import Keyring
from terminal.outcome import CommandExit
from tests.app.test_retention import (
    Site,
    fill,
    prune,
    set_policy,
    site,
    until_prunable,
    until_removed,
    verdict,
)
from tests.ledger.ledger_in_memory import STRANGER
from tests.tally import run_tally
from tests.waiting import until

__all__ = ["site"]

TENANT = "joined"
FLOOR = 30


def test_entries_that_are_archived_and_leave_after_the_archive_was_read_are_read_again(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tenant, read_archive, reads = "late", command._with_archive, list[Request]()
    fill(site, tenant, range(5))
    until(lambda: archived_to(site, tenant) >= 15, "it is archived")

    def and_prune(*asked: Any, **named: Any) -> Request:
        reads.append(read_archive(*asked, **named))
        if len(reads) == 1:
            fill(site, tenant, range(5, 10))
            set_policy(site, tenant, period="1s")
            until_prunable(site, tenant, FLOOR)
            assert prune(site, tenant)["to_seq"] == FLOOR
        return reads[-1]

    monkeypatch.setattr(command, "_with_archive", and_prune)
    (site.folder / "keys.json").write_text(site.client.get("/v1/keys").text)
    url, place = str(site.client.base_url), str(site.folder / "archive")
    for dsn in (site.service_url, None):
        with pytest.raises(CommandExit):
            command.verify(
                url=url,
                tenant=tenant,
                with_archive=True,
                archive=place,
                dsn=dsn,
                keys=site.folder / "keys.json",
                no_state=True,
                as_json=True,
            )
        found = json.loads(capsys.readouterr().out)
        assert (found["valid"], found["verified_from_seq"], found["first_break"]) == (True, 1, None)
    assert len(reads) == 3


def archived_to(site: Site, tenant: str) -> int:
    answer = site.client.get("/v1/archive").json()
    return next((each["archived_to_seq"] for each in answer["tenants"] if each["tenant_id"] == tenant), 0)


@pytest.fixture(scope="module")
def pruned(site: Site) -> Site:
    """A tenant whose first 30 entries left; the archive has them in two ranges, and more."""
    fill(site, TENANT, range(5))
    until(lambda: archived_to(site, TENANT) >= 15, "it is archived")
    fill(site, TENANT, range(5, 10))
    set_policy(site, TENANT, period="1s")
    until_prunable(site, TENANT, FLOOR)
    prune(site, TENANT)
    until_removed(site, TENANT, FLOOR)
    fill(site, TENANT, range(10, 12))
    until(lambda: archived_to(site, TENANT) >= FLOOR + 6, "it is archived")
    (site.folder / "keys.json").write_text(site.client.get("/v1/keys").text)
    return site


@pytest.fixture
def copy(pruned: Site, tmp_path: Path) -> Path:
    """A copy of the archive, to be damaged."""
    folder = tmp_path / "archive"
    shutil.copytree(pruned.folder / "archive", folder)
    return folder


def by_command(*words: str, tenant: str = TENANT, state: Path | None = None) -> tuple[int, dict[str, Any]]:
    memory = ["--no-state"] if state is None else ["--state", str(state)]
    done = run_tally("verify", "-t", tenant, "--with-archive", *memory, "--json", *words)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def by_database(site: Site, archive: Path) -> tuple[int, dict[str, Any]]:
    keys = str(site.folder / "keys.json")
    return by_command("--dsn", site.service_url, "--keys", keys, "--archive", str(archive))


def by_service(site: Site, *words: str) -> tuple[int, dict[str, Any]]:
    return by_command("--url", str(site.client.base_url), *words)


def ok_of(found: dict[str, Any]) -> tuple[Any, ...]:
    said = [found[name] for name in ("valid", "from_seq", "verified_from_seq", "first_break")]
    return (*said, found["entries_checked"] == found["head"]["seq"], found["verdicts"]["archive"])


def test_archive_and_rest_verify_as_one_from_seq_1(pruned: Site) -> None:
    expected = (True, 1, 1, None, True, "ok")
    code, served = by_service(pruned)
    assert ok_of(served) == expected
    assert served["pruned"]["to_seq"] == FLOOR
    # The newest entries may not be signed yet.
    assert code == (3 if served["unsigned_entries"] else 0)
    code, read = by_database(pruned, pruned.folder / "archive")
    assert ok_of(read) == expected
    # The service compares the chain with its node's memory, too.
    assert read["verdicts"] == {**served["verdicts"], "checkpoint": "not_checked"}
    assert code == (3 if read["unsigned_entries"] else 0)


def ways(site: Site, archive: Path) -> dict[str, list[str]]:
    """The words by which the service, or its database, is verified with an archive."""
    keys = ["--archive", str(archive), "--keys", str(site.folder / "keys.json")]
    return {"service": ["--url", str(site.client.base_url), *keys], "database": ["--dsn", site.service_url, *keys]}


def test_a_chain_that_verifies_with_its_archive_from_seq_1_is_remembered(pruned: Site, tmp_path: Path) -> None:
    for way, words in ways(pruned, pruned.folder / "archive").items():
        _, found = by_command(*words, state=tmp_path / way)
        assert (found["memory"]["is_new"], found["memory"]["remembered"]["size"]) == (True, found["signed_to_seq"]), way
        _, again = by_command(*words, state=tmp_path / way)
        assert [each["size"] for each in again["memory"]["compared"]] == [found["signed_to_seq"]], way


def test_a_chain_that_its_archive_disputes_is_not_remembered(pruned: Site, tmp_path: Path) -> None:
    fill(pruned, "unpruned", range(2))
    until(lambda: archived_to(pruned, "unpruned") >= 6, "it is archived")
    archive = tmp_path / "archive"
    shutil.copytree(pruned.folder / "archive", archive)
    next((archive / "entries" / "tenant_id=unpruned").rglob("*.parquet")).unlink()
    for way, words in ways(pruned, archive).items():
        code, found = by_command(*words, tenant="unpruned", state=tmp_path / way)
        assert (code, found["valid"], found["memory"]["is_new"]) == (2, False, False), way


def manifests(archive: Path) -> list[Path]:
    return sorted((archive / "manifests" / TENANT).iterdir())


def first_break(found: dict[str, Any]) -> tuple[str, int]:
    return found["first_break"]["kind"], found["first_break"]["seq"]


def test_an_older_archive_that_does_not_reach_the_floor_leaves_a_hole(pruned: Site, copy: Path) -> None:
    first, *others = manifests(copy)
    for each in others:
        each.unlink()
    end = int(first.name.partition("-")[2].partition(".")[0])
    assert end < FLOOR
    for code, found in (by_database(pruned, copy), by_service(pruned, "--archive", str(copy))):
        assert (code, first_break(found)) == (2, ("archive", end + 1))
        assert (found["verdicts"]["archive"], found["verified_from_seq"]) == ("broken", FLOOR + 1)
        assert str(FLOOR) in found["first_break"]["detail"]


def test_an_archive_that_lacks_the_tenant_or_a_file_is_found(pruned: Site, copy: Path) -> None:
    next((copy / "entries" / f"tenant_id={TENANT}").rglob("*.parquet")).unlink()
    code, found = by_database(pruned, copy)
    assert (code, found["verdicts"]["archive"], found["first_break"]["kind"]) == (2, "broken", "archive")
    shutil.rmtree(copy / "manifests" / TENANT)
    code, found = by_database(pruned, copy)
    assert (code, first_break(found)) == (2, ("archive", 1))


def part_of(site: Site) -> ArchivedPart:
    keyring = Keyring.load(site.folder / "keys.json")
    return asyncio.run(archived_part(ArchiveStore(str(site.folder / "archive")), TENANT, keyring))


def test_an_archive_of_another_log_is_found(pruned: Site) -> None:
    chain = verdict(pruned, TENANT)
    named = {**chain, "pruned": {**chain["pruned"], "manifest": "0" * 64}}
    found = part_of(pruned).joined(named, "other.example/joined")
    assert (int(exit_code_of_verdict(found)), first_break(found)) == (2, ("archive", 1))
    assert found["first_break"]["detail"] == "the archive is of another log than the chain"


def test_a_manifest_that_the_prune_does_not_name_is_found(pruned: Site) -> None:
    chain = verdict(pruned, TENANT)
    named = {**chain, "pruned": {**chain["pruned"], "manifest": "0" * 64}}
    found = part_of(pruned).joined(named, None)
    assert (int(exit_code_of_verdict(found)), found["first_break"]["kind"]) == (2, "archive")
    assert found["first_break"]["actual"] == chain["pruned"]["manifest"]


def test_an_archive_by_keys_that_are_not_known_is_told(pruned: Site, tmp_path: Path) -> None:
    keys = tmp_path / "other.pem"
    keys.write_text(STRANGER.public_key_pem)
    code, found = by_service(pruned, "--keys", str(keys))
    assert (code, found["verdicts"]["archive"], found["valid"]) == (4, "unknown_key", False)


# --- jobs of an archive -------------------------------------------------------------------------------


def jobs_of(site: Site, *words: str, code: int = 0) -> Any:
    archive = ("--archive", str(site.folder / "archive"), "--url", str(site.client.base_url))
    done = run_tally("jobs", "-t", TENANT, *archive, "--json", *words)
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout) if done.stdout else done.stderr


def test_jobs_that_left_are_listed_and_shown_from_the_archive(pruned: Site) -> None:
    listed = jobs_of(pruned)["items"]
    assert [job["job_id"] for job in listed] == [f"job-{number}" for number in range(11, -1, -1)]
    of_service = pruned.client.get("/v1/jobs", params={"tenant_id": TENANT}).json()["items"]
    assert listed[:2] == of_service
    assert [job["job_id"] for job in jobs_of(pruned, "--where", "spec.team=ml", "--limit", "2")["items"]] == [
        "job-11",
        "job-9",
    ]
    assert jobs_of(pruned, "--status", "failed")["items"] == []
    assert [job["job_id"] for job in jobs_of(pruned, "--until", listed[-2]["created_hlc"])["items"]] == ["job-0"]
    assert pruned.client.get("/v1/jobs/job-3", params={"tenant_id": TENANT}).status_code == 410
    left = jobs_of(pruned, "job-3")
    assert (left["status"], left["spec"], len(left["events"])) == ("COMPLETED", {"team": "ml"}, 3)
    here = jobs_of(pruned, "job-11")
    served = pruned.client.get("/v1/jobs/job-11", params={"tenant_id": TENANT}).json()
    assert {name: value for name, value in served.items() if name in here} == {
        name: value for name, value in here.items() if name in served
    }
    events = pruned.client.get("/v1/jobs/job-11/events", params={"tenant_id": TENANT}).json()["items"]
    assert here["events"] == [{**event, "state": "COMPACTED"} for event in events]
    assert "no job job-99" in jobs_of(pruned, "job-99", code=1)


def test_a_list_in_many_passes_is_the_same_list(pruned: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    found = archived_jobs(str(pruned.folder / "archive"), TENANT, Keyring.load(pruned.folder / "keys.json"))
    whole = found.find(JobFilter(), None, None, None)
    monkeypatch.setattr(archived, "ROWS_A_PASS", 7)
    assert found.find(JobFilter(), None, None, None) == whole
    assert found.find(JobFilter(), None, None, 3) == whole[:3]
    monkeypatch.setattr(archived, "LISTED_MAX", 5)
    with pytest.raises(InvalidInputError, match="more than 5 jobs match"):
        found.find(JobFilter(), None, None, None)


def test_an_archive_that_was_changed_or_is_of_strangers_answers_no_job(pruned: Site, copy: Path) -> None:
    stranger = Keyring.of([STRANGER.public_key_pem])
    with pytest.raises(UnknownKeyError, match="name the key that signed it"):
        archived_jobs(str(copy), TENANT, stranger)
    file = next((copy / "entries" / f"tenant_id={TENANT}").rglob("*.parquet"))
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(ArchiveInvalidError):
        archived_jobs(str(copy), TENANT, Keyring.load(pruned.folder / "keys.json"))
