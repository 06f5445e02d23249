"""Rules that hold for all SQL of the service."""

from __future__ import annotations

import re
from pathlib import Path

import app

_WITHOUT_COLUMNS = re.compile(r'"\s*SELECT\s+FROM\b|\bRETURNING\s*"', re.IGNORECASE)


def test_no_statement_answers_rows_without_columns() -> None:
    # asyncpg keeps what it frees of records in a list whose link lies behind the last column of a record without any.
    root = Path(app.__file__).parent
    sources = {path: path.read_text() for path in root.rglob("*.py")}
    assert len(sources) > 100
    assert [
        f"{path.relative_to(root)}: {found[0]}"
        for path, text in sources.items()
        if (found := _WITHOUT_COLUMNS.search(text))
    ] == []
