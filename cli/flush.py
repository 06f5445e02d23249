"""``tally run --flush``: send what waits in a spool, each request once, however often it is tried.

1. The lock is taken, so that only one sends.
2. Files go in order of their names. Of a file that is older than the ledger remembers keys, what the job already
   has is left out; everything else is the ledger's to recognize by its key.
3. What was taken is removed; what the ledger refuses for good is set aside with the reason, and with it what follows of
   that job. What is of a tenant that the caller may not write to waits. Anything else ends the sending, and all that is
   left waits.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import orjson

from app.runtime.answers.jobs import EventAnswer, JobEventAnswer, JobEventList
from cli.client import LedgerClient, RequestRefusedError, say_wait
from cli.recorded_job import is_refusal
from cli.spool import Kept, Request, Spool, SpoolError, Waiting
from ledger.errors import LedgerError
from terminal.counted import counted
from terminal.outcome import err, out, print_json

KEYS_REMEMBERED_MS = 6 * 24 * 3600 * 1000
"""The ledger knows a request again for seven days; a day is left for clocks that differ."""
PATIENCE_S = 30.0
IDENTITY = ("dc_id", "workflow_id", "completed", "failed", "workflows_cancelled")
"""Fields that tell events of one type of a job apart, as far as they have them."""


class FlushReport(msgspec.Struct):
    """What was done with a spool."""

    jobs: set[str] = set()
    events: int = 0
    refused: list[dict[str, str]] = []
    waiting: int = 0
    problem: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The document that ``--json`` prints."""
        return {**msgspec.structs.asdict(self), "jobs": len(self.jobs)}


def flush(url: str, folder: Path, *, as_json: bool) -> bool:
    """Send what waits in ``folder``; returns whether nothing is left and nothing was refused.

    Raises:
        SpoolError: the folder cannot be read, or another one sends it.
    """
    spool = Spool(folder)
    report = FlushReport()
    refused, held = set[tuple[str, str]](), set[str]()
    with spool.locked():
        waiting = spool.waiting()
        report.waiting = len(waiting)
        try:
            with LedgerClient(url, patience_s=PATIENCE_S, on_wait=say_wait) as client:
                for each in waiting:
                    report.waiting -= _send_or_refuse(client, spool, each, refused, held, report)
        except (LedgerError, OSError) as error:
            report.problem = str(error)
    if as_json:
        print_json(report.to_json())
    else:
        _print(report, folder)
    return not report.waiting and not report.refused


def _send_or_refuse(
    client: LedgerClient,
    spool: Spool,
    waiting: Waiting,
    refused: set[tuple[str, str]],
    held: set[str],
    report: FlushReport,
) -> bool:
    """Send a file, or set it aside; false when it waits. ``refused`` are the jobs, by tenant and id, of which one was
    set aside already, ``held`` the tenants that the caller may not write to."""
    tenant_id, job_id = "", waiting.name
    try:
        kept = spool.load(waiting)
        tenant_id, job_id = kept["tenant_id"], kept["job_id"]
        if tenant_id in held:
            return False
        if (tenant_id, job_id) in refused:
            raise SpoolError("what came before it of this job was refused")
        report.events += _send(client, kept)
    except LedgerError as error:
        if isinstance(error, RequestRefusedError) and error.kind == "forbidden":
            held.add(tenant_id)
            report.problem = str(error)
            return False
        if not (is_refusal(error) or isinstance(error, SpoolError)):
            raise
        path = spool.refuse(waiting, str(error))
        refused.add((tenant_id, job_id))
        report.refused.append({"job": job_id, "file": str(path), "why": str(error)})
    else:
        waiting.path.unlink()
        report.jobs.add(job_id)
    return True


def _send(client: LedgerClient, kept: Kept) -> int:
    """Send the requests of a file; returns how many were not known to be there."""
    session = kept["session"]
    requests = kept["requests"]
    if not 0 <= time.time_ns() // 1_000_000 - kept["made_ms"] < KEYS_REMEMBERED_MS:
        there = _events_there(client, kept)
        requests = [request for request in requests if not any(_is(request, kept, item) for item in there)]
    for request in requests:
        answer = client.post(request["path"], request["body"], EventAnswer, key=request["key"], session=session)
        session = answer["session"]
    return len(requests)


def _is(request: Request, kept: Kept, event: JobEventAnswer) -> bool:
    """Whether ``event`` is that of ``request``; of beginnings and ends a job has one of each type."""
    body = orjson.loads(request["body"]) if isinstance(request["body"], str) else request["body"]
    said = [name for name in IDENTITY if name in body] if kept["part"] == "event" else []
    return event["type"] == body.get("type", "JobCreated") and all(event["payload"].get(n) == body[n] for n in said)


def _events_there(client: LedgerClient, kept: Kept) -> list[JobEventAnswer]:
    """The events that the job has in the ledger."""
    there: list[JobEventAnswer] = []
    cursor: str | None = None
    path = f"/v1/jobs/{kept['job_id']}/events"
    while True:
        try:
            page = client.get(path, JobEventList, tenant_id=kept["tenant_id"], limit=1000, cursor=cursor)
        except RequestRefusedError as error:
            if error.kind in ("job-not-found", "tenant-not-found"):
                return []
            raise
        there += page["items"]
        cursor = page["next_cursor"]
        if cursor is None:
            return there


def _print(report: FlushReport, folder: Path) -> None:
    sent = f"{counted(report.events, 'event')} of {counted(len(report.jobs), 'job')} sent from {folder}"
    out.print(f"{sent}, {counted(report.waiting, 'file')} left", markup=False)
    for item in report.refused:
        out.print(f"refused: job {item['job']}, now in {item['file']}: {item['why']}", markup=False)
    if report.problem is not None:
        err.print(f"the rest waits: {report.problem}", style="bold red", markup=False)
