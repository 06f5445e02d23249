"""Spark judges verdicts on proposals as one process does, of a database and of an archive."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from app.store.chain_reader import consistent_reader
from ledger.verification import verify as verify_here
from objects.store import ArchiveStore
from pipeline.archive.reader import verify_tenant
from pipeline.places import parse_place
from pipeline.places.archive import ArchivePlace
from pipeline.verify import verify
from tests.app.chain_builder import insert
from tests.app.test_tamper import Connection, drop_guards
from tests.conftest import Database
from tests.ledger.committed import RACE, committed, flipped
from tests.ledger.ledger_in_memory import OPEN, Ledger
from tests.pipeline.archived_ledgers import RING, archive_here, store
from tests.pipeline.test_verify_files import listed, plain
from tests.pipeline.test_verify_postgres import without_guards

Edit = Callable[[Ledger], Ledger]


def flip(seq: int) -> Edit:
    return lambda ledger: flipped(ledger, seq)


def promise(index: int, **values: Any) -> Edit:
    def edit(ledger: Ledger) -> Ledger:
        next(row for row in ledger.promised if row["seq"] == index).update(values)
        return ledger

    return edit


def forget(index: int) -> Edit:
    def edit(ledger: Ledger) -> Ledger:
        ledger.promised = [row for row in ledger.promised if row["seq"] != index]
        return ledger

    return edit


BREAKS: dict[str, tuple[int | None, Edit]] = {
    "sound": (None, lambda ledger: ledger),
    "accepted": (8, flip(8)),
    "rejected": (6, flip(6)),
    "revoked-not": (9, flip(9)),
    "ended-not": (6, promise(6, ended_seq=None)),
    "ended-early": (6, promise(6, ended_seq=8)),
    "of-another": (10, promise(10, subject="capsule:z")),
    "nameless": (10, promise(10, subject=None)),
    "placeless": (1, promise(10, seq=None)),
    "left-out": (7, forget(7)),
}


async def test_a_database_gets_the_verdict_of_the_service(
    spark: SparkSession, superuser: Connection, database: Database
) -> None:
    connection = await without_guards(superuser)
    await drop_guards(connection, "commitments")
    for name, (_, edit) in BREAKS.items():
        ledger = edit(committed(RACE, tenant_id=name))
        await insert(connection, ledger)
    with parse_place(database.service_url).open() as place:
        verified = verify(spark, place, keyring=RING, rows_a_piece=3)
        told = listed(verified)
        verified.close()
    found = {each["tenant_id"]: each for each in verified.objects}
    assert found.keys() == BREAKS.keys()
    for name, (seq, _) in BREAKS.items():
        async with consistent_reader(connection, name) as reader:
            expected = (await verify_here(reader, tenant_id=name, open_snapshot=OPEN)).to_json(0)
        assert plain(found[name]) == plain(expected), name
        assert (expected["first_break"] or {}).get("seq") == seq, name
        assert told[name, "projection"] == expected["breaks"].get("projection", 0), name


@pytest.mark.parametrize(("seq", "said"), [(None, "ok"), (8, "broken")])
async def test_an_archive_is_judged(
    spark: SparkSession, database: Database, tmp_path: Path, seq: int | None, said: str
) -> None:
    ledger = committed(RACE)
    await store(database, ledger if seq is None else flipped(ledger, seq))
    archive_here(database, tmp_path)
    here = await verify_tenant(ArchiveStore(str(tmp_path)), "acme", RING)
    with ArchivePlace(str(tmp_path)).open() as place:
        verified = verify(spark, place, keyring=RING)
        told = listed(verified)
        verified.close()
    (found,) = verified.objects
    assert plain(found) == plain(here)
    assert (found["verdicts"]["projection"], (found["first_break"] or {}).get("seq")) == (said, seq)
    assert told["acme", "projection"] == (seq is not None)
