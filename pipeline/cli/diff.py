"""``tally pipeline diff``: what each of two ledgers has that the other lacks, and bundles that bring it there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.cli.options import Master, SigningKey, Tenants
from pipeline.cli.running import running
from pipeline.keys import open_signers
from terminal.counted import counted
from terminal.options import Json
from terminal.outcome import CommandExit, err, out, print_json

if TYPE_CHECKING:
    from pipeline.diff.job import Diff

A_LEDGER = "postgresql://..., an archive or a bundle file."


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help=A_LEDGER)],
    b: Annotated[str, typer.Argument(metavar="B", help=A_LEDGER)],
    tenants: Tenants = None,
    output: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="DIR", help="Write what each side lacks as bundles: DIR/to-a, DIR/to-b."),
    ] = None,
    rows: Annotated[
        bool, typer.Option("--rows", help="Believe no stored tree or digest: compute them from the rows, all of them.")
    ] = False,
    signing_key: SigningKey = None,
    master: Master = None,
    as_json: Json = False,
) -> None:
    """Compare two ledgers: regions, a ledger and its archive, a ledger and a bundle.

    Where the stored trees say that both are one history, that is all that is
    read. Chains of different logs are compared as sets of events, by digests
    of time ranges first. With --out, what each side lacks is written as
    bundles: imported there, the two have the same events.

    \b
    Exit codes: 0 the same events; 3 one side lacks some; 2 both are one log
    and part all the same, or rows that were to leave as a bundle are damaged;
    1 anything else.

    \b
    Examples:
      tally pipeline diff postgresql://eu/tallystick postgresql://us/tallystick
      tally pipeline diff postgresql://eu/tallystick acme.bundle.tar -t acme
      tally pipeline diff postgresql://eu/tallystick postgresql://us/tallystick --out repair/
    """
    from pipeline.diff.job import diff as compare
    from pipeline.places import parse_place
    from pipeline.progress import shown

    signers = None if output is None else open_signers(signing_key)
    places = parse_place(a), parse_place(b)
    with running("diff", master) as spark, places[0].open() as of_a, places[1].open() as of_b:
        found = compare(
            spark,
            of_a,
            of_b,
            tenants=tenants or (),
            by_rows=rows,
            output=output,
            signers=signers,
            stage=lambda what: shown(spark, what, err),
        )
    if as_json:
        print_json({"a": str(places[0]), "b": str(places[1]), **found.to_json()})
    else:
        _print(found)
    raise CommandExit(found.exit_code)


def _print(found: Diff) -> None:
    told = found.to_json()
    for tenant in told["tenants"]:
        _print_tenant(tenant)
    for bundle in told["bundles"]:
        out.print(
            f"{bundle['file']}: for {bundle['lacking']}, seq {bundle['from_seq']:,} to {bundle['to_seq']:,} of tenant "
            f"{bundle['tenant_id']}, {bundle['bytes']:,} bytes",
            markup=False,
        )
    out.print("the same events" if found.is_equal else "not the same events")


def _print_tenant(tenant: dict[str, Any]) -> None:
    by = "by its tree" if tenant["compared"] == "merkle" else "by ranges of time"
    if tenant["equal"]:
        out.print(f"{tenant['tenant_id']}: the same events, {by}", markup=False)
    else:
        out.print(
            f"{tenant['tenant_id']}: {tenant['only_in_a']:,} only in a, {tenant['only_in_b']:,} only in b, {by}",
            markup=False,
        )
    first = tenant["first_difference"]
    if first is not None and first["seq"] > 1:
        out.print(f"  the chains are the same up to seq {first['seq'] - 1:,}, and differ from there on", markup=False)
    if tenant["forked_log"] is not None:
        out.print(
            f"  both are the log {tenant['forked_log']}: one of the two was rewritten or went on from a copy, which no "
            "import mends, so no bundle is written",
            markup=False,
        )
    for conflict in tenant["conflicts"]:
        out.print(
            f"  conflict: two events have HLC {conflict['hlc']}, seq {conflict['seq_a']:,} of a and "
            f"{conflict['seq_b']:,} of b",
            markup=False,
        )
    if unlisted := tenant["conflict_count"] - len(tenant["conflicts"]):
        out.print(f"  and {counted(unlisted, 'conflict')} more", markup=False)
    if tenant["unsigned"]:
        unsigned = counted(tenant["unsigned"], "entry is", "entries are")
        out.print(f"  {unsigned} not signed yet, and in no bundle", markup=False)
