"""A prune and what happens beside it: holds, other prunes and processes that die, at every step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import asyncpg
import pytest

from app.edge.accepted import Services
from app.node.service import Service
from app.node.wiring import running
from app.read import checking
from app.read.verification import ChainVerifier
from app.share.retention import Planner, Prunes, StoredArchive
from app.share.retention.pruning import Pruned
from app.store import retention
from app.store.appended import ChainPosition
from app.write.intake.tenant_changes import RetentionChanges
from ledger.errors import ArchivedError, ArchiveInvalidError, ChainDamagedError, InvalidInputError, ProblemError
from ledger.facts.events import SystemAction
from ledger.machines.retention import Place, Retention
from pipeline.archive.ranges import ArchivedEnd
from signing.keys import Keyring
from tests.app.chains import until
from tests.app.conftest import MakeSettings
from tests.app.drafts import completed, created
from tests.conftest import Database

TENANT = "acme"
JOBS = 10


class Running(NamedTuple):
    """A node, its services, and a connection that may do anything."""

    service: Service
    services: Services
    superuser: asyncpg.Connection

    @property
    def changes(self) -> RetentionChanges:
        found: RetentionChanges = self.services[RetentionChanges]
        return found

    @property
    def prunes(self) -> Prunes:
        found: Prunes = self.services[Prunes]
        return found

    async def prune(self) -> Pruned:
        return await self.prunes.prune(TENANT, None, "ops")

    async def read(self) -> Retention:
        return await self.changes.read(TENANT)

    async def first_seq(self) -> int:
        query = "SELECT min(seq) FROM scheduler.scheduler_log WHERE tenant_id = $1"
        return int(await self.superuser.fetchval(query, TENANT))

    async def is_valid(self) -> bool:
        verdict = (await self.services[ChainVerifier].again(TENANT)).verdict
        assert verdict.first_break is None, verdict
        return bool(verdict.is_valid)

    async def removed(self, to_seq: int) -> None:
        await until(lambda: self._begins_behind(to_seq), "the rows have left")

    async def _begins_behind(self, to_seq: int) -> bool:
        return await self.first_seq() == to_seq + 1


RunSite = Callable[..., Any]


@pytest.fixture
def run(database: Database, make_settings: MakeSettings, superuser: asyncpg.Connection, tmp_path: Path) -> RunSite:
    """Runs a node on one ledger with an archive; again after it has ended."""

    @asynccontextmanager
    async def run(**given: Any) -> AsyncIterator[Running]:
        archive = {"url": str(tmp_path / "archive"), "interval": "1s"}
        settings = make_settings(archive=archive, chain={"batch_size": 10}, **given)
        async with running(settings, database.service_url) as (service, services):
            await service.key_changes.recorded.wait()
            yield Running(service, services, superuser)

    return run


async def fill(node: Running) -> None:
    """Jobs that have ended, two under way at a time, are signed and archived, and a policy by which they may leave."""
    for number in range(0, JOBS, 2):
        pair = [await node.service.submitter.submit(created(TENANT, number + each), key=None) for each in range(2)]
        for job in pair:
            await node.service.submitter.submit(completed(TENANT, job.job_id), key=None)
    await node.changes.set_policy(TENANT, 1, None, "ops")
    await node.service.notary.sign_now(TENANT)
    planner: Planner = node.services[Planner]

    async def is_prunable() -> bool:
        return (await planner.plan(TENANT)).plan.to_seq >= 2 * JOBS

    await until(is_prunable, "the entries are old enough and archived")


class HeldMeanwhile(StoredArchive):
    """An archive during whose reading back something happens."""

    def __init__(self, url: str, meanwhile: Callable[[], object]) -> None:
        super().__init__(url)
        self._meanwhile = meanwhile

    def read_back(self, tenant_id: str, keyring: Keyring, from_seq: int, to_seq: int) -> Sequence[ArchivedEnd]:
        found = super().read_back(tenant_id, keyring, from_seq, to_seq)
        self._meanwhile()
        return found


async def test_a_hold_that_is_placed_while_a_prune_is_proved_stops_it(run: RunSite) -> None:
    async with run() as node:
        await fill(node)
        loop = asyncio.get_running_loop()

        def hold() -> None:
            placing = node.changes.place(TENANT, "case 4711", None, None, "legal")
            asyncio.run_coroutine_threadsafe(placing, loop).result(60)

        assert node.prunes.archive is not None
        node.prunes.archive = HeldMeanwhile(node.prunes.archive.url, hold)
        assert (await node.prune()).seq is None
        assert (await node.read()).floor is None


async def test_a_hold_that_is_chained_before_the_prune_voids_its_entry(run: RunSite) -> None:
    async with run() as node:
        await fill(node)
        enter = node.prunes.enter

        async def behind_a_hold(
            action: SystemAction, tenant: str, facts: Mapping[str, object], after: Place, actor: str | None
        ) -> ChainPosition | None:
            await node.changes.place(tenant, "case 4711", None, None, "legal")
            return await enter(action, tenant, facts, after, actor)

        node.prunes.enter = behind_a_hold
        with pytest.raises(ProblemError, match="chained before this one"):
            await node.prune()
        found = await node.read()
        assert (found.floor, len(found.holds)) == (None, 1)
        # The entry is in the chain, and no row leaves by it, not even by the function of the schema's owner.
        assert await node.superuser.fetch("SELECT * FROM scheduler.remove_covered($1, 1, 100, 100)", TENANT) == []
        assert await node.is_valid()


async def test_jobs_whose_entries_leave_are_not_held_any_more(run: RunSite) -> None:
    async with run() as node:
        await fill(node)
        node.prunes.wake_removal = lambda: None
        query = "SELECT job_id FROM scheduler.scheduler_log WHERE tenant_id = $1 AND seq = 1"
        leaving = await node.superuser.fetchval(query, TENANT)
        await node.prune()
        here = (await node.service.submitter.submit(created(TENANT, JOBS), key=None)).job_id
        with pytest.raises(ArchivedError, match=leaving):
            await node.changes.place(TENANT, "too late", [leaving], None, "legal")
        with pytest.raises(InvalidInputError, match="0"):
            await node.changes.place(TENANT, "too late", [leaving], "spec.team:ml", "legal")
        found = await node.changes.place(TENANT, "case 4711", [leaving, here], "spec.team:ml", "legal")
        assert found.job_ids == (here,)


async def test_a_hold_of_a_job_that_a_prune_took_first_says_so(run: RunSite) -> None:
    async with run() as node:
        await fill(node)
        query = "SELECT job_id FROM scheduler.scheduler_log WHERE tenant_id = $1 AND seq = 1"
        job_id = await node.superuser.fetchval(query, TENANT)
        write = node.changes._write

        async def behind_a_prune(action: SystemAction, *given: Any) -> ChainPosition:
            if action == SystemAction.HOLD_PLACED:
                await node.prune()
            return await write(action, *given)

        node.changes._write = behind_a_prune  # type: ignore[method-assign]
        with pytest.raises(ArchivedError, match=job_id):
            await node.changes.place(TENANT, "case 4711", [job_id], None, "legal")
        assert len((await node.read()).holds) == 1


async def test_of_two_prunes_at_once_one_wins(run: RunSite) -> None:
    async with run() as node:
        await fill(node)
        other = Prunes(
            planner=node.prunes.planner,
            pool=node.prunes.pool,
            archive=node.prunes.archive,
            verify=node.prunes.verify,
            enter=node.prunes.enter,
            wake_removal=lambda: None,
        )
        both = await asyncio.gather(node.prune(), other.prune(TENANT, None, "ops"), return_exceptions=True)
        won = [each for each in both if isinstance(each, Pruned) and each.seq is not None]
        assert len(won) == 1, both
        floor = (await node.read()).floor
        assert floor is not None
        assert floor.seq == won[0].seq
        await node.removed(floor.to_seq)
        assert await node.is_valid()


async def test_an_archive_that_says_written_and_lost_it_keeps_the_entries(run: RunSite) -> None:
    class Lying(StoredArchive):
        def read_back(self, tenant_id: str, keyring: Keyring, from_seq: int, to_seq: int) -> Sequence[ArchivedEnd]:
            *before, last = super().read_back(tenant_id, keyring, from_seq, to_seq)
            return [*before, last._replace(chain_link="0" * 64)]

    async with run() as node:
        await fill(node)
        assert node.prunes.archive is not None
        node.prunes.archive = Lying(node.prunes.archive.url)
        with pytest.raises(ArchiveInvalidError, match="another entry"):
            await node.prune()
        assert (await node.read()).floor is None


async def steps(node: Running, count: int) -> None:
    """Remove two entries at a time as the node does; the follower of the job table may come first."""
    from_seq = 1

    async def step() -> bool:
        nonlocal from_seq
        async with node.service._pool.acquire() as connection, connection.transaction():
            removed = await retention.remove(connection, TENANT, from_seq, 2 * JOBS, 2, node.service.job_folds)
        from_seq = from_seq if removed is None else removed.next_seq
        return removed is not None and removed.entries == 2

    for _ in range(count):
        await until(step, "a job is removed")


@pytest.mark.parametrize("removed", [[], [1, 3], [1, 2, 3, 4, 5, 7]], ids=["none", "one", "three"])
async def test_a_process_that_dies_between_two_steps_leaves_the_rest_to_the_next(
    run: RunSite, removed: list[int]
) -> None:
    async with run() as node:
        await fill(node)
        node.prunes.wake_removal = lambda: None
        place = await node.prune()
        assert place.seq is not None
        await until(lambda: signed(node, place.seq or 0), "the entry is signed")
        await steps(node, len(removed) // 2)
        left = await node.superuser.fetch("SELECT seq FROM scheduler.scheduler_log WHERE tenant_id = $1", TENANT)
        assert {*range(1, place.seq)}.difference(row[0] for row in left) == {*removed}
        assert await node.is_valid()
    # The tree is made again from what is left above the floor.
    await damage_tree(node)
    async with run() as node:
        floor = (await node.read()).floor
        assert floor is not None
        await node.removed(floor.to_seq)
        await until(lambda: is_whole(node), "the tree is made again")
        assert await node.superuser.fetch("SELECT job_id FROM scheduler.jobs WHERE tenant_id = $1", TENANT) == []


async def damage_tree(node: Running) -> None:
    query = "UPDATE scheduler.merkle_head SET root_hash = repeat('0', 64) WHERE tenant_id = $1"
    await node.superuser.execute(query, TENANT)


async def is_whole(node: Running) -> bool:
    return bool((await node.services[ChainVerifier].again(TENANT)).verdict.is_valid)


async def signed(node: Running, seq: int) -> bool:
    query = "SELECT tree_size FROM scheduler.merkle_head WHERE tenant_id = $1"
    return int(await node.superuser.fetchval(query, TENANT)) >= seq


async def test_a_node_whose_tree_is_damaged_behind_a_prune_makes_it_again(run: RunSite) -> None:
    async with run() as node:
        await fill(node)
        await node.prune()
        floor = (await node.read()).floor
        assert floor is not None
        await node.removed(floor.to_seq)
    await damage_tree(node)
    async with run() as node:
        await node.service.submitter.submit(created(TENANT, 99), key=None)
        await until(lambda: is_whole(node), "the tree is made again")


async def test_the_pages_that_a_prune_emptied_are_freed_by_the_node(run: RunSite) -> None:
    async with run() as node:
        await fill(node)
        await node.prune()

        async def are_freed() -> bool:
            query = """
                SELECT s.vacuum_count FROM pg_stat_all_tables s
                 WHERE s.relid = (SELECT tableoid FROM scheduler.scheduler_log WHERE tenant_id = $1 LIMIT 1)
                    OR s.relid = 'scheduler.jobs'::regclass
            """
            return [row[0] for row in await node.superuser.fetch(query, TENANT)] == [2, 2]

        await until(are_freed, "both tables were vacuumed, and the pages of their indexes can be used again")


EDITS = {
    "an entry": "UPDATE scheduler.scheduler_log SET payload = '{}' WHERE tenant_id = $1 AND seq = 2",
    "a job's row": "UPDATE scheduler.jobs SET status = 'FAILED' WHERE tenant_id = $1 AND 2 = ANY(seqs)",
    "a tile": "UPDATE scheduler.merkle_tile SET hashes = set_byte(hashes, 40, 255 - get_byte(hashes, 40))"
    " WHERE tenant_id = $1 AND level = 0",
    "a later entry of a job": "UPDATE scheduler.scheduler_log SET chain_link = prev_chain_link"
    " WHERE tenant_id = $1 AND seq = 11",
}


@pytest.mark.parametrize("edit", EDITS)
async def test_nothing_leaves_that_does_not_verify(run: RunSite, edit: str) -> None:
    async with run() as node:
        await fill(node)
        assert await node.is_valid()
        async with node.superuser.transaction():
            await node.superuser.execute("SET LOCAL session_replication_role = replica")
            await node.superuser.execute(EDITS[edit], TENANT)
        with pytest.raises(ChainDamagedError):
            # Of the jobs of entries 9 and 10 entries 11 and 12 stay.
            await node.prunes.prune(TENANT, 10, "ops")
        assert (await node.read()).floor is None


@pytest.mark.parametrize("long_entries", [1, checking.LONG_ENTRIES], ids=["in other processes", "here"])
async def test_a_prune_verifies_what_leaves_if_all_was_verified_not_long_ago(
    run: RunSite, long_entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checking, "LONG_ENTRIES", long_entries)
    async with run() as node:
        await fill(node)
        verifier: ChainVerifier = node.services[ChainVerifier]

        async def entries_checked(whole_within_s: float) -> int:
            verdict = (await verifier.leaving(TENANT, 10, whole_within_s)).verdict
            assert verdict.is_valid, verdict
            assert verdict.verdicts["projection"] == "ok"
            return int(verdict.entries_checked)

        head_seq = (await verifier.again(TENANT)).verdict.head.seq
        assert [await entries_checked(600), await entries_checked(0)] == [10, head_seq]
        # From the floor of a prune on.
        await node.prunes.prune(TENANT, 10, "ops")
        await node.removed(10)
        verdict = (await verifier.leaving(TENANT, 2 * JOBS, 600)).verdict
        assert (verdict.is_valid, verdict.from_seq, verdict.entries_checked) == (True, 11, 10)
