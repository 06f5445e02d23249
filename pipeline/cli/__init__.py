"""The commands of ``tally pipeline``: one module a command, this one puts them together.

Modules that load Spark are imported by the command that needs them.
"""

from __future__ import annotations

from typing import NoReturn

import typer

from ledger.errors import LedgerError
from ledger.exit_code import ExitCode, exit_code_of_error
from pipeline.cli.archive import archive
from pipeline.cli.diff import diff
from pipeline.cli.merge import merge
from pipeline.cli.outcome import CommandExit, fail
from pipeline.cli.report import report
from pipeline.cli.running import unwind_on_signals
from pipeline.cli.stats import stats
from pipeline.cli.unpack import unpack
from pipeline.cli.verify import verify

_USAGE_ERROR = 2
"""Typer's code for a wrong command line; 2 says tampered here, so it becomes 1."""

commands = typer.Typer(
    name="tally pipeline",
    help="Verify, archive, merge, compare and report on ledgers of any size, on Spark.",
    epilog="Exit codes: 0 fine, 1 could not run, 2 tampered or corrupt, 3 incomplete, "
    "4 unknown, expired or revoked key.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


@commands.callback()
def _all_commands() -> None:
    """Without this, typer would take a single command for the whole program."""


commands.command("archive")(archive)
commands.command("diff")(diff)
commands.command("merge")(merge)
commands.command("report")(report)
commands.command("stats")(stats)
commands.command("unpack")(unpack)
commands.command("verify")(verify)


def main() -> NoReturn:
    """Run a command with the arguments of this process; every error becomes one line and an exit code."""
    unwind_on_signals()
    try:
        commands(prog_name="tally pipeline")
    except CommandExit:
        raise
    except SystemExit as ended:
        raise SystemExit(ExitCode.COULD_NOT_RUN if ended.code == _USAGE_ERROR else ended.code) from None
    except LedgerError as error:
        raise fail(str(error), exit_code_of_error(error)) from None
    except OSError as error:
        raise fail(str(error)) from None
    raise CommandExit(ExitCode.FINE)
