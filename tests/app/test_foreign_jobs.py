"""Jobs of other regions: which events about them a ledger takes, what it answers, and what a redirecting one says."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.dev.cluster import free_port
from app.dev.embedded import EmbeddedPostgres
from app.edge.listener import listening
from app.node.wiring import running
from ledger.hlc import Clock
from signing.private_keys import generate
from tests.app.bundles import bundle_of, store
from tests.app.client import Client
from tests.app.conftest import MakeSettings, RunServer
from tests.app.importing import signed
from tests.app.postgres_proxy import PostgresProxy
from tests.app.shared import Shared, sharing
from tests.conftest import Database, fresh_database
from tests.ledger.ledger_in_memory import SIGNER, Ledger
from tests.ledger.regions import BEGIN_MS, REGIONS, Region, drawn_event
from tests.tally import run_tally

HERE, THERE, THIRD = REGIONS
SEEDS = (
    [int(os.environ["SEED"])] if os.environ.get("SEED") else range(int(os.environ.get("TORTURE_ROUNDS") or 10) // 10)
)
"""Histories of three services, each of which takes seconds: one, or as many as a tenth of the rounds."""
URL_THERE = f"http://127.0.0.1:{free_port()}"
"""Nobody answers there: the region is dead."""


def exchange(trusted: Path, **more: Any) -> dict[str, Any]:
    """Settings of a ledger of ``HERE`` whose peers do not answer."""
    peers = [{"region": THERE, "url": URL_THERE}, {"region": THIRD, "url": f"http://127.0.0.1:{free_port()}"}]
    return {"region": HERE, "bundle": {"trusted_keys": trusted}, "exchange": {"peers": peers, **more}}


@pytest.fixture(scope="module")
def trusted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The key of ``SIGNER``, with which the peers sign."""
    return store(tmp_path_factory.mktemp("keys"), SIGNER.public_key_pem.encode(), "trusted.pem")


@pytest.fixture(scope="module")
async def shared(make_shared_settings: MakeSettings, shared_database: Database, trusted: Path) -> AsyncIterator[Shared]:
    """A node with two peers, which the tests of this file share."""
    settings = make_shared_settings(**exchange(trusted), lineage={"tenants": {"*": "runs"}})
    async with sharing(settings, shared_database) as shared:
        yield shared


def job_of(region: str, number: int = 0) -> str:
    """The id of a job that a node of this region made."""
    return f"{region}-{BEGIN_MS}-gate-{number:05}"


def ledger_of(region: Region, tenant_id: str) -> Ledger:
    """The chain of a region, as the ledger of one tenant that can be exported."""
    rows = [
        {
            "seq": seq,
            "t_hlc": entry.hlc.text(),
            "hlc_physical": entry.hlc.physical_ms,
            "hlc_logical": entry.hlc.logical,
            "hlc_node": entry.hlc.node_id,
            "job_id": entry.job_id,
            "action": entry.action,
            "link_version": 2,
            "payload": entry.payload,
            "origin": None,
        }
        for seq, entry in enumerate(region.chain, 1)
    ]
    ledger = Ledger(tenant_id, rows)
    ledger.relink()
    return signed(ledger)


async def import_from_there(client: Client, *events: tuple[str, int], job_id: str | None = None) -> None:
    """Import a ledger of ``THERE``: these events, by type and fence token, of its job 0, or of the job ``job_id``."""
    region = Region(THERE, "eu1.1", Clock("eu1-node", 5000))
    for at, (name, fence) in enumerate(events):
        assert region.write(name, job_id or job_of(THERE), fence, BEGIN_MS + at, dc_id="a") is not None
    await import_bundle(client, bundle_of(ledger_of(region, client.tenant), log_origin="eu.example"))


async def import_bundle(client: httpx.AsyncClient, bundle: bytes) -> None:
    (await client.post("/v1/bundles/import", files={"file": ("b.tar", bundle)})).raise_for_status()


async def cancel(client: Client, job_id: str, **more: Any) -> httpx.Response:
    body = {"tenant_id": client.tenant, "reason": "its region is away", "requestor": "night shift", **more}
    return await client.post(f"/v1/jobs/{job_id}/cancel", json=body)


async def report(client: Client, job_id: str, name: str, **fields: Any) -> httpx.Response:
    body = {"tenant_id": client.tenant, "type": name, **fields}
    return await client.post(f"/v1/jobs/{job_id}/events", json=body)


async def send_lines(client: Client, *lines: Mapping[str, Any]) -> httpx.Response:
    content = "".join(json.dumps({"tenant_id": client.tenant, **line}) + "\n" for line in lines)
    return await client.post("/v1/events", content=content, headers={"Content-Type": "application/x-ndjson"})


async def read(client: Client, job_id: str, **params: Any) -> dict[str, Any]:
    answer = await client.get(f"/v1/jobs/{job_id}", params={"tenant_id": client.tenant, **params})
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


async def listed(client: Client) -> list[tuple[str, str]]:
    """Id and status of all jobs of the tenant."""
    answer = await client.get("/v1/jobs", params={"tenant_id": client.tenant, "consistency": "strong"})
    return [(job["job_id"], job["status"]) for job in answer.raise_for_status().json()["items"]]


async def told(client: Client, job_id: str) -> str:
    """What ``tally jobs`` prints of a job."""
    command = ("jobs", "--tenant", client.tenant, "--url", str(client.base_url), job_id)
    return (await asyncio.to_thread(run_tally, *command)).stdout


def problem_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["type"].rpartition("/")[2]


async def test_any_event_about_a_job_that_was_imported_is_taken_and_the_answer_names_its_home(
    shared_client: Client,
) -> None:
    await import_from_there(shared_client, ("JobCreated", 1), ("JobAccepted", 3))
    progress = await report(shared_client, job_of(THERE), "JobProgressReported", dc_id="b", completed=2)
    assert (progress.status_code, progress.json()["home_region"]) == (201, THERE)
    assert progress.json()["fence_token"] == 3, "an event without a fence token has the highest that is known here"
    ended = await report(shared_client, job_of(THERE), "JobCompleted", final_status="ok")
    assert (ended.status_code, ended.json()["home_region"]) == (201, THERE)
    assert (await read(shared_client, job_of(THERE)))["status"] == "COMPLETED"
    assert problem_of(await cancel(shared_client, job_of(THERE))) == (409, "job-ended")


async def test_a_cancellation_is_taken_of_a_job_that_has_not_arrived_and_wins_when_it_arrives(
    shared_client: Client,
) -> None:
    taken = await cancel(shared_client, job_of(THERE))
    assert (taken.status_code, taken.json()["home_region"]) == (201, THERE)
    early = await read(shared_client, job_of(THERE))
    assert (early["status"], early["created_hlc"]) == ("CANCELLING", None)
    assert await listed(shared_client) == [], "lists go by the time of creation"
    assert "no creation that counts is known here" in await told(shared_client, job_of(THERE))
    # The job is known now, so other facts about it are taken too.
    acked = await report(shared_client, job_of(THERE), "JobCancellationAcked", dc_id="a")
    assert acked.status_code == 201
    await import_from_there(shared_client, ("JobCreated", 1), ("JobAccepted", 9), ("JobCompleted", 9))
    late = await read(shared_client, job_of(THERE))
    assert (late["status"], late["assigned_dcs"], late["fence_token"]) == ("CANCELLED", ["a", "b"], 9)
    assert await listed(shared_client) == [(job_of(THERE), "CANCELLED")]
    assert "no creation" not in await told(shared_client, job_of(THERE))


async def test_a_job_of_which_only_the_cancellation_came_waits_for_no_acknowledgement_until_it_arrives(
    shared_client: Client,
) -> None:
    async def awaited() -> list[str]:
        params = {"tenant_id": shared_client.tenant, "dc": "a"}
        items = (await shared_client.get("/v1/cancellations", params=params)).raise_for_status().json()["items"]
        return [job["job_id"] for job in items]

    assert (await cancel(shared_client, job_of(THERE))).status_code == 201
    assert await awaited() == []
    await import_from_there(shared_client, ("JobCreated", 1))
    assert await awaited() == [job_of(THERE)]


async def test_other_events_about_a_job_that_has_not_arrived_are_404_and_name_its_home(shared_client: Client) -> None:
    for job_id, says in ((job_of(THERE), URL_THERE), ("nightly-7", "create it first")):
        answer = await report(shared_client, job_id, "JobProgressReported", dc_id="a")
        assert problem_of(answer) == (404, "job-not-found")
        assert says in answer.json()["detail"]


async def test_the_home_of_a_job_whose_id_a_caller_chose_is_not_known_and_a_cancellation_is_taken(
    shared_client: Client,
) -> None:
    for job_id in ("nightly-7", job_of("gone1"), f"{THERE}-nightly-7"):
        taken = await cancel(shared_client, job_id)
        assert (taken.status_code, taken.json()["home_region"]) == (201, None)


async def test_a_cancellation_of_a_job_that_this_region_never_made_is_404(shared_client: Client) -> None:
    assert problem_of(await cancel(shared_client, job_of(HERE))) == (404, "job-not-found")
    body = {"tenant_id": shared_client.tenant, "spec": {}, "assigned_dcs": []}
    made = (await shared_client.post("/v1/jobs", json=body)).json()
    assert made["home_region"] == HERE
    assert (await cancel(shared_client, made["job_id"])).json()["home_region"] == HERE


async def test_lines_about_jobs_of_other_regions_are_taken_as_single_events_are(shared_client: Client) -> None:
    cancelled = {"type": "JobCancellationRequested", "reason": "r", "requestor": "q"}
    acked = {"type": "JobCancellationAcked", "dc_id": "a"}
    lines = [cancelled | {"job_id": job_of(THERE)}, acked | {"job_id": job_of(THERE)}]
    taken = await send_lines(shared_client, *lines, cancelled | {"job_id": "nightly-7"}, {"type": "JobCreated"})
    assert taken.status_code == 200, taken.text
    assert taken.json()["home_regions"] == [THERE]
    assert (await read(shared_client, job_of(THERE)))["status"] == "CANCELLED"
    refused = await send_lines(
        shared_client, cancelled | {"job_id": job_of(THIRD)}, acked | {"job_id": job_of(THIRD, 1)}
    )
    assert (*problem_of(refused), refused.json()["line"]) == (422, "invalid-event", 2)


async def test_a_repeated_cancellation_of_a_job_that_has_not_arrived_is_answered_as_it_was(
    shared_client: Client,
) -> None:
    shared_client.headers["Idempotency-Key"] = "once"
    first, again = [await cancel(shared_client, job_of(THERE)) for _ in range(2)]
    assert (first.status_code, first.content) == (201, again.content)
    assert again.headers["Idempotent-Replay"] == "true"


async def test_a_job_that_is_known_from_elsewhere_is_not_created_again_and_one_only_cancelled_is_created_cancelled(
    shared_client: Client,
) -> None:
    await import_from_there(shared_client, ("JobCreated", 1))
    body = {"tenant_id": shared_client.tenant, "spec": {"another": 1}, "assigned_dcs": ["a"]}
    again = await shared_client.post("/v1/jobs", json=body | {"job_id": job_of(THERE)})
    assert problem_of(again) == (409, "job-exists")
    await cancel(shared_client, "nightly-7")
    assert (await shared_client.post("/v1/jobs", json=body | {"job_id": "nightly-7"})).status_code == 201
    assert (await read(shared_client, "nightly-7"))["status"] == "CANCELLING"


async def test_other_creations_of_a_job_are_shown_in_the_order_of_their_hlcs_whichever_came_first(
    shared_client: Client,
) -> None:
    late, early = Region(THIRD, "ap1.1", Clock("ap1-node", 5000)), Region(THERE, "eu1.1", Clock("eu1-node", 5000))
    for region, n in ((late, 2), (early, 0), (early, 1)):
        assert region.write("JobCreated", job_of(THERE), 1, BEGIN_MS + n, spec={"n": n}) is not None
    for region, origin in ((late, "ap.example"), (early, "eu.example")):
        await import_bundle(shared_client, bundle_of(ledger_of(region, shared_client.tenant), log_origin=origin))
    job = await read(shared_client, job_of(THERE))
    assert (job["spec"], [each["spec"] for each in job["other_creations"]]) == ({"n": 0}, [{"n": 1}, {"n": 2}])


async def test_a_peer_that_is_trusted_for_a_tenant_ends_the_jobs_made_here(shared_client: Client) -> None:
    body = {"tenant_id": shared_client.tenant, "spec": {}, "assigned_dcs": ["a"]}
    job_id = (await shared_client.post("/v1/jobs", json=body)).json()["job_id"]
    await import_from_there(shared_client, ("JobCancellationRequested", 1), ("JobFailed", 1), job_id=job_id)
    assert (await read(shared_client, job_id))["status"] == "CANCELLED"


async def test_a_run_of_openlineage_that_is_first_heard_of_by_its_abort_is_created_with_it(
    shared_client: Client,
) -> None:
    event = {"eventType": "ABORT", "run": {"runId": "run-1"}, "job": {"namespace": "dags", "name": "daily"}}
    answer = await shared_client.post("/api/v1/lineage", json={**event, "producer": "https://example.org/scheduler"})
    assert answer.json() == {"events": 1, "recorded": 1}
    shared_client.tenant = "runs"
    job = await read(shared_client, "run-1")
    assert (job["status"], job["spec"]["name"]) == ("CANCELLED", "daily")


async def test_without_postgres_a_cancellation_of_a_job_that_is_not_known_is_taken_at_local(
    run_server: RunServer, make_settings: MakeSettings, proxy: PostgresProxy, trusted: Path
) -> None:
    async with run_server(make_settings(**exchange(trusted), shutdown_grace="1s"), url=proxy.url) as client:
        await client.post("/v1/jobs", json={"tenant_id": "acme", "spec": {}, "assigned_dcs": []})
        await proxy.refuse()
        assert (await cancel(client, job_of(THERE), durability="LOCAL")).status_code == 201
        other = await report(client, job_of(THIRD), "JobCompleted", durability="LOCAL")
        assert other.status_code == 503


async def test_a_ledger_that_redirects_names_the_whole_address_of_the_job_and_takes_nothing(
    run_server: RunServer, make_settings: MakeSettings, trusted: Path
) -> None:
    async with run_server(make_settings(**exchange(trusted, foreign_jobs="redirect"))) as client:
        await import_from_there(client, ("JobCreated", 1))
        head = (await client.get("/v1/chain/head?tenant_id=acme")).json()["seq"]
        completed = {"type": "JobCompleted", "final_status": "ok", "job_id": job_of(THERE)}
        answers = [
            await cancel(client, job_of(THERE)),
            await report(client, job_of(THERE), "JobCompleted"),
            await send_lines(client, {"type": "JobCreated"}, completed),
        ]
        for answer in answers:
            assert problem_of(answer) == (421, "other-region")
            assert answer.headers["Location"] == f"{URL_THERE}/v1/jobs/{job_of(THERE)}"
            assert answer.json()["home_region"] == THERE
        assert answers[2].json()["line"] == 2
        assert problem_of(await cancel(client, "nightly-7")) == (404, "job-not-found")
        assert (await client.get("/v1/chain/head?tenant_id=acme")).json()["seq"] == head


async def test_a_ledger_that_redirects_takes_the_events_of_a_region_that_was_retired(
    run_server: RunServer, make_settings: MakeSettings, trusted: Path
) -> None:
    async with run_server(make_settings(**exchange(trusted, foreign_jobs="redirect"))) as client:
        await import_from_there(client, ("JobCreated", 1))
        retired = await client.post(f"/v1/exchange/regions/{THERE}/retire", json={"reason": "burnt down"})
        assert retired.status_code == 200, retired.text
        for job_id in (job_of(THERE), job_of(THERE, 1)):
            taken = await cancel(client, job_id)
            assert (taken.status_code, taken.json()["home_region"]) == (201, THERE)
        unknown = await report(client, job_of(THERE, 2), "JobCompleted")
        assert problem_of(unknown) == (404, "job-not-found")
        assert URL_THERE not in unknown.json()["detail"], "nobody will answer there"
        assert problem_of(await cancel(client, job_of(THIRD))) == (421, "other-region")


async def test_a_ledger_without_peers_takes_no_event_about_a_job_that_it_does_not_know(client: Client) -> None:
    for job_id in ("nightly-7", job_of(THERE)):
        assert problem_of(await cancel(client, job_id)) == (404, "job-not-found")


# --- three ledgers that write on their own ------------------------------------------------------------


class World:
    """Three services, each with a database of its own, that import from each other when they are told to."""

    def __init__(self, databases: list[Database], make_settings: MakeSettings, trusted: Path) -> None:
        self._databases, self._make_settings, self._trusted = databases, make_settings, trusted
        self._running: dict[str, AsyncExitStack] = {}
        self.clients: dict[str, Client] = {}

    async def start_empty(self, name: str, folder: str) -> None:
        """A ledger of this region that knows nothing, on a disk of its own."""
        stack = self._running[name] = AsyncExitStack()
        database = self._databases.pop()
        key_file = self._trusted.parent / f"{folder}.pem"
        (self._trusted / f"{folder}.pem").write_text(generate(key_file).public_key_pem)
        peers = [{"region": each, "url": f"http://127.0.0.1:{free_port()}"} for each in REGIONS if each != name]
        settings = self._make_settings(
            folder,
            region=name,
            signing={"key_uri": f"file:{key_file}"},
            bundle={"trusted_keys": self._trusted},
            exchange={"peers": peers},
        )
        _service, services = await stack.enter_async_context(running(settings, database.service_url))
        url, _serving = await stack.enter_async_context(listening(services))
        self.clients[name] = await stack.enter_async_context(Client(base_url=url, timeout=60, trust_env=False))

    async def lose(self, name: str) -> None:
        """Stop the ledger of this region for good."""
        await self._running.pop(name).aclose()

    async def close(self) -> None:
        for name in [*self._running]:
            await self.lose(name)

    async def write(self, name: str, dice: random.Random) -> None:
        """Some events of callers of this region. Those about a job that ended there, or is not known, are refused."""
        for _ in range(12):
            event, job_id, fence, fields = drawn_event(dice)
            wanted = {"type": event, "job_id": job_id, **fields} | ({} if fence is None else {"fence_token": fence})
            answer = await send_lines(self.clients[name], wanted)
            assert answer.status_code in (200, 422), answer.text

    async def take(self, to: str, of: str) -> None:
        """One ledger imports all that another has."""
        wanted = {"tenant_id": "acme"}
        bundle = (await self.clients[of].post("/v1/bundles/export", json=wanted)).raise_for_status().content
        await import_bundle(self.clients[to], bundle)

    async def even(self) -> None:
        """Each ledger imports all that the others have."""
        for to in REGIONS:
            for of in REGIONS:
                if of != to:
                    await self.take(to, of)

    async def hlcs(self, name: str) -> set[str]:
        """The HLCs of a ledger."""
        params = {"tenant_id": "acme", "limit": 1000}
        items = (await self.clients[name].get("/v1/chain/entries", params=params)).raise_for_status().json()["items"]
        return {entry["t_hlc"] for entry in items}

    async def jobs(self, name: str, **params: Any) -> dict[str, Any]:
        """By id, all jobs of a list, without their places in one chain."""
        wanted = {"tenant_id": "acme", "limit": 1000, "consistency": "strong", **params}
        items = (await self.clients[name].get("/v1/jobs", params=wanted)).raise_for_status().json()["items"]
        return {job["job_id"]: without_places(job) for job in items}


@pytest.fixture
def databases(postgres: EmbeddedPostgres) -> Iterator[list[Database]]:
    """One for each ledger, and one for a ledger that starts again."""
    with ExitStack() as stack:
        yield [stack.enter_context(fresh_database(postgres)) for _ in (*REGIONS, "again")]


@pytest.fixture
async def world(databases: list[Database], make_settings: MakeSettings, tmp_path: Path) -> AsyncIterator[World]:
    (trusted := tmp_path / "trusted").mkdir()
    world = World([*databases], make_settings, trusted)
    for name in REGIONS:
        await world.start_empty(name, name)
    yield world
    await world.close()


@pytest.mark.torture
@pytest.mark.parametrize("seed", SEEDS)
async def test_three_ledgers_come_to_the_same_jobs_after_a_partition_and_the_loss_of_a_disk(
    world: World, seed: int
) -> None:
    dice = random.Random(seed)
    for name in REGIONS:
        await world.write(name, dice)
    await world.take(HERE, THERE)
    await world.write(HERE, dice)
    of_majority = await world.hlcs(THERE)
    await world.lose(THERE)
    for name in (HERE, THIRD):
        await world.write(name, dice)
    await world.start_empty(THERE, "eu1-again")
    await world.write(THERE, dice)
    await world.take(THERE, THIRD)
    await world.write(THERE, dice)
    await world.even()
    await world.even()
    shown = [await world.jobs(name) for name in REGIONS]
    assert shown[0] == shown[1] == shown[2]
    assert len(shown[0]) > 3
    for name in REGIONS:
        assert of_majority <= await world.hlcs(name), "two ledgers had it"
        client, last_hlc = world.clients[name], max((job["last_hlc"] for job in shown[0].values()), key=as_hlc)
        for job_id, listed in shown[0].items():
            for params in ({}, {"as_of": last_hlc}, {"consistency": "eventual"}):
                found = await read(client, job_id, **params)
                assert without_places({member: found[member] for member in listed}) == listed
            events = (await client.get(f"/v1/jobs/{job_id}/events?tenant_id=acme")).raise_for_status().json()["items"]
            if any(event["action"] == "CANCEL" for event in events):
                assert listed["status"] in ("CANCELLED", "CANCELLING")
        verdict = (await client.get("/v1/chain/verify?tenant_id=acme")).json()
        assert (verdict["valid"], verdict["verdicts"]["projection"]) == (True, "ok")


def without_places(job: Mapping[str, Any]) -> dict[str, Any]:
    """A job as every ledger shows it: without seqs, and without the names that one ledger gives to logs."""
    conflicts = [
        {**conflict, "entries": [{**entry, "seq": None, "log": None} for entry in conflict["entries"]]}
        for conflict in job["conflicts"]
    ]
    return {**job, "last_seq": None, "conflicts": conflicts}


def as_hlc(text: str) -> tuple[int, int, str]:
    physical, logical, node = text.split(":")
    return int(physical), int(logical), node
