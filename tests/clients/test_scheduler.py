"""The scheduler of the client's README survives what kills schedulers: nothing is lost, nothing is there twice."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from app.dev.embedded import EmbeddedPostgres
from tallystick_client import AsyncClient
from tests.clients.cut import network
from tests.conftest import Database
from tests.crash.conftest import Launch
from tests.crash.proof import verified_by_service
from tests.crash.serve_process import WAIT_S, ServeProcess
from tests.crash.test_kill_postgres import kill_server
from tests.tally import bare_environment

ROOT = Path(__file__).parents[2]
README = ROOT / "clients" / "python" / "README.md"
CLIENT = str(README.parent)
SCRIPTS = 20
FAILING = 7
"""Every seventh script fails."""


def program() -> str:
    """The scheduler as the README has it."""
    found = re.search(r"## A scheduler of 20 lines.*?```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


class Scheduler:
    """The scheduler as a process. Each script says its number, then waits for a word before it ends."""

    def __init__(self, folder: Path, url: str) -> None:
        self.inbox, self.spool, self._url = folder / "inbox", folder / "spool", url
        self._program, said, go = folder / "scheduler.py", folder / "said", folder / "go"
        self._program.write_text(program())
        self.ran: Counter[int] = Counter()
        self.inbox.mkdir()
        for number in range(SCRIPTS):
            code = 3 if number % FAILING == 0 else 0
            (self.inbox / f"job-{number:02}.sh").write_text(f"echo {number} > {said}; read word < {go}; exit {code}")
        # Both ends are held open here, so that nobody waits for anybody to open them.
        self._ends = []
        for fifo in (said, go):
            os.mkfifo(fifo)
            self._ends.append(os.open(fifo, os.O_RDWR | os.O_NONBLOCK))
        self._numbers: asyncio.Queue[int | None] = asyncio.Queue()
        asyncio.get_running_loop().add_reader(self._ends[0], self._read)
        self.process: asyncio.subprocess.Process | None = None
        self._watching: asyncio.Task[None] | None = None
        self._dead = 0
        """Numbers still to be told of scripts that were killed with their scheduler."""
        self._is_dead = False

    async def start(self) -> None:
        command = [sys.executable, str(self._program), self._url, str(self.inbox), str(self.spool)]
        environment = bare_environment() | {"PYTHONPATH": CLIENT}
        self.process = await asyncio.create_subprocess_exec(*command, env=environment, start_new_session=True)
        self._watching = asyncio.create_task(self._watch(self.process))

    async def runs(self) -> int | None:
        """The number of the script that runs now, once one does; None when the scheduler has come to its end."""
        async with asyncio.timeout(WAIT_S):
            number = await self._numbers.get()
        self._is_dead, self._dead = self._dead > 0, max(0, self._dead - 1)
        return number

    def let_it_end(self) -> None:
        """A word to the script that ``runs`` told of, unless it was killed: the next one would take it for its own."""
        if not self._is_dead:
            os.write(self._ends[1], b"go\n")

    async def kill(self, after_s: float = 0.0) -> None:
        """SIGKILL to the scheduler and to what it runs, and another one in its place."""
        assert self.process is not None
        assert self._watching is not None
        await asyncio.wait([self._watching], timeout=after_s)
        if self.process.returncode is None:
            self._watching.cancel()
            os.killpg(self.process.pid, signal.SIGKILL)
            await self.process.wait()
            with suppress(BlockingIOError):
                os.read(self._ends[1], 4096)  # the word that nobody heard
            with suppress(BlockingIOError):
                self._read()
            self._dead = self._numbers.qsize()
            await self.start()

    def close(self) -> None:
        if self.process is not None and self.process.returncode is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        asyncio.get_running_loop().remove_reader(self._ends[0])
        for end in self._ends:
            os.close(end)

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        await process.wait()
        self._numbers.put_nowait(None)

    def _read(self) -> None:
        for word in os.read(self._ends[0], 4096).split():
            self.ran[int(word)] += 1
            self._numbers.put_nowait(int(word))


@asynccontextmanager
async def scheduling(folder: Path, url: str) -> AsyncIterator[Scheduler]:
    scheduler = Scheduler(folder, url)
    try:
        yield scheduler
    finally:
        scheduler.close()


def test_the_scheduler_has_20_lines() -> None:
    lines = [line for line in program().splitlines() if line.strip()]
    assert len(lines) <= 20


async def test_a_scheduler_of_20_lines_survives_what_kills_schedulers(
    tmp_path: Path,
    mortal_postgres: EmbeddedPostgres,
    mortal_database: Database,
    launch: Launch,
    seed: int,
) -> None:
    draw = random.Random(seed)
    killed_within, killed_about = {1, 4, 9, 15}, {3, 10, 18}

    async def serve() -> ServeProcess:
        service = await launch(tmp_path / "node", mortal_database.service_url, write__timeout="1s")
        await way.lead_to(await service.ready())
        return service

    async with network() as way, scheduling(tmp_path, way.url) as scheduler:
        service = await serve()
        await scheduler.start()
        while (number := await scheduler.runs()) is not None:
            if scheduler.ran[number] == 1:
                match number:
                    case 2:
                        await service.kill()
                    case 5:
                        service = await serve()
                    case 8:
                        kill_server(mortal_postgres)
                    case 11:
                        await asyncio.to_thread(mortal_postgres.ensure_alive)
                    case 14:
                        await way.cut()
                    case 17:
                        await way.lead_to(await service.ready())
                if number in killed_within:
                    await scheduler.kill()
                    continue
            scheduler.let_it_end()
            if number in killed_about and scheduler.ran[number] == 1:
                # At any moment of recording its end, or of beginning the next.
                await scheduler.kill(after_s=draw.uniform(0.0, 0.1))
        assert scheduler.process is not None
        assert scheduler.process.returncode == 0
        assert list(scheduler.inbox.iterdir()) == []
        assert [path.name for path in scheduler.spool.iterdir()] == [".lock"]

    url = await service.ready()
    async with AsyncClient(url) as ledger:
        jobs = [job["job_id"] async for job in ledger.list_jobs("nightly")]
        found = {job: [event["action"] async for event in ledger.list_events("nightly", job)] for job in jobs}
    ends = ["COMPLETE" if number % FAILING else "FAIL" for number in range(SCRIPTS)]
    assert found == {f"job-{number:02}": ["ENQUEUE", "DEQUEUE", end] for number, end in enumerate(ends)}
    # Nobody runs again but whom a kill cut short, or took the next moment from.
    again = {number for number in range(SCRIPTS) if scheduler.ran[number] != 1}
    assert again <= killed_within | killed_about | {number + 1 for number in killed_about}
    assert killed_within <= again
    await verified_by_service(url, {"nightly"})
    assert await service.terminate() == 0
