"""``tally run``: a command as a job, created and accepted before it starts, its end recorded after it."""

from __future__ import annotations

import os
import platform
import secrets
from typing import Annotated, Any

import orjson
import typer

from app.cli import process
from app.cli.client import LedgerClient
from app.cli.options import Tenant, Url
from console.options import Json
from console.outcome import CommandExit, err, fail, out
from ledger.errors import LedgerError
from ledger.exit_code import ExitCode

START_PATIENCE_S = 15.0
"""How long the ledger may take to accept the job before the command is given up."""
END_PATIENCE_S = 120.0
"""How long the end is tried to be recorded, as the command cannot be run again for it."""


def run(
    command: Annotated[list[str], typer.Argument(metavar="CMD", help="Command and its arguments.")],
    tenant: Tenant,
    url: Url,
    as_json: Json = False,
    dc: Annotated[
        str | None, typer.Option("--dc", help="Name of the place it runs in.", show_default="this host")
    ] = None,
    subject: Annotated[
        str | None, typer.Option("--subject", help="Whose the job's private fields are, where the tenant has some.")
    ] = None,
) -> None:
    """Run a command as a job: created, accepted, then completed or failed with exit code and duration.

    The command has the terminal, gets the signals sent to tally, and its exit
    code becomes that of tally; 125 means that the ledger did not take the job
    and nothing was run. The command line is recorded for good, so keep secrets
    out of it. With --json the report is the last line of standard output.

    \b
    Examples:
      tally run --tenant demo -- make -j4 all
      tally run -t nightly --json -- pg_dump -f /backup/db.sql shop | tail -1
    """
    job = _Job(url, tenant, dc or platform.node() or "localhost", subject)
    try:
        job.begin(command)
    except LedgerError as error:
        raise fail(f"the command was not run: {error}", ExitCode.JOB_REFUSED) from error
    err.print(f"job {job.job_id} accepted", markup=False)
    try:
        ended = process.run(command)
    except OSError as error:
        err.print(f"{command[0]}: {error.strerror}", markup=False)
        is_missing = isinstance(error, FileNotFoundError)
        ended = process.Ended(ExitCode.NOT_FOUND if is_missing else ExitCode.CANNOT_EXECUTE, None, 0.0)
    _report(job, ended, as_json)
    raise CommandExit(ended.exit_code)


class _Job:
    """One job in the ledger; its requests have keys, so each is recorded once however often it is sent."""

    def __init__(self, url: str, tenant: str, place: str, subject: str | None) -> None:
        self._url = url
        self._common = {"tenant_id": tenant} if subject is None else {"tenant_id": tenant, "subject": subject}
        self._place = place
        self._key = secrets.token_hex(16)
        self.job_id = ""

    def begin(self, command: list[str]) -> None:
        """JobCreated and JobAccepted; the ledger holds both when this returns."""
        spec = {"command": [_text(part) for part in command], "directory": _text(os.getcwd())}
        body = {**self._common, "spec": spec, "assigned_dcs": [self._place]}
        with LedgerClient(self._url, patience_s=START_PATIENCE_S) as client:
            self.job_id = client.post("/v1/jobs", body, key=f"run-{self._key}-created")["job_id"]
            accepted = {"type": "JobAccepted", "dc_id": self._place, "worker_count": 1}
            self._event(client, "accepted", accepted)

    def end(self, ended: process.Ended) -> dict[str, Any]:
        """JobCompleted or JobFailed; returns what the ledger answered."""
        if ended.exit_code == 0:
            metrics = {"exit_code": 0, "duration_s": round(ended.duration_s, 3)}
            event = {"type": "JobCompleted", "final_status": "exit code 0", "aggregate_metrics": metrics}
        else:
            how = f"killed by {ended.killed_by}, " if ended.killed_by else ""
            error = f"{how}exit code {ended.exit_code} after {ended.duration_s:.3f} s"
            event = {"type": "JobFailed", "error": error, "failed_dc": self._place}
        with LedgerClient(self._url, patience_s=END_PATIENCE_S) as client:
            return self._event(client, "ended", event)

    def _event(self, client: LedgerClient, step: str, event: dict[str, Any]) -> dict[str, Any]:
        path = f"/v1/jobs/{self.job_id}/events"
        body = {**self._common, **event}
        answer: dict[str, Any] = client.post(path, body, key=f"run-{self._key}-{step}")
        return answer


def _report(job: _Job, ended: process.Ended, as_json: bool) -> None:
    """Record the end and say so; what the ledger refuses now is said too, and changes no exit code."""
    report: dict[str, Any] = {
        "job_id": job.job_id,
        "exit_code": ended.exit_code,
        "duration_s": round(ended.duration_s, 3),
    }
    try:
        answer = job.end(ended)
    except LedgerError as error:
        err.print(f"the end of job {job.job_id} was not recorded: {error}", style="bold red", markup=False)
        report |= {"recorded": False, "type": None, "chain": None, "problem": str(error)}
    else:
        report |= {"recorded": True, "type": answer["type"], "chain": answer["chain"], "problem": None}
        seq = f", seq {answer['chain']['seq']}" if answer["chain"] else ""
        err.print(
            f"job {job.job_id} {answer['type']}: exit code {ended.exit_code}, {ended.duration_s:.3f} s{seq}",
            markup=False,
        )
    if as_json:
        print(orjson.dumps(report).decode(), file=out.file)


def _text(argument: str) -> str:
    """``argument`` as text that JSON can hold: bytes that are not UTF-8 become question marks."""
    return argument.encode("utf-8", "replace").decode()
