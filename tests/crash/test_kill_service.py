"""``kill -9`` at random moments under load, round after round on the same data: nothing promised is lost."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import aiohttp
import asyncpg
import pytest

from app.write.followers.checkpoints import CheckpointJournal
from tests.app.starting import forget_checkpoint
from tests.conftest import Database
from tests.crash import operations
from tests.crash.conftest import Launch
from tests.crash.linearizability import violations
from tests.crash.load import Book, Load, Sent, http_session
from tests.crash.operations import Recorder
from tests.crash.proof import prove, verified_by_service, wal_folder
from tests.crash.serve_process import WAIT_S, ServeProcess
from tests.crash.writer import new_job, writer
from tests.wal.logs import traced
from wal import reader

SETTINGS = {
    "chain__batch_size": 50,
    "chain__batch_interval": "300ms",
    "chain__checkpoint_interval": "20ms",
    "hlc__persistence_interval": "100ms",
    "wal__batch_max_entries": 8,
    "wal__segment_bytes": 1 << 16,
    "wal__batch_max_bytes": 1 << 15,
    "wal__record_bytes_max": 1 << 15,
}
"""So small that a second of load meets segment ends, torn requests, snapshots and control files."""

ROUNDS = 3
KEYED_REPEATED = 5
"""Answered keyed requests that each round sends again."""
START_S = 1.2
"""About as long as a start takes."""
ANSWERS_MAX = 400
"""A process that has not died by then is killed."""
WRITE = "pwritev,pwritev2"
CALLS = ("fdatasync", WRITE, "fsync", "rename", "write,writev,sendto,sendmsg", "ftruncate,unlink")


def injected(strace: str, call: str, fault: str) -> list[str]:
    """strace of a process whose system calls ``call`` meet ``fault``; each thread counts for itself."""
    return traced(strace, os.devnull, f"trace={call}", f"inject={call}:{fault}")


class Death:
    """How a process dies: after so many answers, so long after its launch, or at the n-th of some system call.

    A log that is written late leaves time for an answer that should have waited for it.
    """

    def __init__(self, draw: random.Random, strace: str) -> None:
        self.answers = ANSWERS_MAX
        self.after_s = 0.0
        self.tracer: list[str] = []
        kind = draw.random()
        if kind < 0.65:
            self.answers = int(draw.choice((3, 30, 100, ANSWERS_MAX)) * draw.random())
            if kind < 0.3:
                self.tracer = injected(strace, WRITE, "delay_enter=10000")
        elif kind < 0.8:
            self.after_s = draw.uniform(0.5, 1.5) * START_S
        else:
            call, number = draw.choice(CALLS), int(draw.choice((2, 20, 200)) * draw.random()) + 1
            self.tracer = injected(strace, call, f"signal=KILL:when={number}")

    def set_timer(self, child: ServeProcess) -> None:
        """The moment counts from the launch on."""
        if self.after_s:
            asyncio.get_running_loop().call_later(self.after_s, child.signal, signal.SIGKILL)

    async def come(self, child: ServeProcess, load: Load) -> None:
        """Wait until the process is dead, killing it after so many answers at the latest."""
        enough = asyncio.ensure_future(load.book.more_acknowledged(self.answers))
        dead = asyncio.ensure_future(child.ended(2 * WAIT_S))
        await asyncio.wait((enough, dead), return_when=asyncio.FIRST_COMPLETED, timeout=WAIT_S)
        enough.cancel()
        child.signal(signal.SIGKILL)
        await dead


@pytest.mark.torture
@pytest.mark.timeout(0)
async def test_kill_at_any_moment_loses_nothing_acknowledged_and_repeats_nothing(
    tmp_path: Path, database: Database, launch: Launch, strace: str, seed: int, torture_rounds: Callable[[int], int]
) -> None:
    draw = random.Random(seed)
    recorder = Recorder(tmp_path / "operations.jsonl")
    load = Load(draw, recorder=recorder)
    data_dir = tmp_path / "node"
    for number in range(torture_rounds(ROUNDS)):
        load.tenants[-1] = f"round-{number}"
        death = Death(draw, strace)
        child = await launch(data_dir, database.service_url, tracer=death.tracer, **SETTINGS)
        death.set_timer(child)
        url = await child.ready_or_ended()
        if url is not None:
            async with load.on(url):
                repeating = asyncio.ensure_future(load.repeat_keyed(url, KEYED_REPEATED))
                await death.come(child, load)
                await asyncio.gather(repeating, return_exceptions=True)
                _unless_connection_lost(repeating)
        assert child.returncode == -signal.SIGKILL, child.last_words()
    child = await launch(data_dir, database.service_url, **SETTINGS)
    url = await child.ready()
    await load.repeat_keyed(url)
    await verified_by_service(url, load.book.tenants())
    assert await child.terminate() == 0

    await prove(load.book, database.superuser_url, [wal_folder(data_dir)])
    recorder.close()
    recorded = operations.load(recorder.path)
    assert any(each.output and each.output["replayed"] for each in recorded)
    assert not violations(recorded), recorder.path


def _unless_connection_lost(repeating: asyncio.Future[None]) -> None:
    error = repeating.exception()
    if error is not None and not isinstance(error, aiohttp.ClientError):
        raise error


async def test_a_keyed_request_that_a_kill_tore_is_completed_when_it_is_repeated(
    tmp_path: Path, database: Database, launch: Launch, strace: str, superuser: asyncpg.Connection
) -> None:
    data_dir, book = tmp_path / "node", Book()
    # 1. A request of 100 lines goes into batches of 8; the process dies with one of the first.
    child = await launch(
        data_dir, database.service_url, tracer=injected(strace, "fdatasync", "signal=KILL:when=4"), **SETTINGS
    )
    url = await child.ready()
    torn = Sent.batch([new_job(book) for _ in range(100)], "GLOBAL", "torn")
    book.sent.append(torn)
    async with http_session() as session:
        with pytest.raises(aiohttp.ClientError):
            await torn.send(session, url)
    assert await child.ended() == -signal.SIGKILL
    # 2. It is repeated before the lines that survived can be chained.
    await superuser.execute("BEGIN; LOCK scheduler.chain_heads IN EXCLUSIVE MODE")
    child = await launch(data_dir, database.service_url, **SETTINGS)
    url = await child.ready()
    assert 8 < len(wal_records(data_dir)) < 100
    async with writer(url, book) as one:
        repeating = asyncio.ensure_future(torn.send(one.session, url))
        await one.heard()
        await superuser.execute("ROLLBACK")
        answer = await repeating
        book.note(torn, answer)
        assert (await torn.send(one.session, url)).same() == answer.same()
    assert await child.terminate() == 0

    assert answer.told["accepted"] == 100
    await prove(book, database.superuser_url, [wal_folder(data_dir)])


async def test_a_kill_between_the_record_of_a_new_tenant_and_its_first_event_leaves_one_beginning(
    tmp_path: Path, database: Database, launch: Launch, strace: str, superuser: asyncpg.Connection
) -> None:
    data_dir, book = tmp_path / "node", Book()
    # 1. Each record is a batch; the process dies with the second, before the third, the event itself, is written.
    dying = injected(strace, "fdatasync", "signal=KILL:when=2")
    child = await launch(data_dir, database.service_url, tracer=dying, wal__ack_mode="LOCAL_SYNC")
    async with writer(await child.ready(), book) as one:
        await one.until("chained_lsn", 1)
        with pytest.raises(aiohttp.ClientError):
            await one.create("LOCAL")
    assert await child.ended() == -signal.SIGKILL
    # 2. The tenant is written to before its beginning can be chained.
    await superuser.execute("BEGIN; LOCK scheduler.chain_heads IN EXCLUSIVE MODE")
    child = await launch(data_dir, database.service_url)
    url = await child.ready()
    assert len(wal_records(data_dir)) == 2
    async with writer(url, book) as one:
        await one.created("LOCAL")
    await superuser.execute("ROLLBACK")
    assert await child.terminate() == 0

    await prove(book, database.superuser_url, [wal_folder(data_dir)])


async def test_a_checkpoint_that_a_kill_kept_from_the_wal_folder_is_there_after_the_next_start(
    tmp_path: Path, database: Database, launch: Launch
) -> None:
    data_dir, book = tmp_path / "node", Book()
    child = await launch(data_dir, database.service_url, **SETTINGS)
    url = await child.ready()
    async with writer(url, book) as one:
        await one.created("GLOBAL")
    await verified_by_service(url, book.tenants())
    assert await child.terminate() == 0
    # As if it had died between storing the checkpoint in Postgres and keeping it.
    kept = forget_checkpoint(wal_folder(data_dir), "acme")
    child = await launch(data_dir, database.service_url, **SETTINGS)
    await verified_by_service(await child.ready(), book.tenants())
    assert CheckpointJournal(wal_folder(data_dir)).load("acme") == kept
    await child.terminate()


def wal_records(data_dir: Path) -> list[reader.Record]:
    """What stands in the WAL."""
    folder = wal_folder(data_dir)
    return list(reader.read(folder, 1, folder.name))
