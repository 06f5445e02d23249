"""A member that comes twice in one object is refused, wherever it stands and however it is spelled."""

from __future__ import annotations

import random

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import from_json

from app.edge.forms.requests import JOB_REQUEST
from app.edge.forms.validation import check_unique, parse
from app.edge.routes.events import lines_of
from ledger.errors import InvalidEventError, InvalidInputError

NAMES = st.text(st.sampled_from('a:"\\ é\n\U0001f4a9'), max_size=2)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(codec="utf-8")),
)


def _containers(inner: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    members = st.lists(st.tuples(NAMES, inner), max_size=4)
    return st.one_of(st.lists(inner, max_size=3), st.tuples(st.just("object"), members))


DOCUMENTS = st.recursive(st.one_of(SCALARS, NAMES), _containers, max_leaves=12)


def first_repeated(value: object, path: tuple[str | int, ...] = ()) -> tuple[str | int, ...] | None:
    """Straight from the meaning: the first member, in the order of the text, whose name its object had before."""
    if isinstance(value, list):
        members: list[tuple[str | int, object]] = list(enumerate(value))
    elif isinstance(value, tuple):
        members = value[1]
    else:
        return None
    for at, (name, member) in enumerate(members):
        if isinstance(value, tuple) and name in [earlier for earlier, _ in members[:at]]:
            return (*path, name)
        below = first_repeated(member, (*path, name))
        if below is not None:
            return below
    return None


def written(value: object, style: random.Random) -> str:
    """JSON text of ``value``: spaces anywhere, characters as themselves or as any of their escapes."""
    space = style.choice(["", "", " ", "\n\t"])
    if isinstance(value, list):
        return f"[{space}" + f",{space}".join(written(item, style) for item in value) + f"{space}]"
    if isinstance(value, tuple):
        members = [f"{written(name, style)}{space}:{space}{written(member, style)}" for name, member in value[1]]
        return f"{{{space}" + f",{space}".join(members) + f"{space}}}"
    if isinstance(value, str):
        return '"' + "".join(_character(character, style) for character in value) + '"'
    return orjson.dumps(value).decode() if isinstance(value, bool | None) else repr(value)


def _character(character: str, style: random.Random) -> str:
    if character in '"\\' and style.random() < 0.5:
        return "\\" + character
    if character < " " or character in '"\\' or style.random() < 0.1:
        units = character.encode("utf-16-be").hex()
        form = style.choice([str.lower, str.upper])
        return "".join("\\u" + form(units[at : at + 4]) for at in range(0, len(units), 4))
    return character


@given(DOCUMENTS, st.randoms(use_true_random=False))
def test_a_text_is_refused_exactly_when_an_object_in_it_repeats_a_name(document: object, style: random.Random) -> None:
    text = written(document, style).encode()
    expected = first_repeated(document)
    if expected is None:
        check_unique(text, from_json(text))
        return
    with pytest.raises(InvalidInputError) as refused:
        check_unique(text, from_json(text))
    assert refused.value.path == expected


@pytest.mark.parametrize(
    ("body", "path"),
    [
        (b'{"tenant_id":"a","tenant_id":"a"}', ("tenant_id",)),
        (b'{"tenant_id":"a","spec":{"image":1,"image":2}}', ("spec", "image")),
        (b'{"tenant_id":"a","spec":{"x":[0,{"image":1,"\\u0069mage":2}]}}', ("spec", "x", 1, "image")),
        (b'{"tenant_id":"a","spec":{"a":"\\u003a","a":"\\u003A"}}', ("spec", "a")),
        (b'{"tenant_id":"a","spec":{"":1 ,"" :2}}', ("spec", "")),
        (b'{"tenant_id":"a","spec":{"n":99999999999999999999999999,"n":1}}', ("spec", "n")),
        (b'{"tenant_id":"a","spec":{"n":99999999999999999999999999,"m":1,"m":1}}', ("spec", "m")),
    ],
)
async def test_neither_a_body_nor_a_line_may_name_a_member_twice(body: bytes, path: tuple[str | int, ...]) -> None:
    with pytest.raises(InvalidInputError, match="two members") as refused:
        parse(JOB_REQUEST, body)
    assert refused.value.path == path
    fine = b'{"type":"JobCreated","tenant_id":"a"}\n'
    with pytest.raises(InvalidEventError, match=r"line 2.*two members") as refused_line:
        await lines_of(fine + b'{"type":"JobCreated",' + body[1:] + b"\n" + fine, 1 << 20, None)
    assert (refused_line.value.line, refused_line.value.path) == (2, path)


def test_colons_in_strings_and_in_escapes_are_no_members() -> None:
    body = b'{"tenant_id":"a","spec":{"image":"r:1","b":":","c":"\\":","\\u003a":"\\u003a\\u003A","d":[":",{":":1}]}}'
    assert parse(JOB_REQUEST, body)["spec"]["image"] == "r:1"
