"""``tally restore``: bring back what PostgreSQL lost. ``tally failover``: take the log of a dead node."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer
from rich.progress import Progress

from app.runtime.logs import configure_logs
from app.runtime.settings.config import Settings, load_settings
from app.share.archive import require_packages
from cli.options import Keys
from cli.serve import running_postgres
from ledger.errors import ConfigurationError, InvalidInputError, TenantNotFoundError, refuse
from objects.store import ArchiveStore
from signing.keys import Keyring
from terminal.outcome import counted, err, tell
from terminal.program import Json

AcceptLostWal = Annotated[
    bool,
    typer.Option(
        "--accept-lost-wal",
        help="With --from wal or --fork: although the WAL is lost, short or damaged. Gives up what cannot be read.",
    ),
]


def restore(
    places: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FILE]...|[URL]", help="Bundles of this ledger, or where its archive is."),
    ] = None,
    source: Annotated[
        Literal["wal", "bundle", "archive"] | None, typer.Option("--from", help="Where the rows come from.")
    ] = None,
    keys: Keys = None,
    fork: Annotated[
        bool, typer.Option("--fork", help="Go on without what is lost, as a new log; recorded in _system.")
    ] = False,
    reason: Annotated[str | None, typer.Option("--reason", help="With --fork: why, for whoever audits.")] = None,
    accept_lost_wal: AcceptLostWal = False,
    as_json: Json = False,
) -> None:
    """Bring back rows that PostgreSQL lost, the same rows with the same links; the service must not run.

    After PostgreSQL was restored from a backup that is older than the ledger, a
    node refuses to start. --from wal chains again what its WAL still holds and
    keeps that only if every chain then has all that this node ever signed.
    --from bundle brings back what exported bundles hold; keys that may have
    signed them are those of --keys and this node: what is brought back is this
    ledger's own, for which keys of others do not count.
    --from archive brings back what is archived, by default at archive.url,
    also into a new database. What is lost for good can
    only be given up: --fork begins a new log origin and records that, with the
    reason and what had been signed, in _system. Where the WAL is damaged as
    well, both go on with --accept-lost-wal.

    \b
    Examples:
      tally restore --from wal
      tally restore --from bundle acme-1.bundle.tar acme-2.bundle.tar && tally restore --from wal
      tally restore --from archive s3://ledger-archive/prod && tally restore --from wal
      tally restore --fork --reason "disk of db1 lost on 3 May, newest backup from 1 May"
    """
    settings, files = load_settings(), places or []
    refuse(
        InvalidInputError,
        (
            fork == (source is not None),
            "say either --from wal, --from bundle FILE..., --from archive [URL], or --fork --reason TEXT",
        ),
        (source != "archive" and bool(files) != (source == "bundle"), "files go with --from bundle, and it needs some"),
        (fork != bool(reason and reason.strip()), "--reason goes with --fork, and it needs one"),
        (accept_lost_wal and not fork and source != "wal", "--accept-lost-wal goes with --from wal or --fork"),
    )
    configure_logs()
    with _database(settings, may_be_new=source == "archive") as url:
        if source == "wal":
            _from_wal(settings, url, as_json, accept_lost_wal=accept_lost_wal)
        elif source == "bundle":
            _from_bundles(settings, url, [Path(file) for file in files], keys, as_json)
        elif source == "archive":
            _from_archive(settings, url, files, keys, as_json)
        else:
            _fork(settings, url, (reason or "").strip(), as_json, accept_lost_wal=accept_lost_wal)


@contextmanager
def _database(settings: Settings, *, may_be_new: bool) -> Iterator[str]:
    """URL of the database in the settings, else of the embedded PostgreSQL, which runs meanwhile; with ``may_be_new``
    that one gets its schema if it has none."""
    if settings.database_url is not None:
        yield settings.database_url
        return
    with running_postgres(settings.data_dir) as postgres:
        if may_be_new:
            from app.store.migrate import migrate

            migrate(postgres.owner_url())
        yield postgres.service_url()


_START_ACCEPTING = "start the service once with --accept-lost-wal, which records what is lost in _system"


def _from_wal(settings: Settings, url: str, as_json: bool, *, accept_lost_wal: bool) -> None:
    from app.node.start.restore import restore_from_wal

    with Progress(console=err, transient=True, disable=as_json) as progress:
        task = progress.add_task("records", total=None)
        grown, left_behind = asyncio.run(
            restore_from_wal(
                settings,
                url,
                lambda records: progress.update(task, completed=records),
                accept_lost_wal=accept_lost_wal,
            )
        )
    ends = [
        f"{head.tenant_id}: this node signed up to seq {head.size}, and its WAL has none of what is missing: bring "
        "that back from the WALs of other nodes, or from bundles; every start is refused until then"
        for head in left_behind
    ]
    whole = "every chain has all that this node signed; the service can start" if grown else "nothing was missing"
    tell(
        {
            "tenants": [each._asdict() for each in grown],
            "left_behind": [msgspec.structs.asdict(head) for head in left_behind],
        },
        *(
            f"{each.tenant_id}: {counted(each.entries, 'entry', 'entries')} back, up to seq {each.to_seq}"
            for each in grown
        ),
        *(ends or [whole]),
        *([_START_ACCEPTING] if accept_lost_wal else ()),
        as_json=as_json,
    )


def _from_archive(settings: Settings, url: str, places: list[str], keys: Path | None, as_json: bool) -> None:
    """Restore an archive: it is verified and turned into bundles, which are restored."""
    named: list[str | None] = [*places] or [settings.archive.url]
    place, *others = named
    if place is None or others:
        raise InvalidInputError("--from archive takes the one URL of the archive, by default the setting archive.url")
    require_packages("tally restore --from archive")
    from app.node.start.restore import own_signers
    from pipeline.archive.reader import bundle_pieces, tenants_of

    signers, store = own_signers(settings), ArchiveStore(place)
    keyring = Keyring([*(each.public_key for each in signers), *(Keyring.load(keys) if keys is not None else ())])
    if not (tenants := tenants_of(store)):
        raise TenantNotFoundError(f"there is no archive at {place}")
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="restore-", dir=settings.data_dir) as name:
        files = [Path(name, f"{tenant_id}.bundle.tar") for tenant_id in tenants]
        for tenant_id, file in zip(tenants, files, strict=True):
            with file.open("wb") as bundle:
                bundle.writelines(bundle_pieces(store, tenant_id, keyring, signers[0]))
        _from_bundles(settings, url, files, keys, as_json, is_archive=True)


def _from_bundles(
    settings: Settings,
    url: str,
    files: list[Path],
    keys: Path | None,
    as_json: bool,
    *,
    is_archive: bool = False,
) -> None:
    """``is_archive``: the files were unpacked from an archive, and are deleted when this command ends."""
    from app.node.start.restore import restore_from_bundles

    restored = asyncio.run(restore_from_bundles(settings, url, files, keys, may_begin_log=is_archive))
    named = [(file.name if is_archive else str(file), each) for file, each in restored]
    tell(
        {"bundles": [{"file": name, **each._asdict()} for name, each in named]},
        *(
            f"{name}: {counted(each.entries, 'entry', 'entries')} and {counted(each.snapshots, 'snapshot')} back, "
            f"{each.tenant_id} now ends at seq {each.to_seq}"
            for name, each in named
        ),
        as_json=as_json,
    )


def _fork(settings: Settings, url: str, reason: str, as_json: bool, *, accept_lost_wal: bool) -> None:
    from app.node.start.restore import fork_log

    forked = asyncio.run(fork_log(settings, url, reason, accept_lost_wal=accept_lost_wal))
    tell(
        msgspec.to_builtins(forked),
        f"the log goes on as {forked.to_origin}; it was {forked.from_origin}. {forked.differing_count} tenants lack "
        "entries that had been signed. The next start records this in _system",
        *([_START_ACCEPTING] if accept_lost_wal else []),
        as_json=as_json,
    )


# --- the log of a dead node -------------------------------------------------------------------------


def failover(
    node: Annotated[str, typer.Option("--node", help="The node whose log is taken.")],
    accept_loss: Annotated[
        bool,
        typer.Option(
            "--accept-loss",
            help="Go on with those safekeepers that answer, also without a majority: what only the others hold is "
            "given up, and _system says so.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Take the log of a dead node: win an epoch, fetch it, and chain all that was committed.

    A node that neither PostgreSQL nor a safekeeper knows is refused.

    Its lease is taken from whoever has it; a process that still writes that log
    is fenced and stops. Settings are those of the node: replication.members,
    wal.ack_mode, database_url; TALLY_DATA_DIR is where its log is put here.
    Afterwards the lease is free: a standby, or the node itself on a new disk,
    goes on with tally serve.

    --accept-loss is for a region that is gone: members of replication.members
    that answer are taken for all there are, and those of this process's region
    vote from now on.

    \b
    Examples:
      tally failover --node node-7f3a
      TALLY_REGION=eu1 tally failover --node node-7f3a --accept-loss
    """
    settings = load_settings(node_id=node)
    if not settings.wal.ack_mode.is_replicated:
        raise ConfigurationError(
            "wal.ack_mode is not REPLICATED_QUORUM or REPLICATED_ALL: from copies nobody may take over"
        )
    configure_logs()
    said = asyncio.run(_failover(settings, accept_loss))
    tell(
        said,
        f"epoch {said['epoch']} of {node} is won, all that was committed is chained: LSN {said['chained_lsn']}",
        as_json=as_json,
    )


async def _failover(settings: Settings, accept_loss: bool) -> dict[str, object]:
    from app.node.start.kept_copies import refuse_unknown
    from app.node.wiring import running

    url = settings.database_url
    if url is None:
        raise ConfigurationError("database_url is not set: name the ledger's in TALLY_DATABASE_URL")
    assert settings.node_id is not None
    await refuse_unknown(settings, url, settings.node_id)
    async with running(settings, url, takeover="accepts loss" if accept_loss else "seizes") as (service, _):
        node = service.node
        await node.chained.reached(service.writer.durable_lsn, settings.write.timeout.total_seconds())
        return {
            "node_id": node.node_id,
            "epoch": node.epoch,
            "chained_lsn": node.chained.lsn,
            "accepted_loss": accept_loss,
        }
