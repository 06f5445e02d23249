"""An excluded log counts in no ledger that holds the statement, whatever order the ledgers chained their entries in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger import canonical
from ledger.chain.conflict import Event, conflict_hlc, conflict_payload
from ledger.facts.events import JOB_EVENTS
from ledger.machines import jobs
from ledger.machines.exclusions import COUNT_ALL, NO_STATEMENTS, SUBJECT, Exclusions, statements_of
from ledger.machines.jobs import JobParts, JobState
from ledger.verification import ENTRY_COLUMNS, FOLD_COLUMNS
from ledger.verification.projection_check import compare_jobs, stored_form

JOB = "job-1"
LOGS = ("a.example/acme", "b.example/acme", "x.example/acme")
A, B, X = LOGS


class Entry(NamedTuple):
    """An entry, and the log that first chained it."""

    log: str
    hlc: tuple[int, int, str]
    job_id: str
    action: str
    payload: Mapping[str, Any]

    @property
    def text(self) -> str:
        return canonical.encode(self.payload).decode()

    def row(self, seq: int, own_log: str) -> tuple[Any, ...]:
        """The row of ``FOLD_COLUMNS`` in the chain of ``own_log``."""
        digest = sha256(self.text.encode()).hexdigest()
        origin = None if self.log == own_log else orjson.dumps({"log": self.log, "seq": 1}).decode()
        return (self.job_id, seq, *self.hlc, self.action, digest, self.text, origin)


def event(log: str, ms: int, name: str, **fields: Any) -> Entry:
    payload = {"type": name, "fence_token": 1, **fields}
    return Entry(log, (ms, 0, f"node-{log[0]}"), JOB, JOB_EVENTS[name].action, payload)


def statement(by: str, ms: int, about: str, action: str = "LOG_EXCLUDED", **fields: Any) -> Entry:
    payload = {"type": action, "log": about, "reason": "it lies", **fields}
    return Entry(by, (ms, 0, f"node-{by[0]}"), SUBJECT, action, payload)


def chained(entries: Sequence[Entry], own_log: str) -> list[tuple[Any, ...]]:
    return [entry.row(seq, own_log) for seq, entry in enumerate(entries, 1)]


def exclusions_in(rows: Sequence[tuple[Any, ...]], own_log: str) -> Exclusions:
    return statements_of(NO_STATEMENTS, rows, own_log).exclusions(own_log)


def state_in(entries: Sequence[Entry], own_log: str) -> JobState | None:
    rows = chained(entries, own_log)
    return jobs.folded(JOB, None, [row for row in rows if row[0] == JOB], exclusions_in(rows, own_log))


def shown(state: JobState | None) -> dict[str, Any] | None:
    """What is told of a job but for seqs, which differ from ledger to ledger."""
    if state is None:
        return None
    view = {name: value for name, value in jobs.view(state).items() if not name.endswith("_seq")}
    return view | {"conflicts": [each | {"seq": 0} for each in view.pop("conflicts", ())]}


CREATED = event(A, 1, "JobCreated", spec={"n": 1}, assigned_dcs=["dc1"])
CANCELLED_BY_X = event(X, 5, "JobCancellationRequested", reason="mischief")


def test_facts_of_an_excluded_log_do_not_count_wherever_the_statement_is() -> None:
    for order in ([CREATED, CANCELLED_BY_X, statement(A, 9, X)], [statement(A, 9, X), CREATED, CANCELLED_BY_X]):
        for own_log in LOGS:
            state = state_in(order, own_log)
            assert state is not None
            assert (jobs.status(state), state.uncounted > 0) == ("SUBMITTED", True)


def test_a_job_of_uncounted_facts_alone_is_known_and_says_nothing() -> None:
    state = state_in([CANCELLED_BY_X, statement(A, 9, X)], A)
    assert state is not None
    assert (jobs.status(state), state.created, state.cancel, state.last_seq) == ("SUBMITTED", None, None, 1)


def test_an_included_log_counts_again() -> None:
    entries = [CREATED, CANCELLED_BY_X, statement(A, 9, X), statement(B, 10, X, "LOG_INCLUDED")]
    for own_log in LOGS:
        state = state_in(entries, own_log)
        assert state is not None
        assert (jobs.status(state), state.uncounted) == ("CANCELLING", 0)


@pytest.mark.parametrize("own_log", LOGS)
def test_a_log_cannot_speak_for_itself(own_log: str) -> None:
    entries = [CREATED, CANCELLED_BY_X, statement(A, 9, X), statement(X, 99, X, "LOG_INCLUDED")]
    state = state_in(entries, own_log)
    assert state is not None
    assert jobs.status(state) == "SUBMITTED"


def test_a_statement_in_a_conflict_entry_counts() -> None:
    held = statement(A, 9, X)
    digest = sha256(held.text.encode()).hexdigest()
    identity = Event("9:0:node-a", SUBJECT, held.action, digest)
    kept = Entry(
        A,
        tuple(conflict_hlc(identity)),
        SUBJECT,
        "CONFLICT",
        orjson.loads(conflict_payload(identity, held.text, "0" * 64)),
    )
    for own_log in LOGS:
        assert exclusions_in(chained([kept], own_log), own_log).logs == {X}


def test_a_statement_counts_from_its_time_on_in_states_as_of_a_time() -> None:
    rows = chained([CREATED, CANCELLED_BY_X, statement(A, 9, X)], A)
    assert statements_of(NO_STATEMENTS, rows, A, (8, 0, "~")).exclusions(A) == COUNT_ALL
    assert statements_of(NO_STATEMENTS, rows, A, (9, 0, "~")).exclusions(A).logs == {X}


@pytest.mark.parametrize(
    "row",
    [
        (SUBJECT, None, 1, 0, "n", "LOG_EXCLUDED", "00", "{}", None),
        (SUBJECT, 1, "1", 0, "n", "LOG_EXCLUDED", "00", "{}", None),
        (SUBJECT, 1, 1, 0, "n", "LOG_EXCLUDED", None, "{}", None),
        (SUBJECT, 1, 1, 0, "n", "LOG_EXCLUDED", "00", "[]", None),
        (SUBJECT, 1, 1, 0, "n", "LOG_EXCLUDED", "00", '{"log":7}', None),
        (SUBJECT, 1, 1, 0, "n", "CONFLICT", "00", '{"log":"x"}', None),
        (SUBJECT, 1, 1, 0, "n", None, "00", None, 7),
    ],
)
def test_an_edited_statement_states_nothing(row: tuple[Any, ...]) -> None:
    assert statements_of(NO_STATEMENTS, [row], A).exclusions(A) == COUNT_ALL


@pytest.mark.parametrize("origin", ["", "[]", '{"log":7}', 7])
def test_an_edited_origin_is_that_of_no_log(origin: Any) -> None:
    assert Exclusions(frozenset({X}), A).counts(origin)


moments = st.tuples(st.sampled_from(LOGS), st.integers(1, 9))


@st.composite
def entries(draw: st.DrawFn) -> list[Entry]:
    """Facts and statements of three ledgers; each HLC is that of one event, as honest nodes draw them."""
    drawn = draw(st.lists(moments, min_size=1, max_size=12, unique=True))
    return [draw(entry_at(log, ms)) for log, ms in drawn]


def entry_at(log: str, ms: int) -> st.SearchStrategy[Entry]:
    numbers = st.integers(0, 2)
    return st.one_of(
        numbers.map(lambda n: event(log, ms, "JobCreated", spec={"n": n}, assigned_dcs=["dc1"])),
        numbers.map(lambda n: event(log, ms, "JobAccepted", dc_id=f"dc{n}")),
        numbers.map(lambda n: event(log, ms, "JobFailed", error=f"e{n}", fence_token=n)),
        st.just(event(log, ms, "JobCancellationRequested", reason="r")),
        st.builds(
            statement,
            st.just(log),
            st.just(ms),
            st.sampled_from(LOGS),
            st.sampled_from(("LOG_EXCLUDED", "LOG_INCLUDED")),
        ),
    )


@given(entries(), st.data())
def test_three_ledgers_of_the_same_entries_agree_whatever_order_they_merged_them_in(
    held: list[Entry], data: st.DataObject
) -> None:
    first, *others = [shown(state_in(data.draw(st.permutations(held)), own_log)) for own_log in LOGS]
    assert others == [first, first]


@given(entries(), st.sampled_from(LOGS), st.integers(0, 12))
def test_every_fold_gives_the_same_state(held: list[Entry], own_log: str, cut: int) -> None:
    rows = chained(held, own_log)
    excluded = exclusions_in(rows, own_log)
    expected = jobs.folded(JOB, None, [row for row in rows if row[0] == JOB], excluded)
    # In parts, as a task of Spark folds a range of the chain.
    parts: list[JobState] = []
    for part in (rows[:cut], rows[cut:]):
        folding = JobParts(exclusions=excluded)
        folding.add([[*column] for column in zip(*map(_entry_row, part), strict=True)] or [[] for _ in ENTRY_COLUMNS])
        parts += folding.take()
    assert jobs.merge_states(parts) == expected
    # From the entries that the state names, as the row of the job table does.
    named = set() if expected is None else set(jobs.seqs_of(expected))
    again = jobs.folded(JOB, None, [row for row in rows if row[0] == JOB and row[1] in named], excluded)
    assert shown(again) == shown(expected)
    # Against the row of the job table, as verification does.
    assert not _breaks(rows, expected, excluded)


def _entry_row(row: tuple[Any, ...]) -> list[Any]:
    return [dict(zip(FOLD_COLUMNS, row, strict=True)).get(name) for name in ENTRY_COLUMNS]


def _breaks(rows: Sequence[tuple[Any, ...]], state: JobState | None, excluded: Exclusions) -> Mapping[str, int]:
    stored = [] if state is None else [stored_form(state)]
    of_job = [row for row in rows if row[0] == JOB]
    return asyncio.run(compare_jobs(_batches(of_job), _batches(stored), None, excluded)).counts


async def _batches(rows: Sequence[Sequence[Any]]) -> AsyncIterator[Sequence[Sequence[Any]]]:
    if rows:
        yield rows
