"""``tally run``: a command as a job, created and accepted before it starts, its end recorded after it.

With a spool, an absent ledger stops nothing: the job is filed there and sent later (docs/formats/spool.md).
"""

from __future__ import annotations

import logging
import os
import platform
import signal
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import orjson
import typer
from typer.core import TyperCommand
from typer.exceptions import TyperException

from cli.client import CALL_ERRORS, LedgerClient, print_wait, said
from cli.options import Durability, Level, Url
from ledger.errors import InvalidInputError, LedgerError
from ledger.exit_code import ExitCode
from tallystick_client import Job, NotAllowedError, SpoolError, TallystickError
from tallystick_client.answers import Recorded
from tallystick_client.errors import FinalError
from terminal import program
from terminal.outcome import CommandExit, counted, err, fail, lose, out, readable, tell
from terminal.program import Json

START_PATIENCE_S = 15.0
"""How long the ledger may take to accept the job before the command is cancelled."""
END_PATIENCE_S = 120.0
"""How long recording the end is retried, as the command cannot be run again."""
SPOOLED_WAIT_S = 2.0
"""The longest wait for one answer before and after the command when there is a spool."""
FLUSH_PATIENCE_S = 60.0
"""Longest that a flush waits for a ledger that is away, or for another flush."""
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
    sign: Annotated[
        Path | None,
        typer.Option(
            "--sign", envvar="TALLY_SIGN_KEY", metavar="KEY", help="Sign the job's events with this private key (PEM)."
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
    logging.getLogger("tallystick_client").handlers = [logging.NullHandler() if flush else _Warnings(logging.WARNING)]
    if flush:
        if spool is None or command:
            raise InvalidInputError("--flush goes with --spool DIR (or TALLY_SPOOL), and with no command")
        raise CommandExit(ExitCode.FINE if flush_spool(url, spool, as_json=as_json) else ExitCode.COULD_NOT_RUN)
    try:
        if tenant is None or not command:
            raise InvalidInputError("name a tenant and a command: tally run --tenant T -- CMD")
        if any(each is not None and readable(each) != each for each in (tenant, dc, subject)):
            raise InvalidInputError("--tenant, --dc and --subject must be UTF-8")
        job = RecordedJob(url, spool, command, tenant, dc, durability, subject, sign)
        job.begin()
    except CALL_ERRORS as error:
        raise _not_run(error) from error
    if job.problem is not None:
        err.print(f"warning: {job.problem}", style="yellow", markup=False)
    err.print(f"job {job.job_id} {job.how_begun}", markup=False)
    try:
        ended = run_command(command)
    except OSError as error:
        err.print(f"{command[0]}: {error.strerror}", markup=False)
        code = ExitCode.NOT_FOUND if isinstance(error, FileNotFoundError) else ExitCode.CANNOT_EXECUTE
        ended = Ended(code, None, 0.0)
    _report(job, ended, spool, as_json)
    raise CommandExit(ended.exit_code)


class _Warnings(logging.Handler):
    """Prints warnings of the client, such as a full spool."""

    def emit(self, record: logging.LogRecord) -> None:
        err.print(f"warning: {record.getMessage()}", style="yellow", markup=False)


class RecordedJob:
    """A command that is a job of the ledger at ``url``.

    With a spool, a failure of both the ledger and the spool to record the job is its ``problem``, and the command still
    runs.
    """

    def __init__(
        self,
        url: str,
        spool: Path | None,
        command: list[str],
        tenant: str,
        dc: str | None = None,
        durability: Level | None = None,
        subject: str | None = None,
        sign: Path | None = None,
    ) -> None:
        waits: dict[str, Any] = (
            {"patience_s": 0.0, "timeout_s": SPOOLED_WAIT_S} if spool else {"patience_s": START_PATIENCE_S}
        )
        self._client = LedgerClient(url, spool=spool, sign_with=sign, **waits)
        self._has_spool = spool is not None
        self._job: Job = self._client.job(
            tenant,
            {
                "command": [_text(part) for part in command],
                "directory": _text(_directory()),
                "began_at": datetime.now(UTC).isoformat(timespec="milliseconds"),
            },
            dc_id=dc or platform.node() or "localhost",
            durability=durability,
            subject=subject,
        )
        self.job_id = self._job.job_id
        self.problem: str | None = None
        """Why neither the ledger nor the spool has the start of the job."""

    @property
    def how_begun(self) -> str:
        """The outcome of recording the start, in words."""
        recorded = "spooled: the ledger is away" if self._job.is_spooled else "accepted"
        return recorded if self.problem is None else "is not on record yet"

    def begin(self) -> None:
        """Record JobCreated and JobAccepted. On return without a ``problem`` they are in the ledger or in the spool.

        Raises:
            TallystickError: the ledger refuses the job, or is away and there is no spool.
        """
        try:
            self._job.begin()
        except TallystickError as error:
            if not self._has_spool or isinstance(error, (FinalError, NotAllowedError)):
                raise
            self.problem = said(error)

    def end(self, ended: Ended) -> Recorded | None:
        """Record JobCompleted or JobFailed; returns the ledger's answer, None when the spool keeps the event.

        Raises:
            TallystickError: neither the ledger nor a spool recorded it.
        """
        if not self._has_spool:
            self._client.patience_s = END_PATIENCE_S
        if self.problem is not None:
            self._job.begin()
            self.problem = None
        if ended.exit_code == 0:
            return self._job.complete("exit code 0", {"exit_code": 0, "duration_s": round(ended.duration_s, 3)})
        how = f"killed by {ended.killed_by}, " if ended.killed_by else ""
        return self._job.fail(f"{how}exit code {ended.exit_code} after {ended.duration_s:.3f} s")


def _directory() -> str:
    """The working directory of the command; the shell's name of it if it no longer exists."""
    try:
        return os.getcwd()
    except OSError:
        return os.environ.get("PWD", "")


def _text(argument: str) -> str:
    """``argument`` as text that JSON can hold: bytes that are not UTF-8 become question marks."""
    return argument.encode("utf-8", "replace").decode()


def _not_run(error: Exception) -> CommandExit:
    return fail(f"the command was not run: {said(error)}", ExitCode.JOB_REFUSED)


def _report(job: RecordedJob, ended: Ended, spool: Path | None, as_json: bool) -> None:
    """Record the end and report it. A refusal of the ledger is reported too, and does not change the exit code."""
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
    except TallystickError as error:
        report["problem"] = said(error)
        err.print(f"the end of job {job.job_id} was not recorded: {said(error)}", style="bold red", markup=False)
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
            # The exit code stays the command's own, even if the report has no reader.
            lose("stdout")
            err.print(f"the report of job {job.job_id} was not printed: {error.strerror}", markup=False)


# --- sending what waits -------------------------------------------------------------------------------


def flush_spool(url: str, folder: Path, *, as_json: bool, patience_s: float = FLUSH_PATIENCE_S) -> bool:
    """Send the waiting files in ``folder``; returns whether none is left and none was refused.

    Raises:
        SpoolError: the folder cannot be read.
    """
    if not folder.is_dir():
        raise SpoolError(f"spool {folder}: there is no such folder")
    with LedgerClient(url, spool=folder, patience_s=patience_s, on_wait=print_wait) as client:
        report = client.flush_spool()
    sent = f"{counted(report.events, 'event')} of {counted(len(report.jobs), 'job')} sent from {folder}"
    tell(
        {**msgspec.to_builtins(report), "jobs": len(report.jobs)},
        f"{sent}, {counted(report.waiting, 'file')} left",
        *(f"refused: job {item['job']}, now in {item['file']}: {item['why']}" for item in report.refused),
        as_json=as_json,
    )
    if report.problem is not None and not as_json:
        err.print(f"the rest waits: {report.problem}", style="bold red", markup=False)
    return not report.waiting and not report.refused


# --- the command itself ---------------------------------------------------------------------------

PASSED_ON = frozenset(
    {
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGQUIT,
        signal.SIGUSR1,
        signal.SIGUSR2,
    }
)
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
_SENT_BY_KERNEL = 0x80
"""``si_code`` SI_KERNEL: the terminal sent the signal, to the whole foreground process group."""


class Ended(NamedTuple):
    """How the command ended: its exit code, or 128 + the signal that killed it, and how long it ran."""

    exit_code: int
    killed_by: str | None
    duration_s: float


def run_command(command: Sequence[str]) -> Ended:
    """Run ``command`` to its end.

    Afterwards the signals in ``PASSED_ON`` stay blocked in this process, so that a late signal does not interrupt the
    recording of the end.

    Raises:
        OSError: it cannot be started.
    """
    waited_for = PASSED_ON | {signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, waited_for)
    program.restore_umask()
    started = time.monotonic()
    pid = os.posix_spawnp(command[0], list(command), os.environ, setsigmask=(), setsigdef=_IGNORED_BY_PYTHON)
    code = os.waitstatus_to_exitcode(_status_at_end(pid, waited_for))
    duration_s = time.monotonic() - started
    return Ended(code, None, duration_s) if code >= 0 else Ended(128 - code, signal.Signals(-code).name, duration_s)


def _status_at_end(pid: int, waited_for: frozenset[signal.Signals]) -> int:
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        got = signal.sigwaitinfo(waited_for)
        if got.si_signo != signal.SIGCHLD and got.si_code != _SENT_BY_KERNEL:
            os.kill(pid, got.si_signo)
