"""PostgreSQL, as the service uses it here: one row that says which epoch chains, and up to where; and the chain."""

from __future__ import annotations

from typing import NamedTuple

from ledger.positions import BEFORE_FIRST, NO_EPOCH, Epoch, Lsn
from tests.wal.replication.simulation.oracle import Oracle


class Row(NamedTuple):
    """``disk`` is the id of the disk on which the epoch is written."""

    epoch: Epoch = NO_EPOCH
    disk: str = ""
    chained_lsn: Lsn = BEFORE_FIRST


class Database:
    def __init__(self, oracle: Oracle) -> None:
        self.row = Row()
        self._oracle = oracle

    def take(self, epoch: Epoch, disk: str, seen: Epoch) -> bool:
        """A higher epoch chains from now on, if no other was taken since ``seen``."""
        if self.row.epoch != seen or epoch <= seen:
            return False
        self.row = self.row._replace(epoch=epoch, disk=disk)
        return True

    def chain(self, epoch: Epoch, behind: Lsn, payloads: list[bytes]) -> bool:
        """Chain these records, unless another epoch or another position is there."""
        if (self.row.epoch, self.row.chained_lsn) != (epoch, behind):
            return False
        self._oracle.chains(Lsn(behind + 1), payloads)
        self.row = self.row._replace(chained_lsn=Lsn(behind + len(payloads)))
        return True
