"""Times beside HLCs: each HLC says one, each time means the HLCs of its millisecond."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger import rfc3339
from ledger.errors import InvalidInputError
from ledger.hlc import LOGICAL_MAX, PHYSICAL_MS_MAX, Hlc

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
LAST_MS = 253_402_214_400_000
MILLISECONDS = st.integers(0, LAST_MS)


@given(MILLISECONDS, st.integers(0, LOGICAL_MAX))
def test_the_time_of_an_hlc_is_its_physical_part(physical_ms: int, logical: int) -> None:
    text = rfc3339.time_of(f"{physical_ms}:{logical}:node")
    assert text is not None
    assert datetime.fromisoformat(text) == EPOCH + timedelta(milliseconds=physical_ms)
    assert rfc3339.milliseconds_of(text) == (physical_ms, True)


@given(
    MILLISECONDS, st.integers(-1439, 1439), st.integers(0, LOGICAL_MAX), st.from_regex("[a-z0-9]{1,9}", fullmatch=True)
)
def test_a_time_in_any_zone_includes_its_whole_millisecond(
    physical_ms: int, offset_minutes: int, logical: int, node_id: str
) -> None:
    zone = timezone(timedelta(minutes=offset_minutes))
    try:
        text = (EPOCH + timedelta(milliseconds=physical_ms)).astimezone(zone).isoformat(timespec="milliseconds")
    except OverflowError:
        return
    hlc = Hlc(physical_ms, logical, node_id)
    assert rfc3339.at_or_after(text) <= hlc <= rfc3339.up_to(text)
    assert rfc3339.up_to(text) < Hlc(physical_ms + 1, 0, "")
    assert rfc3339.at_or_after(text) > Hlc(physical_ms - 1, LOGICAL_MAX, "z")


def test_a_part_of_a_millisecond_belongs_to_the_one_that_has_begun() -> None:
    assert rfc3339.up_to("1970-01-01T00:00:01.0019Z").physical_ms == 1001
    assert rfc3339.at_or_after("1970-01-01T00:00:01.001000001Z") == Hlc(1002, 0, "")
    assert rfc3339.at_or_after("1970-01-01t00:00:01.5z") == Hlc(1500, 0, "")
    assert rfc3339.up_to("1969-12-31T23:59:59.999Z").physical_ms == -1


@given(st.builds(Hlc, st.integers(0, PHYSICAL_MS_MAX), st.integers(0, LOGICAL_MAX), st.sampled_from(["t", "a-t", "z"])))
def test_an_hlc_is_taken_as_it_is(hlc: Hlc) -> None:
    assert rfc3339.up_to(hlc.text()) == rfc3339.at_or_after(hlc.text()) == hlc


def test_what_has_no_time_has_none() -> None:
    assert rfc3339.time_of(None) is None
    assert rfc3339.time_of("edited") is None
    assert rfc3339.time_of(f"{PHYSICAL_MS_MAX}:0:a") is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("2026-11-22T10:00:00 02:00", "%2B"),
        ("2026-11-22T10:00:00.5 02:00", "%2B"),
        ("2026-02-30T00:00:00Z", "no time"),
        ("2026-11-22T25:00:00Z", "no time"),
        ("2026-11-22T10:00:00", "neither"),
        ("2026-11-22", "neither"),
        ("2026-11-22T10:00:00+2:00", "neither"),
        ("", "neither"),
        ("1:0", "neither"),
        ("99999999999999999999:0:a", "neither"),
        ("9999999999999999999:0:a", "out of range"),
    ],
)
def test_what_is_neither_is_refused_with_what_to_write(text: str, why: str) -> None:
    with pytest.raises(InvalidInputError, match=why):
        rfc3339.up_to(text)
    with pytest.raises(InvalidInputError, match=why):
        rfc3339.at_or_after(text)
