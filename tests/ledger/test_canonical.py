"""Canonical JSON: the public vectors, and a fast path that cannot be told from the library."""

from __future__ import annotations

import datetime
import enum
import json
import math
import struct
import uuid
from typing import Any

import orjson
import pytest
import rfc8785
from hypothesis import given, settings
from hypothesis import strategies as st

from ledger.canonical import INTEGER_MAX, NESTING_MAX, encode
from ledger.errors import CanonicalError
from tests.conftest import EXAMPLES

# --- public vectors -------------------------------------------------------------------------------

CYBERPHONE = {
    "arrays": (
        r'[56, {"d": true, "10": null, "1": [ ]}]',
        '[56,{"1":[],"10":null,"d":true}]',
    ),
    "french": (
        '{"peach": "This sorting order", "péché": "is wrong according to French",'
        ' "pêche": "but canonicalization MUST", "sin": "ingnore locale"}',
        '{"peach":"This sorting order","péché":"is wrong according to French",'
        '"pêche":"but canonicalization MUST","sin":"ingnore locale"}',
    ),
    "simpleString": ('    "this is a test string 1235"', '"this is a test string 1235"'),
    "structures": (
        r'{"1": {"f": {"f": "hi","F": 5} ,"\n": 56.0}, "10": { }, "": "empty", "a": { }, "111": [ { } ],'
        r' "A": { }}',
        r'{"":"empty","1":{"\n":56,"f":{"F":5,"f":"hi"}},"10":{},"111":[{}],"A":{},"a":{}}',
    ),
    "unicode": (
        r'{"Unnormalized Unicode":"A\u030a"}',
        '{"Unnormalized Unicode":"A\u030a"}',
    ),
    "values": (
        r'{"numbers": [333333333.33333329, 1E30, 4.50, 2e-3, 0.000000000000000000000000001],'
        r' "string": "\u20ac$\u000F\u000aA'
        r"'"
        r'\u0042\u0022\u005c\\\"\/", "literals": [null, true, false]}',
        '{"literals":[null,true,false],"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],'
        r'"string":"€$\u000f\nA'
        r"'"
        r'B\"\\\\\"/"}',
    ),
    "weird": (
        r'{"\u20ac": "Euro Sign", "\r": "Carriage Return", "\u000a": "Newline", "1": "One",'
        r' "\u0080": "Control\u007f", "\ud83d\ude02": "Smiley",'
        r' "\u00f6": "Latin Small Letter O With Diaeresis",'
        r' "\ufb33": "Hebrew Letter Dalet With Dagesh", "</script>": "Browser Challenge"}',
        r'{"\n":"Newline","\r":"Carriage Return","1":"One","</script>":"Browser Challenge",'
        '"\x80":"Control\x7f","\u00f6":"Latin Small Letter O With Diaeresis","\u20ac":"Euro Sign",'
        '"\U0001f602":"Smiley","\ufb33":"Hebrew Letter Dalet With Dagesh"}',
    ),
}
"""Input and expected text of the reference test data, github.com/cyberphone/json-canonicalization."""

APPENDIX_B = [
    ("0000000000000000", "0"),
    ("8000000000000000", "0"),
    ("0000000000000001", "5e-324"),
    ("8000000000000001", "-5e-324"),
    ("7fefffffffffffff", "1.7976931348623157e+308"),
    ("ffefffffffffffff", "-1.7976931348623157e+308"),
    ("4340000000000000", "9007199254740992"),
    ("c340000000000000", "-9007199254740992"),
    ("4430000000000000", "295147905179352830000"),
    ("44b52d02c7e14af5", "9.999999999999997e+22"),
    ("44b52d02c7e14af6", "1e+23"),
    ("44b52d02c7e14af7", "1.0000000000000001e+23"),
    ("444b1ae4d6e2ef4e", "999999999999999700000"),
    ("444b1ae4d6e2ef4f", "999999999999999900000"),
    ("444b1ae4d6e2ef50", "1e+21"),
    ("3eb0c6f7a0b5ed8c", "9.999999999999997e-7"),
    ("3eb0c6f7a0b5ed8d", "0.000001"),
    ("41b3de4355555553", "333333333.3333332"),
    ("41b3de4355555554", "333333333.33333325"),
    ("41b3de4355555555", "333333333.3333333"),
    ("41b3de4355555556", "333333333.3333334"),
    ("41b3de4355555557", "333333333.33333343"),
    ("becbf647612f3696", "-0.0000033333333333333333"),
    ("43143ff3c1cb0959", "1424953923781206.2"),
]
"""IEEE 754 bits and ECMAScript text, RFC 8785 appendix B."""


@pytest.mark.parametrize(("given_text", "expected"), CYBERPHONE.values(), ids=CYBERPHONE)
def test_the_reference_test_data_comes_out_to_the_byte(given_text: str, expected: str) -> None:
    assert encode(json.loads(given_text)) == expected.encode()


@pytest.mark.parametrize(("bits", "expected"), APPENDIX_B)
def test_numbers_are_printed_as_in_appendix_b(bits: str, expected: str) -> None:
    number = struct.unpack(">d", bytes.fromhex(bits))[0]
    assert encode(number) == expected.encode()
    assert encode({"n": [number]}) == b'{"n":[%b]}' % expected.encode()


@pytest.mark.parametrize("bits", ["7fffffffffffffff", "7ff0000000000000", "fff0000000000000"])
def test_nan_and_infinity_of_appendix_b_are_refused(bits: str) -> None:
    number = struct.unpack(">d", bytes.fromhex(bits))[0]
    for value in (number, [number], {"a": {"b": number}}, {"a": None, "b": number}):
        with pytest.raises(CanonicalError):
            encode(value)


# --- the fast path and the library ----------------------------------------------------------------


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 1


class Word(enum.StrEnum):
    YES = "yes"


UNICODE = st.characters(exclude_characters="\0", exclude_categories=())
TEXTS = st.text(UNICODE, max_size=8) | st.sampled_from(
    ["\\u0000", '"', "null", "1.0", "\ud800", "\uffff", "\U00010000"]
)
NUMBERS = (
    st.integers(-(2**54), 2**54)
    | st.sampled_from([INTEGER_MAX, -INTEGER_MAX, INTEGER_MAX + 1, -INTEGER_MAX - 1, 10**400])
    | st.floats()
    | st.floats(1e-7, 1e-4)
    | st.floats(1e15, 1e22)
    | st.integers(-1000, 1000).map(lambda n: n / 8)
)
STRANGERS = st.sampled_from(
    [
        b"bytes",
        {1},
        Colour.RED,
        Level.LOW,
        Word.YES,
        uuid.UUID(int=1),
        datetime.date(2024, 1, 1),
        orjson.Fragment(b"1"),
    ]
)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(TEXTS, inner, max_size=4)
    ),
    max_leaves=12,
)
VALUES_WITH_STRANGERS = st.recursive(
    st.integers() | TEXTS | STRANGERS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS | st.integers(), inner, max_size=3),
    max_leaves=6,
)


def library(value: Any) -> bytes | None:
    """What the library gives, None when it refuses."""
    try:
        return rfc8785.dumps(value)
    except ValueError:
        return None


def ours(value: object) -> bytes | None:
    try:
        return encode(value)
    except CanonicalError:
        return None


@settings(max_examples=8 * EXAMPLES)
@given(VALUES)
def test_bytes_and_refusals_are_those_of_the_library(value: object) -> None:
    assert ours(value) == library(value)


@settings(max_examples=2 * EXAMPLES)
@given(VALUES_WITH_STRANGERS)
def test_types_that_json_does_not_know_are_refused_as_the_library_does(value: object) -> None:
    assert ours(value) == library(value)


@settings(max_examples=8 * EXAMPLES)
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_float_inside_an_object_is_printed_as_the_library_does(number: float) -> None:
    assert encode({"a": 1, "n": number}) == library({"a": 1, "n": number})


@pytest.mark.parametrize("edge", [1e-7, 1e-6, 1e-5, 1e-4, 1e15, 1e16, 1e17, 1e20, 1e21, 1e22, 2.0**53])
def test_floats_around_the_borders_of_the_fast_path_are_printed_as_the_library_does(edge: float) -> None:
    for number in (math.nextafter(edge, 0), edge, math.nextafter(edge, math.inf), -edge, edge * 1.5):
        assert encode([number]) == library([number])


def test_keys_beyond_the_basic_plane_are_sorted_by_utf_16() -> None:
    assert encode({"\uffff": 1, "\U00010000": 2}) == '{"\U00010000":2,"\uffff":1}'.encode()


@settings(deadline=None)
@given(st.dictionaries(st.text(st.characters(codec="utf-8", exclude_characters="\0")), st.integers(-9, 9)))
def test_the_order_in_which_keys_were_given_does_not_matter(value: dict[str, int]) -> None:
    assert encode(value) == encode(dict(reversed(value.items())))


# --- what is refused, and where it stands ---------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"spec": {"name": "a\0b"}}, ("spec", "name")),
        ({"spec": {"a\0b": 1}}, ("spec",)),
        ({"list": [1, "\ud800"]}, ("list", 1)),
        ({"\udfff": 1}, ()),
        ({"n": INTEGER_MAX + 1}, ("n",)),
        ({"n": [-INTEGER_MAX - 1]}, ("n", 0)),
        ({"n": 10**5000}, ("n",)),
        ({"n": math.nan}, ("n",)),
        ({"n": -math.inf, "m": None}, ("n",)),
        ({"u": uuid.UUID(int=0)}, ("u",)),
        ({"b": b"x"}, ("b",)),
        ({"s": {1, 2}}, ("s",)),
        ({"deep": {1: "x"}}, ("deep",)),
        ({None: "x"}, ()),
    ],
)
def test_a_value_without_a_canonical_form_is_refused_with_its_place(value: object, path: tuple[str | int, ...]) -> None:
    with pytest.raises(CanonicalError) as refused:
        encode(value)
    assert refused.value.path == path


def test_the_largest_integers_are_taken() -> None:
    assert encode([INTEGER_MAX, -INTEGER_MAX]) == b"[9007199254740991,-9007199254740991]"


@pytest.mark.parametrize("text", ["\\u0000", "\\\\u0000", "u0000", "\x01"])
def test_text_that_only_looks_like_u_0000_is_taken(text: str) -> None:
    assert encode({text: text}) == library({text: text})


def nested(depth: int, *, lists: bool) -> object:
    value: object = [] if lists else {}
    for _ in range(depth - 1):
        value = [value] if lists else {"a": value}
    return value


@pytest.mark.parametrize("lists", [True, False])
def test_nesting_is_taken_up_to_its_bound_and_refused_beyond(lists: bool) -> None:
    value = nested(NESTING_MAX, lists=lists)
    assert encode(value) == library(value)
    for depth in (NESTING_MAX + 1, 300, 5000):
        with pytest.raises(CanonicalError, match="nested more than 64"):
            encode(nested(depth, lists=lists))


def test_a_value_that_holds_itself_is_refused() -> None:
    value: list[object] = []
    value.extend([value, value])
    with pytest.raises(CanonicalError):
        encode(value)
