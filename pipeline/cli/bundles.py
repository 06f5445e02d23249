"""``tally pipeline merge`` and ``diff``: bundles made of many bundles, and of what two ledgers do not share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from ledger.errors import MergeRefusedError
from ledger.exit_code import ExitCode, gravest
from pipeline.cli.options import Master, RequiredKeys, SigningKey, Tenants, load_keys
from pipeline.cli.running import running, shown
from pipeline.keys import open_signers
from terminal.outcome import CommandExit, counted, err, print_json, tell
from terminal.program import Json

_OUT_HELP: Final = "Where the merged bundle goes; a folder when it is one, ends in /, or there are several bundles."
_ORIGIN_DEFAULT: Final = "merge/ and the digest of what went in"
_ORIGIN_HELP: Final = "Name of the log that the merged chain is of, without the tenant."


def merge(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Bundles, in any order.")],
    output: Annotated[str, typer.Option("--out", "-o", metavar="FILE|DIR", help=_OUT_HELP)],
    keys: RequiredKeys,
    signing_key: SigningKey = None,
    log_origin: Annotated[
        str | None,
        typer.Option("--log-origin", metavar="ORIGIN", show_default=_ORIGIN_DEFAULT, help=_ORIGIN_HELP),
    ] = None,
    master: Master = None,
    as_json: Json = False,
) -> None:
    """Merge bundles into one a tenant: what an import of all of them would leave in an empty ledger.

    Every bundle is verified wholly first; if one of them does not hold, or
    was signed by a key that --keys does not name, nothing is written. Events
    that are in several bundles are kept once, in the order of their HLCs;
    of two that claim one HLC both are kept, and listed. Each entry keeps the
    place where it was chained first. The same bundles named in any order
    give the same file.

    \b
    Exit codes: 0 merged; 2 a bundle does not hold; 4 it was not signed by a
    key in --keys; 1 anything else.

    \b
    Examples:
      tally pipeline merge sites/*.tar --keys trusted/ -o merged/
      tally pipeline merge acme/*.tar --keys trusted/ -o acme.bundle.tar --json
    """
    from pipeline.merge import SETTINGS
    from pipeline.merge import merge as merge_bundles

    keyring, signers = load_keys(keys), open_signers(signing_key)
    with running("merge", master, SETTINGS) as spark:
        try:
            merged = merge_bundles(
                spark,
                [os.path.abspath(file) for file in files],
                keyring,
                Path(output),
                signers,
                is_folder=output.endswith(os.sep),
                log_origin=log_origin,
                stage=lambda what, counter: shown(spark, what, counter),
            )
        except MergeRefusedError as error:
            _print_refused(error, as_json=as_json)
            raise CommandExit(gravest(ExitCode(bundle["exit_code"]) for bundle in error.bundles)) from None
    told = merged.to_json()
    tell(told, *_lines_of_merge(told), as_json=as_json)


def _print_refused(error: MergeRefusedError, *, as_json: bool) -> None:
    if as_json:
        print_json({"refused": list(error.bundles)})
    for bundle in error.bundles:
        err.print("[bold red]refused:[/] ", end="")
        err.print(bundle["error"], markup=False)
    err.print("nothing was written")


def _lines_of_merge(told: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{counted(len(told['inputs']), 'bundle')}, {counted(told['entries'], 'entry', 'entries')}: "
        f"{told['merged']:,} merged, {told['duplicates']:,} in more than one bundle, "
        f"{counted(told['conflict_count'], 'conflict')}"
    )
    for conflict in told["conflicts"]:
        yield (
            f"conflict: two events of tenant {conflict['tenant_id']} have HLC {conflict['hlc']}; job "
            f"{conflict['job_id']} has one, kept under {conflict['conflict_hlc']}"
        )
    if unlisted := told["conflict_count"] - len(told["conflicts"]):
        yield f"and {counted(unlisted, 'conflict')} more"
    for bundle in told["bundles"]:
        yield (
            f"{bundle['file']}: tenant {bundle['tenant_id']} of log {bundle['log_origin']}, "
            f"{counted(bundle['entry_count'], 'entry', 'entries')}, {bundle['bytes']:,} bytes"
        )
        yield f"SHA-256 {bundle['sha256']}"


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
    from pipeline.diff import diff as compare
    from pipeline.places import parse_place

    signer = None if output is None else open_signers(signing_key).signer
    places = parse_place(a), parse_place(b)
    with running("diff", master) as spark, places[0].open() as of_a, places[1].open() as of_b:
        found = compare(
            spark,
            of_a,
            of_b,
            tenants=tenants or (),
            by_rows=rows,
            output=output,
            signer=signer,
            stage=lambda what: shown(spark, what),
        )
    told = {"a": str(places[0]), "b": str(places[1]), **found.to_json()}
    tell(told, *_lines_of_diff(told), as_json=as_json)
    raise CommandExit(found.exit_code)


def _lines_of_diff(told: dict[str, Any]) -> Iterator[str]:
    for tenant in told["tenants"]:
        yield from _lines_of_tenant(tenant)
    for bundle in told["bundles"]:
        yield (
            f"{bundle['file']}: for {bundle['lacking']}, seq {bundle['from_seq']:,} to {bundle['to_seq']:,} of tenant "
            f"{bundle['tenant_id']}, {bundle['bytes']:,} bytes"
        )
    yield "the same events" if told["equal"] else "not the same events"


def _lines_of_tenant(tenant: dict[str, Any]) -> Iterator[str]:
    by = "by its tree" if tenant["compared"] == "merkle" else "by ranges of time"
    only = f"{tenant['only_in_a']:,} only in a, {tenant['only_in_b']:,} only in b"
    yield f"{tenant['tenant_id']}: {'the same events' if tenant['equal'] else only}, {by}"
    first = tenant["first_difference"]
    if first is not None and first["seq"] > 1:
        yield f"  the chains are the same up to seq {first['seq'] - 1:,}, and differ from there on"
    if tenant["forked_log"] is not None:
        yield (
            f"  both are the log {tenant['forked_log']}: one of the two was rewritten or went on from a copy, which no "
            "import mends, so no bundle is written"
        )
    for conflict in tenant["conflicts"]:
        yield (
            f"  conflict: two events have HLC {conflict['hlc']}, seq {conflict['seq_a']:,} of a and "
            f"{conflict['seq_b']:,} of b"
        )
    if unlisted := tenant["conflict_count"] - len(tenant["conflicts"]):
        yield f"  and {counted(unlisted, 'conflict')} more"
    if tenant["unsigned"]:
        yield f"  {counted(tenant['unsigned'], 'entry is', 'entries are')} not signed yet, and in no bundle"
