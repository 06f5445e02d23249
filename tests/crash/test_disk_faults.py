"""A disk that fails or fills up under a running service: nothing acknowledged after it, an end with a reason."""

from __future__ import annotations

import base64
import os
import random
import re
from pathlib import Path

import pytest

from app.runtime.state.session import MAC_BYTES
from tests.conftest import Database
from tests.crash import limited
from tests.crash.conftest import Launch
from tests.crash.load import Book, Load
from tests.crash.proof import prove, verified_by_service, wal_folder
from tests.crash.writer import writer
from tests.wal.logs import traced
from wal.format import BATCH_RECORD_BYTES, SEGMENT_HEADER_BYTES, decode_batch
from wal.segment import list_segments

SETTINGS = {"wal__batch_max_entries": 8, "shutdown_grace": "6s"}
WRITE = "pwritev,pwritev2"


def synced_lsn(folder: Path, batches: int) -> int:
    """Last LSN of the first ``batches`` batches of the only segment."""
    (segment,) = list_segments(folder)
    data = segment.path.read_bytes()
    offset, lsn = SEGMENT_HEADER_BYTES, 0
    for _ in range(batches):
        batch = decode_batch(data, offset, len(data))
        offset += BATCH_RECORD_BYTES + batch.body_bytes
        lsn = batch.last_lsn
    return lsn


def acknowledged_lsn(book: Book) -> int:
    """Highest LSN that an answer has acknowledged."""
    sessions = [sent.answered.session for sent in book.sent if sent.is_acknowledged]
    return max(lsn_of(session) for session in sessions if session)


def lsn_of(session: str) -> int:
    """The LSN that a session token names: ``t2 {node_id} {epoch} {lsn} {hlc}``, then its MAC."""
    plain = base64.urlsafe_b64decode(session + "=" * (-len(session) % 4))[:-MAC_BYTES]
    return int(plain.split()[3])


@pytest.mark.parametrize(
    ("call", "error", "number"),
    [("fdatasync", "EIO", 40), (WRITE, "ENOSPC", 30)],
)
async def test_nothing_is_acknowledged_after_the_disk_failed_and_a_restart_recovers_the_rest(
    tmp_path: Path, database: Database, launch: Launch, strace: str, seed: int, call: str, error: str, number: int
) -> None:
    load, data_dir, trace = Load(random.Random(seed)), tmp_path / "node", tmp_path / "trace"
    # Every call from that one of a thread on fails.
    tracer = traced(strace, trace, f"trace=fdatasync,{WRITE}", f"inject={call}:error={error}:when={number}+")
    child = await launch(data_dir, database.service_url, tracer=tracer, **SETTINGS)
    url = await child.ready()
    async with writer(url, load.book) as one:
        await one.created("LOCAL")
    async with load.on(url):
        failure = await child.says("wal_sync_failure")
        assert await child.ended() == 1
    assert f"Errno {5 if error == 'EIO' else 28}" in failure["error"]
    assert "Traceback" not in child.last_words()
    # Each batch is synced once, so the fsyncs that the kernel has answered well say how far the log is durable.
    lines = trace.read_text().splitlines()
    thread = next(line.split()[0] for line in lines if "(INJECTED)" in line)
    synced = sum(1 for line in lines if re.match(rf"{thread} .*fdatasync.*= 0$", line))
    assert synced == number - 1
    assert 0 < acknowledged_lsn(load.book) <= synced_lsn(wal_folder(data_dir), synced)

    await recovers(load, data_dir, database, launch)


async def test_a_disk_that_fills_up_in_a_batch_ends_the_service_and_one_that_fails_refuses_the_start_with_the_reason(
    tmp_path: Path, database: Database, launch: Launch, strace: str, seed: int
) -> None:
    # A file size limit stands for the full disk: a write falls short, and the rest of it fails.
    load, data_dir = Load(random.Random(seed)), tmp_path / "node"
    program = (limited.PROGRAM, "FSIZE", str(100 << 10))
    child = await launch(data_dir, database.service_url, program=program, **SETTINGS)
    async with load.on(await child.ready()):
        failure = await child.says("wal_sync_failure")
        assert await child.ended() == 1
    assert "File too large" in failure["error"]

    for number in (1, 4):
        calls = "fsync,fdatasync"
        tracer = traced(strace, os.devnull, f"trace={calls}", f"inject={calls}:error=EIO:when={number}")
        child = await launch(data_dir, database.service_url, tracer=tracer, **SETTINGS)
        assert await child.ended() == 1
        assert re.match(r"error: .*Errno 5", child.lines[-1]), child.last_words()

    await recovers(load, data_dir, database, launch)


async def recovers(load: Load, data_dir: Path, database: Database, launch: Launch) -> None:
    """The next start has all that was acknowledged, and goes on."""
    child = await launch(data_dir, database.service_url, **SETTINGS)
    url = await child.ready()
    async with load.on(url):
        await load.book.more_acknowledged(50)
    await load.repeat_keyed(url)
    await verified_by_service(url, load.book.tenants())
    assert await child.terminate() == 0
    await prove(load.book, database.superuser_url, [wal_folder(data_dir)])
