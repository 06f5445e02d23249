"""``tally pipeline archive`` and ``unpack``: a ledger into an archive, and an archive back into bundles."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ledger.errors import ArchiveInvalidError, InvalidInputError, TenantNotFoundError, UnknownKeyError
from ledger.exit_code import ExitCode, exit_code_of_error, gravest
from pipeline.cli.options import (
    ARCHIVE_HELP,
    ARCHIVE_VARIABLE,
    Archive,
    Dsn,
    Keys,
    Master,
    SigningKey,
    Tenants,
    load_keys,
    no_dsn,
)
from pipeline.cli.running import running, shown
from pipeline.keys import open_signer
from signing.keys import Keyring
from terminal.outcome import CommandExit, counted, err, fail, out, print_json
from terminal.program import Json

if TYPE_CHECKING:
    from ledger.verification.verdict import Break
    from pipeline.archiving import Archived
    from pipeline.archiving.filing import FileAll


Destination = Annotated[
    str | None,
    typer.Option("--dest", metavar="URL", envvar=ARCHIVE_VARIABLE, show_default="archive.url", help=ARCHIVE_HELP),
]


def named_archive(option: str, url: str | None) -> str:
    """The URL that an option, or the setting ``archive.url``, names.

    Raises:
        InvalidInputError: neither does.
    """
    if not url:
        raise InvalidInputError(f"name the place of the archive: {option} URL, or the setting archive.url")
    return url


def archive(
    dest: Destination = None,
    dsn: Dsn = None,
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
    """
    dest = named_archive("--dest", dest)
    if not dsn:
        raise no_dsn("name the ledger: --dsn postgresql://...")
    from objects.store import ArchiveStore
    from pipeline.archiving import Run
    from pipeline.archiving.filing import file_on
    from pipeline.archiving.postgres import Ledger
    from pipeline.places import place_of

    place_of("--dsn", dsn)
    signer = open_signer(signing_key)
    held = load_keys(keys) if keys else None
    store = ArchiveStore(dest)
    with Ledger.connected(dsn) as ledger, ExitStack() as stack:
        # Whoever names keys believes no other: those in the database may be anybody's who can write there.
        trusted = held if held is not None else ledger.published_keys()
        keyring = Keyring([signer.public_key, *trusted], () if held is None else held.log_verifier_keys)

        @cache
        def file_all() -> FileAll:  # Spark starts once there is a file to be made.
            spark = stack.enter_context(running("archive", master))
            filed = spark.sparkContext.accumulator(0)
            stack.enter_context(shown(spark, "archiving", filed))
            return file_on(spark, dsn, dest, filed)

        done = Run(ledger, store, signer, keyring, lambda names: file_all()(names)).archive(tenants)
    if as_json:
        broken = [None if each.first_break is None else each.first_break._asdict() for each in done]
        tenants_done = [{**each._asdict(), "first_break": first} for each, first in zip(done, broken, strict=True)]
        print_json({"archive": dest, "tenants": tenants_done})
    else:
        _print(done)
    raise CommandExit(gravest(_exit_code(each.first_break) for each in done))


def _exit_code(found: Break | None) -> ExitCode:
    from pipeline.archiving.filing import UnjudgedBreak

    if found is None:
        return ExitCode.FINE
    return ExitCode.UNKNOWN_KEY if isinstance(found, UnjudgedBreak) else ExitCode.TAMPERED


def _print(done: list[Archived]) -> None:
    for each in done:
        if each.to_seq >= each.from_seq:
            out.print(
                f"{each.tenant_id}: {counted(each.to_seq - each.from_seq + 1, 'entry', 'entries')} archived, "
                f"seq {each.from_seq:,} to {each.to_seq:,}, in {counted(each.files, 'file')} of {each.bytes:,} bytes",
                markup=False,
            )
        elif each.first_break is None:
            out.print(f"{each.tenant_id}: nothing new, archived up to seq {each.to_seq:,}", markup=False)
        if each.unsigned:
            left = counted(each.unsigned, "entry", "entries")
            out.print(f"{each.tenant_id}: {left} left, which no snapshot signs yet: see tally snapshot", markup=False)
        if each.first_break is not None:
            err.print("[bold red]broken:[/] ", end="")
            err.print(
                f"{each.tenant_id}: {each.first_break.kind} at seq {each.first_break.seq:,}, "
                f"{each.first_break.detail}; nothing behind seq {each.to_seq:,} is archived",
                markup=False,
            )


def unpack(
    output: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Folder that the bundles go to.")],
    url: Archive = None,
    tenants: Tenants = None,
    keys: Keys = None,
    signing_key: SigningKey = None,
    as_json: Json = False,
) -> None:
    """Turn an archive into bundles, TENANT.bundle.tar each.

    Every tenant is verified first, against --keys and --signing-key; what does
    not hold, or was signed by another key, is named and not written; the others
    are. A bundle has the rows, links and snapshots of the archive, and a
    manifest that --signing-key signs. It needs no Spark.

    \b
    Exit codes: 0 written; 2 the archive does not hold; 4 a key that signed it
    is not known; 1 anything else.

    \b
    Examples:
      tally pipeline unpack --archive s3://ledger-archive/prod --out bundles/
      tally pipeline unpack --archive /backup/ledger --out . --tenant acme --keys trusted/
    """
    url = named_archive("--archive", url)
    from objects.store import ArchiveStore
    from pipeline.archive.judging import unpack as unpack_tenant
    from pipeline.archive.reader import tenants_of

    signer, store = open_signer(signing_key), ArchiveStore(url)
    held = load_keys(keys or ())
    keyring = Keyring([signer.public_key, *held], held.log_verifier_keys)
    wanted = tenants or tenants_of(store)
    if not wanted:
        raise TenantNotFoundError(f"there is no archive at {url}")
    output.mkdir(parents=True, exist_ok=True)
    written, codes = [], [ExitCode.FINE]
    for tenant_id in wanted:
        try:
            each = asyncio.run(unpack_tenant(store, tenant_id, output, keyring, signer))
        except (ArchiveInvalidError, TenantNotFoundError, UnknownKeyError) as error:
            codes.append(exit_code_of_error(error))
            fail(str(error))
            continue
        written.append(each)
        if not as_json:
            entries, snapshots = counted(each.to_seq, "entry", "entries"), counted(each.snapshots, "snapshot")
            out.print(f"{each.file}: {entries} and {snapshots} of {tenant_id}", markup=False)
    if as_json:
        print_json({"bundles": [{**each._asdict(), "file": str(each.file)} for each in written]})
    raise CommandExit(gravest(codes))
