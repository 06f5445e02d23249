"""The ``tally`` command: one module a group of commands, this one puts them together.

A module is imported when one of its commands is asked for, and what needs a database driver or the whole service by
the command that needs it, so that commands start fast, and those which work offline load neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import typer

from app.cli.on_demand import OnDemandGroup, Place
from console.program import EXIT_CODES, run


class Commands(OnDemandGroup):
    """All commands, in the order in which they are listed."""

    PLACES: Mapping[str, Place] = {
        "dev": Place("app.cli.serve", "dev"),
        "serve": Place("app.cli.serve", "serve"),
        "migrate": Place("app.cli.serve", "migrate"),
        "db-url": Place("app.cli.serve", "db_url"),
        "run": Place("app.cli.run", "run", {"allow_interspersed_args": False}),
        "replay": Place("app.cli.replay", "replay"),
        "verify": Place("app.cli.verify", "verify"),
        "verify-bundle": Place("app.cli.verify_bundle", "verify_bundle"),
        "snapshot": Place("app.cli.snapshot", "snapshot"),
        "restore": Place("app.cli.restore", "restore"),
        "erase": Place("app.cli.privacy", "erase"),
        "pipeline": Place(
            "app.cli.pipeline",
            "pipeline",
            {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
        ),
        "privacy": Place("app.cli.privacy", "privacy"),
        "bundle": Place("app.cli.bundle", "bundle"),
        "keys": Place("app.cli.keys", "keys"),
        "wal": Place("app.cli.wal", "wal"),
        "witness": Place("app.cli.witness", "witness"),
        "demo": Place("app.cli.tamper", "demo"),
    }


tally = typer.Typer(
    cls=Commands,
    name="tally",
    help="Tallystick: a tamper-evident job ledger.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


@tally.callback()
def _all_commands() -> None:
    """Without this, typer would find nothing to run: the commands are in ``Commands``."""


def main() -> NoReturn:
    """Run ``tally`` with the arguments of this process."""
    run(tally)
