"""``tally witness``: submit a cosigned checkpoint, list the cosignatures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from app.runtime.answers.chain import CosignatureList, CosignedAnswer, WitnessesAnswer
from cli.client import Service
from cli.options import Tenant
from ledger.errors import UnknownKeyError
from ledger.exit_code import ExitCode
from ledger.verification.verdict import quorum_lines
from signing import note as notes
from signing.files import open_regular
from signing.note import WitnessKey, cosignatures_of
from terminal.outcome import CommandExit, counted, tell
from terminal.program import Json

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
