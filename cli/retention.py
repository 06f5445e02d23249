"""``tally retention``, ``tally hold``, ``tally prune``: what stays, what must stay, and what leaves on the record."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import urlencode

import typer

from app.runtime.answers.chain import TenantList
from app.runtime.answers.retention import HoldAnswer, HoldList, PruneAnswer, RetentionAnswer
from cli.client import LedgerClient, Service, given
from cli.options import Tenant, Url
from ledger.errors import InvalidInputError
from ledger.exit_code import ExitCode
from ledger.facts.events import SYSTEM_TENANT
from tallystick_client import ProblemError
from terminal.outcome import CommandExit, counted, err, print_json, tell
from terminal.program import Json

PRUNE_TIMEOUT_S = 3600.0
"""Longest time for one prune: the service verifies what leaves, in chain and archive, before it answers."""
PAGE_TENANTS = 1000
HELD_JOBS_NAMED = 5

Reason = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; goes on record with your name.")]

retention = typer.Typer(no_args_is_help=True, help="How long entries of a tenant stay.")
hold = typer.Typer(no_args_is_help=True, help="Entries that stay whatever their age.")


@retention.command("show")
def show(tenant: Tenant, client: Service, as_json: Json = False) -> None:
    """Show how long entries stay, how far they have left, and what stops the rest.

    \b
    Examples:
      tally retention show -t acme
    """
    _tell_policy(client.get("/v1/retention", RetentionAnswer, tenant_id=tenant), as_json)


@retention.command("set")
def set_policy(
    tenant: Tenant,
    client: Service,
    period: Annotated[str | None, typer.Option("--period", metavar="400d", help="How long entries stay.")] = None,
    minimum: Annotated[
        str | None, typer.Option("--minimum", metavar="180d", help="How long they must stay; never shortened.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Set how long entries stay in the database. Without --period nothing leaves.

    The policy is an entry of the tenant's chain and replaces the period: one
    that is left out ends. A minimum is never shortened, and one that is left
    out stays as it is. Nothing leaves by this alone; tally prune lets it.

    \b
    Examples:
      tally retention set -t acme --period 400d --minimum 180d
    """
    body = given({"period": period, "minimum": minimum})
    answer = client.send("PUT", f"/v1/retention?{urlencode({'tenant_id': tenant})}", body, RetentionAnswer)
    _tell_policy(answer, as_json)


@hold.command("new")
def new(
    tenant: Tenant,
    client: Service,
    reason: Reason,
    job: Annotated[str | None, typer.Option("--job", help="This job alone.")] = None,
    where: Annotated[
        str | None, typer.Option("--where", metavar="FIELD=VALUE", help="The jobs that this finds now.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Hold the entries of a tenant, of a job, or of what a search finds now.

    They stay in the database until the hold is released.

    \b
    Examples:
      tally hold new -t acme --reason "case 4711"
      tally hold new -t acme --where spec.labels.team=ml --reason "case 4711"
    """
    if where is not None:
        field, equals, value = where.partition("=")
        if not equals:
            raise InvalidInputError("--where: write FIELD=VALUE, such as spec.labels.team=ml")
        where = f"{field}:{value}"
    body = given({"tenant_id": tenant, "reason": reason, "job_id": job, "where": where})
    answer = client.post("/v1/holds", body, HoldAnswer)
    tell(answer, _hold(answer), as_json=as_json)


@hold.command("list")
def list_holds(tenant: Tenant, client: Service, as_json: Json = False) -> None:
    """List the open holds of a tenant.

    \b
    Examples:
      tally hold list -t acme
    """
    answer = client.get("/v1/holds", HoldList, tenant_id=tenant)
    tell(
        answer, *(map(_hold, answer["items"]) if answer["items"] else [f"tenant {tenant} has no hold"]), as_json=as_json
    )


@hold.command("release")
def release(
    hold_id: Annotated[str, typer.Argument(metavar="HOLD", help="The hold, as tally hold list names it.")],
    tenant: Tenant,
    client: Service,
    reason: Reason,
    as_json: Json = False,
) -> None:
    """End a hold. The release goes on record with its reason.

    \b
    Examples:
      tally hold release 5b0c8f2e91a4d736 -t acme --reason "case 4711 is closed"
    """
    query = urlencode({"tenant_id": tenant, "reason": reason})
    answer = client.send("DELETE", f"/v1/holds/{hold_id}?{query}", None, HoldAnswer)
    tell(answer, f"released: {_hold(answer)}", as_json=as_json)


def prune(
    url: Url,
    tenant: Annotated[str | None, typer.Option("--tenant", "-t", help="Tenant whose oldest entries leave.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All tenants, one after the other.")] = False,
    to_seq: Annotated[int | None, typer.Option("--to-seq", min=1, help="Last entry that may leave.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would leave and what stops it.")] = False,
    as_json: Json = False,
) -> None:
    """Let the oldest entries leave for the archive, on the record.

    What may leave is older than the policy wants, signed, archived, of jobs
    that ended, and not held. First it is verified, in the chain and in the
    archive. Then the entry PRUNED is chained, and the rows leave.

    With --all a tenant whose prune fails is named, the others are pruned
    all the same, and the exit code is 1.

    \b
    Examples:
      tally prune -t acme --dry-run
      tally prune --all
    """
    if (tenant is None) is not every:
        raise InvalidInputError("say which chains: --tenant T, or --all")
    if every and to_seq is not None:
        raise InvalidInputError("--to-seq is a position in one chain: give it with --tenant")
    with LedgerClient(url, timeout_s=PRUNE_TIMEOUT_S) as client:
        if tenant is not None:
            answer = _prune(client, tenant, to_seq, dry_run)
            tell(answer, *_pruned(answer), as_json=as_json)
            return
        done, problems = _prune_all(client, dry_run, as_json)
    if as_json:
        print_json({"prunes": done, "problems": problems})
    if problems:
        raise CommandExit(ExitCode.COULD_NOT_RUN)


def _prune(client: LedgerClient, tenant: str, to_seq: int | None, dry_run: bool) -> dict[str, Any]:
    body = given({"tenant_id": tenant, "to_seq": to_seq, "dry_run": dry_run or None})
    answer: dict[str, Any] = client.post("/v1/prunes", body, PruneAnswer)
    return answer


def _prune_all(client: LedgerClient, dry_run: bool, as_json: bool) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    done: list[dict[str, Any]] = []
    problems: list[dict[str, str]] = []
    pages = client.pages("/v1/tenants", TenantList, limit=PAGE_TENANTS)
    for tenant in sorted(item["tenant_id"] for page in pages for item in page["items"]):
        if tenant == SYSTEM_TENANT:
            continue
        try:
            done.append(_prune(client, tenant, None, dry_run))
        except ProblemError as error:
            problems.append({"tenant_id": tenant, "problem": str(error)})
            err.print(f"tenant {tenant}: {error}", style="bold red", markup=False)
        else:
            if not as_json:
                tell(done[-1], *_pruned(done[-1]), as_json=False)
    return done, problems


def _tell_policy(answer: dict[str, Any], as_json: bool) -> None:
    tenant, prunable, pruned = answer["tenant_id"], answer["prunable_to_seq"], answer["pruned_to_seq"]
    left = f"seq 1 to {pruned} left for {answer['archive']}" if pruned else "nothing has left"
    could = f"seq {pruned + 1} to {prunable} could leave now" if prunable > pruned else "nothing could leave now"
    tell(
        answer,
        f"tenant {tenant}: entries stay {answer['period'] or 'for ever'}, and at least {answer['minimum'] or '0s'}; "
        f"{counted(answer['open_holds'], 'hold')} open",
        f"{left}; {could}",
        *_stopped(answer),
        as_json=as_json,
    )


def _pruned(answer: dict[str, Any]) -> list[str]:
    tenant, entries = answer["tenant_id"], answer["entries"]
    if not entries:
        return [f"tenant {tenant}: nothing {'would leave' if answer['dry_run'] else 'leaves'}", *_stopped(answer)]
    verb = "would leave" if answer["dry_run"] else "leave"
    never = answer["never_ended"]
    return [
        f"tenant {tenant}: seq {answer['from_seq']} to {answer['to_seq']}, {counted(entries, 'entry', 'entries')}, "
        f"{verb} for {answer['archive']}"
        + ("" if answer["seq"] is None else f"; the entry PRUNED is seq {answer['seq']}")
        + (f"; {counted(never, 'job')} of them never ended" if never else ""),
        *_stopped(answer),
    ]


def _stopped(answer: dict[str, Any]) -> list[str]:
    stop = answer["stopped_by"]
    return [] if stop is None else [f"stopped at seq {stop['seq']}, {stop['why']}: {stop['detail']}"]


def _hold(answer: dict[str, Any]) -> str:
    job_ids = answer["job_ids"]
    if job_ids is None:
        held = f"all of tenant {answer['tenant_id']}"
    else:
        named, more = ", ".join(job_ids[:HELD_JOBS_NAMED]), len(job_ids) - HELD_JOBS_NAMED
        held = f"{counted(len(job_ids), 'job')}: {named}" + (f" and {more} more" if more > 0 else "")
    by = f" by {answer['actor']}" if answer["actor"] else ""
    where = f", found by {answer['where']}" if answer["where"] else ""
    log = f", placed by {answer['placed_by_log']}" if answer["placed_by_log"] else ""
    return f"hold {answer['hold_id']} since {answer['at']}{by}, {held}{where}{log}, because: {answer['reason']}"
