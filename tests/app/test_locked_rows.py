"""Somebody keeps rows of one tenant locked: that tenant waits, all others go on, and nothing is lost or doubled."""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
from collections.abc import Callable
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
from tests.app.conftest import MakeSettings, RunNode, RunServer
from tests.app.drafts import GLOBAL, LOCAL, created, key, progressed
from tests.app.hurry import hurried
from tests.app.test_followers import halted
from tests.app.test_notary import covered
from tests.app.test_start_refused import damage_control, recorded_losses
from tests.conftest import Database
from tests.running_copy import copy_running
from wal.segment import list_segments

HEAD = "SELECT FROM scheduler.chain_heads WHERE tenant_id = 'acme' FOR UPDATE"
"""What another session holds."""
OF_TREES = {
    "locked": HEAD.replace("chain_heads", "merkle_head"),
    "written": "UPDATE scheduler.merkle_head SET signed_at = signed_at WHERE tenant_id = 'acme'",
    "deleted": "DELETE FROM scheduler.merkle_head WHERE tenant_id = 'acme'",
}
of_trees = pytest.mark.parametrize("how", OF_TREES.values(), ids=OF_TREES)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.store.chaining.LOCK_TIMEOUT_S", 0.3)
    monkeypatch.setattr("app.write.followers.followers.LOCK_REPORTED_AFTER_S", 0.3)


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


async def test_readyz_names_the_tenant_and_a_session_waits_for_its_writes(
    run_server: RunServer, make_settings: MakeSettings, database: Database
) -> None:
    async with run_server(make_settings(read={"wait": "300ms"})) as client:
        job = {"tenant_id": "acme", "durability": "GLOBAL"}
        assert (await client.post("/v1/jobs", json=job)).status_code == 201
        async with halted(database, HEAD):
            early = (await client.post("/v1/jobs", json=job | {"durability": "LOCAL"})).json()

            async def named() -> bool:
                answer = await client.get("/readyz")
                return answer.status_code == 200 and "acme" in str(answer.json())

            await until(named, "/readyz names it")
            await client.post("/v1/jobs", json=job | {"tenant_id": "beta"})
            read = await _read(client, early)
            assert (read.status_code, read.json()["type"].rpartition("/")[2]) == (503, "session-not-caught-up")

        async def found() -> bool:
            return (await _read(client, early)).status_code == 200

        await until(found, "it is chained")
        assert "acme" not in str((await client.get("/readyz")).json())


async def test_readyz_names_the_tenant_that_the_job_table_cannot_follow(
    run_server: RunServer, make_settings: MakeSettings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.write.followers.followers.SEARCH_INTERVAL_S", 0.1)
    place = "SELECT FROM scheduler.follower_positions WHERE tenant_id = 'acme' FOR UPDATE"
    async with run_server(make_settings(read={"wait": "300ms"})) as client:

        async def write(tenant_id: str) -> None:
            job = {"tenant_id": tenant_id, "durability": "GLOBAL"}
            assert (await client.post("/v1/jobs", json=job)).status_code == 201

        async def listed(tenant_id: str) -> int:
            answer = await client.get("/v1/jobs", params={"tenant_id": tenant_id, "consistency": "strong"})
            return len(answer.json()["items"]) if answer.status_code == 200 else -answer.status_code

        async def said() -> str:
            return str((await client.get("/readyz")).json()["checks"]["locks"]["detail"])

        await write("acme")
        assert await listed("acme") == 1
        async with halted(database, place):
            for tenant_id in ("acme", "beta"):
                await write(tenant_id)

            async def is_named() -> bool:
                return (await said()).endswith("places locked: acme")

            await until(is_named, "/readyz names it")
            assert (await listed("acme"), await listed("beta")) == (-503, 1)

        async def is_well() -> bool:
            return await said() == "None"

        await until(is_well, "nothing is told any more")
        assert await listed("acme") == 2


@pytest.mark.parametrize("table", ["scheduler_log_p0", "jobs", "idempotency"])
async def test_a_node_is_not_ready_while_a_table_is_locked_that_a_write_asks(
    run_server: RunServer,
    make_settings: MakeSettings,
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
    table: str,
) -> None:
    monkeypatch.setattr("app.read.readiness.DATABASE_CHECK_TIMEOUT_S", 0.3)
    async with run_server(make_settings()) as client:
        async with halted(database, f"LOCK TABLE scheduler.{table}"):
            answer = await client.get("/readyz")
            assert (answer.status_code, "pg_locks" in answer.json()["checks"]["database"]["detail"]) == (503, True)

        async def is_ready() -> bool:
            return (await client.get("/readyz")).status_code == 200

        await until(is_ready, "the lock is gone")


@of_trees
async def test_a_tree_that_is_kept_locked_waits_while_all_others_are_signed(
    run_server: RunServer, make_settings: MakeSettings, database: Database, superuser: asyncpg.Connection, how: str
) -> None:
    async with run_server(make_settings()) as client:

        async def write(tenant_id: str) -> None:
            job = {"tenant_id": tenant_id, "durability": "GLOBAL"}
            assert (await client.post("/v1/jobs", json=job)).status_code == 201

        await write("acme")
        await until(lambda: covered(superuser, "acme", 1), "it has a tree")
        async with halted(database, how):
            await write("acme")
            for size in range(1, 4):
                await write("beta")
                await until(lambda size=size: covered(superuser, "beta", size), "the other is signed", 5)

            async def named() -> bool:
                return "trees locked: acme" in str((await client.get("/readyz")).json())

            await until(named, "/readyz names it")
            assert not await covered(superuser, "acme", 2)
        await until(lambda: covered(superuser, "acme", 2), "it is signed")

        async def is_well() -> bool:
            return "acme" not in str((await client.get("/readyz")).json())

        await until(is_well, "nothing waits any more")


@of_trees
async def test_a_damaged_tree_that_is_kept_locked_is_made_again_later_and_no_other_waits(
    run_node: RunNode, make_settings: MakeSettings, database: Database, superuser: asyncpg.Connection, how: str
) -> None:
    async with run_node(make_settings()) as service:
        for tenant_id in ("acme", "beta"):
            await service.submitter.submit(created(tenant_id, 0), key=None)
            await until(lambda tenant_id=tenant_id: covered(superuser, tenant_id, 1), "it has a tree")
        async with halted(database, how):
            for tenant_id in ("acme", "beta"):
                service.notary.rebuild(tenant_id)
            await until(lambda: not service.notary._tenants["beta"].is_tree_damaged, "the other is made again", 5)
            assert service.notary._tenants["acme"].is_tree_damaged
        await until(lambda: not service.notary._tenants["acme"].is_tree_damaged, "it is made again", 5)


async def test_who_waits_for_a_locked_tree_to_be_signed_keeps_no_other_from_being_made_again(
    run_node: RunNode, make_settings: MakeSettings, database: Database, superuser: asyncpg.Connection
) -> None:
    async with run_node(make_settings()) as service:
        for tenant_id in ("acme", "beta"):
            await service.submitter.submit(created(tenant_id, 0), key=None)
            await until(lambda tenant_id=tenant_id: covered(superuser, tenant_id, 1), "it has a tree")
        async with halted(database, OF_TREES["locked"]):
            signing = asyncio.create_task(service.notary.sign_now("acme"))
            await until(service.notary._tenants["acme"].lock.locked, "it is being signed")
            for tenant_id in ("acme", "beta"):
                service.notary.rebuild(tenant_id)
            await until(lambda: not service.notary._tenants["beta"].is_tree_damaged, "the other is made again", 5)
            assert not signing.done()
        await signing
        await until(lambda: not service.notary._tenants["acme"].is_tree_damaged, "it is made again", 5)


async def test_a_tree_that_is_gone_can_be_passed_over_while_it_is_made_again(
    run_node: RunNode, make_settings: MakeSettings, database: Database, superuser: asyncpg.Connection
) -> None:
    async with run_node(make_settings()) as service:
        await service.submitter.submit(created("acme", 0), key=None)
        await until(lambda: covered(superuser, "acme", 1), "it has a tree")
        async with halted(database, OF_TREES["locked"].replace("merkle_head", "merkle_tile")):
            await superuser.execute(OF_TREES["deleted"])
            service.notary.rebuild("acme")
            there = "SELECT count(*) > 0 FROM scheduler.merkle_head WHERE tenant_id = 'acme'"
            await until(lambda: superuser.fetchval(there), "others see it", 5)
            assert service.notary._tenants["acme"].is_tree_damaged
        await until(lambda: not service.notary._tenants["acme"].is_tree_damaged, "it is made again", 5)


@pytest.mark.parametrize("table", ["merkle_tile", "jobs", "scheduler_log"])
async def test_verification_and_export_do_not_wait_for_a_locked_table_and_say_what_is_wrong(
    run_server: RunServer,
    make_settings: MakeSettings,
    database: Database,
    superuser: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
    table: str,
) -> None:
    monkeypatch.setitem(AT_A_NODE, "lock_timeout", "300ms")
    async with run_server(make_settings()) as client:
        assert (await client.post("/v1/jobs", json={"tenant_id": "acme", "durability": "GLOBAL"})).status_code == 201
        await until(lambda: covered(superuser, "acme", 1), "it has a tree")
        verify = functools.partial(client.get, "/v1/chain/verify", params={"tenant_id": "acme"})
        export = functools.partial(client.post, "/v1/bundles/export", json={"tenant_id": "acme"})
        async with halted(database, f"LOCK TABLE scheduler.{table}"), asyncio.timeout(30):
            for ask in (verify, export) if table == "scheduler_log" else (verify,):
                answer = await ask()
                assert (answer.status_code, "pg_locks" in answer.json()["detail"]) == (503, True)
        assert (await verify()).json()["valid"]
        assert (await export()).status_code == 200


async def _read(client: httpx.AsyncClient, job: dict[str, str]) -> httpx.Response:
    headers = {"Tally-Session": job["session"]}
    return await client.get(f"/v1/jobs/{job['job_id']}", params={"tenant_id": "acme"}, headers=headers)


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
