"""A stop: the control file stored last says what the node has reached, and what comes too late is no failure."""

from __future__ import annotations

import asyncio
import threading
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest
import structlog

from ledger.errors import LedgerError, WalPoisonedError
from ledger.facts.events import SystemAction
from ledger.positions import Lsn
from tests.app.chains import UNTIL_S, until
from tests.app.conftest import MakeSettings, RunNode, RunServer
from tests.app.starting import wal_folder, write
from wal import control as wal_control
from wal.control import Control
from wal.segment import UNNAMED_SUFFIX


async def test_a_stop_waits_for_a_control_file_that_is_being_stored(
    run_node: RunNode, make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make_settings(hlc={"persistence_interval": "100ms"})
    store, stored, under_way = wal_control.store, threading.Event(), list[int]()
    at_once: list[int] = []

    def store_slowly(folder: Path, control: Control) -> None:
        under_way.append(control.chained_lsn)
        at_once.append(len(under_way))
        try:
            stored.wait(UNTIL_S)
            store(folder, control)
        finally:
            under_way.remove(control.chained_lsn)

    async with AsyncExitStack() as stack:
        service = await stack.enter_async_context(run_node(settings))
        monkeypatch.setattr(wal_control, "store", store_slowly)
        await until(lambda: under_way, "the control file is being stored")
        await write(service, 1)
        stopping = asyncio.create_task(stack.aclose())
        await until(lambda: service._pool._closed, "all is closed but the control file")
        stored.set()
        await stopping
    assert at_once == [1, 1]
    known = wal_control.load(wal_folder(settings))
    assert known is not None
    assert known.chained_lsn == known.durable_lsn == service.writer.durable_lsn


async def test_a_control_file_that_the_disk_does_not_take_is_told_and_written_once_it_does(
    run_server: RunServer, make_settings: MakeSettings
) -> None:
    settings = make_settings(hlc={"persistence_interval": "100ms"})
    async with run_server(settings) as client:

        async def told() -> str | None:
            return (await client.get("/readyz")).json()["checks"]["checkpoints"]["detail"]

        async def is_ready() -> bool:
            return (await client.get("/readyz")).status_code == 200

        folder = wal_folder(settings)
        in_the_way = folder / f"{wal_control.CONTROL_NAME}{UNNAMED_SUFFIX}"
        with structlog.testing.capture_logs() as logs:
            await until(lambda: made(in_the_way), "the control file cannot be written")
            assert "the control file cannot be written" in await until(told, "it is told")
            before = wal_control.load(folder)
            job = {"tenant_id": "acme", "durability": "GLOBAL"}
            assert (await client.post("/v1/jobs", json=job)).status_code == 201
            in_the_way.rmdir()
            await until(lambda: wal_control.load(folder) != before, "it is written again")
            await until(is_ready, "it is told no more")
    assert [line["log_level"] for line in logs if line["event"] == "control_file_not_written"] == ["warning"]


def made(folder: Path) -> bool:
    """Whether the folder could be made: the file of that name may be there this moment."""
    with suppress(FileExistsError):
        folder.mkdir()
    return folder.is_dir()


async def test_what_the_node_would_record_once_the_log_is_closed_is_no_failure(
    run_node: RunNode, make_settings: MakeSettings
) -> None:
    refused: list[LedgerError] = []
    async with run_node(make_settings()) as service:
        await service.key_changes.recorded.wait()

        async def record_too_late() -> None:
            while not service.writer.has_ended:
                await asyncio.sleep(0)
            try:
                await service.system_entries.record(SystemAction.EPOCH_START, "wal:late", {})
            except LedgerError as error:
                refused.append(error)
                raise

        service.lifecycle.spawn(record_too_late())
    assert [type(error) for error in refused] == [WalPoisonedError]
    assert service.node.failure is None


async def test_the_control_file_tells_of_this_disk_where_safekeepers_have_a_batch_before_it(
    run_node: RunNode, make_settings: MakeSettings
) -> None:
    settings = make_settings()
    async with run_node(settings) as service:
        await write(service, 1)
        durable_lsn = service.node.durable.lsn
        # As when Acks of a quorum are heard before the end of the sync here.
        service.node.committed.advance(Lsn(durable_lsn + 3))
        service.node.chained.advance(Lsn(durable_lsn + 1))
        await asyncio.to_thread(service.upkeep.store_control)
        known = wal_control.load(wal_folder(settings))
        assert known is not None
        assert (known.durable_lsn, known.committed_lsn, known.chained_lsn) == (durable_lsn,) * 3
