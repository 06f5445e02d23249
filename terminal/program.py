"""A program of typer commands: how it ends, and what its exit codes mean."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Final, NoReturn

import orjson

from ledger.errors import LedgerError
from ledger.exit_code import ExitCode, exit_code_of_error
from terminal.outcome import CommandExit, fail
from terminal.surroundings import locale_fault

EXIT_CODES: Final = (
    "Exit codes: 0 fine, 1 could not run, 2 tampered or corrupt, 3 incomplete, 4 unknown, expired or revoked key."
)
"""To be shown under the list of commands."""

_USAGE_ERROR: Final = 2
"""Typer's code for a wrong command line; 2 says tampered here, so it becomes 1."""


def run(commands: Callable[[], object], said: Callable[[Exception], str | None] = lambda error: None) -> NoReturn:
    """Run a command with the arguments of this process; every error becomes one line and an exit code.

    ``said`` returns the line for an error that is of the program alone.
    """
    try:
        commands()
    except CommandExit:
        raise
    except SystemExit as ended:
        raise SystemExit(ExitCode.COULD_NOT_RUN if ended.code == _USAGE_ERROR else ended.code) from None
    except LedgerError as error:
        raise fail(str(error), exit_code_of_error(error)) from None
    except OSError as error:
        raise fail(str(error)) from None
    except (UnicodeError, orjson.JSONEncodeError) as error:
        if (fault := locale_fault()) is not None:
            raise fail(fault) from None
        if isinstance(error, UnicodeDecodeError):
            raise
        # Python takes bytes of arguments that are no text for halves of characters, which nothing can be told in.
        raise fail("an argument, or the name of a file, is not valid UTF-8") from None
    except Exception as error:
        if (line := said(error)) is None:
            raise
        raise fail(line) from None
    finally:
        # The collector would go through all that was loaded before the process ends, 0.2 s of a pipeline's.
        gc.freeze()
    raise CommandExit(ExitCode.FINE)
