"""Writes a log in an epoch that was won: sends every batch to every member, and decides which records are committed.

Pure: it is called with positions written here and with answers of members, and passes messages to ``send`` at once.
Each member gets the history first, then the batches that it lacks, unchanged from the log. Many batches are under way
to one member, and a slow member slows no other. After a lost connection a member's answer shows which batches it lacks.

``committed_lsn`` rises to the highest LSN that a majority of the voters holds and the node's own log has synced, once
that is a record of this epoch. With REPLICATED_ALL every member must hold it. If members only keep copies, it is the
node's own ``durable_lsn``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ledger.errors import WalCorruptError, WalError
from ledger.positions import BEFORE_FIRST, Epoch, Lsn, after, before
from wal.control import History
from wal.replication.configuration import AckMode, Configuration, Member
from wal.replication.file_log import Chunk
from wal.replication.messages import (
    EMPTY,
    Ack,
    Append,
    Configure,
    Configured,
    Elected,
    Frame,
    Greet,
    Greeting,
    Message,
    Position,
    Prepare,
    Promise,
    Ready,
    Refusal,
)

UNDER_WAY_BYTES_MAX = 8 << 20
"""Bound on the bytes under way to one member; an acknowledgement makes space for more."""
CHUNK_BYTES = 1 << 20
"""About so many bytes of the log are in one Append."""
WHEN_DAMAGED_AT_REST = "docs/replication-runbook.md says what to do (A log is damaged)"


Dropped = Literal["refused", "damaged-on-the-way", "damaged-at-rest"]
"""Why the connection to a member is closed:

refused               the member refused a message, or sent an unexpected answer
damaged-on-the-way    it received damaged bytes; they are read from the node's log again, and sent again if sound
damaged-at-rest       the batches that it lacks are damaged in the node's own log
"""


@dataclass(slots=True)
class Link:
    """The state of the member at one address. The shipper sets ``fault`` and the fields after it."""

    address: str
    region: str
    member_id: str = ""
    is_connected: bool = False
    is_streaming: bool = False
    """It follows: it has applied the history, and is sent the batches that it lacks."""
    sent: Position = EMPTY
    """The next batch follows this position."""
    replicated_lsn: Lsn = BEFORE_FIRST
    """The highest LSN that the member acknowledged in this epoch; kept while it cannot be reached."""
    under_way: int = 0
    """Bytes sent and not acknowledged."""
    under_way_ends: deque[tuple[Lsn, int]] = field(default_factory=deque)
    """Last LSN and bytes of each batch under way."""
    sent_records: int = 0
    sent_bytes: int = 0
    """Bytes of records, over all connections of this process."""
    fault: str | None = None
    """Why the member does not follow; None if it does."""
    damaged_frames: int = 0
    """Number of frames to or from the member that arrived damaged."""
    damaged_behind_lsn: Lsn | None = None
    """``replicated_lsn`` when a frame arrived damaged: the pauses between connections grow until it rises."""
    timed_lsn: Lsn = BEFORE_FIRST
    timed_since_s: float = 0.0
    """LSN whose acknowledgement is timed, and since when by the monotonic clock; one at a time."""
    is_lagging: bool = False
    lag_lsn: int = 0
    """Durable records that the member has not acknowledged; set only in a report."""


class Proposer:
    """The only writer of ``epoch``.

    ``history`` ends with this epoch and its first LSN. ``read(from_lsn, upto_lsn, bytes_max)`` returns written batches
    of the own log; ``oldest_lsn()`` is its oldest record. ``addresses`` has the region of each member.

    ``fenced_by`` is set if another proposer was promised a higher epoch; then this proposer is over.
    """

    def __init__(
        self,
        *,
        node_id: str,
        run: str,
        wal_id: str,
        epoch: Epoch,
        history: History,
        configuration: Configuration,
        home: str,
        ack_mode: AckMode,
        addresses: Mapping[str, str],
        committed_lsn: Lsn,
        read: Callable[[Lsn, Lsn, int], Chunk],
        oldest_lsn: Callable[[], Lsn],
        send: Callable[[str, Frame], None],
        drop: Callable[[str, str, Dropped], None],
        on_configured: Callable[[Configuration], None],
    ) -> None:
        assert history[-1].epoch == epoch
        self._greet = Greet(node_id, wal_id, run)
        self.epoch = epoch
        self._history = history
        self._epoch_start_lsn = history[-1].first_lsn
        self.configuration = configuration
        self._home = home
        self._pending: Configuration | None = None
        """A list that is being stored; ``_stored_by`` has the members that stored it. The first list of an epoch is the
        previous one with the new epoch: so a list of an earlier proposer without a majority never becomes valid."""
        self._stored_by: set[str] = set()
        self._is_settled = False
        """The list has exactly the intended members, so acknowledgements do not change it."""
        if configuration.members:
            self._pending = self._following(configuration.members, copies=configuration.copies)
        self._ack_mode = ack_mode
        self._read = read
        self._oldest_lsn = oldest_lsn
        self._send = send
        self._drop = drop
        self._on_configured = on_configured
        self.links = {address: Link(address, region) for address, region in addresses.items()}
        self.written_lsn = before(self._epoch_start_lsn)
        self.durable_lsn = self.written_lsn
        self.committed_lsn = committed_lsn
        self.settled_lsn = BEFORE_FIRST
        self.fenced_by = ""

    def in_sync(self) -> int:
        """Number of voters that follow."""
        voters = self.configuration.voters
        return sum(link.is_streaming and link.member_id in voters for link in self.links.values())

    def needed(self) -> int:
        """Number of voters that must follow so that records are committed; 0 if no member votes."""
        voters = self.configuration.voters
        if not self._ack_mode.is_replicated or not voters:
            return 0
        return len(voters) if self._ack_mode is AckMode.REPLICATED_ALL else len(voters) // 2 + 1

    def has_quorum(self) -> bool:
        """Whether enough members follow so that records are committed; False if no member votes."""
        return 0 < self.needed() <= self.in_sync()

    # --- events of this node ------------------------------------------------------------------------

    def written(self, lsn: Lsn) -> None:
        """All up to ``lsn`` was given to the operating system here; it need not be durable."""
        assert lsn >= self.written_lsn
        self.written_lsn = lsn
        for link in self.links.values():
            if link.is_streaming:
                self._pump(link)

    def became_durable(self, lsn: Lsn) -> None:
        """All up to ``lsn`` is synced here."""
        self.durable_lsn = lsn
        self._commit()

    def tell_committed(self) -> None:
        """Send the members the committed position, and up to where the own log was removed, since it was chained,
        signed and old. Called periodically: their answers show that they are alive."""
        self.settled_lsn = before(self._oldest_lsn())
        for address, link in self.links.items():
            if link.is_streaming:
                self._say(address, Append(self.epoch, link.sent, self.epoch, self.committed_lsn, self.settled_lsn))

    # --- shipping in C -----------------------------------------------------------------------------

    def in_step(self) -> tuple[list[Link], int, bool] | None:
        """The members that follow, if all of them have been sent the whole log, so that C can ship the next batches;
        None if they were sent different parts of it, or the proposer has more to do.

        Also how many of them must acknowledge more before it may be committed, 0 if the own log alone decides; and
        whether the proposer needs every acknowledgement.
        """
        following = [link for link in self.links.values() if link.is_streaming]
        sent = Position(self.epoch, self.written_lsn)
        if self.fenced_by or not self._is_settled or any(link.sent != sent for link in following):
            return None
        voters = self.configuration.voters
        majority = len(voters) // 2 + 1 if voters else 0
        enough = len(self.links) if self._ack_mode is AckMode.REPLICATED_ALL else majority
        is_any = bool(voters) and (
            self.configuration.regions != {self._home} or {link.member_id for link in self.links.values()} != voters
        )
        return following, enough, is_any

    def shipped(self, links: Sequence[Link], lsn: Lsn, size_bytes: int) -> None:
        """All up to ``lsn`` was written here and sent to these members, in ``size_bytes`` of batches."""
        self.written_lsn = lsn
        for link in links:
            self._count_sent(link, Position(self.epoch, lsn), size_bytes)

    def _count_sent(self, link: Link, end: Position, size_bytes: int) -> None:
        """Record that batches of so many bytes, up to ``end``, are under way to the member."""
        link.sent_records += end.lsn - link.sent.lsn
        link.sent_bytes += size_bytes
        link.sent = end
        link.under_way += size_bytes
        link.under_way_ends.append((end.lsn, size_bytes))

    # --- answers of members ----------------------------------------------------------------------

    def connected(self, address: str) -> None:
        self.lost(address)
        self.links[address].is_connected = True
        self._say(address, self._greet)

    def lost(self, address: str) -> None:
        link = self.links[address]
        link.is_connected = link.is_streaming = False
        link.under_way, link.under_way_ends = 0, deque()

    def received(self, address: str, message: Message) -> None:
        """The member at ``address`` answered."""
        link = self.links[address]
        if self.fenced_by or not link.is_connected:
            return
        match message:
            case Greeting():
                self._greeted(link, message)
            case Promise() if message.epoch == self.epoch:
                self._say(address, Elected(self.epoch, self._oldest_lsn(), self._history))
            case Ready() if message.epoch == self.epoch:
                link.is_streaming = True
                link.sent = message.tail
                link.replicated_lsn = message.tail.lsn
                if self._pending is not None:
                    self._say(address, Configure(self.epoch, self._pending))
                self._acknowledged(link, message.tail.lsn)
            case Ack() if message.epoch == self.epoch and link.is_streaming:
                self._acknowledged(link, message.durable_lsn)
            case Configured():
                if message.configuration == self._pending:
                    self._stored_by.add(link.member_id)
                self._reconfigure()
            case Refusal() if message.reason == "fenced" and message.promised_epoch >= self.epoch:
                self.fenced_by = f"{link.member_id or address} follows epoch {message.promised_epoch}: {message.detail}"
            case Refusal():
                dropped: Dropped = "damaged-on-the-way" if message.reason == "damaged" else "refused"
                self._drop(address, f"{message.reason}: {message.detail}", dropped)
            case _:
                self._drop(address, f"an answer that was not asked for: {type(message).__name__}", "refused")

    def _greeted(self, link: Link, greeting: Greeting) -> None:
        theirs, newest = greeting.configuration, self._pending or self.configuration
        if greeting.promised_epoch > self.epoch or theirs.epoch > self.epoch:
            self.fenced_by = f"{greeting.member_id} follows epoch {max(greeting.promised_epoch, theirs.epoch)}"
        elif theirs.order > newest.order:
            self._drop(link.address, "it holds a list of members that never counted, and waits for the next", "refused")
        elif any(other.member_id == greeting.member_id for other in self.links.values() if other is not link):
            self._drop(link.address, f"member {greeting.member_id} answers at another address, too", "refused")
        else:
            if link.member_id != greeting.member_id:
                link.member_id, link.replicated_lsn = greeting.member_id, BEFORE_FIRST
                self._is_settled = False
            self._say(link.address, Prepare(self.epoch, self._greet.wal_id, newest))

    def _acknowledged(self, link: Link, lsn: Lsn) -> None:
        link.replicated_lsn = max(link.replicated_lsn, lsn)
        while link.under_way_ends and link.under_way_ends[0][0] <= lsn:
            link.under_way -= link.under_way_ends.popleft()[1]
        self._commit()
        if not self._is_settled:
            self._reconfigure()
        self._pump(link)

    # --- shipping ---------------------------------------------------------------------------------

    def _pump(self, link: Link) -> None:
        """Send the member the batches that it lacks, up to the bound on bytes under way."""
        while link.is_streaming and link.under_way < UNDER_WAY_BYTES_MAX and link.sent.lsn < self.written_lsn:
            try:
                chunk = self._read(after(link.sent.lsn), self.written_lsn, CHUNK_BYTES)
            except WalCorruptError as error:
                detail = (
                    f"what it lacks is damaged in this node's own log, segment {error.segment} at byte {error.offset}: "
                    f"{error.reason}; {WHEN_DAMAGED_AT_REST}"
                )
                self._drop(link.address, detail, "damaged-at-rest")
                return
            except WalError as error:
                self._drop(link.address, str(error), "refused")
                return
            append = Append(self.epoch, link.sent, chunk.written_in, self.committed_lsn, self.settled_lsn)
            self._count_sent(link, Position(chunk.written_in, chunk.last_lsn), len(chunk.batches))
            self._send(link.address, Frame(append, chunk.batches))

    # --- the committed position ------------------------------------------------------------------------

    def _commit(self) -> None:
        if (reached := self._held_lsn()) >= self._epoch_start_lsn:
            self.committed_lsn = max(self.committed_lsn, reached)

    def _held_lsn(self) -> Lsn:
        """The highest LSN that the own log and as many members as the mode requires hold."""
        voters = self.configuration.voters
        if not self._ack_mode.is_replicated and not voters:
            return self.durable_lsn
        if not voters:
            return BEFORE_FIRST
        held = min(self.durable_lsn, self._majority_lsn(voters))
        if self._ack_mode is AckMode.REPLICATED_ALL:
            return min([held, *(link.replicated_lsn for link in self.links.values())])
        return held

    def _majority_lsn(self, member_ids: frozenset[str]) -> Lsn:
        """The highest LSN that more than half of these members hold."""
        held = [link.replicated_lsn for link in self.links.values() if link.member_id in member_ids]
        held += [BEFORE_FIRST] * (len(member_ids) - len(held))
        return sorted(held, reverse=True)[len(member_ids) // 2]

    def region_lsns(self) -> dict[str, Lsn]:
        """By region, the highest LSN held there: at home the committed one, elsewhere that of a majority."""
        now = self.configuration
        held = {region: self._majority_lsn(now.of_region(region)) for region in now.regions}
        return held | {self._home: self.committed_lsn}

    # --- the list of members ----------------------------------------------------------------------

    def _reconfigure(self) -> None:
        """Finish a change of the members, or start the next: one voter at a time, and only once a record of this epoch
        is committed.

        A list that starts voting is stored here before any member has it: a start from this copy must ask the voters
        from then on. A list that ends voting is stored here once it is valid.
        """
        if self._pending is not None:
            lists, stored_by = (self.configuration, self._pending), frozenset(self._stored_by)
            if not all(each.has_majority(stored_by) for each in lists if each.is_quorum):
                return
            self.configuration, self._pending = self._pending, None
            self._on_configured(self.configuration)
            self._commit()
        following = self._next_configuration()
        self._is_settled = following is None and self._are_all_members()
        if following is not None and self._stays_committed(following):
            if following.is_quorum and not self.configuration.is_quorum:
                self._on_configured(following)
            self._pending, self._stored_by = following, set()
            for address, link in self.links.items():
                if link.is_streaming:
                    self._say(address, Configure(self.epoch, following))

    def _stays_committed(self, following: Configuration) -> bool:
        """Whether a majority of that list, too, holds all committed records.

        Majorities of two consecutive lists share a member, but those of a list and the next but one need not: so a
        change MUST NOT leave behind records that were committed under the list before.
        """
        is_copy = not (self.configuration.is_quorum and following.is_quorum)
        return is_copy or self._majority_lsn(following.voters) >= self.committed_lsn

    def _next_configuration(self) -> Configuration | None:
        """The list that replaces the current one; None if that is as intended, or the change must wait."""
        now = self.configuration
        if now.is_quorum and self.committed_lsn < self._epoch_start_lsn:
            return None
        links = self.links.values()
        caught_up_lsn = max(self._epoch_start_lsn, self.committed_lsn if now.is_quorum else BEFORE_FIRST)
        ready = {
            link.member_id: Member(link.member_id, link.region)
            for link in links
            if link.is_streaming and link.replicated_lsn >= caught_up_lsn
        }
        all_known = all(link.member_id for link in links)
        present = {link.member_id for link in links}
        gone = {member for member in now.members if all_known and member.member_id not in present}
        if not self._ack_mode.is_replicated:
            # First the members that voted; then all that follow.
            members = now.members if now.is_quorum else tuple(sorted({*now.members, *ready.values()} - gone))
            return None if now.copies and members == now.members else self._following(members, copies=True)
        if not now.is_quorum:
            is_whole = all(link.is_streaming and link.member_id in ready for link in links if link.region == self._home)
            return self._following(tuple(sorted(ready.values()))) if is_whole else None
        for member in sorted(gone):
            return self._following(tuple(each for each in now.members if each != member))
        for member in sorted(set(ready.values()) - set(now.members)):
            return self._following((*now.members, member))
        return None

    def _are_all_members(self) -> bool:
        """Whether the list is of the kind that the mode requires, and has exactly the members that answer at the
        addresses: then no change follows until another member answers there."""
        now = self.configuration
        present = {Member(link.member_id, link.region) for link in self.links.values()}
        return present == set(now.members) and (now.is_quorum if self._ack_mode.is_replicated else now.copies)

    def _following(self, members: tuple[Member, ...], *, copies: bool = False) -> Configuration:
        now = self.configuration
        following = Configuration(
            now.generation + 1, self.epoch, now.home if now.is_quorum else self._home, copies, members
        )
        # One voter more or less: a majority of one list always shares a member with a majority of the other.
        assert not now.is_quorum or copies or len(now.voters ^ following.voters) <= 1
        return following

    def _say(self, address: str, message: Message) -> None:
        self._send(address, Frame(message))
