"""``tally pipeline archive``, ``merge`` and ``diff``: archives and bundles made from ledgers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from ledger.errors import (
    InvalidInputError,
    MergeRefusedError,
)
from ledger.exit_code import ExitCode, gravest
from pipeline.cli.ledgers import (
    Archives,
    Dsns,
    LedgersFile,
    NamedLedger,
    Unread,
    codes_of,
    databases,
    is_alone,
    named_ledgers,
    opened_each,
    opened_pairs,
)
from pipeline.cli.options import (
    ARCHIVE_HELP,
    ARCHIVE_VARIABLE,
    LOCK_VARIABLE,
    Keys,
    Master,
    RequiredKeys,
    SigningKey,
    Tenants,
    load_keys,
    open_signer,
    open_signers,
)
from pipeline.cli.running import running, shown
from pipeline.places import OpenPlace, Place, parse_place
from pipeline.places.protocol import ChainName
from signing.keys import Keyring, Signer
from terminal.outcome import CommandExit, counted, err, out, print_json, tell
from terminal.program import Json

if TYPE_CHECKING:
    from pipeline.archiving import Archived
    from pipeline.archiving.filing import FileAll

Destination = Annotated[
    str | None,
    typer.Option("--dest", metavar="URL", envvar=ARCHIVE_VARIABLE, show_default="archive.url", help=ARCHIVE_HELP),
]


def named_archive(option: str, url: str | None) -> str:
    """The URL that an option, or the setting ``archive.url``, names.

    Raises:
        InvalidInputError: neither names one.
    """
    if not url:
        raise InvalidInputError(f"name the place of the archive: {option} URL, or the setting archive.url")
    return url


def archive(
    dest: Destination = None,
    dsns: Dsns = None,
    ledgers: LedgersFile = None,
    tenants: Tenants = None,
    keys: Keys = None,
    signing_key: SigningKey = None,
    master: Master = None,
    as_json: Json = False,
) -> None:
    """Archive what is chained and signed, and not archived yet.

    Entries go to Parquet files by tenant and month, snapshots beside them; a
    manifest, signed with --signing-key, names the digest of every file. Rows
    are checked on their way: a tenant whose rows do not hold gets no manifest.
    Nothing is ever overwritten. A run that was killed is finished by the next.
    What no snapshot signs yet is left for the next run, and counted.

    Of several ledgers, and of one that is named, each has an archive of its
    own: the folder --dest/NAME. One that cannot be reached is named, and the
    others are archived.

    Credentials of a bucket come from the environment, such as
    AWS_ACCESS_KEY_ID. Snapshots and checkpoints must be signed by a key of
    --keys or --signing-key; without --keys, by one that the ledger publishes.

    \b
    Exit codes: 0 all is archived; 2 rows, or the archive, do not hold;
    4 something was signed by a key that is not known; 1 anything else.

    \b
    Examples:
      tally pipeline archive --dest /backup/ledger
      tally pipeline archive --dest s3://ledger-archive/prod --tenant acme
      tally pipeline archive --dest s3://ledger-archive --ledgers ledgers.txt
    """
    dest, named = named_archive("--dest", dest), databases(dsns, ledgers)
    results, unread = _archive(
        named, dest, tenants, load_keys(keys) if keys else None, open_signer(signing_key), master
    )
    if as_json:
        found = [
            name.named({**each._asdict(), "first_break": each.first_break and each.first_break._asdict()})
            for name, each in results
        ]
        others = {} if is_alone(named) else {"unread": [each._asdict() for each in unread]}
        print_json({"archive": dest, "tenants": found, **others})
    else:
        for name, each in results:
            _print(name.shown, each)
    raise CommandExit(gravest([*codes_of(unread), *(_code_of(each) for _, each in results)]))


def _archive(
    ledgers: Sequence[NamedLedger],
    dest: str,
    tenants: Sequence[str] | None,
    held: Keyring | None,
    signer: Signer,
    master: str | None,
) -> tuple[list[tuple[ChainName, Archived]], list[Unread]]:
    """Archive each ledger to its place in ``dest``; returns the result of each chain."""
    from objects.locked import ObjectLock
    from objects.store import ArchiveStore
    from pipeline.archiving import Run, archive_together
    from pipeline.archiving.filing import Ledger, file_on
    from pipeline.places.ledgers import folder_of

    lock = ObjectLock.parse(os.environ.get(LOCK_VARIABLE, "none")) if dest.startswith("s3://") else None

    def run_of(name: str | None, ledger: Ledger) -> Run:
        # A caller who names keys trusts no others: anyone with write access can insert keys into the database.
        trusted = ledger.published_keys() if held is None else held
        keyring = Keyring([signer.public_key, *trusted], () if held is None else held.log_verifier_keys)
        url = dest if name is None else f"{dest.rstrip('/')}/{folder_of(name)}"
        return Run(ledger, ArchiveStore(url, lock), signer, keyring)

    with opened_each(ledgers, Ledger.of) as (opened, unread), ExitStack() as stack:
        runs = [run_of(name, ledger) for name, ledger in opened.items()]

        @cache
        def file_all() -> FileAll:  # Spark starts once there is a file to be made.
            spark = stack.enter_context(running("archive", master))
            filed = spark.sparkContext.accumulator(0)
            stack.enter_context(shown(spark, "archiving", filed))
            return file_on(spark, filed)

        done = zip(opened, archive_together(runs, lambda tasks: file_all()(tasks), tenants), strict=True)
        for run in runs:
            run.extend_table()
        return [(ChainName(name, each.tenant_id), each) for name, some in done for each in some], unread


def _code_of(done: Archived) -> ExitCode:
    from pipeline.archiving.filing import UnjudgedBreak

    if done.first_break is None:
        return ExitCode.FINE
    return ExitCode.UNKNOWN_KEY if isinstance(done.first_break, UnjudgedBreak) else ExitCode.TAMPERED


def _print(name: str, done: Archived) -> None:
    if done.to_seq >= done.from_seq:
        out.print(
            f"{name}: {counted(done.to_seq - done.from_seq + 1, 'entry', 'entries')} archived, "
            f"seq {done.from_seq:,} to {done.to_seq:,}, in {counted(done.files, 'file')} of {done.bytes:,} bytes",
            markup=False,
        )
    elif done.first_break is None:
        out.print(f"{name}: nothing new, archived up to seq {done.to_seq:,}", markup=False)
    if done.unsigned:
        left = counted(done.unsigned, "entry", "entries")
        out.print(f"{name}: {left} left, which no snapshot signs yet: see tally snapshot", markup=False)
    if done.first_break is not None:
        err.print(
            f"[bold red]broken:[/] {escape(name)}: {done.first_break.kind} at seq {done.first_break.seq:,}, "
            f"{escape(done.first_break.detail)}; nothing behind seq {done.to_seq:,} is archived"
        )


MergedOutput = Annotated[
    str,
    typer.Option(
        *("--out", "-o"),
        metavar="FILE|DIR",
        help="Where the merged bundle goes; a folder when it is one, ends in /, or there are several bundles.",
    ),
]
MergedOrigin = Annotated[
    str | None,
    typer.Option(
        "--log-origin",
        metavar="ORIGIN",
        show_default="merge/ and the digest of what went in",
        help="Name of the log that the merged chain is of, without the tenant.",
    ),
]


def merge(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Bundles, in any order.")],
    output: MergedOutput,
    keys: RequiredKeys,
    signing_key: SigningKey = None,
    log_origin: MergedOrigin = None,
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
        err.print(f"[bold red]refused:[/] {escape(bundle['error'])}")
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
    a: Annotated[str | None, typer.Argument(metavar="A", help=A_LEDGER, show_default=False)] = None,
    b: Annotated[str | None, typer.Argument(metavar="B", help=A_LEDGER, show_default=False)] = None,
    dsns: Dsns = None,
    archives: Archives = None,
    ledgers: LedgersFile = None,
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

    Of many ledgers each database (a) is compared with the archive (b) of its
    name. Of one kind, two sets are compared by their names: each is given
    twice, first for a, then for b. Else the first (a) is compared with each
    of the others (b).

    \b
    Exit codes: 0 the same events; 3 one side lacks some; 2 both are one log
    and part all the same, or rows that were to leave as a bundle are damaged;
    1 anything else.

    \b
    Examples:
      tally pipeline diff postgresql://eu/tallystick postgresql://us/tallystick
      tally pipeline diff postgresql://eu/tallystick postgresql://us/tallystick --out repair/
      tally pipeline diff --ledgers databases-and-their-archives.txt
      tally pipeline diff --dsn eu=URL --dsn us=URL --dsn eu=URL --dsn us=URL
    """
    from pipeline.diff import diff as compare

    named = named_ledgers(dsns, archives, ledgers)
    pair = _pair(a, b, named)
    signer = None if output is None else open_signers(signing_key).signer
    with running("diff", master) as spark, _opened_sides(pair, named) as (of_a, of_b, unread):
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
    told = {**_sides(of_a, of_b), **found.to_json()}
    if pair is None:
        told["unread"] = [each._asdict() for each in unread]
    tell(told, *_lines_of_diff(told), as_json=as_json)
    raise CommandExit(gravest([found.exit_code, *codes_of(unread)]))


def _pair(a: str | None, b: str | None, named: Sequence[NamedLedger]) -> tuple[Place, Place] | None:
    """The two ledgers of the arguments; None if the ledgers to compare are ``named``.

    Raises:
        InvalidInputError: there are too few, or both are given.
    """
    if a is not None and b is not None and not named:
        return parse_place(a), parse_place(b)
    if a is not None or len(named) < 2:
        raise InvalidInputError("name two ledgers as A and B, or many with --dsn, --archive and --ledgers")
    return None


@contextmanager
def _opened_sides(
    pair: tuple[Place, Place] | None, named: Sequence[NamedLedger]
) -> Iterator[tuple[OpenPlace, OpenPlace, list[Unread]]]:
    if pair is None:
        with opened_pairs(named) as sides:
            yield sides
        return
    with pair[0].open() as a, pair[1].open() as b:
        yield a, b, []


def _sides(a: OpenPlace, b: OpenPlace) -> dict[str, Any]:
    """The two ledgers, or those of each pair."""
    pairs = [{"a": str(of_a), "b": str(b.ledgers()[name])} for name, of_a in a.ledgers().items()]
    return (
        pairs[0]
        if None in a.ledgers()
        else {"ledgers": [{"ledger": name, **each} for name, each in zip(a.ledgers(), pairs, strict=True)]}
    )


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
    name = ChainName.of(tenant).shown
    yield f"{name}: {'the same events' if tenant['equal'] else only}, {by}"
    for side in ("a", "b"):
        if seq := tenant.get(f"pruned_to_{side}"):
            yield f"  seq 1 to {seq:,} left {side} with a prune, and are not compared"
    if (first := tenant["first_difference"]) is not None and first["seq"] > 1:
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
