"""Stats while their node is killed or their disk is full: whole lines, and nothing that a job would notice."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp

from tests.app.chains import until
from tests.conftest import Database
from tests.crash.conftest import Launch
from tests.crash.load import Book, http_session
from tests.crash.proof import prove, verified_by_service, wal_folder
from tests.crash.serve_process import WAIT_S
from tests.crash.writer import writer
from tests.wal.logs import traced

NDJSON = {"content-type": "application/x-ndjson"}
LINES = 200


async def report(session: aiohttp.ClientSession, url: str, first: int) -> int:
    """Report numbers from ``first`` on; how many were accepted."""
    lines = [
        f'{{"tenant_id":"acme","job_id":"job-1","dc_id":"use1","completed":{number}}}'
        for number in range(first, first + LINES)
    ]
    async with session.post(f"{url}/v1/stats", data="\n".join(lines).encode(), headers=NDJSON) as answer:
        assert answer.status == 202
        accepted: int = (await answer.json())["accepted"]
    return accepted


def reports_in(data_dir: Path) -> list[dict[str, Any]]:
    """What stands in closed files; every line there is whole."""
    closed = data_dir.glob("stats/*/[0-9]*.ndjson")
    return [json.loads(line) for path in closed for line in path.read_bytes().split(b"\n")[:-1]]


def open_files(data_dir: Path) -> list[Path]:
    return list(data_dir.glob("stats/*/.*.ndjson.part"))


async def metrics_of(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    async with session.get(f"{url}/metrics") as answer:
        lines = [line for line in (await answer.text()).splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


async def test_a_kill_leaves_whole_lines_and_the_next_start_shows_them(
    tmp_path: Path, database: Database, launch: Launch
) -> None:
    data_dir = tmp_path / "node"
    child = await launch(data_dir, database.service_url, stats__file_age="1h")
    url = await child.ready()
    async with http_session() as session:
        # So few that none is sampled, whatever else this machine does.
        sent = await report(session, url, 0)
        await until(lambda: any(path.stat().st_size > 10_000 for path in open_files(data_dir)), "they are written")
        await child.kill()
    assert reports_in(data_dir) == []
    (left,) = open_files(data_dir)
    left.write_bytes(left.read_bytes() + b'{"tenant_id":"ac')

    child = await launch(data_dir, database.service_url, stats__file_age="1h")
    await child.ready()
    await until(lambda: not open_files(data_dir), "what was left open is closed")
    numbers = [each["completed"] for each in reports_in(data_dir)]
    assert numbers == list(range(len(numbers)))
    assert 0 < len(numbers) <= sent
    assert await child.terminate() == 0


async def test_a_full_disk_costs_stats_only_is_said_once_and_is_over_when_there_is_room(
    tmp_path: Path, database: Database, launch: Launch, strace: str
) -> None:
    data_dir, book = tmp_path / "node", Book()
    tracer = traced(strace, "/dev/null", "trace=pwrite64", "inject=pwrite64:error=ENOSPC:when=2..6")
    child = await launch(data_dir, database.service_url, tracer=tracer, stats__file_age="100ms")
    url = await child.ready()
    async with http_session() as session, writer(url, book) as one:
        first = sent = 0
        async with asyncio.timeout(WAIT_S):
            while not child.events("stats_written_again"):
                sent += await report(session, url, first)
                first += LINES
                await one.created("GLOBAL")
                assert (await one.readiness())[0] == 200
        counted = await metrics_of(session, url)
    assert await child.terminate() == 0
    assert len(child.events("stats_not_written")) == 1
    assert "No space left" in child.events("stats_not_written")[0]["error"]
    lost = counted['stats_dropped_total{reason="disk"}']
    assert lost > 0
    numbers = [each["completed"] for each in reports_in(data_dir)]
    assert len(numbers) == len(set(numbers)) == sent - lost

    child = await launch(data_dir, database.service_url)
    await verified_by_service(await child.ready(), book.tenants())
    assert await child.terminate() == 0
    await prove(book, database.superuser_url, [wal_folder(data_dir)])
