"""Entries that are checked as they came, in the binary form of COPY or as lines, are judged as their rows are."""

from __future__ import annotations

import asyncio
import re
import struct
from collections.abc import AsyncIterator, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ledger import canonical, native
from ledger.bundle.rows import EntryLines, encode_entry
from ledger.chain import Linker
from ledger.errors import BundleInvalidError
from ledger.job_index import keys_of
from ledger.merkle import leaf_hashes
from ledger.names import NODE_ID
from ledger.verification import ENTRY_COLUMNS, driver, verify
from ledger.verification.entry_check import EntryChecker, PackedEntries, Passed, SignableEntry
from ledger.verification.range_check import SEQ_MAX, RangeChecker, RangeSummary, RangeTask
from ledger.verification.reader import of_commitments
from ledger.verification.verdict import Findings
from tests.ledger.committed import RACE, committed, mend, placement
from tests.ledger.damage import DAMAGE, damage
from tests.ledger.ledger_in_memory import OPEN, Ledger, MemoryReader, origin_of
from tests.ledger.test_native import outcome


def raced() -> Ledger:
    """Jobs, then proposals, the last of them imported."""
    ledger = committed([*RACE, placement("a")], before=30)
    ledger.entry(40)["origin"] = origin_of(1)
    mend(ledger)
    return ledger


WHOLE = raced()
IN_C = native.NAME == "c"
SEQ, T_HLC, VERSION, PREV, LINK = map(
    ENTRY_COLUMNS.index, ("seq", "t_hlc", "link_version", "prev_chain_link", "chain_link")
)
WIDTHS = {"seq": 8, "hlc_physical": 8, "hlc_logical": 8, "link_version": 2}

SAID = [*map(ENTRY_COLUMNS.index, SignableEntry._fields)]
NOTHING: tuple[Any, ...] = ([], b"", [], None, b"", None, None, 0, [])

Rows = list[list[Any]]


def rows_of(ledger: Ledger) -> Rows:
    return [[row[name] for name in ENTRY_COLUMNS] for row in ledger.entries]


def copied(rows: Rows) -> bytes:
    """The rows as COPY sends them, behind its header."""
    data = b""
    for row in rows:
        data += struct.pack(">H", len(row))
        for name, value in zip(ENTRY_COLUMNS, row, strict=True):
            width = WIDTHS.get(name)
            if value is not None:
                value = value.encode() if width is None else value.to_bytes(width, "big", signed=True)
            data += struct.pack(">i", -1) if value is None else struct.pack(">i", len(value)) + value
    return data + b"\xff\xff"


class Known(NamedTuple):
    """The arguments of ``passed``."""

    prefix: bytes
    first_seq: int
    prev_raw: bytes | None
    prev_link: str | None
    stop_seq: int
    to_mark: Sequence[int]
    sees_all: bool = False


class Copied(NamedTuple):
    """As ``app.store.chain_reader.CopiedEntries``."""

    data: bytes

    def passed(self, *known: Any) -> Passed | None:
        found = native.entries_in_copy(*known, self.data)
        return None if found is None else Passed(*found)


def lines_of(rows: Rows) -> EntryLines:
    return EntryLines(b"".join(encode_entry("acme", row) for row in rows), b'"acme"')


def by_rows(rows: Rows, known: Known) -> tuple[Any, ...] | None:
    """What the twin in Python says, but for where the rest begins."""
    checker = EntryChecker(
        "acme",
        Findings(),
        first_seq=known.first_seq,
        prev_link=rows[0][PREV] if known.prev_raw is None else known.prev_link,
    )
    runs = checker.check_one_by_one(rows)
    if checker._findings.first_break() is not None or any(row[VERSION] == 1 for row in rows):
        return None
    ((_, links, _, jobs),) = runs
    marks = [(row[SEQ], link, row[T_HLC]) for row, link in zip(rows, links, strict=True) if row[SEQ] in known.to_mark]
    count = len(of_commitments(rows))
    said = [] if not known.sees_all else [SignableEntry(*(row[at] for at in SAID)) for row in rows]
    ends = rows[0][PREV], links[-1], rows[-1][LINK], rows[-1][T_HLC]
    return leaf_hashes(links), keys_of(jobs), marks, *ends, count, said


def known_at(first_seq: int = 1, *, is_believed: bool = False, stop_seq: int = SEQ_MAX) -> Known:
    checker = EntryChecker("acme", Findings(), first_seq=first_seq, prev_link=None)
    link = None if first_seq == 1 else WHOLE.entry(first_seq - 1)["chain_link"]
    raw = None if is_believed else bytes.fromhex(link or "")
    to_mark = [0, 1, 7, 20, 40, 99]
    return Known(checker._linker.prefix, first_seq, raw, None if is_believed else link, stop_seq, to_mark)


PACKED = {"copy": lambda rows: Copied(copied(rows)), "lines": lines_of}


@pytest.mark.parametrize("form", PACKED)
@pytest.mark.parametrize("first_seq", [1, 11])
@pytest.mark.parametrize("is_believed", [False, True])
@pytest.mark.parametrize("sees_all", [False, True])
def test_entries_in_order_are_judged_at_once(form: str, first_seq: int, is_believed: bool, sees_all: bool) -> None:
    rows, known = rows_of(WHOLE)[first_seq - 1 :], known_at(first_seq, is_believed=is_believed)
    known = known._replace(sees_all=sees_all)
    found = PACKED[form](rows).passed(*known)
    assert (found is not None) == IN_C
    if found is None:
        return
    assert found[:-1] == by_rows(rows, known)
    assert found.commitments == len(RACE)
    assert [seq for seq, _, _ in found.marks] == [seq for seq in (1, 7, 20, 40) if seq >= first_seq]


@pytest.mark.parametrize("stop_seq", [0, 1, 17, 39, 40])
def test_those_behind_are_left(stop_seq: int) -> None:
    rows, known = rows_of(WHOLE), known_at(stop_seq=stop_seq)
    lines = lines_of(rows)
    found = lines.passed(*known)
    assert (found is not None) == IN_C
    if found is None:
        return
    assert found[:-1] == (by_rows(rows[:stop_seq], known) if stop_seq else NOTHING)
    behind = lines.behind(found.at)
    assert [tuple(row) for row in behind or ()] == [tuple(row) for row in rows[stop_seq:]]
    if behind is not None and stop_seq:
        then = behind.passed(*known_at(stop_seq + 1))
        assert then is not None
        assert len(then.leaves) == len(rows) - stop_seq


@pytest.mark.parametrize("form", PACKED)
@pytest.mark.parametrize("name", ENTRY_COLUMNS)
def test_one_edited_value_is_left_to_python(form: str, name: str) -> None:
    ledger = WHOLE.copy()
    row = ledger.entry(7)
    value = row[name]
    row[name] = value + 1 if isinstance(value, int) else f"{(value or '')[:-1]}0"
    assert row[name] != value
    assert PACKED[form](rows_of(ledger)).passed(*known_at()) is None


@given(st.sampled_from([*PACKED]), st.integers(0, len(DAMAGE) - 1), st.integers(0, 39), st.integers(0, 2000))
def test_damaged_entries_are_judged_as_their_rows_are(form: str, which: int, at: int, how: int) -> None:
    ledger = WHOLE.copy()
    damage(ledger, which, at, how)
    rows = rows_of(ledger)
    packed: Any = outcome(PACKED[form], rows)
    if isinstance(packed, type):
        return  # The form does not hold it.
    expected = outcome(by_rows, rows, known_at()) if rows else NOTHING
    found = packed.passed(*known_at())
    assert (None if found is None else found[:-1]) == (expected if IN_C and isinstance(expected, tuple) else None)


def summary_of(rows: Rows, task: RangeTask, packed: Sequence[Any]) -> RangeSummary | None:
    checker = RangeChecker(task, (), Findings())
    for each in packed:
        if checker.check_packed(each) is None:
            return None
    for row in rows:
        checker.check([row])
    return checker.finish()


@pytest.mark.parametrize("task", [RangeTask("acme", 0, None, 25), RangeTask("acme", 1, 26, 40, sizes=(30, 40))])
def test_a_range_has_the_same_summary(task: RangeTask) -> None:
    task = task._replace(intervals=((3, 30), (27, 40)), tree_size=40)
    rows = [row for row in rows_of(WHOLE) if task.holds(row[SEQ])]
    expected = summary_of(rows, task, [])
    in_c = expected if IN_C else None
    assert summary_of([], task, [Copied(copied(rows[:9])), Copied(b""), Copied(copied(rows[9:]))]) == in_c
    assert summary_of(rows[9:], task, [lines_of(rows[:9])]) == in_c
    behind = rows[1:]
    assert summary_of([], task, [Copied(copied(behind))]) is None, "what comes first has its place, or is looked at"


class LinesReader(MemoryReader):
    """Shows a ledger's entries as lines."""

    async def entries(self, from_seq: int | None, to_seq: int | None) -> AsyncIterator[Sequence[Any]]:
        async for rows in super().entries(from_seq, to_seq):
            yield lines_of([[*row] for row in rows])


@given(
    st.none() | st.tuples(st.integers(0, len(DAMAGE) - 1), st.integers(0, 39), st.integers(0, 2000)),
    st.integers(1, 25),
    st.integers(1, 45),
)
@example(None, 7, 16)
def test_a_ledger_of_lines_has_the_verdict_of_its_rows_wherever_ranges_end(
    edit: tuple[int, int, int] | None, batch_rows: int, range_entries: int
) -> None:
    ledger = WHOLE.copy()
    if edit is not None:
        damage(ledger, *edit)
    if isinstance(outcome(lambda: len(lines_of(rows_of(ledger)))), type):
        return  # The form does not hold it.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "RANGE_ENTRIES", range_entries)
        readers = MemoryReader(ledger, batch_rows), LinesReader(ledger, batch_rows)
        by_values, by_lines = (asyncio.run(verify(reader, tenant_id="acme", open_snapshot=OPEN)) for reader in readers)
    assert by_lines == by_values


def test_a_link_that_a_line_spells_with_an_escape_is_not_read_where_the_next_has_spelt_something_else() -> None:
    rows = [{**row} for row in WHOLE.entries[:2]]
    payload = '{"type":"TENANT_CREATED"}'
    for row in rows:
        row.update(action="TENANT_CREATED", payload=payload, payload_digest=sha256(payload.encode()).hexdigest())
    rows[0]["prev_chain_link"], rows[1]["job_id"] = '"', 'e"'
    raw = b""
    for row in rows:
        digest = bytes.fromhex(row["payload_digest"])
        raw = Linker("acme").link(row["seq"], row["t_hlc"], row["job_id"], row["action"], raw, digest)
        row["chain_link"] = raw.hex()
    rows[1]["prev_chain_link"] = rows[0]["chain_link"]
    lines = lines_of([[row[name] for name in ENTRY_COLUMNS] for row in rows])
    found = lines.passed(*known_at()._replace(prev_raw=b"", prev_link='"'))
    assert (found is not None) == IN_C
    assert found is None or found.first_prev == '"'


# --- COPY -----------------------------------------------------------------------------------------


@given(st.integers(0, 3000), st.integers(0, 255), st.integers(0, 40))
@example(0, 255, 0)
@example(len(copied(rows_of(WHOLE)[:1])) - 6, 127, 0)
def test_whatever_stands_in_a_copy_is_read_within_it(at: int, value: int, cut: int) -> None:
    data = bytearray(copied(rows_of(WHOLE)[:5]))
    was = bytes(data)
    data[at % len(data)] = value
    data = data[: len(data) - cut]
    found = native.entries_in_copy(*known_at(), bytes(data))
    # Whole rows, with the end or without, are all that holds.
    assert found is None or data in (was, was[:-2])


FORMS = bytes(ord("i" if name in WIDTHS else "t") for name in ENTRY_COLUMNS)


def test_rows_of_a_copy_are_those_that_were_copied() -> None:
    rows = [tuple(row) for row in rows_of(WHOLE)]
    rows[3] = (None,) * len(FORMS)
    rows[5] = (-(2**63), *("\U0001f600" if form == ord("t") else -1 for form in FORMS[1:]))
    data = copied([[*row] for row in rows])
    for whole in (data, data[:-2]):
        assert native.rows_in_copy(FORMS, whole) == (rows if IN_C else None)
    assert native.rows_in_copy(FORMS, b"") == ([] if IN_C else None)


@given(st.integers(0, 3000), st.integers(0, 255), st.integers(0, 40), st.integers(0, 2))
@example(0, 255, 0, 0)
@example(len(copied(rows_of(WHOLE)[:1])) - 6, 127, 0, 0)
def test_what_is_no_row_of_a_copy_is_left(at: int, value: int, cut: int, columns_less: int) -> None:
    data = bytearray(copied(rows_of(WHOLE)[:5]))
    data[at % len(data)] = value
    data = data[: len(data) - cut]
    found = native.rows_in_copy(FORMS[columns_less:], bytes(data))
    assert found is None or (copied([[*row] for row in found]) in (data, data + b"\xff\xff") and not columns_less)


@pytest.mark.parametrize("arguments", [(), (FORMS,), ("t", b""), (FORMS, bytearray()), (b"t" * 17, b""), (FORMS, None)])
def test_what_is_no_copy_is_left(arguments: tuple[Any, ...]) -> None:
    assert native.rows_in_copy(*arguments) is None


# --- lines ----------------------------------------------------------------------------------------


TEXTS = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=30) | st.sampled_from(
    ['"', "\\", "\n\t\r\b\f", "\x00", "\x1f", "\x7f", "ä\u2028", "\U0001f600"]
)


EDITS = (b"", b" ", b"\\u0041", b"\\/", b"0", b"\n", b"\xff", b"\x00", b'"', b"{}")


@given(
    st.lists(st.tuples(st.just("job") | TEXTS, TEXTS, st.just("node-1") | TEXTS), min_size=1, max_size=4),
    st.none() | st.tuples(st.integers(0, 2000), st.sampled_from(EDITS)),
)
def test_lines_that_pass_are_canonical_and_in_order(
    texts: list[tuple[str, str, str]], edit: tuple[int, bytes] | None
) -> None:
    rows: Rows = []
    linker, prev = Linker("acme"), b""
    for seq, (job, text, node) in enumerate(texts, 1):
        payload = text if "\0" in text else canonical.encode({"text": text}).decode()
        digest, hlc = sha256(payload.encode()), f"{seq}:0:{node}"
        link = linker.link(seq, hlc, job, "UNKNOWN", prev, digest.digest())
        stored = (prev.hex() or None, link.hex(), digest.hexdigest(), payload, None)
        rows.append([seq, hlc, seq, 0, node, job, "UNKNOWN", 2, *stored])
        prev = link
    lines = b"".join(encode_entry("acme", row) for row in rows)
    if edit is not None:
        at = edit[0] % len(lines)
        lines = lines[:at] + edit[1] + lines[at + 1 :]
    packed = EntryLines(lines, b'"acme"')
    found, unpacked = packed.passed(*known_at()), outcome(packed.unpacked)
    if isinstance(unpacked, type):
        assert found is None
        return
    expected = by_rows([list(row) for row in unpacked], known_at())
    assert found is None or found[:-1] == expected
    has_plain_jobs = all(job and job.isascii() and min(job) >= " " for job, _, _ in texts)
    has_payloads = all("\0" not in text for _, text, _ in texts)
    has_node_ids = all(re.fullmatch(NODE_ID, node) for _, _, node in texts)
    if IN_C and edit is None and has_plain_jobs and has_payloads and has_node_ids:
        assert found is not None


@pytest.mark.parametrize("name", ["hlc_logical", "hlc_physical", "link_version", "seq"])
def test_numbers_have_one_spelling(name: str) -> None:
    lines = encode_entry("acme", rows_of(WHOLE)[0])
    for spelling in (b"0", b"+", b" ", b"-0"):
        spelt = re.sub(b'"%b":' % name.encode(), b"\\g<0>%b" % spelling, lines)
        assert len(spelt) == len(lines) + len(spelling)
        assert EntryLines(spelt, b'"acme"').passed(*known_at()) is None


def test_lines_of_another_tenant_are_left() -> None:
    packed: PackedEntries = EntryLines(b"".join(encode_entry("other", row) for row in rows_of(WHOLE)), b'"acme"')
    assert packed.passed(*known_at()) is None
    with pytest.raises(BundleInvalidError, match="another tenant"):
        len(packed)


@pytest.mark.parametrize("strange", [None, 1.5, "s", [], -1])
def test_what_is_nothing_of_the_kind_is_left(strange: Any) -> None:
    for name, more in (("copy", [b""]), ("lines", [b"", 0, b""]), ("columns", [0, [()] * 13])):
        function = getattr(native, f"entries_in_{name}")
        for at in range(len(known_at()) + len(more)):
            given_values = [*known_at(), *more]
            if type(given_values[at]) is not type(strange) and not (at == 2 and strange is None):
                given_values[at] = strange
                if not (at == 3 and isinstance(strange, str | None)) and not (at == 5 and strange == []):
                    assert function(*given_values) is None
