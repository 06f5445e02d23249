"""Spark, and the processes that check ranges for a node, name what a caller did not sign as one process does."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from app.read import checking
from app.store.chain_reader import consistent_reader
from ledger.verification import Verdict, driver, verify
from pipeline.places import parse_place
from pipeline.verify import verify as verify_on_spark
from signing.callers import KeyedJudge
from signing.keys import Keyring
from tests.conftest import Database, connected_to
from tests.ledger.callers import known
from tests.ledger.ledger_in_memory import OPEN, SIGNER, Ledger
from tests.ledger.test_caller_check import ATTACKS, SIGNED_SEQ, edit, mend, requirement, signed_ledger
from tests.pipeline.archived_ledgers import store

CALLERS = known(required=[requirement(5, "JobAccepted")])
RING = Keyring([SIGNER.public_key], callers=CALLERS)


def ledgers() -> dict[str, Ledger]:
    """By tenant: sound, unsigned where it must be signed, repeated, forged. A pattern names tenant acme alone."""
    found = {name: signed_ledger() for name in ("sound", "unsigned", "repeated", "forged")}
    edit(found["unsigned"].entry(SIGNED_SEQ), signature=None)
    again = {**found["repeated"].entry(SIGNED_SEQ), "seq": 13, "hlc_logical": 7}
    again["t_hlc"] = f"{again['hlc_physical']}:7:{again['hlc_node']}"
    found["repeated"].entries.append(again)
    ATTACKS["forged"](found["forged"])
    return {name: mend(ledger) for name, ledger in found.items()}


FIRST = {"sound": None, "unsigned": SIGNED_SEQ, "repeated": 13, "forged": SIGNED_SEQ}


async def test_spark_and_checking_processes_name_what_was_done_to_signed_events(
    spark: SparkSession, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "RANGE_ENTRIES", 4)
    for name, ledger in ledgers().items():
        async with connected_to(database.superuser_url) as connection:
            await connection.execute("SET session_replication_role = replica")
            await connection.execute("TRUNCATE scheduler.jobs, scheduler.merkle_tile, scheduler.merkle_head")
        await store(database, ledger)
        with parse_place(database.superuser_url).open() as place:
            found = verify_on_spark(spark, place, keyring=RING, rows_a_piece=4)
        (verdict,) = found.objects
        found.close()
        first = verdict["first_break"]
        assert (None if first is None else (first["kind"], first["seq"])) == _expected(name), name
        broken = (await _in_processes(database)).first_break
        assert (None if broken is None else (broken.kind, broken.seq)) == _expected(name), name


def _expected(name: str) -> tuple[str, int] | None:
    seq = FIRST[name]
    return None if seq is None else ("caller-signature", seq)


async def _in_processes(database: Database) -> Verdict:
    judge = KeyedJudge(CALLERS)
    async with (
        connected_to(database.service_url) as connection,
        consistent_reader(connection, "acme") as reader,
        checking.checking(database.service_url, reader, None, judge.saved()) as elsewhere,
    ):
        return await verify(reader, tenant_id="acme", open_snapshot=OPEN, callers=judge, elsewhere=elsewhere)
