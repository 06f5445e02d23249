"""The service for commands: the Python client, with the token of ``tally`` and a check of each answer.

An answer is JSON of the shape that the command reads, a TypedDict; further members are kept. Any other answer is a
``NotTheLedgerError``.

The token is what ``TALLY_TOKEN`` holds, or the file that ``--token-file`` names. It is never an argument, because other
users of the machine can read arguments.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import orjson
import typer

from cli.options import local_url
from ledger.decoding import convert
from ledger.errors import ConfigurationError, InvalidInputError, LedgerError
from ledger.text import secret_text, token_in, token_text, without_login
from signing import files
from signing.keys import Keyring
from tallystick_client import Client, NotTheLedgerError, ProblemError, Reply, TallystickError, UnreachableError
from tallystick_client.command import in_words, wait_line
from tallystick_client.core import OnWait, no_ledger, value_of
from tallystick_client.transport import listing
from terminal.outcome import err

Value = TypeVar("Value")

TIMEOUT_S = 60.0
"""Longest time for one request and its whole answer; above ``write.timeout``, so that the service's own answer comes
first."""
PATIENCE_S = 5.0
"""How long a request is retried by default before the command fails, as a user waits at the screen."""
TOKEN_VARIABLE = "TALLY_TOKEN"  # noqa: S105 (its name)
_TEXT = "text/plain"
_token_of_file: str | None = None

CALL_ERRORS = (LedgerError, TallystickError)
"""Errors of a call."""


class LedgerClient(Client):
    """The service at ``url``, or the services at several, with commas."""

    def __init__(
        self,
        url: str,
        *,
        spool: Path | None = None,
        patience_s: float = PATIENCE_S,
        timeout_s: float = TIMEOUT_S,
        on_wait: OnWait | None = None,
        sign_with: Path | None = None,
        keep_forbidden: bool = False,
    ) -> None:
        url = secret_text(url, "the address of the service").strip().rstrip("/")
        self.url = without_login(url)
        """For messages."""
        try:
            super().__init__(
                url,
                token=_token() or None,
                spool=spool,
                patience_s=patience_s,
                timeout_s=timeout_s,
                on_wait=on_wait,
                sign_with=sign_with,
                keep_forbidden=keep_forbidden,
            )
        except ValueError as error:
            is_signing = sign_with is not None or "TALLY_SIGN_KEY" in os.environ
            raise (InvalidInputError if is_signing else UnreachableError)(str(error)) from None
        except OSError as error:
            if error.filename == str(key := sign_with or os.environ.get("TALLY_SIGN_KEY")):
                raise InvalidInputError(f"the key to sign with, {key}: {error.strerror}") from None
            raise ConfigurationError(
                f"TALLY_CA {os.environ.get('TALLY_CA')} is no file of CA certificates in PEM: {error}"
            ) from None

    def get(self, path: str, shape: Any = dict, /, **params: Any) -> Any:
        """The JSON that ``GET path`` answers; parameters that are None are left out.

        Raises:
            ProblemError: the service refused.
            UnreachableError: no answer within the patience.
            NotTheLedgerError: the answer is not of ``shape``, or no ledger sent it.
        """
        return self.json(self.ask("GET", path, params=params), shape)

    def get_text(self, path: str) -> str:
        """The text that ``GET path`` answers; errors as ``get``."""
        reply = self.ask("GET", path)
        if reply.headers.get("Content-Type", "").partition(";")[0] != _TEXT:
            raise no_ledger(reply)
        return reply.content.decode("utf-8", "replace")

    def post(self, path: str, body: Mapping[str, Any], shape: Any = dict, /, **how: Any) -> Any:
        """The JSON that ``POST path`` answers, as ``send``."""
        return self.send("POST", path, body, shape, **how)

    def send(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        shape: Any = dict,
        *,
        key: str | None = None,
        repeatable: bool | None = None,
    ) -> Any:
        """The JSON answer to a request with this body; errors as ``get``. A POST is retried with an Idempotency-Key
        ``key``, or if it is ``repeatable``, so that a repetition has no effect."""
        content = None if body is None else orjson.dumps(body)
        return self.json(self.ask(method, path, content=content, key=key, repeatable=repeatable), shape)

    @listing
    async def pages(self, path: str, shape: Any, /, **params: Any) -> AsyncGenerator[dict[str, Any], None]:
        """The pages of a list, each of ``shape``; errors as ``get``."""
        async for page in self._core.pages(path, params):
            yield self.checked(page, shape)

    def json(self, reply: Reply, shape: Any) -> Any:
        """The JSON of an answer; errors as ``get``."""
        return self.checked(value_of(reply), shape)

    def checked(self, value: Any, shape: Any) -> Any:
        """``value``, of an answer.

        Raises:
            NotTheLedgerError: it is not of ``shape``.
        """
        try:
            convert(value, shape)
        except msgspec.ValidationError as error:
            raise NotTheLedgerError(f"{self.url} does not answer as a Tallystick does: {error}") from None
        return value


def _connected(context: typer.Context, url: str) -> LedgerClient:
    """The service at ``url``, until the command ends."""
    return context.with_resource(LedgerClient(url))


Service = Annotated[
    LedgerClient,
    typer.Option(
        "--url",
        envvar="TALLY_URL",
        default_factory=local_url,
        parser=str,
        metavar="<str>",
        callback=_connected,
        show_default="the local service",
        help="Address of the service.",
    ),
]


def trusted_keys(keys: Path | None, client: LedgerClient) -> Keyring:
    """The keys that ``--keys`` names, else those that the service publishes."""
    return Keyring.load(keys) if keys is not None else Keyring.from_json(client.get("/v1/keys"))


def said(error: Exception) -> str | None:
    """The message of an error of a call, in one line; None for any other error."""
    if isinstance(error, LedgerError):
        return str(error)
    if not isinstance(error, TallystickError):
        return None
    text = in_words(error)
    if isinstance(error, ProblemError) and error.status == HTTPStatus.UNAUTHORIZED:
        return f"{text} (tally sends the token in {TOKEN_VARIABLE} or --token-file)"
    return text


def print_wait(error: Exception, delay_s: float) -> None:
    """For ``on_wait``: print it on the screen."""
    err.print(wait_line(error, delay_s), markup=False)


def given(values: Mapping[str, Value | None]) -> dict[str, Value]:
    """``values`` without those that are None."""
    return {name: value for name, value in values.items() if value is not None}


# --- the token ----------------------------------------------------------------------------------------


def token_option() -> Any:
    """``--token-file``, for a command that calls the service."""
    shape = typer.Typer(add_completion=False)
    shape.command()(_with_token_file)
    (found,) = typer.main.get_command(shape).params
    return found


def _token() -> str:
    """The caller's token; empty without one.

    Raises:
        ConfigurationError: the text cannot be a token.
    """
    return token_text(os.environ.get(TOKEN_VARIABLE, ""), TOKEN_VARIABLE) if _token_of_file is None else _token_of_file


def _read_token(_context: object, _parameter: object, path: str | Path | None) -> None:
    global _token_of_file
    if path is None:
        return
    try:
        _token_of_file = token_in(files.read_regular(path), f"--token-file {path}")
    except OSError as error:
        raise ConfigurationError(
            f"--token-file {path} cannot be read: {error.strerror}. What a command prints can be given as "
            f"{TOKEN_VARIABLE}"
        ) from None
    if not _token_of_file:
        raise ConfigurationError(f"--token-file {path} is empty: it should hold a token, as tally token new prints it")


def _with_token_file(
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            callback=_read_token,
            is_eager=True,
            expose_value=False,
            help=f"File with the token to send; else {TOKEN_VARIABLE} holds it.",
        ),
    ] = None,
) -> None:
    """The shape of the option."""
