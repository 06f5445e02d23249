"""SIGTERM to a node while what it waits for does not answer, safekeepers, PostgreSQL or disk: it ends in time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.app.chains import until
from tests.app.postgres_proxy import PostgresProxy, proxy_to
from tests.conftest import Database
from tests.crash.conftest import Launch
from tests.crash.load import Book
from tests.crash.proof import key_recorded
from tests.crash.quorum.links import Link
from tests.crash.serve_process import ServeProcess
from tests.crash.writer import writer
from tests.wal.replication.keepers import KeeperProcess

SETTINGS = {
    "node_id": "node-a",
    "wal__ack_mode": "REPLICATED_QUORUM",
    "lease__ttl": "10s",
    "shutdown_grace": "3s",
    "verify__on_start": "false",
}
AT_ONCE_S = 20.0
"""What a stop takes at the most that waits for nobody, on a busy machine: less than ``SLOW``."""
SLOW = {"replication__timeout": "2m"}
"""An election that waits for members longer than a stop may take."""
GRACE_S = 15.0
"""The budget of ``SETTINGS``, and what a busy machine adds to it."""
FETCHED_BYTES = 1_000_000
NDJSON = {"Content-Type": "application/x-ndjson"}
LINE = json.dumps({"tenant_id": "acme", "type": "JobCreated", "spec": {"image": "x" * 3000}})


class Quorum:
    """Three safekeepers, each over a link, PostgreSQL over a proxy, and nodes on disks of theirs."""

    def __init__(self, folder: Path, links: list[Link], proxy: PostgresProxy, launch: Launch) -> None:
        self.folder, self.links, self.proxy = folder, links, proxy
        self._launch = launch

    async def node(self, disk: str, **settings: object) -> ServeProcess:
        members = ",".join(f"127.0.0.1:{link.port}" for link in self.links)
        how = SETTINGS | {"replication__members": members} | settings
        return await self._launch(self.folder / disk, self.proxy.url, **how)


@pytest.fixture
async def quorum(tmp_path: Path, database: Database, launch: Launch) -> AsyncIterator[Quorum]:
    async with AsyncExitStack() as stack:
        links = []
        for number in range(3):
            keeper = await asyncio.to_thread(KeeperProcess, tmp_path / f"keeper-{number}")
            stack.callback(keeper.close)
            links.append(Link(keeper.port))
            await links[-1].open()
            stack.push_async_callback(links[-1].close)
        proxy = await stack.enter_async_context(proxy_to(database.service_url))
        yield Quorum(tmp_path, links, proxy, launch)


async def test_a_node_can_be_stopped_whatever_its_start_waits_for_and_without_quorum_and_postgres(
    quorum: Quorum,
) -> None:
    # 1. A standby that waits for the lease, while PostgreSQL hangs.
    child = await quorum.node("disk")
    url = await child.ready()
    async with writer(url, Book()) as one:
        lines = "\n".join([LINE] * 1000)
        async with one.session.post(f"{url}/v1/events?durability=GLOBAL", data=lines, headers=NDJSON) as answer:
            assert answer.status == 200, await answer.text()
    standby = await quorum.node("standby")
    await standby.says("wal_lease_waiting")
    quorum.proxy.stall()
    assert await standby.terminate(AT_ONCE_S) == 0
    quorum.proxy.resume()
    assert await child.terminate(AT_ONCE_S) == 0

    # 2. A start that waits for members.
    await until(lambda: not any(link.is_in_use for link in quorum.links), "nobody speaks to the members")
    for link in quorum.links[1:]:
        link.stall()
    child = await quorum.node("disk", **SLOW)
    await until(lambda: all(link.is_in_use for link in quorum.links), "it asks the members")
    assert await child.terminate(AT_ONCE_S) == 0
    assert child.events("stopped_while_starting")
    for link in quorum.links:
        link.heal()

    # 3. A start that waits for the rest of the log, which the next one has.
    for link in quorum.links:
        link.stall_behind(FETCHED_BYTES)
    child = await quorum.node("another", **SLOW)
    await until(lambda: any(link.is_stalled for link in quorum.links), "part of the log came")
    assert await child.terminate(AT_ONCE_S) == 0
    assert child.events("stopped_while_starting")
    for link in quorum.links:
        link.heal()
    child = await quorum.node("another")

    # 4. A node at work: it tells who waits, and ends in time.
    async with writer(await child.ready(), Book()) as one:
        await key_recorded(one.session, one.url)
        for link in quorum.links[1:]:
            link.stall()
        quorum.proxy.stall()
        queued_lsn = (await one.positions())["written_lsn"] + 2
        waiting = [asyncio.ensure_future(one.create(level, named=False)) for level in ("REGIONAL", "GLOBAL")]
        await one.until("written_lsn", queued_lsn)
        await one.created("LOCAL")
        assert await child.terminate(GRACE_S) == 0
        assert [(await each).problem for each in waiting] == ["durability-timeout"] * 2


async def test_a_stop_that_a_hanging_disk_holds_up_says_so_and_ends(
    tmp_path: Path, database: Database, launch: Launch, strace: str
) -> None:
    child = await launch(tmp_path / "node", database.service_url, shutdown_grace="1s", verify__on_start="false")
    await child.ready()
    trace = tmp_path / "trace"
    hang = ("-e", "trace=fsync,fdatasync,exit_group", "-e", "inject=fsync,fdatasync:delay_enter=60s")
    tracing = await asyncio.create_subprocess_exec(
        *(strace, "-f", "-o", str(trace), *hang, "-p", str(child.pid)), stderr=asyncio.subprocess.PIPE
    )
    try:
        assert tracing.stderr is not None
        assert b"attached" in await tracing.stderr.readline()
        child.signal(signal.SIGTERM)
        overdue = await child.says("stop_overdue", GRACE_S)
        # Before the disk answers again, upon which it would end well after all.
        await until(lambda: "exit_group(1" in trace.read_text(), "it ends by itself", AT_ONCE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            tracing.kill()
        await tracing.wait()
    assert await child.ended(AT_ONCE_S) == 1
    assert any("fsync" in line for stand in overdue["threads"].values() for line in stand)
