"""Rules that hold for all SQL of the service."""

from __future__ import annotations

import re
from pathlib import Path

import app

_WITHOUT_COLUMNS = re.compile(r'"\s*SELECT\s+FROM\b|\bRETURNING\s*"', re.IGNORECASE)
_STAYS = re.compile(
    r'"SET (?!LOCAL\b|TRANSACTION\b)|\bset_config\(.*, false\)|_advisory_lock\(|'
    r'"LISTEN\b|\bWITH HOLD\b|\bTEMP(?:ORARY)? TABLE\b',
)
_OWN_SESSIONS = {
    "store/commit.py": "the appender's own connections",
    "store/exchange.py": "ends with the session unless it was given back",
    "store/sessions.py": "every session begins with them, and the lock timeout of a start ends with it",
}
"""Where a setting or a lock lasts as long as the session, by file of the app."""


def sources() -> dict[str, str]:
    root = Path(app.__file__).parent
    found = {str(path.relative_to(root)): path.read_text() for path in root.rglob("*.py")}
    assert len(found) > 100
    return found


def test_no_statement_answers_rows_without_columns() -> None:
    # asyncpg keeps what it frees of records in a list whose link lies behind the last column of a record without any.
    found = {path: found[0] for path, text in sources().items() if (found := _WITHOUT_COLUMNS.search(text))}
    assert found == {}


def test_nothing_is_left_in_a_session_that_another_borrows() -> None:
    # Connections are given back to their pool as they are.
    found = {path: found[0] for path, text in sources().items() if (found := _STAYS.search(text))}
    assert found.keys() == _OWN_SESSIONS.keys(), found
