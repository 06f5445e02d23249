"""``tally demo tamper``: a ledger of its own, edited behind its back, and what verification says to that.

Everything happens in a temporary folder, on a service and a PostgreSQL started for this and stopped after it.
"""

from __future__ import annotations

import asyncio
import hashlib
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.markup import escape
from rich.table import Table

from cli.client import LedgerClient
from cli.serve import embedded_postgres
from cli.verify import Request
from lab.scratch import scratch_folder, scratch_service
from ledger.exit_code import ExitCode
from ledger.verification import TreeHead
from signing.anchors import NOBODY
from signing.checkpoint import open_checkpoint
from signing.keys import Keyring
from terminal import stop_signals
from terminal.outcome import CommandExit, err, fail, out, print_json
from terminal.program import Json

if TYPE_CHECKING:
    from app.store import Connection

TENANT = "demo"
JOBS = 20
JOB_THAT_FAILS = 7
ENTRIES_CUT = 6
"""Those of the last two jobs, so that no job is left half recorded."""

AUDITOR = "auditor"
"""Whoever kept the checkpoint that a cut is found by, in the words of a verdict."""

demo = typer.Typer(no_args_is_help=True, help="Demonstrations on a scratch copy.")


class EditFound(NamedTuple):
    """An edit of the log, what verification has to name, and the verdict it came to."""

    edit: str
    kind: str
    seq: int | None
    """None when the edit leaves nothing in the database that could be named."""
    verdict: dict[str, Any]

    @property
    def is_named(self) -> bool:
        """Whether the verdict names the edit, and the entry if there is one left to name."""
        first = self.verdict["first_break"]
        if self.verdict["valid"] or first is None:
            return False
        return first["kind"] == self.kind and self.seq in (None, first["seq"])

    def to_json(self) -> dict[str, Any]:
        """One element of what ``--json`` prints."""
        return {"edit": self.edit, "kind": self.kind, "seq": self.seq, "found": self.is_named, "verdict": self.verdict}


InConsole = Annotated[
    bool, typer.Option("--console", help="Make one edit, and keep the ledger for the web console until Ctrl-C.")
]


@demo.command("tamper")
def tamper(as_json: Json = False, in_console: InConsole = False) -> None:
    """Verify a scratch ledger, falsify it as the database's superuser, verify again, show what was found.

    Starts a service and a PostgreSQL of its own in a temporary folder, which
    takes some seconds. Exits 0 when every falsification was found.

    \b
    Examples:
      tally demo tamper
      tally demo tamper --console
      tally demo tamper --json
    """
    if as_json and in_console:
        raise fail("--json tells what was found, --console shows it: give one of them")
    err.print("starting a scratch ledger ...")
    with (
        scratch_folder() as folder,
        scratch_service(folder) as url,
        _kept_database(folder) as superuser_url,
        LedgerClient(url) as client,
    ):
        _submit(client)
        if in_console:
            _keep_for_console(url, superuser_url)
            raise CommandExit(ExitCode.FINE)
        before = _verify(client)
        found = asyncio.run(_falsify(client, superuser_url))
    is_all_found = before["valid"] and all(item.is_named for item in found)
    if as_json:
        print_json({"before": before, "edits": [item.to_json() for item in found], "all_found": is_all_found})
    else:
        _print(before, found, is_all_found)
    raise CommandExit(ExitCode.FINE if is_all_found else ExitCode.COULD_NOT_RUN)


def _keep_for_console(url: str, superuser_url: str) -> None:
    """Falsify one entry, say where that is shown, and wait until somebody has seen enough."""
    job_id = asyncio.run(_falsify_one(superuser_url))
    out.print(f'As superuser, past every trigger: the error of job {job_id} became "none".')
    out.print("See the row named, then press Ctrl-C:")
    print(f"{url}/console#/verify/{TENANT}?run=1", flush=True)
    with suppress(KeyboardInterrupt):
        # Also where whoever started this had it ignore one of them.
        for each in stop_signals.STOP_SIGNALS:
            signal.signal(each, signal.default_int_handler)
        threading.Event().wait()


@contextmanager
def _kept_database(folder: Path) -> Iterator[str]:
    """The superuser's URL of the scratch PostgreSQL, which stays though the node that sees the cut ends."""
    postgres = embedded_postgres(folder)
    postgres.start()
    try:
        yield postgres.superuser_url()
    finally:
        postgres.stop()


def _submit(client: LedgerClient) -> None:
    """Jobs and their ends, one of them a failure, and a snapshot over all of it."""
    events: list[dict[str, Any]] = []
    for number in range(1, JOBS + 1):
        job = {"tenant_id": TENANT, "job_id": f"nightly-{number:02}"}
        events.append({**job, "type": "JobCreated", "spec": {"image": "backup:4", "shard": number}})
        events.append({**job, "type": "JobAccepted", "dc_id": "use1", "worker_count": 1})
        if number == JOB_THAT_FAILS:
            events.append({**job, "type": "JobFailed", "error": "disk full", "failed_dc": "use1"})
        else:
            events.append({**job, "type": "JobCompleted", "final_status": "ok"})
    client.send_batch(events, key="demo", durability="GLOBAL")
    client.post("/v1/snapshots", {"tenant_id": TENANT})


def _verify(client: LedgerClient) -> dict[str, Any]:
    verdict: dict[str, Any] = client.get("/v1/chain/verify", tenant_id=TENANT)
    return verdict


async def _falsify_one(superuser_url: str) -> str:
    """Give the job that failed another error, and leave it so; the job."""
    from lab import tampering

    async with tampering.superuser(superuser_url) as connection:
        row = await tampering.read_row(connection, TENANT, await tampering.find_seq(connection, TENANT, "FAIL"))
        falsified = row._replace(payload=row.payload.replace("disk full", "none"))
        await tampering.write_payload(connection, TENANT, falsified)
    return row.job_id


async def _falsify(client: LedgerClient, superuser_url: str) -> list[EditFound]:
    """Edit, verify, put back; the last edit stays, as the ledger is thrown away."""
    from lab import tampering

    async with tampering.superuser(superuser_url) as connection:
        seq = await tampering.find_seq(connection, TENANT, "FAIL")
        row = await tampering.read_row(connection, TENANT, seq)
        payload = row.payload.replace("disk full", "none")
        found = []

        await tampering.write_payload(connection, TENANT, row._replace(payload=payload))
        edit = f'the error of job {row.job_id} became "none"'
        found.append(await _found(client, edit, "payload-digest", seq))

        digest = hashlib.sha256(payload.encode()).hexdigest()
        forged = row._replace(payload=payload, payload_digest=digest)
        await tampering.write_payload(connection, TENANT, forged)
        found.append(await _found(client, "the same, and its digest made to fit", "link", seq))
        await tampering.write_payload(connection, TENANT, row)

        found.append(await _cut(client, connection, superuser_url))
        return found


async def _cut(client: LedgerClient, connection: Connection, superuser_url: str) -> EditFound:
    """The node sees this itself, and ends: so it is an auditor who verifies, with the checkpoint kept from before."""
    from cli.verify_database import verify_database
    from lab import tampering

    note = await asyncio.to_thread(client.get_text, f"/v1/log/{TENANT}/checkpoint")
    keyring = Keyring.from_json(await asyncio.to_thread(client.get, "/v1/keys"))
    kept = open_checkpoint(note, keyring)
    head = TreeHead(kept.size, kept.root, AUDITOR)
    await tampering.cut_tail(connection, TENANT, kept.size - ENTRIES_CUT)
    edit = f"the last {ENTRIES_CUT} entries removed, head, snapshots, tree and jobs made to fit"
    request = Request(TENANT, None, None, keyring=keyring, kept=None, external=NOBODY)
    return EditFound(edit, "rollback", None, await verify_database(superuser_url, request, [head], []))


async def _found(client: LedgerClient, edit: str, kind: str, seq: int | None) -> EditFound:
    return EditFound(edit, kind, seq, await asyncio.to_thread(_verify, client))


def _print(before: dict[str, Any], found: list[EditFound], is_all_found: bool) -> None:
    out.print(
        f"Before: {before['entries_checked']} entries of tenant {TENANT}, "
        + ("[green]valid[/]" if before["valid"] else "[red]not valid[/]")
    )
    table = Table("as superuser, past every trigger", "verdict", "kind", "seq", "detail", show_lines=True)
    for item in found:
        first = item.verdict["first_break"] or {"kind": "-", "seq": "-", "detail": "-"}
        table.add_row(
            escape(item.edit),
            "[red]not valid[/]" if not item.verdict["valid"] else "valid",
            first["kind"],
            str(first["seq"]),
            escape(first["detail"]),
        )
    out.print(table)
    out.print("Every edit was found and named." if is_all_found else "[bold red]An edit was not named.[/]")
