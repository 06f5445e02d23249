"""``tally jobs``: the jobs of a tenant, listed, searched or shown. ``tally report``: a page on them. ``tally watch``:
its chain as it grows."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import quote

import orjson
import typer

from app.edge.forms import lists
from app.edge.forms.fields import moment
from app.runtime.answers.chain import EntryAnswer
from app.runtime.answers.jobs import JobAnswer, JobEventList, JobList, JobSummary
from app.share.archive import require_packages
from cli.client import LedgerClient, Service, print_wait, trusted_keys
from cli.options import Keys, Tenant, Url
from ledger import errors, rfc3339
from ledger.errors import InvalidInputError
from ledger.exit_code import ExitCode
from ledger.facts.statuses import STATUSES
from ledger.machines.job_search import Direction, JobFilter, Sort, field_is
from ledger.text import printable
from signing.files import whole_file
from tallystick_client import Entry, JobNotFoundError
from terminal.outcome import CommandExit, aligned, counted, err, out, tell
from terminal.program import Json, command_of

if TYPE_CHECKING:
    from pipeline.archive.jobs import ArchivedJobs

SHOWN = 50
"""Default number of jobs shown."""
PAGE = 500
LIMIT_MAX = 1_000_000_000
TEXT_CHARACTERS = 60
"""How much of an error or a payload a line shows."""
_SAID_ELSEWHERE: Final = frozenset({"type", "actor", "fence_token", "idempotency"})
"""Members of a payload that a timeline shows elsewhere, or not at all."""

_RUN_TIMES: Final = ("min_ms", "p50_ms", "p95_ms", "max_ms")

Where = Annotated[
    list[str] | None,
    typer.Option("--where", metavar="FIELD=VALUE", help="A field of the spec has this value; given again, and that."),
]
Limit = Annotated[
    int | None,
    typer.Option("--limit", min=1, max=LIMIT_MAX, help="Most jobs.", show_default=f"{SHOWN}; with --json or --csv all"),
]


@dataclass(kw_only=True)
class Jobs:
    """List or search the jobs of a tenant, newest first, or show one and its timeline.

    By --sort ended_at or run_ms a list has the jobs that ended, or ran, the last
    to end or the longest first.

    With --archive jobs are read from an archive, those that left the database
    as well, as of its last entry. Its manifests must be signed by --keys, else
    by keys that the service publishes. Private values are not revealed.

    Times for people are those of this machine's zone; --json and --csv have UTC.

    \b
    Examples:
      tally jobs --tenant acme
      tally jobs -t acme --status failed --status timed_out --since 2026-11-01T00:00:00Z
      tally jobs -t acme --where spec.image=report:1 --where spec.labels.team=ml
      tally jobs -t acme --error OOMKilled --csv > failed.csv
      tally jobs -t acme --id-part nightly
      tally jobs -t acme --sort run_ms --limit 10
      tally jobs -t acme --summary --by error --since 2026-11-01T00:00:00Z
      tally jobs -t acme nightly-report-17
      tally jobs -t acme nightly-report-17 --archive s3://ledger-archive/prod --keys trusted-keys.json
    """

    tenant: Tenant
    client: Service
    job: Annotated[
        str | None,
        typer.Argument(metavar="[JOB]", help="Show the job of this id, else list those of this name."),
    ] = None
    status: Annotated[list[str] | None, typer.Option("--status", help="Of this status; again, or that.")] = None
    since: Annotated[
        str | None, typer.Option("--since", metavar="T", help="Created then or later: RFC 3339 or an HLC.")
    ] = None
    until: Annotated[str | None, typer.Option("--until", metavar="T", help="Created before.")] = None
    dc: Annotated[str | None, typer.Option("--dc", help="Assigned to this data centre, or accepted by it.")] = None
    actor: Annotated[str | None, typer.Option("--actor", help="Created by this principal.")] = None
    where: Where = None
    error: Annotated[str | None, typer.Option("--error", metavar="TEXT", help="The error contains this.")] = None
    id_part: Annotated[str | None, typer.Option("--id-part", metavar="TEXT", help="Its id or name contains this.")] = (
        None
    )
    sort: Annotated[Sort, typer.Option("--sort", help="What a list goes by.")] = Sort.CREATED_AT
    order: Annotated[Direction, typer.Option("--order", help="desc: the newest or longest first.")] = Direction.DESC
    in_conflict: Annotated[bool, typer.Option("--in-conflict", help="Created more than once, differently.")] = False
    summary: Annotated[
        bool, typer.Option("--summary", help="Count jobs, with their run times, instead of listing them.")
    ] = False
    by: Annotated[
        str | None,
        typer.Option("--by", help="Count by this: status, hour, day, dc, error or spec.FIELD.", show_default="status"),
    ] = None
    limit: Limit = None
    archive: Annotated[
        str | None,
        typer.Option("--archive", metavar="URL", help="Read this archive instead: a folder, s3://bucket/prefix."),
    ] = None
    keys: Keys = None
    as_csv: Annotated[bool, typer.Option("--csv", help="Print a table as CSV.")] = False
    as_json: Json = False

    def run(self) -> None:
        """Count, show or list."""
        asked = self._asked()
        if self.summary or self.by is not None:
            self._summarise(asked)
            return
        if self.job is not None and (self.as_csv or self.limit is not None or any(asked.values())):
            raise InvalidInputError("a job is shown by its id or name and tenant alone; the other options are of lists")
        if self.as_csv and self.as_json:
            raise InvalidInputError("say --csv or --json, not both")
        archived = self._archived()
        damaged = list[dict[str, str]]()
        if self.job is None:
            self._list(self._found(asked, archived, damaged), damaged)
            return
        try:
            one = _one(self.client, self.tenant, self.job) if archived is None else _one_archived(archived, self.job)
        except (JobNotFoundError, errors.JobNotFoundError):
            found = self._found({**asked, "name": self.job}, archived, damaged)
            if (first := next(found, None)) is None:
                raise
            err.print(printable(f"no job has the id {self.job}; of this name:"), markup=False)
            self._list(chain((first,), found), damaged)
        else:
            _show(self.tenant, *one, self.as_json)

    def _archived(self) -> ArchivedJobs | None:
        """The jobs of the archive, by manifests that a key of ``keys`` signed; None if none is named."""
        if self.archive is None:
            return None
        require_packages("tally jobs --archive")
        # Imported here, because it loads Arrow.
        from pipeline.archive.jobs import archived_jobs

        return archived_jobs(self.archive, self.tenant, trusted_keys(self.keys, self.client))

    def _asked(self) -> dict[str, Any]:
        """What a list is asked for."""
        is_sorted = (self.sort, self.order) != (Sort.CREATED_AT, Direction.DESC)
        return {
            "status": self.status or [],
            "since": self.since,
            "until": self.until,
            "dc": self.dc,
            "actor": self.actor,
            "where": [_condition(text) for text in self.where or ()],
            "error": self.error,
            "id_part": self.id_part,
            "in_conflict": True if self.in_conflict else None,
            "name": None,
            "sort": self.sort.value if is_sorted else None,
            "order": self.order.value if is_sorted else None,
        }

    def _summarise(self, asked: dict[str, Any]) -> None:
        kept = {name: asked.pop(name) for name in ("since", "until", "dc")}
        if self.job is not None or self.as_csv or self.archive is not None or any(asked.values()):
            raise InvalidInputError("--summary goes with --by, --since, --until, --dc, --limit and --json alone")
        params = {"tenant_id": self.tenant, "by": self.by or "status", "limit": self.limit, **kept}
        _print_summary(self.client.get("/v1/jobs/summary", JobSummary, **params), self.as_json)

    def _found(
        self, asked: dict[str, Any], archived: ArchivedJobs | None, damaged: list[dict[str, str]]
    ) -> Iterator[dict[str, Any]]:
        """The jobs, from the service or the archive; those that cannot be read go to ``damaged``."""
        if archived is None:
            return _found(self.client, {"tenant_id": self.tenant, **asked}, self.limit, damaged)
        return iter(
            _found_archived(archived, asked, self.limit if self.limit or self.as_csv or self.as_json else SHOWN + 1)
        )

    def _list(self, found: Iterator[dict[str, Any]], damaged: list[dict[str, str]]) -> None:
        found = found if self.limit is None else islice(found, self.limit + (not self.as_csv and not self.as_json))
        if self.as_csv:
            _print_csv(found)
        elif self.as_json:
            _print_items(found, damaged)
        else:
            shown = self.limit or SHOWN
            _print_lines(list(islice(found, shown + 1)), shown)
        for each in damaged:
            err.print(printable(f"job {each['job_id']} is left out, it is damaged: {each['detail']}"), markup=False)


jobs = command_of(Jobs)


def _print_summary(found: Mapping[str, Any], as_json: bool) -> None:
    """Print a line for each group, and one for all jobs."""
    rows = [
        (
            name,
            str(group["jobs"]),
            *(_run_time(group["run_times"] and group["run_times"][of]) for of in _RUN_TIMES),
            " ".join(f"{status} {count}" for status, count in group["statuses"].items()),
        )
        for name, group in (
            *((_short(group["value"] or "-"), group) for group in found["groups"]),
            *([("(other)", found["other"])] if found["other"] else ()),
            ("all", found["all"]),
        )
    ]
    lines = aligned([(found["by"].upper(), "JOBS", "RUN MIN", "RUN P50", "RUN P95", "RUN MAX", "STATUSES"), *rows])
    left_out, traced = found["groups_left_out"], found["all"]["by_trace_time"]
    tell(
        found,
        *lines,
        *([f"{left_out} more groups have jobs (--limit)"] if left_out else ()),
        *([f"by the trace_time of their events, not their HLC: {counted(traced, 'job')}"] if traced else ()),
        as_json=as_json,
    )


def _one_archived(archived: ArchivedJobs, job_id: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A job and its events.

    Raises:
        JobNotFoundError: the archive has nothing of it.
    """
    if (found := archived.job(job_id)) is None:
        end = archived.end
        raise errors.JobNotFoundError(
            f"the archive has no job {job_id} of tenant {end.tenant_id} up to seq {end.to_seq}"
        )
    return found


def _found_archived(archived: ArchivedJobs, asked: Mapping[str, Any], limit: int | None) -> list[dict[str, Any]]:
    """The jobs that match what the options ask, newest first.

    Raises:
        InvalidInputError: an option is malformed, or too many jobs match.
    """
    statuses = tuple(dict.fromkeys(status.upper() for status in asked["status"]))
    if asked["sort"] is not None:
        raise InvalidInputError("--sort, --order: a list of an archive begins with the newest job")
    if odd := [status for status in statuses if status not in STATUSES]:
        raise InvalidInputError(f"--status {odd[0]}: there are {', '.join(STATUSES)}")
    wanted = JobFilter(
        statuses,
        asked["actor"],
        asked["dc"],
        tuple(map(field_is, asked["where"])),
        asked["error"],
        asked["id_part"],
        bool(asked["in_conflict"]),
        asked["name"],
    )
    since = moment("since", asked["since"], rfc3339.at_or_after)
    until = moment("until", asked["until"], rfc3339.at_or_after)
    return archived.find(wanted, since, until, limit)


def _run_time(milliseconds: int | None) -> str:
    # Imported here, because it loads Jinja, which no other command needs.
    from pipeline.page import duration_text

    return "-" if milliseconds is None else duration_text(milliseconds / 1000)


def _condition(text: str) -> str:
    field, equals, value = text.partition("=")
    if not equals:
        raise InvalidInputError(f"--where {text}: write FIELD=VALUE, such as spec.image=report:1")
    return f"{field}:{value}"


def _found(
    client: LedgerClient, asked: Mapping[str, Any], limit: int | None, damaged: list[dict[str, str]]
) -> Iterator[dict[str, Any]]:
    """The jobs of all pages; damaged jobs are added to ``damaged``."""
    for page in client.pages("/v1/jobs", JobList, **asked, limit=min(limit or PAGE, PAGE)):
        damaged += page["damaged"]
        yield from page["items"]


def _print_csv(found: Iterator[dict[str, Any]]) -> None:
    # First the request that may be rejected.
    first = next(found, None)
    sys.stdout.write(lists.csv_head(lists.CSV_JOB_COLUMNS).decode())
    for item in chain(() if first is None else (first,), found):
        sys.stdout.write(lists.csv_rows(lists.CSV_JOB_COLUMNS, [item]).decode())


def _print_items(found: Iterator[dict[str, Any]], damaged: Sequence[dict[str, str]]) -> None:
    """Print one JSON document, item by item."""
    first = next(found, None)
    sys.stdout.write('{"items": [')
    for number, item in enumerate(chain(() if first is None else (first,), found)):
        sys.stdout.write(("," if number else "") + "\n" + orjson.dumps(item).decode())
    named = ', "damaged": ' + orjson.dumps(damaged).decode() if damaged else ""
    sys.stdout.write(f"\n]{named}}}\n")


def _print_lines(found: Sequence[Mapping[str, Any]], limit: int) -> None:
    """Print a line for each job, with its full name, which the user needs for the next command."""
    if not found:
        err.print("no such job", markup=False)
        return
    told = [
        (
            job["status"],
            _local(job["created_at"]),
            _local(job["last_at"]),
            job["job_id"],
            _short(job["name"]),
            " ".join(job["assigned_dcs"]),
            _short(job["actor"]),
            _run_time(job["run_ms"]),
            _short(job["error"]),
        )
        for job in found[:limit]
    ]
    head = ("STATUS", f"CREATED ({_zone()})", "LAST", "JOB", "NAME", "DCS", "ACTOR", "RAN", "ERROR")
    for line in aligned([head, *told]):
        out.print(line, markup=False)
    if len(found) > limit:
        err.print(f"the first {limit}; there are more (--limit)", markup=False)


def _one(client: LedgerClient, tenant: str, job_id: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A job and its events, from the service."""
    path = f"/v1/jobs/{quote(job_id, safe='')}"
    job = client.get(path, JobAnswer, tenant_id=tenant)
    pages = client.pages(f"{path}/events", JobEventList, tenant_id=tenant)
    return job, [event for page in pages for event in page["items"]]


def _show(tenant: str, job: dict[str, Any], events: list[dict[str, Any]], as_json: bool) -> None:
    ended = "" if job["error"] is None else f": {_short(job['error'])}"
    tell(
        {**job, "events": events},
        f"{job['job_id']} of {tenant} is {job['status']}{ended}",
        *(["  created   no creation that counts is known here"] if _is_uncreated(job) else ()),
        f"  spec      {orjson.dumps(job['spec']).decode()}",
        *([f"  dcs       {' '.join(job['assigned_dcs'])}"] if job["assigned_dcs"] else ()),
        *([f"  result    {orjson.dumps(job['result']).decode()}"] if job["result"] is not None else ()),
        *([f"  by        {_short(job['actor'])}"] if job["actor"] is not None else ()),
        *([f"  ran       {_run_time(job['run_ms'])}"] if job["run_ms"] is not None else ()),
        *(line for conflict in job.get("conflicts", ()) for line in _conflict_lines(conflict)),
        f"  times are of {_zone()}",
        "",
        *map(_event_line, events),
        as_json=as_json,
    )


def _conflict_lines(conflict: Mapping[str, Any]) -> Iterator[str]:
    yield f"  conflict  created more than once; by the rule {conflict['rule']}:"
    for entry in conflict["entries"]:
        what = "counts" if entry["counts"] else "does not count"
        yield f"    seq {entry['seq']} of {entry['log']}, node {entry['node_id']}, {_local(entry['at'])}: {what}"


def _is_uncreated(job: Mapping[str, Any]) -> bool:
    """Whether only other events of the job are here, such as a cancellation of a job that is on its way."""
    return job["created_at"] is None and job["refused"] is None


def _event_line(event: Mapping[str, Any]) -> str:
    payload = event["payload"] if isinstance(event["payload"], dict) else {}
    told = {name: value for name, value in payload.items() if name not in _SAID_ELSEWHERE}
    actor = "" if event["actor"] is None else f" by {_short(event['actor'])}"
    when, what = _local(event["at"]), event["type"] or event["action"]
    log = f" from {event['origin']['log']}" if event.get("origin") else ""
    log += "" if event.get("counts", True) else ", excluded"
    line = f"{event['seq']:>8}  {when}  {what:<24}  {event['state']:<9}{actor}{log}  {_short(told) if told else ''}"
    return line.rstrip()


def _short(value: object) -> str:
    text = "" if value is None else value if isinstance(value, str) else orjson.dumps(value).decode()
    return text if len(text) <= TEXT_CHARACTERS else text[:TEXT_CHARACTERS] + "…"


def _local(at: str | None) -> str:
    """An RFC 3339 time in the zone of this machine."""
    return "-" if at is None else datetime.fromisoformat(at).astimezone().strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def _zone() -> str:
    now = datetime.now().astimezone()
    return f"{now.tzname()}, {now.strftime('%z')[:3]}:{now.strftime('%z')[3:5]}"


def report(
    tenant: Tenant,
    client: Service,
    output: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Where the page goes.")],
    since: Annotated[
        str | None, typer.Option("--since", metavar="T", help="Created in the hour of this or later: RFC 3339.")
    ] = None,
    until: Annotated[str | None, typer.Option("--until", metavar="T", help="Created in an hour before.")] = None,
    by: Annotated[
        list[str] | None,
        typer.Option("--by", metavar="FIELD", help="Count by this declared field, as spec.image; may be repeated."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Have the service make a report on a tenant's jobs: one page of HTML that needs nothing else.

    Beyond 1,000,000 entries the service has Spark make it, where that is
    installed, for a caller who may also audit; that takes minutes. Without a
    service, and for several ledgers: tally pipeline report.

    \b
    Examples:
      tally report --tenant acme -o acme.report.html
      tally report -t acme --since 2026-11-01T00:00:00Z --by spec.image -o november.html
    """
    with err.status("making the report ...") as shown:
        page = client.make_report(
            tenant, since=since, until=until, by=by or (), advance=lambda words: shown.update(f"{words} ...")
        )
    with whole_file(output) as written:
        written.write(page)
    tell({"tenant_id": tenant, "file": output, "bytes": len(page)}, f"the page: {output}", as_json=as_json)


# --- a chain as it grows ----------------------------------------------------------------------------

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
                print(orjson.dumps(entry).decode() if as_json else _line(entry), file=out.file, flush=True)
    except KeyboardInterrupt:
        raise CommandExit(ExitCode.FINE) from None


def _line(entry: Entry) -> str:
    payload = entry["payload"]
    shown = payload if len(payload) <= PAYLOAD_CHARACTERS else payload[:PAYLOAD_CHARACTERS] + "…"
    return printable(
        f"{entry['seq']:>8}  {entry['at'] or entry['t_hlc']}  {entry['action']:<17}  {entry['job_id']}  {shown}"
    )
