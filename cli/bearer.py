"""The token that ``tally`` shows the service: what ``TALLY_TOKEN`` holds, or the file that ``--token-file`` names.

Never an argument: what stands there, others on the machine can read.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from ledger.errors import ConfigurationError
from ledger.secret_text import token_in, token_text
from signing import files

VARIABLE = "TALLY_TOKEN"
_of_file: str | None = None
_REMEDY = f"What a command prints can be given as {VARIABLE}"


def option() -> Any:
    """``--token-file``, for a command that asks the service."""
    shape = typer.Typer(add_completion=False)
    shape.command()(_with_token_file)
    (found,) = typer.main.get_command(shape).params
    return found


def headers() -> dict[str, str]:
    """The headers that say who calls; none without a token.

    Raises:
        ConfigurationError: what should be a token cannot be one.
    """
    token = _of_file if _of_file is not None else token_text(os.environ.get(VARIABLE, ""), VARIABLE)
    return {"Authorization": f"Bearer {token}"} if token else {}


def _read(_context: object, _parameter: object, path: str | Path | None) -> None:
    global _of_file
    if path is None:
        return
    try:
        _of_file = token_in(files.read_regular(path), f"--token-file {path}")
    except OSError as error:
        raise ConfigurationError(f"--token-file {path} cannot be read: {error.strerror}. {_REMEDY}") from None
    if not _of_file:
        raise ConfigurationError(f"--token-file {path} is empty: it should hold a token, as tally token new prints it")


def _with_token_file(
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            callback=_read,
            expose_value=False,
            help=f"File with the token to show the service; else {VARIABLE} holds it.",
        ),
    ] = None,
) -> None:
    """The shape of the option."""
