"""``tally caller``: keys of callers, whose events only they can make."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode

import typer
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from app.runtime.answers.exchange import CallerAnswer, CallerList
from cli.client import Service, given
from cli.options import Tenant
from ledger.errors import InvalidInputError, reported_as
from ledger.facts.events import JOB_EVENTS
from signing import private_keys
from signing.keys import ED25519, PublicKey
from terminal.outcome import tell
from terminal.program import Json

caller = typer.Typer(no_args_is_help=True, help="Callers that sign their events, so that nobody else can make them.")

KeyId = Annotated[str, typer.Argument(metavar="KEY_ID", help="The caller's key, as tally caller list names it.")]


@caller.command("new")
def new(
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
def revoke(
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
