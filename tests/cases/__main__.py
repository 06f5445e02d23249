"""``python -m tests.cases`` writes the corpus again."""

from __future__ import annotations

from tests.cases.corpus import FOLDER
from tests.cases.kinds import KINDS, readme
from tests.cases.signatures import keep

if __name__ == "__main__":
    files = {f"{kind.name}.json": kind.written() for kind in KINDS}
    for name, text in files.items():
        (FOLDER / name).write_text(text)
    keep()
    page = FOLDER / "README.md"
    page.write_text(readme(page.read_text()))
