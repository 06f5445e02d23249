"""Records parts of jobs: directly, or, with a spool, filed first and then sent in order, each once.

1. The part is durable in the spool.
2. The holder of the lock sends waiting files, oldest first. The ledger recognises a repeated request by its key. From a
   file that is older than the ledger's memory of keys, requests that the job already has are left out.
3. An accepted file is removed. A file that the ledger refuses for good is quarantined with the reason, and so are later
   files of that job. Any other failure ends the sending, and the remaining files wait.

A ledger that is away does not delay callers for long: the wait for one answer is at most ``SPOOLED_WAIT_S``, and after
a failure sending pauses, twice as long each time.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from tallystick_client.core import BACKOFF_MAX_S, BACKOFF_MIN_S, Core, no_ledger, value_of
from tallystick_client.errors import (
    CopiesRemovedError,
    FinalError,
    JobExistsError,
    KeyReusedError,
    NotAllowedError,
    ProblemError,
    SpoolError,
    TallystickError,
    TransientError,
    UnreachableError,
)
from tallystick_client.spool import FORMAT, Kept, Part, Request, Spool, is_in_memory_of_keys
from tallystick_client.transport import Reply

SPOOLED_WAIT_S = 2.0
"""With a spool, the longest wait for one answer, and about the longest that a call sends waiting files."""
LOCK_POLL_S = 0.05
_IDENTITY = ("dc_id", "workflow_id", "completed", "failed", "workflows_cancelled")
"""Fields that distinguish events of one type of a job, if present."""

log = logging.getLogger("tallystick_client")


class Refused(TypedDict):
    """A refused file: its job, where it is now, and the reason."""

    job: str
    file: str
    why: str


@dataclass
class SpoolReport:
    """The result of sending a spool, and its remaining files."""

    jobs: set[str] = field(default_factory=set)
    events: int = 0
    refused: list[Refused] = field(default_factory=list)
    waiting: int = 0
    """Number of remaining files."""
    problem: str | None = None
    """Why they remain."""

    @property
    def taken(self) -> int:
        """Increases with each file that leaves."""
        return self.events + len(self.jobs) + len(self.refused)


@dataclass
class _Sending:
    """One pass over the spool."""

    report: SpoolReport
    own: Path | None = None
    """The file of the part that the caller records."""
    answer_s: float | None = None
    """Longest wait for one answer; None: as long as the client waits."""
    refused: dict[tuple[str, str], TallystickError] = field(default_factory=dict)
    """By tenant and job, why the ledger refused a part of it."""
    forbidden: dict[str, NotAllowedError] = field(default_factory=dict)
    """By tenant, why the caller may not write to it."""
    failure: Exception | None = None
    """Why it ended early."""


@dataclass(eq=False)
class Outbox:
    """Records parts of jobs, through the spool if there is one."""

    _core: Core
    _spool: Spool | None
    _keeps_forbidden: bool = False
    """Whether a beginning that the caller may not record waits as well, until his token is mended."""
    _failures: int = 0
    _quiet_until: float = 0.0

    async def record(self, tenant_id: str, job_id: str, part: Part, requests: Sequence[Request]) -> list[Reply] | None:
        """Record one part of a job: the answers, None when the spool keeps it, [] when it was recorded before.

        Raises:
            ProblemError: the ledger refused it.
            SpoolError: the ledger refused it when another sender sent it.
            UnreachableError, NotTheLedgerError: there is no spool, or none that takes it, and no answer.
        """
        if self._spool is None:
            return await self._post(requests, None)
        kept: Kept = {
            "format": FORMAT,
            "made_ms": time.time_ns() // 1_000_000,
            "tenant_id": tenant_id,
            "job_id": job_id,
            "part": part,
            "session": self._core.session_with(None),
            "requests": list(requests),
        }
        try:
            own = await self._core.transport.work(self._spool.keep, kept)
        except SpoolError as full:
            log.warning("%s; the job goes to the ledger straight away", full)
            try:
                return await self._post(requests, None)
            except TallystickError as error:
                error.add_note(str(full))
                raise
        is_quiet, sending = time.monotonic() < self._quiet_until, _Sending(SpoolReport(), own, SPOOLED_WAIT_S)
        try:
            return None if is_quiet else await self._flush(self._spool, sending, SPOOLED_WAIT_S)
        except NotAllowedError as error:
            if not self._keeps_forbidden:
                raise
            log.warning("what is in the spool waits: %s", error)
            return None

    async def flush(self) -> SpoolReport:
        """Send waiting files, until none was accepted for the client's patience, or waiting cannot help.

        Raises:
            SpoolError: the folder cannot be read.
        """
        report = SpoolReport()
        if self._spool is None:
            return report
        taken, until = -1, 0.0
        while True:
            if report.taken > taken:
                taken, until = report.taken, time.monotonic() + self._core.patience_s
            sending = _Sending(report)
            await self._flush(self._spool, sending, max(until - time.monotonic(), SPOOLED_WAIT_S))
            report.waiting, report.problem = len(await self._core.transport.work(self._spool.waiting)), None
            if not report.waiting:
                return report
            failure = sending.failure
            report.problem = "another one is sending it" if failure is None else str(failure)
            if failure is not None and not isinstance(failure, (UnreachableError, TransientError)):
                return report
            pause_s = self._quiet_until - time.monotonic()
            if report.taken == taken and time.monotonic() + max(pause_s, 0.0) > until:
                return report
            if pause_s > 0:
                await self._core.wait(pause_s, failure or SpoolError(report.problem))

    async def knows_end(self, tenant_id: str, job_id: str) -> bool:
        """Whether the end of a job waits in the spool."""
        spool = self._spool
        return spool is not None and await self._core.transport.work(spool.has_end_of, tenant_id, job_id)

    async def _flush(self, spool: Spool, sending: _Sending, wait_s: float) -> list[Reply] | None:
        """Send waiting files for about ``wait_s``; the result for the caller's own file is as in ``record``."""
        transport, until = self._core.transport, time.monotonic() + wait_s
        while (lock := await transport.work(spool.lock)) is None:
            if time.monotonic() > until:
                return None
            await transport.pause(LOCK_POLL_S)
        with lock:
            for path in await transport.work(spool.waiting):
                if time.monotonic() > until:
                    return None
                try:
                    replies = await self._send(spool, path, sending)
                except (TallystickError, OSError) as error:
                    if path == sending.own and isinstance(error, (FinalError, NotAllowedError, SpoolError)):
                        raise
                    self._be_quiet(error, sending)
                    if isinstance(error, NotAllowedError) and error.kind == "forbidden":
                        continue  # files of other tenants need not wait with it
                    return None
                if replies is not None:
                    self._failures, self._quiet_until = 0, 0.0
                if path == sending.own:
                    return replies
            own = sending.own
            if own is not None and (why := await transport.work(spool.why_refused, own)) is not None:
                raise SpoolError(f"the ledger refused it, as another sender was told: {why}")
            return []

    async def _send(self, spool: Spool, path: Path, sending: _Sending) -> list[Reply] | None:
        """Send one file, then remove or quarantine it; None if it waits with others of its tenant."""
        work, report, is_own = self._core.transport.work, sending.report, path == sending.own
        kept: Kept | None = None
        try:
            kept = await work(spool.load, path)
            if kept is None:
                return []
            if kept["tenant_id"] in sending.forbidden and not is_own:
                return None
            replies = await self._sent(kept, sending)
        except (FinalError, NotAllowedError, SpoolError) as error:
            is_kept = self._keeps_forbidden and isinstance(error, NotAllowedError)
            if is_own and kept is not None and kept["part"] == "begin" and not is_kept:
                await work(spool.remove, path)  # nothing was begun, so there is nothing to record
            elif not isinstance(error, NotAllowedError):
                report.refused.append(await work(_quarantine, spool, path, kept, error))
                if kept is not None:
                    sending.refused[kept["tenant_id"], kept["job_id"]] = error
            if is_own or isinstance(error, NotAllowedError):
                raise
            return []
        await work(spool.remove, path)
        return replies

    async def _sent(self, kept: Kept, sending: _Sending) -> list[Reply]:
        """Send the requests of a file, and count what is recorded; the answers."""
        if (forbidden := sending.forbidden.get(kept["tenant_id"])) is not None:
            raise forbidden
        if (before := sending.refused.get((kept["tenant_id"], kept["job_id"]))) is not None:
            raise SpoolError(f"what came before it of this job was refused: {before}")
        try:
            requests = kept["requests"] if is_in_memory_of_keys(kept) else await self._not_there(kept)
            replies = await self._post(requests, kept["session"], patience_s=0.0, timeout_s=sending.answer_s)
            sending.report.jobs.add(kept["job_id"])
        except NotAllowedError as error:
            sending.forbidden[kept["tenant_id"]] = error
            raise
        except CopiesRemovedError as error:
            log.warning("recorded, and how safely cannot be shown: %s", error)
            replies = []
        sending.report.events += len(requests)
        return replies

    async def _post(self, requests: Sequence[Request], session: str | None, **waits: float | None) -> list[Reply]:
        """Send requests in order; ``waits`` are passed to ``Core.ask``."""
        replies, unshown = list[Reply](), None
        for each in requests:
            how: dict[str, Any] = {"content": each["body"], "key": each["key"], "session": session, **waits}
            how["traceparent"] = each.get("traceparent")
            try:
                reply = await self._core.ask("POST", each["path"], **how)
            except CopiesRemovedError as error:
                unshown = error
                continue
            except KeyReusedError as error:
                # The key is made of the id of the job: its caller has given none.
                why = "this job began before with another spec or place: take another job_id, or begin it as it was"
                raise JobExistsError(error.status, "job-exists", why, error.members, error.location) from error
            if not {"job_id", "type", "chain"} <= value_of(reply).keys():
                raise no_ledger(reply)  # such as a page to log in at, which would have the file removed
            replies.append(reply)
        if unshown is not None:
            raise unshown
        return replies

    async def _not_there(self, kept: Kept) -> list[Request]:
        """The requests of a file whose events are not in the job yet."""
        there: list[dict[str, Any]] = []
        pages = self._core.pages(f"/v1/jobs/{kept['job_id']}/events", {"tenant_id": kept["tenant_id"]}, patience_s=0.0)
        try:
            async for page in pages:
                there += page["items"]
        except ProblemError as error:
            if error.kind not in ("job-not-found", "tenant-not-found"):
                raise
        return [each for each in kept["requests"] if not any(_is(each, kept["part"], item) for item in there)]

    def _be_quiet(self, error: Exception, sending: _Sending) -> None:
        pause_s = min(BACKOFF_MAX_S, BACKOFF_MIN_S * 2.0 ** min(self._failures, 10))
        self._failures += 1
        sending.failure = error
        self._quiet_until = time.monotonic() + pause_s
        log.warning("what is in the spool waits, for %.1f s at least: %s", pause_s, error)


def _quarantine(spool: Spool, path: Path, kept: Kept | None, error: TallystickError) -> Refused:
    """Move a file that the ledger refused into quarantine."""
    moved = spool.refuse(path, str(error))
    log.error("refused, now in %s: %s", moved, error)
    return {"job": path.name[:-7] if kept is None else kept["job_id"], "file": str(moved), "why": str(error)}


def _is(request: Request, part: Part, event: dict[str, Any]) -> bool:
    """Whether ``event``, of the ledger, is that of ``request``: of beginnings and ends a job has one of each type."""
    body = json.loads(request["body"])
    if event["type"] != body.get("type", "JobCreated"):
        return False
    said = {} if part != "event" else {name: body[name] for name in _IDENTITY if name in body}
    return all(event["payload"].get(name) == value for name, value in said.items())
