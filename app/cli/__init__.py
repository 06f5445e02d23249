"""The ``tally`` command: one module a group of commands, this one puts them together.

Modules that need a database driver or the whole service are imported by the command that needs them, so that
commands which work offline start fast and load neither.
"""

from __future__ import annotations

from typing import NoReturn

import typer

from app.cli.bundle import bundle
from app.cli.keys import keys
from app.cli.outcome import CommandExit, fail
from app.cli.pipeline import pipeline
from app.cli.privacy import erase, privacy
from app.cli.replay import replay
from app.cli.restore import restore
from app.cli.run import run
from app.cli.serve import db_url, dev, migrate, serve
from app.cli.snapshot import snapshot
from app.cli.tamper import demo
from app.cli.verify import verify
from app.cli.verify_bundle import verify_bundle
from app.cli.wal import wal
from app.cli.witness import witness
from ledger.errors import LedgerError
from ledger.exit_code import ExitCode, exit_code_of_error

_USAGE_ERROR = 2
"""Typer's code for a wrong command line; 2 says tampered here, so it becomes 1."""

tally = typer.Typer(
    name="tally",
    help="Tallystick: a tamper-evident job ledger.",
    epilog="Exit codes: 0 fine, 1 could not run, 2 tampered or corrupt, 3 incomplete, "
    "4 unknown, expired or revoked key.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
tally.command()(dev)
tally.command()(serve)
tally.command()(migrate)
tally.command("db-url")(db_url)
tally.command(context_settings={"allow_interspersed_args": False})(run)
tally.command()(replay)
tally.command()(verify)
tally.command("verify-bundle")(verify_bundle)
tally.command()(snapshot)
tally.command()(restore)
tally.command()(erase)
tally.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
)(pipeline)
tally.add_typer(privacy, name="privacy")
tally.add_typer(bundle, name="bundle")
tally.add_typer(keys, name="keys")
tally.add_typer(wal, name="wal")
tally.add_typer(witness, name="witness")
tally.add_typer(demo, name="demo")


def main() -> NoReturn:
    """Run ``tally`` with the arguments of this process; every error becomes one line and an exit code."""
    try:
        tally()
    except CommandExit:
        raise
    except SystemExit as ended:
        raise SystemExit(ExitCode.COULD_NOT_RUN if ended.code == _USAGE_ERROR else ended.code) from None
    except LedgerError as error:
        raise fail(str(error), exit_code_of_error(error)) from None
    except OSError as error:
        raise fail(str(error)) from None
    raise CommandExit(ExitCode.FINE)
