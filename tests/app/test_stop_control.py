"""The control file at a stop: what is stored last is what the node has reached, however slow the disk is."""

from __future__ import annotations

import asyncio
import threading
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

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
