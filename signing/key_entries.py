"""Rows of ``_system`` read as entries about keys, and the keys that a ledger names itself.

Whoever can write to a database can write any row there, but no statement by a key that was admitted. So what rows say
of keys can tell a verifier that a key does not count. That one does, only keys tell that it got elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from ledger.errors import InvalidInputError
from ledger.hlc import Hlc
from ledger.machines.events import SYSTEM_TENANT, SystemAction
from ledger.verification.entry_check import ENTRY_COLUMNS, EntryChecker, EntryRow
from ledger.verification.verdict import Findings
from signing.key_history import KeyEvent, history_of
from signing.key_statement import Anchor
from signing.keys import Keyring

SUBJECT_PREFIX = "key:"
"""What ``job_id`` of an entry about a key begins with; the key's id follows."""
AFTER_SUBJECTS = "key;"
"""The first text, in the order of bytes, that no subject of a key comes after."""
FORK_PREFIX, AFTER_FORKS = "fork:", "fork;"
"""The same of entries about forks of the log: they bound what a statement about a key may name."""

_SEQ, _HLC, _ACTION, _JOB = map(ENTRY_COLUMNS.index, ("seq", "t_hlc", "action", "job_id"))
_PREV, _LINK = map(ENTRY_COLUMNS.index, ("prev_chain_link", "chain_link"))
_PAYLOAD, _ORIGIN = map(ENTRY_COLUMNS.index, ("payload", "origin"))


def holds_together(row: EntryRow) -> bool:
    """Whether the link of a row is that of its columns."""
    findings = Findings()
    EntryChecker(SYSTEM_TENANT, findings, first_seq=row[_SEQ], prev_link=row[_PREV]).check([row])
    return findings.first_break() is None


def event_of(row: EntryRow) -> KeyEvent | None:
    """What a row that holds together says of a key, or that the log was forked, None for any other entry; an imported
    one speaks of another ledger."""
    prefix = FORK_PREFIX if row[_ACTION] == SystemAction.LOG_FORKED else SUBJECT_PREFIX
    if row[_ORIGIN] is not None or not row[_JOB].startswith(prefix):
        return None
    try:
        facts, hlc = json.loads(row[_PAYLOAD]), Hlc.parse(row[_HLC])
    except (ValueError, RecursionError, InvalidInputError):
        return None
    return KeyEvent(Anchor(row[_SEQ], row[_LINK]), hlc, row[_ACTION], facts) if isinstance(facts, dict) else None


def named_keys(rows: Iterable[EntryRow]) -> Keyring | None:
    """The keys that the rows about keys admit, in seq order; None where there is not even a root.

    A signature that they make good is not thereby checked: see ``without_trust``.
    """
    events = [event for row in rows if holds_together(row) and (event := event_of(row)) is not None]
    history = history_of(events)
    return None if history.root_key_id is None else Keyring(history.keys().values(), root_key_id=history.root_key_id)


def without_trust(verdicts: dict[str, str]) -> None:
    """Take back from ``verdicts`` what was judged with keys that the ledger named itself: no signature is ``ok``."""
    if verdicts["signatures"] == "ok":
        verdicts["signatures"] = "not_checked"
