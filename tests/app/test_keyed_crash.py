"""A request with an Idempotency-Key in which the node crashed happens once, whichever of its lines reached the disk."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

import asyncpg
import pytest

from app.dev.embedded import EmbeddedPostgres
from app.node.wiring import running
from app.runtime.settings.config import Settings
from app.write.pending.requests import Draft, EventLines
from ledger.errors import DurabilityTimeoutError, IdempotencyReusedError
from ledger.facts.events import BATCH_RECORD_TYPE
from tests.app.chains import Chains, held, numbers, until
from tests.app.conftest import MakeSettings, RunNode
from tests.app.drafts import GLOBAL, created, key
from tests.app.hurry import hurried
from tests.app.test_keyed import lines
from tests.conftest import Database, connected_to, fresh_database, spread
from tests.running_copy import copy_running
from wal.format import RECORD, SEGMENT_HEADER_BYTES
from wal.segment import list_segments

ACME, BOTH = (10, ("acme",)), (10, ("acme", "beta"))
CRASHES = spread(
    [
        (drafts, kept, again)
        for drafts in (ACME, BOTH)
        for again in ("while the rest is pending", "once the rest is chained", "after another restart")
        for kept in (0, 1, 6, 10)
    ],
    6,
)
"""Number and tenants of the lines, how many of these the crash left, and when they are sent again."""


class Crashed(NamedTuple):
    """A node that died with a keyed request in its WAL, of which nothing was chained, and its database.

    Each test has copies of both: the database is ``database``, and ``left_behind`` gives it the folder.
    """

    database: Database
    data_dir: Path
    node_id: str
    drafts: list[Draft]
    seen: DurabilityTimeoutError
    """What the caller saw."""

    def left_behind(self, settings: Settings, kept: int) -> Settings:
        """The node of ``settings`` as a crash in the fsync left it, after ``kept`` lines of the request."""
        assert self.seen.lsn is not None
        shutil.copytree(self.data_dir, settings.data_dir)
        cut_behind(settings.wal_dir / self.node_id, self.seen.lsn - len(self.drafts) + kept)
        return settings


def cut_behind(wal_folder: Path, lsn: int) -> None:
    """Cut the WAL behind the record of ``lsn``, as a crash in the fsync of what follows would."""
    segment = list_segments(wal_folder)[-1].path
    data = segment.read_bytes()
    at = SEGMENT_HEADER_BYTES
    while at < len(data):
        _, length, record_lsn, _, _, _, _, kind = RECORD.unpack_from(data, at)
        if length == 0 or (kind != BATCH_RECORD_TYPE and record_lsn > lsn):
            break
        at += length
    os.truncate(segment, at)


@pytest.fixture(scope="module")
def drafts(request: pytest.FixtureRequest) -> list[Draft]:
    """The lines of the request: how many, of which tenants."""
    count, tenants = request.param
    return lines(count, tenants)


@pytest.fixture(scope="module")
def crashed_database(postgres: EmbeddedPostgres, drafts: list[Draft]) -> Iterator[Database]:
    with fresh_database(postgres) as database:
        yield database


@pytest.fixture(scope="module")
async def crashed(
    crashed_database: Database,
    make_shared_settings: MakeSettings,
    drafts: list[Draft],
    tmp_path_factory: pytest.TempPathFactory,
) -> Crashed:
    """A node that crashed while chains stood still: once for all tests of these lines."""
    folder = tmp_path_factory.mktemp("crashed")
    alive, copy = make_shared_settings(folder / "alive", shutdown_grace="100ms"), folder / "copy"
    async with connected_to(crashed_database.superuser_url) as superuser, AsyncExitStack() as holding:
        async with running(alive, crashed_database.service_url) as (service, _services):
            for tenant in {draft.tenant_id for draft in drafts}:
                await service.submitter.submit(created(tenant, 100), key=None)
            await until(Chains(superuser).key_recorded, "the node has recorded its key")
            await holding.enter_async_context(held(superuser))
            with hurried(service), pytest.raises(DurabilityTimeoutError) as seen:
                await service.submitter.submit_lines(EventLines.of(drafts), durability=GLOBAL, key=key("k"))
            assert seen.value.lsn is not None
            await service.node.durable.reached(seen.value.lsn)
            copy_running(alive.data_dir, copy)
        # The server ends the sessions of the dead: one of them waits for a head and has passed the fence.
        await superuser.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
    return Crashed(crashed_database, copy, service.node.node_id, drafts, seen.value)


@pytest.fixture
def database(postgres: EmbeddedPostgres, crashed: Crashed) -> Iterator[Database]:
    """The database of ``crashed``, for one test."""
    with fresh_database(postgres, crashed.database.name) as database:
        yield database


@pytest.mark.exhaustive
@pytest.mark.parametrize(("drafts", "kept", "again"), CRASHES, indirect=["drafts"])
async def test_a_repetition_adds_only_the_lines_that_a_crash_tore_off(
    run_node: RunNode,
    make_settings: MakeSettings,
    crashed: Crashed,
    superuser: asyncpg.Connection,
    chains: Chains,
    again: str,
    kept: int,
) -> None:
    settings = crashed.left_behind(make_settings(), kept)
    tenants = await chains.tenants()
    tenants.remove("_system")
    if again == "after another restart":
        async with run_node(settings) as service:
            await until(lambda: service.node.chained.lsn >= service.writer.durable_lsn, "the rest is chained")
    async with AsyncExitStack() as holding:
        if again != "after another restart":
            await holding.enter_async_context(held(superuser))
        async with run_node(settings) as service:
            if again == "once the rest is chained":
                await holding.aclose()
                await until(lambda: service.node.chained.lsn >= service.writer.durable_lsn, "the rest is chained")
            first_lsn = service.writer.next_lsn
            repeated = asyncio.create_task(
                service.submitter.submit_lines(EventLines.of(crashed.drafts), durability=GLOBAL, key=key("k"))
            )
            if again == "while the rest is pending":
                await until(lambda: service.writer.next_lsn > first_lsn or kept == 10, "what is missing is entered")
                await holding.aclose()
            receipt = await repeated
            assert (receipt.accepted, len(receipt.job_ids)) == (10, 10)
            once_more = await service.submitter.submit_lines(
                EventLines.of(crashed.drafts), durability=GLOBAL, key=key("k")
            )
            assert once_more == receipt._replace(replayed=True)
            entries = [entry for tenant in tenants for entry in await chains.sound(tenant)]
    assert sorted(numbers(entries)) == [*range(10), *[100] * len(tenants)]
    assert [entry["job_id"] for n in range(10) for entry in entries if numbers([entry]) == [n]] == receipt.job_ids


@pytest.mark.parametrize("drafts", [(1, ("acme",))], indirect=True)
async def test_a_repetition_after_a_crash_waits_for_the_event_that_the_wal_kept(
    run_node: RunNode, make_settings: MakeSettings, crashed: Crashed, superuser: asyncpg.Connection, chains: Chains
) -> None:
    async with AsyncExitStack() as holding:
        await holding.enter_async_context(held(superuser))
        async with run_node(crashed.left_behind(make_settings(), 1)) as service:
            repeated = asyncio.create_task(service.submitter.submit(crashed.drafts[0], key=key("k")))
            with pytest.raises(IdempotencyReusedError):
                await service.submitter.submit(crashed.drafts[0], key=key("k", "another"))
            assert not repeated.done()
            await holding.aclose()
            receipt = await repeated
            assert (receipt.hlc, receipt.lsn, receipt.job_id) == (
                crashed.seen.hlc,
                crashed.seen.lsn,
                crashed.seen.job_id,
            )
            assert receipt.replayed
    assert numbers(await chains.sound("acme")) == [100, 0]
