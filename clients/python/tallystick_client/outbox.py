"""Recording parts of jobs: straight away, or, with a spool, filed first and then sent in order, each once.

1. The part is durable in the spool.
2. Whoever has the lock sends what waits, oldest first; a request that was sent before the ledger knows by its key. Of a
   file that is older than the ledger remembers keys, what the job already has is left out.
3. What was taken is removed. What the ledger refuses for good is set aside with the reason, and with it what follows of
   that job. Anything else ends the sending, and all that is left waits.

A ledger that is away holds up nobody for long: one answer is waited for ``SPOOLED_WAIT_S`` at most, and after a failure
nothing is tried for a while, twice as long each time.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

from tallystick_client.core import BACKOFF_MAX_S, BACKOFF_MIN_S, Core, no_ledger, value_of
from tallystick_client.errors import (
    CopiesRemovedError,
    FinalError,
    JobNotFoundError,
    NotAllowedError,
    ProblemError,
    SpoolError,
    TallystickError,
    TransientError,
    UnreachableError,
)
from tallystick_client.spool import FORMAT, Kept, Part, Request, Spool, is_in_memory_of_keys
from tallystick_client.transport import Flow, Pause, Reply, Work

SPOOLED_WAIT_S = 2.0
"""Longest wait for one answer, and about the longest that a call sends what waits, when there is a spool."""
LOCK_POLL_S = 0.05
_IDENTITY = ("dc_id", "workflow_id", "completed", "failed", "workflows_cancelled")
"""Fields that tell events of one type of a job apart, as far as they have them."""

log = logging.getLogger("tallystick_client")


class Refused(TypedDict):
    """What the ledger refused: of which job, in which file it is now, and why."""

    job: str
    file: str
    why: str


@dataclass
class SpoolReport:
    """What sending a spool did, and what is left there."""

    jobs: set[str] = field(default_factory=set)
    events: int = 0
    refused: list[Refused] = field(default_factory=list)
    waiting: int = 0
    """Files that are left."""
    problem: str | None = None
    """Why they are."""

    @property
    def taken(self) -> int:
        """Grows with each file that leaves."""
        return self.events + len(self.jobs) + len(self.refused)


class Outbox:
    """What is recorded of jobs, by way of the spool where there is one."""

    def __init__(self, core: Core, spool: Spool | None) -> None:
        self._core = core
        self._spool = spool
        self._failures = 0
        self._quiet_until = 0.0
        self._failure: Exception | None = None
        """The last one."""

    def record(self, tenant_id: str, job_id: str, part: Part, requests: Sequence[Request]) -> Flow[list[Reply] | None]:
        """Record one part of a job: the answers, None when the spool keeps it, [] when it was recorded before.

        Raises:
            ProblemError: the ledger refused it.
            SpoolError: it refused it when another sender sent it.
            UnreachableError, NotTheLedgerError: there is no spool, or none that takes it, and no answer.
        """
        if self._spool is None:
            return (yield from self._post(requests, None))
        kept: Kept = {
            "format": FORMAT,
            "made_ms": time.time_ns() // 1_000_000,
            "tenant_id": tenant_id,
            "job_id": job_id,
            "part": part,
            "session": self._core.session,
            "requests": list(requests),
        }
        try:
            own: Path = yield Work(partial(self._spool.keep, kept))
        except SpoolError as full:
            log.warning("%s; the job goes to the ledger straight away", full)
            try:
                return (yield from self._post(requests, None))
            except TallystickError as error:
                error.add_note(str(full))
                raise
        if time.monotonic() < self._quiet_until:
            return None
        return (yield from self._flush(self._spool, own, SPOOLED_WAIT_S, SPOOLED_WAIT_S, SpoolReport()))

    def flush(self) -> Flow[SpoolReport]:
        """Send what waits, until nothing was taken for as long as the client has patience, or time cannot help.

        Raises:
            SpoolError: the folder cannot be read.
        """
        report = SpoolReport()
        spool = self._spool
        if spool is None:
            return report
        taken, until = -1, 0.0
        while True:
            if report.taken > taken:
                taken, until = report.taken, time.monotonic() + self._core.patience_s
            self._failure = None
            yield from self._flush(spool, None, max(until - time.monotonic(), SPOOLED_WAIT_S), None, report)
            report.waiting = len((yield Work(spool.waiting)))
            failure = self._last_failure()
            report.problem = None
            if not report.waiting:
                return report
            report.problem = "another one is sending it" if failure is None else str(failure)
            if failure is not None and not isinstance(failure, (UnreachableError, TransientError)):
                return report
            pause_s = self._quiet_until - time.monotonic()
            if report.taken == taken and time.monotonic() + max(pause_s, 0.0) > until:
                return report
            if pause_s > 0:
                yield from self._core.wait(pause_s, failure or SpoolError(report.problem))

    def knows_end(self, tenant_id: str, job_id: str) -> Flow[bool]:
        """Whether the end of a job waits in the spool."""
        return False if self._spool is None else (yield Work(partial(self._spool.has_end_of, tenant_id, job_id)))

    def _flush(
        self, spool: Spool, own: Path | None, wait_s: float, answer_s: float | None, report: SpoolReport
    ) -> Flow[list[Reply] | None]:
        """Send what waits, for about ``wait_s``, ``answer_s`` for each answer; of the file ``own`` as ``record``."""
        until = time.monotonic() + wait_s
        while (lock := (yield Work(spool.lock))) is None:
            if time.monotonic() > until:
                return None
            yield Pause(LOCK_POLL_S)
        try:
            refused: dict[str, TallystickError] = {}
            held: dict[str, NotAllowedError] = {}
            for path in (yield Work(spool.waiting)):
                if time.monotonic() > until:
                    return None
                try:
                    replies: list[Reply] | None = yield from self._send(
                        spool, path, path == own, answer_s, refused, held, report
                    )
                except (TallystickError, OSError) as error:
                    if path == own and isinstance(error, (FinalError, NotAllowedError, SpoolError)):
                        raise
                    self._be_quiet(error)
                    if isinstance(error, NotAllowedError) and error.kind == "forbidden":
                        continue  # what is of other tenants need not wait with it
                    return None
                if replies is None:
                    continue
                self._failures, self._quiet_until = 0, 0.0
                if path == own:
                    return replies
            why = None if own is None else (yield Work(partial(spool.why_refused, own)))
            if why is not None:
                raise SpoolError(f"the ledger refused it, as another sender was told: {why}")
            return []
        finally:
            lock.close()

    def _send(
        self,
        spool: Spool,
        path: Path,
        is_own: bool,
        answer_s: float | None,
        refused: dict[str, TallystickError],
        held: dict[str, NotAllowedError],
        report: SpoolReport,
    ) -> Flow[list[Reply] | None]:
        """Send one file, and remove it or set it aside; None where it waits with others of its tenant. ``held`` are the
        tenants that the caller may not write to."""
        kept: Kept | None = None
        try:
            kept = yield Work(partial(spool.load, path))
            if kept is None:
                return []
            if (forbidden := held.get(kept["tenant_id"])) is not None:
                if is_own:
                    raise forbidden
                return None
            if (before := refused.get(f"{kept['tenant_id']} {kept['job_id']}")) is not None:
                raise SpoolError(f"what came before it of this job was refused: {before}")
            requests = kept["requests"]
            if not is_in_memory_of_keys(kept):
                requests = yield from self._not_there(kept)
            replies = yield from self._post(requests, kept["session"], patience_s=0.0, timeout_s=answer_s)
        except NotAllowedError as error:
            if kept is not None:
                held[kept["tenant_id"]] = error
            if is_own and kept is not None and kept["part"] == "begin":
                yield Work(partial(spool.remove, path))  # nothing was begun, so there is nothing to record
            raise
        except CopiesRemovedError as error:
            # All of it is recorded.
            yield Work(partial(spool.remove, path))
            report.events += len(requests)
            log.warning("recorded, and how safely cannot be shown: %s", error)
            return []
        except (SpoolError, FinalError) as error:
            if is_own and kept is not None and kept["part"] == "begin":
                yield Work(partial(spool.remove, path))
                raise
            aside = yield Work(partial(spool.refuse, path, str(error)))
            log.error("refused, now in %s: %s", aside, error)
            report.refused.append(
                {"job": path.name[:-7] if kept is None else kept["job_id"], "file": str(aside), "why": str(error)}
            )
            if kept is not None:
                refused[f"{kept['tenant_id']} {kept['job_id']}"] = error
            if is_own:
                raise
            return []
        yield Work(partial(spool.remove, path))
        report.jobs.add(kept["job_id"])
        report.events += len(replies)
        return replies

    def _post(self, requests: Sequence[Request], session: str | None, **waits: float | None) -> Flow[list[Reply]]:
        """Send requests in order; ``waits`` are those of ``Core.ask``."""
        replies, unshown = list[Reply](), None
        for each in requests:
            how: dict[str, Any] = {"content": each["body"], "key": each["key"], "session": session, **waits}
            try:
                reply = yield from self._core.ask("POST", each["path"], **how)
            except CopiesRemovedError as error:
                unshown = error
                continue
            if "job_id" not in value_of(reply):
                raise no_ledger(reply)  # such as a page to log in at, which would have the file removed
            replies.append(reply)
        if unshown is not None:
            raise unshown
        return replies

    def _not_there(self, kept: Kept) -> Flow[list[Request]]:
        """The requests of a file whose events the job does not have yet."""
        there: list[dict[str, Any]] = []
        cursor: str | None = None
        while True:
            params = {"tenant_id": kept["tenant_id"], "limit": 1000, "cursor": cursor}
            path = f"/v1/jobs/{kept['job_id']}/events"
            try:
                page = value_of((yield from self._core.ask("GET", path, params=params, patience_s=0.0)))
            except JobNotFoundError:
                break
            except ProblemError as error:
                if error.kind != "tenant-not-found":
                    raise
                break
            there += page["items"]
            cursor = page["next_cursor"]
            if cursor is None:
                break
        return [each for each in kept["requests"] if not any(_is(each, kept["part"], item) for item in there)]

    def _last_failure(self) -> Exception | None:
        return self._failure

    def _be_quiet(self, error: Exception) -> None:
        pause_s = min(BACKOFF_MAX_S, BACKOFF_MIN_S * 2.0 ** min(self._failures, 10))
        self._failures += 1
        self._failure = error
        self._quiet_until = time.monotonic() + pause_s
        log.warning("what is in the spool waits, for %.1f s at least: %s", pause_s, error)


def _is(request: Request, part: Part, event: dict[str, Any]) -> bool:
    """Whether ``event``, of the ledger, is that of ``request``: of beginnings and ends a job has one of each type."""
    body = json.loads(request["body"])
    if event["type"] != body.get("type", "JobCreated"):
        return False
    said = {} if part != "event" else {name: body[name] for name in _IDENTITY if name in body}
    return all(event["payload"].get(name) == value for name, value in said.items())
