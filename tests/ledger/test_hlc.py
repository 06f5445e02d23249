"""The hybrid logical clock: monotonic whatever the wall clock does, strict about its forms."""

from __future__ import annotations

import contextlib
import hashlib

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ledger.errors import ClockSkewError, InvalidInputError
from ledger.hlc import LOGICAL_MAX, PHYSICAL_MS_MAX, Clock, Hlc, node_hash, unpack16

SKEW_MS = 5000
NODE_IDS = st.from_regex(r"\A[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\Z")
HLCS = st.builds(Hlc, st.integers(0, PHYSICAL_MS_MAX), st.integers(0, LOGICAL_MAX), NODE_IDS)
WALL_MS = st.integers(0, 2**43)


def clock_at(physical_ms: int, logical: int = 0) -> Clock:
    return Clock("here", SKEW_MS, Hlc(physical_ms, logical, "here"))


# --- ticking --------------------------------------------------------------------------------------


def test_the_clock_follows_a_wall_clock_that_goes_forward() -> None:
    clock = clock_at(1000, 7)
    assert clock.tick(1001) == Hlc(1001, 0, "here")


def test_the_logical_part_counts_while_the_wall_clock_stands() -> None:
    clock = clock_at(1000)
    assert [clock.tick(1000).logical for _ in range(3)] == [1, 2, 3]


def test_a_wall_clock_that_goes_back_does_not_take_the_clock_with_it() -> None:
    clock = clock_at(1000, 4)
    assert clock.tick(10) == Hlc(1000, 5, "here")


def test_a_full_logical_part_carries_into_the_physical_part() -> None:
    clock = clock_at(1000, LOGICAL_MAX)
    assert clock.tick(1000) == Hlc(1001, 0, "here")


@settings(deadline=None)
@given(st.lists(WALL_MS, min_size=2), st.none() | HLCS.filter(lambda hlc: hlc.physical_ms < PHYSICAL_MS_MAX))
def test_every_tick_is_greater_than_all_before_it_on_any_wall_clock(walls: list[int], last: Hlc | None) -> None:
    clock = Clock("here", SKEW_MS, last)
    floor = clock.last
    for ticks, wall_ms in enumerate(walls, start=1):
        hlc = clock.tick(wall_ms)
        assert hlc > floor
        assert hlc.physical_ms >= wall_ms
        assert hlc == clock.last
        assert clock.ticks == ticks
        floor = hlc


# --- receiving and observing ----------------------------------------------------------------------


@given(
    st.lists(st.tuples(WALL_MS, st.integers(0, 4)), max_size=4),
    HLCS.filter(lambda hlc: hlc.physical_ms < PHYSICAL_MS_MAX),
)
@example([(5, 3)], Hlc(9, LOGICAL_MAX - 2, "here"))
@example([(5, 3)], Hlc(9, LOGICAL_MAX - 3, "here"))
def test_many_are_drawn_as_one_after_the_other(draws: list[tuple[int, int]], last: Hlc) -> None:
    at_once, singly = Clock("here", 0, last), Clock("here", 0, last)
    for wall_ms, count in draws:
        assert at_once.draw(wall_ms, count) == [singly.tick(wall_ms) for _ in range(count)]
    assert (at_once.last, at_once.ticks) == (singly.last, singly.ticks)


@settings(deadline=None)
@given(st.lists(st.tuples(WALL_MS, HLCS | st.builds(Hlc, WALL_MS, st.integers(0, LOGICAL_MAX), NODE_IDS))))
def test_ticks_are_greater_than_all_received_and_refusals_change_nothing(
    events: list[tuple[int, Hlc]],
) -> None:
    clock = Clock("here", SKEW_MS)
    refused = 0
    for wall_ms, remote in events:
        before = clock.last
        try:
            clock.receive(remote, wall_ms)
        except ClockSkewError:
            refused += 1
            assert clock.last == before
            assert remote.physical_ms - wall_ms > SKEW_MS
        else:
            assert clock.tick(wall_ms)[:2] > max(remote[:2], before[:2])
    assert clock.skew_rejections == refused


def test_a_remote_time_exactly_at_the_skew_is_taken_and_one_millisecond_more_is_refused() -> None:
    clock = clock_at(1000)
    clock.receive(Hlc(1000 + SKEW_MS, 9, "there"), 1000)
    assert clock.tick(1000) == Hlc(1000 + SKEW_MS, 10, "here")
    before = clock.last
    with pytest.raises(ClockSkewError, match="5001 ms ahead"):
        clock.receive(Hlc(2000 + SKEW_MS + 1, 0, "there"), 2000)
    assert (clock.last, clock.skew_rejections) == (before, 1)


def test_the_own_time_that_comes_back_is_welcome_while_the_wall_clock_stands_too_low() -> None:
    clock = clock_at(100_000)
    issued = clock.tick(100_000)
    clock.receive(issued, 100_000 - 10 * SKEW_MS)
    assert (clock.last, clock.skew_rejections) == (issued, 0)


def test_receiving_takes_no_timestamp() -> None:
    clock = clock_at(1000)
    clock.receive(Hlc(1000, 3, "there"), 1000)
    assert (clock.ticks, clock.last) == (0, Hlc(1000, 3, "here"))


@settings(deadline=None)
@given(HLCS.filter(lambda hlc: hlc.physical_ms < PHYSICAL_MS_MAX), HLCS, WALL_MS)
def test_a_clock_restarted_from_what_it_issued_never_repeats_it(last: Hlc, older: Hlc, wall_ms: int) -> None:
    clock = Clock("here", SKEW_MS, last)
    if older < last:
        clock.observe(older)
    assert clock.last[:2] == last[:2]
    assert clock.tick(wall_ms)[:2] > last[:2]


def test_observing_takes_any_time_however_far_ahead() -> None:
    clock = clock_at(1000)
    clock.observe(Hlc(10**12, 5, "here"))
    assert clock.tick(1000) == Hlc(10**12, 6, "here")


def test_the_offset_says_how_far_the_clock_runs_ahead_of_the_wall() -> None:
    clock = clock_at(1500)
    assert (clock.offset_ms(1000), clock.offset_ms(1500), clock.offset_ms(9000)) == (500, 0, 0)


# --- forms ----------------------------------------------------------------------------------------


@given(HLCS)
def test_text_round_trips(hlc: Hlc) -> None:
    assert Hlc.parse(hlc.text()) == hlc
    assert str(hlc) == f"{hlc}" == hlc.text()


def test_the_text_is_that_of_the_design() -> None:
    assert Hlc(1704585600000, 0, "scheduler-prod-01").text() == "1704585600000:0:scheduler-prod-01"


@given(HLCS)
def test_the_packed_form_round_trips_but_for_the_name(hlc: Hlc) -> None:
    assert unpack16(hlc.pack()) == (hlc.physical_ms, hlc.logical, node_hash(hlc.node_id))


def test_the_packed_form_is_laid_out_as_documented() -> None:
    assert Hlc(1704585600000, 3, "scheduler-prod-01").pack() == (
        bytes.fromhex("0000018ce1381c00")
        + bytes.fromhex("00000003")
        + hashlib.sha256(b"scheduler-prod-01").digest()[:4]
    )


@given(HLCS, HLCS)
def test_packed_forms_of_one_node_sort_as_its_timestamps(one: Hlc, other: Hlc) -> None:
    other = other._replace(node_id=one.node_id)
    assert (one < other) == (one.pack() < other.pack())


@given(HLCS, HLCS)
def test_order_is_numeric_numeric_bytewise(one: Hlc, other: Hlc) -> None:
    by_parts = (one.physical_ms, one.logical, one.node_id.encode())
    assert (one < other) == (by_parts < (other.physical_ms, other.logical, other.node_id.encode()))


def test_the_order_of_texts_is_not_the_order_of_timestamps() -> None:
    earlier, later = Hlc(9, 0, "n"), Hlc(10, 0, "n")
    assert earlier < later
    assert earlier.text() > later.text()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1:2",
        "1:2:",
        ":2:n",
        "1::n",
        "1:2:n:",
        "1:2:n:m",
        "01:2:n",
        "1:02:n",
        "+1:2:n",
        "-1:2:n",
        "1:-2:n",
        " 1:2:n",
        "1:2:n ",
        "1:2:n\n",
        "1_0:2:n",
        "1.0:2:n",
        "1e3:2:n",
        "\u0661:2:n",
        "1:2:N",
        "1:2:-n",
        "1:2:n-",
        "1:2:n_m",
        "1:2:é",
        "1:2:n\x00",
        "1:2:" + "n" * 64,
        f"{PHYSICAL_MS_MAX + 1}:0:n",
        f"0:{LOGICAL_MAX + 1}:n",
        "9" * 5000 + ":0:n",
    ],
)
def test_a_malformed_text_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError):
        Hlc.parse(text)


@given(st.text())
def test_no_text_raises_anything_but_invalid_input(text: str) -> None:
    with contextlib.suppress(InvalidInputError):
        assert Hlc.parse(text).text() == text


@given(st.binary(max_size=20))
def test_no_bytes_raise_anything_but_invalid_input(data: bytes) -> None:
    try:
        physical_ms, logical, hashed = unpack16(data)
    except InvalidInputError:
        assert len(data) != 16 or data[0] >= 0x80
    else:
        assert physical_ms.to_bytes(8, "big") + logical.to_bytes(4, "big") + hashed == data
