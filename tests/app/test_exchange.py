"""Two ledgers that write on their own and exchange: what each chains comes to the other by itself, proved and once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest

from app.dev.cluster import free_port
from app.dev.embedded import EmbeddedPostgres
from app.store import exchange
from tests.app.chains import until
from tests.app.conftest import MakeSettings, RunServer
from tests.conftest import Database, connected_to, fresh_database

REGIONS = ("use1", "eu1")


class Ledger:
    """One of the two: a node, a database and a port of its own."""

    def __init__(self, region: str, database: Database, make_settings: MakeSettings, run_server: RunServer) -> None:
        self.region, self.database = region, database
        self._make_settings, self._run_server = make_settings, run_server
        self.port = free_port()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @asynccontextmanager
    async def running(self, **given: Any) -> AsyncIterator[httpx.AsyncClient]:
        settings = self._make_settings(self.region, region=self.region, port=self.port, **given)
        async with self._run_server(settings, url=self.database.service_url) as client:
            yield client

    async def keys(self, folder: Path) -> None:
        """Begin, and leave the keys that the other is to trust."""
        async with self.running() as client:
            answer = await until(lambda: self._keys(client), "a key is published")
            (folder / f"{self.region}.json").write_text(json.dumps(answer))

    async def _keys(self, client: httpx.AsyncClient) -> dict[str, Any] | None:
        said: dict[str, Any] = (await client.get("/v1/keys")).json()
        return said if said["keys"] else None

    def peers(self, other: Ledger, trusted: Path, **more: Any) -> dict[str, Any]:
        peer = {"url": other.url, "region": other.region}
        return {
            "bundle": {"trusted_keys": trusted},
            "exchange": {"peers": [peer], "interval": "200ms", "range_entries": 3, **more},
        }


@pytest.fixture
def databases(postgres: EmbeddedPostgres) -> Iterator[tuple[Database, Database]]:
    with fresh_database(postgres) as one, fresh_database(postgres) as other:
        yield one, other


@pytest.fixture
async def ledgers(
    tmp_path: Path, databases: tuple[Database, Database], make_settings: MakeSettings, run_server: RunServer
) -> tuple[Ledger, Ledger]:
    (tmp_path / "trusted").mkdir()
    both = [
        Ledger(region, database, make_settings, run_server) for region, database in zip(REGIONS, databases, strict=True)
    ]
    for ledger in both:
        await ledger.keys(tmp_path / "trusted")
    return both[0], both[1]


async def submit(client: httpx.AsyncClient, tenant_id: str = "acme", level: str = "GLOBAL") -> dict[str, Any]:
    answer = await client.post(
        "/v1/jobs", json={"tenant_id": tenant_id, "spec": {}, "assigned_dcs": ["x"], "durability": level}
    )
    assert answer.status_code == 201, answer.text
    created: dict[str, Any] = answer.json()
    return created


async def is_known(client: httpx.AsyncClient, job: dict[str, Any]) -> bool:
    return (await client.get(f"/v1/jobs/{job['job_id']}?tenant_id={job['tenant_id']}")).status_code == 200


async def is_faultless(client: httpx.AsyncClient) -> bool:
    return [peer["fault"] for peer in (await client.get("/v1/exchange")).json()["peers"]] == [None]


async def test_what_each_chains_comes_to_the_other_once(ledgers: tuple[Ledger, Ledger], tmp_path: Path) -> None:
    here, there = ledgers
    trusted = tmp_path / "trusted"
    async with here.running(**here.peers(there, trusted)) as us, there.running(**there.peers(here, trusted)) as eu:
        ours = [await submit(us) for _ in range(7)]
        theirs = [await submit(eu, tenant_id) for tenant_id in ("acme", "other")]
        for job in ours:
            await until(lambda job=job: is_known(eu, job), "it came over")
        for job in theirs:
            await until(lambda job=job: is_known(us, job), "it came over")
        for client in (us, eu):
            verdict = (await client.get("/v1/chain/verify?tenant_id=acme")).json()
            assert (verdict["valid"], verdict["entries_checked"]) == (True, 8)
            # What came over while another tenant's log was not signed yet came before its fault was over.
            await until(lambda client=client: is_faultless(client), "the first faults are over")
        elsewhere = await us.post(
            f"/v1/jobs/{theirs[0]['job_id']}/cancel", json={"tenant_id": "acme", "reason": "r", "requestor": "q"}
        )
        assert (elsewhere.status_code, elsewhere.headers["Location"]) == (421, there.url)
        assert elsewhere.json()["type"].endswith("other-region")
    async with connected_to(here.database.superuser_url) as superuser:
        rows = await superuser.fetch("SELECT t_hlc FROM scheduler.scheduler_log WHERE tenant_id = 'acme'")
        assert len({row["t_hlc"] for row in rows}) == len(rows) == 8


async def test_it_goes_on_after_the_other_was_away(ledgers: tuple[Ledger, Ledger], tmp_path: Path) -> None:
    here, there = ledgers
    trusted = tmp_path / "trusted"
    async with here.running(**here.peers(there, trusted)) as us:

        async def says_so() -> bool:
            checks = (await us.get("/readyz")).json()["checks"]
            return not checks["exchange"]["ok"]

        await until(says_so, "readiness says that the peer does not answer")
        async with there.running() as eu:
            job = await submit(eu)
            await until(lambda: is_known(us, job), "it came over")


async def test_a_peer_that_went_back_is_imported_from_no_more(ledgers: tuple[Ledger, Ledger], tmp_path: Path) -> None:
    here, there = ledgers
    trusted = tmp_path / "trusted"
    async with here.running(**here.peers(there, trusted)) as us:
        async with there.running() as eu:
            for job in [await submit(eu) for _ in range(3)]:
                await until(lambda job=job: is_known(us, job), "it came over")
        async with connected_to(here.database.superuser_url) as superuser:
            note = await superuser.fetchval("SELECT note FROM scheduler.exchange_positions WHERE tenant_id = 'acme'")
            lines = note.split("\n")
            lines[1] = "2"
            await superuser.execute(
                "UPDATE scheduler.exchange_positions SET note = $1 WHERE tenant_id = 'acme'", "\n".join(lines)
            )
        async with there.running():

            async def says_so() -> bool:
                fault = (await us.get("/v1/exchange")).json()["peers"][0]["fault"]
                return fault is not None and "PeerWentBackError" in fault

            await until(says_so, "it says that the peer went back")


async def test_global_waits_for_a_majority_of_regions(ledgers: tuple[Ledger, Ledger], tmp_path: Path) -> None:
    here, there = ledgers
    trusted = tmp_path / "trusted"
    given = here.peers(there, trusted, is_global=True)
    async with here.running(**given, write={"timeout": "1s"}) as us:
        late = await us.post("/v1/jobs", json={"tenant_id": "acme", "spec": {}, "assigned_dcs": ["x"]})
        assert late.status_code == 503
    async with here.running(**given) as us, there.running(**there.peers(here, trusted)):

        async def is_global() -> bool:
            answer = await us.post("/v1/jobs", json={"tenant_id": "acme", "spec": {}, "assigned_dcs": ["x"]})
            return answer.status_code == 201 and "region" in answer.json()["durability"]["survives"]

        await until(is_global, "both regions hold it")
        line = json.dumps({"tenant_id": "acme", "type": "JobCreated", "spec": {}, "assigned_dcs": ["x"]})
        headers = {"Content-Type": "application/x-ndjson"}

        async def lines_are_global() -> bool:
            return (await us.post("/v1/events?durability=GLOBAL", content=line, headers=headers)).status_code == 200

        await until(lines_are_global, "lines, too")


async def test_who_asks_a_peer_is_one_and_leaves_it_to_another_when_it_is_stopped(
    pool: asyncpg.Pool, superuser: asyncpg.Connection
) -> None:
    async def ask(has_begun: asyncio.Event) -> None:
        async with pool.acquire() as connection, exchange.turn(connection, "https://peer") as is_ours:
            assert is_ours
            has_begun.set()
            await asyncio.Event().wait()

    async def is_free() -> bool:
        async with exchange.turn(superuser, "https://peer") as is_ours:
            return is_ours

    assert await is_free(), "whoever ends its turn"
    assert await is_free(), "leaves it to others"
    for passes in (None, *range(12)):  # of the event loop, before it is stopped
        has_begun = asyncio.Event()
        asking = asyncio.create_task(ask(has_begun))
        if passes is None:
            await has_begun.wait()
            assert not await is_free()
        for _ in range(passes or 0):
            await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(is_free, "the turn of who was stopped ends")
