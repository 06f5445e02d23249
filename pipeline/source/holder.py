"""Snapshots held open on the driver for reads that Spark plans elsewhere.

Spark plans a read of a Python Data Source in a short-lived process of its own, which could not keep a transaction
open until the tasks have run. So the driver's own process does: a thread of it listens on a socket in a folder that
its user alone can enter, opens a database for whom asks, and answers with the snapshot it holds there.

A snapshot is let go when no job of the application has run for ``IDLE_S``, when ``HELD_MAX`` newer ones are held, and
when Spark or the driver ends; with the driver's process all of its connections end in any case.
"""

from __future__ import annotations

import atexit
import json
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from py4j.protocol import Py4JError

from ledger import errors
from ledger.errors import ConfigurationError, LedgerError
from pipeline.places.dsn import Dsn
from pipeline.places.postgres import PostgresPlace

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

IDLE_S: Final = 1800.0
"""A snapshot keeps PostgreSQL from cleaning up behind it, so it is not held for longer than anybody may come back."""
HELD_MAX: Final = 16
"""Snapshots held at once, each a connection; the oldest goes when another is asked for."""
REGISTER: Final = "pipeline.source.data_source.register"
"""What a user must have called."""
LOOK_INTERVAL_S: Final = 2.0
REQUEST_BYTES_MAX: Final = 64 << 10
"""Most bytes of one request that are read."""
ANSWER_TIMEOUT_S: Final = 120.0


class _Held(NamedTuple):
    stack: ExitStack
    since_s: float


class SnapshotHolder:
    """Holds snapshots for planners until they are of no more use. One thread, ended by ``close``."""

    def __init__(self, is_busy: Callable[[], bool | None], idle_s: float = IDLE_S, held_max: int = HELD_MAX) -> None:
        """``is_busy`` says whether jobs run that may read; None when the application has ended."""
        self._is_busy, self.idle_s, self._held_max = is_busy, idle_s, held_max
        self._folder = Path(tempfile.mkdtemp(prefix="tally-snapshots-"))
        self.address = str(self._folder / "socket")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.address)
        self._listener.listen()
        self._listener.settimeout(LOOK_INTERVAL_S)
        self._held: list[_Held] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pipeline-snapshots", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @property
    def is_alive(self) -> bool:
        """Whether it still answers."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Release all snapshots; a second call does nothing."""
        self._ended.set()
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as waking:
            waking.connect(self.address)
        self._thread.join()
        atexit.unregister(self.close)

    def _run(self) -> None:
        try:
            active_s = time.monotonic()
            while not self._ended.is_set():
                with suppress(TimeoutError):
                    self._answer(self._listener.accept()[0])
                is_busy, now_s = self._is_busy(), time.monotonic()
                if is_busy is None:
                    return
                active_s = now_s if is_busy else active_s
                while self._held and now_s - max(active_s, self._held[0].since_s) > self.idle_s:
                    self._held.pop(0).stack.close()
        finally:
            self._listener.close()
            while self._held:
                self._held.pop().stack.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _answer(self, client: socket.socket) -> None:
        """One request, a database's URL; its answer, the id of a snapshot or an error."""
        with client, suppress(OSError):
            client.settimeout(LOOK_INTERVAL_S)
            url = _received(client)
            if self._ended.is_set():
                return
            try:
                answer = {"snapshot_id": self._hold(Dsn(url))}
            except LedgerError as error:
                answer = {"error": type(error).__name__, "message": str(error)}
            client.sendall(json.dumps(answer).encode())

    def _hold(self, dsn: Dsn) -> str:
        while len(self._held) >= self._held_max:
            self._held.pop(0).stack.close()
        with ExitStack() as stack:
            opened = stack.enter_context(PostgresPlace(dsn).open())
            self._held.append(_Held(stack.pop_all(), time.monotonic()))
        return opened.snapshot_id


def hold(address: str | None, dsn: Dsn) -> str:
    """The id of a snapshot of ``dsn`` that the driver of this application now holds.

    Raises:
        DatabaseUnavailableError, ConfigurationError: as the driver met them.
        ConfigurationError: there is no such driver.
    """
    if address is None:
        raise ConfigurationError(f"nobody holds a snapshot: call {REGISTER}(spark) before reading")
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(ANSWER_TIMEOUT_S)
            client.connect(address)
            client.sendall(dsn.url.encode())
            client.shutdown(socket.SHUT_WR)
            answer = json.loads(_received(client))
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"the driver that holds snapshots does not answer: call {REGISTER}(spark) in the program that made the "
            f"Spark session ({error})"
        ) from None
    if "error" in answer:
        raise getattr(errors, answer["error"])(answer["message"])
    return str(answer["snapshot_id"])


def holder_of(spark: SparkSession, idle_s: float = IDLE_S) -> SnapshotHolder:
    """The holder of this Spark application, begun when there is none yet; ``idle_s`` counts from then on."""
    context = spark.sparkContext
    held = _HOLDERS.get(context.applicationId)
    if held is None or not held.is_alive:
        tracker = context.statusTracker()

        def is_busy() -> bool | None:
            if context._jsc is None:
                return None
            try:
                return bool(tracker.getActiveJobsIds())
            except (AttributeError, OSError, Py4JError):  # Java is gone, which py4j finds in several ways
                return None

        held = _HOLDERS[context.applicationId] = SnapshotHolder(is_busy, idle_s)
    held.idle_s = idle_s
    return held


_HOLDERS: Final[dict[str, SnapshotHolder]] = {}


def _received(connection: socket.socket) -> str:
    parts: list[bytes] = []
    while (part := connection.recv(REQUEST_BYTES_MAX)) and sum(map(len, parts)) <= REQUEST_BYTES_MAX:
        parts.append(part)
    return b"".join(parts).decode()
