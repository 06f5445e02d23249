"""Rows of ``_system`` as entries about keys: only those that hold together and were born here say anything."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from ledger import canonical
from ledger.verification.entry_check import ENTRY_COLUMNS, EntryRow
from signing import private_keys
from signing.key_history import added_facts, named_keys, root_facts, without_trust
from signing.private_keys import FileSigner
from tests.ledger.ledger_in_memory import Ledger

ORIGIN = canonical.encode(
    {"bundle_digest": "ab" * 32, "chain_link": "cd" * 32, "log": "log.example/_system", "node_id": "n", "seq": 1}
).decode()


@pytest.fixture
def keys(tmp_path: Path) -> list[FileSigner]:
    return [private_keys.generate(tmp_path / f"{number}.pem") for number in range(2)]


def rows_of(*introduced: dict[str, Any], **changed: Any) -> list[EntryRow]:
    """A chain of KEY_ADDED entries; of the first, columns are ``changed`` before everything is linked."""
    ledger = Ledger("_system")
    for seq, facts in enumerate(introduced, 1):
        payload = canonical.encode({"type": "KEY_ADDED", **facts})
        row = dict.fromkeys(ENTRY_COLUMNS)
        row |= {"seq": seq, "t_hlc": f"{seq}:0:n", "hlc_physical": seq, "hlc_logical": 0, "hlc_node": "n"}
        row |= {"job_id": f"key:{facts['key_id']}", "action": "KEY_ADDED", "link_version": 2}
        row |= {"payload": payload.decode(), "payload_digest": hashlib.sha256(payload).hexdigest()}
        ledger.entries.append(row | (changed if seq == 1 else {}))
    ledger.relink()
    return [tuple(row[column] for column in ENTRY_COLUMNS) for row in ledger.entries]


def root_of(rows: list[EntryRow]) -> str | None:
    ring = named_keys(rows)
    return None if ring is None else ring.root_key_id


def test_the_first_row_that_counts_names_the_root(keys: list[FileSigner]) -> None:
    introduced = (root_facts(keys[0].public_key, "n"), added_facts(keys[1].public_key, "n"))
    ring = named_keys(rows_of(*introduced))
    assert ring is not None
    assert ([key.key_id for key in ring], ring.root_key_id) == ([keys[0].key_id], keys[0].key_id)
    assert named_keys([]) is None


def test_an_imported_row_speaks_of_another_ledger(keys: list[FileSigner]) -> None:
    introduced = (root_facts(keys[0].public_key, "n"), root_facts(keys[1].public_key, "n"))
    assert root_of(rows_of(*introduced, origin=ORIGIN)) == keys[1].key_id


@pytest.mark.parametrize("column", ["payload", "action", "t_hlc", "job_id", "payload_digest", "chain_link"])
def test_a_row_that_does_not_hold_together_says_nothing(keys: list[FileSigner], column: str) -> None:
    introduced = (root_facts(keys[0].public_key, "n"), root_facts(keys[1].public_key, "n"))
    first, second = rows_of(*introduced)
    edited = list(first)
    edited[ENTRY_COLUMNS.index(column)] = second[ENTRY_COLUMNS.index(column)]
    if column == "action":
        edited[ENTRY_COLUMNS.index(column)] = "KEY_ROTATED"
    assert root_of([tuple(edited), second]) == keys[1].key_id


def test_what_the_ledger_says_of_itself_makes_no_signature_good() -> None:
    for before, after in (("ok", "not_checked"), ("unknown_key", "unknown_key"), ("broken", "broken")):
        verdicts = {"signatures": before, "links": "ok"}
        without_trust(verdicts)
        assert verdicts == {"signatures": after, "links": "ok"}
