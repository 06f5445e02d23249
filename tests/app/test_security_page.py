"""The attacks that SECURITY.md tells of: each row names tests, and they are there."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
TABLE_ROW = re.compile(r"^\| (?!attack|fault|---).* \|$", re.MULTILINE)
TEST_NAME = re.compile(r"`(\w+/test_\w+\.py)::(test_\w+)`")


def test_every_attack_has_a_test_of_the_name_it_says() -> None:
    rows = TABLE_ROW.findall((TESTS.parent / "SECURITY.md").read_text())
    assert len(rows) > 50
    for row in rows:
        named = TEST_NAME.findall(row)
        assert named, row
        for file, test in named:
            assert f"def {test}(" in (TESTS / file).read_text(), f"{file} has no {test}"
