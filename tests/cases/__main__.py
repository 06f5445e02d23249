"""``python -m tests.cases`` writes the corpus again."""

from __future__ import annotations

from tests.cases.corpus import FOLDER
from tests.cases.kinds import KINDS, readme

if __name__ == "__main__":
    for kind in KINDS:
        (FOLDER / f"{kind.name}.json").write_text(kind.written())
    page = FOLDER / "README.md"
    page.write_text(readme(page.read_text()))
