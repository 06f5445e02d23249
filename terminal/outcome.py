"""How text and JSON get out of a command, and how it ends.

Results go to standard output, everything else (progress, warnings, errors) to standard error, so that
``--json`` output can be piped.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Mapping
from typing import Any, Literal

import orjson
from rich.console import Console
from rich.text import Text

from ledger.exit_code import ExitCode
from ledger.printable import printable


class CommandExit(SystemExit):
    """The end of a command with a code of its own choosing; typer's own exits are translated."""

    def __init__(self, code: int) -> None:
        super().__init__(int(code))


class PlainConsole(Console):
    """A console on which every text, in tables too, is shown as it is: no emoji, nothing that a terminal obeys."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False, soft_wrap=True, emoji=False)

    def render_str(self, text: str, **more: Any) -> Text:
        """As rich has it, of what is left when control characters are written out."""
        return super().render_str(printable(text), **more)


class ErrorConsole(PlainConsole):
    """Standard error. What cannot be written there is lost, and the command goes on: a full disk below its log is no
    reason not to do what it was called for."""

    wait_max_s: float | None = None
    """How long a reader that does not read is waited for; for ever when None, as with a pager."""

    def __init__(self) -> None:
        super().__init__(stderr=True)

    def print(self, *said: Any, **how: Any) -> None:
        """As rich has it, while somebody takes it."""
        if self.wait_max_s is not None and not _is_taken_within(self.wait_max_s):
            lose("stderr")
        try:
            super().print(*said, **how)
        except OSError:
            lose("stderr")

    def on_broken_pipe(self) -> None:
        """As any other error of writing; rich would end the command."""
        lose("stderr")


def _is_taken_within(seconds: float) -> bool:
    """Whether standard error takes something before so many seconds are over."""
    waiting = select.poll()
    waiting.register(2, select.POLLOUT)
    return bool(waiting.poll(seconds * 1000))


out = PlainConsole()
err = ErrorConsole()


def lose(stream: Literal["stdout", "stderr"]) -> None:
    """Drop what waits for this stream of ours, and what is written to it from now on; nobody takes it.

    Python would try again at its end, and end with a code of its own. Commands that we run keep the stream as it is.
    """
    setattr(sys, stream, open(os.devnull, "w"))  # noqa: SIM115 (for as long as we run)


def print_json(value: object) -> None:
    """One JSON document on standard output, names of files in it as ``readable`` has them."""
    try:
        document = orjson.dumps(value, option=orjson.OPT_INDENT_2)
    except orjson.JSONEncodeError:
        document = orjson.dumps(_readable_within(value), option=orjson.OPT_INDENT_2)
    print(document.decode(), file=out.file)


def readable(named: object) -> str:
    """The text of a file's name, or of an error with one; bytes of it that are no UTF-8 are escaped."""
    return str(named).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _readable_within(value: Any) -> Any:
    if isinstance(value, str):
        return readable(value)
    if isinstance(value, Mapping):
        return {name: _readable_within(each) for name, each in value.items()}
    return [_readable_within(each) for each in value] if isinstance(value, list | tuple) else value


def tell(value: object, *lines: str, as_json: bool) -> None:
    """What a command came to: ``value`` as one JSON document, else ``lines`` for people, as they are."""
    if as_json:
        print_json(value)
        return
    for line in lines:
        out.print(line, markup=False)


def fail(message: str, code: ExitCode = ExitCode.COULD_NOT_RUN) -> CommandExit:
    """Say on standard error why the command ends, and give the exit to raise."""
    err.print("[bold red]error:[/] ", end="")
    err.print(message, markup=False)
    return CommandExit(code)
