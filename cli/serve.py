"""``tally dev``, ``serve``, ``migrate`` and ``db-url``: the service and the database under it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import structlog
import typer
import uvloop

from app.runtime.logs import DRAIN_S, configure_logs, drain_logs, write_line
from app.runtime.settings.config import Settings, load_settings
from app.runtime.tasks import stop_deadline
from cli import nodes
from ledger.errors import ConfigurationError, LedgerError
from ledger.exit_code import ExitCode
from terminal import stop_signals
from terminal.outcome import CommandExit, err, tell
from terminal.program import Json

if TYPE_CHECKING:
    from app.dev.embedded import EmbeddedPostgres

WATCH_INTERVAL_S = 0.5
"""How often ``tally dev`` checks that its PostgreSQL is alive."""
STOP_MARGIN_S = 5.0
"""How much longer than ``shutdown_grace`` a stop may take before the process exits."""
NODES_MAX = 64
"""Most nodes of one ``tally serve``."""

_log = structlog.get_logger(__name__)

AcceptLostWal = Annotated[
    bool,
    typer.Option(
        "--accept-lost-wal",
        help="Start although the WAL is lost, short or damaged: gives up what cannot be read of it, and records that.",
    ),
]


def dev(accept_lost_wal: AcceptLostWal = False) -> None:
    """Serve on an embedded PostgreSQL: nothing to install, all data in one folder.

    The folder is var/, or the one TALLY_DATA_DIR names; TALLY_PORT moves the
    port from 8080.

    \b
    Examples:
      tally dev
      TALLY_DATA_DIR=/srv/tally TALLY_PORT=9000 tally dev
    """
    from app.store.schema import is_newest

    stop = StopWhileStarting()
    settings = load_settings()
    configure_logs()
    err.wait_max_s = DRAIN_S
    with running_postgres(settings.data_dir) as postgres:
        with stop.unwinding():
            if not asyncio.run(is_newest(postgres.owner_url())):
                from app.store.migrate import migrate

                migrate(postgres.owner_url())
            from app.node import serving  # noqa: F401 - a second of imports, which a signal may still cut short

            stop_signals.hold()
        _run(settings, partial(_serve_and_watch, settings, postgres, accept_lost_wal))


def serve(
    accept_lost_wal: AcceptLostWal = False,
    count: Annotated[
        int, typer.Option("--nodes", min=1, max=NODES_MAX, help="Run so many nodes of the ledger behind one port.")
    ] = 1,
    parent: Annotated[int | None, typer.Option("--parent", hidden=True)] = None,
    own_port: Annotated[int | None, typer.Option("--own-port", hidden=True)] = None,
) -> None:
    """Serve on the PostgreSQL that TALLY_DATABASE_URL names; its schema must be the one this version knows.

    With --nodes several nodes share the port. Each is a process with a data
    folder of its own, nodes/1 and so on, and answers at 127.0.0.1 too, at the
    port after that one, the next, and so on. One that ends is started again.

    \b
    Examples:
      TALLY_DATABASE_URL=postgresql://tallystick@db/tallystick tally serve
      TALLY_CONFIG=/etc/tallystick/tally.toml tally serve --nodes 4
    """
    stop = StopWhileStarting()
    settings = load_settings()
    configure_logs()
    err.wait_max_s = DRAIN_S
    if settings.database_url is None:
        raise ConfigurationError("database_url is not set: name one in TALLY_DATABASE_URL, or use tally dev")
    if count > 1:
        if accept_lost_wal:
            raise ConfigurationError(
                "--accept-lost-wal is for one node: run it alone once, with TALLY_DATA_DIR set to its nodes/N"
            )
        stop_signals.hold()
        raise CommandExit(uvloop.run(nodes.run(settings, count)))
    with stop.unwinding():
        from app.node import serving  # noqa: F401 - a second of imports, which a signal may still cut short

        stop_signals.hold()
    _run(settings, partial(_serve, settings, settings.database_url, accept_lost_wal, parent, own_port))


def migrate(as_json: Json = False) -> None:
    """Bring the database to the newest schema, as the owner that TALLY_MIGRATE_URL names.

    \b
    Examples:
      TALLY_MIGRATE_URL=postgresql://tallystick_owner@db/tallystick tally migrate
    """
    from app.store.migrate import migrate

    settings = load_settings()
    if settings.migrate_url is None:
        raise ConfigurationError("migrate_url is not set: name the database with its owner in TALLY_MIGRATE_URL")
    migrate(settings.migrate_url)
    tell({"migrated": True}, "the database has the newest schema", as_json=as_json)


def db_url(as_json: Json = False) -> None:
    """Print the superuser URL of the embedded PostgreSQL, for psql.

    \b
    Examples:
      psql "$(tally db-url)"
      TALLY_DATA_DIR=/srv/tally tally db-url
    """
    url = embedded_postgres(load_settings().data_dir).superuser_url()
    tell({"url": url}, url, as_json=as_json)


def embedded_postgres(data_dir: Path) -> EmbeddedPostgres:
    """The embedded PostgreSQL of a data folder, not started."""
    from app.dev.embedded import EmbeddedPostgres

    return EmbeddedPostgres(data_dir / "postgres")


@contextmanager
def running_postgres(data_dir: Path) -> Iterator[EmbeddedPostgres]:
    """The embedded PostgreSQL, started, and stopped however the service ends."""
    postgres = embedded_postgres(data_dir)
    try:
        _say("embedded_postgres_starting", f"starting PostgreSQL in {postgres.data_dir}")
        postgres.start()
        yield postgres
    finally:
        # make passes SIGTERM on to a child that already got it.
        stop_signals.ignore()
        postgres.stop()


@contextmanager
def _child_of(descriptor: int) -> Iterator[Callable[[], None]]:
    """The child's side of a node that ``nodes.run`` started, while its loop runs: yields the function to call once it
    is ready. The node stops when the parent is gone."""
    loop = asyncio.get_running_loop()
    with socket.socket(fileno=descriptor) as parent:
        parent.set_inheritable(False)

        def gone() -> None:
            loop.remove_reader(parent)
            os.kill(os.getpid(), signal.SIGTERM)

        def ready() -> None:
            with suppress(BrokenPipeError):
                parent.send(b"1")

        loop.add_reader(parent, gone)
        try:
            yield ready
        finally:
            loop.remove_reader(parent)


def _run(settings: Settings, serving: Callable[[Callable[[], None]], Coroutine[Any, Any, int]]) -> NoReturn:
    """Serve until the stop, which is bounded in time; exits with the code that ``serving`` returns."""
    with stop_deadline(settings.shutdown_grace.total_seconds() + STOP_MARGIN_S, drain_logs) as begin_stop:
        raise CommandExit(uvloop.run(serving(begin_stop)))


async def _serve(
    settings: Settings,
    url: str,
    accept_lost_wal: bool,
    parent: int | None,
    own_port: int | None,
    on_stop: Callable[[], None],
) -> int:
    from app.node import serving

    with nullcontext(lambda: None) if parent is None else _child_of(parent) as tell_parent:
        return await serving.serve(
            settings,
            url,
            accept_lost_wal=accept_lost_wal,
            own_port=own_port,
            on_ready=partial(_say_ready, tell_parent=tell_parent),
            on_stop=on_stop,
        )


async def _serve_and_watch(
    settings: Settings, postgres: EmbeddedPostgres, accept_lost_wal: bool, on_stop: Callable[[], None]
) -> int:
    """Serve, and restart PostgreSQL whenever it dies; writes received meanwhile wait in the WAL."""
    from app.node import serving

    watching = asyncio.create_task(_keep_alive(postgres))
    try:
        return await serving.serve(
            settings,
            postgres.service_url(),
            accept_lost_wal=accept_lost_wal,
            on_ready=_say_ready,
            on_stop=on_stop,
        )
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def _keep_alive(postgres: EmbeddedPostgres) -> None:
    said = None
    while True:
        await asyncio.sleep(WATCH_INTERVAL_S)
        try:
            if await asyncio.to_thread(postgres.ensure_alive):
                _log.warning("embedded_postgres_restarted")
            said = None
        except (LedgerError, OSError, subprocess.SubprocessError) as error:
            if str(error) != said:
                said = str(error)
                _log.error("embedded_postgres_down", error=said)


def _say_ready(url: str, tell_parent: Callable[[], None] = lambda: None) -> None:
    tell_parent()
    _say("service_ready", f"Tallystick answers at {url}, its API is described at {url}/docs", url=url)


def _say(event: str, detail: str, **facts: str) -> None:
    """Print for a user at a terminal; elsewhere stderr is the log, in which every line is JSON."""
    if err.is_terminal:
        write_line(detail)
    else:
        _log.info(event, detail=detail, **facts)


class StopWhileStarting:
    """``stop_signals`` before the loop of the service runs: unwind, so that PostgreSQL is stopped too.

    A signal is also remembered, as its exception may be raised in a destructor or a callback, which drops it. Python
    would write an exception dropped by a destructor to stderr, with a traceback.
    """

    def __init__(self) -> None:
        self._asked = False
        sys.unraisablehook = _write_but_the_end
        stop_signals.take(self._unwind)

    def _unwind(self, _number: int, _frame: FrameType | None) -> NoReturn:
        self._asked = True
        raise CommandExit(ExitCode.FINE)

    @contextmanager
    def unwinding(self) -> Iterator[None]:
        """Unwind at the end if a signal came meanwhile, even if its exception was dropped.

        An exception raised in the middle of asyncio's or a driver's code may come out as another error.
        """
        try:
            yield
        finally:
            if self._asked:
                raise CommandExit(ExitCode.FINE) from None


def _write_but_the_end(lost: sys.UnraisableHookArgs) -> None:
    if not isinstance(lost.exc_value, CommandExit):
        sys.__unraisablehook__(lost)
