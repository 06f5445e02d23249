"""``tally-run``: a command as a job, created and accepted before it starts, its end recorded after it.

With a spool, an absent ledger stops nothing: the job is filed there and sent later (docs/formats/spool.md).
``tally run`` of the service is the same.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypedDict, get_args

from tallystick_client import outbox
from tallystick_client.answers import Recorded
from tallystick_client.client import Client
from tallystick_client.errors import FinalError, NotAllowedError, SpoolError, TallystickError
from tallystick_client.facts import Level
from tallystick_client.outbox import SpoolReport

START_PATIENCE_S = 15.0
"""How long the ledger may take to accept the job before the command is cancelled."""
END_PATIENCE_S = 120.0
"""How long recording the end is retried, as the command cannot be run again."""
FLUSH_PATIENCE_S = 60.0
"""Longest that a flush waits for a ledger that is away, or for another flush."""
COULD_NOT_RUN, NOT_RUN, CANNOT_EXECUTE, NOT_FOUND = 1, 125, 126, 127
"""Exit codes: of a flush that leaves something; of a command that was not started, or that the system cannot start."""

Say = Callable[[str, str], object]
"""Prints a line for people; the second argument is ``""``, ``"warning"`` or ``"error"``."""


class Report(TypedDict):
    """What became of a command, as ``--json`` prints it; ``job_id`` is None of one that is no job."""

    job_id: str | None
    exit_code: int
    duration_s: float
    recorded: bool
    spooled: bool
    type: str | None
    chain: Any
    problem: str | None


class Ended(NamedTuple):
    """How the command ended: its exit code, or 128 + the signal that killed it, and how long it ran."""

    exit_code: int
    killed_by: str | None
    duration_s: float


def how_to_begin(spool: Path | None, run_anyway: bool = False) -> dict[str, Any]:
    """The options of a client that records a command: with a spool it waits for no ledger that is away."""
    waits = (
        {"patience_s": START_PATIENCE_S} if spool is None else {"patience_s": 0.0, "timeout_s": outbox.SPOOLED_WAIT_S}
    )
    return {"spool": spool, "keep_forbidden": run_anyway, **waits}


def in_words(error: Exception) -> str:
    """The message of an error, and its notes, in one line."""
    return "; ".join([str(error) or type(error).__name__, *getattr(error, "__notes__", ())])


class RecordedJob:
    """A command that is a job of ``ledger``.

    With a spool, a failure of both the ledger and the spool to record the job is its ``problem``, and the command still
    runs; if it is to ``run_anyway``, a refusal is one too.
    """

    def __init__(
        self,
        ledger: Client,
        command: Sequence[str],
        tenant: str,
        *,
        has_spool: bool,
        dc: str | None = None,
        durability: Level | None = None,
        subject: str | None = None,
        run_anyway: bool = False,
        said: Callable[[Exception], str | None] | None = None,
    ) -> None:
        self._ledger, self._has_spool, self._run_anyway, self._said = ledger, has_spool, run_anyway, said or in_words
        self._job = ledger.job(
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
        except Exception as error:
            is_away = isinstance(error, TallystickError) and not isinstance(error, (FinalError, NotAllowedError))
            if not (self._run_anyway or (is_away and self._has_spool)):
                raise
            self.problem = self._said(error) or in_words(error)

    def end(self, ended: Ended) -> Recorded | None:
        """Record JobCompleted or JobFailed; returns the ledger's answer, None when the spool keeps the event.

        Raises:
            TallystickError: neither the ledger nor a spool recorded it.
        """
        if not self._has_spool:
            self._ledger.patience_s = END_PATIENCE_S
        if self.problem is not None:
            self._job.begin()
            self.problem = None
        if ended.exit_code == 0:
            return self._job.complete("exit code 0", {"exit_code": 0, "duration_s": round(ended.duration_s, 3)})
        how = f"killed by {ended.killed_by}, " if ended.killed_by else ""
        # Without the duration, so that failures of one kind are counted as one error.
        return self._job.fail(f"{how}exit code {ended.exit_code}")

    def run(self, command: Sequence[str], say: Say, spool: Path | None) -> Report:
        """Run ``command``, whose start is recorded, and record its end; the ledger changes no exit code."""
        if self.problem is not None:
            say(self.problem, "warning")
        say(f"job {self.job_id} {self.how_begun}", "")
        ended = _ended(command, say)
        how = f"exit code {ended.exit_code}, {ended.duration_s:.3f} s"
        report = _report(self.job_id, ended)
        try:
            answer = self.end(ended)
        except Exception as error:
            report["problem"] = self._said(error) or in_words(error)
            say(f"the end of job {self.job_id} was not recorded: {report['problem']}", "error")
        else:
            if answer is None:
                report["spooled"] = True
                say(f"job {self.job_id} spooled: {how}; send it with --flush --spool {spool}", "")
            else:
                report |= {"recorded": True, "type": answer["type"], "chain": answer["chain"]}
                seq = f", seq {answer['chain']['seq']}" if answer["chain"] else ""
                say(f"job {self.job_id} {answer['type']}: {how}{seq}", "")
        return report


def run_unrecorded(command: Sequence[str], why: str, say: Say) -> Report:
    """Run ``command``, which ``why`` keeps from being a job."""
    say(f"the command is no job: {why}", "error")
    report = _report(None, _ended(command, say))
    report["problem"] = why
    return report


def _ended(command: Sequence[str], say: Say) -> Ended:
    try:
        return run_command(command)
    except OSError as error:
        say(f"{command[0]}: {error.strerror}", "")
        return Ended(NOT_FOUND if isinstance(error, FileNotFoundError) else CANNOT_EXECUTE, None, 0.0)


def _report(job_id: str | None, ended: Ended) -> Report:
    """The report before its end is recorded."""
    return Report(
        job_id=job_id,
        exit_code=ended.exit_code,
        duration_s=round(ended.duration_s, 3),
        recorded=False,
        spooled=False,
        type=None,
        chain=None,
        problem=None,
    )


def _directory() -> str:
    """The working directory of the command; the shell's name of it if it no longer exists."""
    try:
        return os.getcwd()
    except OSError:
        return os.environ.get("PWD", "")


def _text(argument: str) -> str:
    """``argument`` as text that JSON can hold: bytes that are not UTF-8 become question marks."""
    return argument.encode("utf-8", "replace").decode()


# --- sending what waits -------------------------------------------------------------------------------


def flushed(ledger: Client, folder: Path) -> SpoolReport:
    """Send the waiting files of ``folder``, the spool of ``ledger``.

    Raises:
        SpoolError: the folder cannot be read.
    """
    if not folder.is_dir():
        raise SpoolError(f"spool {folder}: there is no such folder")
    return ledger.flush_spool()


def flush_lines(report: SpoolReport, folder: Path) -> list[str]:
    """What a flush did, in lines; none if nothing waited, so that cron has nothing to mail."""
    if not (report.taken or report.waiting):
        return []
    events, jobs, waiting = report.events, len(report.jobs), report.waiting
    return [
        f"{events:,} event{'s' * (events != 1)} of {jobs:,} job{'s' * (jobs != 1)} sent from {folder}, "
        f"{waiting:,} file{'s' * (waiting != 1)} left",
        *(f"refused: job {item['job']}, now in {item['file']}: {item['why']}" for item in report.refused),
    ]


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


def run_command(command: Sequence[str]) -> Ended:
    """Run ``command`` to its end.

    Afterwards the signals in ``PASSED_ON`` stay blocked in this process, so that a late signal does not interrupt the
    recording of the end.

    Raises:
        OSError: it cannot be started.
    """
    waited_for = PASSED_ON | {signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, waited_for)
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


# --- tally-run ------------------------------------------------------------------------------------


def main() -> None:
    """``tally-run``."""
    options = _parsed(sys.argv[1:])
    logging.getLogger("tallystick_client").addHandler(logging.NullHandler())
    try:
        sys.exit(_flush(options) if options.flush else _run(options))
    except (TallystickError, ValueError, OSError) as error:
        begun = "" if options.flush else "the command was not run: "
        _say(begun + in_words(error), "error")
        sys.exit(COULD_NOT_RUN if options.flush else NOT_RUN)


class _Parser(argparse.ArgumentParser):
    """A wrong command line ends with ``exit_code``."""

    exit_code = NOT_RUN

    def error(self, message: str) -> NoReturn:
        self.exit(self.exit_code, f"{self.format_usage()}error: {message}\n")


def _parsed(arguments: list[str]) -> argparse.Namespace:
    parser = _Parser(
        "tally-run",
        usage="tally-run [OPTIONS] --tenant T -- CMD, or tally-run --flush [--spool DIR]",
        description="Run a command as a job of a Tallystick ledger: created, accepted, then completed or failed with "
        "its exit code. The exit code is that of the command; 125 means that it was not run.",
        epilog="The token is what TALLY_TOKEN holds. The command line is recorded for good: keep secrets out of it.",
    )
    known = os.environ.get
    parser.add_argument("--url", default=known("TALLY_URL"), help="address of the service [TALLY_URL]")
    parser.add_argument("-t", "--tenant", help="tenant whose job it is")
    parser.add_argument("--json", action="store_true", help="print the report as the last line of standard output")
    parser.add_argument("--dc", help="name of the place it runs in [this host]")
    parser.add_argument("--subject", help="whose the job's private fields are, where the tenant has some")
    parser.add_argument("--durability", choices=get_args(Level), help="how safe each event must be before it counts")
    parser.add_argument(
        "--spool",
        type=Path,
        default=known("TALLY_SPOOL") or None,
        metavar="DIR",
        help="keep the job here while the ledger is away, and run the command all the same [TALLY_SPOOL]",
    )
    parser.add_argument("--sign", default=known("TALLY_SIGN_KEY"), metavar="KEY", help="private key to sign with (PEM)")
    parser.add_argument("--run-anyway", action="store_true", help="run the command whatever keeps it from being a job")
    parser.add_argument("--flush", action="store_true", help="send what waits in the spool, and run nothing")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- CMD", help="command and its arguments")
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    parser.exit_code = COULD_NOT_RUN if "--flush" in own else NOT_RUN
    options = parser.parse_args(own)
    options.command += arguments[len(own) + 1 :]
    options.spool = options.spool and Path(options.spool)
    if options.flush and (options.spool is None or options.command):
        parser.error("--flush goes with --spool DIR (or TALLY_SPOOL), and with no command")
    if not options.flush and (options.tenant is None or not options.command):
        parser.error("name a tenant and a command: tally-run --tenant T -- CMD")
    return options


def _run(options: argparse.Namespace) -> int:
    try:
        job = RecordedJob(
            Client(options.url, sign_with=options.sign, **how_to_begin(options.spool, options.run_anyway)),
            options.command,
            options.tenant,
            has_spool=options.spool is not None,
            dc=options.dc,
            durability=options.durability,
            subject=options.subject,
            run_anyway=options.run_anyway,
        )
        job.begin()
    except Exception as error:
        if not options.run_anyway:
            raise
        report = run_unrecorded(options.command, in_words(error), _say)
    else:
        report = job.run(options.command, _say, options.spool)
    if options.json:
        _print(json.dumps(report), sys.stdout)
    return report["exit_code"]


def _flush(options: argparse.Namespace) -> int:
    with Client(
        options.url, sign_with=options.sign, spool=options.spool, patience_s=FLUSH_PATIENCE_S, on_wait=_say_wait
    ) as ledger:
        report = flushed(ledger, options.spool)
    if options.json:
        _print(json.dumps({**vars(report), "jobs": len(report.jobs)}), sys.stdout)
    else:
        for line in flush_lines(report, options.spool):
            _print(line, sys.stdout)
        if report.problem is not None:
            _say(f"the rest waits: {report.problem}", "error")
    return COULD_NOT_RUN if report.waiting or report.refused else 0


def _say(text: str, kind: str) -> None:
    _print(f"{kind}: {text}" if kind else text, sys.stderr)


def wait_line(error: Exception, delay_s: float) -> str:
    """For people, before a retry."""
    return f"trying again in {delay_s:.1f} s: {error}"


def _say_wait(error: Exception, delay_s: float) -> None:
    _say(wait_line(error, delay_s), "")


def _print(text: str, to: Any) -> None:
    """Print a line; where nothing can be written, it is lost: the command, and its exit code, count for more."""
    try:
        print(text.encode("utf-8", "backslashreplace").decode(), file=to, flush=True)
    except OSError:
        stream = "stderr" if to is sys.stderr else "stdout"
        setattr(sys, stream, open(os.devnull, "w"))  # noqa: SIM115 (for as long as we run)
