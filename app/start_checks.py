"""What must hold before a node may start: its WAL, its checkpoints and the database belong together.

Nothing here writes to the database; ``set_aside`` alone changes files, and deletes none.
"""

from __future__ import annotations

from pathlib import Path

import asyncpg
import structlog

from app.store import notary as notary_store
from app.store.chaining import ChainHead, WalPosition
from ledger import merkle, tiles
from ledger.errors import LedgerError, StartRefusedError, UnknownKeyError, WalCorruptError
from signing import key_file
from signing.checkpoint import Checkpoint, open_checkpoint
from signing.checkpoint import parse as parse_checkpoint
from signing.note import VerifierKey
from signing.note import parse as parse_note
from wal import control as wal_control
from wal.control import Control
from wal.segment import sync_folder

log = structlog.get_logger()


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


def judge_wal(node_id: str, known: Control | None, position: WalPosition | None, *, accept_lost_wal: bool) -> bool:
    """Refuse a WAL that is not the one Postgres knows, and a Postgres that is older than the WAL.

    Returns:
        Whether the folder holds another WAL than Postgres knows, and the operator accepted that.

    Raises:
        StartRefusedError: says which and what to do.
    """
    if position is None:
        if known is not None and known.chained_lsn > 0:
            raise StartRefusedError(
                f"this WAL has chained up to LSN {known.chained_lsn}, but Postgres has never heard of node "
                f"{node_id}: it is another database or was restored from before; point database_url to the "
                "right one, or restore a newer backup"
            )
        return False
    if known is None or known.wal_id != position.wal_id:
        found = f"WAL {known.wal_id}" if known else "no WAL"
        if not accept_lost_wal:
            raise StartRefusedError(
                f"Postgres knows node {node_id} by WAL {position.wal_id}, the folder holds {found}: the disk was "
                "lost or swapped. Bring the right wal.dir back, choose another node_id, or start once with "
                f"--accept-lost-wal to give up whatever was not chained above LSN {position.chained_lsn}"
            )
        return True
    if known.epoch < position.epoch:
        if not accept_lost_wal:
            raise StartRefusedError(
                f"Postgres knows node {node_id} in epoch {position.epoch}, this folder only epoch {known.epoch}: it is "
                "a copy, and another copy has been written since. Start that one, or start this one once with "
                f"--accept-lost-wal to give up whatever was not chained above LSN {position.chained_lsn}"
            )
        return True
    if known.chained_lsn > position.chained_lsn:
        raise StartRefusedError(
            f"Postgres says node {node_id} is chained up to LSN {position.chained_lsn}, its WAL says "
            f"{known.chained_lsn}: the database was restored or failed over to an older copy. Bring the newer "
            "database back; nothing was written"
        )
    return False


def set_aside(folder: Path) -> None:
    """Move segments and control file of a WAL that is given up into a folder of their own; nothing is deleted."""
    number = 1
    while (lost := folder / f"lost-{number}").exists():
        number += 1
    lost.mkdir(mode=0o700)
    for path in [*folder.glob("*.wal"), folder / wal_control.CONTROL_NAME]:
        if path.exists():
            path.rename(lost / path.name)
    sync_folder(lost)
    sync_folder(folder)
    log.warning("wal_recovery_set_aside", folder=str(lost))


async def check_chain(
    connection: asyncpg.Connection[asyncpg.Record],
    tenant_id: str,
    head: ChainHead | None,
    note: str,
    log_signer: key_file.FileSigner,
) -> None:
    """Refuse a chain that is shorter than the checkpoint beside the WAL, or differs from it."""
    checkpoint = _kept_checkpoint(tenant_id, note, log_signer)
    head_seq = head.seq if head else 0
    remedy = "Bring the newer database back; nothing was written. tally verify tells more about what it holds"
    if head_seq < checkpoint.size:
        raise StartRefusedError(
            f"the chain of tenant {tenant_id} ends at seq {head_seq}, but this node signed it up to "
            f"{checkpoint.size}: the database went back or was cut. {remedy}"
        )
    leaf_index = checkpoint.size - 1
    wanted = tiles.root_tiles(checkpoint.size) | tiles.inclusion_tiles(leaf_index, checkpoint.size)
    stored = await notary_store.read_tiles(connection, tenant_id, wanted)
    link = await notary_store.read_link(connection, tenant_id, checkpoint.size)
    try:
        proof = tiles.inclusion_proof(leaf_index, checkpoint.size, lambda level, index: stored[level, index])
        leaf_hash = merkle.leaf_hash(bytes.fromhex(link or ""))
        merkle.verify_inclusion(leaf_index, checkpoint.size, leaf_hash, proof, checkpoint.root)
    except KeyError as error:
        raise StartRefusedError(
            f"the stored tree of tenant {tenant_id} lacks tile {error} below the checkpoint of size "
            f"{checkpoint.size} that this node signed. {remedy}"
        ) from error
    except (LedgerError, ValueError) as error:
        raise StartRefusedError(
            f"the chain of tenant {tenant_id} differs at seq {checkpoint.size} from the checkpoint that this node "
            f"signed: history was rewritten. {remedy}"
        ) from error


def _kept_checkpoint(tenant_id: str, note: str, log_signer: key_file.FileSigner) -> Checkpoint:
    """The checkpoint beside the WAL. One of an earlier key of this node counts as well: the folder is the node's."""
    origin = note.partition("\n")[0]
    try:
        return open_checkpoint(note, [VerifierKey.of(origin, log_signer.public_key)])
    except UnknownKeyError:
        return parse_checkpoint(parse_note(note).text)
    except LedgerError as error:
        raise StartRefusedError(
            f"the checkpoint of tenant {tenant_id} beside the WAL is damaged: {error}; restore it, or move it away "
            "once tally verify has found the chain whole"
        ) from error
