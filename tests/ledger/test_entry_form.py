"""The form of an entry: what no ledger writes is a break, however well it is linked and signed."""

from __future__ import annotations

import asyncio

import pytest

from ledger import native
from ledger.chain import form
from ledger.facts.events import ACTIONS, TYPE_OF_ACTION, CommitmentAction, SystemAction
from ledger.verification import ENTRY_COLUMNS, verify
from ledger.verification.entry_check import EntryChecker
from ledger.verification.verdict import Findings
from tests.cases.entries import SEQ, EntryForm, entry_forms
from tests.ledger.ledger_in_memory import OPEN, MemoryReader
from tests.ledger.test_packed_entries import Copied, copied, known_at, lines_of

FORMS = [*entry_forms()]
COLUMNS = ("t_hlc", "job_id", "action", "payload", "origin")


def test_every_action_has_its_type() -> None:
    assert TYPE_OF_ACTION.keys() == {*ACTIONS.values(), *SystemAction, *CommitmentAction}


@pytest.mark.parametrize("entry", FORMS, ids=lambda entry: entry.name)
def test_an_entry_is_judged_alike_in_every_way_in_which_the_product_reads_it(entry: EntryForm) -> None:
    ledger = entry.ledger()
    row = ledger.entry(SEQ)
    columns = [row[name] for name in COLUMNS]
    expected = {} if entry.is_well_formed else {"malformed": 1}
    # 1. By itself, in Python and in C, which may leave what is unusual to Python.
    assert (form.fault_of(row["link_version"], *columns) is None) == entry.is_well_formed
    if row["link_version"] == 2:
        assert native.are_well_formed(*([value] for value in columns)) in (None, entry.is_well_formed or None)
    # 2. In its chain: as rows, one by one and in columns, and as COPY and lines have them.
    rows = [[each[name] for name in ENTRY_COLUMNS] for each in ledger.entries]
    for is_at_once in (True, False):
        findings = Findings()
        checker = EntryChecker("acme", findings, first_seq=1, prev_link=None)
        checker.check(rows) if is_at_once else checker.check_one_by_one(rows)
        assert findings.counts() == expected
    if not entry.is_well_formed:
        known = known_at()
        assert Copied(copied(rows)).passed(*known) is None
        assert lines_of(rows).passed(*known) is None
    # 3. As a whole.
    verdict = asyncio.run(verify(MemoryReader(ledger), tenant_id="acme", open_snapshot=OPEN, projection=False))
    assert verdict.breaks == expected
    assert verdict.verdicts["payloads"] == ("ok" if entry.is_well_formed else "broken")
    first = verdict.first_break
    assert (first and (first.seq, first.kind)) == (None if entry.is_well_formed else (SEQ, "malformed"))


def test_c_takes_nearly_all_that_a_ledger_writes() -> None:
    if native.NAME != "c":
        return
    rows = [(entry.name, entry.ledger().entry(SEQ)) for entry in FORMS if entry.is_well_formed]
    left = {
        name
        for name, row in rows
        if row["link_version"] == 2 and not native.are_well_formed(*([row[column]] for column in COLUMNS))
    }
    assert left == {
        "good: a subject beyond ASCII",
        "good: exponents",
        "good: whole floats beyond 2^53",
        "good: names in the order of UTF-16",
        "good: a name with an escape",
        "good: a conflict",
        "good: a conflict of a proposal",
        "good: a conflict of an unknown action",
    }
