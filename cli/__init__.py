"""The ``tally`` command: each module is a group of commands, and this one combines them.

A module is imported when one of its commands runs. The command itself imports the database driver or the service if it
needs them. So commands start fast, and offline commands load neither.
"""

from __future__ import annotations

import gc
import platform
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Annotated, Any, NamedTuple, NoReturn

import typer
from typer.core import TyperGroup

from terminal import program

GC_ALLOCATIONS = 20_000
"""Allocations between collections of the young generation. Imports make up to 200,000 objects, which are never
freed."""


class EntryPoint(NamedTuple):
    """The place of a command: a function of a module, or a ``typer.Typer`` with its own commands."""

    module: str
    attribute: str
    context_settings: dict[str, Any] | None = None
    command_class: str | None = None
    """A class of the same module that parses the arguments in place of typer's own."""


class Commands(TyperGroup):
    """All commands in listed order; those of the laboratory come last."""

    ENTRY_POINTS: Mapping[str, EntryPoint] = {
        "dev": EntryPoint("cli.serve", "dev"),
        "serve": EntryPoint("cli.serve", "serve"),
        "migrate": EntryPoint("cli.serve", "migrate"),
        "db-url": EntryPoint("cli.serve", "db_url"),
        "run": EntryPoint("cli.run", "run", {"allow_interspersed_args": False}, "JobCommand"),
        "jobs": EntryPoint("cli.jobs", "jobs"),
        "watch": EntryPoint("cli.jobs", "watch"),
        "report": EntryPoint("cli.jobs", "report"),
        "nodes": EntryPoint("cli.cluster", "nodes"),
        "verify": EntryPoint("cli.verify", "verify"),
        "verify-bundle": EntryPoint("cli.verify_bundle", "verify_bundle"),
        "verify-report": EntryPoint("cli.verify_bundle", "verify_report"),
        "prove": EntryPoint("cli.prove", "prove"),
        "verify-proof": EntryPoint("cli.verify_proof", "verify_proof"),
        "verify-page": EntryPoint("cli.verify_proof", "verify_page"),
        "snapshot": EntryPoint("cli.snapshot", "snapshot"),
        "restore": EntryPoint("cli.recovery", "restore"),
        "failover": EntryPoint("cli.recovery", "failover"),
        "erase": EntryPoint("cli.privacy", "erase"),
        "pipeline": EntryPoint(
            "cli.pipeline",
            "pipeline",
            {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
        ),
        "privacy": EntryPoint("cli.privacy", "privacy"),
        "bundle": EntryPoint("cli.bundle", "bundle"),
        "archive": EntryPoint("cli.archive", "archive"),
        "keys": EntryPoint("cli.keys", "keys"),
        "wal": EntryPoint("cli.wal", "wal"),
        "safekeeper": EntryPoint("cli.safekeeper", "safekeeper"),
        "witness": EntryPoint("cli.snapshot", "witness"),
        "token": EntryPoint("cli.callers", "token"),
        "caller": EntryPoint("cli.callers", "caller"),
        "peer": EntryPoint("cli.peer", "peer"),
        "retention": EntryPoint("cli.retention", "retention"),
        "hold": EntryPoint("cli.retention", "hold"),
        "prune": EntryPoint("cli.retention", "prune"),
    }

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of all commands."""
        return [*self.ENTRY_POINTS, *_lab_commands()]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of that name, None without one. A command that calls the service has an option for the token."""
        entry = self.ENTRY_POINTS.get(cmd_name) or _lab_commands().get(cmd_name)
        if entry is None:
            # A misspelt name is answered with similar names.
            self.commands.update(dict.fromkeys(self.list_commands(ctx), self))
            return None
        module = import_module(entry.module)
        found = getattr(module, entry.attribute)
        if isinstance(found, typer.Typer):
            command: Any = typer.main.get_group(found)
            command.name = cmd_name
        else:
            alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
            parsing = None if entry.command_class is None else getattr(module, entry.command_class)
            alone.command(cmd_name, cls=parsing, context_settings=entry.context_settings)(found)
            command = typer.main.get_command(alone)
        for each in getattr(command, "commands", {cmd_name: command}).values():
            if any("--url" in parameter.opts for parameter in each.params):
                from cli.client import token_option

                each.params.append(token_option())
        return command


def _lab_commands() -> Mapping[str, EntryPoint]:
    """The commands of the package ``lab``, which exists in a checkout but not in a wheel."""
    try:
        found: Mapping[str, EntryPoint] = getattr(import_module("lab"), "COMMANDS", {})
    except ModuleNotFoundError:
        return {}
    return found


tally = typer.Typer(
    cls=Commands,
    name="tally",
    help="Tallystick: a tamper-evident job ledger.",
    epilog=program.EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from importlib.metadata import version

        from ledger import native

        typer.echo(f"tallystick {version('tallystick')} ({native.NAME} core, Python {platform.python_version()})")
        raise typer.Exit


@tally.callback()
def _all_commands(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Without this, typer would find nothing to run: the commands are in ``Commands``."""


def main() -> NoReturn:
    """Run ``tally`` with the arguments of this process."""
    program.settle()
    gc.set_threshold(GC_ALLOCATIONS)
    program.run(tally, _said)


def _said(error: Exception) -> str | None:
    """The message of an error of a call to the service. A command that called it has loaded the client."""
    client = sys.modules.get("cli.client")
    return None if client is None else client.said(error)
