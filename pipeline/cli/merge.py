"""``tally pipeline merge``: many bundles become one a tenant, verified, ordered and signed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ledger.errors import MergeRefusedError
from ledger.exit_code import ExitCode, gravest
from pipeline.cli.options import Master, RequiredKeys, SigningKey, load_keys
from pipeline.cli.running import running
from pipeline.keys import open_signers
from terminal.counted import counted
from terminal.options import Json
from terminal.outcome import CommandExit, err, out, print_json

if TYPE_CHECKING:
    from pipeline.merge.job import Merged


def merge(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Bundles, in any order.")],
    output: Annotated[
        str,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE|DIR",
            help="Where the merged bundle goes; a folder when it is one, ends in /, or there are several bundles.",
        ),
    ],
    keys: RequiredKeys,
    signing_key: SigningKey = None,
    log_origin: Annotated[
        str | None,
        typer.Option(
            "--log-origin",
            metavar="ORIGIN",
            show_default="merge/ and the digest of what went in",
            help="Name of the log that the merged chain is of, without the tenant.",
        ),
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
    from pipeline.merge.job import SETTINGS
    from pipeline.merge.job import merge as merge_bundles
    from pipeline.progress import shown

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
                stage=lambda what, counter: shown(spark, what, err, counter),
            )
        except MergeRefusedError as error:
            _print_refused(error, as_json=as_json)
            raise CommandExit(gravest(ExitCode(bundle["exit_code"]) for bundle in error.bundles)) from None
    if as_json:
        print_json(merged.to_json())
    else:
        _print(merged)
    raise CommandExit(ExitCode.FINE)


def _print_refused(error: MergeRefusedError, *, as_json: bool) -> None:
    if as_json:
        print_json({"refused": list(error.bundles)})
    for bundle in error.bundles:
        err.print("[bold red]refused:[/] ", end="")
        err.print(bundle["error"], markup=False)
    err.print("nothing was written")


def _print(merged: Merged) -> None:
    told = merged.to_json()
    out.print(
        f"{counted(len(told['inputs']), 'bundle')}, {counted(told['entries'], 'entry', 'entries')}: "
        f"{told['merged']:,} merged, {told['duplicates']:,} in more than one bundle, "
        f"{counted(told['conflict_count'], 'conflict')}",
        markup=False,
    )
    for conflict in told["conflicts"]:
        _print_conflict(conflict)
    if unlisted := told["conflict_count"] - len(told["conflicts"]):
        out.print(f"and {counted(unlisted, 'conflict')} more", markup=False)
    for bundle in told["bundles"]:
        out.print(
            f"{bundle['file']}: tenant {bundle['tenant_id']} of log {bundle['log_origin']}, "
            f"{counted(bundle['entry_count'], 'entry', 'entries')}, {bundle['bytes']:,} bytes\n"
            f"SHA-256 {bundle['sha256']}",
            markup=False,
        )


def _print_conflict(conflict: dict[str, Any]) -> None:
    out.print(
        f"conflict: two events of tenant {conflict['tenant_id']} have HLC {conflict['hlc']}; job {conflict['job_id']} "
        f"has one, kept under {conflict['conflict_hlc']}",
        markup=False,
    )
