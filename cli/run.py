"""``tally run``: a command as a job, created and accepted before it starts, its end recorded after it."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from typer.core import TyperCommand
from typer.exceptions import TyperException

from cli import process
from cli.flush import flush as flush_spool
from cli.options import Durability, Url
from cli.recorded_job import RecordedJob
from cli.spool import Spool
from ledger.errors import InvalidInputError, LedgerError
from ledger.exit_code import ExitCode
from terminal.options import Json
from terminal.outcome import CommandExit, err, fail, lose, out, readable

FLUSH = "--flush"


class JobCommand(TyperCommand):
    """``tally run``: a wrong command line is 125 too, for other codes may be those of the command that it runs."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As typer has it."""
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


def run(
    url: Url,
    command: Annotated[list[str] | None, typer.Argument(metavar="CMD", help="Command and its arguments.")] = None,
    tenant: Annotated[str | None, typer.Option("--tenant", "-t", help="Tenant whose job it is.")] = None,
    as_json: Json = False,
    dc: Annotated[
        str | None, typer.Option("--dc", help="Name of the place it runs in.", show_default="this host")
    ] = None,
    subject: Annotated[
        str | None, typer.Option("--subject", help="Whose the job's private fields are, where the tenant has some.")
    ] = None,
    durability: Durability = None,
    spool: Annotated[
        Path | None,
        typer.Option(
            "--spool",
            envvar="TALLY_SPOOL",
            metavar="DIR",
            file_okay=False,
            help="Keep the job here while the ledger is away, and run the command all the same.",
        ),
    ] = None,
    flush: Annotated[bool, typer.Option(FLUSH, help="Send what waits in the spool, and run nothing.")] = False,
) -> None:
    """Run a command as a job: created, accepted, then completed or failed with exit code and duration.

    The command has the terminal, gets the signals sent to tally, and its exit
    code becomes that of tally; 125 means that the ledger did not take the job,
    or the command line is wrong, and nothing was run. The command line is recorded for good, so keep secrets
    out of it. With --json the report is the last line of standard output.

    With --spool only a ledger that refuses the job stops the command. One that
    is away, or does not answer within seconds, does not: the job waits in DIR,
    and tally run --flush sends it later, once. --durability LOCAL lets jobs be
    taken while PostgreSQL alone is away.

    \b
    Examples:
      tally run --tenant demo -- make -j4 all
      tally run -t nightly --json -- pg_dump -f /backup/db.sql shop | tail -1
      tally run -t nightly --spool /var/spool/tally -- backup.sh
      tally run --flush --spool /var/spool/tally
    """
    if flush:
        _flush(url, spool, command, as_json)
    try:
        if tenant is None or not command:
            raise InvalidInputError("name a tenant and a command: tally run --tenant T -- CMD")
        common = {"tenant_id": tenant} if subject is None else {"tenant_id": tenant, "subject": subject}
        if any(each is not None and readable(each) != each for each in (tenant, dc, subject)):
            raise InvalidInputError("--tenant, --dc and --subject must be UTF-8")
        place = dc or platform.node() or "localhost"
        job = RecordedJob(url, common, place, durability, None if spool is None else Spool(spool))
        job.begin(command)
    except LedgerError as error:
        raise _not_run(error) from error
    if job.problem is not None:
        err.print(f"warning: {job.problem}", style="yellow", markup=False)
    err.print(f"job {job.job_id} {_how_begun(job)}", markup=False)
    try:
        ended = process.run(command)
    except OSError as error:
        err.print(f"{command[0]}: {error.strerror}", markup=False)
        is_missing = isinstance(error, FileNotFoundError)
        ended = process.Ended(ExitCode.NOT_FOUND if is_missing else ExitCode.CANNOT_EXECUTE, None, 0.0)
    _report(job, ended, spool, as_json)
    raise CommandExit(ended.exit_code)


def _not_run(error: LedgerError) -> CommandExit:
    return fail(f"the command was not run: {error}", ExitCode.JOB_REFUSED)


def _flush(url: str, spool: Path | None, command: list[str] | None, as_json: bool) -> None:
    if spool is None or command:
        raise InvalidInputError("--flush goes with --spool DIR (or TALLY_SPOOL), and with no command")
    raise CommandExit(ExitCode.FINE if flush_spool(url, spool, as_json=as_json) else ExitCode.COULD_NOT_RUN)


def _how_begun(job: RecordedJob) -> str:
    if job.is_begin_spooled:
        return "spooled: the ledger is away"
    return "accepted" if not job.is_unrecorded else "is not on record yet"


def _report(job: RecordedJob, ended: process.Ended, spool: Path | None, as_json: bool) -> None:
    """Record the end and say so; what the ledger refuses now is said too, and changes no exit code."""
    report: dict[str, Any] = {
        "job_id": job.job_id,
        "exit_code": ended.exit_code,
        "duration_s": round(ended.duration_s, 3),
        "recorded": False,
        "spooled": False,
        "type": None,
        "chain": None,
        "problem": None,
    }
    how = f"exit code {ended.exit_code}, {ended.duration_s:.3f} s"
    try:
        answer = job.end(ended)
    except LedgerError as error:
        err.print(f"the end of job {job.job_id} was not recorded: {error}", style="bold red", markup=False)
        report["problem"] = str(error)
    else:
        if answer is None:
            report["spooled"] = True
            err.print(f"job {job.job_id} spooled: {how}; send it with tally run --flush --spool {spool}", markup=False)
        else:
            report |= {"recorded": True, "type": answer["type"], "chain": answer["chain"]}
            seq = f", seq {answer['chain']['seq']}" if answer["chain"] else ""
            err.print(f"job {job.job_id} {answer['type']}: {how}{seq}", markup=False)
    if as_json:
        try:
            print(orjson.dumps(report).decode(), file=out.file, flush=True)
        except OSError as error:
            # The exit code is the command's own, whoever reads the report.
            lose("stdout")
            err.print(f"the report of job {job.job_id} was not printed: {error.strerror}", markup=False)
