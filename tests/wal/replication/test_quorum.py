"""A log kept by a quorum: what is committed stays, whoever writes next."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from ledger.positions import Epoch, Lsn
from tests.wal.replication.quorums import HOME, Quorum, Writer, logs, lsns_of
from wal.replication.configuration import AckMode
from wal.replication.election import Plan


@pytest.fixture
def held() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def quorum(tmp_path: Path, held: ExitStack) -> Quorum:
    return held.enter_context(closing(Quorum(tmp_path)))


@pytest.fixture
def quorum_of_five(tmp_path: Path, held: ExitStack) -> Quorum:
    return held.enter_context(closing(Quorum(tmp_path, 5)))


def writer(quorum: Quorum, held: ExitStack, run: str, folder: str = "node", mode: str = "REPLICATED_QUORUM") -> Writer:
    return held.enter_context(closing(Writer(quorum, quorum.folder / folder, run, AckMode(mode))))


def test_what_is_written_is_committed_and_everywhere(quorum: Quorum, held: ExitStack) -> None:
    first = writer(quorum, held, "run-1")
    plan = first.begin()
    assert (plan.epoch, plan.tail.lsn, plan.donor) == (1, 0, None)
    assert first.write(3) == 4
    assert first.proposer.committed_lsn == 4
    assert first.proposer.configuration.has_majority(frozenset(first.proposer.configuration.voters))
    assert all(log == [(1, 1), (1, 2), (1, 3), (1, 4)] for _, log in logs(quorum))


def test_a_majority_is_enough_and_a_minority_is_not(quorum: Quorum, held: ExitStack) -> None:
    first = writer(quorum, held, "run-1")
    first.begin()
    quorum.down = {"c"}
    assert first.write(1) == first.proposer.committed_lsn == 2
    quorum.down = {"b", "c"}
    assert first.write(1) == 3
    assert first.proposer.committed_lsn == 2


def test_a_member_that_comes_back_gets_what_it_lacks(quorum: Quorum, held: ExitStack) -> None:
    first = writer(quorum, held, "run-1")
    first.begin()
    quorum.down = {"c"}
    for _ in range(5):
        first.write(2)
    quorum.down = set()
    quorum.restart("c")
    first.connect("c")
    assert lsns_of(quorum.log_of("c")) == lsns_of(quorum.log_of("a"))


def test_who_takes_over_without_a_copy_gets_all_that_was_committed(quorum: Quorum, held: ExitStack) -> None:
    first = writer(quorum, held, "run-1")
    first.begin()
    first.write(5)
    quorum.down = {"a"}
    second = writer(quorum, held, "run-2", "standby")
    plan = second.begin()
    assert (plan.epoch, plan.tail.lsn) == (2, 6)
    assert lsns_of(second.log) == [(1, lsn) for lsn in range(1, 7)] + [(2, 7)]
    assert second.proposer.committed_lsn == 7
    quorum.down = set()
    first.write(1)
    assert first.proposer.fenced_by
    assert first.proposer.committed_lsn == 6


def test_a_tail_that_lost_is_cut_where_it_stands(quorum: Quorum, held: ExitStack) -> None:
    first = writer(quorum, held, "run-1")
    first.begin()
    quorum.down = {"b", "c"}
    first.write(4)
    assert quorum.log_of("a").tail.lsn == 5
    quorum.down = {"a"}
    second = writer(quorum, held, "run-2", "standby")
    assert second.begin().tail.lsn == 1
    second.write(2)
    quorum.down = set()
    quorum.restart("a")
    second.connect("a")
    assert lsns_of(quorum.log_of("a")) == [(1, 1), (2, 2), (2, 3), (2, 4)]
    third = writer(quorum, held, "run-3", "other")
    assert third.begin().epoch == 3


def test_the_own_longer_log_counts(quorum: Quorum, held: ExitStack) -> None:
    with ExitStack() as before:
        first = writer(quorum, before, "run-1")
        first.begin()
        quorum.down = {"a", "b", "c"}
        first.write(3)
    quorum.down = set()
    again = writer(quorum, held, "run-2")
    plan = again.begin()
    assert (plan.donor, plan.tail.lsn, plan.epoch) == (None, 4, 2)
    assert again.proposer.committed_lsn == 5


def test_without_a_quorum_it_gives_up_at_once(quorum: Quorum, held: ExitStack) -> None:
    writer(quorum, held, "run-1").begin()
    quorum.down = {"a", "b"}
    outcome = writer(quorum, held, "run-2", "standby").elect()
    assert outcome == "no quorum: 1 of 3 members that vote answer, 2 are needed"


def test_a_quorum_begins_only_with_all_members(quorum: Quorum, held: ExitStack) -> None:
    quorum.down = {"c"}
    outcome = writer(quorum, held, "run-1").elect()
    assert isinstance(outcome, str)
    assert "all of whom are needed" in outcome
    assert isinstance(writer(quorum, held, "run-2", "other", mode="LOCAL_SYNC").elect(), Plan)


def test_a_wiped_member_does_not_vote_until_it_caught_up(quorum: Quorum, held: ExitStack) -> None:
    first = writer(quorum, held, "run-1")
    first.begin()
    quorum.down = {"c"}
    first.write(3)
    assert first.proposer.committed_lsn == 4
    quorum.wipe("a")
    quorum.down = {"b"}
    outcome = writer(quorum, held, "run-2", "standby").elect()
    assert isinstance(outcome, str)
    quorum.down = set()
    first.proposer.lost("a")
    first.connect("a")
    first.connect("c")
    voters = first.proposer.configuration.voters
    assert voters == {quorum.log_of(name).control.member_id for name in "abc"}
    assert first.proposer.configuration.generation == 3


def test_what_is_given_up_is_given_up_on_word_alone(quorum: Quorum, held: ExitStack) -> None:
    first = writer(quorum, held, "run-1")
    first.begin()
    quorum.down = {"c"}
    first.write(3)
    quorum.down = {"a", "b"}
    second = writer(quorum, held, "run-2", "standby")
    assert isinstance(second.elect(), str)
    second.accept_loss_in = HOME
    plan = second.begin()
    assert plan.tail.lsn == 1
    assert second.write(1) == second.proposer.committed_lsn == 3
    quorum.down = set()
    first.write(1)
    assert first.proposer.committed_lsn == 5, "a majority follows the first still"
    second.connect("a")
    second.connect("b")
    first.write(1)
    assert first.proposer.fenced_by
    assert [reason.partition(":")[0] for _, reason in second.dropped] == ["committed", "committed"]
    assert lsns_of(quorum.log_of("a"))[-1] == (1, 5), "what was given up stays where it is, for whoever looks for it"
    quorum.wipe("a")
    second.connect("a")
    assert second.write(1) == second.proposer.committed_lsn == 4
    assert lsns_of(quorum.log_of("a")) == lsns_of(quorum.log_of("c"))


def test_copies_are_shipped_and_nobody_takes_over_from_them(quorum: Quorum, held: ExitStack) -> None:
    first = writer(quorum, held, "run-1", mode="LOCAL_GROUP_SYNC")
    first.begin()
    quorum.down = {"a", "b"}
    assert first.write(2) == first.proposer.committed_lsn == 3
    assert lsns_of(quorum.log_of("c")) == [(1, 1), (1, 2), (1, 3)]
    quorum.down = set()
    plan = writer(quorum, held, "run-2", "standby").elect()
    assert isinstance(plan, Plan)
    assert plan.configuration.copies
    assert plan.donor is None


def test_from_copies_to_a_quorum_and_back(quorum: Quorum, held: ExitStack) -> None:
    for run, mode in enumerate(("LOCAL_GROUP_SYNC", "REPLICATED_QUORUM", "LOCAL_GROUP_SYNC"), 1):
        with ExitStack() as now:
            present = writer(quorum, now, f"run-{run}", mode=mode)
            assert present.begin().epoch == Epoch(run)
            assert present.write(1) == present.proposer.committed_lsn == 2 * run
            assert present.proposer.configuration.is_quorum == (mode == "REPLICATED_QUORUM")


def test_members_may_remove_what_the_node_does_not_keep_any_more(quorum: Quorum, held: ExitStack) -> None:
    with ExitStack() as before:
        first = writer(quorum, before, "run-1")
        first.begin()
        first.write(4)
    second = writer(quorum, held, "run-2")
    second.begin()
    second.write(2)
    second.proposer.tell_committed()
    second.deliver()
    assert {quorum.members[name].settled_lsn for name in "abc"} == {0}
    assert second.log.remove_upto(Lsn(8))
    second.proposer.tell_committed()
    second.deliver()
    assert {quorum.members[name].settled_lsn for name in "abc"} == {5}
    for name in "abc":
        assert quorum.log_of(name).remove_upto(quorum.members[name].settled_lsn)
        assert (quorum.log_of(name).first_lsn, quorum.log_of(name).tail.lsn) == (6, 8)
    # A member that comes back without anything gets what there is.
    quorum.wipe("c")
    second.proposer.lost("c")
    second.connect("c")
    assert lsns_of(quorum.log_of("c")) == [(2, 6), (2, 7), (2, 8)]


def test_all_means_every_member(quorum: Quorum, held: ExitStack) -> None:
    first = writer(quorum, held, "run-1", mode="REPLICATED_ALL")
    first.begin()
    quorum.down = {"c"}
    first.write(1)
    assert first.proposer.committed_lsn == 1


def test_no_member_goes_before_others_hold_what_it_held(quorum_of_five: Quorum, held: ExitStack) -> None:
    quorum = quorum_of_five
    first = writer(quorum, held, "run-1")
    first.begin()
    first.slow = {"d", "e"}
    assert first.write(1) == first.proposer.committed_lsn == 2
    for name in "ab":
        first.slow.add(name)
        quorum.wipe(name)
        first.proposer.lost(name)
        first.connect(name)
    quorum.down = {"c"}
    outcome = writer(quorum, held, "run-2", "standby").elect()
    assert outcome == "no quorum: 2 of 5 members that vote answer, 3 are needed"
    # Once they hold it, those whose disk is lost are replaced.
    quorum.down = set()
    first.slow = set()
    first.deliver()
    assert first.proposer.configuration.voters == {quorum.log_of(name).control.member_id for name in "abcde"}
