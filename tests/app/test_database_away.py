"""While the database is away, reads and readiness say so at once, and the node says what it knows by itself."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx

from app.dev.embedded import EmbeddedPostgres
from tests.app.chains import until
from tests.app.service_thread import serving
from tests.conftest import connected_to

NAME = "database_away"


async def _admit(superuser_url: str, admitted: bool) -> None:
    async with connected_to(superuser_url) as connection:
        await connection.execute(f"ALTER DATABASE {NAME} WITH ALLOW_CONNECTIONS {admitted}")
        if not admitted:
            await connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1", NAME)


def test_reads_and_readiness_tell_that_the_database_is_away(postgres: EmbeddedPostgres, tmp_path: Path) -> None:
    maintenance_url = postgres.superuser_url("postgres")
    with serving(postgres, tmp_path, NAME) as url, httpx.Client(base_url=url, timeout=30) as client:
        client.post("/v1/jobs", json={"tenant_id": "acme", "job_id": "one"}).raise_for_status()
        asyncio.run(_admit(maintenance_url, False))
        try:
            for path in ("/v1/jobs/one?tenant_id=acme", "/v1/jobs?tenant_id=acme", "/v1/chain/head?tenant_id=acme"):
                answer = client.get(path)
                assert (answer.status_code, answer.json()["type"].rsplit("/", 1)[-1]) == (503, "not-ready")
                assert "retry-after" in answer.headers
            assert 'readyz_check_failing{check="database"} 1.0' in client.get("/metrics").text, "though nobody writes"
            readiness = client.get("/readyz")
            assert readiness.status_code == 503
            assert readiness.json()["checks"]["database"]["ok"] is False
            for_local = client.get("/readyz?exclude=database,chaining,checkpoints")
            assert (for_local.status_code, for_local.json()["checks"]["database"]["ok"]) == (200, False)
            for wrong in ("writer", "accepting", "nothing", "", "database,", "signing", "d" * 201):
                refused = client.get("/readyz", params={"exclude": wrong})
                assert (refused.status_code, refused.json()["path"]) == (422, "exclude"), wrong
            assert client.get("/livez").status_code == 200
            assert client.get("/v1/node").json()["positions"]["durable_lsn"] >= 1
            local = {"tenant_id": "acme", "job_id": "two", "durability": "LOCAL"}
            assert client.post("/v1/jobs", json=local).status_code == 201
        finally:
            asyncio.run(_admit(maintenance_url, True))
        session = client.post("/v1/jobs", json={"tenant_id": "acme", "job_id": "three"}).headers["tally-session"]
        assert 'readyz_check_failing{check="database"} 0.0' in client.get("/metrics").text
        back = client.get("/v1/jobs/two?tenant_id=acme", headers={"Tally-Session": session})
        assert (back.status_code, back.json()["status"]) == (200, "SUBMITTED")


def test_while_the_database_is_away_a_full_backlog_is_a_503_to_try_again_and_what_never_fits_is_a_413(
    postgres: EmbeddedPostgres, tmp_path: Path
) -> None:
    maintenance_url = postgres.superuser_url("postgres")
    ndjson = {"content-type": "application/x-ndjson"}
    line = b'{"tenant_id":"acme","type":"JobCreated"}\n'
    with (
        serving(postgres, tmp_path, NAME, wal={"backlog_max_entries": 20}) as url,
        httpx.Client(base_url=url, timeout=30) as client,
    ):
        client.post("/v1/jobs", json={"tenant_id": "acme", "job_id": "one"}).raise_for_status()
        too_large = client.post("/v1/events?durability=LOCAL", content=line * 21, headers=ndjson)
        assert (too_large.status_code, too_large.json()["type"].rsplit("/", 1)[-1]) == (413, "payload-too-large")
        assert "wal.backlog_max_entries is 20" in too_large.json()["detail"]
        asyncio.run(_admit(maintenance_url, False))
        try:
            full = client.post("/v1/events?durability=LOCAL", content=line * 20, headers=ndjson)
            while full.status_code == 200:
                full = client.post("/v1/events?durability=LOCAL", content=line, headers=ndjson)
            assert client.get("/readyz?exclude=database,chaining,checkpoints").status_code == 503
            assert (full.status_code, full.json()["type"].rsplit("/", 1)[-1]) == (503, "backlog-full")
            assert int(full.headers["retry-after"]) >= 1
        finally:
            asyncio.run(_admit(maintenance_url, True))
        asyncio.run(until(lambda: client.get("/readyz").status_code == 200, "the backlog has room again"))
        assert client.post("/v1/jobs", json={"tenant_id": "acme", "job_id": "two"}).status_code == 201
