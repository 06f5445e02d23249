"""A tenant that floods, seen by another one, in processes as they run in production."""

from __future__ import annotations

import asyncio
import json
import time

import httpx
import pytest

from benchmarks.flood import flooding, write
from tests.app.chains import until
from tests.conftest import Database
from tests.crash.conftest import Launch

WARM_UP_S, WINDOW_S = 0.1, 0.5
LINE = json.dumps({"tenant_id": "flood", "type": "JobCreated"}).encode() + b"\n"
NDJSON = {"Content-Type": "application/x-ndjson"}


@pytest.mark.timeout(300)
async def test_a_flood_that_has_a_quota_is_refused_and_another_tenant_keeps_its_latency(
    database: Database, launch: Launch, tmp_path
) -> None:
    settings = {"quota__tenant_requests": 2000, "quota__burst": "1s"}
    process = await launch(tmp_path / "node", database.service_url, **settings)
    url = await process.ready()
    alone = await asyncio.to_thread(write, url, WARM_UP_S, WINDOW_S)
    began_s = time.monotonic()
    with flooding(url) as answers:
        async with httpx.AsyncClient(base_url=url, headers=NDJSON, timeout=60, trust_env=False) as client:

            async def floods() -> bool:
                return (await client.get("/v1/chain/head?tenant_id=flood")).status_code == 200

            await until(floods, "the flood is under way")
            # Every write of the other tenant is answered 201, or this fails.
            beside = await asyncio.to_thread(write, url, WARM_UP_S, WINDOW_S)

            async def refused() -> str | None:
                answer = await client.post("/v1/events?durability=LOCAL", content=LINE * 1000)
                return answer.headers["Retry-After"] if answer.status_code == 429 else None

            assert int(await until(refused, "the tenant has had its share")) >= 1
    assert set(answers) == {200, 429}
    assert answers[200] * 1000 <= 2000 * (1 + time.monotonic() - began_s), "no more is taken than the quota gives"
    assert beside.p99_ms <= 20 * alone.p99_ms + 500
