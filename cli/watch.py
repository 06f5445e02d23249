"""``tally watch``: a chain as it grows, one line an entry, for as long as somebody looks."""

from __future__ import annotations

from typing import Annotated, Final

import orjson
import typer

from app.runtime.answers.chain import EntryAnswer
from cli.client import LedgerClient, print_wait
from cli.options import Tenant, Url
from ledger.exit_code import ExitCode
from ledger.printable import printable
from tallystick_client import Entry
from terminal.outcome import CommandExit, out

PAYLOAD_CHARACTERS: Final = 100
"""How much of a payload a line for people shows."""


def watch(
    tenant: Tenant,
    url: Url,
    actions: Annotated[
        str | None, typer.Option("--actions", metavar="A,…", help="Only entries of these actions.", show_default="all")
    ] = None,
    job: Annotated[str | None, typer.Option("--job", help="Only entries of this job.", show_default="all")] = None,
    dc: Annotated[
        str | None, typer.Option("--dc", help="Only entries that concern this data centre.", show_default="all")
    ] = None,
    from_seq: Annotated[
        int | None, typer.Option("--from-seq", min=1, help="First entry.", show_default="what comes from now on")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print each entry as one line of JSON.")] = False,
) -> None:
    """Follow a tenant's chain: print each entry as it comes, until Ctrl-C.

    A connection that ends is made again where it was; no entry is printed twice
    and none is left out.

    \b
    Examples:
      tally watch --tenant acme
      tally watch -t acme --actions CANCEL,CANCEL_ACK --dc use1
      tally watch -t acme --from-seq 1 --json | jq .job_id
    """
    wanted = [action for action in (actions or "").split(",") if action]
    try:
        with LedgerClient(url, on_wait=print_wait) as client:
            for entry in client.watch(tenant, actions=wanted, job=job, dc=dc, from_seq=from_seq):
                client.checked(entry, EntryAnswer)
                line = orjson.dumps(entry).decode() if as_json else _line(entry)
                print(line, file=out.file, flush=True)
    except KeyboardInterrupt:
        raise CommandExit(ExitCode.FINE) from None


def _line(entry: Entry) -> str:
    payload = entry["payload"]
    shown = payload if len(payload) <= PAYLOAD_CHARACTERS else payload[:PAYLOAD_CHARACTERS] + "…"
    when = entry["at"] or entry["t_hlc"]
    return printable(f"{entry['seq']:>8}  {when}  {entry['action']:<17}  {entry['job_id']}  {shown}")
