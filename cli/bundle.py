"""``tally bundle``: take a ledger, or a range of it, out as a file that anybody can verify, and merge such files in."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from hashlib import file_digest
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from app.runtime.answers.chain import ImportAnswer
from app.runtime.postgres import DATABASE_FAULTS, text_of
from app.runtime.settings.config import load_settings
from app.share.archive import require_packages
from app.share.bundle.from_v1 import V1Export, export_from_v1
from app.share.bundle.recovery import export_from_wal, survey
from app.store.v1_log import V1Log
from app.trust import node_keys
from cli.archive import signer_and_keys
from cli.client import LedgerClient, Service
from cli.options import Key, Keys, Tenant, Url
from ledger.errors import (
    BundleInvalidError,
    ConfigurationError,
    DatabaseUnavailableError,
    InvalidInputError,
    refuse,
)
from ledger.exit_code import ExitCode
from ledger.names import TENANT_ID
from ledger.text import secret_text
from objects.store import ArchiveStore
from signing import private_keys
from signing.bundle.reader import BundleReader
from signing.files import HEAD_BYTES, is_like_bundle, looks_like, open_regular, whole_file
from signing.keys import Signer
from tallystick_client import ProblemError
from terminal.outcome import counted, err, fail, readable, tell
from terminal.program import Json

bundle = typer.Typer(no_args_is_help=True, help="Ledgers as files: carried elsewhere, verified offline.")

_KEY_BESIDE_WAL = Path("keys") / "signing.pem"
"""Default path of the signing key, relative to the data folder."""


FromWal = Annotated[
    Path | None,
    typer.Option(
        "--from-wal",
        metavar="DIR",
        help="Take the unchained records out of this WAL folder, offline, of a node that cannot reach PostgreSQL.",
    ),
]
FromArchive = Annotated[
    str | None,
    typer.Option(
        "--from-archive",
        metavar="URL",
        help="Take what is archived, entries that left the database as well: a folder, s3://bucket/prefix.",
    ),
]


@bundle.command("export")
def export(
    tenant: Tenant,
    url: Url,
    output: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Where the bundle goes.")],
    from_seq: Annotated[int | None, typer.Option("--from-seq", min=1, help="First entry.")] = None,
    to_seq: Annotated[int | None, typer.Option("--to-seq", min=1, help="Last entry.")] = None,
    from_wal: FromWal = None,
    from_archive: FromArchive = None,
    key: Key = None,
    keys: Keys = None,
    evidence: Annotated[
        bool, typer.Option("--evidence", help="Of a broken chain: take what is stored as it stands, marked as broken.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Export a tenant's ledger, signed, as one file. The file appears only once it is whole.

    Without --to-seq it ends with the newest entry there is. With --from-wal no
    service is asked: what a node wrote and never chained becomes a chain of its
    own, signed with the node's key; nothing in the folder is changed.

    With --from-archive the bundle has all that is archived of the tenant, or
    what is from --from-seq on, also where its first entries left with a prune.
    The archive is verified first, by the key that signs and --keys, else by
    keys that the service publishes. A ledger that lacks what left imports that
    bundle, and goes on by the exchange.

    A chain that is broken is not exported, and the exit code is 2. With
    --evidence what is stored of it leaves for an auditor, once the node has
    found a break: no verifier takes that file for a bundle.

    \b
    Examples:
      tally bundle export --tenant acme -o acme.bundle.tar
      tally bundle export -t acme --from-seq 20001 --to-seq 40000 -o acme-2.bundle.tar
      tally bundle export -t acme --from-wal /mnt/disk/var/wal -o stranded.bundle.tar
      tally bundle export -t acme --from-archive s3://ledger-archive/prod -o acme.bundle.tar
      tally bundle export -t acme --evidence -o acme.evidence.tar
    """
    is_wal, is_archive = from_wal is not None, from_archive is not None
    refuse(
        InvalidInputError,
        (evidence + is_wal + is_archive > 1, "say one of --evidence, --from-wal and --from-archive"),
        (
            key is not None and not (is_wal or is_archive or evidence),
            "--key goes with --from-wal and --from-archive; the service signs with its own key",
        ),
        (keys is not None and not is_archive, "--keys goes with --from-archive"),
        (is_archive and to_seq is not None, "what is archived is taken to its end; leave --to-seq out"),
        (
            is_wal and (from_seq, to_seq) != (None, None),
            "records in a WAL have no seq; leave --from-seq and --to-seq out",
        ),
    )
    if evidence:
        _export_evidence(url, tenant, (from_seq, to_seq), output, as_json)
        return
    with whole_file(output) as file:
        if from_wal is not None:
            _export_from_wal(from_wal, tenant, key, file)
        elif from_archive is not None:
            file.writelines(_archived(from_archive, url, tenant, from_seq, keys, key))
        else:
            _export_served(url, tenant, (from_seq, to_seq), file)
        file.flush()
        try:
            told = _told(Path(file.name))
        except BundleInvalidError as error:
            raise fail(f"tenant {tenant} is not exported: {error}", ExitCode.TAMPERED) from error
    tell(
        {"file": str(output), **told},
        f"{output}: tenant {tenant}, {counted(told['entry_count'], 'entry', 'entries')} "
        f"(seq {told['from_seq']} to {told['to_seq']}), {counted(told['snapshot_count'], 'snapshot')}, "
        f"{told['bytes']:,} bytes",
        f"SHA-256 {told['sha256']}",
        as_json=as_json,
    )


@bundle.command("import")
def import_(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Bundles, in any order.", dir_okay=False)],
    client: Service,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Verify and merge, but store nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Merge bundles into the ledger: all are verified first, against the keys that the service trusts.

    What is there already is not added again, so a call that was cut short is
    finished by repeating it. Which keys are trusted is said by the service's
    setting bundle.trusted_keys.

    \b
    Exit codes: 0 imported; 2 a bundle does not hold; 4 it was not signed by
    a trusted key; 1 anything else. But for 0 nothing of the call is stored,
    unless the service or its database went away in the middle.

    \b
    Examples:
      tally bundle import site-a.tar site-b.tar --dry-run
      tally bundle import /mnt/usb/*.tar --json
    """
    for path in files:
        with open_regular(path) as file:
            head = file.read(HEAD_BYTES)
        if not is_like_bundle(head):
            raise InvalidInputError(f"{readable(path)} is no bundle; it looks like {looks_like(head)}")
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeElapsedColumn(),
        console=err,
        disable=as_json,
    ) as progress:
        task = progress.add_task("sending", total=sum(file.stat().st_size for file in files))

        def advance(count: int) -> None:
            progress.advance(task, count)
            if progress.tasks[task].finished:
                progress.update(task, description="verifying and merging")

        try:
            told = client.checked(client.import_bundles(files, dry_run=dry_run, advance=advance), ImportAnswer)
        except ProblemError as error:
            raise fail(str(error), _CODES.get(error.kind, ExitCode.COULD_NOT_RUN)) from error
    tell(told, *_of_import(told), as_json=as_json)


@bundle.command("from-v1")
def from_v1(
    dsn: Annotated[str, typer.Option("--dsn", metavar="DSN", help="PostgreSQL of the v1 scheduler; is only read.")],
    tenant: Annotated[str, typer.Option("--tenant", "-t", help="Tenant there.")],
    output: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Where the bundle goes.")],
    key: Annotated[
        str, typer.Option("--key", metavar="URI", help="Key that signs it; the importing service must trust it.")
    ],
    here: Annotated[
        str | None, typer.Option("--as", metavar="TENANT", help="Tenant here.", show_default="the same name")
    ] = None,
    up_to_fault: Annotated[
        bool, typer.Option("--up-to-fault", help="Of a chain that does not hold: take the rows before its first fault.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Make a bundle of a v1 scheduler's log, so that its chain becomes the beginning of a tenant.

    Every row is verified while it is read, and keeps its HLC and its link.
    Nothing is written if one does not fit: the first is named, and the exit code
    is 2 where the chain was changed, 1 where it is in order and no ledger can
    hold the row. With --up-to-fault the rows before it are taken, and the exit
    code is 3. The v1 scheduler should be stopped: what it writes later cannot be
    brought in any more. docs/from-v1.md has all steps.

    \b
    Examples:
      tally bundle from-v1 --dsn postgresql://reader@old/stella -t acme --key v1.pem -o acme-v1.bundle.tar
      tally bundle from-v1 --dsn "$V1_DSN" -t "Acme Ltd" --as acme --key v1.pem -o acme-v1.bundle.tar
    """
    tenant_here = tenant if here is None else here
    if not re.fullmatch(TENANT_ID, tenant_here):
        raise InvalidInputError(f"{tenant_here!r} cannot be the name of a tenant here; choose one with --as")
    signer = private_keys.load(key)
    signers = signer, private_keys.log_signer(signer, may_generate=False)
    dsn = secret_text(dsn, "--dsn")
    with whole_file(output) as file:
        made = asyncio.run(_export_from_v1(dsn, (tenant, tenant_here), signers, file, up_to_fault))
        file.flush()
        told = _told(Path(file.name))
    fault = None if made.fault is None else str(made.fault)
    tell(
        {"file": str(output), **told, "payload_form": made.payload_form, "fault": fault},
        f"{output}: tenant {tenant_here}, {counted(told['entry_count'], 'entry', 'entries')} of v1 tenant {tenant}, "
        f"{told['bytes']:,} bytes",
        f"last link {told['to_chain_link']}; each link was recomputed, payloads hashed as {made.payload_form}",
        f"SHA-256 {told['sha256']}",
        as_json=as_json,
    )
    if fault is not None:
        raise fail(f"the rows from the first fault on are left out: {fault}", ExitCode.INCOMPLETE)


async def _export_from_v1(
    dsn: str, tenants: tuple[str, str], signers: tuple[Signer, Signer], file: BinaryIO, up_to_fault: bool
) -> V1Export:
    try:
        async with V1Log.opened(dsn, tenants[0]) as log:
            return await export_from_v1(log, tenants[1], signers, file.write, up_to_fault=up_to_fault)
    except DATABASE_FAULTS as error:
        raise DatabaseUnavailableError(f"the v1 log cannot be read from PostgreSQL: {text_of(error)}") from error


_CODES = {"bundle-invalid": ExitCode.TAMPERED, "untrusted-key": ExitCode.UNKNOWN_KEY}


def _of_import(told: dict[str, Any]) -> list[str]:
    would = "would be " if told["dry_run"] else ""
    return [
        f"{counted(told['bundles'], 'bundle')}, {counted(told['entries'], 'entry', 'entries')}: "
        f"{told['imported']:,} {would}imported, {told['duplicates']:,} there already; "
        f"{counted(told['jobs_changed'], 'job')} {would}changed",
        *(
            f"conflict: two events of tenant {each['tenant_id']} have HLC {each['hlc']}; job {each['job_id']} has one, "
            f"kept under {each['conflict_hlc']}"
            for each in told["conflicts"]
        ),
        *(
            f"tenant {tenant}: head at seq {head['seq']:,}, link {head['chain_link']}"
            for tenant, head in told["new_heads"].items()
        ),
    ]


def _export_served(url: str, tenant: str, wanted: tuple[int | None, int | None], file: BinaryIO) -> None:
    try:
        with LedgerClient(url) as client:
            client.export_bundle(tenant, file.write, from_seq=wanted[0], to_seq=wanted[1])
    except ProblemError as error:
        code = ExitCode.TAMPERED if error.kind == "chain-damaged" else ExitCode.COULD_NOT_RUN
        raise fail(str(error), code) from error


def _export_from_wal(folder: Path, tenant: str, key: str | None, file: BinaryIO) -> None:
    report = survey(folder)
    if report.verdict == "torn":
        err.print(f"the last batch is torn and was never acknowledged; it is left out: {report.reason}", markup=False)
    wal_folder, settings = Path(report.folder), load_settings()
    if key is None and (wal_folder / node_keys.NAME).exists():
        # The keys that the node itself would sign with, after rotations too.
        signer, log_signer = node_keys.key_files(
            wal_folder, settings.signing.key_uri or str(_key_beside(wal_folder, must_exist=False))
        )
    else:
        signer = private_keys.load(key or settings.signing.key_uri or str(_key_beside(wal_folder, must_exist=True)))
        log_signer = private_keys.log_signer(signer, may_generate=False)
    export_from_wal(report, tenant, signer, log_signer, file.write)


def _archived(
    archive: str, url: str, tenant: str, from_seq: int | None, keys: Path | None, key: str | None
) -> Iterator[bytes]:
    """The pieces of a bundle of what is archived."""
    require_packages("tally bundle export --from-archive")
    # Imported here, because it loads Arrow.
    from pipeline.archive.reader import bundle_pieces

    with LedgerClient(url) as client:
        signer, keyring = signer_and_keys(key, keys, client)
    return bundle_pieces(ArchiveStore(archive), tenant, keyring, signer, from_seq)


def _key_beside(folder: Path, *, must_exist: bool) -> Path:
    """The key file that a node makes beside its WAL by default."""
    path = folder.absolute().parent.parent / _KEY_BESIDE_WAL
    if must_exist and not path.exists():
        raise ConfigurationError(f"the node's signing key is not at {path}; name it with --key")
    return path


def _export_evidence(url: str, tenant: str, wanted: tuple[int | None, int | None], output: Path, as_json: bool) -> None:
    """Save the stored rows of a broken chain."""
    with whole_file(output) as file, LedgerClient(url) as client:
        client.export_bundle(tenant, file.write, from_seq=wanted[0], to_seq=wanted[1], evidence=True)
    with output.open("rb") as written:
        digest, size = file_digest(written, "sha256").hexdigest(), written.tell()
    tell(
        {"file": str(output), "tenant_id": tenant, "bytes": size, "sha256": digest},
        f"{output}: evidence of the broken chain of tenant {tenant}, {size:,} bytes; verifiers refuse it",
        f"SHA-256 {digest}",
        as_json=as_json,
    )


def _told(path: Path) -> dict[str, Any]:
    """The summary of a received file that is a complete bundle."""
    with BundleReader.open(path) as reader:
        manifest = reader.manifest
        return {
            "sha256": reader.digest,
            "bytes": reader.size_bytes,
            "tenant_id": manifest.tenant_id,
            "from_seq": manifest.from_seq,
            "to_seq": manifest.to_seq,
            "entry_count": manifest.entry_count,
            "snapshot_count": manifest.snapshot_count,
            "node_id": manifest.node_id,
            "log_origin": manifest.log_origin,
            "to_chain_link": manifest.to_chain_link,
            "tree_root": manifest.tree_root,
        }
