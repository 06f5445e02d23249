"""``kill -9`` while log records of OpenTelemetry arrive: sent again, each is on record once, whether it was answered or
not."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import asyncpg
import httpx

from ledger.chain import record as wal_record
from tests.app.chains import Chains, until
from tests.app.otlp_requests import protobuf_of, record, request_of
from tests.app.test_followers import halted
from tests.conftest import Database
from tests.crash.conftest import Launch
from tests.crash.proof import wal_folder
from wal import reader

HOLD = "LOCK TABLE scheduler.scheduler_log IN EXCLUSIVE MODE"
JOBS, ROUNDS = 8, 3


def told(*records: dict[str, Any]) -> bytes:
    return protobuf_of(request_of(*records, service_name="use1", tallystick_tenant_id="acme"))


async def post(client: httpx.AsyncClient, body: bytes) -> None:
    """Send the request; the answer, if it comes, says that all of it is on record."""
    answer = await client.post("/v1/logs", content=body, headers={"Content-Type": "application/x-protobuf"})
    assert (answer.status_code, answer.content) == (200, b"")


async def on_record(superuser: asyncpg.Connection) -> Counter[tuple[str, str]]:
    """How many entries each job has of each action."""
    entries = await Chains(superuser).sound("acme")
    return Counter((entry["job_id"], entry["action"]) for entry in entries)


async def test_records_that_were_durable_when_the_process_died_are_on_record_once(
    tmp_path: Path, database: Database, launch: Launch, superuser: asyncpg.Connection
) -> None:
    # 1. Records are durable, and the process dies before anything is chained or answered.
    progress = record("JobProgressReported", "job-0", completed=1)
    body = told(progress, record("JobFailed", "job-0"), *(record("JobCreated", f"job-{n}") for n in range(1, JOBS)))
    child = await launch(tmp_path / "node", database.service_url)
    async with httpx.AsyncClient(base_url=await child.ready(), timeout=60, trust_env=False) as client:
        await post(client, told(record("JobCreated", "job-0")))

        async def are_durable() -> bool:
            folder = wal_folder(tmp_path / "node")
            durable_lsn = (await client.get("/v1/node")).json()["positions"]["durable_lsn"]
            records = [wal_record.decode(one.payload) for one in reader.read(folder, 1, folder.name, durable_lsn)]
            return sum(one.job_id.startswith("job-") for one in records) == JOBS + 2

        async with halted(database, HOLD):
            posting = asyncio.create_task(post(client, body))
            await until(are_durable, "all records are in the log of the node")
            await child.kill()
            (ended,) = await asyncio.gather(posting, return_exceptions=True)
            assert isinstance(ended, httpx.TransportError), ended
            assert sum((await on_record(superuser)).values()) == 1

    # 2. The next process has chained them, or chains them now: sent again, many times at once, each is there once.
    child = await launch(tmp_path / "node", database.service_url)
    async with httpx.AsyncClient(base_url=await child.ready(), timeout=60, trust_env=False) as client:
        await asyncio.gather(*(post(client, body) for _ in range(4)))
        found = await on_record(superuser)
        assert set(found.values()) == {1}
        assert sorted(found) == sorted(
            [*((f"job-{n}", "ENQUEUE") for n in range(JOBS)), ("job-0", "EXECUTE"), ("job-0", "FAIL")]
        )


async def test_records_that_cannot_be_chained_now_are_to_be_sent_again_and_are_on_record_once(
    tmp_path: Path, database: Database, launch: Launch, superuser: asyncpg.Connection
) -> None:
    child = await launch(tmp_path / "node", database.service_url, write__timeout="500ms")
    async with httpx.AsyncClient(base_url=await child.ready(), timeout=60, trust_env=False) as client:
        body = told(record("JobCreated", "job-1"), record("JobCompleted", "job-1"))
        async with halted(database, HOLD):
            answer = await client.post("/v1/logs", content=body, headers={"Content-Type": "application/x-protobuf"})
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        await post(client, body)
    assert await on_record(superuser) == Counter([("job-1", "ENQUEUE"), ("job-1", "COMPLETE")])


async def test_records_of_an_exporter_that_sends_until_it_is_answered_are_on_record_once_whenever_the_process_dies(
    tmp_path: Path,
    database: Database,
    launch: Launch,
    superuser: asyncpg.Connection,
    seed: int,
    torture_rounds: Callable[[int], int],
) -> None:
    chance, sent = random.Random(seed), 0
    pending: list[bytes] = []
    for _ in range(torture_rounds(ROUNDS)):
        child = await launch(tmp_path / "node", database.service_url)
        async with httpx.AsyncClient(base_url=await child.ready(), timeout=60, trust_env=False) as client:
            asyncio.get_running_loop().call_later(chance.uniform(0.05, 0.5), child.process.kill)
            try:
                while True:
                    if not pending:
                        pending.append(
                            told(
                                *(record("JobCreated", f"job-{sent + n}") for n in range(JOBS)),
                                *(record("JobCompleted", f"job-{sent + n}") for n in range(JOBS)),
                            )
                        )
                        sent += JOBS
                    await post(client, pending[0])
                    pending.pop()
            except httpx.TransportError:
                await child.kill()
    child = await launch(tmp_path / "node", database.service_url)
    async with httpx.AsyncClient(base_url=await child.ready(), timeout=60, trust_env=False) as client:
        for body in pending:
            await post(client, body)
    expected = {(f"job-{n}", action) for n in range(sent) for action in ("ENQUEUE", "COMPLETE")}
    assert await on_record(superuser) == Counter(expected)
