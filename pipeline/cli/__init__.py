"""The commands of ``tally pipeline``: one module a command, combined by this module.

Modules that load Spark are imported by the command that needs them.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import NoReturn

import typer

from pipeline.cli.copies import archive, diff, merge
from pipeline.cli.report import report, stats
from pipeline.cli.running import unwind_on_signals, wait_until_printed, write_past_java
from pipeline.cli.verify import verify
from terminal.outcome import fail, readable
from terminal.program import EXIT_CODES, run, settle

commands = typer.Typer(
    name="tally pipeline",
    help="Verify, archive, merge, compare and report on ledgers of any size, on Spark.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


for command in (archive, diff, merge, report, stats, verify):
    commands.command()(command)


def main() -> NoReturn:
    """Run a command with the arguments of this process."""
    settle()
    if any(readable(argument) != argument for argument in sys.argv):
        raise fail("arguments must be UTF-8: Java knows no other names")
    write_past_java()
    unwind_on_signals()
    try:
        run(partial(commands, prog_name="tally pipeline"))
    finally:
        wait_until_printed()
