"""The fence of chaining: ``wal_positions`` stands where this writer left it, in its epoch, or this writer stops."""

from __future__ import annotations

import structlog

from app.runtime.state.node import Node
from app.store.chaining import WalPosition
from ledger.errors import DatabaseWentBackError, FencedError
from ledger.positions import Lsn

log = structlog.get_logger()


def is_moved(position: WalPosition | None, node: Node, new_lsn: Lsn) -> bool:
    """Whether the position of ``node``, read under lock, is at ``new_lsn`` already: then the transaction that moves it
    there was committed. False where it is still where ``node`` left it: do the transaction again.

    Raises:
        FencedError: another epoch.
        DatabaseWentBackError: below what was committed.
    """
    old_lsn = node.chained.lsn
    if position is not None and position.epoch > node.epoch:
        log.error("wal_fencing_reject", epoch=node.epoch, newer_epoch=position.epoch)
        raise FencedError(
            f"epoch {position.epoch} has taken over the WAL of {node.node_id}; "
            f"this process is epoch {node.epoch} and stops"
        )
    if position is not None and position.epoch == node.epoch:
        # Held records that are tried again move no position; should they be chained, that is seen next time.
        if position.chained_lsn == old_lsn:
            return False
        if position.chained_lsn == new_lsn:
            return True
    raise _went_back(position, node, old_lsn)


def refuse_older(position: WalPosition | None, node: Node, chained_lsn: Lsn) -> None:
    """Refuse a database that knows less of the WAL of ``node`` than ``chained_lsn``, up to which it was chained before
    ``position`` was read. Another WAL or a higher epoch is left to the fence.

    Raises:
        DatabaseWentBackError: it does.
    """
    if position is None or (
        position.wal_id == node.wal_id and (position.epoch, position.chained_lsn) < (node.epoch, chained_lsn)
    ):
        raise _went_back(position, node, chained_lsn)


def _went_back(position: WalPosition | None, node: Node, chained_lsn: Lsn) -> DatabaseWentBackError:
    return DatabaseWentBackError(
        f"Postgres says {position} for {node.node_id}, but this node had chained up to LSN {chained_lsn} "
        f"in epoch {node.epoch}; the database was restored or failed over to an older copy"
    )
