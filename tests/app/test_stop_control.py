"""A stop: the control file stored last says what the node has reached, and what comes too late is no failure."""

from __future__ import annotations

import asyncio
import threading
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from ledger.errors import LedgerError, WalPoisonedError
from ledger.machines.events import SystemAction
from ledger.positions import Lsn
from tests.app.chains import UNTIL_S, until
from tests.app.conftest import MakeSettings, RunNode
from tests.app.starting import wal_folder, write
from wal import control as wal_control
from wal.control import Control


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

        service.spawn(record_too_late())
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
