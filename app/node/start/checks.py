"""Conditions of a start: the node's WAL, its checkpoints and the database belong together.

Nothing here writes to the database. Only ``set_aside`` moves files; it deletes none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Literal

from app.runtime.logs import log
from app.runtime.settings.config import Settings
from app.runtime.state.losses import ASIDE, Aside
from app.runtime.state.wall_clock import read_clocks
from app.store import Connection
from app.store import node as node_store
from app.store import notary as notary_store
from app.store.chaining import ChainHead, WalPosition
from app.store.schema import powers_of_login
from app.write.followers.checkpoints import CheckpointJournal
from app.write.followers.signed_chain import root_of_chain, tree_agrees
from app.write.pending import quarantine
from ledger.errors import LedgerError, StartRefusedError, UnknownKeyError, WalCorruptError
from ledger.positions import BEFORE_FIRST
from objects import sync_folder
from signing import private_keys
from signing.checkpoint import Checkpoint, open_checkpoint, read
from signing.files import folder_of_others, path_of
from signing.note import VerifierKey
from signing.private_keys import is_remote
from wal import control as wal_control
from wal.control import Control
from wal.replication.configuration import MEMBERS_NAME
from wal.segment import FOLDER_MODE, list_segments


@contextmanager
def files_usable(folder: Path) -> Iterator[None]:
    """Reads and writes below ``folder`` inside this context are of files of the node.

    Raises:
        StartRefusedError: in place of the OSError where one cannot be.
    """
    try:
        yield
    except OSError as error:
        raise StartRefusedError(
            f"the files of this node in {folder} cannot be used: {error}. Free space where the disk is full, let this "
            "user read and write there, and move away what stands in the place of a file; then start again. Nothing "
            "acknowledged is lost"
        ) from error


def report_folders_of_others(settings: Settings, wal_folder: Path) -> None:
    """Log each folder in which any local user can replace the log or a key of this node."""
    uris = [uri for uri in (settings.signing_key_uri, settings.privacy_master_key_uri) if not is_remote(uri)]
    places = [wal_folder / wal_control.CONTROL_NAME, *map(path_of, uris)]
    for folder in sorted({found for place in places if (found := folder_of_others(place)) is not None}):
        log.warning(
            "folder_writable_by_others",
            folder=str(folder),
            do=f"see that the keys and logs below it are this node's (tally keys list), then run: chmod o-w {folder}",
        )


async def check_role(connection: Connection, *, is_any_allowed: bool) -> str | None:
    """Refuse a login that could remove the guards of the ledger's tables and change their rows. Returns what an
    accepted login could do, None when nothing.

    Raises:
        StartRefusedError: it could.
    """
    role, powers = await powers_of_login(connection)
    if not powers:
        return None
    could = (
        f"role {role} of database_url {', '.join(powers)}: who has its password can rewrite the ledger, or take away "
        "what guards it"
    )
    if not is_any_allowed:
        raise StartRefusedError(
            f"{could}. Log in as tallystick, as deploy/postgres/roles.sql makes it: a member of tallystick_service "
            "that owns nothing; or accept it with database_allow_any_role"
        )
    log.warning("database_role_too_powerful", role=role, powers=powers)
    return could


def load_control(folder: Path, *, accept_lost_wal: bool) -> tuple[Control | None, bool]:
    """The control file, and whether it is damaged and was accepted as lost.

    Raises:
        WalCorruptError: it is damaged.
    """
    try:
        return wal_control.load(folder), False
    except WalCorruptError as error:
        if not accept_lost_wal:
            raise
        log.warning("wal_recovery_control_given_up", error=str(error))
        return None, True


def accepting(*, restoring: bool) -> str:
    """How an operator accepts that records of the WAL are lost, as a phrase of a remedy."""
    return f"{'run this again' if restoring else 'start once'} with --accept-lost-wal"


def judge_wal(
    node_id: str,
    known: Control | None,
    position: WalPosition | None,
    *,
    accept_lost_wal: bool,
    restoring: bool = False,
) -> bool:
    """Refuse a WAL that is not the one Postgres knows and, unless ``restoring``, a Postgres that is older than the WAL.

    Returns:
        Whether the folder holds another WAL than Postgres knows, and the operator accepted that.

    Raises:
        StartRefusedError: says which and what to do.
    """
    if position is None:
        if known is not None and known.chained_lsn > 0 and not restoring:
            raise StartRefusedError(
                f"this WAL has chained up to LSN {known.chained_lsn}, but Postgres has never heard of node "
                f"{node_id}: it is another database or was restored from before; point database_url to the "
                "right one, restore a newer backup, or bring back what is missing with tally restore"
            )
        return False
    if known is None or known.wal_id != position.wal_id:
        found = f"WAL {known.wal_id}" if known else "no WAL"
        if not accept_lost_wal:
            raise StartRefusedError(
                f"Postgres knows node {node_id} by WAL {position.wal_id}, the folder holds {found}: the disk was "
                f"lost or swapped. Put the right folder where {node_id} is now in wal.dir, choose another node_id, or "
                f"{accepting(restoring=restoring)}: what is sound in this folder is appended again, what is not is "
                f"given up and named in _system, and so is what {quarantine.NAME} lists"
            )
        return True
    if known.epoch < position.epoch:
        if not accept_lost_wal:
            raise StartRefusedError(
                f"Postgres knows node {node_id} in epoch {position.epoch}, this folder only epoch {known.epoch}: "
                "another copy of it has been written since, or somebody raised the epoch in scheduler.wal_positions. "
                "Start that copy. If there is none, set the epoch in that row back to "
                f"{known.epoch}: then nothing is lost. Only where there was one and it is lost, "
                f"{accepting(restoring=restoring)}: what is sound in this folder is appended again, what is not is "
                f"given up and named in _system, and so is what {quarantine.NAME} lists"
            )
        return True
    if known.chained_lsn > position.chained_lsn and not restoring:
        raise StartRefusedError(
            f"Postgres says node {node_id} is chained up to LSN {position.chained_lsn}, its WAL says "
            f"{known.chained_lsn}: the database was restored or failed over to an older copy. Nothing was "
            "written; bring the newer database back, or what is missing with tally restore"
        )
    return False


def set_aside(folder: Path, position: WalPosition | None, *, is_replaced: bool = False) -> None:
    """Move segments and control file of an abandoned WAL into a folder of their own; nothing is deleted. Its records
    are read once the node runs (``app.write.intake.returning``).

    ``is_replaced``: a member supplies the same log, which holds the quarantined records too.
    """
    lost = next(path for number in count(1) if not (path := folder / f"lost-{number}").exists())
    segments = list_segments(folder)
    if segments:
        ASIDE.store(folder, ASIDE.load(folder) | {lost.name: _aside(folder, position)})
    lost.mkdir(mode=FOLDER_MODE)
    named = (wal_control.CONTROL_NAME, MEMBERS_NAME, *(() if is_replaced else (quarantine.NAME,)))
    for path in [*(segment.path for segment in segments), *(folder / name for name in named)]:
        if path.exists():
            path.rename(lost / path.name)
    sync_folder(lost)
    sync_folder(folder)
    log.warning("wal_recovery_set_aside", folder=str(lost), segments=len(segments))


def _aside(folder: Path, position: WalPosition | None) -> Aside:
    """What is known of the log in ``folder``, which is about to be moved away."""
    chained_lsn = position.chained_lsn if position is not None else BEFORE_FIRST
    try:
        control = wal_control.load(folder)
    except WalCorruptError:
        control = None
    if control is None:
        return Aside(chained_lsn, is_known=True)
    is_known = position is not None and position.wal_id == control.wal_id and position.epoch <= control.epoch
    return Aside(max(control.chained_lsn, chained_lsn if is_known else BEFORE_FIRST), is_known=is_known)


TreeState = Literal["whole", "behind", "damaged"]
"""How the stored tree of a tenant compares with the checkpoint that this node keeps of its chain. A tree that is behind
is shorter, as after a restore: no break."""


async def check_chain(
    connection: Connection,
    tenant_id: str,
    head: ChainHead | None,
    note: str,
    origin: str,
    log_signer: private_keys.FileSigner,
) -> TreeState:
    """Refuse a chain that is shorter than the checkpoint beside the WAL, or differs from it. Returns how the stored
    tree compares with that checkpoint.

    The stored tree, which is derived from the chain, is trusted only if it agrees with the checkpoint. If it does not,
    the root is computed from the links of the chain, and the notary rebuilds the tree.
    """
    checkpoint = _kept_checkpoint(tenant_id, note, origin, log_signer)
    head_seq = head.seq if head else 0
    remedy = (
        "Nothing was written; bring the newer database back, or what is missing with tally restore. tally verify tells "
        "more about what it holds"
    )
    if head_seq < checkpoint.size:
        raise StartRefusedError(
            f"the chain of tenant {tenant_id} ends at seq {head_seq}, but this node signed it up to "
            f"{checkpoint.size}: the database went back or was cut. {remedy}"
        )
    if await tree_agrees(connection, tenant_id, checkpoint):
        return "whole"
    if await root_of_chain(connection, tenant_id, checkpoint.size) != checkpoint.root:
        raise StartRefusedError(
            f"the chain of tenant {tenant_id} differs within its first {checkpoint.size} entries from the checkpoint "
            f"that this node signed: history was rewritten. {remedy}"
        )
    if await notary_store.tree_size(connection, tenant_id) < checkpoint.size:
        # As after a restore: the rows are back, the tree derived from them is not.
        log.info("stored_tree_behind", tenant_id=tenant_id, done="it is made again from the chain")
        return "behind"
    if await tree_agrees(connection, tenant_id, checkpoint):
        # Another node has rebuilt it since it was read.
        return "whole"
    log.error("stored_tree_damaged", tenant_id=tenant_id, done="it is made again from the chain")
    return "damaged"


async def chain_holds(
    connection: Connection, tenant_id: str, head: ChainHead | None, seen: tuple[int, str] | None
) -> bool:
    """Whether the tenant's chain has, at or below its head, the entry that this node has ``seen`` (seq and link)."""
    if seen is None:
        return True
    seq, link = seen
    return head is not None and head.seq >= seq and await notary_store.read_link(connection, tenant_id, seq) == link


def kept_origin(checkpoints: CheckpointJournal) -> str | None:
    """The origin that the first checkpoint beside the WAL names; None when there is no checkpoint.

    Raises:
        StartRefusedError: it is no checkpoint.
    """
    for tenant_id, note in checkpoints.load_all().items():
        with _readable(tenant_id):
            return read(note).origin.removesuffix(f"/{tenant_id}")
    return None


def _kept_checkpoint(tenant_id: str, note: str, origin: str, log_signer: private_keys.FileSigner) -> Checkpoint:
    """The checkpoint beside the WAL. A signature by an earlier key of this node is valid too: the folder is the
    node's."""
    with _readable(tenant_id):
        with suppress(UnknownKeyError):
            return open_checkpoint(note, [VerifierKey.of(origin, log_signer.public_key)], origin=origin)
        return read(note)


@contextmanager
def _readable(tenant_id: str) -> Iterator[None]:
    """Refuse the start if the tenant's checkpoint beside the WAL, used inside this context, does not open."""
    try:
        yield
    except LedgerError as error:
        raise StartRefusedError(
            f"the checkpoint of tenant {tenant_id} beside the WAL is damaged, or of another ledger: {error}; restore "
            "it, or move it away once tally verify has found the chain whole. If another node has forked the log, run "
            "tally restore --fork here too"
        ) from error


async def refuse_ahead(connection: Connection, max_skew_ms: int) -> None:
    """Return unless the wall clock is ahead of that of Postgres by more than ``max_skew_ms``.

    Raises:
        StartRefusedError: it is; times that were issued could never be taken back.
    """
    before = read_clocks()
    if (ahead_ms := before.wall_ms - await node_store.database_ms(connection)) > max_skew_ms:
        raise StartRefusedError(
            f"this machine's clock is {ahead_ms} ms ahead of that of Postgres, more than the {max_skew_ms} ms of "
            "hlc.max_clock_skew. Set the wrong one right: times from the future cannot be taken back once chained"
        )
