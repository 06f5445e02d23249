"""The job fold: which fact wins, what the status says, and that order and repetition change nothing."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from copy import deepcopy
from functools import reduce
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ledger import canonical
from ledger.canonical import INTEGER_MAX
from ledger.errors import CanonicalError, InvalidInputError
from ledger.facts.events import EVENTS_BY_ACTION, JOB_EVENTS, Part
from ledger.facts.statuses import ENDED
from ledger.machines.job_fold import (
    CREATOR_CHARACTERS_MAX,
    OTHERS_MAX,
    Order,
    created_state,
    creation_digest,
    creation_of,
    creator_of,
)
from ledger.machines.jobs import JobFold, JobState, folded, said_of_row, seqs_of, status, view
from ledger.verification.projection_check import job_row, new_job_row
from tests.ledger.job_facts import event_fact, fact_of, merge

JOB = "use1-1704931200000-gate42-00001"


def fact(name: str, physical: int, fence: int = 1, node: str = "n1", seq: int = 0, **fields: Any) -> JobState:
    payload = {"type": name, "fence_token": fence, **fields}
    digest = hashlib.sha256(canonical.encode(payload)).hexdigest()
    return event_fact(JOB_EVENTS[name].action, payload, (physical, 0, node), digest, JOB, seq)


def fold(*facts: JobState) -> JobState:
    return reduce(merge, facts)


# --- status ---------------------------------------------------------------------------------------

CREATED = fact("JobCreated", 1, spec={"image": "a"}, assigned_dcs=["use1", "euw1"], seq=1)
ACCEPTED = fact("JobAccepted", 2, dc_id="use1", worker_count=3, seq=2)
PROGRESS = fact("JobProgressReported", 3, dc_id="use1", completed=4, failed=1, seq=3)
DISPATCHED = fact("WorkflowDispatched", 3, workflow_id="w", dc_id="use1")
CANCEL = fact("JobCancellationRequested", 4, reason="no", requestor="me")
COMPLETED = fact("JobCompleted", 5, final_status="SUCCEEDED", aggregate_metrics={"cpu_s": 1.5})
FAILED = fact("JobFailed", 6, error="out of memory", failed_dc="use1")
TIMED_OUT = fact("JobTimedOut", 7, timeout_type="STUCK", last_progress_hlc=None)


def ack(dc: str, physical: int = 8) -> JobState:
    return fact("JobCancellationAcked", physical, dc_id=dc, workflows_cancelled=0)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ([CREATED], "SUBMITTED"),
        ([CREATED, ACCEPTED], "ACCEPTED"),
        ([CREATED, ACCEPTED, DISPATCHED], "RUNNING"),
        ([CREATED, ACCEPTED, PROGRESS], "RUNNING"),
        ([CREATED, PROGRESS, COMPLETED], "COMPLETED"),
        ([CREATED, FAILED], "FAILED"),
        ([CREATED, TIMED_OUT], "TIMED_OUT"),
        ([COMPLETED], "COMPLETED"),
        ([CREATED, CANCEL], "CANCELLING"),
        ([CREATED, COMPLETED, CANCEL], "CANCELLED"),
        ([CREATED, CANCEL, FAILED], "CANCELLED"),
        ([CREATED, ack("use1")], "SUBMITTED"),
        ([CREATED, CANCEL, ack("use1")], "CANCELLING"),
        ([CREATED, CANCEL, ack("use1"), ack("euw1")], "CANCELLED"),
        ([CREATED, ACCEPTED, CANCEL, ack("use1")], "CANCELLED"),
        ([CREATED, ACCEPTED, CANCEL, ack("euw1")], "CANCELLING"),
        ([CANCEL], "CANCELLING"),
        ([CANCEL, ack("anywhere")], "CANCELLED"),
    ],
)
def test_status_follows_from_what_was_reported(facts: list[JobState], expected: str) -> None:
    assert status(fold(*facts)) == expected
    assert status(fold(*reversed(facts))) == expected


def test_the_highest_fence_decides_before_the_stage_does() -> None:
    rerun = fact("WorkflowDispatched", 1, fence=2, workflow_id="w", dc_id="use1")
    reaccepted = fact("JobAccepted", 1, fence=3, dc_id="euw1", worker_count=1)
    assert status(fold(CREATED, COMPLETED, rerun)) == "RUNNING"
    assert status(fold(CREATED, COMPLETED, rerun, reaccepted)) == "ACCEPTED"
    assert status(fold(COMPLETED, fact("WorkflowDispatched", 9, workflow_id="w", dc_id="use1"))) == "COMPLETED"


def test_a_job_that_runs_again_shows_no_old_result() -> None:
    rerun = fact("WorkflowDispatched", 9, fence=2, workflow_id="w", dc_id="use1")
    assert view(fold(CREATED, COMPLETED, rerun))["result"] is None


def test_between_two_ends_fence_then_hlc_then_node_decides() -> None:
    assert status(fold(COMPLETED, FAILED)) == "FAILED"
    assert status(fold(fact("JobCompleted", 1, fence=2, final_status="S"), FAILED)) == "COMPLETED"
    on_a, on_b = fact("JobFailed", 9, node="a", error="a"), fact("JobFailed", 9, node="b", error="b")
    assert view(fold(on_b, on_a))["error"] == "b"


def test_the_job_created_of_lowest_hlc_is_the_one_that_counts() -> None:
    later = fact("JobCreated", 9, fence=7, spec={"image": "other"}, assigned_dcs=[])
    seen = view(fold(later, CREATED))
    assert seen["spec"] == {"image": "a"}
    assert seen["created_hlc"] == "1:0:n1"
    assert seen["fence_token"] == 7


def test_between_two_job_created_of_one_hlc_the_lower_digest_counts() -> None:
    twins = [fact("JobCreated", 1, spec={"n": n}) for n in range(2)]
    lower = min(twins, key=lambda state: state.created.order[3] if state.created else "")
    assert fold(*twins) == fold(*reversed(twins))
    assert fold(*twins)._replace(others={}) == lower


# --- view -----------------------------------------------------------------------------------------


def test_counters_sum_the_newest_report_of_each_data_centre() -> None:
    newer = fact("JobProgressReported", 9, dc_id="use1", completed=10, failed=2)
    other = fact("JobProgressReported", 5, dc_id="euw1", completed=7, failed=0)
    seen = view(fold(PROGRESS, newer, other))
    assert (seen["completed"], seen["failed"]) == (17, 2)
    most = [fact("JobProgressReported", 9, dc_id=dc, completed=INTEGER_MAX, failed=1) for dc in ("use1", "euw1")]
    assert view(fold(*most))["completed"] == INTEGER_MAX, "which every reader of JSON can hold"


def test_a_job_ended_with_its_end_or_the_last_acknowledgement_of_its_cancellation() -> None:
    cancelled = fact("JobCancellationRequested", 3, reason="no need", requestor="ada")
    acks = [fact("JobCancellationAcked", 5 + n, dc_id=dc) for n, dc in enumerate(("use1", "euw1"))]
    open_ = fold(CREATED, cancelled, acks[0])
    assert (status(open_), view(open_)["ended_at"], view(open_)["run_ms"]) == ("CANCELLING", None, None)
    done = view(fold(CREATED, cancelled, *acks))
    assert (done["status"], done["ended_at"], done["run_ms"]) == ("CANCELLED", "1970-01-01T00:00:00.006Z", None)
    assert view(fold(CREATED, ACCEPTED, FAILED))["ended_at"] is not None


def test_a_view_has_the_fields_of_the_api() -> None:
    assert view(fold(CREATED, ACCEPTED, PROGRESS, COMPLETED)) == {
        "job_id": JOB,
        "name": None,
        "status": "COMPLETED",
        "spec": {"image": "a"},
        "assigned_dcs": ["use1", "euw1"],
        "fence_token": 1,
        "completed": 4,
        "failed": 1,
        "actor": None,
        "created_hlc": "1:0:n1",
        "created_at": "1970-01-01T00:00:00.001Z",
        "last_hlc": "5:0:n1",
        "last_at": "1970-01-01T00:00:00.005Z",
        "last_seq": 3,
        "ended_at": "1970-01-01T00:00:00.005Z",
        "run_ms": 3,
        "uncounted_seq": None,
        "result": {"final_status": "SUCCEEDED", "aggregate_metrics": {"cpu_s": 1.5}},
        "error": None,
        "refused": None,
    }


def test_a_view_names_the_error_or_the_timeout() -> None:
    assert view(FAILED)["error"] == "out of memory"
    assert view(TIMED_OUT)["error"] == "STUCK"


def test_a_job_known_only_by_later_events_has_no_creation() -> None:
    seen = view(ACCEPTED)
    assert (seen["created_hlc"], seen["spec"], seen["assigned_dcs"]) == (None, {}, [])


def test_only_ended_jobs_are_ended() -> None:
    assert {"CANCELLED", "COMPLETED", "FAILED", "TIMED_OUT", "REFUSED"} == ENDED


def test_entries_about_the_ledger_touch_no_job() -> None:
    assert fact_of("REFUSED", {}, (1, 0, "n1"), "00", JOB, 1) is None
    assert fact_of("ENQUEUE", {}, (1, 0, "n1"), "00", JOB, 1) == event_fact("ENQUEUE", {}, (1, 0, "n1"), "00", JOB, 1)
    with pytest.raises(InvalidInputError):
        event_fact("TENANT_CREATED", {}, (1, 0, "n1"), "00", JOB, 1)


@pytest.mark.parametrize(("column", "value"), [(0, None), (1, None), (1, "1"), (2, None), (3, True), (4, 5), (6, None)])
def test_a_row_that_was_edited_beyond_its_types_says_nothing(column: int, value: object) -> None:
    row: list[Any] = [JOB, 1, 1, 0, "n1", "ENQUEUE", "00", "{}"]
    assert said_of_row(*row) == ("ENQUEUE", {}, (1, 0, "n1"), "00")
    assert said_of_row(*[*row[:-1], "[1]"]) == said_of_row(*[*row[:-1], None]) == said_of_row(*row)
    row[column] = value
    assert said_of_row(*row) is None


def refused(at: int, record_type: int = 1, *, job_id: str = JOB, lost_to: object = None) -> JobState | None:
    """A REFUSED entry of the event of ``job_id``, which lost against job w."""
    payload = {
        "type": "Refused",
        "reason": "idempotent-replay",
        "lost_to": {"job_id": "w", "hlc": "1:0:n9"} if lost_to is None else lost_to,
        "record_type": record_type,
        "job_id": base64.b64encode(job_id.encode()).decode(),
        "payload": "",
    }
    return fact_of("REFUSED", payload, (at, 0, "n1"), "00", JOB, 1)


def test_a_job_whose_creation_lost_its_key_is_refused_unless_another_creation_counts() -> None:
    lost, report = refused(5), refused(9, record_type=3)
    assert lost is not None
    assert report is not None
    assert status(lost) == status(fold(lost, report)) == status(fold(report, lost, ACCEPTED)) == "REFUSED"
    assert status(fold(lost, CREATED)) == status(fold(report, CREATED)) == "SUBMITTED"
    seen = view(fold(report, CREATED, lost))["refused"]
    assert seen == {
        "type": "JobCreated",
        "hlc": "5:0:n1",
        "reason": "idempotent-replay",
        "seq": None,
        "lost_to": {"job_id": "w", "hlc": "1:0:n9"},
    }
    for state in (lost, report, fold(lost, report, CREATED)):
        assert merge(state, fold(report, lost)) == merge(fold(lost, report), state)


def test_a_refusal_that_names_no_winner_or_another_job_says_nothing() -> None:
    assert refused(1, job_id="other") is None
    assert refused(1, lost_to="w") is None
    assert refused(1, lost_to={"job_id": 1, "hlc": "1:0:n9"}) is None
    assert refused(1, record_type=17) is None


def test_states_of_two_jobs_do_not_merge() -> None:
    with pytest.raises(InvalidInputError):
        merge(CREATED, CREATED._replace(job_id="another"))


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("JobAccepted", {"dc_id": "use1", "worker_count": 1}),
        ("JobProgressReported", {"dc_id": "use1", "completed": 1, "failed": 0}),
        ("JobCancellationRequested", {}),
        ("JobCancellationAcked", {"dc_id": "use1"}),
        ("JobCompleted", {}),
        ("WorkflowDispatched", {"workflow_id": "w", "dc_id": "use1"}),
    ],
)
def test_of_two_facts_for_one_field_the_one_of_higher_fence_stays_then_of_higher_hlc(
    name: str, fields: dict[str, Any]
) -> None:
    early, late, fenced = fact(name, 1, **fields), fact(name, 9, **fields), fact(name, 1, fence=2, **fields)
    for lower, higher in ((early, late), (late, fenced), (early, fenced)):
        merged = merge(lower, higher)
        assert merge(higher, lower) == merged
        assert merged[4:] == higher[4:]


# --- the semilattice ------------------------------------------------------------------------------

small = st.integers(0, 2)
dcs = st.sampled_from(["use1", "euw1"])
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53) + 1, 2**53 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\x00"), max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", max_size=2), inner, max_size=3),
    max_leaves=5,
)
FIELDS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "JobCreated": {"spec": json_values, "assigned_dcs": st.lists(dcs, max_size=2)},
    "JobAccepted": {"dc_id": dcs, "worker_count": small},
    "JobProgressReported": {"dc_id": dcs, "completed": small, "failed": small},
    "JobCancellationRequested": {"reason": st.just("r"), "requestor": st.just("q")},
    "JobCancellationAcked": {"dc_id": dcs, "workflows_cancelled": small},
    "JobCompleted": {"final_status": st.sampled_from("AB"), "aggregate_metrics": json_values},
    "JobFailed": {"error": json_values, "failed_dc": dcs},
    "JobTimedOut": {"timeout_type": json_values, "last_progress_hlc": st.none()},
    "WorkflowDispatched": {"workflow_id": st.sampled_from("vw"), "dc_id": dcs},
    "WorkflowCompleted": {"workflow_id": st.sampled_from("vw"), "dc_id": dcs},
}


Entry = tuple[str, dict[str, Any], tuple[int, int, str], str, int]
"""What ``JobFold.add`` takes."""


@st.composite
def events(draw: st.DrawFn, names: Sequence[str] = sorted(FIELDS)) -> Entry:
    """One event of these names, out of a space small enough that ranks tie on fence, on HLC and on both."""
    name = draw(st.sampled_from(names))
    payload = {"type": name, "fence_token": draw(small)}
    for field, values in FIELDS[name].items():
        value = draw(st.none() | st.just(False) | values if draw(st.integers(0, 9)) == 0 else values)
        payload[field] = value
    text = canonical.encode(payload)
    hlc = (draw(small), draw(small), draw(st.sampled_from("ab")))
    seq = draw(st.integers(0, 9))
    digest = hashlib.sha256(text).hexdigest()
    return JOB_EVENTS[name].action, orjson.loads(text), hlc, digest, seq


@st.composite
def facts(draw: st.DrawFn) -> JobState:
    """The state that one event is by itself."""
    action, payload, hlc, digest, seq = draw(events())
    return event_fact(action, payload, hlc, digest, JOB, seq)


@given(st.lists(facts(), min_size=1, max_size=8), st.data())
def test_any_order_repetition_and_grouping_gives_the_same_state(events: list[JobState], data: st.DataObject) -> None:
    straight = fold(*events)
    mixed = data.draw(st.permutations(events + data.draw(st.lists(st.sampled_from(events), max_size=4))))
    pending = list(mixed)
    while len(pending) > 1:
        at = data.draw(st.integers(0, len(pending) - 2))
        pending[at : at + 2] = [merge(pending[at], pending[at + 1])]
    assert pending[0] == straight
    assert status(pending[0]) == status(straight)


@given(st.lists(events(), min_size=1, max_size=12), st.lists(st.integers(1, 99), min_size=12, max_size=12, unique=True))
def test_the_entries_that_a_state_names_give_it_again(entries: list[Entry], seqs: list[int]) -> None:
    chained = {seq: event_fact(*entry[:4], JOB, seq) for entry, seq in zip(entries, seqs, strict=False)}
    state = fold(*chained.values())
    named = seqs_of(state)
    assert named == sorted(set(named))
    again = fold(*(chained[seq] for seq in named))
    assert again._replace(workflow={}) == state._replace(workflow={})
    assert seqs_of(again) == named
    assert view(again) == view(state)


@pytest.mark.parametrize(
    ("actor", "creator"),
    [
        ("ci@build.example", "ci@build.example"),
        ("n" * CREATOR_CHARACTERS_MAX, "n" * CREATOR_CHARACTERS_MAX),
        ("n" * (CREATOR_CHARACTERS_MAX + 1), None),
        ("a\0b", None),
        ("\ud800", None),
        ("", None),
        (None, None),
        (7, None),
        ({"$private": {}}, None),
    ],
)
def test_a_job_is_listed_by_a_creator_that_has_a_name(actor: Any, creator: str | None) -> None:
    created = event_fact("ENQUEUE", {"type": "JobCreated", "actor": actor}, (1, 0, "n1"), "d", JOB, 1)
    assert creator_of(fold(created, ACCEPTED)) == creator


def test_the_creator_of_a_job_is_that_of_its_first_creation() -> None:
    first, second = (fact("JobCreated", at, seq=at, actor=f"ci-{at}") for at in (1, 2))
    assert [creator_of(fold(*both)) for both in ((first, second), (second, first))] == ["ci-1", "ci-1"]


def test_reports_that_newer_ones_outweigh_and_workflows_are_not_named() -> None:
    reports = [fact("JobProgressReported", n, dc_id="use1", completed=n, failed=0, seq=n) for n in range(3, 50)]
    assert seqs_of(fold(CREATED, ACCEPTED, *reports)) == [1, 2, 49]
    flows = [fact("WorkflowDispatched", n, workflow_id=f"w{n}", dc_id="use1", seq=n) for n in range(50, 99)]
    assert seqs_of(fold(CREATED, ACCEPTED, *reports, *flows)) == [1, 2, 49, 98]


@given(st.lists(facts(), min_size=1, max_size=8))
def test_the_status_is_that_of_a_naive_reading_of_the_rule(events: list[JobState]) -> None:
    assert status(fold(*events)) == naive_status(events)


@given(st.lists(facts(), min_size=1, max_size=8))
def test_creations_that_differ_from_the_first_are_remembered(events: list[JobState]) -> None:
    creations = sorted((e.created for e in events if e.created), key=lambda c: c.order)
    said: dict[str, Order] = {}
    for created in creations:
        said.setdefault(json.dumps([created.spec, created.assigned_dcs], sort_keys=True), created.order)
    assert sorted(fold(*events).others.values()) == sorted(said.values())[1 : 1 + OTHERS_MAX]


def test_a_creation_that_says_the_same_again_is_no_other_one() -> None:
    again = fact("JobCreated", 9, fence=7, spec={"image": "a"}, assigned_dcs=["use1", "euw1"])
    other = fact("JobCreated", 8, spec={"image": "b"})
    assert fold(CREATED, again).others == fold(again, CREATED).others == {}
    assert len(fold(other, again, CREATED).others) == len(fold(CREATED, again, other).others) == 1


def test_only_so_many_other_creations_are_remembered_whatever_their_order() -> None:
    creations = [
        event_fact("ENQUEUE", {"spec": number % 40}, (number, 0, "n1"), f"{number:064x}", JOB, number)
        for number in range(1, 81)
    ]
    expected = {(number, 0, "n1", f"{number:064x}", number) for number in range(2, 2 + OTHERS_MAX)}
    for order in (creations, creations[::-1], creations[1::2] + creations[::2]):
        assert set(fold(*order).others.values()) == expected
    halves = fold(*creations[::3]), fold(*creations[1::3]), fold(*creations[2::3])
    assert fold(*halves) == fold(*halves[::-1]) == fold(*creations)


def naive_status(events: list[JobState]) -> str:
    """DESIGN section 6, read clause by clause over the facts themselves, without merging."""
    created = min((e.created for e in events if e.created), key=lambda c: c.order, default=None)
    accepted = {dc for e in events for dc in e.accepted}
    acked = {dc for e in events for dc in e.ack}
    ends = [e.end for e in events if e.end]
    if any(e.cancel for e in events):
        asked = accepted or set(created.assigned_dcs if created else [])
        return "CANCELLED" if ends or (acked and asked <= acked) else "CANCELLING"
    stages = [(e.end.rank[0], 3) for e in events if e.end]
    stages += [(e.reached[Part.RUN][0], 2) for e in events if Part.RUN in e.reached]
    stages += [(rank[0], 1) for e in events for rank in e.accepted.values()]
    stage = max(stages, default=(0, 0))[1]
    if stage == 3:
        names = {"COMPLETE": "COMPLETED", "FAIL": "FAILED", "TIMEOUT": "TIMED_OUT"}
        return names[max(ends, key=lambda end: end.rank).action]
    return ("SUBMITTED", "ACCEPTED", "RUNNING")[stage]


@given(st.lists(facts(), min_size=2, max_size=8), st.integers(1, 7))
def test_joining_states_keeps_of_every_field_what_a_naive_reading_keeps(states: list[JobState], at: int) -> None:
    a, b = fold(*states[:at]), fold(*(states[at:] or states[:1]))
    before = deepcopy((a, b))
    joined = merge(a, b)
    assert (a, b) == before
    assert (joined.last_hlc, joined.last_hlc_seq) == max((x.last_hlc, x.last_hlc_seq) for x in (a, b))
    assert (joined.fence, joined.fence_seq) == max((x.fence, x.fence_seq) for x in (a, b))
    assert joined.last_seq == max(a.last_seq, b.last_seq)
    assert joined.created == min((x.created for x in (a, b) if x.created), key=lambda c: c.order, default=None)
    assert joined.cancel == max((x.cancel for x in (a, b) if x.cancel), default=None)
    for part in {*a.reached, *b.reached}:
        assert joined.reached[part] == max(x.reached[part] for x in (a, b) if part in x.reached)
    assert joined.end == max((x.end for x in (a, b) if x.end), key=lambda end: end.rank, default=None)
    for name in ("accepted", "ack"):
        one, other = getattr(a, name), getattr(b, name)
        assert getattr(joined, name) == {dc: max(x[dc] for x in (one, other) if dc in x) for dc in {**one, **other}}
    assert joined.progress == naive_facts(a.progress, b.progress)
    flows = {dc: naive_facts(a.workflow.get(dc, {}), b.workflow.get(dc, {})) for dc in {**a.workflow, **b.workflow}}
    assert joined.workflow == flows


def naive_facts(a: Any, b: Any) -> dict[str, Any]:
    """Of each name the fact of higher rank, of equal rank the one of ``a``."""
    return {name: max((x[name] for x in (a, b) if name in x), key=lambda fact: fact.rank) for name in {**a, **b}}


@given(st.lists(events(), min_size=1, max_size=8), st.integers(0, 8))
def test_folding_events_in_place_gives_what_merging_their_states_gives(entries: list[Entry], stored: int) -> None:
    merged = fold(*(event_fact(*entry[:4], JOB, entry[4]) for entry in entries))
    before = [event_fact(*entry[:4], JOB, entry[4]) for entry in entries[:stored]]
    kept = fold(*before) if before else None
    kept_before = deepcopy(kept)
    folding = JobFold(JOB, kept)
    for entry in entries[stored:]:
        folding.add(*entry)
    assert folding.state() == merged
    assert kept == kept_before


@given(events(["JobCreated"]))
def test_a_job_that_is_only_created_has_the_state_that_folding_gives(entry: Entry) -> None:
    folding = JobFold(JOB)
    folding.add(*entry)
    assert created_state(JOB, *entry[1:]) == folding.state()


@given(
    st.one_of(
        st.dictionaries(
            st.sampled_from(["fence_token", "spec", "assigned_dcs", "actor", "trace_time", "traceparent"]),
            json_values | st.lists(st.text(max_size=3) | st.text(min_size=128), max_size=3) | st.floats(-1e12, 1e12),
        ).map(lambda payload: orjson.dumps(payload).decode()),
        json_values.map(lambda value: orjson.dumps(value).decode()),
        st.text(),
    )
)
@example('{"actor":"a","actor":"b"}')
@example('{"\\u0061ctor":"a","assigned_dcs":["use1",""]}')
def test_the_row_of_a_job_that_is_only_created_is_that_of_its_fold(payload: str) -> None:
    entry = (JOB, 7, 1704931200000, 0, "node-a", "ENQUEUE", "00", payload, None)
    state = folded(JOB, None, [entry])
    assert state is not None
    assert new_job_row(entry) in (None, job_row(state))


def test_the_row_of_a_job_that_is_only_created_is_made_without_a_fold() -> None:
    payload = '{"actor":"ci","assigned_dcs":["use1"],"fence_token":1,"spec":{"n":1},"trace_time":3600.5}'
    row = new_job_row((JOB, 7, 1704931200000, 2, "node-a", "ENQUEUE", "00", payload, None))
    assert row == (JOB, "SUBMITTED", 1704931200000, 2, "node-a", "ci", 7, None, None, '[1,1,["use1"]]', [7])


# --- odd payloads ---------------------------------------------------------------------------------


@given(
    st.sampled_from(sorted(EVENTS_BY_ACTION)),
    st.dictionaries(
        st.sampled_from(
            [
                "fence_token",
                "dc_id",
                "workflow_id",
                "completed",
                "failed",
                "spec",
                "assigned_dcs",
                "error",
                "final_status",
                "aggregate_metrics",
                "timeout_type",
            ]
        ),
        json_values,
    ),
)
def test_a_payload_of_any_types_has_a_state(action: str, payload: dict[str, Any]) -> None:
    stored = orjson.loads(canonical.encode(payload))
    state = event_fact(action, stored, (1, 0, "n1"), "00", JOB, 1)
    assert isinstance(status(state), str)
    assert seqs_of(state) == [1]


def test_a_float_that_prints_as_a_large_integer_says_what_it_said() -> None:
    payload = orjson.loads(canonical.encode({"spec": {"n": 1e17}}))
    assert payload == {"spec": {"n": 10**17}}
    assert creation_digest(payload["spec"], []) == creation_digest({"n": 1e17}, [])


def test_a_spec_as_deep_as_a_payload_may_hold_it_can_be_compared() -> None:
    deep: Any = 1
    for _ in range(62):
        deep = [deep]
    canonical.encode({"spec": {"d": deep}})
    assert creation_of({"d": deep}, []) == creation_digest({"d": deep}, [])


@pytest.mark.parametrize("value", [10**400, "\x00", [[[[]]]] * 1], ids=["huge", "nul", "deep"])
def test_a_creation_without_canonical_form_is_another_than_all_others(value: Any) -> None:
    if isinstance(value, list):
        for _ in range(900):
            value = [value]
    with pytest.raises(CanonicalError):
        creation_digest(value, [])
    assert creation_of(value, []) is None
    edited = event_fact("ENQUEUE", {"spec": value}, (1, 0, "n1"), "00", JOB, 2)
    assert fold(CREATED, edited).others == fold(edited, CREATED).others
    assert seqs_of(fold(CREATED, edited)) == [1, 2]
