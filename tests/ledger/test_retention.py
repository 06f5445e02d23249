"""What a chain says about its retention: nothing shortens a minimum, only a signed release ends a hold, and of a prune
and a hold the one that is chained first counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any, Final

import orjson
import pytest

from ledger import canonical
from ledger.chain.conflict import Event, conflict_hlc, conflict_payload
from ledger.facts.events import SystemAction
from ledger.hlc import Hlc
from ledger.machines.retention import (
    NO_ENTRY,
    SUBJECT,
    Hold,
    OpenJob,
    Plan,
    Retention,
    Stop,
    Why,
    plan,
    retention_of,
    stopping_holds,
    stopping_jobs,
)
from ledger.merkle import Frontier

FOREIGN: Final = "eu.example/acme"
SIGNED: Final = {"statement": "by an admitted key"}
DAY_S: Final = 86_400


def judge(action: str, facts: Mapping[str, Any], hlc: str) -> str:
    return "ok" if facts.get("statement") == SIGNED["statement"] else str(facts.get("verdict", "broken"))


class Chain:
    """Entries about retention, each at the next seq; others lie between where ``at`` says so."""

    def __init__(self) -> None:
        self.rows: list[tuple[Any, ...]] = []

    @property
    def newest(self) -> dict[str, Any]:
        """The newest entry, as ``after`` names it."""
        return {"seq": self.rows[-1][0], "chain_link": self.rows[-1][9]} if self.rows else {"seq": 0, "chain_link": ""}

    def add(self, action: str, facts: Mapping[str, Any], *, at: int | None = None, log: str | None = None) -> int:
        seq = at or (self.rows[-1][0] + 1 if self.rows else 1)
        text = canonical.encode({"type": action, **facts}).decode()
        origin = None if log is None else orjson.dumps({"log": log, "seq": 1}).decode()
        link = f"{seq:064x}"
        self.rows.append((seq, f"{seq}:0:node", seq, 0, "node", SUBJECT, action, 2, None, link, "d", text, origin))
        return seq

    def set(self, *, log: str | None = None, signed: bool = True, **facts: int) -> int:
        return self.add(
            SystemAction.RETENTION_SET, {**facts, "after": self.newest, **(SIGNED if signed else {})}, log=log
        )

    def hold(self, hold_id: str, *, log: str | None = None, **facts: Any) -> int:
        return self.add(SystemAction.HOLD_PLACED, {"hold_id": hold_id, "reason": "a lawsuit", **facts}, log=log)

    def release(self, hold_id: str, *, log: str | None = None, signed: bool = True) -> int:
        facts = {"hold_id": hold_id, "reason": "it is over", "after": self.newest, **(SIGNED if signed else {})}
        return self.add(SystemAction.HOLD_RELEASED, facts, log=log)

    def prune(self, to_seq: int, /, *, at: int | None = None, log: str | None = None, **facts: Any) -> int:
        return self.add(SystemAction.PRUNED, pruned(to_seq, self.newest) | SIGNED | facts, at=at, log=log)

    def fold(self) -> Retention:
        return retention_of(self.rows, judge)


def pruned(to_seq: int, after: Mapping[str, Any], from_seq: int = 1) -> dict[str, Any]:
    return {
        "from_seq": from_seq,
        "to_seq": to_seq,
        "entry_count": to_seq - from_seq + 1,
        "chain_link": f"{to_seq:064x}",
        "tree_root": Frontier.restore(to_seq, [bytes(32)] * to_seq.bit_count()).root().hex(),
        "compact_range": ["0" * 64] * to_seq.bit_count(),
        "snapshot": "2" * 64,
        "highest_hlc": "1:0:node",
        "archive": "file:///archive",
        "manifests": ["3" * 64],
        "decided_ms": 10,
        "never_ended": 0,
        "period_s": 5,
        "after": after,
    }


def test_the_newest_signed_period_counts_and_the_longest_minimum() -> None:
    chain = Chain()
    chain.set(period_s=400 * DAY_S, minimum_s=180 * DAY_S)
    chain.set(period_s=30 * DAY_S, minimum_s=10 * DAY_S)
    found = chain.fold()
    assert (found.period_s, found.minimum_s, found.kept_s) == (30 * DAY_S, 180 * DAY_S, 180 * DAY_S)
    chain.set(minimum_s=200 * DAY_S)
    assert chain.fold() == found._replace(period_s=None, minimum_s=200 * DAY_S, newest=chain.fold().newest), (
        "without a period nothing leaves"
    )


def test_what_no_admitted_key_signed_sets_no_period_and_ends_no_hold() -> None:
    chain = Chain()
    chain.set(period_s=400 * DAY_S)
    chain.hold("a" * 16, tenant=True)
    forged = [chain.set(period_s=1, signed=False), chain.release("a" * 16, signed=False)]
    found = chain.fold()
    assert found.period_s == 400 * DAY_S
    assert "a" * 16 in found.holds
    assert [(seq, verdict) for seq, _, verdict in found.doubted] == [(seq, "broken") for seq in forged]


@pytest.mark.parametrize("verdict", ["unknown_key", "not_checked"])
def test_a_verifier_takes_a_floor_that_it_cannot_judge_and_says_so(verdict: str) -> None:
    chain = Chain()
    chain.set(period_s=5)
    at = chain.prune(8, at=20, statement="by somebody", verdict=verdict)
    assert chain.fold().floor is None
    found = retention_of(chain.rows, judge, is_strict=False)
    assert (found.floor_seq, found.doubted) == (8, ((at, "PRUNED", verdict),))


def test_another_log_tightens_and_never_loosens() -> None:
    chain = Chain()
    chain.set(period_s=100, minimum_s=10)
    chain.hold("a" * 16, tenant=True)
    chain.set(log=FOREIGN, period_s=1, minimum_s=50)
    chain.release("a" * 16, log=FOREIGN)
    chain.hold("b" * 16, log=FOREIGN, job_ids=["job-1"])
    chain.prune(2, log=FOREIGN)
    found = chain.fold()
    assert (found.period_s, found.minimum_s, found.floor) == (100, 50, None)
    assert sorted(found.holds) == ["a" * 16, "b" * 16]
    assert found.holds["b" * 16].log == FOREIGN
    chain.release("b" * 16)
    assert sorted(chain.fold().holds) == ["a" * 16]


def test_a_hold_in_a_conflict_entry_counts() -> None:
    chain = Chain()
    payload = canonical.encode({"type": "HOLD_PLACED", "hold_id": "a" * 16, "reason": "r"}).decode()
    event = Event("1:0:node", SUBJECT, "HOLD_PLACED", "0" * 64)
    conflict = orjson.loads(conflict_payload(event, payload, "0" * 64))
    conflict["digest"] = sha256(payload.encode()).hexdigest()
    chain.add(SystemAction.CONFLICT, {key: value for key, value in conflict.items() if key != "type"})
    chain.rows[-1] = (*chain.rows[-1][:11], orjson.dumps(conflict).decode(), None)
    assert conflict_hlc(event).physical_ms == Hlc.parse("1:0:node").physical_ms
    assert "a" * 16 in chain.fold().holds


def test_a_second_hold_of_one_id_never_narrows_the_first() -> None:
    chain = Chain()
    chain.hold("a" * 16, job_ids=["job-1"])
    chain.hold("a" * 16, log=FOREIGN, job_ids=["job-2"])
    assert chain.fold().holds["a" * 16].job_ids == ("job-1", "job-2")
    chain.hold("a" * 16, tenant=True)
    assert chain.fold().holds["a" * 16].job_ids is None


def test_a_statement_counts_only_behind_the_entry_that_it_names() -> None:
    chain = Chain()
    chain.set(period_s=30)
    earlier = chain.rows[-1]
    chain.set(period_s=400)
    chain.add(SystemAction.RETENTION_SET, orjson.loads(earlier[11]))
    assert chain.fold().period_s == 400, "a signed entry that is chained again sets nothing"


def test_a_prune_counts_and_has_the_policy_of_its_moment() -> None:
    chain = Chain()
    chain.set(period_s=5, minimum_s=3)
    at = chain.prune(8, at=20, minimum_s=3)
    found = chain.fold()
    assert found.floor is not None
    assert (found.floor.seq, found.floor.to_seq, found.floor_seq, found.newest.seq) == (at, 8, 8, at)
    del chain.rows[0]
    assert chain.fold() == found, "the entry that set the policy has left"
    assert found._replace(floor=None, floors=()) == Retention(5, 3, {}, None, found.newest)
    assert found.floors == (found.floor,)


def test_a_hold_that_is_chained_before_a_prune_stops_it_and_one_behind_comes_after() -> None:
    chain = Chain()
    chain.set(period_s=5)
    considered = chain.newest
    chain.hold("a" * 16, tenant=True)
    chain.prune(8, at=20, after=considered)
    assert chain.fold().floor is None
    after = Chain()
    after.set(period_s=5)
    after.prune(8, at=20)
    after.hold("a" * 16, tenant=True)
    assert after.fold().floor_seq == 8
    assert "a" * 16 in after.fold().holds


def test_of_two_prunes_that_were_planned_together_the_first_counts() -> None:
    chain = Chain()
    chain.set(period_s=5)
    considered = chain.newest
    first = chain.prune(8, at=20)
    chain.prune(9, after=considered)
    floor = chain.fold().floor
    assert floor is not None
    assert floor.seq == first


@pytest.mark.parametrize(
    "wrong",
    [
        {"statement": "of somebody"},
        {"entry_count": 7},
        {"to_seq": 99, "entry_count": 99, "compact_range": ["0" * 64] * 4, "tree_root": pruned(99, {})["tree_root"]},
        {"compact_range": []},
        {"compact_range": ["1" * 64]},
        {"period_s": 0},
        {"manifests": ["no digest"]},
        {"after": {"seq": 1, "chain_link": "f" * 64}},
        {"after": None},
    ],
)
def test_a_prune_that_is_not_whole_counts_for_nothing(wrong: dict[str, Any]) -> None:
    chain = Chain()
    chain.set(period_s=5)
    chain.prune(8, at=20, **wrong)
    assert chain.fold().floor is None


def test_a_later_prune_replaces_the_floor_whatever_is_left_below() -> None:
    chain = Chain()
    chain.set(period_s=5)
    chain.prune(8, at=20)
    chain.hold("a" * 16, job_ids=["job-1"])
    chain.release("a" * 16)
    chain.prune(24, at=30, from_seq=9, entry_count=16)
    whole = chain.fold()
    assert [each.to_seq for each in whole.floors] == [8, 24]
    for left in range(1, 4):
        later = Chain()
        later.rows = chain.rows[left:]
        found = later.fold()
        assert found._replace(floors=whole.floors) == whole
        # A prune is listed for as long as its own entry is there, whatever left before it.
        assert [each.to_seq for each in found.floors] == ([8, 24] if left == 1 else [24])


def test_rows_of_any_content_are_no_entries() -> None:
    row: Sequence[Any] = (1, "1:0:n", 1, 0, "n", SUBJECT, "RETENTION_SET", 2, None, "a", "d", "[]", None)
    for changed in (
        {0: None},
        {9: 5},
        {11: "no json"},
        {11: '{"minimum_s": -1}'},
        {11: '{"minimum_s": 99999999999}'},
        {5: "job-1"},
    ):
        edited = [changed.get(at, value) for at, value in enumerate(row)]
        assert retention_of([edited], lambda *_: "ok")[:4] == (None, None, {}, None)
    assert retention_of([], judge).newest == NO_ENTRY


def test_a_prefix_ends_at_a_signed_snapshot_before_everything_that_stops_it() -> None:
    ends = [10, 20, 30, 40]
    assert plan(0, ends, []) == Plan(40, None)
    young = Stop(31, Why.YOUNG)
    assert plan(0, ends, [young, Stop(35, Why.UNSIGNED)]) == Plan(30, young)
    assert plan(0, ends, [Stop(30, Why.HOLD), young]) == Plan(20, Stop(30, Why.HOLD))
    assert plan(20, ends, [Stop(25, Why.HOLD)]) == Plan(20, Stop(25, Why.HOLD))
    assert plan(0, ends, [Stop(1, Why.OPEN_JOB), Stop(1, Why.HOLD)]).stopped_by == Stop(1, Why.HOLD)


def test_a_job_that_never_ends_stops_for_twice_the_period() -> None:
    jobs = [OpenJob("late", 5, 100_000), OpenJob("lost", 2, 10_000)]
    assert stopping_jobs(jobs, 109_999, 50) == Stop(2, Why.OPEN_JOB, "job lost has not ended")
    assert stopping_jobs(jobs, 110_000, 50) == Stop(5, Why.OPEN_JOB, "job late has not ended")
    assert stopping_jobs(jobs, 200_000, 50) is None


def test_a_hold_stops_at_the_first_entry_it_holds_and_its_own_entry_stays() -> None:
    hold = Hold("a" * 16, 50, "", "r", ("job-1", "job-2", "gone"), None, None, None)
    (stop,) = stopping_holds([hold], 7, {"job-1": 12, "job-2": 9})
    assert (stop.seq, stop.why) == (9, Why.HOLD)
    (stop,) = stopping_holds([hold], 7, {})
    assert stop.seq == 50
    (stop,) = stopping_holds([hold._replace(job_ids=None)], 7, {})
    assert stop.seq == 8
