"""What a start sets aside of a log: answered records that are sound come back, and those that are not are named until
somebody acknowledges the loss."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.node.wiring import running
from app.runtime.state.losses import ASIDE, Losses
from ledger.errors import WalCorruptError
from tests.app.chains import Chains, until
from tests.app.conftest import MakeSettings, RunNode, RunServer
from tests.app.postgres_proxy import PostgresProxy
from tests.app.starting import assert_refused, wal_folder
from tests.app.test_replication import NODE, Keepers, MakeReplicated, keepers, replicated, short_of_members, submit
from tests.app.test_start_refused import damage_control
from tests.conftest import Database
from wal.segment import list_segments

__all__ = ["keepers", "replicated"]
ANSWERS = 10
DAMAGED = 4


def damage_record(folder: Path, job: dict[str, Any]) -> None:
    """Flip a bit in the payload of the record that created this job."""
    for segment in list_segments(folder):
        data = bytearray(segment.path.read_bytes())
        at = data.find(job["job_id"].encode())
        if at >= 0:
            data[data.index(b"spec", at)] ^= 1
            segment.path.write_bytes(data)
            return
    raise AssertionError(job["job_id"])


async def lost_check(client: httpx.AsyncClient) -> dict[str, Any]:
    found: dict[str, Any] = (await client.get("/readyz")).json()["checks"]["lost"]
    return found


async def come_back(client: httpx.AsyncClient, chains: Chains, jobs: Sequence[dict[str, Any]]) -> None:
    """Wait until these are chained, each once and with the HLC and the key with which it was answered."""
    hlcs = {job["hlc"] for job in jobs}

    async def are_chained() -> bool:
        return hlcs <= {entry["t_hlc"] for entry in await chains.entries("acme")}

    await until(are_chained, "what was answered is chained")
    again = await submit(client, "LOCAL", key="0")
    assert (again["job_id"], again["hlc"]) == (jobs[0]["job_id"], jobs[0]["hlc"])
    found = [entry["t_hlc"] for entry in await chains.entries("acme")]
    assert sorted(hlc for hlc in found if hlc in hlcs) == sorted(hlcs)


async def losses(chains: Chains) -> list[dict[str, Any]]:
    return [json.loads(each["payload"]) for each in await chains.sound("_system") if each["action"] == "WAL_LOST"]


async def acknowledged(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    answer = await client.post("/v1/chain/acknowledge", json={"tenant_id": "_system", "reason": "ticket 7"})
    assert answer.status_code == 200, answer.text
    seen: list[dict[str, Any]] = answer.json()["acknowledged"]
    return seen


@pytest.mark.parametrize("is_damaged", [False, True])
async def test_a_quorum_that_replaces_a_damaged_folder_brings_back_what_that_had_answered(
    keepers: Keepers, replicated: MakeReplicated, run_server: RunServer, chains: Chains, *, is_damaged: bool
) -> None:
    settings = replicated(shutdown_grace="2s")
    async with run_server(settings) as client:
        await submit(client, "GLOBAL")
        keepers.stop(0, 1, 2)
        jobs = [await submit(client, "LOCAL", key=str(n)) for n in range(ANSWERS)]
    keepers.start(0, 1, 2)
    damage_control(wal_folder(settings))
    if is_damaged:
        damage_record(wal_folder(settings), jobs[DAMAGED])
    async with run_server(settings) as client:
        await come_back(client, chains, [job for n, job in enumerate(jobs) if not is_damaged or n != DAMAGED])
        await until(lambda: not ASIDE.load(wal_folder(settings)), "all of it is read")
        check = await lost_check(client)
        if not is_damaged:
            assert check == {"ok": True, "detail": None}
            assert await losses(chains) == []
            return
        lost = jobs[DAMAGED]
        (recorded,) = await losses(chains)
        assert (recorded["first_lsn"], recorded["last_lsn"], recorded["node_id"]) == (lost["lsn"], lost["lsn"], NODE)
        assert recorded["jobs"] == [{"lsn": lost["lsn"], "tenant_id": "acme", "job_id": lost["job_id"]}]
        assert f"LSN {lost['lsn']} (acme/{lost['job_id']})" in check["detail"]
    async with run_server(settings) as client:
        assert not (await lost_check(client))["ok"], "nobody acknowledged it"
        (seen,) = await acknowledged(client)
        assert seen["kind"] == "wal-lost"
        assert lost["job_id"] in seen["detail"]
        assert (await lost_check(client))["ok"]
    async with run_server(settings) as client:
        assert (await lost_check(client))["ok"]
    assert len(await losses(chains)) == 1
    actions = [entry["action"] for entry in await chains.sound("_system")]
    assert actions.count("BREAK_ACKNOWLEDGED") == 1


@pytest.mark.parametrize("damage", ["control", "control and record", "record"])
async def test_an_accepted_loss_brings_back_what_is_sound_and_names_the_rest(
    run_server: RunServer,
    run_node: RunNode,
    make_settings: MakeSettings,
    proxy: PostgresProxy,
    chains: Chains,
    damage: str,
) -> None:
    settings = make_settings(shutdown_grace="500ms")
    async with run_server(settings, url=proxy.url) as client:
        await submit(client, "GLOBAL")
        await proxy.refuse()
        jobs = [await submit(client, "LOCAL", key=str(n)) for n in range(ANSWERS)]
    await proxy.accept()
    if "record" in damage:
        damage_record(wal_folder(settings), jobs[DAMAGED])
    if "control" in damage:
        damage_control(wal_folder(settings))
    await assert_refused(run_node, settings, WalCorruptError, "is damaged")
    sound = [job for n, job in enumerate(jobs) if "record" not in damage or n != DAMAGED]
    async with run_server(settings, accept_lost_wal=True) as client:
        await come_back(client, chains, sound)
        await until(lambda: not ASIDE.load(wal_folder(settings)), "all of it is read")
        recorded = await losses(chains)
        if "record" in damage:
            lsn, job_id = jobs[DAMAGED]["lsn"], jobs[DAMAGED]["job_id"]
            named = [each for each in recorded if each["first_lsn"] <= each["last_lsn"]]
            assert [(each["first_lsn"], each["last_lsn"]) for each in named] == [(lsn, lsn)]
            assert named[0]["jobs"] == [{"lsn": lsn, "tenant_id": "acme", "job_id": job_id}]
            assert job_id in (await lost_check(client))["detail"]
            assert [each["kind"] for each in await acknowledged(client)] == ["wal-lost"]
        else:
            assert all(each["first_lsn"] > each["last_lsn"] for each in recorded), "nothing is known to be lost"
        assert (await lost_check(client))["ok"]
    async with run_server(settings) as client:
        assert (await lost_check(client))["ok"]
        assert await losses(chains) == recorded


async def test_a_log_that_is_gone_with_its_disk_is_named_until_somebody_acknowledges_it(
    run_server: RunServer, make_settings: MakeSettings, chains: Chains
) -> None:
    settings = make_settings(node_id=NODE)
    async with run_server(settings) as client:
        await submit(client, "GLOBAL")
    for path in wal_folder(settings).glob("*"):
        if path.suffix == ".wal" or path.name == "control":
            path.unlink()
    async with run_server(settings, accept_lost_wal=True) as client:
        await until(lambda: losses(chains), "it is recorded")

        async def says_so() -> bool:
            return "nobody knows how many" in str((await lost_check(client))["detail"])

        await until(says_so, "readiness says so")
        await acknowledged(client)
        assert (await lost_check(client))["ok"]


async def test_what_a_member_cut_off_comes_back_through_the_folder_of_the_node(
    keepers: Keepers, replicated: MakeReplicated, run_server: RunServer, chains: Chains, tmp_path: Path
) -> None:
    """As docs/replication-runbook.md says under *A region is lost*."""
    async with run_server(replicated(shutdown_grace="2s")) as client:
        await submit(client, "GLOBAL")
        keepers.stop(0, 1)
        jobs = [await submit(client, "LOCAL", key=str(n)) for n in range(3)]

        async def are_shipped() -> bool:
            member = (await client.get("/v1/node")).json()["members"][2]
            return bool(member["last_replicated_lsn"] >= jobs[-1]["lsn"])

        await until(are_shipped, "one member has them")
    keepers.stop(2)
    keepers.start(0, 1)
    settings, kept = replicated("empty"), tmp_path / "keeper-2" / NODE
    async with run_server(settings) as client:
        await submit(client, "GLOBAL")
        keepers.start(2)
        await until(lambda: [*kept.glob("cut-*")], "the member cuts off what lost")
        assert len(await chains.entries("acme")) == 2
    for path in kept.glob("cut-*"):
        shutil.copy(path, wal_folder(settings))
    async with run_server(settings) as client:
        await come_back(client, chains, jobs)
        assert (await lost_check(client))["ok"]


async def test_a_failover_that_accepts_a_loss_says_so_until_somebody_acknowledges_it(
    keepers: Keepers, replicated: MakeReplicated, run_server: RunServer, database: Database, chains: Chains
) -> None:
    settings = replicated()
    async with run_server(settings) as client:
        await submit(client, "GLOBAL")
    async with short_of_members(keepers, 1, 2):
        async with running(replicated("elsewhere"), database.service_url, takeover="accepts loss") as (
            _,
            services,
        ):
            await until(lambda: losses(chains), "it is recorded")
            await until(services[Losses].fault, "readiness says so")
            assert "nobody knows how many" in str(services[Losses].fault())
        assert [each["accepted_loss"] for each in await epoch_starts(chains) if "accepted_loss" in each] == [True]


async def test_a_failover_that_accepts_a_loss_goes_on_above_what_postgres_saw_and_the_members_left_lack(
    keepers: Keepers, replicated: MakeReplicated, run_server: RunServer, database: Database, chains: Chains
) -> None:
    async with run_server(replicated()) as client:
        await submit(client, "GLOBAL")
        keepers.stop(2)
        lost = [await submit(client, "GLOBAL") for _ in range(3)]
    keepers.stop(0, 1)
    keepers.start(2)
    settings = replicated("elsewhere")
    try:
        async with running(settings, database.service_url, takeover="accepts loss") as (service, services):
            await until(services[Losses].fault, "readiness says so")
            assert service.node.durable.lsn >= lost[-1]["lsn"]
    finally:
        keepers.start(0, 1)
    async with run_server(settings) as client:
        after = await submit(client, "GLOBAL")
        assert after["lsn"] > lost[-1]["lsn"]
        hlcs = {each["t_hlc"] for each in await chains.sound("acme")}
        assert {each["hlc"] for each in [*lost, after]} <= hlcs


async def epoch_starts(chains: Chains) -> list[dict[str, Any]]:
    return [json.loads(each["payload"]) for each in await chains.entries("_system") if each["action"] == "EPOCH_START"]
