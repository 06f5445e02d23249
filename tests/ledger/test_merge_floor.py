"""Merges into a chain whose prefix leaves: nothing that was in it comes back, and nothing that is new is lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from ledger.bundle.merge import Incoming, Left, MergeKey, decide, event_of
from ledger.chain.conflict import Event
from ledger.hlc import Hlc
from tests.conftest import EXAMPLES

OWN, LOGS = "own/acme", ("own/acme", "one/acme", "two/acme")
JOBS = 4


class Said(NamedTuple):
    """One event of a log, by its seq there."""

    log: str
    seq: int
    job: int
    ms: int

    @property
    def incoming(self) -> Incoming:
        hlc = Hlc(self.ms, self.seq, self.log.partition("/")[0])
        key = MergeKey(1, *hlc, self.log, self.seq, "d" * 64)
        return Incoming(key, "acme", hlc.text(), f"job-{self.job}", "EXECUTE", "e" * 64, "{}", "{}", 2, 0, "", None)


class Chain:
    """A chain here, as its rows are, with what is remembered of those that left."""

    def __init__(self) -> None:
        self.rows: list[Incoming] = []
        self.ever: list[Event] = []
        self.departed: set[str] = set()
        self.highest: Hlc | None = None
        self.floor_seq = 0
        self.imported: dict[str, int] = {}
        self.finished: set[Sequence[Said]] = set()

    def merge(self, said: Sequence[Said], *, is_next: bool = False) -> bool:
        """Import these events; False if the import is refused."""
        batch = sorted((each.incoming for each in said), key=lambda entry: entry.key)
        here = {entry.t_hlc: event_of(entry) for entry in self.rows}
        if self.highest is not None:
            was_taken = said in self.finished
            left = Left(self.floor_seq, self.highest, OWN, self.imported, was_taken=was_taken, is_next=is_next)
            for entry in left.doubtful(batch, here):
                has_left = left.has_left(entry, is_of_departed_job=entry.job_id in self.departed)
                if has_left is None:
                    return False
                if has_left:
                    here[entry.t_hlc] = event_of(entry)
        placed = [entry for entry, _ in decide(batch, {"acme": here}).placed]
        self.rows += placed
        self.ever += map(event_of, placed)
        self.finished.add(said)
        return True

    def prune(self, count: int) -> None:
        gone, self.rows = self.rows[:count], self.rows[count:]
        self.floor_seq += len(gone)
        self.departed |= {entry.job_id for entry in gone}
        hlcs = [Hlc(*entry.key[1:4]) for entry in gone]
        self.highest = max([*hlcs, *([] if self.highest is None else [self.highest])], default=None)


SAID = st.lists(st.tuples(st.integers(0, JOBS - 1), st.integers(0, 20)), max_size=12)
RANGE = st.tuples(st.sampled_from(LOGS[1:]), st.integers(0, 11), st.integers(1, 8), st.booleans())
STEPS = st.lists(st.one_of(RANGE, st.integers(1, 10)), max_size=12)


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.fixed_dictionaries(dict.fromkeys(LOGS, SAID)), STEPS)
def test_nothing_that_left_comes_back_and_nothing_new_is_lost(
    logs: dict[str, list[tuple[int, int]]], steps: list[tuple[str, int, int, bool] | int]
) -> None:
    told = {log: [Said(log, seq, job, ms) for seq, (job, ms) in enumerate(said, 1)] for log, said in logs.items()}
    chain = Chain()
    assert chain.merge(tuple(told[OWN]))
    for step in steps:
        if isinstance(step, int):
            chain.prune(step)
            continue
        log, begin, count, is_followed = step
        begin = chain.imported.get(log, 0) if is_followed else begin
        asked = tuple(told[log][begin : begin + count])
        before = [*chain.rows]
        # What is followed was not carried in by hand before, or it would have to be told apart by more.
        is_next = is_followed and begin > 0 and all(each.incoming.t_hlc not in _times(chain) for each in asked)
        if not asked or not chain.merge(asked, is_next=is_next):
            assert chain.rows == before
            continue
        assert {event_of(each.incoming) for each in asked} <= {*chain.ever}
        if is_followed:
            chain.imported[log] = begin + len(asked)
    assert len(chain.ever) == len({*chain.ever})
    # What this ledger made itself never comes back, nor does what a finished import had.
    once = [*chain.ever]
    assert chain.merge(tuple(told[OWN]))
    assert all(chain.merge(said) for said in [*chain.finished])
    assert chain.ever == once


def _times(chain: Chain) -> set[str]:
    return {event.t_hlc for event in chain.ever}
