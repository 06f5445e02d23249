"""A program of typer commands: its exit, and the meaning of its exit codes."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NoReturn, Protocol, get_type_hints

import orjson
import typer

from ledger.errors import LedgerError
from ledger.exit_code import ExitCode, exit_code_of_error
from terminal.outcome import CommandExit, fail

EXIT_CODES: Final = (
    "Exit codes: 0 fine, 1 could not run, 2 tampered or corrupt, 3 incomplete, 4 unknown, expired or revoked key."
)
"""Shown under the list of commands."""

_USAGE_ERROR: Final = 2
"""Typer's code for a wrong command line; 2 says tampered here, so it becomes 1."""


def run(commands: Callable[[], object], said: Callable[[Exception], str | None] = lambda error: None) -> NoReturn:
    """Run a command with the arguments of this process; every error becomes one line and an exit code.

    ``said`` returns the line for an error that only the program knows.
    """
    try:
        commands()
    except CommandExit:
        raise
    except SystemExit as ended:
        raise SystemExit(ExitCode.COULD_NOT_RUN if ended.code == _USAGE_ERROR else ended.code) from None
    except (LedgerError, OSError) as error:
        raise fail(str(error), exit_code_of_error(error)) from None
    except (UnicodeError, orjson.JSONEncodeError) as error:
        if (fault := locale_fault()) is not None:
            raise fail(fault) from None
        if isinstance(error, UnicodeDecodeError):
            raise
        # Python decodes argument bytes that are not UTF-8 to lone surrogates, which cannot be printed.
        raise fail("an argument, or the name of a file, is not valid UTF-8") from None
    except Exception as error:
        if (line := said(error)) is None:
            raise
        raise fail(line) from None
    finally:
        # At exit the collector would walk over all loaded objects, 0.2 s in a pipeline.
        gc.freeze()
    raise CommandExit(ExitCode.FINE)


# --- a command as a dataclass -----------------------------------------------------------------------


class Command(Protocol):
    """A command with many options: a dataclass whose docstring is the help, and whose fields are the options.

    A field that is a dataclass itself is a group of options that several commands share.
    """

    def run(self) -> None:
        """Do the work."""


def command_of(asked: Callable[..., Command]) -> Callable[..., None]:
    """The function from which typer makes the command."""

    def command(**given: Any) -> None:
        _built(asked, given).run()

    options = [*_options_of(asked)]
    command.__doc__ = asked.__doc__
    command.__annotations__ = {each.name: each.annotation for each in options}
    vars(command)["__signature__"] = Signature(options)
    return command


def _options_of(asked: Any) -> Iterator[Parameter]:
    """The options of a command or a group."""
    hints = get_type_hints(asked, include_extras=True)
    for each in fields(asked):
        if is_dataclass(hints[each.name]):
            yield from _options_of(hints[each.name])
        else:
            default = Parameter.empty if each.default is MISSING else each.default
            yield Parameter(each.name, Parameter.KEYWORD_ONLY, default=default, annotation=hints[each.name])


def _built(asked: Any, given: dict[str, Any]) -> Any:
    """The command or group with its options of ``given``."""
    hints = get_type_hints(asked)
    groups = {each.name for each in fields(asked) if is_dataclass(hints[each.name])}
    own = {each.name: given[each.name] for each in fields(asked) if each.name in given}
    return asked(**own, **{name: _built(hints[name], given) for name in groups})


# --- how a program starts ---------------------------------------------------------------------------

OTHERS_WRITE: Final = 0o022
"""Permissions that group and others never get on files of our programs: a user who can write beside a key can replace
it."""

_given_umask: list[int] = []


def settle() -> None:
    """Open those of the descriptors 0, 1 and 2 that are closed, and make new files writable only by this user.

    Some daemons are started without the three. The next file or socket would get the number and receive the log, or
    libuv would end the process when it is closed. Python's own streams stay None if they were.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            os.set_inheritable(number, True)
    given = os.umask(0o077)
    os.umask(given | OTHERS_WRITE)
    _given_umask.append(given)


def restore_umask() -> None:
    """Restore the umask that this process was started with, for a command that replaces it."""
    if _given_umask:
        os.umask(_given_umask[0])


def locale_fault() -> str | None:
    """Why this process cannot use names that are not ASCII; None if it uses UTF-8."""
    encoding = sys.getfilesystemencoding()
    if encoding == "utf-8":
        return None
    return (
        f"a name or a text is not {encoding}, the encoding that LC_ALL, LANG or PYTHONUTF8 give this process: unset "
        "PYTHONUTF8, or set LC_ALL=C.UTF-8"
    )


# --- options of both programs -----------------------------------------------------------------------

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
KEYS_HELP: Final = "Public keys you trust: a PEM file, a folder of them, or a saved answer of /v1/keys"
Signatures = Annotated[
    Literal["any", "both"],
    typer.Option(
        "--signatures",
        help="With both, a snapshot or a checkpoint counts only if a first key and a second key, of ML-DSA-44, signed "
        "it; a snapshot with one counts as unsigned.",
    ),
]
State = Annotated[
    Path | None,
    typer.Option(
        "--state",
        metavar="DIR",
        file_okay=False,
        show_default="$XDG_STATE_HOME/tallystick, else ~/.local/state/tallystick",
        help="Where the newest checkpoint verified of each log is remembered, to compare with the next time.",
    ),
]
NoState = Annotated[bool, typer.Option("--no-state", help="Remember nothing, and compare with nothing remembered.")]
