"""``tally token``: tokens of callers, with their rights and tenants."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from app.runtime.answers.node import IssuedTokenAnswer, TokenAnswer, TokenList
from app.runtime.principals import Right
from app.runtime.settings.config import load_settings
from app.runtime.state.kept_files import FIRST_TOKEN, KEPT_TOKENS, FirstToken
from app.trust import callers
from cli.client import LedgerClient, Service, given
from cli.options import Url
from ledger import names
from terminal.outcome import err, fail, tell
from terminal.program import Json

token = typer.Typer(no_args_is_help=True, help="Tokens: who may call the service, and for what.")


@token.command("new")
def new(
    name: Annotated[str, typer.Argument(help="Who holds it; stands in what is written with it as actor.")],
    url: Url,
    right: Annotated[
        list[str] | None, typer.Option("--right", "-r", help=f"What it allows: {', '.join(Right)}; again for each.")
    ] = None,
    tenant: Annotated[
        list[str] | None,
        typer.Option("--tenant", "-t", help="For which: a tenant, the beginning of some and *, or *; again for each."),
    ] = None,
    expires: Annotated[
        str | None, typer.Option("--expires", help="How long it counts, such as 30d.", show_default="for ever")
    ] = None,
    first: Annotated[
        bool, typer.Option("--first", help="The first one, with all rights, made beside the data, without the service.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Issue a token and print it, alone. Nobody can have it again.

    \b
    Examples:
      tally token new root --first > ~/.tally-token
      tally token new ci --right write --right read --tenant 'team-*' --expires 90d
      tally token new auditor -r audit -t '*'
    """
    if re.fullmatch(names.PRINCIPAL, name) is None:
        raise fail(f"{name!r} is no name: 1 to 128 letters, digits and . _ @ -, the first of them a letter or a digit")
    if first:
        if right or tenant or expires:
            raise fail("--first makes a token with all rights for all tenants; leave --right, --tenant and --expires")
        answer = {"name": name, "token": _first(name)}
    elif not right or not tenant:
        raise fail("say what it allows and for which tenants: --right R --tenant PATTERN, each as often as needed")
    else:
        body = given({"name": name, "rights": right, "tenants": tenant, "expires_in": expires})
        with LedgerClient(url) as client:
            answer = client.post("/v1/tokens", body, IssuedTokenAnswer)
    tell(answer, answer["token"], as_json=as_json)


def _first(name: str) -> str:
    """Make the first token and store its digest beside the data; returns its text."""
    folder: Path = load_settings().data_dir
    if FIRST_TOKEN.load(folder) is not None or KEPT_TOKENS.load(folder).counting:
        raise fail(f"there is a token already (beside {folder}): whoever holds it runs tally token new without --first")
    made = callers.new_token()
    folder.mkdir(parents=True, exist_ok=True)
    FIRST_TOKEN.store(folder, FirstToken(name, made.digest.hex()))
    err.print(f"it counts for the service whose data is in {folder.resolve()}", markup=False, soft_wrap=True)
    return made.text


@token.command("list")
def list_tokens(client: Service, as_json: Json = False) -> None:
    """List the tokens for tenants that the caller administers, newest first.

    \b
    Examples:
      tally token list
    """
    answer = client.get("/v1/tokens", TokenList)
    tell(answer, *(map(_told, answer["items"]) if answer["items"] else ("no token was issued",)), as_json=as_json)


@token.command("revoke")
def revoke(
    token_id: Annotated[str, typer.Argument(help="As tally token list has it.")], client: Service, as_json: Json = False
) -> None:
    """Let a token count no more.

    \b
    Examples:
      tally token revoke 0fd1c3a2b4e59687
    """
    answer = client.send("DELETE", f"/v1/tokens/{token_id}", None, TokenAnswer)
    tell(answer, f"{_told(answer)}; it counts no more", as_json=as_json)


def _told(answer: Mapping[str, Any]) -> str:
    ends = "revoked" if answer["revoked"] else f"to {answer['expires_at']}" if answer["expires_at"] else "for ever"
    rights, tenants = ", ".join(answer["rights"]), ", ".join(answer["tenants"])
    return f"{answer['token_id']} {answer['name']}: {rights} for {tenants}, {ends}"
