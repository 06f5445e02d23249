"""Spark verifies a database and its archive as one, from seq 1, and finds where they do not belong together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from ledger.exit_code import exit_code_of_verdict
from objects.store import ArchiveStore
from pipeline.archive.ranges import archived_end
from pipeline.places import parse_place
from pipeline.verify.joined import verify_joined
from tests.conftest import Database
from tests.ledger.ledger_in_memory import Ledger
from tests.ledger.pruned import enter, floor_facts
from tests.pipeline.archived_ledgers import LOG_ORIGIN, RING, archive_here, days, ledger_of, store

FLOOR = 30
COUNT = 60


def grown(tenant_id: str) -> tuple[Ledger, Ledger]:
    """A ledger of 40 entries to be archived, and what it becomes: 60 entries."""
    return ledger_of(tenant_id, days(40)), ledger_of(tenant_id, days(COUNT))


def prune(ledger: Ledger, manifest: str) -> None:
    """Remove the first entries by the last one."""
    facts = floor_facts(ledger, FLOOR) | {"manifests": [manifest]}
    ledger.snapshots = [each for each in ledger.snapshots if each["to_seq"] <= COUNT - 10]
    enter(ledger, COUNT, "PRUNED", facts, log=f"{LOG_ORIGIN}/{ledger.tenant_id}")
    ledger.sign(COUNT)
    ledger.store_head()
    ledger.store_tree()
    ledger.entries = [row for row in ledger.entries if row["seq"] > FLOOR]
    ledger.snapshots = [each for each in ledger.snapshots if each["from_seq"] > FLOOR]
    ledger.store_jobs()


TENANTS = ("joined", "misnamed", "older", "rolled-back", "lost", "whole")


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
