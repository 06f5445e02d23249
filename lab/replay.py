"""``tally replay``: feed a file of events to a running service, so that a second run adds nothing.

The file is cut into requests the same way every time, and each carries the key::

    replay-{first 40 hex of SHA-256 of "sha256(file)\\nmapping\\ntenant\\nchunk number"}

so the ledger knows a request it has. It keeps keys for seven days: after that a replay adds events again.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from app.runtime.answers.jobs import BatchAnswer
from cli.client import LedgerClient, print_wait
from cli.options import Durability, Level, Tenant, Url
from lab import replay_commitments
from lab.event_files import EventChunk, EventFile, FileFormat, Mapping
from lab.openb_commitments import NODES_FILE
from lab.replay_commitments import read
from ledger.errors import InvalidInputError
from tallystick_client import ProblemError
from tallystick_client.core import json_in
from terminal.outcome import counted, err, out, print_json
from terminal.program import Json

PATIENCE_S = 600.0
"""How long one request is repeated while the service, which answered at first, is full or away."""


class ReplaySummary(msgspec.Struct):
    """What a replay did; ``already_there`` are events of requests that the ledger had from an earlier run."""

    events: int = 0
    added: int = 0
    already_there: int = 0
    requests: int = 0
    types: Counter[str] = msgspec.field(default_factory=Counter)
    duration_s: float = 0.0
    events_per_second: float | None = None
    first_hlc: str | None = None
    last_hlc: str | None = None
    session: str | None = None

    def count(self, chunk: EventChunk, answer: dict[str, Any], *, replayed: bool) -> None:
        """Take in the answer to one request."""
        events = len(chunk.types)
        self.requests += 1
        self.events += events
        self.added += 0 if replayed else events
        self.already_there += events if replayed else 0
        self.types.update(chunk.types)
        self.first_hlc = self.first_hlc or answer["first_hlc"]
        self.last_hlc = answer["last_hlc"]
        self.session = answer["session"]

    def to_json(self, path: Path, tenant: str) -> dict[str, Any]:
        """The document that ``--json`` prints."""
        return {"file": str(path), "tenant_id": tenant, **msgspec.structs.asdict(self)}


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.speed or 0:,.0f} events/s", style="progress.data.speed")


def replay(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, readable=True, help="NDJSON or CSV.")],
    tenant: Tenant,
    url: Url,
    durability: Durability = None,
    file_format: Annotated[FileFormat, typer.Option("--format", help="Form of the file.")] = "auto",
    mapping: Annotated[
        Mapping | None, typer.Option("--map", help="Read a trace in a form of its own: openb, as CSV.")
    ] = None,
    form: Annotated[
        Literal["events", "commitments"],
        typer.Option("--as", help="What a trace becomes: events of jobs, or placements that two schedulers race for."),
    ] = "events",
    nodes: Annotated[
        Path | None,
        typer.Option(
            "--nodes",
            dir_okay=False,
            help="With --as commitments: the trace's list of nodes.",
            show_default=f"{NODES_FILE} beside the file",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Feed a file of events to a running service. Resumable for seven days: what it added is not added again.

    All lines are checked first; a malformed one is named and nothing is sent.
    The ledger knows a request again for seven days: a replay of the same file
    after that adds its events once more.

    \b
    Examples:
      tally replay events.ndjson --tenant acme
      tally replay jobs.csv --tenant acme --durability LOCAL --json
      tally replay openb_pod_list_default.csv --map openb --tenant openb
      tally replay openb_pod_list_default.csv --map openb --as commitments --tenant openb
    """
    if form == "commitments":
        if mapping != "openb":
            raise InvalidInputError("--as commitments needs a trace of nodes and pods: --map openb")
        _race(file, nodes, tenant, url, as_json=as_json)
        return
    source = EventFile(file, tenant, file_format, mapping)
    total = sum(1 for _ in source.events())
    with LedgerClient(url, patience_s=0.0) as client:
        client.get("/v1/node")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Rate(), TimeElapsedColumn())
    with Progress(*columns, console=err, disable=as_json) as progress:
        task = progress.add_task(file.name, total=total)
        with LedgerClient(url, patience_s=PATIENCE_S, on_wait=print_wait) as client:
            summary = _feed(client, source, tenant, durability, lambda events: progress.advance(task, events))
    if as_json:
        print_json(summary.to_json(file, tenant))
    else:
        _print(summary, file, tenant)


def _race(file: Path, nodes: Path | None, tenant: str, url: str, *, as_json: bool) -> None:
    """Replay a trace as commitments."""
    nodes, cluster, happened = read(file, nodes)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Rate(), TimeElapsedColumn())
    with Progress(*columns, console=err, disable=as_json) as progress:
        task = progress.add_task(file.name, total=len(happened))
        with LedgerClient(url, patience_s=PATIENCE_S, on_wait=print_wait) as client:
            done = replay_commitments.replay(
                client, tenant, (file, nodes), cluster, happened, lambda count: progress.advance(task, count)
            )
    if as_json:
        print_json({"file": str(file), "tenant_id": tenant, **msgspec.to_builtins(done)})
        return
    race = done.race
    out.print(
        f"{counted(race.placed, 'pod')} placed on {counted(done.nodes, 'node')} for tenant {tenant} in "
        f"{done.duration_s:.1f} s ({done.proposals_per_second or 0:,.0f} proposals/s): {race.conflicts:,} conflicts, "
        f"{race.unplaced:,} pods not placed, {race.revoked:,} revoked, at most {race.live_max:,} at one time; "
        f"{done.entries_added:,} entries added, the chain ends at {done.as_of_seq:,}",
        markup=False,
    )
    table = Table("proposed", "pods placed")
    table.columns[1].justify = "right"
    for attempts, pods in sorted(race.attempts.items(), key=lambda each: int(each[0])):
        table.add_row(counted(int(attempts), "time"), f"{pods:,}")
    out.print(table)


def _feed(
    client: LedgerClient,
    source: EventFile,
    tenant: str,
    durability: Level | None,
    advance: Callable[[int], None],
) -> ReplaySummary:
    summary = ReplaySummary()
    digest = source.digest()
    started = time.monotonic()
    for chunk in source.chunks():
        key = request_key(digest, source.mapping, tenant, chunk.number)
        try:
            sent: dict[str, Any] = {"content": chunk.lines, "content_type": "application/x-ndjson", "key": key}
            reply = client.ask("POST", "/v1/events", params={"durability": durability}, **sent)
        except ProblemError as error:
            if error.kind not in ("idempotency-key-reused", "idempotency-key-unproven"):
                raise
            raise InvalidInputError(
                f"another version of tally replayed this file into tenant {tenant}, and read other events in it, or "
                "did not keep with each event what it came with. Nothing of this request was added; replay the file "
                "into another tenant."
            ) from error
        answer = client.checked(json_in(reply.content), BatchAnswer)
        summary.count(chunk, answer, replayed=reply.headers.get("Idempotent-Replay") == "true")
        advance(len(chunk.types))
    took_s = time.monotonic() - started
    summary.duration_s = round(took_s, 3)
    summary.events_per_second = round(summary.events / took_s, 1) if took_s else None
    return summary


def request_key(file_digest: str, mapping: str | None, tenant: str, number: int) -> str:
    """The Idempotency-Key of request ``number`` (from 0) of a file, the same in every run."""
    identity = f"{file_digest}\n{mapping or ''}\n{tenant}\n{number}"
    return f"replay-{hashlib.sha256(identity.encode()).hexdigest()[:40]}"


def _print(summary: ReplaySummary, file: Path, tenant: str) -> None:
    out.print(
        f"{counted(summary.events, 'event')} of {file.name} for tenant {tenant} in {summary.duration_s:.1f} s "
        f"({summary.events_per_second or 0:,.0f} events/s): {summary.added:,} added, "
        f"{summary.already_there:,} already there",
        markup=False,
    )
    table = Table("type", "events")
    table.columns[1].justify = "right"
    for name, events in summary.types.most_common():
        table.add_row(name, f"{events:,}")
    out.print(table)
