"""The batch functions in C answer what their twins in Python answer, byte for byte, or leave the answer to them."""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ledger import canonical, merkle, native
from ledger.chain import Linker, record
from ledger.errors import LedgerError
from ledger.verification import ENTRY_COLUMNS, entry_check
from ledger.verification.verdict import Break
from signing.keys import ECDSA_P256, ML_DSA_44, PublicKey, made_all
from tests.ledger.callers import ED25519, EVERYBODY, Signing
from tests.ledger.damage import DAMAGE, damage
from tests.ledger.ledger_in_memory import Ledger, build

WHOLE = build(40)
TEXTS = st.text(max_size=40) | st.sampled_from(["", "ä" * 300, "\ud800", "x" * 5000, "\U0001f600"])
DIGESTS = st.binary(max_size=40) | st.binary(min_size=32, max_size=32)
STRANGE = st.sampled_from([None, True, 1.5, b"b", "s", 2**70, -1, [], ()])


def test_the_functions_are_built_where_there_is_a_compiler() -> None:
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    has_compiler = shutil.which("cc") is not None and header.is_file()
    assert ("c" if has_compiler else "python") == native.NAME


def test_without_them_python_does_all() -> None:
    code = (
        "import sys; sys.modules['ledger._native'] = None\n"
        "from ledger import merkle, native\n"
        "assert native.NAME == 'python'\n"
        "print(merkle.root(merkle.leaf_hashes([bytes(32)] * 5)).hex())"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == merkle.root([merkle.leaf_hash(bytes(32))] * 5).hex()


def outcome(call: Any, *given: Any) -> Any:
    """What a call returns, or the type of what it raises."""
    try:
        return call(*given)
    except (LedgerError, UnicodeEncodeError, AttributeError, TypeError, ValueError, OverflowError) as error:
        return type(error)


# --- signatures -----------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from(EVERYBODY), st.integers(0, 3), st.integers(0, 3)), max_size=12))
def test_the_signatures_that_a_key_made_are_found_together_and_no_others(
    checks: list[tuple[Signing, int, int]],
) -> None:
    def given_of(signing: Signing, signed: int, said: int) -> tuple[PublicKey, bytes, bytes]:
        signature = base64.b64decode(signing.sign(b"%d" % signed)) if signed else b"\0" * 64
        return signing.caller.key, signature, b"%d" % said

    given = [given_of(*each) for each in checks]
    assert made_all(given) == [key.made(*rest) for key, *rest in given] == [a == b != 0 for _, a, b in checks]
    for key, signature, message in given:
        found = native.signatures_made(key.der, key.algorithm == ECDSA_P256, ((signature, message),))
        is_left = native.NAME == "python" or key.algorithm == ML_DSA_44
        assert found in ((None, b"\0") if is_left else (bytes([key.made(signature, message)]),))


@pytest.mark.parametrize("checks", [((b"s",),), (("s", b"m"),), ((b"s", None),), (b"sm",), (None,)])
@pytest.mark.parametrize("der", [b"", b"\x30\x80", ED25519.caller.key.der])
def test_what_is_no_signature_of_a_key_is_left_to_python(der: bytes, checks: Any) -> None:
    assert native.signatures_made(der, False, checks) is None
    assert native.signatures_made(der, False, ((b"s", b"m"), (b"", b""))) in (None, bytes(2))


# --- entries by themselves ------------------------------------------------------------------------


def by_themselves(ledger: Ledger) -> tuple[Any, Any]:
    """What C and Python answer of the rows, the last first."""
    rows = [tuple(row[name] for name in ENTRY_COLUMNS) for row in reversed(ledger.entries)]
    found = native.leaves_of_entries(Linker("acme").prefix, rows)
    return found, entry_check._leaves_one_by_one("acme", rows)


def test_entries_by_themselves_have_the_leaves_of_their_links() -> None:
    found, expected = by_themselves(WHOLE)
    assert expected == merkle.leaf_hashes([bytes.fromhex(row["chain_link"]) for row in reversed(WHOLE.entries)])
    assert found == (expected if native.NAME == "c" else None)


@given(st.integers(0, len(ENTRY_COLUMNS) - 2), st.integers(0, 39), st.integers(0, 2000))
@example(ENTRY_COLUMNS.index("prev_chain_link") - 1, 0, 0)
def test_an_edited_entry_by_itself_is_left_to_python_which_names_it(column: int, at: int, how: int) -> None:
    ledger = WHOLE.copy()
    row, name = ledger.entries[at], ENTRY_COLUMNS[1:][column]
    value = row[name]
    row[name] = value + 1 + how if isinstance(value, int) else f"{(value or '')[:-1]}{how}"
    found, expected = by_themselves(ledger)
    if row[name] == value:
        return
    assert found is None
    assert isinstance(expected, Break)
    assert expected.seq == row["seq"]
    assert not entry_check.holds_together("acme", tuple(row[name] for name in ENTRY_COLUMNS))


@given(st.integers(0, len(DAMAGE) - 1), st.integers(0, 39), st.integers(0, 2000))
def test_damaged_entries_by_themselves_are_judged_as_by_python(which: int, at: int, how: int) -> None:
    ledger = WHOLE.copy()
    damage(ledger, which, at, how)
    if any(type(row["seq"]) is not int for row in ledger.entries):
        return
    found, expected = by_themselves(ledger)
    if found is not None or isinstance(expected, list):
        assert found in (expected, None)


@given(st.integers(1, len(ENTRY_COLUMNS) - 1), st.integers(0, 39), STRANGE)
def test_so_is_whatever_no_column_of_them_holds(column: int, at: int, value: Any) -> None:
    ledger = WHOLE.copy()
    ledger.entries[at][ENTRY_COLUMNS[column]] = value
    found, expected = by_themselves(ledger)
    assert found is None or found == expected
    assert native.leaves_of_entries(b"", [["a row that is a list"]]) is None  # type: ignore[list-item]


# --- canonical JSON -------------------------------------------------------------------------------

PLAIN_TEXTS = st.text(alphabet=st.characters(min_codepoint=0x20, max_codepoint=0x7F, exclude_characters='"\\'))
PLAIN_LEAVES = st.none() | st.booleans() | st.integers(1 - 2**53, 2**53 - 1) | PLAIN_TEXTS
LEAVES = PLAIN_LEAVES | st.integers() | st.floats() | TEXTS | st.binary(max_size=2) | st.just(())


def json_of(leaves: st.SearchStrategy[Any], names: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def inside(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.lists(values, max_size=4) | st.dictionaries(names, values, max_size=4)

    return st.recursive(leaves, inside, max_leaves=20)


def nested(depth: int) -> Any:
    return {"a": nested(depth - 1)} if depth > 1 else []


@given(json_of(LEAVES, TEXTS | st.integers()))
@example({"b": 1, "a": 2, "aa": 3, "": 4})
@example({"\x7f": "\x7f", "~": 2**53 - 1, "A": -(2**53) + 1})
@example([2**53])
@example(nested(64))
@example(nested(65))
def test_bytes_of_json_are_those_of_python(value: Any) -> None:
    found = native.canonical(value)
    assert found is None or found == outcome(canonical._encode, value)


def test_every_character_that_is_escaped_is_left_to_python() -> None:
    for character in map(chr, range(0x100)):
        is_plain = " " <= character <= "\x7f" and character not in '"\\'
        expected = canonical._encode({character: [character]}) if is_plain and native.NAME == "c" else None
        assert native.canonical({character: [character]}) == expected


@given(json_of(PLAIN_LEAVES, PLAIN_TEXTS))
@example(nested(64))
def test_json_of_integers_and_plain_texts_is_written_at_once(value: Any) -> None:
    assert native.canonical(value) == (canonical._encode(value) if native.NAME == "c" else None)


def is_canonical_object(text: str) -> bool:
    """Whether a text is an object in canonical JSON, by reading and writing it."""
    try:
        value = orjson.loads(text)
    except ValueError:
        return False
    return isinstance(value, dict) and outcome(canonical._encode, value) == text.encode()


def are_canonical_objects(texts: list[str]) -> bool | None:
    """What C says of entries with these payloads, of an action that no version has a type for."""
    count = len(texts)
    columns = (["1704931200000:0:node-1"] * count, ["job"] * count, ["UNKNOWN"] * count, texts, [None] * count)
    return native.are_well_formed(*columns)


EDITS = st.tuples(st.integers(0, 200), st.sampled_from('",:{}[]019-. \\eatnu/\n\0ä'))


@given(json_of(LEAVES, TEXTS), st.none() | EDITS)
@example(nested(63), None)
@example(nested(64), None)
@example({"a": {"a": {"b": 1, "c": [{"": None}]}}, "aa": True, "b": -1}, None)
@example({"a": 0}, (5, "-"))
@example({"a": 12, "b": 1}, (9, "a"))
@example("a\n", (8, "\0"))
@example("a\n", (8, "/"))
def test_texts_that_are_taken_for_canonical_objects_are(value: Any, edit: tuple[int, str] | None) -> None:
    text = outcome(canonical._encode, {"x": value})
    if not isinstance(text, bytes):
        return
    for whole in (text.decode(), text.decode()[5:-1]):
        at, character = edit or (len(whole), "")
        for edited in (whole[:at] + character + whole[at:], whole[:at] + character + whole[at + 1 :]):
            if are_canonical_objects([edited]) is not None:
                assert is_canonical_object(edited)


@given(st.lists(st.dictionaries(PLAIN_TEXTS, json_of(PLAIN_LEAVES, PLAIN_TEXTS), max_size=4), max_size=3))
@example([nested(30)])
def test_objects_of_integers_and_plain_texts_are_seen_to_be_canonical_at_once(values: list[Any]) -> None:
    texts = [canonical.encode(value).decode() for value in values]
    has_long_number = re.search(r"\d{16}", "".join(texts)) is not None
    if native.NAME == "c" and not has_long_number:
        assert are_canonical_objects(texts) is True
    assert are_canonical_objects([*texts, "[]"]) is None


NOT_CANONICAL_OBJECTS = [
    '{"b":1,"a":2}',
    '{"a": 1}',
    '{"a":1,"a":1}',
    '{"a":01}',
    '{"a":-0}',
    " {}",
    "{} ",
    "[]",
    "1",
    "",
    "{",
]


@pytest.mark.parametrize("text", NOT_CANONICAL_OBJECTS)
def test_no_other_text_is_taken_for_a_canonical_object(text: str) -> None:
    assert not is_canonical_object(text)
    assert are_canonical_objects(["{}", text]) is None


# --- tree and WAL ---------------------------------------------------------------------------------


@given(st.lists(st.binary(min_size=32, max_size=32), max_size=9), st.none() | st.binary(max_size=40))
def test_hashes_of_leaves_and_nodes_are_those_of_one_each(nodes: list[bytes], other: bytes | None) -> None:
    given_nodes = nodes if other is None else [*nodes, other]
    assert merkle.leaf_hashes(given_nodes) == [merkle.leaf_hash(each) for each in given_nodes]
    pairs = zip(given_nodes[::2], given_nodes[1::2], strict=False)
    assert merkle.paired(given_nodes) == [merkle.node_hash(*pair) for pair in pairs]
    if native.NAME == "c" and other is None:
        assert native.paired(nodes) is not None


@given(st.lists(st.tuples(TEXTS, TEXTS, st.binary(max_size=40)), max_size=4))
@example([("t" * 255, "j" * 255, b"{}")])
def test_records_without_keys_are_those_of_one_each(events: list[tuple[str, str, bytes]]) -> None:
    columns = [list(column) for column in zip(*events, strict=True)] or [[], [], []]
    expected = outcome(lambda: [record.encode(*event) for event in events])
    assert outcome(record.encode_plain, *columns) == expected
