"""Entries taken from a verified bundle: batch by batch as one by one, and what is refused is named."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ledger.bundle.format import PAYLOAD_BYTES_MAX, ROW_BYTES_MAX
from ledger.bundle.merge import BundleSource, ClockBounds, EntryTaker, chained_as
from ledger.bundle.rows import encode_entry
from ledger.chain.form import ORIGIN_BYTES_MAX
from ledger.errors import BundleInvalidError, LedgerError
from ledger.facts.events import CommitmentAction, SystemAction
from ledger.hlc import Hlc
from ledger.verification import ENTRY_COLUMNS
from tests.ledger.ledger_in_memory import build

SOURCE = BundleSource("0" * 64, "acme", "log.example/acme", "node-1")
ROWS = [tuple(row[name] for name in ENTRY_COLUMNS) for row in build(12).entries]
LATEST_MS = ROWS[-1][ENTRY_COLUMNS.index("hlc_physical")]
BOUNDS = ClockBounds(LATEST_MS, Hlc(LATEST_MS, 0, "importing"))
ORIGIN = f'{{"bundle_digest":"{"0" * 64}","chain_link":"{"0" * 64}","log":"l/t","node_id":"n","seq":1}}'


def taken(*batches: Any, bounds: ClockBounds | None = BOUNDS) -> Any:
    """The entries of the batches, or what refuses them."""
    taker = EntryTaker(SOURCE, bounds)
    return outcome(lambda: [entry for batch in batches for entry in taker.take(batch)])


def taken_one_by_one(rows: Any, bounds: ClockBounds | None = BOUNDS) -> Any:
    """The same, row by row."""
    taker = EntryTaker(SOURCE, bounds)
    return outcome(lambda: [taker._take_one(row) for row in rows])


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except LedgerError as error:
        return type(error), str(error)


def hlc(physical: int, logical: int, node: str) -> dict[str, Any]:
    text = f"{physical}:{logical}:{node}"
    return {"t_hlc": text, "hlc_physical": physical, "hlc_logical": logical, "hlc_node": node}


CHANGES: list[dict[str, Any]] = [
    {},
    {"payload": "{}"},
    {"payload": '{"a":1.5}'},
    {"payload": '{"a":"€"}'},
    {"payload": '{"a": 1}'},
    {"payload": '{"b":1,"a":1}'},
    {"payload": '{"a":1,"a":1}'},
    {"payload": "[]"},
    {"payload": "not json"},
    {"job_id": "a b"},
    {"job_id": ""},
    {"job_id": "a\nb"},
    {"job_id": "a\n"},
    {"job_id": "x" * 128},
    {"job_id": "x" * 129},
    {"job_id": "ä"},
    {"action": "complete"},
    {"action": "ANOTHER_ONE"},
    {"action": "A\n"},
    {"action": "CONFLICT"},
    {"origin": ORIGIN},
    {"origin": "{}"},
    {"link_version": 1},
    {"link_version": 1, "payload": "[]"},
    {"link_version": 1, "origin": ORIGIN},
    hlc(5, 0, "node-1"),
    hlc(5, 2**32, "node-1"),
    hlc(5, 0, "Node"),
    hlc(2**63, 0, "node-1"),
    hlc(LATEST_MS + 1, 0, "node-1"),
    hlc(LATEST_MS, 0, "importing"),
    hlc(LATEST_MS, 1, "importing"),
]


def changed(row: tuple[Any, ...], change: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(change.get(name, value) for name, value in zip(ENTRY_COLUMNS, row, strict=True))


@pytest.mark.parametrize("at", [0, 5, 11])
@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_an_unusual_row_is_taken_as_by_itself(change: dict[str, Any], at: int) -> None:
    rows = [*ROWS]
    rows[at] = changed(rows[at], change)
    assert taken(ROWS, rows) == taken_one_by_one([*ROWS, *rows])


@given(st.lists(st.tuples(st.integers(0, 11), st.sampled_from(CHANGES)), max_size=3), st.integers(1, 12), st.booleans())
@example([], 12, True)
def test_batches_are_taken_as_their_rows_are(
    changes: list[tuple[int, dict[str, Any]]], at_once: int, is_bound: bool
) -> None:
    rows = [*ROWS]
    for at, change in changes:
        rows[at] = changed(rows[at], change)
    batches = [rows[begin : begin + at_once] for begin in range(0, 12, at_once)]
    bounds = BOUNDS if is_bound else None
    assert taken(*batches, bounds=bounds) == taken_one_by_one(rows, bounds)


def test_rows_as_nearly_all_are_are_taken_at_once() -> None:
    taker = EntryTaker(SOURCE, BOUNDS)
    one_by_one = [taker._take_one(row) for row in ROWS]
    assert taker._take_in_order(ROWS) == one_by_one


@pytest.mark.parametrize("action", [*SystemAction, *CommitmentAction])
def test_no_entry_of_version_1_is_one_that_only_the_ledger_itself_writes(action: str) -> None:
    """It has no origin, so it would be taken for this ledger's own: a judged proposal, a statement, an erasure."""
    refused = taken([changed(ROWS[0], {"link_version": 1, "action": action})])
    assert refused[0] is BundleInvalidError
    assert f"seq 1 cannot be imported: link version 1 has no {action}" in refused[1]


QUOTES = '{"a":"%s"}' % ('\\"' * ((PAYLOAD_BYTES_MAX - 8) // 2))
"""The longest payload that is taken, of what takes most room where it is escaped."""


def payload_changed(payload: str, **change: Any) -> tuple[Any, ...]:
    digest = sha256(payload.encode()).hexdigest()
    return changed(ROWS[0], {"payload": payload, "payload_digest": digest, **change})


def test_whatever_is_taken_fits_into_a_bundle_again_beside_another_event_of_its_hlc() -> None:
    assert len(QUOTES) == PAYLOAD_BYTES_MAX
    origin = ORIGIN.replace("l/t", "l" * (ORIGIN_BYTES_MAX - len(ORIGIN) + 3))
    (entry,) = taken([payload_changed(QUOTES, origin=origin, action="OF_A_LATER_VERSION")])
    hlc_of_it, action, payload = chained_as(entry, "0" * 64)
    assert action == "CONFLICT"
    beside = {"action": action, "origin": origin, "seq": 2**53 - 1, **hlc(*hlc_of_it)}
    held = payload_changed(payload.decode(), **beside)
    assert len(encode_entry("acme", held)) <= ROW_BYTES_MAX
    assert [each.payload for each in taken([held])] == [payload.decode()]


@pytest.mark.parametrize("payload", [QUOTES.replace("a", "ab"), '{"a":"%s"}' % ("€" * (PAYLOAD_BYTES_MAX // 3))])
def test_what_might_not_fit_into_a_bundle_again_is_not_taken(payload: str) -> None:
    error, told = taken([payload_changed(payload)])
    assert error is BundleInvalidError
    assert told.startswith("seq 1 cannot be imported: its payload has 335544")


def test_an_hlc_that_the_importing_node_never_issued_is_refused_behind_one_that_it_did() -> None:
    issued, never_issued = ([changed(row, hlc(LATEST_MS, n, "importing")) for row in ROWS] for n in (0, 1))
    assert taken(issued, never_issued) == taken_one_by_one([*issued, *never_issued])
    assert "this node has issued none beyond" in taken(issued, never_issued)[1]
