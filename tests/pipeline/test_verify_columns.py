"""Batches judged by their columns are judged as their rows are, whatever is wrong with them."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ledger.verification import ENTRY_COLUMNS
from ledger.verification.entry_check import EntryColumns
from ledger.verification.range_check import RangeChecker
from ledger.verification.range_fold import Ends, tasks
from ledger.verification.verdict import Break, Findings
from pipeline.arrow import ENTRY_SCHEMA
from pipeline.verify import columns as by_columns
from tests.ledger.damage import DAMAGE, _spell_link, damage
from tests.ledger.ledger_in_memory import Ledger, build


def batch_of(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    """Rows as Arrow; where a column holds what its type does not, as bytes, as the source gives an altered column."""
    arrays = []
    for field in ENTRY_SCHEMA:
        values = [row[field.name] for row in rows]
        try:
            arrays.append(pa.array(values, field.type))
        except (pa.ArrowInvalid, pa.ArrowTypeError):
            arrays.append(pa.array([None if value is None else str(value).encode() for value in values], pa.binary()))
    return pa.RecordBatch.from_arrays(arrays, names=list(ENTRY_COLUMNS))


def found(ledger: Ledger, border: int, cuts: list[int], *, by_rows: bool) -> tuple[list[Break], list[bytes]]:
    """Breaks and summaries of the two ranges of a ledger."""
    breaks: list[Break] = []
    summaries = []
    rows = sorted(ledger.entries, key=lambda row: row["seq"])
    for task in tasks(Ends("acme", ledger.head, None), [border]):
        checker = RangeChecker(task, [], Findings(breaks.append))
        batch = batch_of([row for row in rows if task.holds(row["seq"])])
        for begin, end in zip([0, *cuts], [*cuts, batch.num_rows], strict=True):
            part = batch.slice(begin, max(0, end - begin))
            if part.num_rows and by_rows:
                checker.check([*zip(*(column.to_pylist() for column in part.columns), strict=True)])
            elif part.num_rows:
                by_columns.check_batch(checker, part)
        summaries.append(checker.finish().encode())
    return breaks, summaries


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.tuples(st.integers(0, len(DAMAGE) - 1), st.integers(0, 60), st.integers(0, 2000)), max_size=3),
    st.sampled_from([0, 0, 0, 7, 30]),
    st.integers(2, 30),
    st.lists(st.integers(1, 30), max_size=2),
    st.booleans(),
)
@example([(DAMAGE.index(_spell_link), 6, 0)], 0, 2, [], True)
def test_columns_are_judged_as_rows_are(
    damages: list[tuple[int, int, int]],
    version_1_until: int,
    border: int,
    cuts: list[int],
    is_damaged_before_border: bool,
) -> None:
    if is_damaged_before_border and damages:
        border = damages[0][1] % 29 + 2
    ledger = build(30, version_1_until=version_1_until)
    ledger.entry(9)["origin"] = '{"seq":1}'
    with suppress(ValueError):
        ledger.relink(9)
    for which, at, how in damages:
        damage(ledger, which, at, how)
    assert found(ledger, border, sorted(cuts), by_rows=False) == found(ledger, border, sorted(cuts), by_rows=True)


def test_entries_in_order_are_judged_without_looking_at_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[int] = []
    check = RangeChecker.check_columns

    def counted(checker: RangeChecker, columns: EntryColumns) -> None:
        looked_at.append(len(columns[0]))
        check(checker, columns)

    monkeypatch.setattr(RangeChecker, "check_columns", counted)
    breaks, _ = found(build(30), 11, [], by_rows=False)
    assert breaks == []
    assert looked_at == [1], "the first entry of the chain alone"
