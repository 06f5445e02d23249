"""How text and JSON get out of a pipeline command, and how it ends: as those of ``tally`` do."""

from __future__ import annotations

import orjson
from rich.console import Console

from ledger.exit_code import ExitCode


class CommandExit(SystemExit):
    """The end of a command with a code of its own choosing; typer's own exits are translated."""

    def __init__(self, code: int) -> None:
        super().__init__(int(code))


out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def print_json(value: object) -> None:
    """One JSON document on standard output."""
    out.print(orjson.dumps(value, option=orjson.OPT_INDENT_2).decode(), markup=False)


def fail(message: str, code: ExitCode = ExitCode.COULD_NOT_RUN) -> CommandExit:
    """Say on standard error why the command ends, and give the exit to raise."""
    err.print("[bold red]error:[/] ", end="")
    err.print(message, markup=False)
    return CommandExit(code)
