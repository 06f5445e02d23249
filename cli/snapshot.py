"""``tally snapshot``: sign the entries chained so far."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Annotated, Any

import orjson
import typer

from app.runtime.answers.chain import SnapshotAnswer, TenantList
from cli.client import LedgerClient, Service
from ledger.errors import InvalidInputError
from ledger.exit_code import ExitCode
from ledger.facts.events import SYSTEM_TENANT
from tallystick_client import ProblemError
from terminal.outcome import CommandExit, counted, err, print_json, tell
from terminal.program import Json

PAGE_TENANTS = 1000
"""Tenants in one page."""
TENANTS_NAMED = 10
"""Most tenants that one line names."""


def snapshot(
    client: Service,
    tenant: Annotated[str | None, typer.Option("--tenant", "-t", help="Tenant whose chain is signed.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Sign the chains of all tenants, and of _system.")] = False,
    as_json: Json = False,
) -> None:
    """Sign a snapshot of a tenant's chain, or of all, now instead of when the batch is full.

    Where the service has chain.sign_snapshots off, it is made unsigned.

    With --all a tenant whose chain cannot be signed is told, the others are
    signed all the same, and the exit code is 1.

    \b
    Examples:
      tally snapshot --tenant acme
      tally snapshot -t acme --json
      tally snapshot --all
    """
    if (tenant is None) is not every:
        raise InvalidInputError("say which chains: --tenant T, or --all")
    if tenant is not None:
        _told(_sign(client, tenant), as_json)
        return
    made, problems = _sign_all(client, as_json)
    if as_json:
        print_json({"snapshots": made, "problems": problems})
    if problems:
        raise CommandExit(ExitCode.COULD_NOT_RUN)


def _sign_all(client: LedgerClient, as_json: bool) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    made: list[dict[str, Any]] = []
    refused: dict[str, list[str]] = {}
    is_patient = True
    # The ledger's own chain last, to include the entries that the others cause in it.
    pages = client.pages("/v1/tenants", TenantList, limit=PAGE_TENANTS)
    listed = (item["tenant_id"] for page in pages for item in page["items"])
    for tenant in sorted(listed, key=lambda name: (name == SYSTEM_TENANT, name)):
        try:
            made.append(_sign(client, tenant, is_patient=is_patient))
        except ProblemError as error:
            # A node that did not sign within the patience is tried once for each other tenant, without waiting.
            is_patient = is_patient and error.kind != "signing-unavailable"
            refused.setdefault(str(error), []).append(tenant)
        else:
            if not as_json:
                _told(made[-1], as_json)
    for problem, tenants in refused.items():
        err.print(f"{_named(tenants)}: {problem}", style="bold red", markup=False)
    return made, [{"tenant_id": each, "problem": problem} for problem, tenants in refused.items() for each in tenants]


def _named(tenants: Sequence[str]) -> str:
    named, more = ", ".join(tenants[:TENANTS_NAMED]), len(tenants) - TENANTS_NAMED
    return f"{'tenant' if len(tenants) == 1 else 'tenants'} {named}" + (f" and {more:,} more" if more > 0 else "")


def _sign(client: LedgerClient, tenant: str, *, is_patient: bool = True) -> dict[str, Any]:
    reply = client.ask("POST", "/v1/snapshots", content=orjson.dumps({"tenant_id": tenant}), repeatable=is_patient)
    return {**client.json(reply, SnapshotAnswer), "is_new": reply.status == HTTPStatus.CREATED}


def _told(answer: dict[str, Any], as_json: bool) -> None:
    signs = "signs" if answer["dsse_envelope"] is not None else "covers, unsigned,"
    signed = f"seq {answer['from_seq']} to {answer['to_seq']}, {counted(answer['entry_count'], 'entry', 'entries')}"
    made = f"snapshot {answer['id']} of tenant {answer['tenant_id']} {signs} {signed}"
    newest = f"newest is snapshot {answer['id']}, which {signs} {signed}"
    tell(
        answer,
        made if answer["is_new"] else f"tenant {answer['tenant_id']}: nothing new to sign; {newest}",
        f"Merkle root {answer['merkle_root']}, HLC {answer['snapshot_hlc']}",
        as_json=as_json,
    )
