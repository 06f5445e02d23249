"""A writer that slept past its lease, while another process won its log: it acknowledges nothing more."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack
from pathlib import Path

from tests.app.postgres_proxy import proxy_to
from tests.conftest import Database
from tests.crash.conftest import Launch
from tests.crash.load import Book
from tests.crash.quorum.links import Link
from tests.crash.writer import Writer, writer
from tests.wal.replication.keepers import KeeperProcess

SETTINGS = {
    "node_id": "node-a",
    "wal__ack_mode": "REPLICATED_QUORUM",
    "lease__ttl": "2s",
    "write__timeout": "5s",
    "verify__on_start": "false",
}
EARLY = 8
"""Requests that reach the writer while it sleeps."""


async def answer_of(writing: Writer) -> tuple[int, str | None, object]:
    """The status of a write at LOCAL, its problem, and the level that it claims all the same."""
    sent = await writing.create("LOCAL", named=False)
    return sent.answered.status, sent.problem, sent.answered.told.get("achieved")


async def test_a_writer_that_wakes_after_another_won_answers_no_local_even_if_it_reaches_nobody(
    tmp_path: Path, database: Database, launch: Launch
) -> None:
    async with AsyncExitStack() as stack:
        keeper = await asyncio.to_thread(KeeperProcess, tmp_path / "keeper")
        stack.callback(keeper.close)
        link = Link(keeper.port)
        await link.open()
        stack.push_async_callback(link.close)
        proxy = await stack.enter_async_context(proxy_to(database.service_url))
        members = {"replication__members": f"127.0.0.1:{link.port}"}
        first = await launch(tmp_path / "first", proxy.url, **SETTINGS | members)
        slept = await stack.enter_async_context(writer(await first.ready(), Book()))
        await slept.created("GLOBAL")
        await slept.created("LOCAL")

        first.signal(signal.SIGSTOP)
        early = [asyncio.create_task(answer_of(slept)) for _ in range(EARLY)]
        members = {"replication__members": f"127.0.0.1:{keeper.port}"}
        second = await launch(tmp_path / "second", database.service_url, **SETTINGS | members)
        other = await stack.enter_async_context(writer(await second.ready(), Book()))
        await other.created("GLOBAL")

        # Nobody can say to the first that it lost: only the time it slept does.
        link.stall()
        await proxy.refuse()
        first.signal(signal.SIGCONT)
        found = await asyncio.gather(*early, *(answer_of(slept) for _ in range(EARLY)))
        assert set(found) == {(503, "durability-timeout", "NONE")}
        await other.created("LOCAL")

        link.heal()
        await proxy.accept()
        assert await first.ended() == 1
        assert first.events("node_failed")[0]["kind"] == "FencedError"
