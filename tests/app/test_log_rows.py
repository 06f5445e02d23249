"""New rows in pieces: what is kept of a chain, and what a piece says of itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from app.store.appended import ROWS_A_PIECE, AppendedEntries, ChainAppender, ChainPosition
from app.store.chaining import LOG_COLUMNS, ChainHead, LogRows, RecentRows, Row
from ledger.hlc import Hlc

SEQ = LOG_COLUMNS.index("seq")


def grown(first_seq: int, entries: int) -> LogRows:
    appended = AppendedEntries()
    appender = ChainAppender(appended, {"acme": ChainHead(first_seq - 1, "ab" * 32, "1:0:n")}, {})
    for number in range(entries):
        appender.append("acme", Hlc(2, number, "n"), f"j{number}", "ENQUEUE", b'{"n":%d}' % number)
    appender.finish()
    return appended.log_rows


def as_tuples(rows: LogRows) -> LogRows:
    """The same, as where there is no C."""
    return LogRows([piece._replace(kept=[*piece.rows()]) for piece in rows.pieces])


def recent(*grown_rows: LogRows) -> RecentRows:
    kept = RecentRows()
    for rows in grown_rows:
        for piece in rows.pieces:
            kept.add(piece)
    return kept


def seqs(rows: list[Row]) -> list[int]:
    return [row[SEQ] for row in rows]


def test_many_rows_of_a_chain_are_several_pieces() -> None:
    rows = grown(5, 2 * ROWS_A_PIECE + 1)
    assert [(piece.first_seq, piece.length) for piece in rows.pieces] == [
        (5, ROWS_A_PIECE),
        (5 + ROWS_A_PIECE, ROWS_A_PIECE),
        (5 + 2 * ROWS_A_PIECE, 1),
    ]
    assert len(rows) == len([*rows]) == 2 * ROWS_A_PIECE + 1
    assert rows.sent() == [("acme", 5, 5 + 2 * ROWS_A_PIECE, 2 * ROWS_A_PIECE + 1)]


def test_entries_that_are_kept_and_entries_that_are_linked_stand_in_order() -> None:
    """As at the beginning of a chain of an older version, which is imported as it is."""
    rows = [*grown(1, ROWS_A_PIECE + 3)]
    made = AppendedEntries()
    appender = ChainAppender(made, {"acme": ChainHead(0, "ab" * 32, "1:0:n")}, {})

    def keep(row: Row) -> None:
        said = dict(zip(LOG_COLUMNS, row, strict=True))
        place = ChainPosition(said["seq"], said["chain_link"], said["prev_chain_link"])
        hlc = Hlc(said["hlc_physical"], said["hlc_logical"], said["hlc_node"])
        appender.keep(
            "acme", hlc, said["job_id"], said["action"], said["link_version"], place, said["payload"].encode()
        )

    for row in rows[: ROWS_A_PIECE + 1]:
        keep(row)
    appender.append("acme", Hlc(2, ROWS_A_PIECE + 1, "n"), rows[-2][6], "ENQUEUE", rows[-2][-2].encode())
    keep(rows[-1])
    appender.finish()
    assert [*made.log_rows] == rows
    assert [piece.length for piece in made.log_rows.pieces] == [ROWS_A_PIECE, 1, 1, 1]
    assert [piece.first_seq for piece in made.log_rows.pieces] == [1, *range(ROWS_A_PIECE + 1, ROWS_A_PIECE + 4)]


@pytest.mark.parametrize("form", [lambda rows: rows, as_tuples], ids=["as made", "tuples"])
def test_rows_are_found_behind_any_seq_that_is_kept(form: Callable[[LogRows], LogRows]) -> None:
    kept = recent(form(grown(5, 3)), form(grown(8, 4)))
    assert seqs(kept.after(4, 100)) == [5, 6, 7, 8, 9, 10, 11]
    assert seqs(kept.after(5, 4)) == [6, 7, 8, 9]
    assert seqs(kept.after(8, 100)) == [9, 10, 11]
    assert kept.after(3, 100) == [], "the one behind it is not kept"
    assert kept.after(11, 100) == []
    assert kept.after(4, 0) == []


def test_rows_that_leave_a_gap_take_the_place_of_those_before() -> None:
    kept = recent(grown(5, 3), grown(9, 2))
    assert kept.after(4, 100) == []
    assert seqs(kept.after(8, 100)) == [9, 10]
    assert kept.size_bytes == sum(piece.size_bytes for piece in grown(9, 2).pieces)


def test_what_was_forgotten_is_not_found_and_takes_no_room() -> None:
    kept = recent(grown(5, 3), grown(8, 2))
    kept.forget(6)
    assert seqs(kept.after(6, 100)) == [7, 8, 9], "a piece stays as long as some of it is to come"
    kept.forget(7)
    assert kept.after(6, 100) == []
    assert seqs(kept.after(7, 100)) == [8, 9]
    kept.forget(9)
    assert kept.size_bytes == 0
    assert kept.after(7, 100) == []
