"""Commands whose modules are imported when they are asked for, so that ``tally serve`` need not load all the others."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple

import typer
from typer.core import TyperGroup


class EntryPoint(NamedTuple):
    """Where a command is: a function of a module, or a ``typer.Typer`` with commands of its own."""

    module: str
    attribute: str
    context_settings: Mapping[str, Any] | None = None


class OnDemandGroup(TyperGroup):
    """A group of the commands in ``ENTRY_POINTS``, in that order; subclasses say what they are."""

    ENTRY_POINTS: Mapping[str, EntryPoint] = {}

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of all commands."""
        return list(self.ENTRY_POINTS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of that name, None when there is none."""
        if cmd_name not in self.ENTRY_POINTS:
            # A misspelt name is answered with those it is near to.
            self.commands.update(dict.fromkeys(self.ENTRY_POINTS, self))
            return None
        return _command(cmd_name, self.ENTRY_POINTS[cmd_name])


def _command(name: str, entry: EntryPoint) -> Any:
    found = getattr(import_module(entry.module), entry.attribute)
    if not isinstance(found, typer.Typer):
        settings = None if entry.context_settings is None else dict(entry.context_settings)
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
        alone.command(name, context_settings=settings)(found)
        return typer.main.get_command(alone)
    group = typer.main.get_group(found)
    group.name = name
    return group
