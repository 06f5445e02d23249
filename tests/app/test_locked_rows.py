"""Somebody keeps rows of one tenant locked: that tenant waits, all others go on, and nothing is lost or doubled."""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import asyncpg
import httpx
import pytest

from app.node.service import Service
from app.runtime.state.losses import ASIDE
from app.store.sessions import AT_A_NODE
from app.write.pending import quarantine
from app.write.pending.requests import EventLines
from ledger.errors import DurabilityTimeoutError
from tests.app.chains import Chains, numbers, until
from tests.app.client import Client
from tests.app.conftest import MakeSettings, RunNode
from tests.app.drafts import GLOBAL, LOCAL, created, key, progressed
from tests.app.hurry import hurried
from tests.app.shared import Shared, sharing
from tests.app.test_followers import halted
from tests.app.test_notary import covered
from tests.app.test_start_refused import damage_control, recorded_losses
from tests.conftest import Database
from tests.running_copy import copy_running
from wal.segment import list_segments

HEAD = "SELECT FROM scheduler.chain_heads WHERE tenant_id = 'acme' FOR UPDATE"
"""What another session holds."""
OF_TREES = {
    "locked": "SELECT FROM scheduler.merkle_head WHERE tenant_id = '{}' FOR UPDATE",
    "written": "UPDATE scheduler.merkle_head SET signed_at = signed_at WHERE tenant_id = '{}'",
    "deleted": "DELETE FROM scheduler.merkle_head WHERE tenant_id = '{}'",
}
"""By a name, what it does with the tree of a tenant."""


@pytest.fixture(autouse=True, scope="module")
def soon() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("app.store.chaining.LOCK_TIMEOUT_S", 0.3)
        patched.setattr("app.write.followers.followers.LOCK_REPORTED_AFTER_S", 0.3)
        patched.setattr("app.write.followers.followers.SEARCH_INTERVAL_S", 0.1)
        patched.setattr("app.read.readiness.DATABASE_CHECK_TIMEOUT_S", 0.3)
        patched.setitem(AT_A_NODE, "lock_timeout", "300ms")
        yield


@pytest.fixture(scope="module")
async def shared(make_shared_settings: MakeSettings, shared_database: Database) -> AsyncIterator[Shared]:
    """A node that does not let a read wait for long."""
    async with sharing(make_shared_settings(read={"wait": "300ms"}), shared_database) as shared:
        yield shared


async def local(service: Service, *ns: int) -> None:
    for n in ns:
        await service.submitter.submit(created("acme", n, durability=LOCAL), key=None)


async def test_one_tenant_waits_in_order_while_all_others_are_chained(
    run_node: RunNode, make_settings: MakeSettings, database: Database, chains: Chains
) -> None:
    async with run_node(make_settings()) as service:
        submit, submit_lines = service.submitter.submit, service.submitter.submit_lines
        await service.key_changes.recorded.wait()
        job_id = (await submit(created("acme", 0), key=None)).job_id
        async with halted(database, HEAD):
            await submit(progressed("acme", job_id, 1), key=None)
            await until(lambda: "acme" in service.node.waiting, "the lock is met")
            await local(service, 1, 2)
            next_lsn = service.writer.next_lsn
            with hurried(service):
                waiting = asyncio.create_task(submit(created("acme", 3), key=key("three")))
                await until(lambda: service.writer.next_lsn > next_lsn, "it is entered")
            for n in range(5):
                await submit(created("beta", n), key=None)
            await submit_lines(EventLines.of([created("beta", n) for n in range(5, 9)]), durability=GLOBAL, key=None)
            mixed = [created("beta", 9), created("acme", 4)]
            with hurried(service, 5.0), pytest.raises(DurabilityTimeoutError, match="locked") as late:
                await submit_lines(EventLines.of(mixed), durability=GLOBAL, key=key("mixed"))
            assert late.value.achieved is LOCAL
            with pytest.raises(DurabilityTimeoutError) as late:
                await waiting
            assert late.value.achieved is LOCAL, "records behind it are chained, it is not"
            assert numbers(await chains.entries("acme")) == [0]
            assert service.node.failure is None
            assert len(service.backlog) == 5
            assert service.quarantine.keeps_from() is not None
        await until(lambda: not service.node.waiting and not len(service.backlog), "the lock is gone")
        again = await submit(created("acme", 3), key=key("three"))
        assert again.replayed
        assert (await submit_lines(EventLines.of(mixed), durability=GLOBAL, key=key("mixed"))).replayed
        await until(lambda: not quarantine.load(service._started.wal.folder), "nothing is listed any more")
        await submit(created("acme", 5), key=None)
    assert numbers(await chains.sound("acme")) == [0, 1, 2, 3, 4, 5]
    assert numbers(await chains.sound("beta")) == list(range(10))


async def enqueue(client: Client, tenant_id: str, durability: str = "GLOBAL") -> dict[str, str]:
    job = {"tenant_id": tenant_id, "durability": durability}
    answer = await client.post("/v1/jobs", json=job)
    assert answer.status_code == 201
    written: dict[str, str] = answer.json()
    return written


async def test_readyz_names_the_tenant_and_a_session_waits_for_its_writes(
    shared_client: Client, shared_database: Database, tenant: str
) -> None:
    client = shared_client

    async def is_named() -> bool:
        answer = await client.get("/readyz")
        return answer.status_code == 200 and tenant in str(answer.json())

    async def read() -> httpx.Response:
        headers = {"Tally-Session": early["session"]}
        return await client.get(f"/v1/jobs/{early['job_id']}", params={"tenant_id": tenant}, headers=headers)

    async def is_found() -> bool:
        return (await read()).status_code == 200

    await enqueue(client, tenant)
    async with halted(shared_database, HEAD.replace("acme", tenant)):
        early = await enqueue(client, tenant, "LOCAL")
        await until(is_named, "/readyz names it")
        await enqueue(client, f"{tenant}-other")
        answer = await read()
        assert (answer.status_code, answer.json()["type"].rpartition("/")[2]) == (503, "session-not-caught-up")
    await until(is_found, "it is chained")
    assert not await is_named()


async def test_readyz_names_the_tenant_that_the_job_table_cannot_follow(
    shared_client: Client, shared_database: Database, tenant: str
) -> None:
    place = f"SELECT FROM scheduler.follower_positions WHERE tenant_id = '{tenant}' FOR UPDATE"
    client, beta = shared_client, f"{tenant}-other"

    async def listed(tenant_id: str) -> int:
        answer = await client.get("/v1/jobs", params={"tenant_id": tenant_id, "consistency": "strong"})
        return len(answer.json()["items"]) if answer.status_code == 200 else -answer.status_code

    async def said() -> str:
        return str((await client.get("/readyz")).json()["checks"]["locks"]["detail"])

    await enqueue(client, tenant)
    assert await listed(tenant) == 1
    async with halted(shared_database, place):
        for tenant_id in (tenant, beta):
            await enqueue(client, tenant_id)

        async def is_named() -> bool:
            return (await said()).endswith(f"places locked: {tenant}")

        await until(is_named, "/readyz names it")
        assert await listed(tenant) == -503

        async def is_listed() -> bool:
            return await listed(beta) == 1

        await until(is_listed, "the other is followed")

    async def is_well() -> bool:
        return await said() == "None"

    await until(is_well, "nothing is told any more")
    assert await listed(tenant) == 2


async def test_a_node_is_not_ready_while_a_table_is_locked_that_a_write_asks(
    shared_client: Client, shared_database: Database
) -> None:
    async def is_ready() -> bool:
        return (await shared_client.get("/readyz")).status_code == 200

    for table in ("scheduler_log_p0", "jobs", "idempotency"):
        async with halted(shared_database, f"LOCK TABLE scheduler.{table}"):
            answer = await shared_client.get("/readyz")
            assert (answer.status_code, "pg_locks" in answer.json()["checks"]["database"]["detail"]) == (503, True)
        await until(is_ready, "the lock is gone")


@pytest.mark.parametrize("how", OF_TREES.values(), ids=OF_TREES)
async def test_a_tree_that_is_kept_locked_waits_while_all_others_are_signed(
    shared_client: Client, shared_database: Database, shared_superuser: asyncpg.Connection, tenant: str, how: str
) -> None:
    client, superuser, other = shared_client, shared_superuser, f"{tenant}-other"

    async def is_named() -> bool:
        return f"trees locked: {tenant}" in str((await client.get("/readyz")).json())

    await enqueue(client, tenant)
    await until(lambda: covered(superuser, tenant, 1), "it has a tree")
    async with halted(shared_database, how.format(tenant)):
        await enqueue(client, tenant)
        for size in range(1, 4):
            await enqueue(client, other)
            await until(lambda size=size: covered(superuser, other, size), "the other is signed", 5)  # type: ignore[misc]
        await until(is_named, "/readyz names it")
        assert not await covered(superuser, tenant, 2)
    await until(lambda: covered(superuser, tenant, 2), "it is signed")

    async def is_well() -> bool:
        return tenant not in str((await client.get("/readyz")).json())

    await until(is_well, "nothing waits any more")


@pytest.fixture
async def two_trees(shared: Shared, tenant: str) -> tuple[str, str]:
    """Tenants that have a tree."""
    tenants = tenant, f"{tenant}-other"
    for tenant_id in tenants:
        await shared.service.submitter.submit(created(tenant_id, 0), key=None)
        await until(lambda tenant_id=tenant_id: covered(shared.superuser, tenant_id, 1), "it has a tree")  # type: ignore[misc]
    return tenants


async def made_again(shared: Shared, tenant_id: str) -> None:
    """Wait until the tree that was damaged is made again."""
    await until(lambda: not shared.service.notary._tenants[tenant_id].is_tree_damaged, "it is made again", 5)


@pytest.mark.parametrize("how", OF_TREES.values(), ids=OF_TREES)
async def test_a_damaged_tree_that_is_kept_locked_is_made_again_later_and_no_other_waits(
    shared: Shared, shared_database: Database, two_trees: tuple[str, str], how: str
) -> None:
    locked, other = two_trees
    async with halted(shared_database, how.format(locked)):
        for tenant_id in two_trees:
            shared.service.notary.rebuild(tenant_id)
        await made_again(shared, other)
        assert shared.service.notary._tenants[locked].is_tree_damaged
    await made_again(shared, locked)


async def test_who_waits_for_a_locked_tree_to_be_signed_keeps_no_other_from_being_made_again(
    shared: Shared, shared_database: Database, two_trees: tuple[str, str]
) -> None:
    locked, other = two_trees
    notary = shared.service.notary
    async with halted(shared_database, OF_TREES["locked"].format(locked)):
        signing = asyncio.create_task(notary.sign_now(locked))
        await until(notary._tenants[locked].lock.locked, "it is being signed")
        for tenant_id in two_trees:
            notary.rebuild(tenant_id)
        await made_again(shared, other)
        assert not signing.done()
    await signing
    await made_again(shared, locked)


async def test_a_tree_that_is_gone_can_be_passed_over_while_it_is_made_again(
    shared: Shared, shared_database: Database, shared_superuser: asyncpg.Connection, two_trees: tuple[str, str]
) -> None:
    gone, _ = two_trees
    tiles = OF_TREES["locked"].replace("merkle_head", "merkle_tile")
    async with halted(shared_database, tiles.format(gone)):
        await shared_superuser.execute(OF_TREES["deleted"].format(gone))
        shared.service.notary.rebuild(gone)
        there = "SELECT count(*) > 0 FROM scheduler.merkle_head WHERE tenant_id = $1"
        await until(lambda: shared_superuser.fetchval(there, gone), "others see it", 5)
        assert shared.service.notary._tenants[gone].is_tree_damaged
    await made_again(shared, gone)


@pytest.mark.parametrize("table", ["merkle_tile", "jobs", "scheduler_log"])
async def test_verification_and_export_do_not_wait_for_a_locked_table_and_say_what_is_wrong(
    shared_client: Client, shared_database: Database, shared_superuser: asyncpg.Connection, tenant: str, table: str
) -> None:
    await enqueue(shared_client, tenant)
    await until(lambda: covered(shared_superuser, tenant, 1), "it has a tree")
    verify = functools.partial(shared_client.get, "/v1/chain/verify", params={"tenant_id": tenant})
    export = functools.partial(shared_client.post, "/v1/bundles/export", json={"tenant_id": tenant})
    async with halted(shared_database, f"LOCK TABLE scheduler.{table}"), asyncio.timeout(30):
        for ask in (verify, export) if table == "scheduler_log" else (verify,):
            answer = await ask()
            assert (answer.status_code, "pg_locks" in answer.json()["detail"]) == (503, True)
    assert (await verify()).json()["valid"]
    assert (await export()).status_code == 200


@pytest.mark.parametrize("is_chained", [False, True], ids=["while they wait", "once they are chained"])
async def test_a_process_that_is_killed_meanwhile_loses_and_doubles_nothing(
    run_node: RunNode,
    make_settings: MakeSettings,
    database: Database,
    chains: Chains,
    tmp_path: Path,
    is_chained: bool,
) -> None:
    settings = make_settings(shutdown_grace="1s")
    async with run_node(settings) as service:
        folder, kept = service._started.wal.folder, tmp_path / "as it was"
        await service.key_changes.recorded.wait()
        await service.submitter.submit(created("acme", 0), key=None)
        async with halted(database, HEAD):
            await local(service, 1, 2, 3)
            await until(lambda: "acme" in service.node.waiting, "the lock is met")
            await service.submitter.submit(created("beta", 0), key=None)
            await local(service, 4, 5)
            await service.submitter.submit(created("beta", 1), key=None)
            listed = quarantine.load(folder)["acme"]
            assert (listed.lsns, listed.from_lsn) == (set(), service.quarantine.keeps_from())
            # What a kill leaves of the files now, and of the database now or later.
            copy_running(folder, kept)
            if not is_chained:
                await service.stop()
        if is_chained:
            await until(lambda: not service.node.waiting and not len(service.backlog), "the lock is gone")
    shutil.rmtree(folder)
    kept.rename(folder)
    async with run_node(settings) as service:
        await until(lambda: not len(service.backlog), "what waited is chained")
        await service.submitter.submit(created("acme", 6), key=None)
        await until(lambda: not quarantine.load(folder), "nothing is listed any more")
    assert numbers(await chains.sound("acme")) == list(range(7))
    assert numbers(await chains.sound("beta")) == [0, 1]


def cut_behind_the_first_that_waits(folder: Path) -> None:
    segment = list_segments(folder)[0].path
    os.truncate(segment, segment.read_bytes().index(b'"spec":{"n":2}'))


def remove_the_oldest_segment(folder: Path) -> None:
    list_segments(folder)[0].path.unlink()


@pytest.mark.parametrize(
    ("lose", "kept"),
    [(damage_control, [1, 2, 3]), (cut_behind_the_first_that_waits, [1, 3]), (remove_the_oldest_segment, [3])],
)
async def test_when_a_loss_of_the_wal_is_accepted_what_waited_for_a_lock_is_chained_or_named_as_lost(
    run_node: RunNode,
    make_settings: MakeSettings,
    database: Database,
    chains: Chains,
    tmp_path: Path,
    lose: Callable[[Path], None],
    kept: list[int],
) -> None:
    wal = {"segment_bytes": "64 KiB", "batch_max_bytes": "4 KiB", "record_bytes_max": "64 KiB"}
    settings = make_settings(shutdown_grace="1s", wal=wal)
    async with run_node(settings) as service:
        submit, folder, copy = service.submitter.submit, service._started.wal.folder, tmp_path / "as it was"
        await service.key_changes.recorded.wait()
        await submit(created("acme", 0), key=None)
        async with halted(database, HEAD):
            waiting = {n: (await submit(created("acme", n, durability=LOCAL), key=None)).lsn for n in (1, 2)}
            await until(lambda: "acme" in service.node.waiting, "the lock is met")
            fill_a_segment = EventLines.of([created("beta", n) for n in range(600)])
            await service.submitter.submit_lines(fill_a_segment, durability=GLOBAL, key=None)
            waiting[3] = (await submit(created("acme", 3, durability=LOCAL), key=None)).lsn
            await submit(created("beta", 600), key=None)
            # What a kill leaves of the files and of the database now.
            copy_running(folder, copy)
            await service.stop()
    shutil.rmtree(folder)
    copy.rename(folder)
    lose(folder)
    async with run_node(settings, accept_lost_wal=True) as service:
        await until(lambda: not len(service.backlog), "what is left is chained")
        await service.submitter.submit(created("acme", 4), key=None)
        await until(lambda: recorded_losses(chains), "the loss is recorded")
        await until(lambda: not ASIDE.load(folder), "all of it is read")
    async with run_node(settings):
        pass
    losses = await recorded_losses(chains)
    lost = [n for n, lsn in waiting.items() if any(first <= lsn <= last for first, last in losses)]
    assert sorted([*lost, *kept]) == [1, 2, 3]
    # What was read of the log that was quarantined is chained behind what came meanwhile.
    assert sorted(numbers(await chains.sound("acme"))) == [0, *kept, 4]
    assert numbers(await chains.sound("beta")) == list(range(601))
