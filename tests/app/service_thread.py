"""A whole service on a socket, in a thread of its own, so that tests of one module can share it.

It has recorded its start, the last entry of ``_system`` that it writes by itself.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import structlog

from app.dev.embedded import DATABASE, EmbeddedPostgres
from app.edge.listener import listening
from app.node.wiring import running
from app.runtime.settings.config import load_settings
from tests.conftest import copy_of, execute


@contextmanager
def serving(
    postgres: EmbeddedPostgres,
    folder: Path,
    name: str,
    new_loop: Callable[[], asyncio.AbstractEventLoop] | None = None,
    **settings: object,
) -> Iterator[str]:
    """Base URL of a service on a fresh database called ``name``, whose start is recorded; both are gone afterwards."""
    maintenance_url = postgres.superuser_url("postgres")
    asyncio.run(execute(maintenance_url, copy_of(DATABASE, name)))
    started: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Future()
    run = _serve(folder, postgres.service_url(name), settings, started)
    thread = threading.Thread(target=_run, args=(run, started, new_loop), name=name)
    before, apart = structlog.get_config()["logger_factory"], structlog.PrintLoggerFactory(sys.__stderr__)
    try:
        # What it logs at any moment is not what a command prints that runs in this process beside it.
        structlog.configure(logger_factory=apart)
        thread.start()
        url, loop, stop = started.result(timeout=120)
        try:
            yield url
        finally:
            loop.call_soon_threadsafe(stop.set)
    finally:
        thread.join(timeout=120)
        if structlog.get_config()["logger_factory"] is apart:
            structlog.configure(logger_factory=before)
        asyncio.run(execute(maintenance_url, f"DROP DATABASE {name} WITH (FORCE)"))
    assert not thread.is_alive(), "the service did not stop"


async def _serve(
    folder: Path,
    database_url: str,
    settings: dict[str, object],
    started: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]],
) -> None:
    stop = asyncio.Event()
    # A machine that runs other things too is not what a test is about.
    patient = {"write": {"timeout": "60s"}, "read": {"wait": "20s"}}
    read = load_settings(**{"data_dir": folder, "port": 0, **patient, **settings})
    async with running(read, database_url) as (service, services), listening(services) as (url, _task):
        await service.key_changes.recorded.wait()
        started.set_result((url, asyncio.get_running_loop(), stop))
        await stop.wait()


def _run(
    work: object,
    started: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]],
    new_loop: Callable[[], asyncio.AbstractEventLoop] | None,
) -> None:
    try:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(work)  # type: ignore[arg-type]
    except BaseException as error:
        if started.done():
            raise
        started.set_exception(error)
