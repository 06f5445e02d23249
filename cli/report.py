"""``tally report``: a page on the jobs of a tenant, which the service makes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cli.client import Service
from cli.options import Tenant
from signing.files import whole_file
from terminal.outcome import err, tell
from terminal.program import Json


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
