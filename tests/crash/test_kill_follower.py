"""``kill -9`` between a commit and its follower: the next process reads right at once, and its job table catches up."""

from __future__ import annotations

from pathlib import Path

import asyncpg
import httpx

from tests.app.chains import until
from tests.app.test_followers import followed, halted, places
from tests.conftest import Database
from tests.crash.conftest import Launch


async def test_what_was_chained_and_not_followed_is_read_and_followed_by_the_next_process(
    tmp_path: Path, database: Database, launch: Launch, superuser: asyncpg.Connection
) -> None:
    job = {"tenant_id": "acme", "job_id": "job", "durability": "GLOBAL"}
    end = {"tenant_id": "acme", "type": "JobCompleted", "final_status": "ok", "durability": "GLOBAL"}
    child = await launch(tmp_path / "node", database.service_url)
    async with halted(database):
        async with httpx.AsyncClient(base_url=await child.ready(), timeout=30, trust_env=False) as client:
            assert (await client.post("/v1/jobs", json=job)).status_code == 201
            assert (await client.post("/v1/jobs/job/events", json=end)).status_code == 201
        await child.kill()
        assert (await places(superuser))["acme"] == (0, 2)
        child = await launch(tmp_path / "node", database.service_url)
        async with httpx.AsyncClient(base_url=await child.ready(), timeout=30, trust_env=False) as client:
            read = await client.get("/v1/jobs/job", params={"tenant_id": "acme"})
            assert read.json()["status"] == "COMPLETED"
            assert (await client.post("/v1/jobs/job/events", json=end)).status_code == 409
    await until(lambda: followed(superuser), "the table has caught up")
    async with httpx.AsyncClient(base_url=await child.ready(), timeout=30, trust_env=False) as client:
        listed = await client.get("/v1/jobs", params={"tenant_id": "acme", "status": "COMPLETED"})
        assert [each["job_id"] for each in listed.json()["items"]] == ["job"]
