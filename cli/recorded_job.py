"""One command as a job of the ledger: its beginning and its end, recorded there, or kept in a spool.

With a spool the job id and every Idempotency-Key are chosen before anything is sent: a request whose answer did not
come may have been taken, so what is kept is that very request. The beginning says when it was.
"""

from __future__ import annotations

import os
import secrets
import time
from datetime import UTC, datetime
from typing import Any

from app.runtime.answers.jobs import EventAnswer
from cli import process
from cli.client import LedgerClient, RequestRefusedError
from cli.spool import FORMAT, Part, Request, Spool, SpoolError
from ledger.errors import LedgerError

START_PATIENCE_S = 15.0
"""How long the ledger may take to accept the job before the command is given up."""
END_PATIENCE_S = 120.0
"""How long the end is tried to be recorded, as the command cannot be run again for it."""
START_WAIT_S, END_WAIT_S = 2.0, 5.0
"""The longest wait for one answer before and after the command when there is a spool."""
REFUSALS = frozenset(
    {
        "event-refused",
        "idempotency-key-reused",
        "idempotency-key-unproven",
        "invalid-event",
        "invalid-request",
        "job-ended",
        "job-exists",
        "job-not-found",
        "other-region",
        "payload-too-large",
        "write-lost",
    }
)
"""Problems that are about the event itself: sent again it is refused again."""


def is_refusal(error: LedgerError) -> bool:
    """Whether the ledger has said that it does not take this event, now or later."""
    return isinstance(error, RequestRefusedError) and error.kind in REFUSALS


class RecordedJob:
    """A job that runs here, in the ledger at ``url`` or, while that is away, in ``spool``.

    With a spool, whatever keeps the ledger and the spool from taking the job is told by ``problem`` and stops nothing.
    """

    def __init__(
        self, url: str, common: dict[str, Any], place: str, durability: str | None, spool: Spool | None
    ) -> None:
        self._url = url
        self._common = common if durability is None else {**common, "durability": durability}
        self._place = place
        self._key = secrets.token_hex(16)
        self._spool = spool
        self._session: str | None = None
        self._unsent: list[Request] = []
        self.is_begin_spooled = False
        """Whether the beginning waits in the spool."""
        self.job_id = "" if spool is None else f"run-{time.time_ns() // 1_000_000:013d}-{self._key[:16]}"
        self.problem: LedgerError | None = None

    def begin(self, command: list[str]) -> None:
        """JobCreated and JobAccepted; recorded, or kept, when this returns and there is no ``problem``.

        Raises:
            LedgerError: the ledger refuses the job, or is away and there is no spool.
        """
        created: dict[str, Any] = {
            **self._common,
            "spec": {"command": [_text(part) for part in command], "directory": _text(_directory())},
            "assigned_dcs": [self._place],
        }
        create = Request(path="/v1/jobs", key=self._named("created"), body=created)
        if self._spool is None:
            with LedgerClient(self._url, patience_s=START_PATIENCE_S) as client:
                self.job_id = self._answered(client, create)["job_id"]
                self._answered(client, self._accepted())
            return
        created["job_id"] = self.job_id
        created["spec"]["began_at"] = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._unsent = [create, self._accepted()]
        try:
            self._send_all(START_WAIT_S, [])
        except LedgerError as error:
            if _stops_the_command(error):
                raise
            try:
                self._keep(self._spool, "begin", self._unsent)
            except SpoolError as full:
                self.problem = SpoolError(f"{error}; {full}")
            return
        try:
            # One that could not be written is found before it is needed.
            self._spool.prepare()
        except SpoolError as error:
            self.problem = error

    def end(self, ended: process.Ended) -> dict[str, Any] | None:
        """JobCompleted or JobFailed: what the ledger answered, None when the spool keeps it.

        Raises:
            LedgerError: neither the ledger nor a spool took it.
        """
        event = self._event("ended", self._ending(ended))
        if self._spool is None:
            with LedgerClient(self._url, patience_s=END_PATIENCE_S) as client:
                return self._answered(client, event)
        if not self.is_begin_spooled:
            try:
                return self._send_all(END_WAIT_S, [event])
            except LedgerError as error:
                if is_refusal(error):
                    raise
                if self._unsent:
                    self._keep(self._spool, "begin", self._unsent)
        self._keep(self._spool, "end", [event])
        return None

    @property
    def is_unrecorded(self) -> bool:
        """Whether neither the ledger nor the spool has the beginning."""
        return bool(self._unsent)

    # --- events -----------------------------------------------------------------------------------

    def _accepted(self) -> Request:
        return self._event("accepted", {"type": "JobAccepted", "dc_id": self._place, "worker_count": 1})

    def _ending(self, ended: process.Ended) -> dict[str, Any]:
        if ended.exit_code == 0:
            metrics = {"exit_code": 0, "duration_s": round(ended.duration_s, 3)}
            return {"type": "JobCompleted", "final_status": "exit code 0", "aggregate_metrics": metrics}
        how = f"killed by {ended.killed_by}, " if ended.killed_by else ""
        error = f"{how}exit code {ended.exit_code} after {ended.duration_s:.3f} s"
        return {"type": "JobFailed", "error": error, "failed_dc": self._place}

    def _event(self, step: str, event: dict[str, Any]) -> Request:
        body = {**self._common, **event}
        return Request(path=f"/v1/jobs/{self.job_id}/events", key=self._named(step), body=body)

    def _named(self, step: str) -> str:
        return f"run-{self._key}-{step}"

    # --- to the ledger ----------------------------------------------------------------------------

    def _answered(self, client: LedgerClient, request: Request) -> dict[str, Any]:
        answer: dict[str, Any] = client.post(
            request["path"], request["body"], EventAnswer, key=request["key"], session=self._session
        )
        self._session = answer["session"]
        return answer

    def _send_all(self, wait_s: float, more: list[Request]) -> dict[str, Any] | None:
        """Send what is unsent, then ``more``, once each; returns the last answer."""
        answer = None
        with LedgerClient(self._url, patience_s=0.0, timeout_s=wait_s) as client:
            for request in [*self._unsent, *more]:
                answer = self._answered(client, request)
        self._unsent = []
        return answer

    # --- to the spool -----------------------------------------------------------------------------

    def _keep(self, spool: Spool, part: Part, requests: list[Request]) -> None:
        spool.keep(
            {
                "format": FORMAT,
                "made_ms": time.time_ns() // 1_000_000,
                "tenant_id": self._common["tenant_id"],
                "job_id": self.job_id,
                "part": part,
                "session": self._session,
                "requests": requests,
            }
        )
        if part == "begin":
            self.is_begin_spooled, self._unsent = True, []


def _stops_the_command(error: LedgerError) -> bool:
    """Whether the ledger is there and does not want the job."""
    return is_refusal(error) or (isinstance(error, RequestRefusedError) and error.status in (401, 403))


def _directory() -> str:
    """Where the command runs; what the shell calls it where it is there no more."""
    try:
        return os.getcwd()
    except OSError:
        return os.environ.get("PWD", "")


def _text(argument: str) -> str:
    """``argument`` as text that JSON can hold: bytes that are not UTF-8 become question marks."""
    return argument.encode("utf-8", "replace").decode()
