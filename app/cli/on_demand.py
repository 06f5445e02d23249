"""Commands whose modules are imported when they are asked for, so that ``tally serve`` need not load all the others."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple

import typer
from typer.core import TyperGroup


class Place(NamedTuple):
    """Where a command is: a function of a module, or a ``typer.Typer`` with commands of its own."""

    module: str
    attribute: str
    context_settings: Mapping[str, Any] | None = None


class OnDemandGroup(TyperGroup):
    """A group of the commands in ``PLACES``, in that order; subclasses say what they are."""

    PLACES: Mapping[str, Place] = {}

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of all commands."""
        return list(self.PLACES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of that name, None when there is none."""
        if cmd_name not in self.PLACES:
            # A misspelt name is answered with those it is near to.
            self.commands.update(dict.fromkeys(self.PLACES, self))
            return None
        return _command(cmd_name, self.PLACES[cmd_name])


def _command(name: str, place: Place) -> Any:
    found = getattr(import_module(place.module), place.attribute)
    if not isinstance(found, typer.Typer):
        settings = None if place.context_settings is None else dict(place.context_settings)
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
        alone.command(name, context_settings=settings)(found)
        return typer.main.get_command(alone)
    group = typer.main.get_group(found)
    group.name = name
    return group
