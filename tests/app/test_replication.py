"""A node whose log safekeepers keep, on real sockets: what is answered when, and what outlives the node's disk."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import asyncpg
import httpx
import pytest
import structlog
from cryptography.x509 import DNSName

from app.node.service import Service
from app.runtime.settings.config import Settings
from app.write.intake.evidence import MemberCopies, Stretch
from app.write.pending.requests import Receipt
from ledger.errors import DurabilityTimeoutError, FencedError, StartRefusedError
from ledger.facts.events import Durability
from ledger.positions import Epoch, Lsn
from tests.app.certificates import Authority
from tests.app.chains import Chains, until
from tests.app.conftest import MakeSettings, RunNode, RunServer
from tests.app.drafts import created
from tests.app.postgres_proxy import proxy_to
from tests.conftest import Database
from tests.wal.replication.keepers import Keeper
from wal.replication.configuration import Configuration, Member
from wal.replication.messages import Position, StatusReport, WalStatus
from wal.replication.tls import PeerTls, TlsFiles
from wal.segment import list_segments

JOB = {"tenant_id": "acme", "spec": {}, "assigned_dcs": ["use1"]}
COMMITMENT = {
    "tenant_id": "acme",
    "commitment": {"kind": "Lease", "resource": "r", "holder": "h"},
}
"""Body of a proposal."""
NODE = "node-a"
MakeReplicated = Callable[..., Settings]


class Keepers:
    """Safekeepers that are stopped and started again on the same address."""

    def __init__(self, folder: Path, count: int = 3, regions: dict[int, str] | None = None) -> None:
        self._folder = folder
        self._regions = [(regions or {}).get(number, "local") for number in range(count)]
        self._ports = [0] * count
        self.running: dict[int, Keeper] = {}
        for number in range(count):
            self.start(number)

    @property
    def addresses(self) -> list[dict[str, str]]:
        pairs = zip(self._ports, self._regions, strict=True)
        return [{"address": f"127.0.0.1:{port}", "region": region} for port, region in pairs]

    def start(self, *numbers: int) -> None:
        for number in numbers:
            keeper = Keeper(self._folder / f"keeper-{number}", region=self._regions[number], port=self._ports[number])
            self._ports[number] = keeper.port
            self.running[number] = keeper

    def stop(self, *numbers: int) -> None:
        for number in numbers:
            self.running.pop(number).close()


@pytest.fixture
def keepers(tmp_path: Path) -> AsyncIterator[Keepers]:
    kept = Keepers(tmp_path)
    yield kept  # type: ignore[misc]
    kept.stop(*kept.running)


@pytest.fixture
def replicated(keepers: Keepers, make_settings: MakeSettings) -> MakeReplicated:
    """Settings of the node ``node-a`` on a disk of this name."""

    def make(disk: str = "disk", ack_mode: str = "REPLICATED_QUORUM", **given: Any) -> Settings:
        given.setdefault("replication", {"members": keepers.addresses, "timeout": "2s"})
        given.setdefault("lease", {"ttl": "2s"})
        return make_settings(disk, node_id=NODE, wal={"ack_mode": ack_mode}, **given)

    return make


async def submit(
    client: httpx.AsyncClient, level: str, key: str | None = None, tenant_id: str = "acme"
) -> dict[str, Any]:
    answer = await client.post(
        "/v1/jobs",
        json=JOB | {"durability": level, "tenant_id": tenant_id},
        headers={} if key is None else {"Idempotency-Key": key},
    )
    assert answer.status_code == 201, answer.text
    created: dict[str, Any] = answer.json()
    return created


@asynccontextmanager
async def short_of_members(keepers: Keepers, *numbers: int) -> AsyncIterator[None]:
    keepers.stop(*numbers)
    try:
        yield
    finally:
        keepers.start(*numbers)


async def in_sync(client: httpx.AsyncClient) -> int:
    node = (await client.get("/v1/node")).json()
    return sum(member["in_sync"] for member in node["members"])


async def test_each_level_says_what_holds_the_event(replicated: MakeReplicated, run_server: RunServer) -> None:
    async with run_server(replicated()) as client:
        for level, has_chain in (("LOCAL", False), ("REGIONAL", False), ("GLOBAL", True)):
            created = await submit(client, level)
            assert created["durability"] == {"requested": level, "achieved": level, "survives": ["process"]}
            assert (created["chain"] is not None) == has_chain
        keyed = await submit(client, "REGIONAL", key="one")
        assert keyed["chain"] is not None, "whether it was the first is known once it is chained"
        node = (await client.get("/v1/node")).json()
        assert node["topology"]["safekeepers"] == 3
        assert node["positions"]["commit_lsn"] >= 5
        assert await until(lambda: in_sync(client), "all follow") == 3
        metrics = (await client.get("/metrics")).text
        assert "wal_replicas_in_sync 3.0" in metrics
        assert 'wal_replication_lag_lsn{member="127.0.0.1:' in metrics
        assert metrics.count('wal_replication_damaged_frames_total{member="127.0.0.1:') == 3
        verdict = (await client.get("/v1/chain/verify?tenant_id=_system")).json()
        assert verdict["valid"]


async def test_a_member_whose_copy_is_damaged_is_named_with_its_folder_and_the_remedy_of_a_member(
    keepers: Keepers, replicated: MakeReplicated, run_server: RunServer, tmp_path: Path
) -> None:
    async with run_server(replicated()) as client:
        await submit(client, "GLOBAL")

        async def is_followed_by_all() -> bool:
            return await in_sync(client) == 3

        await until(is_followed_by_all, "all follow")
        async with short_of_members(keepers, 1):
            segment = list_segments(tmp_path / "keeper-1" / NODE)[0].path
            data = segment.read_bytes()
            segment.write_bytes(data[:150] + bytes((data[150] ^ 1,)) + data[151:])

        async def fault() -> str | None:
            said: str | None = (await client.get("/v1/node")).json()["members"][1]["fault"]
            return said if said is not None and "damaged" in said else None

        advice = await until(fault, "the member refuses with its reason")
        assert f"{segment.name} is damaged" in advice
        assert f"stop this safekeeper, remove the folder {segment.parent}, start it again" in advice
        assert "--accept-lost-wal" not in advice


async def test_a_majority_is_enough_and_a_minority_answers_local_alone(
    keepers: Keepers, replicated: MakeReplicated, run_server: RunServer
) -> None:
    async with run_server(replicated(write={"timeout": "1s"})) as client:
        await submit(client, "GLOBAL")
        async with short_of_members(keepers, 0):
            await submit(client, "GLOBAL")
            async with short_of_members(keepers, 1):
                await submit(client, "LOCAL")
                for level in ("REGIONAL", "GLOBAL"):
                    late = await client.post("/v1/jobs", json=JOB | {"durability": level})
                    assert (late.status_code, late.json()["achieved"]) == (503, "LOCAL")

                async def says_so() -> bool:
                    ready = await client.get("/readyz")
                    return ready.status_code == 503 and "no quorum: 1 of 2" in ready.text

                await until(says_so, "readiness says that there is no quorum")

        async def goes_on() -> bool:
            return (await client.post("/v1/jobs", json=JOB | {"durability": "GLOBAL"})).status_code == 201

        await until(goes_on, "a majority is back")


async def test_without_a_quorum_a_write_is_answered_at_once_with_the_members_that_are_away_and_is_chained_later(
    keepers: Keepers, replicated: MakeReplicated, run_server: RunServer
) -> None:
    bodies = {
        "/v1/jobs": json.dumps(JOB | {"durability": "GLOBAL"}),
        "/v1/commitments": json.dumps(COMMITMENT),
        "/v1/events?durability=REGIONAL": json.dumps(JOB | {"type": "JobCreated"}),
    }
    media = {"/v1/events?durability=REGIONAL": "application/x-ndjson"}
    write_timeout_s = 60.0

    async def send(path: str, key: str | None) -> httpx.Response:
        headers = {"Content-Type": media.get(path, "application/json")} | ({"Idempotency-Key": key} if key else {})
        return await client.post(path, content=bodies[path], headers=headers, timeout=2 * write_timeout_s)

    async with run_server(replicated(write={"timeout": f"{write_timeout_s:g}s"})) as client:
        await submit(client, "REGIONAL", key="before")
        keepers.stop(0, 1)
        asked = [(path, key) for path in bodies for key in ("one", None) if key or path != "/v1/commitments"]
        began_s = asyncio.get_running_loop().time()
        for _ in range(2):  # those that wait when the quorum is missed, and those that come later
            for answer in await asyncio.gather(*(send(path, key) for path, key in asked)):
                told = answer.json()
                assert (answer.status_code, told["achieved"], told["reason"]) == (503, "LOCAL", "no-quorum"), told
                assert told["members_away"] == [each["address"] for each in keepers.addresses[:2]]
                assert "no quorum: 1 of 2 safekeepers needed follow" in told["detail"]
                assert told["lsn"]
                assert answer.headers["Retry-After"]
        job, headers = JOB | {"durability": "REGIONAL", "tenant_id": "acme"}, {"Idempotency-Key": "before"}
        again = await client.post("/v1/jobs", json=job, headers=headers, timeout=2 * write_timeout_s)
        assert (again.status_code, again.json()["reason"]) == (503, "no-quorum"), "and what was answered before"
        assert again.json()["members_away"] == [each["address"] for each in keepers.addresses[:2]]
        assert asyncio.get_running_loop().time() - began_s < write_timeout_s, "nobody waited out the timeout"
        keepers.start(0, 1)
        for path in bodies:

            async def is_taken(path: str = path) -> httpx.Response | None:
                answer = await send(path, "one")
                return answer if answer.status_code < 300 else None

            taken = await until(is_taken, "the quorum is back, and the key gives the outcome")
            assert taken.headers["Idempotent-Replay"] == "true"


async def test_local_is_answered_under_the_lease_or_once_a_quorum_holds_the_record(
    keepers: Keepers, replicated: MakeReplicated, run_server: RunServer, database: Database
) -> None:
    async def post(level: str, key: str | None = None) -> httpx.Response:
        return await client.post(
            "/v1/jobs", json=JOB | {"durability": level}, headers={} if key is None else {"Idempotency-Key": key}
        )

    async def says_no_local() -> None:
        for level, key in (("LOCAL", "one"), ("LOCAL", None), ("REGIONAL", None)):
            told = (answer := await post(level, key)).json()
            assert (answer.status_code, told["achieved"], told["reason"]) == (503, "NONE", "no-quorum"), told
            assert ("lease on the log of this node has expired" in told["detail"]) == (level == "LOCAL")

    async def metric(line: str) -> bool:
        return f"\n{line}\n" in (await client.get("/metrics")).text

    async with proxy_to(database.service_url) as proxy:
        settings = replicated(write={"timeout": "60s"}, lease={"ttl": "1s"})
        async with run_server(settings, url=proxy.url) as client:
            await submit(client, "GLOBAL")
            keepers.stop(0, 1)
            assert (await post("REGIONAL")).json()["reason"] == "no-quorum", "it is known to be away"
            assert (await post("LOCAL", "one")).status_code == 201, "under the lease"
            await proxy.refuse()
            await until(lambda: metric("wal_lease_held 0.0"), "nobody can renew the lease")
            await says_no_local()
            keepers.start(0, 1)
            await until(lambda: metric("wal_replicas_in_sync 3.0"), "the quorum is back")
            assert [(await post("LOCAL", key)).status_code for key in ("one", None)] == [201, 201]
            await proxy.accept()
            await until(lambda: metric("wal_lease_held 1.0"), "the lease is renewed")


async def test_a_node_on_an_empty_disk_has_all_that_was_committed(
    keepers: Keepers, replicated: MakeReplicated, run_server: RunServer, chains: Chains
) -> None:
    async with run_server(replicated()) as client:
        first = [(await submit(client, level))["job_id"] for level in ("REGIONAL", "GLOBAL", "REGIONAL")]
    keepers.stop(0)
    async with run_server(replicated("another")) as client:
        created = await submit(client, "GLOBAL")
        for job_id in first:
            assert (await client.get(f"/v1/jobs/{job_id}?tenant_id=acme")).status_code == 200
    keepers.start(0)
    entries = await chains.entries("acme")
    assert [entry["job_id"] for entry in entries] == [*first, created["job_id"]]
    epochs = [entry["payload"] for entry in await chains.entries("_system") if entry["action"] == "EPOCH_START"]
    assert [f'"epoch":{epoch},' in payload for epoch, payload in enumerate(epochs, 1)] == [True, True]


def flip_a_bit(folder: Path) -> None:
    segment = max(folder.glob("*.wal"))
    data = bytearray(segment.read_bytes())
    data[len(data.rstrip(b"\0")) // 2] ^= 1
    segment.write_bytes(data)


def lose_a_segment(folder: Path) -> None:
    max(folder.glob("*.wal")).unlink()


def lose_the_control_file(folder: Path) -> None:
    (folder / "control").unlink()


async def test_a_node_whose_disk_is_damaged_again_and_again_has_all_that_was_committed(
    replicated: MakeReplicated, run_server: RunServer, tmp_path: Path, chains: Chains
) -> None:
    async with run_server(replicated()) as client:
        committed = [(await submit(client, level))["job_id"] for level in ("REGIONAL", "GLOBAL", "REGIONAL")]
    for damage in (flip_a_bit, lose_a_segment, lose_the_control_file):
        damage(tmp_path / "disk" / "wal" / NODE)
        async with run_server(replicated()) as client:
            committed += [(await submit(client, level))["job_id"] for level in ("REGIONAL", "GLOBAL")]
        assert [entry["job_id"] for entry in await chains.entries("acme")] == committed, damage


async def test_what_lost_against_another_writer_is_appended_again(
    keepers: Keepers, replicated: MakeReplicated, run_server: RunServer, chains: Chains
) -> None:
    async with run_server(replicated(shutdown_grace="2s")) as client:
        await submit(client, "GLOBAL")
        keepers.stop(0, 1, 2)
        lost = await submit(client, "LOCAL", key="one")
        elsewhere = await submit(client, "LOCAL", tenant_id="other")
    keepers.start(0, 1, 2)
    async with run_server(replicated("another")) as client:
        await submit(client, "GLOBAL")
    with structlog.testing.capture_logs() as logs:
        stack = AsyncExitStack()
        client = await stack.enter_async_context(run_server(replicated()))
    (cut,) = [line for line in logs if line["event"] == "wal_divergent_tail_cut"]
    assert cut["last_lsn"] - cut["first_lsn"] >= 1
    async with stack:

        async def is_there(job: dict[str, Any]) -> bool:
            path = f"/v1/jobs/{job['job_id']}?tenant_id={job['tenant_id']}"
            return (await client.get(path)).status_code == 200

        await until(lambda: is_there(lost), "it is appended again")
        await until(lambda: is_there(elsewhere), "and that of a tenant that began with it")
        again = await submit(client, "LOCAL", key="one")
        assert (again["job_id"], again["hlc"]) == (lost["job_id"], lost["hlc"])
    entries = [*await chains.entries("acme"), *await chains.entries("other")]
    assert len(entries) == 4
    assert {lost["hlc"], elsewhere["hlc"]} <= {entry["t_hlc"] for entry in entries}


async def test_without_a_quorum_the_start_is_refused_at_once(
    keepers: Keepers, replicated: MakeReplicated, run_node: RunNode, superuser: asyncpg.Connection
) -> None:
    async with run_node(replicated()):
        pass
    async with short_of_members(keepers, 1, 2):
        with pytest.raises(
            StartRefusedError, match=r"no quorum: 1 of 3 members that vote answer, 2 are needed; 127.*refused"
        ):
            async with run_node(replicated()):
                pass
        assert not await superuser.fetchval("SELECT count(*) FROM scheduler.wal_leases"), "nobody need wait for it"
    async with run_node(replicated()):
        pass


async def test_from_copies_nobody_takes_over_and_nothing_waits_for_them(
    keepers: Keepers, replicated: MakeReplicated, run_server: RunServer, run_node: RunNode
) -> None:
    async with run_server(replicated(ack_mode="LOCAL_GROUP_SYNC")) as client:
        await until(lambda: in_sync(client), "copies are shipped")
        keepers.stop(0, 1, 2)
        created = await submit(client, "REGIONAL")
        assert created["chain"] is not None
    keepers.start(0, 1, 2)
    with pytest.raises(StartRefusedError, match="the disk was lost or swapped"):
        async with run_node(replicated("another", ack_mode="LOCAL_GROUP_SYNC")):
            pass


async def test_over_copies_a_disk_that_was_left_behind_is_refused(
    tmp_path: Path, replicated: MakeReplicated, run_server: RunServer, run_node: RunNode
) -> None:
    async with run_server(replicated(ack_mode="LOCAL_GROUP_SYNC")) as client:
        await submit(client, "GLOBAL")
    shutil.copytree(tmp_path / "disk", tmp_path / "another")
    async with run_server(replicated("another", ack_mode="LOCAL_GROUP_SYNC")) as client:
        await submit(client, "GLOBAL")
    with pytest.raises(StartRefusedError, match="another copy of it has been written since"):
        async with run_node(replicated(ack_mode="LOCAL_GROUP_SYNC")):
            pass


async def test_from_observing_to_a_quorum_and_back(replicated: MakeReplicated, run_server: RunServer) -> None:
    for ack_mode in ("LOCAL_GROUP_SYNC", "REPLICATED_QUORUM", "REPLICATED_ALL", "LOCAL_GROUP_SYNC"):
        async with run_server(replicated(ack_mode=ack_mode)) as client:
            created = await submit(client, "GLOBAL")
            assert created["chain"] is not None, ack_mode


async def test_a_standby_waits_and_goes_on_where_the_other_stopped(
    replicated: MakeReplicated, run_server: RunServer
) -> None:
    async with AsyncExitStack() as first:
        client = await first.enter_async_context(run_server(replicated()))
        created = await submit(client, "REGIONAL")

        async def stand_by() -> dict[str, Any]:
            async with run_server(replicated("another")) as second:
                found = await second.get(f"/v1/jobs/{created['job_id']}?tenant_id=acme")
                assert found.status_code == 200
                return await submit(second, "GLOBAL")

        standby = asyncio.create_task(stand_by())
        _, waiting = await asyncio.wait((standby,), timeout=3)
        assert waiting, "the lease is held"
        await first.aclose()
        assert (await standby)["epoch"] > created["epoch"]


async def test_the_lease_lasts_however_long_the_start_takes(
    replicated: MakeReplicated, run_server: RunServer, superuser: asyncpg.Connection
) -> None:
    async with run_server(replicated()):
        pass

    async def start() -> None:
        async with run_server(replicated()) as client:
            await submit(client, "GLOBAL")

    async with superuser.transaction():
        await superuser.execute("LOCK scheduler.wal_positions IN ACCESS EXCLUSIVE MODE")
        starting = asyncio.create_task(start())
        ends_at = "SELECT expires_at FROM scheduler.wal_leases"
        first = await until(lambda: superuser.fetchval(ends_at), "it is taken")

        async def lasts() -> bool:
            return await superuser.fetchval(ends_at) > first + timedelta(seconds=3)

        await until(lasts, "it lasts")
    await starting


async def test_regions_that_do_not_hold_it_keep_global_waiting(
    tmp_path: Path, make_settings: MakeSettings, run_server: RunServer
) -> None:
    keepers = Keepers(tmp_path / "regions", 5, {3: "eu1", 4: "ap1"})
    members = {"members": keepers.addresses, "timeout": "2s"}
    settings = make_settings(
        node_id=NODE, wal={"ack_mode": "REPLICATED_QUORUM"}, replication=members, write={"timeout": "2s"}
    )
    try:
        async with run_server(settings) as client:

            async def is_global() -> bool:
                answer = await client.post("/v1/jobs", json=JOB | {"durability": "GLOBAL"})
                return answer.status_code == 201 and answer.json()["durability"]["survives"][-1] == "region"

            await until(is_global, "two of three regions hold it")
            async with short_of_members(keepers, 3):
                await until(is_global, "the home region and another one are two of three")
                async with short_of_members(keepers, 4):
                    late = await client.post("/v1/jobs", json=JOB | {"durability": "GLOBAL"})
                    assert (late.status_code, late.json()["achieved"]) == (503, "REGIONAL")
                    await submit(client, "REGIONAL")
                    line = json.dumps(JOB | {"type": "JobCreated"})
                    headers = {"Idempotency-Key": "lines", "Content-Type": "application/x-ndjson"}
                    keyed = await client.post("/v1/events?durability=REGIONAL", content=line, headers=headers)
                    assert keyed.status_code == 200, keyed.text
                    assert keyed.json()["durability"]["achieved"] == "REGIONAL"
            await until(is_global, "it is back")
    finally:
        keepers.stop(*keepers.running)


WITH_IDENTITY = ("/v1/jobs", "/v1/jobs/there/events", "/v1/jobs/there/cancel", "/v1/events?durability=GLOBAL")
"""Requests whose repetition is the same record; another one queues a new one that adds nothing to the chain."""


class Repeated(NamedTuple):
    """A keyed request, its body and headers, and the status of its first answer."""

    path: str
    body: str
    status: int
    headers: Mapping[str, str]

    async def send(self, client: httpx.AsyncClient) -> httpx.Response:
        return await client.post(self.path, content=self.body, headers=self.headers)


def keyed(name: str) -> dict[str, str]:
    return {"Idempotency-Key": name, "Content-Type": "application/json"}


def keyed_at_global(name: str) -> list[Repeated]:
    """A request of each kind that has a key and asks for GLOBAL, and is answered with what the level claims."""
    job = JOB | {"durability": "GLOBAL"}
    report = {"tenant_id": "acme", "type": "JobAccepted", "dc_id": "d", "worker_count": 1, "durability": "GLOBAL"}
    cancel = {"tenant_id": "acme", "reason": "r", "requestor": "q", "durability": "GLOBAL"}
    line = json.dumps(JOB | {"type": "JobCreated"})
    run = {
        "eventType": "COMPLETE", "eventTime": "2026-01-01T00:00:00Z",
        "run": {"runId": f"run-{name}"}, "job": {"namespace": "n", "name": "n"}, "producer": "p",
    }  # fmt: skip
    lines = keyed(name) | {"Content-Type": "application/x-ndjson"}
    return [
        Repeated("/v1/jobs", json.dumps(job), 201, keyed(name)),
        Repeated("/v1/jobs/there/events", json.dumps(report), 201, keyed(name)),
        Repeated("/v1/jobs/there/cancel", json.dumps(cancel), 201, keyed(name)),
        Repeated("/v1/events?durability=GLOBAL", line, 200, lines),
        Repeated("/v1/commitments", json.dumps(COMMITMENT), 201, keyed(name)),
        Repeated("/api/v1/lineage", json.dumps(run), 200, {"Content-Type": "application/json"}),
    ]


async def test_a_repeat_claims_no_level_that_does_not_hold_now_however_it_was_answered_before(
    tmp_path: Path, make_settings: MakeSettings, run_server: RunServer
) -> None:
    keepers = Keepers(tmp_path / "regions", 5, {3: "eu1", 4: "ap1"})
    members = {"members": keepers.addresses, "timeout": "2s"}

    def settings(disk: str, node_id: str) -> Settings:
        return make_settings(
            disk,
            node_id=node_id,
            wal={"ack_mode": "REPLICATED_QUORUM"},
            replication=members,
            lineage={"tenants": {"*": "acme"}},
            write={"timeout": "500ms"},
        )

    async def is_late(client: httpx.AsyncClient, request: Repeated) -> dict[str, Any]:
        answer = await request.send(client)
        told: dict[str, Any] = answer.json()
        assert answer.status_code == 503, (request.path, answer.text)
        assert told["type"].rpartition("/")[2] == "durability-timeout", told
        assert told["achieved"] in ("LOCAL", "REGIONAL"), told
        assert told["hlc"], told
        assert answer.headers["Retry-After"]
        return told

    async def holds(client: httpx.AsyncClient, request: Repeated) -> httpx.Response | None:
        answer = await request.send(client)
        return answer if answer.status_code == request.status else None

    async def all_late(client: httpx.AsyncClient) -> list[dict[str, Any]]:
        return await asyncio.gather(*(is_late(client, request) for request in requests))

    async def all_hold(client: httpx.AsyncClient) -> list[bytes]:
        return [
            (await until(lambda each=each: holds(client, each), f"{each.path} is global")).content for each in requests
        ]

    requests = keyed_at_global("one")
    try:
        async with run_server(settings("second", "node-b")) as other:
            async with run_server(settings("disk", NODE)) as client:
                made = JOB | {"job_id": "there", "durability": "GLOBAL"}
                first_job = requests[0]._replace(body=json.dumps(made), headers=keyed("first"))
                await until(lambda: holds(client, first_job), "two of three regions hold it")
                keepers.stop(3, 4)
                first = await all_late(client)
                for request, told, again in zip(requests, first, await all_late(client), strict=True):
                    assert request.path not in WITH_IDENTITY or again["hlc"] == told["hlc"]
                keepers.start(3)
                answers = await all_hold(client)
                assert await all_hold(client) == answers, "while the level holds, byte for byte"
                keepers.stop(3)
                await all_late(client)
            async with run_server(settings("disk", NODE)) as client:
                await all_late(client)
                await all_late(other)
                shutil.rmtree(tmp_path / "regions" / "keeper-4")
                keepers.start(3, 4)
                for each in (client, other):
                    assert await all_hold(each) == answers
    finally:
        keepers.stop(*keepers.running)


@pytest.mark.parametrize("regions", [{}, {1: "eu1", 3: "ap1", 4: "ap1"}], ids=["one region", "three regions"])
async def test_a_repeat_after_the_members_removed_the_record_rests_on_the_chain_or_is_refused_for_good(
    tmp_path: Path, make_settings: MakeSettings, run_server: RunServer, regions: dict[int, str]
) -> None:
    keepers = Keepers(tmp_path / "regions", 5 if regions else 3, regions)
    settings = make_settings(
        node_id=NODE,
        wal={"ack_mode": "REPLICATED_QUORUM", "retain": "0s"},
        chain={"batch_interval": "100ms"},
        replication={"members": keepers.addresses, "timeout": "2s"},
        lease={"ttl": "2s"},
    )
    job, headers = JOB | {"durability": "REGIONAL"}, keyed("one")
    try:
        async with run_server(settings) as client:
            first = await client.post("/v1/jobs", json=job, headers=headers)
            assert first.status_code == 201, first.text
        async with run_server(settings) as client:  # in an epoch, hence a segment, of its own

            async def are_gone() -> bool:
                await submit(client, "REGIONAL")
                for keeper in keepers.running.values():
                    keeper.safekeeper.tend()
                return all(list_segments(keeper.folder / NODE)[0].base_lsn > 2 for keeper in keepers.running.values())

            await until(are_gone, "all have removed it")
            again = await client.post("/v1/jobs", json=job, headers=headers)
            if not regions:
                assert (again.status_code, again.content) == (201, first.content)
                return
            told = again.json()
            assert (again.status_code, told["reason"], told["achieved"]) == (503, "copies-removed", "LOCAL")
            assert "members_away" not in told
            assert "Retry-After" not in again.headers, "it is never answered otherwise"
            assert "the same Idempotency-Key is answered so again" in told["detail"]
            assert (await client.get(f"/v1/jobs/{told['job_id']}?tenant_id=acme")).status_code == 200
    finally:
        keepers.stop(*keepers.running)


@asynccontextmanager
async def waiting_for_regions(
    tmp_path: Path, make_settings: MakeSettings, run_node: RunNode
) -> AsyncIterator[tuple[Service, Keepers, asyncio.Task[Receipt]]]:
    """A node, its members, and a GLOBAL write that is chained and waits for the members of two regions, away."""
    keepers = Keepers(tmp_path / "regions", 5, {3: "eu1", 4: "ap1"})
    members = {"members": keepers.addresses, "timeout": "2s"}
    settings = make_settings(
        node_id=NODE, wal={"ack_mode": "REPLICATED_QUORUM"}, replication=members, shutdown_grace="3s"
    )
    try:
        async with run_node(settings) as service:
            await service.key_changes.recorded.wait()
            assert service.leadership is not None
            proposer = service.leadership.shipper.proposer
            await until(lambda: len(proposer.configuration.members) == 5, "all are members")
            keepers.stop(3, 4)
            yield service, keepers, await waiting(service, 1)
    finally:
        keepers.stop(*keepers.running)


async def waiting(service: Service, number: int) -> asyncio.Task[Receipt]:
    """A GLOBAL write that is chained, and waits for the members of other regions."""
    draft = created("acme", number, durability=Durability.GLOBAL)
    writing = asyncio.create_task(service.submitter.submit(draft, key=None))
    spread = service.node.spread
    await until(lambda: spread.wanted_lsn == service.writer.written_lsn, "it is chained, and waits for regions")
    assert not writing.done()
    return writing


async def test_who_waits_for_regions_learns_at_once_that_the_node_is_fenced(
    tmp_path: Path, make_settings: MakeSettings, run_node: RunNode
) -> None:
    async with waiting_for_regions(tmp_path, make_settings, run_node) as (service, _, writing):
        service.lifecycle.fail(FencedError("another writer has taken over"))
        with pytest.raises(FencedError):
            await asyncio.wait_for(writing, 30)


async def test_who_waits_for_regions_is_answered_once_one_catches_up_and_before_the_service_stops(
    tmp_path: Path, make_settings: MakeSettings, run_node: RunNode
) -> None:
    async with waiting_for_regions(tmp_path, make_settings, run_node) as (service, keepers, writing):
        keepers.start(3)
        # Though nothing more is committed.
        assert (await asyncio.wait_for(writing, 30)).achieved is Durability.GLOBAL
        keepers.stop(3)
        writing = await waiting(service, 2)
        service.lifecycle.begin_stop()
        with pytest.raises(DurabilityTimeoutError) as late:
            await asyncio.wait_for(writing, 30)
        assert late.value.achieved is Durability.REGIONAL


async def test_over_tls_a_node_writes_the_log_that_its_certificate_names_and_no_other(
    tmp_path: Path, make_settings: MakeSettings, run_server: RunServer, run_node: RunNode
) -> None:
    authority = Authority(tmp_path / "authority")
    served = authority.issue("keeper")
    tls = PeerTls(TlsFiles(served.cert, served.key, authority.ca_file), server_side=True)
    keepers = [Keeper(tmp_path / f"keeper-{number}", region="local", tls=tls) for number in range(3)]
    members = [f"localhost:{keeper.port}" for keeper in keepers]

    def settings(disk: str, name: str, **given: Any) -> Settings:
        shown = authority.issue(f"for-{name}", [DNSName(name)], is_client=True)
        files = {"tls_cert": shown.cert, "tls_key": shown.key, "tls_ca": authority.ca_file}
        replication = {"members": members, "timeout": "5s", **files}
        return make_settings(
            disk, node_id=NODE, wal={"ack_mode": "REPLICATED_QUORUM"}, replication=replication, **given
        )

    try:
        async with run_server(settings("disk", NODE)) as client:
            created = await submit(client, "REGIONAL")
            big = await client.post("/v1/jobs", json=JOB | {"spec": {"blob": "x" * 500_000}, "durability": "REGIONAL"})
            assert big.status_code == 201, "a batch of many records of TLS"
            refused = Authority(tmp_path / "strange", "strange").issue("keeper")
            served.take(refused)
            for keeper in keepers[:2]:
                keeper.close()
            keepers[:2] = [Keeper(keeper.folder, region="local", tls=tls, port=keeper.port) for keeper in keepers[:2]]
            reason = "certificate is refused: unable to get local issuer certificate"

            async def names_both() -> bool:
                ready = (await client.get("/readyz")).json()["checks"]["quorum"]["detail"] or ""
                return all(f"{member}: the peer's {reason}" in ready for member in members[:2])

            await until(names_both, "the members that are refused are named, each with its reason")
            shown = (await client.get("/v1/node")).json()["members"]
            assert [reason in (member["fault"] or "") for member in shown] == [True, True, False]
            served.take(authority.issue("again"))
            await until(lambda: in_sync(client), "they are back")
        async with run_server(settings("another", NODE)) as client:
            assert (await client.get(f"/v1/jobs/{created['job_id']}?tenant_id=acme")).status_code == 200
        with pytest.raises(StartRefusedError, match=r"no quorum: .*; localhost:\d+: forbidden: the certificate names"):
            async with run_node(settings("third", "node-b")):
                pass
    finally:
        for keeper in keepers:
            keeper.close()


async def test_a_member_that_answers_late_is_asked_again_and_only_once_where_nothing_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    members = Configuration(1, Epoch(3), "eu1", copies=False, members=(Member("a" * 32, "eu1"),))
    wal = WalStatus("node-1", "open", "", "w", "a" * 32, tail=Position(Epoch(3), Lsn(9)), durable_lsn=Lsn(9))
    faults = [ConnectionRefusedError("not yet")] * 3

    def status(host: str, port: int, tls: PeerTls | None, timeout_s: float) -> StatusReport:
        if faults:
            raise faults.pop()
        return StatusReport("eu1", (wal,), more=False)

    monkeypatch.setattr("wal.replication.frames.status", status)
    copies = MemberCopies(
        ["here:1"],
        node_id="node-1",
        own=lambda: members,
        regions=frozenset(),
        needs_all=False,
        tls=None,
        timeout_s=1.0,
    )
    hold = partial(copies.hold, [Stretch("node-1", Epoch(3), Lsn(4), Lsn(9))], in_regions=False, timeout_s=60.0)
    with pytest.raises(DurabilityTimeoutError, match="here:1: not yet"):
        await hold(is_once=True)
    assert len(faults) == 2
    await hold(is_once=False)
    assert not faults
