"""History that was verified is read again, and a break that was found lasts until it is mended and acknowledged."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest

from app.edge.accepted import Services
from app.node.wiring import running
from app.read import full_walk
from app.read.full_walk import FullWalk
from app.read.verification import ChainVerifier, Position, VerifiedPositions
from app.runtime.settings.config import Settings
from app.runtime.state.found_breaks import FoundBreaks
from app.write.followers import job_indexer
from ledger.merkle import leaf_hash
from ledger.verification import TreeHead
from ledger.verification.verdict import Break
from tests.app.chain_builder import edit
from tests.app.chains import Chains, followed, until
from tests.app.conftest import MakeSettings, RunServer
from tests.app.forging import forge_last_snapshot
from tests.app.starting import wal_folder, write
from tests.conftest import Database
from tests.ledger import naive_job_index as naive
from tests.ledger.blocks import BLOCK_ENTRIES, short_blocks

DAMAGE = "UPDATE scheduler.scheduler_log SET payload = $2::text::json WHERE tenant_id = $3 AND seq = $1"


@pytest.fixture
def settings(make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Settings of a node that walks every second, and does not rest on the way."""
    monkeypatch.setattr(full_walk, "SHARE", 1.0)
    return make_settings(
        chain={"batch_size": 4, "batch_interval": "100ms", "checkpoint_interval": "20ms"},
        verify={"on_start": False, "full_interval": "1s"},
    )


async def damage(
    superuser: asyncpg.Connection, seq: int, payload: str = '{"forged":true}', tenant_id: str = "acme"
) -> None:
    await edit(superuser, DAMAGE, seq, payload, tenant_id)


async def signed_to(superuser: asyncpg.Connection, seq: int, tenant_id: str = "acme") -> None:
    query = "SELECT max(to_seq) >= $1 FROM scheduler.batch_snapshot WHERE tenant_id = $2"
    await until(lambda: superuser.fetchval(query, seq, tenant_id), "snapshots cover it")


async def walked(services: Services) -> None:
    """Wait for a walk that began after this call."""
    done = services[FullWalk].walks_done
    await until(lambda: services[FullWalk].walks_done >= done + 2, "the chains are walked again")


async def breaks_of(client: httpx.AsyncClient) -> dict[str, Any]:
    answer = await client.get("/readyz")
    assert answer.status_code == 200, "a break of a tenant is told, and is no reason to take writes elsewhere"
    metrics = (await client.get("/metrics")).text
    (count,) = [line.split()[1] for line in metrics.splitlines() if line.startswith("scheduler_chain_breaks ")]
    found: dict[str, Any] = answer.json()["checks"]["breaks"]
    assert found["ok"] == (float(count) == 0)
    return found


async def test_what_is_changed_below_what_was_verified_is_found_by_the_walk_whole_or_in_ranges(
    settings: Settings,
    database: Database,
    superuser: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(full_walk, "RANGE_ENTRIES", 5)
    query = "SELECT from_seq, to_seq FROM scheduler.batch_snapshot WHERE tenant_id = 'snapshots' ORDER BY from_seq"
    async with running(settings, database.service_url) as (service, services):
        sizes = {"ranges": 11, "whole": 5}
        for tenant_id, size in sizes.items():
            await write(service, *range(size), tenant_id=tenant_id)
        for last in (4, 8, 11):
            await write(service, *range(last - 3, last), tenant_id="snapshots")
            await service.notary.sign_now("snapshots")
        snapshots = [tuple(row) for row in await superuser.fetch(query)]
        begin = max(to_seq for _, to_seq in snapshots if to_seq <= 5) + 1
        assert snapshots[-1][0] > begin
        for tenant_id, size in sizes.items():
            await signed_to(superuser, size, tenant_id)
            assert (await services[ChainVerifier].incremental(tenant_id)).verdict.is_valid
        await walked(services)
        assert not services[FoundBreaks].open()
        for tenant_id in sizes:
            await damage(superuser, 3, tenant_id=tenant_id)
            assert (await services[ChainVerifier].incremental(tenant_id)).verdict.is_valid, "what is new is in order"
        # Where a range begins.
        await edit(
            superuser, "DELETE FROM scheduler.batch_snapshot WHERE tenant_id = 'snapshots' AND from_seq = $1", begin
        )
        await until(lambda: len(services[FoundBreaks].open()) >= 3, "the walk finds them")
        found = {(each.tenant_id, each.kind, each.seq) for each in services[FoundBreaks].open()}
    assert found == {
        ("ranges", "payload-digest", 3),
        ("whole", "payload-digest", 3),
        ("snapshots", "snapshot-chain", begin),
    }
    in_ranges = [line for line in capsys.readouterr().out.splitlines() if "job_states_not_compared" in line]
    assert {each for each in (*sizes, "snapshots") if any(each in line for line in in_ranges)} == {
        "ranges",
        "snapshots",
    }


FIRST = {
    "third": "DELETE FROM scheduler.scheduler_log WHERE tenant_id = $1 AND seq = 3",
    "fifth": "DELETE FROM scheduler.scheduler_log WHERE tenant_id = $1 AND seq = 5",
    "sixth": "DELETE FROM scheduler.scheduler_log WHERE tenant_id = $1 AND seq = 6",
    "ranges": "DELETE FROM scheduler.scheduler_log WHERE tenant_id = $1 AND seq BETWEEN 4 AND 17",
    "link": "UPDATE scheduler.scheduler_log SET chain_link = 'none' WHERE tenant_id = $1 AND seq = 7",
    "moved": "UPDATE scheduler.scheduler_log SET seq = 9223372036854775806 WHERE tenant_id = $1 AND seq = 11",
}
"""By tenant, what comes first of what is wrong with its chain."""


async def test_what_was_acknowledged_hides_nothing_behind_it_from_the_walk(
    settings: Settings, database: Database, superuser: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(full_walk, "RANGE_ENTRIES", 5)
    async with running(settings, database.service_url) as (service, services):
        await asyncio.gather(*(write(service, *range(24), tenant_id=tenant_id) for tenant_id in FIRST))
        for tenant_id, first in FIRST.items():
            await signed_to(superuser, 24, tenant_id)
            await edit(superuser, first, tenant_id)
            await damage(superuser, 20, tenant_id=tenant_id)
        behind = set[str]()

        def all_found_behind() -> bool:
            for tenant_id in FIRST:
                found = services[FoundBreaks].unacknowledged(tenant_id)
                for each in found:
                    services[FoundBreaks].acknowledge(each, "ops")
                if 20 in {each.seq for each in found}:
                    behind.add(tenant_id)
            return behind == FIRST.keys()

        await until(all_found_behind, "the walk finds what is behind what comes first")


async def test_a_rewritten_chain_is_found_by_the_kept_checkpoint_where_the_walk_goes_in_ranges(
    settings: Settings, database: Database, superuser: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(full_walk, "RANGE_ENTRIES", 5)
    async with running(settings, database.service_url) as (service, services):
        await write(service, *range(11))
        await signed_to(superuser, 11)
        kept = service._started.checkpoints
        await until(lambda: kept.size("acme") >= 11, "it is kept")
        anchor = kept.newest("acme")
        assert anchor is not None
        heads = {"acme": [TreeHead(anchor.size, bytes(32), "node")]}
        monkeypatch.setattr(services[ChainVerifier], "_checkpoints", lambda tenant_id, _: heads.get(tenant_id, []))
        await until(
            lambda: any(each.kind == "rollback" for each in services[FoundBreaks].open("acme")), "the root differs"
        )


@pytest.mark.parametrize("is_kept", [True, False], ids=["in memory", "made again"])
async def test_an_entry_that_is_left_out_of_a_run_over_several_ranges_is_found_by_the_walk(
    settings: Settings,
    database: Database,
    superuser: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
    is_kept: bool,
) -> None:
    short_blocks(monkeypatch, job_indexer)
    monkeypatch.setattr(full_walk, "RANGE_ENTRIES", 5)
    if not is_kept:
        monkeypatch.setattr(FullWalk, "_take_index", lambda *_: None)
    async with running(settings, database.service_url) as (service, services):
        await write(service, *range(41))
        await service.notary.sign_now("acme")
        await walked(services)
        assert not services[FoundBreaks].open()
        rows = await superuser.fetch(
            "SELECT job_id, chain_link FROM scheduler.scheduler_log WHERE tenant_id = 'acme' ORDER BY seq"
        )
        log = [(row["job_id"], leaf_hash(bytes.fromhex(row["chain_link"]))) for row in rows]
        log[2] = "of nobody", log[2][1]
        roots = [root.hex() for root in naive.roots(log, BLOCK_ENTRIES)]
        claim = await forge_last_snapshot(service, superuser, "acme", job_index=roots)
        await until(services[FoundBreaks].open, "the walk finds it")
        (found,) = services[FoundBreaks].open()
    assert (found.kind, found.seq) == ("snapshot-root", claim.to_seq)
    assert "job_index of entries 1 to 16" in found.detail


async def test_a_walk_goes_on_where_the_last_process_left_it(
    settings: Settings, make_settings: MakeSettings, database: Database, superuser: asyncpg.Connection
) -> None:
    rarely = make_settings(verify={"on_start": False, "full_interval": "1h"})
    async with running(rarely, database.service_url) as (service, _):
        await write(service, 1)
    folder = wal_folder(settings)
    position = {"version": 2, "began_at": time.time(), "is_done": False, "tenant_id": "b"}
    (folder / full_walk.NAME).write_text(json.dumps(position))
    await damage(superuser, 1)
    async with running(rarely, database.service_url) as (_, services):
        await until(lambda: services[FullWalk].walks_done, "the rest is walked")
        assert not services[FoundBreaks].open(), "acme was done before"
    async with running(settings, database.service_url) as (_, services):
        await until(services[FoundBreaks].open, "the next walk comes to it")


async def test_a_break_lasts_over_restarts_until_it_is_mended_and_acknowledged_and_comes_back_with_its_alarm(
    run_server: RunServer, settings: Settings, superuser: asyncpg.Connection, chains: Chains
) -> None:
    verify = {"tenant_id": "acme"}
    async with run_server(settings) as client:
        for n in range(3):
            (await client.post("/v1/jobs", json={"tenant_id": "acme", "spec": {"n": n}})).raise_for_status()
        (whole,) = [row["payload"] for row in await chains.entries("acme") if row["seq"] == 2]
        assert (await breaks_of(client))["ok"]
        await damage(superuser, 2)
        assert not (await client.get("/v1/chain/verify", params=verify)).json()["valid"]
        assert "payload-digest at seq 2 of acme" in (await breaks_of(client))["detail"]
        await damage(superuser, 2, whole)
        assert (await client.get("/v1/chain/verify", params=verify)).json()["valid"]
        assert "mended, not acknowledged" in (await breaks_of(client))["detail"], "it was there"

    async with run_server(settings) as client:
        assert not (await breaks_of(client))["ok"]
        body = {"tenant_id": "acme", "reason": "row 2 edited by mistake", "kind": "payload-digest", "seq": 2}
        unknown = await client.post("/v1/chain/acknowledge", json={**body, "seq": 3})
        assert (unknown.status_code, unknown.json()["type"].rpartition("/")[2]) == (404, "not-found")
        answer = await client.post("/v1/chain/acknowledge", json=body)
        assert [(each["kind"], each["seq"]) for each in answer.json()["acknowledged"]] == [("payload-digest", 2)]
        assert (await breaks_of(client))["ok"]
        said = [row for row in await chains.sound("_system") if row["action"] == "BREAK_ACKNOWLEDGED"]
        assert [(row["job_id"], "row 2 edited by mistake" in row["payload"]) for row in said] == [
            ("break:acme:payload-digest:2", True)
        ]
        await damage(superuser, 2)
        await client.get("/v1/chain/verify", params=verify)
        assert "neither mended nor acknowledged" in (await breaks_of(client))["detail"], (
            "it is back, after its alarm ended"
        )
        (await client.post("/v1/chain/acknowledge", json=body)).raise_for_status()
        await client.get("/v1/chain/verify", params=verify)
        assert "acknowledged by caller, not mended" in (await breaks_of(client))["detail"], "the same as before"
        await damage(superuser, 2, '{"forged":"again"}')
        await client.get("/v1/chain/verify", params=verify)
        assert "neither mended nor acknowledged" in (await breaks_of(client))["detail"]


async def test_an_acknowledged_break_that_still_stands_hides_none_behind_it(
    run_server: RunServer, settings: Settings, superuser: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.runtime.state.found_breaks.NAMED_MAX", 4)
    edit = "UPDATE scheduler.jobs SET status = 'FAILED' WHERE tenant_id = 'beta' AND last_seq = $1"

    async def verify(tenant_id: str) -> None:
        await client.get("/v1/chain/verify", params={"tenant_id": tenant_id})

    async def acknowledge(tenant_id: str) -> None:
        body = {"tenant_id": tenant_id, "reason": "known"}
        (await client.post("/v1/chain/acknowledge", json=body)).raise_for_status()

    async with run_server(settings) as client:
        for tenant_id in ("acme", "beta"):
            for n in range(5):
                (await client.post("/v1/jobs", json={"tenant_id": tenant_id, "spec": {"n": n}})).raise_for_status()
        await until(lambda: followed(superuser), "the table has followed")
        await damage(superuser, 2)
        await verify("acme")
        await acknowledge("acme")
        await damage(superuser, 4)
        await verify("acme")
        assert "payload-digest at seq 4 of acme" in (await breaks_of(client))["detail"]
        await superuser.execute(edit, 2)
        await verify("beta")
        await acknowledge("beta")
        await superuser.execute(edit, 4)
        await verify("beta")
        assert "projection at seq 4 of beta" in (await breaks_of(client))["detail"]


def test_a_thousand_acknowledged_breaks_leave_room_for_the_next(tmp_path: Path) -> None:
    breaks = FoundBreaks(tmp_path)
    breaks.found("acme", [Break(seq, "link", "differs", "a", "b") for seq in range(1000)])
    for each in breaks.open():
        each.acknowledged = True
    breaks.found("acme", [Break(2000, "link", "differs", "a", "b")])
    assert [each.seq for each in FoundBreaks(tmp_path).unacknowledged("acme")] == [2000]


def test_as_many_breaks_are_kept_as_fit_and_a_restart_reads_them(tmp_path: Path) -> None:
    breaks = FoundBreaks(tmp_path)
    breaks.found("acme", [Break(seq, "link", "differs", "a", "b") for seq in range(1500)])
    assert len(FoundBreaks(tmp_path).open("acme")) == 1000
    assert FoundBreaks(tmp_path).open("other") == []


def at_once(monkeypatch: pytest.MonkeyPatch, first: Callable[[], None], second: Callable[[], None]) -> None:
    """Run both, ``second`` on a thread that begins, and has time to end, when ``first`` is about to sync a file."""
    fsync, threads = os.fsync, list[threading.Thread]()

    def fsync_meanwhile(descriptor: int) -> None:
        if not threads:
            threads.append(threading.Thread(target=second))
            threads[0].start()
            threads[0].join(timeout=0.5)
        fsync(descriptor)

    monkeypatch.setattr("os.fsync", fsync_meanwhile)
    first()
    threads[0].join()


def test_breaks_that_two_verifications_find_at_once_are_all_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks = FoundBreaks(tmp_path)
    found = [Break(seq, "link", "differs", "a", "b") for seq in (1, 2)]
    at_once(monkeypatch, lambda: breaks.found("acme", found[:1]), lambda: breaks.found("acme", found[1:]))
    assert [each.seq for each in FoundBreaks(tmp_path).open("acme")] == [1, 2]


async def test_positions_that_two_verifications_reach_at_once_are_all_kept(tmp_path: Path) -> None:
    positions = VerifiedPositions(tmp_path)

    async def reach(tenant_id: str) -> None:
        assert positions.advance(tenant_id, Position(1, "ab" * 32))
        await positions.store()

    await asyncio.gather(reach("acme"), reach("beta"))
    assert [*VerifiedPositions(tmp_path).by_tenant] == ["acme", "beta"]
