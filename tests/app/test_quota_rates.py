"""Token buckets, bounds of what is under way, and turns, in the time of a clock that is set by hand."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.runtime.settings.config import QUOTAS, QuotaSettings
from app.runtime.sharing import TURNS_IN_A_ROW, FairTurns
from app.runtime.tasks import MemoryBudget
from app.trust import quotas
from app.trust.quotas import AtOnce, Quotas, Rate
from ledger.errors import NotReadyError, QuotaExceededError, RequestTooLargeError

SECOND_NS = 1_000_000_000


class ClockNs:
    """Nanoseconds that go by when they are told to."""

    def __init__(self) -> None:
        self.now_ns = 123_456_789_012_345

    def __call__(self) -> int:
        return self.now_ns


def rate_of(count: int, burst: int, clock: ClockNs, per_s: int = 1) -> Rate:
    return Rate("principal_requests", count, burst, per_s=per_s, clock_ns=clock)


def takes(rate: Rate, key: str | None, amount: int = 1) -> bool:
    try:
        rate.take(key, amount)
    except QuotaExceededError:
        return False
    return True


def test_quotas_and_settings_have_the_same_names() -> None:
    assert set(QUOTAS) == QuotaSettings.model_fields.keys() - {"burst"}


@pytest.mark.parametrize(("count", "burst"), [(1, 1), (3, 30), (7, 70), (1_000_000, 10), (64 << 30, 64 << 30)])
def test_a_bucket_holds_its_burst_and_no_token_more_and_has_the_next_when_it_says(count: int, burst: int) -> None:
    clock = ClockNs()
    rate = rate_of(count, burst, clock)
    step = max(1, burst // 70)
    whole, rest = divmod(burst, step)
    for _ in range(whole):
        rate.take("ci", step)
    rate.take("ci", rest)
    with pytest.raises(QuotaExceededError) as refused:
        rate.take("ci", 1)
    assert takes(rate, "another")
    token_ns = -(-SECOND_NS // count)
    clock.now_ns += token_ns - 1
    assert not takes(rate, "ci")
    clock.now_ns += 1
    assert takes(rate, "ci")
    clock.now_ns += refused.value.retry_after_s * SECOND_NS
    assert takes(rate, "ci")


@given(
    count=st.integers(1, 5000),
    burst=st.integers(1, 20_000),
    per_s=st.sampled_from([1, 3600]),
    asked=st.lists(st.tuples(st.integers(0, 5 * SECOND_NS), st.integers(1, 25_000)), min_size=1, max_size=60),
)
def test_no_more_is_taken_in_any_time_than_burst_and_rate_give_and_whoever_is_refused_may_come_again_when_it_was_said(
    count: int, burst: int, per_s: int, asked: list[tuple[int, int]]
) -> None:
    clock = ClockNs()
    rate = rate_of(count, burst, clock, per_s)
    taken: list[tuple[int, int]] = []
    for waited_ns, amount in asked:
        clock.now_ns += waited_ns
        if amount > burst:
            with pytest.raises(RequestTooLargeError):
                rate.take("ci", amount)
            continue
        if not takes(rate, "ci", amount):
            with pytest.raises(QuotaExceededError) as refused:
                rate.take("ci", amount)
            clock.now_ns += (refused.value.retry_after_s - 1) * SECOND_NS
            assert refused.value.retry_after_s == 1 or not takes(rate, "ci", amount)
            clock.now_ns += SECOND_NS
            rate.take("ci", amount)
        taken.append((clock.now_ns, amount))
    for first, (began_ns, _) in enumerate(taken):
        total = 0
        for at_ns, amount in taken[first:]:
            total += amount
            assert total * per_s * SECOND_NS <= burst * per_s * SECOND_NS + (at_ns - began_ns) * count


def test_what_is_refused_is_not_taken_and_checking_takes_nothing() -> None:
    clock = ClockNs()
    rate = rate_of(10, 10, clock)
    rate.take("ci", 4)
    for _ in range(100):
        assert not takes(rate, "ci", 7)
        rate.check("ci", 6)
    assert takes(rate, "ci", 6)


def test_a_request_that_is_refused_before_it_is_read_is_told_when_all_of_it_fits() -> None:
    clock = ClockNs()
    rate = rate_of(100, 1000, clock)
    rate.take("acme", 900)
    with pytest.raises(QuotaExceededError) as refused:
        rate.check("acme", 500, more_max=400)
    assert refused.value.retry_after_s == 8
    clock.now_ns += 8 * SECOND_NS
    assert takes(rate, "acme", 900)
    with pytest.raises(QuotaExceededError) as refused:
        rate.check("acme", 500, more_max=10_000)
    assert refused.value.retry_after_s == 10, "when the bucket is full"
    with pytest.raises(RequestTooLargeError, match="never more than 1000 at once"):
        rate.check("acme", 1001)


def test_what_is_owed_is_paid_at_the_rate() -> None:
    clock = ClockNs()
    rate = rate_of(100, 1000, clock)
    assert [rate.owe("ci", 1000), rate.owe("ci", 100), rate.owe("ci", 50)] == [0.0, 1.0, 1.5]
    assert not takes(rate, "ci")
    clock.now_ns += 2 * SECOND_NS
    assert takes(rate, "ci", 50)
    assert not takes(rate, "ci")


def test_idle_buckets_are_forgotten_and_there_are_never_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "KEYS_MAX", 100)
    clock = ClockNs()
    rate = rate_of(10, 20, clock)
    for number in range(1000):
        assert takes(rate, f"tenant-{number}") is (number < 100 + 20), "those without a bucket share one"
        assert len(rate) <= 101
    clock.now_ns += 2 * SECOND_NS
    assert takes(rate, "new", 20)
    assert len(rate) == 1
    assert takes(rate, "tenant-1", 20)


def test_one_that_still_owes_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ClockNs()
    rate = rate_of(1, 10, clock)
    rate.take("ci", 10)
    for number in range(9):
        clock.now_ns += SECOND_NS
        rate.take(f"other-{number}", 1)
        assert not takes(rate, "ci", 10)
    rate.take("ci", 9)
    clock.now_ns += SECOND_NS
    rate.take("another", 1)
    assert len(rate) == 2, "the others were forgotten"
    assert not takes(rate, "ci", 2)
    clock.now_ns += 9 * SECOND_NS
    assert takes(rate, "ci", 10)


def quotas_of(clock: ClockNs, **counts: int) -> tuple[Quotas, list[str]]:
    refused: list[str] = []
    defaults = QuotaSettings().model_dump(exclude={"burst"})
    return Quotas.of(defaults | counts, 1.0, refused.append, clock), refused


def test_a_request_takes_all_that_it_needs_or_nothing() -> None:
    clock = ClockNs()
    bounds, refused = quotas_of(clock, principal_requests=2, principal_bytes=1024)
    bounds.admit("ci", 1024)
    with pytest.raises(QuotaExceededError, match="principal_bytes"):
        bounds.admit("ci", 1)
    bounds.admit("ci", 0)
    clock.now_ns += SECOND_NS // 2
    bounds.admit("ci", 512)
    with pytest.raises(QuotaExceededError, match="principal_requests"):
        bounds.admit("ci", 0)
    clock.now_ns += SECOND_NS
    bounds.admit("ci", 1024)
    assert refused == ["principal_bytes", "principal_requests"]


def test_the_tenants_of_a_request_are_charged_all_or_none() -> None:
    bounds, refused = quotas_of(ClockNs(), tenant_requests=10, tenant_bytes=1000)
    bounds.admit_tenants({"acme": 10}, {"acme": 10})
    for _ in range(3):
        with pytest.raises(QuotaExceededError) as error:
            bounds.admit_tenants({"beta": 5, "acme": 1}, {"beta": 50, "acme": 10})
        assert error.value.tenant_id == "acme"
        with pytest.raises(RequestTooLargeError):
            bounds.admit_tenants({"beta": 1}, {"beta": 1001})
    bounds.admit_tenants({"beta": 10}, {"beta": 1000})
    assert set(refused) == {"tenant_requests", "tenant_bytes"}


def test_so_much_may_be_under_way_and_what_ends_makes_room_also_by_failing() -> None:
    refused: list[str] = []
    exports = AtOnce("exports", 2, refused.append)
    with exports.one("ci"), exports.one("ci"), exports.one("other"):
        with pytest.raises(QuotaExceededError), exports.one("ci"):
            pytest.fail("that is one too many")
        with exports.one(None), exports.one(None), exports.one(None):
            pass
    with pytest.raises(ZeroDivisionError), exports.one("ci"):
        raise ZeroDivisionError
    with exports.one("ci"), exports.one("ci"):
        assert refused == ["exports"]


def test_one_principal_leaves_a_quarter_of_the_room_to_others() -> None:
    room = MemoryBudget(100, "bytes")
    room.take(75, "ci")
    with pytest.raises(NotReadyError):
        room.take(1, "ci")
    room.take(25, "other")
    with pytest.raises(NotReadyError):
        room.take(1, "third")
    room.give_back(75, "ci")
    room.take(75, "ci")
    room.give_back(75, "ci")
    room.give_back(25, "other")
    room.take(100)


async def test_turns_go_round_and_between_two_of_them_everybody_else_has_his() -> None:
    turns, order, passes = FairTurns(), [], 0

    async def work(key: str, times: int) -> None:
        for _ in range(times):
            await turns.next(key)
            order.append((key, passes))

    async def count() -> None:
        nonlocal passes
        while True:
            passes += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    flood = [asyncio.create_task(work("flood", 3)) for _ in range(20)]
    await asyncio.sleep(0)
    gone = asyncio.create_task(work("gone", 1))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.create_task(work("one", 2))
    before = [key for key, _ in order]
    await asyncio.gather(*flood)
    counting.cancel()
    assert len(before) <= 8, "it waited for one turn of the flood at each of its own, not for all"
    assert len(order) == 62
    assert all(first < second for (_, first), (_, second) in pairwise(order)), "never two turns in one pass"


async def test_one_request_of_a_caller_is_done_before_the_next_is_begun_unless_it_is_long() -> None:
    turns, order = FairTurns(), []

    async def work(name: str, times: int) -> None:
        for _ in range(times):
            await turns.next("caller")
            order.append(name)

    short = TURNS_IN_A_ROW // 2
    sent = {"first": short, "long": 2 * TURNS_IN_A_ROW, "second": short}
    await asyncio.gather(*(work(name, times) for name, times in sent.items()))
    assert order == ["first"] * short + ["long"] * TURNS_IN_A_ROW + ["second"] * short + ["long"] * TURNS_IN_A_ROW


async def test_who_asks_for_something_else_between_two_turns_keeps_his_place() -> None:
    turns, order = FairTurns(), []

    async def work(name: str, times: int) -> None:
        for _ in range(times):
            await turns.next("caller")
            order.append(name)
            if name == "first":
                await asyncio.sleep(0)

    await asyncio.gather(work("first", 2), work("second", 3), work("third", 1))
    assert order == ["first", "second", "first", "second", "second", "third"]
