"""What the processes that run tests are forked from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forked import ROOT, run_forked
from tests.workers import collecting


@pytest.mark.parametrize(
    ("content", "imported"),
    [
        ("", True),
        ("import nothing_of_this_name", False),
        ("import pytest\npytest.skip(allow_module_level=True)", False),
        ("import pytest\n@pytest.mark.parametrize('n', (n for n in [1]))\ndef test_once(n): ...", False),
    ],
)
def test_a_file_that_is_not_wholly_there_is_left_for_workers_to_tell(
    tmp_path: Path, content: str, imported: bool
) -> None:
    (tmp_path / "test_good.py").write_text("def test_good(): ...")
    (tmp_path / "test_other.py").write_text(content)
    forker = collecting(("-c", str(ROOT / "pyproject.toml"), "."), tmp_path)
    names = run_forked(forker, "-c", "import sys; print(*sys.modules)", check=True).stdout.split()
    assert [any(name.endswith(file) for name in names) for file in ("test_good", "test_other")] == [imported] * 2
