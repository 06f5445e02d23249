"""``kill -9`` of a node while Spark makes a report: Spark ends by itself, and the next start leaves no file."""

from __future__ import annotations

from pathlib import Path

import asyncpg
import httpx

from tests.app.chains import until
from tests.app.test_followers import halted
from tests.app.test_spark_reports import fill, processes_in, start
from tests.conftest import Database
from tests.crash.conftest import Launch

HOLD = "LOCK TABLE scheduler.scheduler_log IN ACCESS EXCLUSIVE MODE"


async def test_spark_ends_with_its_node_and_the_next_start_removes_its_files(
    tmp_path: Path, database: Database, launch: Launch, superuser: asyncpg.Connection
) -> None:
    node = tmp_path / "node"
    folder = node / "spark-report"
    child = await launch(node, database.service_url)
    async with httpx.AsyncClient(base_url=await child.ready(), timeout=60, trust_env=False) as client:
        await fill(client, superuser)
        place = await start(client)

        async def progress() -> str | None:
            told: str | None = (await client.get(place)).json()["progress"]
            return told

        await until(progress, "Spark starts")
        async with halted(database, HOLD):

            async def is_started() -> bool:
                return await progress() != "Spark starts"

            await until(is_started, "Spark waits for the database", timeout_s=120)
            assert processes_in(folder)
            await child.kill()

            async def is_gone() -> bool:
                return not processes_in(folder)

            await until(is_gone, "Spark has ended", timeout_s=60)
    child = await launch(node, database.service_url)
    await child.ready()

    async def is_removed() -> bool:
        return not folder.exists()

    await until(is_removed, "its files are removed")
