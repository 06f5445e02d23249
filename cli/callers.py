"""``tally token``: tokens of callers, with their rights and tenants. ``tally caller``: keys of callers that sign."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode

import typer
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from app.runtime.answers.exchange import CallerAnswer, CallerList
from app.runtime.answers.node import IssuedTokenAnswer, TokenAnswer, TokenList
from app.runtime.principals import Right
from cli.client import LedgerClient, Service, given
from cli.options import Tenant, Url
from ledger import names
from ledger.errors import InvalidInputError, reported_as
from ledger.facts.events import JOB_EVENTS
from signing import private_keys
from signing.keys import ED25519, PublicKey
from terminal.outcome import err, fail, tell
from terminal.program import Json

token = typer.Typer(no_args_is_help=True, help="Tokens: who may call the service, and for what.")


@token.command("new")
def new_token(
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
    # Imported here, because only this reads the settings of the service.
    from app.runtime.settings.config import load_settings
    from app.runtime.state.kept_files import FIRST_TOKEN, KEPT_TOKENS, FirstToken
    from app.trust import callers

    folder: Path = load_settings().data_dir
    if FIRST_TOKEN.load(folder) is not None or KEPT_TOKENS.load(folder).counting:
        raise fail(f"there is a token already (beside {folder}): its holder runs tally token new without --first")
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
    tell(answer, *(map(_told_token, answer["items"]) if answer["items"] else ("no token was issued",)), as_json=as_json)


@token.command("revoke")
def revoke_token(
    token_id: Annotated[str, typer.Argument(help="As tally token list has it.")], client: Service, as_json: Json = False
) -> None:
    """Let a token count no more.

    \b
    Examples:
      tally token revoke 0fd1c3a2b4e59687
    """
    answer = client.send("DELETE", f"/v1/tokens/{token_id}", None, TokenAnswer)
    tell(answer, f"{_told_token(answer)}; it counts no more", as_json=as_json)


def _told_token(answer: Mapping[str, Any]) -> str:
    ends = "revoked" if answer["revoked"] else f"to {answer['expires_at']}" if answer["expires_at"] else "for ever"
    rights, tenants = ", ".join(answer["rights"]), ", ".join(answer["tenants"])
    return f"{answer['token_id']} {answer['name']}: {rights} for {tenants}, {ends}"


# --- keys of callers --------------------------------------------------------------------------------


caller = typer.Typer(no_args_is_help=True, help="Callers that sign their events, so that nobody else can make them.")

KeyId = Annotated[str, typer.Argument(metavar="KEY_ID", help="The caller's key, as tally caller list names it.")]


@caller.command("new")
def new_caller(
    name: Annotated[str, typer.Argument(help="Who signs: goes on record with the key.")],
    client: Service,
    key: Annotated[
        Path, typer.Option("--key", metavar="FILE", help="The caller's key in PEM; an Ed25519 key is made if absent.")
    ],
    tenant: Annotated[
        list[str],
        typer.Option("--tenant", "-t", help="For which: a tenant, the beginning of some and *, or *; again for each."),
    ],
    as_json: Json = False,
) -> None:
    """Register the key of a caller: an entry of _system says so.

    FILE may hold a public key, or a private one, of which the public half
    is registered. The private half is the caller's alone: keep it from
    the machines of the ledger, and use it with tally run --sign.

    \b
    Examples:
      tally caller new backup --key backup.pem --tenant nightly
      tally caller new ci --key ci-public.pem -t 'team-*'
    """
    if not key.exists():
        private_keys.generate(key, ED25519)
    body = {"name": name, "tenants": tenant, "public_key_pem": _public_pem(key)}
    answer = client.post("/v1/callers", body, CallerAnswer)
    tell(answer, f"caller {name} signs with key {answer['key_id']}, {_of(answer)}", as_json=as_json)


@caller.command("list")
def list_callers(client: Service, as_json: Json = False) -> None:
    """List the callers that sign events, and what must be signed.

    \b
    Examples:
      tally caller list
    """
    answer = client.get("/v1/callers", CallerList)
    lines = [f"{each['key_id']} {each['name']}, {each['algorithm']}, {_of(each)}" for each in answer["callers"]]
    newest = {each["tenant_id"]: each for each in answer["signatures_required"]}
    lines += [f"tenant {name}: {_required(each)} from HLC {each['from_hlc']} on" for name, each in newest.items()]
    tell(answer, *(lines or ["no caller signs events"]), as_json=as_json)


@caller.command("revoke")
def revoke_caller(
    key_id: KeyId,
    client: Service,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; goes on record with your name.")],
    from_hlc: Annotated[
        str | None, typer.Option("--from-hlc", metavar="HLC", help="From when on.", show_default="in two seconds")
    ] = None,
    as_json: Json = False,
) -> None:
    """Let no event count that a key signed, from now or from an HLC on; for good.

    \b
    Examples:
      tally caller revoke 06e3fd8fda29bb60 --reason "the machine was sold"
    """
    query = urlencode(given({"reason": reason, "from_hlc": from_hlc}))
    answer = client.send("DELETE", f"/v1/callers/{key_id}?{query}", None, CallerAnswer)
    tell(answer, f"caller {answer['name']}: key {key_id} is {_of(answer)}", as_json=as_json)


@caller.command("require")
def require(
    tenant: Tenant,
    client: Service,
    event: Annotated[
        list[str] | None,
        typer.Option("--event", metavar="TYPE", help=f"{', '.join(JOB_EVENTS)}; again for each; none: nothing."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say which events of a tenant their callers must sign. Others are refused, and named by every verifier.

    \b
    Examples:
      tally caller require -t nightly --event JobCompleted --event JobFailed
      tally caller require -t nightly
    """
    answer = client.send("PUT", f"/v1/tenants/{tenant}/signatures", {"types": event or []}, CallerList)
    newest = answer["signatures_required"][-1]
    tell(answer, f"tenant {tenant}: {_required(newest)} from HLC {newest['from_hlc']} on", as_json=as_json)


def _public_pem(path: Path) -> str:
    """The public key in a file, or the public half of the private one; never sends the other half."""
    with reported_as(InvalidInputError, f"{path} holds no key in PEM", OSError, ValueError, TypeError):
        text = path.read_text()
        if "PRIVATE KEY" not in text:
            return PublicKey.of(text).public_key_pem
        private: Any = load_pem_private_key(text.encode(), password=None)
    return PublicKey.of(private.public_key()).public_key_pem


def _required(each: dict[str, Any]) -> str:
    return f"{', '.join(each['types']) or 'nothing'} must be signed"


def _of(each: dict[str, Any]) -> str:
    revoked = "" if each["revoked_from_hlc"] is None else f"revoked from HLC {each['revoked_from_hlc']} on, "
    return f"{revoked}for {', '.join(each['tenants'])}"
