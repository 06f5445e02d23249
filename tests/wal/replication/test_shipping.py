"""The thread that ships a log to its members, over real sockets: what it learns from the writer, and what it tells."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest

from ledger.errors import FencedError, LedgerError
from ledger.positions import BEFORE_FIRST, Epoch, Lsn
from tests.waiting import until
from tests.wal.logs import NODE, WAL_ID, hlc_of, payload_of
from tests.wal.replication.damaging_proxy import DamagingProxy
from tests.wal.replication.keepers import WAIT_S, Keeper, talking
from tests.wal.replication.quorums import batch
from tests.wal.test_native import IS_BUILT
from wal.control import EpochStart
from wal.format import BATCH_RECORD_BYTES, decode_batch
from wal.group_commit import GroupCommit
from wal.inspect import verify
from wal.log import Log
from wal.replication.configuration import NO_MEMBERS, AckMode
from wal.replication.file_log import TailReader
from wal.replication.leading import Members, Shipper
from wal.replication.messages import Greeting, Prepare, Promise
from wal.replication.proposer import Proposer
from wal.replication.wires import PAUSE_FIRST_S
from wal.segment import list_segments

RUN = "1".rjust(32, "0")
HISTORY = (EpochStart(Epoch(1), Lsn(1)),)


class ByHand:
    """The writer of a log that writes and syncs when a test says so."""

    has_ended = True
    ship = None

    def __init__(self, log: Log, fd: int) -> None:
        self._log, self._wake_fd = log, fd
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
            os.eventfd_write(self._wake_fd, 1)

    def expect(self, entries: int) -> None:
        self.expected.append(entries)

    def sync(self, *, ring: bool = True) -> None:
        self._log.sync()
        if ring:
            os.eventfd_write(self._wake_fd, 1)


class Watched:
    """Keeps what was reported, and how long Acks took."""

    def __init__(self) -> None:
        self.took_s: list[float] = []
        self.events: list[tuple[str, dict[str, Any]]] = []

    def report(self, event: str, facts: Mapping[str, Any]) -> None:
        self.events.append((event, dict(facts)))

    def of(self, event: str, name: str) -> list[Any]:
        return [facts[name] for found, facts in self.events if found == event]

    @property
    def returned(self) -> list[str]:
        return self.of("wal_replication_member_back", "member")

    @property
    def refusals(self) -> list[str]:
        return self.of("wal_replication_append_reject", "error")

    @property
    def quorums(self) -> list[tuple[bool, int, int]]:
        return [
            (event == "wal_quorum_back", facts["following"], facts["needed"])
            for event, facts in self.events
            if event.startswith("wal_quorum")
        ]


class Node:
    """A node's log and its shipper, to three safekeepers in this process."""

    def __init__(
        self,
        folder: Path,
        stack: ExitStack,
        *,
        timeout_s: float = WAIT_S,
        segment_bytes: int = 64 << 20,
        ack_mode: AckMode = AckMode.REPLICATED_QUORUM,
        is_proxied: bool = False,
        keeps_damaged: bool = False,
    ) -> None:
        self.reached: list[Lsn] = []
        self.over: list[LedgerError] = []
        self.watched = Watched()
        self._ack_mode = ack_mode
        self.keepers = [stack.enter_context(closing(Keeper(folder / f"keeper-{number}"))) for number in range(3)]
        self.folder = folder / "own"
        self.folder.mkdir()
        self.log = Log(
            self.folder, node_id=NODE, wal_id=WAL_ID, epoch=Epoch(1), next_lsn=Lsn(1), segment_bytes=segment_bytes
        )
        self.proxies = [
            stack.enter_context(closing(DamagingProxy(keeper.port))) for keeper in self.keepers if is_proxied
        ]
        addresses = [each.address for each in self.proxies or self.keepers]
        self._members = Members(dict.fromkeys(addresses, "use1"), RUN, timeout_s=timeout_s)
        self.shipper = Shipper(
            self._members,
            self._proposer,
            on_reached=lambda committed_lsn, _: self.reached.append(committed_lsn),
            on_acknowledged=self.watched.took_s.append,
            on_over=self.over.append,
            report=self.watched.report,
            tail=TailReader(self.folder, NODE, HISTORY),
            lag_threshold=1 << 60,
            keeps_damaged=keeps_damaged,
        )

    def _proposer(self, shipper: Shipper) -> Proposer:
        return Proposer(
            node_id=NODE,
            run=RUN,
            wal_id=WAL_ID,
            epoch=Epoch(1),
            history=HISTORY,
            configuration=NO_MEMBERS,
            home="use1",
            ack_mode=self._ack_mode,
            addresses=self._members.addresses,
            committed_lsn=BEFORE_FIRST,
            read=shipper.tail.read,
            oldest_lsn=lambda: Lsn(1),
            send=shipper.send,
            drop=shipper.drop,
            on_configured=lambda _: None,
        )

    def start(self) -> GroupCommit:
        """Write and ship, and count the times that C did that."""
        writer = GroupCommit(self.log, shipper_fd=self.shipper.wake_fd, on_failure=self.over.append)
        self.shipped: list[bool] = []
        ship = writer.ship
        if ship is not None:

            def counted(*values: object) -> tuple[Any, ...]:
                result = ship(*values)
                self.shipped.append(result[1] > values[4])
                return result

            writer.ship = counted
        self.shipper.start(writer)
        return writer

    def append(self, writer: GroupCommit, count: int, payload_bytes: int = 0) -> Lsn:
        for _ in range(count):
            lsn = writer.next_lsn
            writer.append(hlc_of(lsn), 1, payload_of(lsn).ljust(payload_bytes))
        return lsn

    def commit(self, writer: GroupCommit, count: int = 1, payload_bytes: int = 0) -> None:
        lsn = self.append(writer, count, payload_bytes)
        until(lambda: self.has_reached(lsn), "it is committed")

    def has_shipped_in_c(self) -> bool:
        return not IS_BUILT or any(self.shipped)

    def commit_until_shipped_in_c(self, writer: GroupCommit, lsn: int) -> int:
        """Behind ``lsn``, which all hold, commit until a batch has gone that way: the LSN that all hold then. One that
        is written before the last Ack of the one before is looked at still goes the other way."""
        self.shipped.clear()
        for upto_lsn in range(lsn + 2, lsn + 200, 2):
            self.commit(writer, 2)
            until(lambda upto_lsn=upto_lsn: self.is_held_by_all(upto_lsn), "all hold it")
            if self.has_shipped_in_c():
                return upto_lsn
        raise AssertionError("no batch was shipped in C")

    def end(self, writer: GroupCommit, is_over: bool = False) -> None:
        """All that follow hold what the node does."""
        writer.close(WAIT_S)
        self.shipper.close(WAIT_S)
        assert bool(self.over) == is_over
        assert self.reached == sorted(set(self.reached))

    def is_held_by_all(self, lsn: int) -> bool:
        return all(report.replicated_lsn >= lsn for report in self.shipper.reports())

    def has_reached(self, lsn: int) -> bool:
        return bool(self.reached) and self.reached[-1] >= lsn


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with ExitStack() as stack:
        yield Node(tmp_path, stack)


def test_members_hold_a_batch_before_it_is_synced_here_and_it_is_committed_only_then(node: Node) -> None:
    writer = ByHand(node.log, node.shipper.wake_fd)
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
    writer = GroupCommit(node.log, shipper_fd=node.shipper.wake_fd, on_failure=node.over.append)
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


def test_a_descriptor_that_the_writer_may_still_write_to_stays_open(node: Node) -> None:
    writer = ByHand(node.log, node.shipper.wake_fd)
    writer.has_ended = False
    node.shipper.start(writer)
    fd = eventfd_at(node.shipper.wake_fd)
    node.shipper.close(WAIT_S)
    writer.write(1)
    writer.sync()
    assert eventfd_at(node.shipper.wake_fd) == fd is not None
    writer.has_ended = True
    node.shipper.close(WAIT_S)
    assert eventfd_at(node.shipper.wake_fd) != fd
    node.log.close()


def eventfd_at(descriptor: int) -> str | None:
    """Which eventfd has this number now, None where none has: another thread may have been given it since."""
    with suppress(FileNotFoundError):
        for line in Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines():
            if line.startswith("eventfd-id:"):
                return line
    return None


@pytest.mark.parametrize("ack_mode", [AckMode.REPLICATED_QUORUM, AckMode.REPLICATED_ALL])
def test_members_hold_what_the_node_wrote_across_its_segments(tmp_path: Path, ack_mode: AckMode) -> None:
    with ExitStack() as stack:
        node = Node(tmp_path, stack, segment_bytes=40_000, ack_mode=ack_mode)
        writer = node.start()
        for _ in range(40):
            node.commit(writer, 7, payload_bytes=300)
            if ack_mode is AckMode.REPLICATED_ALL:
                assert node.is_held_by_all(node.reached[-1])
        until(lambda: node.is_held_by_all(280), "all hold it")
        sent = [report.sent_records for report in node.shipper.reports()]
        node.end(writer)
    assert sent == [280] * 3
    assert node.has_shipped_in_c()
    assert len(node.watched.took_s) > 10
    assert all(0 < took_s < WAIT_S for took_s in node.watched.took_s)
    assert len(list_segments(node.folder)) > 2
    for folder in (node.folder, *(keeper.folder / NODE for keeper in node.keepers)):
        (found,) = verify(folder)
        assert (found.verdict, found.records, found.last_lsn) == ("ok", 280, 280)


def test_a_member_that_went_away_catches_up_and_is_shipped_to_with_the_others_again(tmp_path: Path) -> None:
    with ExitStack() as stack:
        node = Node(tmp_path, stack)
        writer = node.start()
        node.commit(writer)
        until(lambda: node.is_held_by_all(1), "all follow")
        gone = node.keepers[2]
        gone.close()
        for _ in range(20):
            node.commit(writer)
        stack.enter_context(closing(Keeper(gone.folder, port=gone.port)))
        until(lambda: node.is_held_by_all(21), "it has caught up")
        assert node.watched.returned == [gone.address]
        assert node.watched.quorums == [], "the others were a majority all the time"
        node.commit_until_shipped_in_c(writer, 21)
        node.end(writer)
        gone.close = lambda: None  # type: ignore[method-assign]  # it is closed


def test_a_quorum_that_is_lost_and_comes_back_is_reported_once_each(tmp_path: Path) -> None:
    with ExitStack() as stack:
        node = Node(tmp_path, stack)
        writer = node.start()
        node.commit(writer)
        until(lambda: node.is_held_by_all(1), "all follow")
        for keeper in node.keepers[:2]:
            keeper.close()
        until(lambda: node.watched.quorums, "it is lost")
        for number, keeper in enumerate(node.keepers[:2]):
            node.keepers[number] = stack.enter_context(closing(Keeper(keeper.folder, port=keeper.port)))
            keeper.close = lambda: None  # type: ignore[method-assign]  # it is closed
        node.commit(writer)
        until(lambda: node.is_held_by_all(2), "all follow again")
        assert [is_there for is_there, _, _ in node.watched.quorums] == [False, True]
        assert node.watched.quorums[0] == (False, 1, 2)
        assert len(node.watched.returned) == 2
        node.end(writer)


def test_a_member_that_answers_what_changes_nothing_is_heard(tmp_path: Path) -> None:
    with ExitStack() as stack:
        node = Node(tmp_path, stack, timeout_s=3.0)
        writer = node.start()
        node.commit(writer)
        until(lambda: node.is_held_by_all(1), "all follow")
        now_s = time.monotonic()
        wires = node.shipper._wires._wires.values()
        until(
            lambda: all(wire.received_s > now_s for wire in wires),
            "they have answered the reports of what is committed",
        )
        node.end(writer)


def test_a_member_that_is_held_up_holds_up_nobody_and_gets_all_of_it_later(tmp_path: Path) -> None:
    with ExitStack() as stack:
        node = Node(tmp_path, stack)
        writer = node.start()
        node.commit(writer)
        until(lambda: node.is_held_by_all(1), "all follow")
        (kept,) = node.keepers[0].safekeeper.logs.all()
        with kept.locked():
            for _ in range(30):
                node.commit(writer, 1, payload_bytes=900_000)
            assert not node.is_held_by_all(2)
        until(lambda: node.is_held_by_all(31), "all hold it")
        node.end(writer)
    assert [verify(keeper.folder / NODE)[-1].last_lsn for keeper in node.keepers] == [31] * 3


def test_a_node_that_is_fenced_learns_it_while_it_ships(tmp_path: Path) -> None:
    with ExitStack() as stack:
        node = Node(tmp_path, stack)
        writer = node.start()
        node.commit(writer)
        until(lambda: node.is_held_by_all(1), "all follow")
        lsn = node.commit_until_shipped_in_c(writer, 1)
        for keeper in node.keepers[:2]:
            with talking(keeper.port, 2) as other:
                greeting = other.greet()
                assert isinstance(greeting, Greeting)
                assert isinstance(other.ask(Prepare(Epoch(2), WAL_ID, greeting.configuration)), Promise)
        node.append(writer, 1)
        until(lambda: node.over, "it is told")
        assert isinstance(node.over[0], FencedError)
        assert node.reached[-1] == lsn
        node.end(writer, is_over=True)


def test_a_frame_that_was_damaged_on_the_way_to_every_member_is_sent_again_on_new_links(tmp_path: Path) -> None:
    with ExitStack() as stack:
        node = Node(tmp_path, stack, is_proxied=True)
        writer = node.start()
        node.commit(writer)
        until(lambda: node.is_held_by_all(1), "all follow")
        for proxy in node.proxies:
            proxy.flips_left = 1
        lsn = node.append(writer, 1, payload_bytes=1000)
        until(lambda: node.has_reached(lsn), "it is committed")
        until(lambda: node.is_held_by_all(lsn), "all hold it")
        assert [proxy.links for proxy in node.proxies] == [2, 2, 2]
        assert [report.damaged_frames for report in node.shipper.reports()] == [1, 1, 1]
        node.end(writer)
    assert [verify(keeper.folder / NODE)[-1].last_lsn for keeper in node.keepers] == [lsn] * 3


def test_a_link_that_goes_on_damaging_frames_is_opened_after_longer_and_longer_pauses(tmp_path: Path) -> None:
    with ExitStack() as stack:
        node = Node(tmp_path, stack, is_proxied=True)
        writer = node.start()
        node.commit(writer)
        until(lambda: node.is_held_by_all(1), "all follow")
        node.proxies[2].flips_left = 4
        began_s = time.monotonic()
        node.commit(writer, 1, payload_bytes=1000)
        until(lambda: node.is_held_by_all(2), "it got through")
        assert time.monotonic() - began_s > 15 * PAUSE_FIRST_S, "1, 2, 4 and 8 times the first pause"
        assert [report.damaged_frames for report in node.shipper.reports()] == [0, 0, 4]
        node.end(writer)


@pytest.mark.parametrize("keeps_damaged", [False, True], ids=["refuse", "truncate"])
def test_what_is_damaged_in_the_nodes_own_log_waits_for_a_person_who_is_told_where(
    tmp_path: Path, keeps_damaged: bool
) -> None:
    with ExitStack() as stack:
        node = Node(tmp_path, stack, is_proxied=True, keeps_damaged=keeps_damaged)
        writer = node.start()
        node.commit(writer)
        until(lambda: node.is_held_by_all(1), "all follow")
        node.keepers[2].close()
        for _ in range(5):
            node.commit(writer, 1, payload_bytes=1000)
        flip(list_segments(node.folder)[0].path, payload_of(3))
        stack.enter_context(closing(Keeper(node.keepers[2].folder, port=node.keepers[2].port)))
        node.keepers[2].close = lambda: None  # type: ignore[method-assign]  # it is closed
        address = node.proxies[2].address

        def fault() -> str:
            return node.shipper.proposer.links[address].fault or ""

        until(lambda: "damaged in this node's own log" in fault(), "it is told")
        assert address not in node.watched.returned, "it does not follow"
        assert list_segments(node.folder)[0].name in fault()
        assert "docs/replication-runbook.md" in fault()
        assert any("own log" in reason for reason in node.watched.refusals)
        links = node.proxies[2].links
        node.commit(writer, 1)
        if keeps_damaged:
            until(lambda: node.proxies[2].links > links, "it is tried again")
            assert sum("own log" in reason for reason in node.watched.refusals) == 1, "the same reason is told once"
        else:
            assert node.shipper._wires._wires[address].next_try_s == math.inf
            assert node.proxies[2].links == links
        assert [report.damaged_frames for report in node.shipper.reports()] == [0, 0, 0]
        node.end(writer)


def flip(path: Path, text: bytes) -> None:
    """Flip a bit of the first such bytes in the file."""
    with path.open("r+b") as file:
        at = file.read().index(text)
        file.seek(at)
        file.write(bytes([text[0] ^ 1]))
