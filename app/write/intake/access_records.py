"""Records of privileged acts, refusals and reads of payloads.

    ACT_ALLOWED      an entry of ``_system``, durable before an act that needs ``operate`` or ``admin`` begins
    ACCESS_REFUSED   an entry of ``_system`` for the refusals of an interval, equal ones counted together
    PAYLOADS_READ    an entry of the tenant's own chain, durable before the answer is given, if ``privacy.log_reads``
                     names the tenant

All of them are lines of the node's access log as well, and so are the reads of all other tenants. Text that a caller
chose is recorded in part only: a name only if it can be a tenant's, of a path its first characters. Without
authentication (``auth.mode`` is ``none``) there is no actor. Then only refusals, and reads of tenants that
``privacy.log_reads`` names, are recorded.

*The access log* of a node has reads, acts and refusals as lines of JSON, in files of bounded size beside the data::

    access.log, access.log.1 … access.log.7      the newest first; each of up to FILE_BYTES

A line is written shortly after its request was answered, so a crash may lose the last ones; what is chained is not
lost. If the disk fails or is
too slow, the newest lines are dropped, and their number is written as a line. A reader skips a line that a full disk or
a crash cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Final, NamedTuple

import orjson

from app.runtime.logs import log
from app.runtime.principals import covers
from app.write.intake.system_entries import SystemEntries, facts_of
from ledger import names, rfc3339
from ledger.chain.form import SUBJECT_BYTES_MAX
from ledger.errors import LedgerError, NotReadyError, reported_as
from ledger.facts.events import SYSTEM_TENANT, SystemAction
from wal.segment import FILE_MODE

REFUSALS_LISTED_MAX: Final = 100
"""Kinds of refusal that one entry lists; all others are only counted."""
REFUSALS_WAIT_S: Final = 1.0
"""How long the first refusal waits for others to share its entry."""
REFUSALS_INTERVAL_S: Final = 60.0
"""Shortest time between two such entries: a client that is refused all the time must not fill the chain."""
PATH_CHARACTERS_MAX: Final = 512
"""Characters of a request's path that a line of the access log holds."""


class RecordedRequest(NamedTuple):
    """A request as it is recorded. ``actor`` is None without authentication, ``address`` is the client's."""

    actor: str | None
    route: str
    path: str
    address: str | None


class _Refusal(NamedTuple):
    actor: str | None
    route: str
    problem: str
    tenant_id: str | None


class AccessRecords:
    """Writes these records. Belongs to one event loop."""

    def __init__(
        self,
        entries: SystemEntries,
        access_log: AccessLog,
        log_reads: Sequence[str],
        now_ms: Callable[[], int],
    ) -> None:
        """``log_reads`` are patterns of the tenants whose reads are chained."""
        self._entries = entries
        self.log = access_log
        self._log_reads = log_reads
        self._now_ms = now_ms
        self._refusals: Counter[_Refusal] = Counter()
        self._others = 0
        self._from: str | None = None
        self._was_refused = asyncio.Event()

    async def act(self, request: RecordedRequest, right: str, tenant_id: str | None) -> None:
        """Record that the actor may do this now; durable when this returns.

        Raises:
            ChainDamagedError: the chain of ``_system`` takes no entry, so the act MUST NOT begin.
            WalFullError, WalPoisonedError, FencedError, DatabaseWentBackError, DurabilityTimeoutError: as
                ``SystemEntries.note``.
        """
        if request.actor is None:
            return
        facts = facts_of(actor=request.actor, right=right, route=request.route, path=request.path, tenant_id=tenant_id)
        self._add("act", request, tenant_id or SYSTEM_TENANT, {"right": right})
        await self._entries.note(SystemAction.ACT_ALLOWED, _subject("act", request.actor), facts)

    async def read(self, request: RecordedRequest, tenant_id: str, what: dict[str, object]) -> None:
        """Record that payloads of the tenant are read. If ``log_reads`` names it, the entry is durable on return.

        Raises:
            ChainDamagedError: the tenant's chain takes no entry, so the payloads MUST NOT be returned.
            QuotaExceededError: the entry would create the tenant, and the caller may create no more now.
            WalFullError, WalPoisonedError, FencedError, DatabaseWentBackError, DurabilityTimeoutError: as
                ``SystemEntries.note``.
        """
        if request.actor is not None:
            self._add("read", request, tenant_id, what)
        if any(covers(pattern, tenant_id) for pattern in self._log_reads):
            facts = facts_of(route=request.route, **what, actor=request.actor)
            if tenant_id not in self._entries.tenants:
                self._entries.charge_new(request.actor, 1)
            await self._entries.note(
                SystemAction.PAYLOADS_READ, _subject("read", request.actor or "nobody"), facts, tenant_id
            )

    def refused(self, request: RecordedRequest, problem: str, tenant_id: str | None) -> None:
        """Record a refusal, later and together with others; a text that cannot be a tenant's name is left out."""
        # The refused client chose the text. One that no entry can hold would keep out all other refusals.
        if tenant_id is not None and not names.is_readable_tenant(tenant_id):
            tenant_id = None
        self._add("refusal", request, tenant_id or SYSTEM_TENANT, {"problem": problem})
        refusal = _Refusal(request.actor, request.route, problem, tenant_id)
        self._from = self._from or rfc3339.text_of(self._now_ms())
        if refusal in self._refusals or len(self._refusals) < REFUSALS_LISTED_MAX:
            self._refusals[refusal] += 1
        else:
            self._others += 1
        self._was_refused.set()

    async def run(self) -> None:
        """Chain the refusals, until cancelled."""
        while True:
            await self._was_refused.wait()
            await asyncio.sleep(REFUSALS_WAIT_S)
            try:
                await self._note_refusals()
            except LedgerError as error:
                log.warning("refusals_not_recorded", error=str(error))
            await asyncio.sleep(REFUSALS_INTERVAL_S)

    async def _note_refusals(self) -> None:
        refusals, others, first = self._refusals, self._others, self._from
        listed = [facts_of(**refusal._asdict(), count=count) for refusal, count in refusals.items()]
        facts = facts_of(**{"from": first}, to=rfc3339.text_of(self._now_ms()), refusals=listed, others=others or None)
        self._refusals, self._others, self._from = Counter(), 0, None
        self._was_refused.clear()
        try:
            await self._entries.note(SystemAction.ACCESS_REFUSED, "refusals", facts)
        except LedgerError:
            # Nothing is lost: these refusals are counted with the next ones.
            self._refusals.update(refusals)
            self._others, self._from = self._others + others, first
            self._was_refused.set()
            raise

    def _add(self, kind: str, request: RecordedRequest, tenant_id: str, what: dict[str, object]) -> None:
        self.log.add(
            {
                "at": rfc3339.text_of(self._now_ms()),
                "kind": kind,
                "tenant_id": tenant_id,
                **request._asdict(),
                "path": request.path[:PATH_CHARACTERS_MAX],
                "what": what,
            }
        )


def _subject(kind: str, actor: str) -> str:
    """The entry's subject, in place of a job id: names from issuers and certificates that are too long are cut.

    ``actor`` in the payload is whole."""
    return f"{kind}:{actor}".encode()[:SUBJECT_BYTES_MAX].decode(errors="ignore")


FILE_BYTES: Final = 8 << 20
FILES_MAX: Final = 8
QUEUE_MAX: Final = 10_000
"""Lines that wait for the disk."""
WRITE_INTERVAL_S: Final = 0.2
NAME: Final = "access.log"

Line = dict[str, Any]


class AccessLog:
    """Belongs to one event loop; files are written on other threads, one at a time."""

    def __init__(self, folder: Path, on_dropped: Callable[[int], object] = lambda _: None) -> None:
        self._path = folder / NAME
        self._on_dropped = on_dropped
        self._waiting: deque[Line] = deque()
        self._dropped = 0
        self._fault: str | None = None
        """Why the last lines could not be written."""
        self._writing = asyncio.Lock()

    def add(self, line: Line) -> None:
        """Queue ``line``, which has ``at``, to be written."""
        if len(self._waiting) < QUEUE_MAX:
            self._waiting.append(line)
        else:
            self._dropped += 1
            self._on_dropped(1)

    async def run(self) -> None:
        """Write queued lines until cancelled, then the rest."""
        try:
            while True:
                await asyncio.sleep(WRITE_INTERVAL_S)
                await self.flush()
        finally:
            self._written(*self._write(self._taken()))

    async def flush(self) -> None:
        """Return once every added line is in its file, or counted as dropped if the disk fails."""
        async with self._writing:
            if self._waiting or (self._dropped and self._fault is None):
                self._written(*await asyncio.to_thread(self._write, self._taken()))

    async def newest(self, tenant_id: str, below: int, limit: int) -> tuple[list[Line], int | None]:
        """Up to ``limit`` lines about the tenant, newest first, whose number among all kept lines (from 1) is less than
        ``below``; and the next ``below``, None at the end.

        Raises:
            NotReadyError: the files cannot be read.
        """
        await self.flush()
        async with self._writing:
            with reported_as(NotReadyError, "the access log of this node cannot be read", OSError):
                return await asyncio.to_thread(self._newest, tenant_id, below, limit)

    def _taken(self) -> list[Line]:
        lines = [*self._waiting]
        self._waiting.clear()
        if self._dropped:
            lines.append({"at": lines[-1]["at"] if lines else None, "dropped": self._dropped})
            self._dropped = 0
        return lines

    def _write(self, lines: list[Line]) -> tuple[list[Line], str | None]:
        """Write the lines. Returns the unwritten ones and the error. Blocks."""
        left = deque(lines)
        try:
            if left:
                with contextlib.closing(_Files(self._path)) as files:
                    while left:
                        files.emit(logging.makeLogRecord({"msg": orjson.dumps(left[0]).decode()}))
                        left.popleft()
        except OSError as error:
            return [*left], str(error)
        return [], None

    def _written(self, left: list[Line], fault: str | None) -> None:
        for line in left:
            self._dropped += line.get("dropped", 1)
            if "dropped" not in line:
                self._on_dropped(1)
        if fault != self._fault:
            log.warning("access_log_not_written", error=fault) if fault else log.info("access_log_written_again")
        self._fault = fault

    def _newest(self, tenant_id: str, below: int, limit: int) -> tuple[list[Line], int | None]:
        found = [
            (number, line)
            for number, line in enumerate(self._lines(), 1)
            if line.get("tenant_id") == tenant_id and number < below
        ]
        page = found[-limit:]
        return [line for _, line in reversed(page)], page[0][0] if len(found) > len(page) else None

    def _lines(self) -> Iterator[Line]:
        """Every kept line, oldest first."""
        for name in [*(f"{NAME}.{number}" for number in range(FILES_MAX - 1, 0, -1)), NAME]:
            path = self._path.with_name(name)
            if path.exists():
                with path.open("rb") as file:
                    for text in file:
                        # A line that a crash cut off is skipped.
                        with contextlib.suppress(orjson.JSONDecodeError):
                            if isinstance(line := orjson.loads(text), dict):
                                yield line


class _Files(RotatingFileHandler):
    """The files, open for appending. Errors are raised."""

    def __init__(self, path: Path) -> None:
        with open(path, "ab+", opener=_own) as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read() != b"\n":
                    file.write(b"\n")
        super().__init__(path, maxBytes=FILE_BYTES, backupCount=FILES_MAX - 1, encoding="utf-8")

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, "a", encoding="utf-8", opener=_own)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (named by logging)
        """Raise the current exception; logging would print it, with the line."""
        raise


def _own(path: str, flags: int) -> int:
    """Open a file. Only the service's account may read a new one, because it holds lines about all tenants."""
    return os.open(path, flags, FILE_MODE)
