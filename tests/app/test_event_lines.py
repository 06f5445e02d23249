"""Checking lines fast must not let anything through that the slow check would refuse."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from app.background.turns import BYTES_PER_TURN, LINES_PER_TURN, turns
from app.http.events import LINES_MAX, drafts_of
from app.http.problems import PAYLOAD_TOO_LARGE, ProblemError
from ledger import canonical
from ledger.errors import CanonicalError, InvalidEventError
from tests.turns import counted_turns

BYTES_MAX = 1 << 20
LINE = b'{"tenant_id":"a","type":"JobCreated"}'

numbers = st.one_of(
    st.integers(-(2**70), 2**70).map(str),
    st.from_regex(r"-?(0|[1-9][0-9]{0,20})(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,4})?", fullmatch=True),
    st.sampled_from(["NaN", "Infinity", "-Infinity", "1e308", "1e309", "-1E+309", "1e-400", "9007199254740991"]),
)
strings = st.one_of(
    st.text(max_size=8).filter(lambda text: not any(0xD800 <= ord(c) <= 0xDFFF for c in text)).map(json.dumps),
    st.sampled_from([r'"\u0000"', r'"\\u0000"', r'"\u0001"', '"NaN"', '"1e999"', '"' + "1" * 20 + '"']),
)


def _object(pairs: list[tuple[str, str]]) -> str:
    return "{" + ",".join(f"{key}:{value}" for key, value in pairs) + "}"


values = st.recursive(
    st.one_of(numbers, strings, st.sampled_from(["true", "null"])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: "[" + ",".join(items) + "]"),
        st.lists(st.tuples(strings, inner), max_size=3, unique_by=lambda pair: _loads(pair[0])).map(_object),
    ),
    max_leaves=12,
)


def _loads(text: str) -> object:
    return json.loads(text)


@given(values)
@example("[" * 61 + "]" * 61)
@example("[" * 62 + "]" * 62)
@example("[" * 63 + "]" * 63)
@example("[" * 64 + "]" * 64)
@example("1" * 308)
@example("1" * 309)
@example("1E+0400")
def test_a_line_is_refused_exactly_when_its_payload_has_no_canonical_form(text: str) -> None:
    line = f'{{"tenant_id":"a","type":"JobCreated","spec":{{"x":{text}}}}}'.encode()
    try:
        canonical.encode({"type": "JobCreated", "spec": {"x": _loads(text)}})
        has_form = True
    except CanonicalError:
        has_form = False
    try:
        (draft,) = asyncio.run(drafts_of(line, BYTES_MAX))
    except InvalidEventError:
        assert not has_form
        return
    assert has_form
    assert draft.fields["spec"] == {"x": _loads(text)}


async def test_lines_may_end_in_any_way_and_blank_lines_may_follow() -> None:
    for body in (LINE, LINE + b"\n", LINE + b"\r\n", LINE + b"\n\n\r\n \n"):
        assert len(await drafts_of(body, BYTES_MAX)) == 1


async def test_more_lines_than_the_bound_are_refused_before_any_is_checked() -> None:
    with pytest.raises(ProblemError) as refused:
        await drafts_of(b"x\n" * (LINES_MAX + 1), BYTES_MAX)
    assert refused.value.kind is PAYLOAD_TOO_LARGE


async def test_others_get_their_turn_while_lines_are_checked() -> None:
    with counted_turns() as turns:
        await drafts_of((LINE + b"\n") * (LINES_PER_TURN * 4), BYTES_MAX)
    assert turns.count >= 3


async def test_long_lines_are_checked_one_by_one_and_short_ones_many_at_a_time() -> None:
    long = b'{"tenant_id":"acme","type":"JobCreated","spec":{"text":"%b"}}' % (b"x" * BYTES_PER_TURN)
    with counted_turns() as counted:
        await drafts_of(b"\n".join([long] * 10), len(long))
    assert counted.count >= 9
    few, many = BYTES_PER_TURN // 4, 1
    assert list(turns([few] * 6)) == [range(4), range(4, 6)]
    whole = LINES_PER_TURN
    assert list(turns([many] * (whole + 1))) == [range(whole), range(whole, whole + 1)]
    assert list(turns([BYTES_PER_TURN + 1, 0, 0])) == [range(1), range(1, 3)]
    assert list(turns([])) == []
