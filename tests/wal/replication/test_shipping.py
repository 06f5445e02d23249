"""The thread that ships a log to its members, over real sockets: what it learns from the writer, and what it tells."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from ledger.errors import LedgerError
from ledger.positions import BEFORE_FIRST, Epoch, Lsn
from tests.wal.logs import NODE, WAL_ID, hlc_of, payload_of
from tests.wal.replication.keepers import WAIT_S, Keeper, until
from tests.wal.replication.quorums import batch
from wal.format import BATCH_RECORD_BYTES, decode_batch
from wal.group_commit import GroupCommit
from wal.history import EpochStart
from wal.log import Log
from wal.replication.ack_mode import AckMode
from wal.replication.configuration import NO_MEMBERS
from wal.replication.leading import Members, Shipper
from wal.replication.proposer import Proposer
from wal.replication.tail_reader import TailReader

RUN = "1".rjust(32, "0")


class ByHand:
    """The writer of a log that writes and syncs when a test says so."""

    has_ended = True

    def __init__(self, log: Log, bell: int) -> None:
        self._log, self._bell = log, bell
        self.expected: list[int] = []

    @property
    def written_lsn(self) -> Lsn:
        return self._log.written_lsn

    @property
    def durable_lsn(self) -> Lsn:
        return self._log.durable_lsn

    def write(self, last_lsn: int, *, ring: bool = True) -> None:
        data = batch(self._log.next_lsn, last_lsn)
        self._log.append(decode_batch(data, 0, len(data)), data[BATCH_RECORD_BYTES:])
        if ring:
            os.eventfd_write(self._bell, 1)

    def expect(self, entries: int) -> None:
        self.expected.append(entries)

    def sync(self, *, ring: bool = True) -> None:
        self._log.sync()
        if ring:
            os.eventfd_write(self._bell, 1)


class Unwatched:
    def acknowledged(self, address: str, seconds: float) -> None: ...
    def lost(self, address: str, reason: str) -> None: ...
    def refused(self, address: str, reason: str) -> None: ...
    def lags(self, address: str, lag_lsn: int) -> None: ...


class Node:
    """A node's log and its shipper, to three safekeepers in this process."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.reached: list[Lsn] = []
        self.over: list[LedgerError] = []
        keepers = [stack.enter_context(closing(Keeper(folder / f"keeper-{number}"))) for number in range(3)]
        self.folder = folder / "own"
        self.folder.mkdir()
        self.log = Log(self.folder, node_id=NODE, wal_id=WAL_ID, epoch=Epoch(1), next_lsn=Lsn(1))
        self._members = Members({keeper.address: "use1" for keeper in keepers}, RUN, timeout_s=WAIT_S)
        self.shipper = Shipper(
            self._members,
            self._proposer,
            on_reached=lambda reached: self.reached.append(reached.committed_lsn),
            on_over=self.over.append,
            watcher=Unwatched(),
            lag_threshold=1 << 60,
            keeps_damaged=False,
        )

    def _proposer(self, shipper: Shipper) -> Proposer:
        history = (EpochStart(Epoch(1), Lsn(1)),)
        return Proposer(
            node_id=NODE,
            run=RUN,
            wal_id=WAL_ID,
            epoch=Epoch(1),
            history=history,
            configuration=NO_MEMBERS,
            home="use1",
            ack_mode=AckMode.REPLICATED_QUORUM,
            addresses=self._members.addresses,
            committed_lsn=BEFORE_FIRST,
            read=TailReader(self.folder, NODE, history).read,
            oldest_lsn=lambda: Lsn(1),
            send=shipper.send,
            drop=shipper.drop,
            on_fenced=shipper.on_fenced,
            on_configured=lambda _: None,
        )

    def is_held_by_all(self, lsn: int) -> bool:
        return all(report.replicated_lsn >= lsn for report in self.shipper.reports())

    def has_reached(self, lsn: int) -> bool:
        return bool(self.reached) and self.reached[-1] >= lsn


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with ExitStack() as stack:
        yield Node(tmp_path, stack)


def test_members_hold_a_batch_before_it_is_synced_here_and_it_is_committed_only_then(node: Node) -> None:
    writer = ByHand(node.log, node.shipper.bell)
    node.shipper.start(writer)
    writer.write(1)
    writer.sync()
    until(lambda: node.has_reached(1), "the members vote")
    writer.write(5)
    until(lambda: node.is_held_by_all(5), "all members hold what is not synced here")
    assert node.reached[-1] == node.shipper.proposer.committed_lsn == 1
    writer.sync()
    until(lambda: node.has_reached(5), "it is committed")
    writer.write(6, ring=False)
    writer.sync(ring=False)
    writer.write(9)
    until(lambda: node.is_held_by_all(9), "both are taken in at once")
    assert node.shipper.proposer.committed_lsn == 6
    writer.sync()
    until(lambda: node.has_reached(9), "it is committed")
    node.shipper.close(WAIT_S)
    node.log.close()
    assert (node.over, node.reached[-1]) == ([], 9)
    assert writer.expected == [1, 4, 1, 3], "whoever waited for what is committed comes back to the writer"


def test_what_the_writer_makes_durable_is_shipped_and_told_by_its_bell_alone(node: Node) -> None:
    writer = GroupCommit(node.log, shipper_bell=node.shipper.bell, on_failure=node.over.append)
    node.shipper.start(writer)
    for lsn in range(1, 2000):
        assert writer.append(hlc_of(lsn), 1, payload_of(lsn)) == lsn
        if lsn % 400 == 1:
            until(lambda lsn=lsn: node.has_reached(lsn), "it is committed")
    until(lambda: node.is_held_by_all(1999), "all members hold it")
    writer.close(WAIT_S)
    node.shipper.close(WAIT_S)
    assert (node.over, node.reached[-1]) == ([], 1999)
    assert node.reached == sorted(set(node.reached))


def test_a_bell_that_may_still_be_rung_stays_open(node: Node) -> None:
    writer = ByHand(node.log, node.shipper.bell)
    writer.has_ended = False
    node.shipper.start(writer)
    node.shipper.close(WAIT_S)
    writer.write(1)
    writer.sync()
    writer.has_ended = True
    node.shipper.close(WAIT_S)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.eventfd_write(node.shipper.bell, 1)
    node.log.close()
