"""Checking lines fast must not let anything through that the slow check would refuse."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from app.edge.forms.requests import EVENT_FORMS
from app.edge.routes.events import _EVENTS, LINES_MAX, lines_of
from app.runtime.sharing import BYTES_PER_TURN, LINES_PER_TURN, turns
from app.write.pending.requests import EventLines, RequestKey, draft_of
from ledger import canonical, native
from ledger.errors import CanonicalError, InvalidEventError, ProblemError
from ledger.facts.events import JOB_EVENTS
from ledger.facts.problems import PAYLOAD_TOO_LARGE
from tests.conftest import EXAMPLES
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
        draft = asyncio.run(lines_of(line, BYTES_MAX, None))[0]
    except InvalidEventError:
        assert not has_form
        return
    assert has_form
    assert draft.fields["spec"] == {"x": _loads(text)}


async def test_lines_may_end_in_any_way_and_blank_lines_may_follow() -> None:
    for body in (LINE, LINE + b"\n", LINE + b"\r\n", LINE + b"\n\n\r\n \n"):
        assert len(await lines_of(body, BYTES_MAX, None)) == 1


async def test_more_lines_than_the_bound_are_refused_before_any_is_checked() -> None:
    with pytest.raises(ProblemError) as refused:
        await lines_of(b"x\n" * (LINES_MAX + 1), BYTES_MAX, None)
    assert refused.value.problem is PAYLOAD_TOO_LARGE


async def test_others_get_their_turn_while_lines_are_checked() -> None:
    with counted_turns() as turns:
        await lines_of((LINE + b"\n") * (LINES_PER_TURN * 4), BYTES_MAX, None)
    assert turns.count >= 3


async def test_long_lines_are_checked_one_by_one_and_short_ones_many_at_a_time() -> None:
    long = b'{"tenant_id":"acme","type":"JobCreated","spec":{"text":"%b"}}' % (b"x" * BYTES_PER_TURN)
    with counted_turns() as counted:
        await lines_of(b"\n".join([long] * 10), len(long), None)
    assert counted.count >= 9
    few, many = BYTES_PER_TURN // 4, 1
    assert list(turns([few] * 6)) == [range(4), range(4, 6)]
    whole = LINES_PER_TURN
    assert list(turns([many] * (whole + 1))) == [range(whole), range(whole, whole + 1)]
    assert list(turns([BYTES_PER_TURN + 1, 0, 0])) == [range(1), range(1, 3)]
    assert list(turns([])) == []


# --- read at once, and one by one -----------------------------------------------------------------

PLAIN = {
    "tenant_id": '"acme"',
    "job_id": '"job-1"',
    "fence_token": "7",
    "dc_id": '"use1"',
    "workflow_id": '"wf"',
    "reason": '"enough"',
    "requestor": '""',
    "final_status": '"ok"',
    "error": '"none"',
    "failed_dc": '"x"',
    "timeout_type": '"idle"',
    "spec": '{"b":[1,-20,{"z":null,"y":true}],"a":{"":"x"}}',
    "assigned_dcs": '["use1","euw1"]',
    "aggregate_metrics": '{"tasks":3,"cpu_s":0}',
}
COUNTS = ("worker_count", "completed", "failed", "workflows_cancelled")
SPACES = st.sampled_from(["", "", " ", "\t ", "\r\n"])


def plain_members(name: str) -> dict[str, str]:
    """All members that a line of this type may have, but those that are left to Python always."""
    fields = next(fields for form, _, _, fields in EVENT_FORMS if form == name)
    known = PLAIN | dict.fromkeys(COUNTS, "12")
    return {"tenant_id": known["tenant_id"], "job_id": known["job_id"], "type": json.dumps(name)} | {
        field: known[field] for field, *_ in fields
    }


@st.composite
def lines_of_events(draw: st.DrawFn) -> bytes:
    members = list(plain_members(draw(st.sampled_from(sorted(JOB_EVENTS)))).items())
    members = draw(st.permutations(members))[: draw(st.integers(2, len(members)))]
    odd_names = st.sampled_from([*PLAIN, *COUNTS, "type", "subject", "trace_time", "last_progress_hlc", "extra"])
    odd_values = values | st.sampled_from(
        ['"JobCreated"', '"."', '"a:b"', '"A"', '"-"', '"' + "n" * 257 + '"', '"' + "j" * 128 + '"', "-0", "01", "-1",
         "9007199254740991", "9007199254740992", "999999999999999", '[""]', "[1]", "{}", "[]", '"\u007f"', '"é"',
         "12.0", "1e2", '"1:0:n"', "0.5"]
    )  # fmt: skip
    for _ in range(draw(st.integers(0, 2))):
        name = draw(odd_names)
        at = draw(st.integers(0, len(members)))
        members[at : at + draw(st.integers(0, 1))] = [(name, draw(odd_values))]
    written = [f'"{name}"{draw(SPACES)}:{draw(SPACES)}{value}{draw(SPACES)}' for name, value in members]
    line = "{" + draw(SPACES) + ("," + draw(SPACES)).join(written) + "}" + draw(SPACES)
    return line[: draw(st.sampled_from([len(line)] * 9 + [len(line) // 2]))].replace("\n", " ").encode()


def read_slowly(line: bytes, actor: str | None = None) -> EventLines | None:
    """The line as ``EVENT_LINE`` has it, None when it is refused."""
    try:
        (given,) = _EVENTS.check([line], [1], BYTES_MAX)
    except InvalidEventError:
        return None
    return EventLines.of([draft_of(given, None, None, actor)])


def columns_of(lines: EventLines) -> list[object]:
    key = RequestKey(4, "k", bytes(32))
    fence = lines.fences[0]
    chosen = (1, 9, 123) if fence is None else (fence,)
    payloads = [lines.payload(0, each, with_key) for each in chosen for with_key in (None, key)]
    return [lines.jobs, lines.types, lines.fences, lines.creations, lines.tenants, lines.level, payloads, lines[0]]


@settings(max_examples=4 * EXAMPLES)
@given(lines_of_events())
@example(b'{"tenant_id":"acme","type":"JobCreated"}')
@example(b'{"tenant_id":"acme","tenant_id":"acme","type":"JobCreated"}')
@example(b'{"tenant_id":"acme","type":"JobCreated","spec":{"a":1,"b":{},"a":2}}')
@example(b'{"tenant_id":"acme","type":"JobCreated","idempotency":"x"}')
def test_a_line_that_is_read_at_once_is_what_it_is_one_by_one(line: bytes) -> None:
    read = native.event_lines([line], EVENT_FORMS, BYTES_MAX)
    if read is None or read[0][0] is None:
        return
    for actor in (None, "ci", 'oidc:\u00fcber "uns"'):
        slowly = read_slowly(line, actor)
        assert slowly is not None
        at_once = EventLines([line], actor)
        at_once.extend(1, read, {})
        assert columns_of(at_once) == columns_of(slowly)
        assert at_once[0] == slowly[0]


@pytest.mark.parametrize("name", JOB_EVENTS)
def test_plain_lines_are_read_at_once(name: str) -> None:
    members = plain_members(name)
    line = ("{" + ", ".join(f'"{field}": {value}' for field, value in members.items()) + "}\r").encode()
    read = native.event_lines([line, line, b"x" * (len(line) + 1)], EVENT_FORMS, len(line))
    too_long = native.event_lines([line], EVENT_FORMS, len(line) - 1)
    if native.NAME == "c":
        assert [job is None for job in read[0]] == [False, False, True]
        assert too_long[0] == [None]
    else:
        assert (read, too_long) == (None, None)


@pytest.mark.parametrize(
    ("name", "field", "good", "bad"),
    [
        (
            "JobCreated",
            "tenant_id",
            ["a", "0_-9", "a" * 63],
            ["", "-a", "a-", "_a", "a_", "a" * 64, "A", "a.b", "_system"],
        ),
        ("JobAccepted", "job_id", ["...", "A", "._:-", "j" * 128], ["", ".", "..", "j" * 129, "a/b", "a b"]),
        ("JobAccepted", "dc_id", ["d", "d" * 256], ["", "d" * 257]),
        ("JobAccepted", "worker_count", [0, 10**15 - 1], [-1, 2**53, True, "1"]),
        ("JobCreated", "assigned_dcs", [[], ["d"] * 1024], [["d"] * 1025, ["d", ""], ["d" * 257], ["d", 1], {}]),
        ("JobFailed", "error", ["", "e" * 65_536], ["e" * 65_537, None]),
        ("JobCreated", "spec", [{}, {"a": {"a": 1}}], [[], None, "{}"]),
    ],
)
def test_the_bounds_of_lines_are_those_of_the_models(
    name: str, field: str, good: list[object], bad: list[object]
) -> None:
    for value in (*good, *bad):
        members = {**{member: json.loads(text) for member, text in plain_members(name).items()}, field: value}
        line = json.dumps(members).encode()
        is_good = any(value is each for each in good)
        assert (read_slowly(line) is not None) == is_good
        read = native.event_lines([line], EVENT_FORMS, BYTES_MAX)
        assert (read is not None and read[0][0] is not None) == (is_good and native.NAME == "c")


async def test_a_request_may_mix_lines_of_all_kinds_and_the_first_wrong_one_is_named() -> None:
    odd = b'{"tenant_id":"b","type":"JobCreated","spec":{"name":"\xc3\xa9","share":0.5}}'
    lines = await lines_of(b"\n".join([LINE, odd, LINE]), BYTES_MAX, None)
    assert [job for job, _ in lines.jobs] == ["a", "b", "a"]
    assert [number in lines.drafts for number in range(3)] == [native.NAME == "python", True, native.NAME == "python"]
    assert [lines[number].fields for number in range(3)] == [{}, {"spec": {"name": "é", "share": 0.5}}, {}]
    with pytest.raises(InvalidEventError, match="line 3: "):
        await lines_of(b"\n".join([LINE, odd, b"{}", LINE, b"{"]), BYTES_MAX, None)
