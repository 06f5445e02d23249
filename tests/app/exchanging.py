"""Ledgers of several regions, each with a node, a database and a port of its own."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from app.dev.cluster import free_port
from app.dev.embedded import EmbeddedPostgres
from app.edge.listener import listening
from app.node.wiring import running
from signing.private_keys import generate
from tests.app.chains import until
from tests.app.client import Client
from tests.app.conftest import MakeSettings
from tests.conftest import Database, fresh_database
from tests.tally import run_tally

REGIONS = ("use1", "eu1")


class Ledger:
    """One of the two: a node, a database and a port of its own."""

    def __init__(self, region: str, database: Database, make_settings: MakeSettings) -> None:
        self.region, self.database, self._make_settings = region, database, make_settings
        self.port = free_port()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @asynccontextmanager
    async def running(self, **given: Any) -> AsyncIterator[httpx.AsyncClient]:
        settings = self._make_settings(self.region, region=self.region, port=self.port, **given)
        async with (
            running(settings, self.database.service_url) as (_service, services),
            listening(services) as (url, _serving),
            Client(base_url=url, timeout=30, trust_env=False) as client,
        ):
            yield client

    @property
    def key_file(self) -> Path:
        return Path(self._make_settings(self.region).signing_key_uri.removeprefix("file:"))

    async def command(self, line: str, folder: Path, *, code: int = 0, **more: str) -> str:
        """What a line of a message prints that an operator of this ledger runs in a folder; ``more`` are settings."""
        settings = {"TALLY_DATA_DIR": str(self._make_settings(self.region).data_dir), "TALLY_URL": self.url, **more}
        program, *words = shlex.split(line)
        assert program == "tally"
        done = await asyncio.to_thread(run_tally, *words, folder=folder, **settings)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def make_key(self, folder: Path) -> None:
        """The key that it signs with, before it first starts, and the public half for the other to trust."""
        (folder / f"{self.region}.pem").write_text(generate(self.key_file).public_key_pem)

    def peers(self, other: Ledger, trusted: Path, peer: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
        peer = {"url": other.url, "region": other.region, **(peer or {})}
        return {
            "bundle": {"trusted_keys": trusted},
            "exchange": {"peers": [peer], "interval": "200ms", "range_entries": 3, **more},
        }


def both_of(postgres: EmbeddedPostgres, trusted: Path, make_settings: MakeSettings) -> Iterator[tuple[Ledger, Ledger]]:
    """Two ledgers that have not started, whose keys are in ``trusted``."""
    trusted.mkdir()
    with fresh_database(postgres) as one, fresh_database(postgres) as other:
        both = Ledger(REGIONS[0], one, make_settings), Ledger(REGIONS[1], other, make_settings)
        for ledger in both:
            ledger.make_key(trusted)
        yield both


async def submit(client: httpx.AsyncClient, tenant_id: str = "acme", level: str = "GLOBAL") -> dict[str, Any]:
    answer = await client.post(
        "/v1/jobs", json={"tenant_id": tenant_id, "spec": {}, "assigned_dcs": ["x"], "durability": level}
    )
    assert answer.status_code == 201, answer.text
    created: dict[str, Any] = answer.json()
    return created


async def submit_all(client: httpx.AsyncClient, *tenant_ids: str) -> list[dict[str, Any]]:
    """A job of each tenant, in this order."""
    return [await submit(client, tenant_id) for tenant_id in tenant_ids]


async def is_known(client: httpx.AsyncClient, job: dict[str, Any]) -> bool:
    return (await client.get(f"/v1/jobs/{job['job_id']}?tenant_id={job['tenant_id']}")).status_code == 200


async def until_known(client: httpx.AsyncClient, jobs: list[dict[str, Any]]) -> None:
    for job in jobs:
        await until(lambda job=job: is_known(client, job), "it came over")  # type: ignore[misc]


async def is_faultless(client: httpx.AsyncClient) -> bool:
    return [peer["fault"] for peer in (await client.get("/v1/exchange")).json()["peers"]] == [None]


async def told(client: httpx.AsyncClient) -> dict[str, Any]:
    """What a ledger says of its one peer."""
    peer: dict[str, Any]
    [peer] = (await client.get("/v1/exchange")).json()["peers"]
    return peer


async def has_lag(client: httpx.AsyncClient, entries: int) -> bool:
    return (await told(client))["lag_entries"] == entries


async def tells(client: httpx.AsyncClient, *services: str) -> bool:
    """Whether the fault is told, with these words in it, wherever faults are."""
    fault = (await told(client))["fault"]
    if fault is None or not all(part in fault for part in services):
        return False
    return not (await client.get("/readyz")).json()["checks"]["exchange"]["ok"]
