"""``tally wal``: inspect a write-ahead log without a service. Read only; the log may be in use."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from ledger.exit_code import ExitCode, gravest
from ledger.text import printable
from terminal.outcome import CommandExit, tell
from terminal.program import Json
from wal import inspect

wal = typer.Typer(no_args_is_help=True, help="Write-ahead logs, read only.")

Folder = Annotated[
    Path, typer.Argument(metavar="DIR", help="The folder of one node's log, or wal.dir, which holds some.")
]
_CODES = {"ok": ExitCode.FINE, "torn": ExitCode.INCOMPLETE, "corrupt": ExitCode.TAMPERED}


@wal.command("dump")
def dump(
    folder: Folder,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line, one a record.")] = False,
) -> None:
    """Print every record, one a line, BATCH records too. Reading goes on behind damage, which is exit code 2.

    Each has its state, as far as the control file has noted it: PENDING,
    REGIONAL (committed), GLOBAL (chained), COMPACTED (signed).

    \b
    Examples:
      tally wal dump var/wal
      tally wal dump var/wal --json | jq 'select(.tenant_id == "acme")'
    """
    is_damaged = False
    for item in inspect.dump(folder):
        is_damaged = is_damaged or "error" in item
        sys.stdout.write((orjson.dumps(item).decode() if as_json else printable(_line(item))) + "\n")
    raise CommandExit(ExitCode.TAMPERED if is_damaged else ExitCode.FINE)


@wal.command("verify")
def verify(folder: Folder, as_json: Json = False) -> None:
    """Check every record of a log. Exit code 2: corrupt; 3: the last batch is torn, as after a crash.

    A torn last batch was never acknowledged; the next start sets it aside and
    cuts it.

    \b
    Examples:
      tally wal verify var/wal
      tally wal verify /srv/tally/wal/node-7f3a --json
    """
    reports = inspect.verify(folder)
    tell(
        {"logs": [asdict(report) for report in reports]},
        *[line for report in reports for line in _told(report)],
        as_json=as_json,
    )
    raise CommandExit(gravest(_CODES[report.verdict] for report in reports))


def _told(report: inspect.WalReport) -> Iterator[str]:
    yield (
        f"{report.folder}: {report.verdict}, node {report.node_id}, {report.records:,} records in "
        f"{report.segments} segments, LSN {report.first_lsn} to {report.last_lsn}, epoch {report.last_epoch}"
    )
    if report.reason is not None:
        yield f"  {report.segment} at byte {report.offset}: {report.reason}"


def _line(item: dict[str, Any]) -> str:
    if "error" in item:
        return f"{item['segment']} at byte {item['offset']}: {item['error']}"
    what = item["action"] or f"type {item['type']}"
    head = f"{item['lsn']:>10} {item['hlc']} {item['state']:<9} {what}"
    if "first_lsn" in item:
        return f"{head} LSN {item['first_lsn']} to {item['last_lsn']}"
    payload = f"{item['tenant_id']} {item['job_id']} {item['payload']}" if "payload" in item else item["payload_hex"]
    return f"{head} {payload}"
