"""The figures of jobs are what a recount of the entries gives, whatever happened to the chain and its follower."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import asyncpg
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from app.store.entry_check import EntryCheck
from app.store.jobs import figures as job_figures
from app.store.jobs import search as job_search
from app.store.jobs.figures import Wanted, covered, read
from app.store.jobs.table import JobFolds
from app.store.retention import _write_again
from app.write.followers import job_table
from ledger.hlc import Hlc
from ledger.machines import jobs
from ledger.machines.exclusions import SUBJECT
from ledger.machines.job_figures import (
    BOUNDS_MS,
    HOUR_MAX,
    HOUR_MS,
    PERIODS_HOURS,
    RUN_MS_MAX,
    VALUES_MAX,
    Extremes,
    middle_ms,
    run_class,
    run_times,
)
from tests.app.followed_chain import LOG_ORIGIN, Event, FollowedChain
from tests.conftest import Database, connected_to
from tests.ledger.job_facts import fact_of, merge

BEGIN_MS = 473_000 * HOUR_MS
HOURS = 2000
OTHER_LOG = "ledger.test/elsewhere"
FIELD = "spec.image"

_numbers = itertools.count(1)


# --- run times ------------------------------------------------------------------------------------


@given(st.integers(0, RUN_MS_MAX))
@example(0)
@example(RUN_MS_MAX)
def test_the_middle_of_a_class_is_within_one_per_cent_of_its_times(run_ms: int) -> None:
    of_class = run_class(run_ms)
    assert BOUNDS_MS[of_class] <= run_ms
    assert abs(middle_ms(of_class) - run_ms) <= run_ms * 0.01


@given(st.lists(st.integers(0, 10**7), min_size=1))
def test_percentiles_are_within_one_per_cent_of_those_of_the_times(times_ms: list[int]) -> None:
    found = run_times(Counter(map(run_class, times_ms)), Extremes().joined(*times_ms))
    ranked = sorted(times_ms)
    assert found is not None
    assert (found.jobs, found.min_ms, found.max_ms) == (len(ranked), ranked[0], ranked[-1])
    for percent, given_ms in ((50, found.p50_ms), (95, found.p95_ms)):
        exact_ms = ranked[-(-len(ranked) * percent // 100) - 1]
        assert abs(given_ms - exact_ms) <= exact_ms * 0.01


# --- periods --------------------------------------------------------------------------------------


@given(st.integers(0, 5000), st.integers(0, 5000))
def test_periods_cover_each_hour_of_a_range_once(first: int, hours: int) -> None:
    found: Counter[int] = Counter()
    for length, begin, below in covered(first, first + hours):
        assert begin % length == below % length == 0
        assert begin < below
        found.update(range(begin, below))
    assert found == Counter(range(first, first + hours))
    assert covered(0, HOUR_MAX + 1) == [(PERIODS_HOURS[-1], 0, HOUR_MAX + 1)]


# --- recounts -------------------------------------------------------------------------------------

_jobs = st.sampled_from([f"job-{number}" for number in range(6)])
_dcs = st.sampled_from(["use1", "euw1", "x" * 200])
_fence = st.integers(1, 2)
_ms = st.integers(0, HOURS * HOUR_MS).map(lambda at_ms: BEGIN_MS + at_ms)
_traced = st.none() | st.integers(0, 5000 * 3600) | st.floats(0, 1e6)
_kinds: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "JobCreated": {
        "assigned_dcs": st.lists(_dcs, max_size=2),
        "spec": st.fixed_dictionaries({"image": st.sampled_from(["a", "b", ["a", "c"], 4, {"$private": {}}])}),
    },
    "JobAccepted": {"dc_id": _dcs},
    "JobProgressReported": {"dc_id": _dcs},
    "JobCancellationRequested": {},
    "JobCancellationAcked": {"dc_id": _dcs},
    "JobCompleted": {},
    "JobFailed": {"error": st.sampled_from(["OOMKilled", "", 'a\t"\\', "y" * 300, {"$private": {}}])},
    "JobTimedOut": {"timeout_type": st.just("wall")},
}


@st.composite
def _events(draw: st.DrawFn) -> Event:
    name = draw(st.sampled_from([*_kinds, "JobCreated", "JobCompleted"]))
    fields = {"fence_token": draw(_fence), **{field: draw(values) for field, values in _kinds[name].items()}}
    if (seconds := draw(_traced)) is not None:
        fields["trace_time"] = seconds
    return draw(_jobs), name, draw(_ms), fields


_steps = st.one_of(
    st.tuples(st.just("append"), st.lists(_events(), min_size=1, max_size=12)),
    st.tuples(st.just("import"), st.lists(_events(), min_size=1, max_size=4)),
    st.tuples(st.sampled_from(["follow", "restart", "exclude", "include", "declare", "undeclare", "empty"]), st.none()),
    st.tuples(st.just("prune"), st.integers(1, 6)),
)


@settings(max_examples=40)
@given(st.lists(_steps, min_size=3, max_size=14), st.sampled_from([1, VALUES_MAX]))
def test_figures_are_what_a_recount_of_the_entries_gives(
    shared_database: Database, steps: list[tuple[str, Any]], values_max: int
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(job_figures, "_ADMIT", job_figures._ADMIT.replace(str(VALUES_MAX), str(values_max)))
        asyncio.run(_check(shared_database, f"figures-{next(_numbers)}", steps, values_max))


async def _check(database: Database, tenant: str, steps: Sequence[tuple[str, Any]], values_max: int) -> None:
    async with connected_to(database.superuser_url) as superuser:
        chain = FollowedChain(database, superuser, tenant)
        await chain.append([("job-0", "JobCreated", BEGIN_MS, {})])
        try:
            for step, what in steps:
                await _take(chain, superuser, step, what)
            await chain.follow()
            await chain.follow()
            await _compare(superuser, tenant, await _recount(superuser, tenant), values_max)
        finally:
            chain.end()


async def _take(chain: FollowedChain, superuser: asyncpg.Connection, step: str, what: Any) -> None:
    other = json.dumps({"log": f"{OTHER_LOG}/{chain.tenant}"})
    if step == "append":
        await chain.append(what)
    elif step == "import":
        await chain.append(what, other)
    elif step in ("exclude", "include"):
        said = {"log": f"{OTHER_LOG}/{chain.tenant}", "reason": "it lies"}
        await chain.append([(SUBJECT, f"LOG_{step.upper()}D", BEGIN_MS + next(_numbers), said)])
    elif step == "follow":
        await chain.follow()
    elif step == "restart":
        chain.restart()
    elif step in ("declare", "undeclare"):
        await job_search.declare(superuser, chain.tenant, [FIELD] if step == "declare" else [])
    elif step == "empty":
        await superuser.execute("DELETE FROM scheduler.follower_positions WHERE tenant_id = $1", chain.tenant)
    else:
        await chain.follow()
        await _prune(superuser, chain.tenant, what)


async def _prune(superuser: asyncpg.Connection, tenant: str, count: int) -> None:
    """Remove the first entries and all others of their jobs but the newest of the chain, as a prune does."""
    async with superuser.transaction():
        head_seq = await superuser.fetchval("SELECT head_seq FROM scheduler.chain_heads WHERE tenant_id = $1", tenant)
        await superuser.execute("SET LOCAL session_replication_role = replica")
        rows = await superuser.fetch(
            """
            WITH first AS (
                SELECT job_id FROM scheduler.scheduler_log
                 WHERE tenant_id = $1 AND seq < (SELECT coalesce(min(seq), $3) FROM scheduler.scheduler_log
                                                  WHERE tenant_id = $1 AND job_id = $4)
                 ORDER BY seq LIMIT $2)
            DELETE FROM scheduler.scheduler_log
             WHERE tenant_id = $1 AND job_id IN (SELECT job_id FROM first) AND job_id <> $4 AND seq < $3
            RETURNING job_id, seq
            """,
            tenant,
            count,
            head_seq,
            SUBJECT,
        )
        removed_to: dict[str, int] = {}
        for job_id, seq in rows:
            removed_to[job_id] = max(seq, removed_to.get(job_id, 0))
        if removed_to:
            folds = JobFolds(EntryCheck(lambda _: None), LOG_ORIGIN)
            await _write_again(superuser, tenant, removed_to, head_seq, folds)


async def test_the_longest_run_time_is_exact_after_its_job_runs_again_or_leaves(shared_database: Database) -> None:
    lives: list[Event] = []
    for number, run_ms in enumerate((9_000, 60_000, 60_010, 1_000)):
        job, at_ms = f"job-{number}", BEGIN_MS + number * 100
        lives += [
            (job, "JobCreated", at_ms, {"assigned_dcs": ["use1"]}),
            (job, "JobAccepted", at_ms, {"dc_id": "use1"}),
        ]
        lives.append((job, "JobFailed", at_ms + run_ms, {"error": "OOMKilled"}))
    again: Event = ("job-2", "JobAccepted", BEGIN_MS + 90_000, {"dc_id": "use1", "fence_token": 2})
    for pieces in ([[*lives, again]], [lives, [again]], [[each] for each in (*lives, again)]):
        tenant = f"extremes-{next(_numbers)}"
        async with connected_to(shared_database.superuser_url) as superuser:
            chain = FollowedChain(shared_database, superuser, tenant)
            for events in pieces:
                await chain.append(events)
                await chain.follow()
            for by, first, extremes in (
                ("status", 0, (1_000, 60_000)),
                ("error", BEGIN_MS // HOUR_MS, (1_000, 60_000)),
                ("dc", BEGIN_MS // HOUR_MS // 24 * 24, (1_000, 60_000)),
            ):
                groups, _ = await read(superuser, Wanted(tenant, by, first=first), 10)
                assert Extremes().joined(*(ms for group in groups.values() for ms in group.extremes)) == extremes
            # The first entries leave: those of the jobs that ran for 9 and for 60 seconds.
            await _prune(superuser, tenant, 6)
            groups, _ = await read(superuser, Wanted(tenant, "status"), 10)
            assert groups["FAILED"].extremes == (1_000, 1_000)
            assert await job_figures.difference(superuser, tenant) is None
            chain.end()


_PERIOD_MS = PERIODS_HOURS[-1] * HOUR_MS


def _named(number: int, image: object, period: int = 0) -> Event:
    return f"named-{number}", "JobCreated", BEGIN_MS + period * _PERIOD_MS + number, {"spec": {"image": image}}


@pytest.mark.parametrize("at_once", [1, 3, 100])
async def test_the_first_values_of_a_field_are_counted_by_themselves_in_each_period(
    shared_database: Database, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(job_figures, "_ADMIT", job_figures._ADMIT.replace(str(VALUES_MAX), "2"))
    monkeypatch.setattr(job_table, "BUILT_AT_ONCE", at_once)
    tenant = f"values-{next(_numbers)}"
    # Created again with another image, by a lower HLC: what was there first keeps its place.
    again: Event = ("named-3", "JobCreated", BEGIN_MS, {"spec": {"image": "y"}})
    older = [_named(0, "c"), _named(9, "b"), _named(2, "a"), _named(3, ["c", "x"]), again]
    newer = [_named(4, "b"), _named(5, ["z", "w"]), _named(6, "a", 1), _named(7, "z", 1), _named(8, "b", 1)]
    async with connected_to(shared_database.superuser_url) as superuser:
        chain = FollowedChain(shared_database, superuser, tenant)
        await chain.append(older)
        await chain.follow()
        await job_search.declare(superuser, tenant, [FIELD])
        for first in range(0, len(newer), at_once):
            await chain.append(newer[first : first + at_once])
            await chain.follow()
        for _ in range(3):
            groups, found = await read(superuser, Wanted(tenant, FIELD), 10)
            other = await job_figures.other(superuser, Wanted(tenant, FIELD))
            assert other is not None
            assert ({name: group.statuses.total() for name, group in groups.items()}, found) == (
                {"b": 2, "c": 1, "a": 1, "z": 1}, 4
            )  # fmt: skip
            assert other.statuses == Counter({"SUBMITTED": 4})
            assert await job_figures.difference(superuser, tenant) is None
            # The same when everything is made again from the log.
            await superuser.execute("DELETE FROM scheduler.follower_positions WHERE tenant_id = $1", tenant)
            chain.restart()
            await chain.follow()
        await chain.append([("named-5", "JobCompleted", BEGIN_MS + 900, {})])
        await chain.follow()
        other = await job_figures.other(superuser, Wanted(tenant, FIELD))
        assert other is not None
        assert other.statuses == Counter({"SUBMITTED": 3, "COMPLETED": 1})
        await job_search.declare(superuser, tenant, [])
        await chain.follow()
        await chain.follow()
        kept = await superuser.fetchval(
            "SELECT count(*) FROM scheduler.job_figures WHERE tenant_id = $1 AND field <> ''", tenant
        )
        assert kept == 0
        chain.end()


_Job = tuple[str, int | None, bool]
"""Status and run time of a job, and whether its hour is that of a trace."""


async def _recount(superuser: asyncpg.Connection, tenant: str) -> dict[str, defaultdict[str, list[_Job]]]:
    """The jobs by each kind of group, from the entries that the log has, merged one by one."""
    entries = await superuser.fetch("SELECT * FROM scheduler.scheduler_log WHERE tenant_id = $1 ORDER BY seq", tenant)
    statements = [
        (entry["hlc_physical"], entry["seq"], entry["action"]) for entry in entries if entry["job_id"] == SUBJECT
    ]
    is_excluded = bool(statements) and max(statements)[2] == "LOG_EXCLUDED"
    states: dict[str, jobs.JobState] = {}
    payloads = {entry["seq"]: json.loads(entry["payload"]) for entry in entries}
    for entry in entries:
        if entry["job_id"] == SUBJECT or (entry["origin"] is not None and is_excluded):
            continue
        hlc = Hlc.parse(entry["t_hlc"])
        payload, digest = payloads[entry["seq"]], entry["payload_digest"]
        fact = fact_of(entry["action"], payload, hlc, digest, entry["job_id"], entry["seq"])
        assert fact is not None
        known = states.get(entry["job_id"])
        states[entry["job_id"]] = fact if known is None else merge(known, fact)
    found: defaultdict[str, defaultdict[str, list[_Job]]] = defaultdict(lambda: defaultdict(list))
    for state in states.values():
        if state.created is None:
            continue
        payload, status = payloads[state.created.order[-1]], jobs.status(state)
        seconds = payload.get("trace_time")
        at_ms = state.created.order[0] if seconds is None else int(seconds * 1000 + 0.5) if seconds else 0
        job = status, _run_ms(state, payloads), seconds is not None
        found["status"][status].append(job)
        found["hour"][str(at_ms // HOUR_MS)].append(job)
        found["day"][str(at_ms // HOUR_MS // 24 * 24)].append(job)
        for dc in {*payload.get("assigned_dcs", []), *state.accepted}:
            found["dc"][dc[:128]].append(job)
        if status in ("FAILED", "TIMED_OUT"):
            assert state.end is not None
            ended = payloads[state.end.rank[-1]]
            error = ended.get("error", ended.get("timeout_type"))
            found["error"][error[:128] if isinstance(error, str) else ""].append(job)
        image = payload.get("spec", {}).get("image")
        for value in (
            {*(image if isinstance(image, list) else [image])} if not isinstance(image, dict) and image else ()
        ):
            found[FIELD][str(value)].append(job)
    return found


def _run_ms(state: jobs.JobState, payloads: dict[int, Any]) -> int | None:
    if state.end is None or jobs.status(state) not in ("COMPLETED", "FAILED", "TIMED_OUT", "CANCELLED"):
        return None
    tries = [rank for rank in state.accepted.values() if rank[0] <= state.end.rank[0]]
    started = [rank for rank in tries if rank[0] == max(tries)[0]]
    if not started:
        return None
    traced = [payloads[rank[-1]].get("trace_time") for rank in (state.end.rank, *started)]
    if None in traced:
        run_ms = state.end.rank[1] - min(rank[1] for rank in started)
    else:
        end_ms, *start_ms = (int(seconds * 1000 + 0.5) if seconds else 0 for seconds in traced)
        run_ms = end_ms - min(start_ms)
    return run_ms if run_ms >= 0 else None


async def _compare(
    superuser: asyncpg.Connection, tenant: str, expected: dict[str, defaultdict[str, list[_Job]]], values_max: int
) -> None:
    assert await job_figures.difference(superuser, tenant) is None
    declared = (await job_search.declared(superuser, [tenant])).get(tenant)
    fields = () if declared is None else declared.fields
    # Of few values, which are counted by themselves depends on what was pruned when.
    for by in ("status", "hour", "day", "dc", "error", *([FIELD] if values_max == VALUES_MAX else ())):
        groups, count = await read(superuser, Wanted(tenant, by), 1000)
        wanted = expected[by] if by != FIELD or FIELD in fields else {}
        assert {*groups} == {*wanted}, by
        assert count == len(wanted)
        for name, group in groups.items():
            _compare_group(group, wanted[name])
    # Each hour alone, and all from the middle on, of one data centre.
    for hour, listed in expected["hour"].items():
        groups, _ = await read(superuser, Wanted(tenant, "status", first=int(hour), below=int(hour) + 1), 1000)
        assert sum((group.statuses for group in groups.values()), Counter()) == Counter(job[0] for job in listed)
    for first in (473_999, 474_500):
        groups, _ = await read(superuser, Wanted(tenant, "status", first=first), 1000)
        later = [job for hour, listed in expected["hour"].items() if int(hour) >= first for job in listed]
        assert sum((group.statuses for group in groups.values()), Counter()) == Counter(job[0] for job in later)
    for dc, listed in expected["dc"].items():
        groups, _ = await read(superuser, Wanted(tenant, "status", dc=dc), 1000)
        assert sum((group.statuses for group in groups.values()), Counter()) == Counter(job[0] for job in listed)


def _compare_group(group: job_figures.Group, listed: Sequence[_Job]) -> None:
    assert group.statuses == Counter(job[0] for job in listed)
    assert group.traced == sum(job[2] for job in listed)
    times_ms = [job[1] for job in listed if job[1] is not None]
    assert group.runs == Counter(map(run_class, times_ms))
    assert group.extremes == ((min(times_ms), max(times_ms)) if times_ms else (None, None))
