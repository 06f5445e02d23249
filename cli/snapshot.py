"""``tally snapshot``: sign the entries chained so far; ``tally witness``: submit a cosigned checkpoint, list the
cosignatures.
"""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.table import Table

from app.runtime.answers.chain import CosignatureList, CosignedAnswer, SnapshotAnswer, TenantList, WitnessesAnswer
from cli.client import LedgerClient, Service
from cli.options import Tenant
from ledger.errors import InvalidInputError, UnknownKeyError
from ledger.exit_code import ExitCode
from ledger.facts.events import SYSTEM_TENANT
from ledger.verification.verdict import quorum_lines
from signing import note as notes
from signing.files import open_regular
from signing.note import WitnessKey, cosignatures_of
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


# --- cosignatures of witnesses ----------------------------------------------------------------------


NOTE_BYTES_MAX = 1 << 20

witness = typer.Typer(no_args_is_help=True, help="Cosignatures of witnesses on a tenant's checkpoints.")


@witness.command("add")
def add(
    tenant: Tenant,
    note: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="The cosigned checkpoint.")],
    verifier_key: Annotated[
        str, typer.Option("--verifier-key", help="The witness's key, name+hash+base64, as it published it.")
    ],
    client: Service,
    as_json: Json = False,
) -> None:
    """Hand in a checkpoint that a witness cosigned, once its cosignature is found to hold.

    The service takes cosignatures of those witnesses only that its setting log.witnesses names.

    \b
    Examples:
      tally witness add -t acme --verifier-key "$(cat w1.vkey)" cosigned.checkpoint
    """
    with open_regular(note) as file:
        content = file.read(NOTE_BYTES_MAX + 1)
    key = WitnessKey.parse(verifier_key)
    if not cosignatures_of(notes.parse(content), [key]):
        raise UnknownKeyError(f"{note} has no cosignature by {key.name}+{key.key_hash.hex()}; nothing was sent")
    answer = client.json(
        client.ask("POST", f"/v1/log/{tenant}/cosignatures", content=content, content_type="text/plain"), CosignedAnswer
    )
    names = ", ".join(WitnessKey.parse(each["witness"]).name for each in answer["added"])
    tell(answer, f"checkpoint of size {answer['tree_size']} of tenant {tenant} is cosigned by {names}", as_json=as_json)


@witness.command("status")
def status(tenant: Tenant, client: Service, as_json: Json = False) -> None:
    """Show how far each witness has cosigned a tenant's log, and whether the quorum of the node's policy is met.

    Exit codes: 0 the quorum covers the newest checkpoint; 3 it does not, or
    the node has no policy (log.policy). Verifiers with a policy of their own
    use tally verify --policy.

    \b
    Examples:
      tally witness status --tenant acme
    """
    answer = client.get(f"/v1/log/{tenant}/witnesses", WitnessesAnswer)
    policy, size = answer["policy"], answer["tree_size"]
    table = Table("witness", "entries", "time", "holds", "fault")
    for each in answer["witnesses"]:
        table.add_row(each["name"], str(each["tree_size"]), each["time"] or "", each["status"], each["fault"] or "")
    if policy is None:
        said = "the node has no policy: its setting log.policy names no tlog-policy file (docs/formats/policy.md)"
    else:
        said = f"of {counted(size, 'entry', 'entries')}: {quorum_lines(answer)[0]}"
    tell(answer, *([table] if answer["witnesses"] else []), said, as_json=as_json)
    raise CommandExit(ExitCode.FINE if policy is not None and policy["met"] else ExitCode.INCOMPLETE)


@witness.command("list")
def list_cosignatures(tenant: Tenant, client: Service, as_json: Json = False) -> None:
    """List the newest cosignatures on a tenant's checkpoints, and whether each holds.

    \b
    Examples:
      tally witness list --tenant acme
    """
    answer = client.get(f"/v1/log/{tenant}/cosignatures", CosignatureList)
    table = Table("entries", "time", "holds", "witness")
    for each in answer["items"]:
        table.add_row(str(each["tree_size"]), each["time"], each["status"], each["witness"].partition("+")[0])
    none = (
        f"no checkpoint of tenant {tenant} is cosigned: a node whose log.policy names a tlog-policy file asks its "
        "witnesses (docs/formats/policy.md), and tally witness add hands in what another one signed"
    )
    tell(answer, table if answer["items"] else none, as_json=as_json)
