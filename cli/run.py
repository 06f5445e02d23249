"""``tally run``: a command as a job, created and accepted before it starts, its end recorded after it.

With a spool, an absent ledger stops nothing: the job is filed there and sent later (docs/formats/spool.md).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import orjson
import typer
from typer.core import TyperCommand
from typer.exceptions import TyperException

from cli.client import CALL_ERRORS, LedgerClient, print_wait, said
from cli.options import Durability, Url
from ledger.errors import InvalidInputError, LedgerError
from ledger.exit_code import ExitCode
from tallystick_client.command import (
    FLUSH_PATIENCE_S,
    RecordedJob,
    Report,
    flush_lines,
    flushed,
    how_to_begin,
    in_words,
    run_unrecorded,
)
from terminal import program
from terminal.outcome import CommandExit, err, fail, lose, out, readable, tell
from terminal.program import Json, command_of

FLUSH = "--flush"


class JobCommand(TyperCommand):
    """``tally run``: a wrong command line also exits with 125, as other codes may be those of the command that it
    runs."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As typer's."""
        is_flush = FLUSH in (args[: args.index("--")] if "--" in args else args)
        try:
            return super().parse_args(ctx, args)
        except LedgerError as error:
            if is_flush:
                raise
            raise _not_run(error) from error
        except TyperException as error:
            if not is_flush:
                vars(error)["exit_code"] = int(ExitCode.JOB_REFUSED)
            raise


@dataclass(kw_only=True)
class Run:
    """Run a command as a job: created, accepted, then completed or failed with its exit code.

    The command has the terminal, gets the signals sent to tally, and its exit
    code becomes that of tally; 125 means that the ledger did not take the job,
    or the command line is wrong, and nothing was run. The command line is recorded for good, so keep secrets
    out of it. With --json the report is the last line of standard output.

    With --spool only a ledger that refuses the job stops the command, and with
    --run-anyway nothing does, a wrong address or token neither. One that
    is away, or does not answer within seconds, does not: the job waits in DIR,
    and tally run --flush sends it later, once. --durability LOCAL lets jobs be
    taken while PostgreSQL alone is away.

    With --sign nobody but the holder of KEY can make the job's events: see
    tally caller new.

    \b
    Examples:
      tally run --tenant demo -- make -j4 all
      tally run -t nightly --json -- pg_dump -f /backup/db.sql shop | tail -1
      tally run -t nightly --spool /var/spool/tally -- backup.sh
      tally run -t nightly --sign backup.pem -- backup.sh
      tally run --flush --spool /var/spool/tally
    """

    url: Url
    command: Annotated[list[str] | None, typer.Argument(metavar="CMD", help="Command and its arguments.")] = None
    tenant: Annotated[str | None, typer.Option("--tenant", "-t", help="Tenant whose job it is.")] = None
    as_json: Json = False
    dc: Annotated[str | None, typer.Option("--dc", help="Name of the place it runs in.", show_default="this host")] = (
        None
    )
    subject: Annotated[
        str | None, typer.Option("--subject", help="Whose the job's private fields are, where the tenant has some.")
    ] = None
    durability: Durability = None
    spool: Annotated[
        Path | None,
        typer.Option(
            "--spool",
            envvar="TALLY_SPOOL",
            metavar="DIR",
            file_okay=False,
            help="Keep the job here while the ledger is away, and run the command all the same.",
        ),
    ] = None
    sign: Annotated[
        Path | None,
        typer.Option(
            "--sign", envvar="TALLY_SIGN_KEY", metavar="KEY", help="Sign the job's events with this private key (PEM)."
        ),
    ] = None
    run_anyway: Annotated[
        bool, typer.Option("--run-anyway", help="Run the command whatever keeps it from being a job.")
    ] = False
    flush: Annotated[bool, typer.Option(FLUSH, help="Send what waits in the spool, and run nothing.")] = False

    def run(self) -> None:
        """Run the command, or send what waits; exits with the code."""
        client_log = logging.getLogger("tallystick_client")
        client_log.handlers = [logging.NullHandler() if self.flush else _Warnings(logging.WARNING)]
        if self.flush:
            if self.spool is None or self.command:
                raise InvalidInputError("--flush goes with --spool DIR (or TALLY_SPOOL), and with no command")
            is_sent = flush_spool(self.url, self.spool, as_json=self.as_json)
            raise CommandExit(ExitCode.FINE if is_sent else ExitCode.COULD_NOT_RUN)
        if self.tenant is None or not self.command:
            raise _not_run(InvalidInputError("name a tenant and a command: tally run --tenant T -- CMD"))
        report = self._report(self.tenant, self.command)
        if self.as_json:
            _printed(report)
        raise CommandExit(report["exit_code"])

    def _report(self, tenant: str, command: list[str]) -> Report:
        """Run ``command`` as a job; without one where the ledger refuses it and it is run anyway."""
        try:
            job = self._job(tenant, command)
            job.begin()
        except Exception as error:
            if self.run_anyway:
                program.restore_umask()
                return run_unrecorded(command, said(error) or in_words(error), _say)
            if isinstance(error, CALL_ERRORS):
                raise _not_run(error) from error
            raise
        program.restore_umask()
        return job.run(command, _say, self.spool)

    def _job(self, tenant: str, command: list[str]) -> RecordedJob:
        if any(each is not None and readable(each) != each for each in (tenant, self.dc, self.subject)):
            raise InvalidInputError("--tenant, --dc and --subject must be UTF-8")
        return RecordedJob(
            LedgerClient(self.url, sign_with=self.sign, **how_to_begin(self.spool, self.run_anyway)),
            command,
            tenant,
            has_spool=self.spool is not None,
            dc=self.dc,
            durability=self.durability,
            subject=self.subject,
            run_anyway=self.run_anyway,
            said=said,
        )


run = command_of(Run)


class _Warnings(logging.Handler):
    """Prints warnings of the client, such as a full spool."""

    def emit(self, record: logging.LogRecord) -> None:
        err.print(f"warning: {record.getMessage()}", style="yellow", markup=False)


def _not_run(error: Exception) -> CommandExit:
    return fail(f"the command was not run: {said(error)}", ExitCode.JOB_REFUSED)


def _printed(report: Report) -> None:
    """Print the report; the exit code stays the command's own, even if it has no reader."""
    try:
        print(orjson.dumps(report).decode(), file=out.file, flush=True)
    except OSError as error:
        lose("stdout")
        err.print(f"the report of job {report['job_id']} was not printed: {error.strerror}", markup=False)


def _say(text: str, kind: str) -> None:
    """As ``tallystick_client.command`` says things."""
    styles = {"warning": "yellow", "error": "bold red"}
    err.print(f"warning: {text}" if kind == "warning" else text, style=styles.get(kind), markup=False)


# --- sending what waits -------------------------------------------------------------------------------


def flush_spool(url: str, folder: Path, *, as_json: bool, patience_s: float = FLUSH_PATIENCE_S) -> bool:
    """Send the waiting files in ``folder``; returns whether none is left and none was refused.

    Raises:
        SpoolError: the folder cannot be read.
    """
    with LedgerClient(url, spool=folder, patience_s=patience_s, on_wait=print_wait) as client:
        report = flushed(client, folder)
    tell({**msgspec.to_builtins(report), "jobs": len(report.jobs)}, *flush_lines(report, folder), as_json=as_json)
    if report.problem is not None and not as_json:
        err.print(f"the rest waits: {report.problem}", style="bold red", markup=False)
    return not report.waiting and not report.refused
