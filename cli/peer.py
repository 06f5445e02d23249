"""``tally peer``: list the regions that a ledger exchanges with, retire a lost one, admit and revoke keys, and
exclude one whose facts must not count."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from app.runtime.answers.exchange import (
    AdmittedRegionAnswer,
    ExchangeAnswer,
    ExclusionAnswer,
    ExclusionList,
    RetiredAnswer,
    RevokedRegionKeyAnswer,
)
from cli.client import LedgerClient, Service, given
from cli.options import Tenant
from ledger.errors import InvalidInputError
from terminal.outcome import tell
from terminal.program import Json

Region = Annotated[str, typer.Argument(metavar="REGION", help="The region, as tally peer list names it.")]
Reason = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; goes on record with your name.")]

peer = typer.Typer(no_args_is_help=True, help="Regions that the ledger exchanges with.")


@peer.command("list")
def list_peers(client: Service, as_json: Json = False) -> None:
    """List the peers: how far each is imported, what it waits for, what fails, and which regions are retired.

    Where the exchange waits for a key, the line says which key, and the
    command that admits it, here or at the other ledger.

    \b
    Examples:
      tally peer list
      tally peer list --json
    """
    answer = client.get("/v1/exchange", ExchangeAnswer)
    known = {each["region"] for each in answer["peers"]}
    tell(
        answer,
        f"region {answer['region']}, this ledger; regions counted: {answer['regions_counted']}, "
        f"a majority is {answer['majority']}",
        *[line for each in answer["peers"] for line in _told(each)],
        *[_retired(each) for each in answer["retired"] if each["region"] not in known],
        as_json=as_json,
    )


@peer.command("retire")
def retire(
    region: Region,
    client: Service,
    reason: Reason,
    force: Annotated[bool, typer.Option("--force", help="Retire it although its ledger answers.")] = False,
    as_json: Json = False,
) -> None:
    """Give up a region whose ledger is lost for good.

    This ledger counts it in no majority any more, imports nothing from it,
    and refuses its ledger (region-retired) if it returns. What was imported stays. Run it
    at one node of each living region; docs/runbook.md says when.

    \b
    Examples:
      tally peer retire eu1 --reason "data centre burnt down, disks lost"
    """
    answer = client.post(
        f"/v1/exchange/regions/{region}/retire", given({"reason": reason, "force": force or None}), RetiredAnswer
    )
    tell(answer, _retired(answer), "run the same at one node of each other living region", as_json=as_json)


@peer.command("admit")
def admit(
    region: Region,
    key_id: Annotated[str, typer.Argument(metavar="KEY_ID", help="The key, as tally keys list names it there.")],
    client: Service,
    as_json: Json = False,
) -> None:
    """Trust a key that the ledger of a region signs with. If the region was retired, it counts again.

    The key is fetched from the address of the peer, which must answer.
    Compare its id with what the operator there says first: who holds a
    trusted key can add entries here.

    \b
    Examples:
      tally peer admit eu1 06e3fd8fda29bb60
    """
    answer = client.post(f"/v1/exchange/regions/{region}/admit", {"key_id": key_id}, AdmittedRegionAnswer)
    tell(
        answer,
        f"key {answer['key_id']} ({answer['algorithm']}) of region {answer['region']} is trusted here",
        as_json=as_json,
    )


@peer.command("revoke")
def revoke(
    region: Region,
    key_id: Annotated[str, typer.Argument(metavar="KEY_ID", help="The key that is trusted no longer.")],
    client: Service,
    reason: Reason,
    as_json: Json = False,
) -> None:
    """Trust a key of a region's ledger no longer, at all nodes, also where a file of trusted keys has it.

    What it brought before stays; nothing that it signs is imported any more,
    not even by hand. tally peer admit trusts it again.

    \b
    Examples:
      tally peer revoke eu1 06e3fd8fda29bb60 --reason "stolen with a laptop"
    """
    answer = client.post(
        f"/v1/exchange/regions/{region}/revoke", {"key_id": key_id, "reason": reason}, RevokedRegionKeyAnswer
    )
    tell(answer, f"key {answer['key_id']} of region {answer['region']} is trusted no longer", as_json=as_json)


Log = Annotated[
    str,
    typer.Argument(
        metavar="REGION|LOG", help="A region, as tally peer list names it, or the log in origin of an event."
    ),
]


@peer.command("exclude")
def exclude(region: Log, tenant: Tenant, client: Service, reason: Reason, as_json: Json = False) -> None:
    """Count no facts of a region in a tenant any more, earlier ones included.

    They stay on record. Every ledger that imports the entry, and every
    verifier, leaves them out of the states of the tenant's jobs.

    \b
    Examples:
      tally peer exclude eu1 -t acme --reason "its scheduler cancels our jobs"
      tally peer exclude eu.example/acme -t acme --reason "its key was stolen"
    """
    _state(client, region, tenant, reason, as_json, excluded=True)


@peer.command("include")
def include(region: Log, tenant: Tenant, client: Service, reason: Reason, as_json: Json = False) -> None:
    """Count the facts of a region in a tenant again.

    \b
    Examples:
      tally peer include eu1 -t acme --reason "its scheduler is repaired"
    """
    _state(client, region, tenant, reason, as_json, excluded=False)


@peer.command("excluded")
def excluded(tenant: Tenant, client: Service, as_json: Json = False) -> None:
    """List the logs that a tenant excluded, or included again, with the newest statement about each.

    \b
    Examples:
      tally peer excluded -t acme
    """
    answer = client.get("/v1/exclusions", ExclusionList, tenant_id=tenant)
    lines = [_stated(each) for each in answer["items"]] or [f"tenant {tenant} never excluded a log"]
    tell(answer, *lines, as_json=as_json)


def _state(client: LedgerClient, region: str, tenant: str, reason: str, as_json: bool, *, excluded: bool) -> None:
    log = region if "/" in region else _log_of(client, region, tenant)
    body = {"tenant_id": tenant, "log": log, "reason": reason, "excluded": excluded}
    answer = client.post("/v1/exclusions", body, ExclusionAnswer)
    tell(answer, _stated(answer), as_json=as_json)


def _log_of(client: LedgerClient, region: str, tenant: str) -> str:
    """The tenant's log in the ledger of a region."""
    known = client.get("/v1/exchange", ExchangeAnswer)
    for each in (*known["peers"], *known["retired"]):
        if each["region"] == region and each["log_origin"]:
            return f"{each['log_origin']}/{tenant}"
    raise InvalidInputError(
        f"no log of a region {region} was seen here: name the log instead; tally jobs -t {tenant} JOB prints it beside "
        "an event"
    )


def _stated(each: dict[str, Any]) -> str:
    what = "is excluded" if each["excluded"] else "counts"
    by = f" by {each['actor']}" if each["actor"] else ""
    where = f", stated by {each['stated_by']}" if each["stated_by"] else ""
    return f"{each['log']} {what} since {each['at']}{by}{where}, seq {each['seq']}, because: {each['reason']}"


def _told(each: dict[str, Any]) -> list[str]:
    if each["retired"] is not None:
        return [f"{_retired(each['retired'])}, {each['url']}"]
    state = "waits for a key" if each["waits_for"] else "fails" if each["fault"] else "follows"
    lines = [
        f"region {each['region']}, {each['url']}: {state}, lacking {each['lag_entries']} entries, "
        f"imported {each['imported_entries']}"
    ]
    return lines + [f"  {text}" for text in each["waits_for"] or ([each["fault"]] if each["fault"] else [])]


def _retired(each: dict[str, Any]) -> str:
    since = f" since {each['retired_at']}" if each["retired_at"] else ""
    by = f" by {each['retired_by']}" if each["retired_by"] else ""
    return (
        f"region {each['region']}: retired{since}{by}, because: {each['reason']}; entries seen there and not imported: "
        f"{each['lag_entries']}"
    )
