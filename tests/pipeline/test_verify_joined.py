"""Spark verifies a database and its archive as one, from seq 1, and finds where they do not belong together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from ledger.errors import ArchiveInvalidError
from ledger.exit_code import exit_code_of_verdict
from ledger.machines.carried import carry_commitments, digest_of_carried
from objects.store import ArchiveStore
from pipeline.archive.ranges import archived_end
from pipeline.diff import diff
from pipeline.places import parse_place
from pipeline.places.joined import OpenJoined
from pipeline.report.jobs import entries, left_of
from pipeline.verify import verify_joined
from tests.conftest import Database
from tests.ledger.committed import RACE
from tests.ledger.ledger_in_memory import SIGNER, Ledger
from tests.ledger.pruned import enter, floor_facts, judged_entries, pruned_race, removed, without
from tests.pipeline.archived_ledgers import LOG_ORIGIN, RING, archive_here, days, ledger_of, query, store
from tests.tally import run_tally

FLOOR = 30
RACED = 10
"""The floor of a race for commitments."""
PRUNED = 14
"""The entry of the race that carries their state."""
COUNT = 60


def grown(tenant_id: str) -> tuple[Ledger, Ledger]:
    """A ledger of 40 entries to be archived, and what it becomes: 60 entries."""
    return ledger_of(tenant_id, days(40)), ledger_of(tenant_id, days(COUNT))


def prune(ledger: Ledger, manifest: str, lacks: int | None = None) -> None:
    """Remove the first entries by the last one; the index of jobs that is signed then may lack an entry."""
    facts = floor_facts(ledger, FLOOR) | {"manifests": [manifest]}
    ledger.snapshots = [each for each in ledger.snapshots if each["to_seq"] <= COUNT - 10]
    enter(ledger, COUNT, "PRUNED", facts, log=f"{LOG_ORIGIN}/{ledger.tenant_id}")
    ledger.sign(COUNT, job_index=(ledger if lacks is None else without(ledger, lacks)).job_index(COUNT))
    ledger.store_head()
    ledger.store_tree()
    ledger.keep_index(FLOOR)
    ledger.entries = [row for row in ledger.entries if row["seq"] > FLOOR]
    ledger.store_jobs()


TENANTS = ("joined", "misnamed", "older", "rolled-back", "lost", "whole")


async def archived_and_pruned(
    database: Database, folder: Path, tenant: str, archived_to: int = 40, lacks: int | None = None
) -> Ledger:
    """A tenant of which entries 1 to ``archived_to`` are archived, and then those up to ``FLOOR`` left."""
    await store(database, ledger_of(tenant, days(archived_to)))
    archive_here(database, folder)
    end = archived_end(ArchiveStore(str(folder)), tenant, RING)
    assert end is not None
    ledger = ledger_of(tenant, days(COUNT))
    prune(ledger, end.manifest, lacks)
    await store(database, ledger)
    return ledger


@pytest.mark.parametrize("lacks", [None, FLOOR + 1])
async def test_the_archive_gives_the_index_of_what_left_where_the_database_has_not_kept_it(
    spark: SparkSession, database: Database, tmp_path: Path, lacks: int | None
) -> None:
    await archived_and_pruned(database, tmp_path / "archive", "acme", lacks=lacks)
    await query(database, "DELETE FROM scheduler.job_index_left")
    keys = tmp_path / "keys.pem"
    keys.write_text(SIGNER.public_key_pem)
    command = ["verify", "-t", "acme", "--dsn", database.service_url, "--keys", keys, "--no-state", "--json"]
    archive = ["--with-archive", "--archive", tmp_path / "archive"]
    alone, joined = (json.loads(run_tally(*command, *more).stdout) for more in ([], archive))
    with parse_place(database.service_url).open() as place, parse_place(str(tmp_path / "archive")).open() as there:
        (on_spark,) = verify_joined(spark, place, there, tenants=["acme"], keyring=RING, checkpoints={}).objects
    assert (alone["verdicts"]["snapshots"], alone["first_break"]) == ("not_checked", None)
    for found in (joined, on_spark):
        if lacks is None:
            assert (found["verdicts"]["snapshots"], found["first_break"]) == ("ok", None)
        else:
            assert (found["first_break"]["kind"], found["first_break"]["seq"]) == ("snapshot-root", COUNT)
            assert "job_index of entries" in found["first_break"]["detail"]


async def test_a_report_reads_what_left_from_the_archive_once_or_says_from_where_it_speaks(
    spark: SparkSession, database: Database, tmp_path: Path
) -> None:
    await archived_and_pruned(database, tmp_path, "acme")
    with parse_place(database.service_url).open() as place, parse_place(str(tmp_path)).open() as archive:
        both = OpenJoined(place, archive)
        seqs = sorted(row.seq for row in entries(spark, [both], ["acme"], None).select("seq").collect())
        assert seqs == [*range(1, COUNT + 1)]
        assert left_of(both, ["acme"]) == []
        alone = sorted(row.seq for row in entries(spark, [place], ["acme"], None).select("seq").collect())
        assert alone == [*range(FLOOR + 1, COUNT + 1)]
        assert left_of(place, None) == [{"tenant_id": "acme", "from_seq": FLOOR + 1}]


async def test_a_report_refuses_an_archive_that_lacks_what_left(
    spark: SparkSession, database: Database, tmp_path: Path
) -> None:
    await archived_and_pruned(database, tmp_path, "acme", archived_to=20)
    with (
        parse_place(database.service_url).open() as place,
        parse_place(str(tmp_path)).open() as archive,
        pytest.raises(ArchiveInvalidError, match="the archive ends before"),
    ):
        entries(spark, [OpenJoined(place, archive)], ["acme"], None)


async def test_what_left_is_no_difference_from_a_copy_that_has_it(
    spark: SparkSession, database: Database, tmp_path: Path
) -> None:
    await archived_and_pruned(database, tmp_path / "whole", "whole")
    await archived_and_pruned(database, tmp_path / "older", "older", archived_to=20)
    with parse_place(database.service_url).open() as place:
        for name, only_here in (("whole", COUNT - 40), ("older", COUNT - FLOOR)):
            with parse_place(str(tmp_path / name)).open() as archive:
                (found,) = diff(spark, place, archive, tenants=[name]).tenants
                assert (found.only_in, found.pruned_to) == ({"a": only_here, "b": 0}, {"a": FLOOR}), name
                assert found.to_json()["pruned_to_a"] == FLOOR
                (turned,) = diff(spark, archive, place, tenants=[name]).tenants
                assert (turned.only_in, turned.pruned_to) == ({"a": 0, "b": only_here}, {"b": FLOOR}), name


def raced(tenant: str, manifest: str = "0" * 64, **facts: Any) -> Ledger:
    """A ledger of commitments whose entries up to ``RACED`` leave, and are still here."""
    return pruned_race(RACE, RACED, log=f"{LOG_ORIGIN}/{tenant}", tenant_id=tenant, manifests=[manifest], **facts)


async def archive_and_prune_race(database: Database, folder: Path, tenant: str, **forged: Any) -> None:
    early = raced(tenant)
    early.entries = early.entries[:RACED]
    early.snapshots = [each for each in early.snapshots if each["to_seq"] <= RACED]
    early.promised, early.jobs = [], []
    early.store_head()
    early.store_tree()
    await store(database, early)
    archive_here(database, folder)
    end = archived_end(ArchiveStore(str(folder)), tenant, RING)
    assert end is not None
    await store(database, removed(raced(tenant, end.manifest, **forged), RACED))


async def test_a_prune_that_carries_other_commitments_than_left_is_found_by_every_verifier(
    spark: SparkSession, database: Database, tmp_path: Path
) -> None:
    folder, keys = tmp_path / "archive", tmp_path / "keys.pem"
    keys.write_text(SIGNER.public_key_pem)
    state = carry_commitments(None, judged_entries(raced("any"), RACED))
    assert state is not None
    # Nothing in the rest of the chain, or in the table of commitments, depends on that capacity.
    forged = {**state, "nodes": [{**state["nodes"][0], "capacity": {"cpu_millis": 200}}]}
    assert forged != state
    states: dict[str, dict[str, Any]] = {
        "right": {},
        "forged": {"commitments": forged},
        "dropped": {"commitments": None},
    }
    for tenant, facts in states.items():
        await archive_and_prune_race(database, folder, tenant, **facts)

    def by_command(tenant: str, *words: str) -> dict[str, Any]:
        command = ("verify", "-t", tenant, "--dsn", database.service_url, "--keys", keys, "--no-state", "--json")
        found: dict[str, Any] = json.loads(run_tally(*command, *words).stdout)
        return found

    # The database alone shows nothing of it.
    assert by_command("forged")["verdicts"]["projection"] == "ok"
    joined = {each: by_command(each, "--with-archive", "--archive", str(folder)) for each in states}
    with parse_place(database.service_url).open(RING) as place, parse_place(str(folder)).open(RING) as archives:
        verified = verify_joined(spark, place, archives, tenants=[*states], keyring=RING, checkpoints={})
        on_spark = {each["tenant_id"]: each for each in verified.objects}
        verified.close()
    for found in (joined, on_spark):
        assert "carried" not in found["right"]["breaks"]
        assert found["right"]["verdicts"]["archive"] == "ok"
        for tenant in ("forged", "dropped"):
            verdict = found[tenant]
            assert (verdict["breaks"]["carried"], verdict["verdicts"]["archive"]) == (1, "broken")
            assert int(exit_code_of_verdict(verdict)) == 2
        broken = found["forged"]["first_break"]
        assert (broken["kind"], broken["seq"], broken["expected"]) == ("carried", PRUNED, digest_of_carried(state))
        assert broken["actual"] == digest_of_carried(forged)


async def test_a_database_and_its_archive_are_one_chain(
    spark: SparkSession, database: Database, tmp_path: Path
) -> None:
    ledgers = {name: grown(name) for name in TENANTS}
    folder = tmp_path / "archive"
    await store(database, *(early for early, _ in ledgers.values()))
    await store(database, ledger_of("older", days(20)))
    archive_here(database, folder)
    later: list[Ledger] = []
    for name, (_, whole) in ledgers.items():
        # Of one ledger the database is older than its archive, and one is gone from it.
        ledger = ledger_of(name, days(20)) if name == "rolled-back" else whole
        end = archived_end(ArchiveStore(str(folder)), name, RING)
        assert end is not None
        if name in ("joined", "misnamed", "older"):
            prune(ledger, "0" * 64 if name == "misnamed" else end.manifest)
        ledger.store_jobs()
        later += [Ledger(name) if name == "lost" else ledger]
    await store(database, *later)
    with parse_place(database.service_url).open(RING) as place, parse_place(str(folder)).open(RING) as archives:
        names = sorted({*place.tenants(), *archives.tenants()})
        verified = verify_joined(spark, place, archives, tenants=names, keyring=RING, checkpoints={})
        listed = {row.tenant_id for row in verified.breaks().collect()}
        verified.close()
    found: dict[str, dict[str, Any]] = {each["tenant_id"]: each for each in verified.objects}
    first = {
        name: None if each["first_break"] is None else (each["first_break"]["kind"], each["first_break"]["seq"])
        for name, each in found.items()
    }
    assert first == {
        "joined": None,
        "whole": None,
        "misnamed": ("archive", 1),
        "older": ("archive", 21),
        "rolled-back": ("rollback", 21),
        "lost": ("rollback", 40),
    }
    assert listed >= {"rolled-back"}
    joined = found["joined"]
    assert (joined["from_seq"], joined["verified_from_seq"], joined["entries_checked"]) == (1, 1, COUNT)
    assert joined["pruned"]["to_seq"] == FLOOR
    assert {aspect for aspect, said in joined["verdicts"].items() if said != "ok"} == {"checkpoint"}
    codes = {name: int(exit_code_of_verdict(each)) for name, each in found.items()}
    assert codes == {name: 0 if name in ("joined", "whole") else 2 for name in TENANTS}
