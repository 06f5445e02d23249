"""What replicated logs are known to have got wrong, each as a test that fails when this one does, over real files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from itertools import pairwise
from pathlib import Path

import pytest

from ledger.positions import NO_EPOCH, Epoch, Lsn
from tests.forked import run_forked
from tests.wal.logs import NODE, WAL_ID, traced
from tests.wal.replication.quorums import HOME, Quorum, Writer, batch, lsns_of
from wal.control import EpochStart
from wal.replication.configuration import NO_MEMBERS, AckMode, Configuration, Member
from wal.replication.election import Election, Plan
from wal.replication.file_log import Chunk
from wal.replication.messages import (
    Ack,
    Append,
    Configure,
    Configured,
    Elected,
    Frame,
    Greeting,
    Message,
    Position,
    Prepare,
    Promise,
    Ready,
    Refusal,
)
from wal.replication.proposer import Proposer

IMPORTED = "import tests.wal.replication.test_known_failures"
ONE, OTHER = "1" * 32, "2" * 32
"""Runs of proposers."""


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def quorum(tmp_path: Path, stack: ExitStack) -> Quorum:
    return stack.enter_context(closing(Quorum(tmp_path)))


Write = Callable[..., Writer]


@pytest.fixture
def writer(quorum: Quorum, stack: ExitStack) -> Write:
    def make(run: str, folder: str = "node", mode: AckMode = AckMode.REPLICATED_QUORUM) -> Writer:
        return stack.enter_context(closing(Writer(quorum, quorum.folder / folder, run, mode)))

    return make


def ask(quorum: Quorum, name: str, message: Message, run: str = ONE, body: bytes = b"") -> Message:
    answer = quorum.ask(name, run, Frame(message, body))
    assert answer is not None
    return answer.message


def refused(answer: Message) -> str:
    assert isinstance(answer, Refusal), answer
    return answer.reason


def history(*starts: tuple[int, int]) -> tuple[EpochStart, ...]:
    return tuple(EpochStart(Epoch(epoch), Lsn(lsn)) for epoch, lsn in starts)


def elect(quorum: Quorum, name: str, epoch: int, *starts: tuple[int, int], run: str = ONE) -> None:
    """Let the member follow this epoch, whose log has this history."""
    assert isinstance(ask(quorum, name, Prepare(Epoch(epoch), WAL_ID, NO_MEMBERS), run), Promise)
    assert isinstance(ask(quorum, name, Elected(Epoch(epoch), Lsn(1), history(*starts)), run), Ready)


def append(
    quorum: Quorum, name: str, epoch: int, previous: tuple[int, int], first_lsn: int, last_lsn: int, *, in_: int = 0
) -> Message:
    at = Position(Epoch(previous[0]), Lsn(previous[1]))
    message = Append(Epoch(epoch), at, Epoch(in_ or epoch), Lsn(0))
    return ask(quorum, name, message, body=batch(first_lsn, last_lsn))


# --- the end that lost ----------------------------------------------------------------------------------


def test_an_end_that_lost_is_cut_before_anything_is_written_over_it(quorum: Quorum, writer: Write) -> None:
    first = writer("1")
    first.begin()
    quorum.down = {"b", "c"}
    first.write(5)
    quorum.down = {"a"}
    second = writer("2", "standby")
    second.begin()
    quorum.down = set()
    quorum.restart("a")
    second.connect("a")
    assert lsns_of(quorum.log_of("a")) == [(1, 1), (2, 2)]
    assert any(path.name.startswith("cut-") for path in (quorum.folder / "a").iterdir())


def test_what_is_known_to_be_committed_is_never_cut(quorum: Quorum) -> None:
    elect(quorum, "a", 1, (1, 1))
    assert isinstance(append(quorum, "a", 1, (0, 0), 1, 4), Ack)
    ask(quorum, "a", Append(Epoch(1), Position(Epoch(1), Lsn(4)), Epoch(1), Lsn(3)))
    assert isinstance(ask(quorum, "a", Prepare(Epoch(2), WAL_ID, NO_MEMBERS)), Promise)
    assert refused(ask(quorum, "a", Elected(Epoch(2), Lsn(1), history((1, 1), (2, 3))))) == "committed"
    assert lsns_of(quorum.log_of("a")) == [(1, lsn) for lsn in range(1, 5)]
    assert isinstance(ask(quorum, "a", Elected(Epoch(2), Lsn(1), history((1, 1), (2, 4)))), Ready)


def test_a_cut_that_was_killed_is_done_again(tmp_path: Path, strace: str) -> None:
    """Truncation that is not atomic: after each step of it the member is told the history again."""
    program = (
        "import sys; from pathlib import Path; from tests.wal.logs import NODE, WAL_ID\n"
        "from ledger.positions import Epoch, Lsn\n"
        "from tests.wal.replication.test_known_failures import history, ONE\n"
        "from wal.replication.acceptor import Acceptor; from wal.replication.file_log import FileLog\n"
        "from wal.replication.messages import Elected, Frame\n"
        "Acceptor(FileLog(Path(sys.argv[1]), NODE, WAL_ID), 'use1').handle(\n"
        "    ONE, Frame(Elected(Epoch(4), Lsn(1), history((1, 1), (4, 3)))))"
    )
    killed = 0
    for number in range(1, 20):
        quorum = Quorum(tmp_path / str(number), 1)
        for epoch, first_lsn in ((1, 1), (2, 4), (3, 6)):
            starts = [(1, 1), (2, 4), (3, 6)][:epoch]
            elect(quorum, "a", epoch, *starts)
            append(quorum, "a", epoch, (epoch - 1, first_lsn - 1), first_lsn, first_lsn + 2 - (epoch > 1))
        assert isinstance(ask(quorum, "a", Prepare(Epoch(4), WAL_ID, NO_MEMBERS)), Promise)
        quorum.close()
        tracer = traced(strace, os.devnull, "trace=rename", f"inject=rename:signal=KILL:when={number}")
        done = run_forked(IMPORTED, "-c", program, tmp_path / str(number) / "a", tracer=tracer)
        with closing(Quorum(tmp_path / str(number), 1)) as again:
            assert isinstance(ask(again, "a", Elected(Epoch(4), Lsn(1), history((1, 1), (4, 3)))), Ready)
            assert lsns_of(again.log_of("a")) == [(1, 1), (1, 2)]
            assert isinstance(append(again, "a", 4, (1, 2), 3, 4), Ack)
        if done.returncode == 0:
            break
        killed += 1
    assert killed >= 2


# --- promises --------------------------------------------------------------------------------------------


def test_an_equal_epoch_is_promised_to_one_run_only(quorum: Quorum) -> None:
    elect(quorum, "a", 3, (3, 1))
    assert refused(ask(quorum, "a", Prepare(Epoch(3), WAL_ID, NO_MEMBERS), OTHER)) == "fenced"
    quorum.restart("a")
    assert refused(ask(quorum, "a", Prepare(Epoch(3), WAL_ID, NO_MEMBERS), OTHER)) == "fenced"
    assert isinstance(ask(quorum, "a", Prepare(Epoch(3), WAL_ID, NO_MEMBERS)), Promise)


def test_a_lower_epoch_is_promised_to_nobody_not_even_to_who_has_the_higher(quorum: Quorum) -> None:
    elect(quorum, "a", 3, (3, 1))
    for run in (ONE, OTHER):
        assert refused(ask(quorum, "a", Prepare(Epoch(2), WAL_ID, NO_MEMBERS), run)) == "fenced"
    quorum.restart("a")
    for run in (ONE, OTHER):
        assert refused(ask(quorum, "a", Prepare(Epoch(2), WAL_ID, NO_MEMBERS), run)) == "fenced"


def test_who_was_promised_the_same_epoch_elsewhere_gives_it_up(quorum: Quorum, writer: Write) -> None:
    """Else a member that promised it to a run that lost would be without the log for as long as the epoch lasts."""
    writer("1").begin()
    quorum.down = {"c"}
    second = writer("2", "standby")
    second.begin()
    quorum.down = set()
    assert isinstance(ask(quorum, "c", Prepare(Epoch(2), WAL_ID, quorum.log_of("c").configuration), OTHER), Promise)
    second.connect("c")
    assert second.proposer.fenced_by


def test_a_vote_says_only_what_outlives_a_crash(quorum: Quorum) -> None:
    elect(quorum, "a", 1, (1, 1))
    at = Position(NO_EPOCH, Lsn(0))
    frame = Frame(Append(Epoch(1), at, Epoch(1), Lsn(0)), batch(1, 3))
    assert quorum.members["a"].handle(ONE, frame) is None
    promise = ask(quorum, "a", Prepare(Epoch(2), WAL_ID, NO_MEMBERS), OTHER)
    assert isinstance(promise, Promise)
    assert promise.tail == Position(Epoch(1), Lsn(3))
    with closing(Quorum(copied(quorum.folder / "a"), 1)) as after_a_crash:
        log = after_a_crash.log_of("a")
        assert (log.tail, log.control.promised_epoch, log.control.promised_run) == (promise.tail, 2, OTHER)


def copied(folder: Path) -> Path:
    """What of a member's folder is on the disk now, as the folder ``a`` of another quorum."""
    other = folder.parent / "as-it-is" / folder.name
    other.mkdir(parents=True)
    for path in folder.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    return other.parent


# --- what is elected ---------------------------------------------------------------------------------------


def test_a_longer_log_of_an_earlier_epoch_is_not_the_better_one(quorum: Quorum, writer: Write) -> None:
    first = writer("1")
    first.begin()
    quorum.down = {"b", "c"}
    first.write(9)
    quorum.down = {"a"}
    second = writer("2", "standby")
    second.begin()
    assert second.write(1) == second.proposer.committed_lsn == 3
    quorum.down = {"c"}
    plan = writer("3", "third").begin()
    assert (plan.donor, plan.tail) == ("b", Position(Epoch(2), Lsn(3)))


def test_a_wiped_member_is_nobody_until_it_was_taken_in(quorum: Quorum, writer: Write) -> None:
    first = writer("1")
    first.begin()
    quorum.down = {"c"}
    first.write(3)
    quorum.wipe("a")
    quorum.down = {"b"}
    assert isinstance(writer("2", "standby").elect(), str)


def test_the_majority_is_that_of_the_home_region(tmp_path: Path) -> None:
    regions = {"d": "usw2", "e": "usw2"}
    with closing(Quorum(tmp_path, 5, regions)) as quorum, ExitStack() as stack:
        first = stack.enter_context(closing(Writer(quorum, tmp_path / "node", "1")))
        first.begin()
        quorum.down = {"b", "c"}
        lsn = first.write(1)
        assert [quorum.log_of(name).tail.lsn for name in "ade"] == [lsn] * 3
        assert first.proposer.committed_lsn < lsn
        assert isinstance(stack.enter_context(closing(Writer(quorum, tmp_path / "standby", "2"))).elect(), str)


# --- what is appended --------------------------------------------------------------------------------------


def test_nothing_is_appended_that_is_of_no_epoch_or_of_another(quorum: Quorum) -> None:
    assert refused(append(quorum, "a", 0, (0, 0), 1, 1)) == "not-elected" or quorum.log_of("a").tail.lsn == 0
    elect(quorum, "a", 2, (1, 1), (2, 3))
    assert refused(append(quorum, "a", 1, (0, 0), 1, 2)) == "fenced"
    assert refused(append(quorum, "a", 2, (0, 0), 1, 2, in_=2)) == "does-not-fit"
    assert refused(append(quorum, "a", 2, (0, 0), 1, 3, in_=1)) == "does-not-fit"
    assert isinstance(append(quorum, "a", 2, (0, 0), 1, 2, in_=1), Ack)


def test_nothing_is_appended_before_the_history_was_applied(quorum: Quorum) -> None:
    elect(quorum, "a", 1, (1, 1))
    quorum.restart("a")
    assert refused(append(quorum, "a", 1, (0, 0), 1, 1)) == "not-elected"
    assert refused(ask(quorum, "a", Configure(Epoch(1), NO_MEMBERS))) == "not-elected"


def test_a_batch_goes_behind_the_record_it_names(quorum: Quorum) -> None:
    elect(quorum, "a", 1, (1, 1))
    append(quorum, "a", 1, (0, 0), 1, 3)
    assert refused(append(quorum, "a", 1, (0, 0), 1, 3)) == "does-not-fit"
    assert refused(append(quorum, "a", 1, (1, 4), 5, 6)) == "does-not-fit"
    assert refused(append(quorum, "a", 1, (2, 3), 4, 4)) == "does-not-fit"
    assert lsns_of(quorum.log_of("a")) == [(1, 1), (1, 2), (1, 3)]


# --- what is committed, and by whose word --------------------------------------------------------------------


def members(names: str) -> tuple[Member, ...]:
    return tuple(Member(name * 32, HOME) for name in names)


class Alone:
    """The writer of epoch 3, behind LSN 2 of epoch 1, without a log or a network: a test says what members answer."""

    def __init__(
        self, listed: Configuration, addresses: str = "abc", mode: AckMode = AckMode.REPLICATED_QUORUM
    ) -> None:
        self.sent: list[tuple[str, Message]] = []
        self.stored: list[tuple[Configuration, int]] = []
        """Lists that the own copy was told, and after how many messages."""
        self.proposer = Proposer(
            node_id=NODE,
            run=ONE,
            wal_id=WAL_ID,
            epoch=Epoch(3),
            history=history((1, 1), (3, 3)),
            configuration=listed,
            home=HOME,
            ack_mode=AckMode.REPLICATED_QUORUM,
            addresses=dict.fromkeys(addresses, HOME),
            committed_lsn=Lsn(1),
            read=lambda from_lsn, upto_lsn, bytes_max: Chunk(
                Position(Epoch(1), Lsn(2)), Epoch(3), upto_lsn, batch(from_lsn, upto_lsn)
            ),
            oldest_lsn=lambda: Lsn(1),
            send=lambda name, frame: self.sent.append((name, frame.message)),
            drop=lambda name, reason, dropped: None,
            on_configured=lambda listed: self.stored.append((listed, len(self.sent))),
        )
        self.write(3)

    def write(self, last_lsn: int) -> None:
        self.proposer.written(Lsn(last_lsn))
        self.proposer.became_durable(Lsn(last_lsn))

    def joins(self, name: str, lsn: int, known: Configuration = NO_MEMBERS, epoch: int = 1) -> None:
        """The member ``name`` is there, and holds the log up to ``lsn``; at the address of the same letter."""
        address, at = name.lower(), Position(Epoch(epoch), Lsn(lsn))
        self.proposer.connected(address)
        self.proposer.received(address, Greeting(name * 32, HOME, WAL_ID, Epoch(1), at, Lsn(1), known))
        self.proposer.received(address, Promise(Epoch(3), Lsn(1), at, Lsn(1), history((1, 1)), known))
        self.proposer.received(address, Ready(Epoch(3), at))

    def acks(self, name: str, lsn: int) -> None:
        self.proposer.received(name.lower(), Ack(Epoch(3), Lsn(lsn)))

    def stores(self, *names: str) -> None:
        """The members store the list that is being sent round."""
        listed = self.told()
        for name in names:
            self.proposer.received(name.lower(), Configured(Epoch(3), listed))

    def told(self) -> Configuration:
        """The list that members were told last."""
        return [each.configuration for _, each in self.sent if isinstance(each, Configure)][-1]


QUORUM = Configuration(5, Epoch(1), HOME, False, members("abc"))


def test_a_record_of_an_earlier_epoch_is_not_committed_by_counting() -> None:
    """It may be on a majority and lose all the same, to a log that ends in a later epoch (Raft, figure 8)."""
    writer = Alone(QUORUM)
    writer.joins("a", 2)
    writer.joins("b", 2)
    assert writer.proposer.committed_lsn == 1
    writer.acks("a", 3)
    assert writer.proposer.committed_lsn == 1
    writer.acks("b", 3)
    assert writer.proposer.committed_lsn == 3


def test_a_list_that_a_writer_before_left_half_stored_never_counts() -> None:
    """The first list of an epoch is the one before, with the new epoch: at once, so that nobody waits for a commit that
    the member with the other list would be needed for."""
    never = Configuration(6, Epoch(2), HOME, False, members("abcd"))
    writer = Alone(QUORUM)
    writer.joins("a", 2, never)
    prepared = [each.configuration for name, each in writer.sent if isinstance(each, Prepare)]
    assert [listed.order for listed in prepared] == [(3, 6)]
    assert writer.told().members == QUORUM.members


def test_members_are_not_changed_before_a_record_of_the_epoch_is_committed() -> None:
    writer = Alone(QUORUM)
    for name in "abC":
        writer.joins(name, 2)
    writer.stores("a", "b")
    assert writer.told().members == QUORUM.members
    for name in "abC":
        writer.acks(name, 3)
    assert writer.told().members == members("ab")


def test_members_change_one_at_a_time() -> None:
    five = QUORUM._replace(members=members("abcde"))
    writer = Alone(five, "abcde")
    for name in "abcDE":
        writer.joins(name, 3, epoch=3)
    lists = [five.voters]
    for _ in range(6):
        if writer.told().voters != lists[-1]:
            lists.append(writer.told().voters)
        writer.stores("a", "b", "c", "D", "E")
    assert lists[-1] == {name * 32 for name in "abcDE"}
    assert all(len(one ^ other) == 1 for one, other in pairwise(lists))


def test_the_copy_that_was_the_log_knows_of_the_quorum_before_a_member_does() -> None:
    """Else a start from it, with nobody to ask, would write on alone while the members elect another."""
    writer = Alone(NO_MEMBERS)
    for name in "abc":
        writer.joins(name, 3, epoch=3)
    listed, before_messages = writer.stored[0]
    assert listed.voters == {name * 32 for name in "abc"}
    assert all(not isinstance(each, Configure) for _, each in writer.sent[:before_messages])
    assert writer.proposer.committed_lsn == 1
    writer.stores("a", "b")
    assert writer.proposer.committed_lsn == 3


def elects(own: Promise, *, wants_quorum: bool = False) -> Election:
    return Election(
        node_id=NODE,
        run=ONE,
        wal_id=WAL_ID,
        own=own,
        above=NO_EPOCH,
        addresses="abc",
        wants_quorum=wants_quorum,
    )


def elected_by(own: Configuration, theirs: Configuration, answering: str) -> Election:
    """An election of a run whose copy has the one list, by members who have the other."""
    election = elects(Promise(NO_EPOCH, Lsn(1), Position(Epoch(2), Lsn(9)), Lsn(0), history((2, 1)), own))
    tail = Position(Epoch(1), Lsn(1))
    for name in answering:
        election.received(name, Greeting(name * 32, HOME, WAL_ID, Epoch(1), tail, Lsn(1), theirs))
    for name in set("abc") - set(answering):
        election.lost(name)
    return election


def test_a_list_that_ends_voting_is_not_believed_until_it_counts() -> None:
    """A majority may not have stored it, and elected another writer since."""
    copies = QUORUM._replace(generation=6, copies=True)
    assert elected_by(QUORUM, copies, "a").outcome is not None
    assert isinstance(elected_by(QUORUM, copies, "a").outcome, str)
    assert elected_by(QUORUM, copies, "ab").outcome is None  # they are asked to promise
    assert isinstance(elected_by(copies, copies, "a").outcome, Plan)  # it was told that it counts
    of_another = copies._replace(epoch=Epoch(2))
    assert "copies" in str(elected_by(QUORUM, of_another, "ab").outcome)


def test_an_answer_to_an_attempt_before_does_not_end_the_one_after() -> None:
    election = elected_by(QUORUM, QUORUM, "abc")
    for name, promised in (("a", 9), ("b", 12), ("c", 9)):
        election.received(name, Refusal("fenced", "", Epoch(promised)))
    undecided = election.outcome
    assert undecided is None
    for name in "ca":
        promise = Promise(Epoch(13), Lsn(1), Position(Epoch(1), Lsn(1)), Lsn(1), history((1, 1)), QUORUM)
        election.received(name, promise)
    assert isinstance(election.outcome, Plan)
    assert election.outcome.epoch == 13


# --- logs that begin late ------------------------------------------------------------------------------------


def test_a_member_that_begins_late_keeps_what_it_acknowledged(quorum: Quorum) -> None:
    """It was given the middle of an epoch first: when it is told the history again, that is no divergent end."""
    starts = history((1, 1), (2, 11), (3, 31))
    assert isinstance(ask(quorum, "a", Prepare(Epoch(3), WAL_ID, NO_MEMBERS)), Promise)
    ready = ask(quorum, "a", Elected(Epoch(3), Lsn(21), starts))
    assert ready == Ready(Epoch(3), Position(Epoch(2), Lsn(20)))
    assert append(quorum, "a", 3, (2, 20), 21, 25, in_=2) == Ack(Epoch(3), Lsn(25))
    for _ in range(2):
        quorum.restart("a")
        assert isinstance(ask(quorum, "a", Prepare(Epoch(3), WAL_ID, NO_MEMBERS)), Promise)
        assert ask(quorum, "a", Elected(Epoch(3), Lsn(21), starts)) == Ready(Epoch(3), Position(Epoch(2), Lsn(25)))
    assert lsns_of(quorum.log_of("a")) == [(2, lsn) for lsn in range(21, 26)]


def test_a_log_that_begins_late_opens_again_before_it_holds_a_record(quorum: Quorum) -> None:
    elect(quorum, "a", 1, (1, 1))
    assert isinstance(ask(quorum, "a", Elected(Epoch(1), Lsn(21), history((1, 1)))), Ready)
    assert isinstance(ask(quorum, "a", Prepare(Epoch(2), WAL_ID, NO_MEMBERS)), Promise)
    quorum.restart("a")
    assert quorum.log_of("a").control.promised_epoch == 2
    assert quorum.log_of("a").tail.lsn == 0


def test_a_writer_knows_how_its_own_log_began_though_the_donor_forgot() -> None:
    own = Promise(NO_EPOCH, Lsn(1), Position(Epoch(2), Lsn(25)), Lsn(0), history((1, 1), (2, 11)), QUORUM)
    election = elects(own, wants_quorum=True)
    tail = Position(Epoch(3), Lsn(33))
    for name in "abc":
        election.received(name, Greeting(name * 32, HOME, WAL_ID, Epoch(3), tail, Lsn(20), QUORUM))
    for name in "ab":
        election.received(name, Promise(Epoch(4), Lsn(20), tail, Lsn(20), history((2, 11), (3, 31)), QUORUM))
    assert isinstance(election.outcome, Plan)
    assert election.outcome.keep_lsn == 25
    assert election.outcome.history == history((1, 1), (2, 11), (3, 31), (4, 34))
