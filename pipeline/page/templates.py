"""Templates of pages about jobs. A page is one file that loads nothing; its Content-Security-Policy allows its style
and script by their digests.
"""

from __future__ import annotations

import base64
from hashlib import sha256
from pathlib import Path
from typing import Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from pipeline.page import count_text, duration_text, rate_text

OUTCOME_LABELS: Final = {
    "completed": "Completed",
    "cancelled": "Cancelled",
    "timed_out": "Timed out",
    "failed": "Failed",
}
"""In the order in which they are drawn."""
_HERE: Final = Path(__file__).parent


def environment(folder: Path) -> Environment:
    """The templates of ``folder``, and ``share.j2`` of this one, with filters that write numbers."""
    made = Environment(
        loader=FileSystemLoader([folder, _HERE]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(count=count_text, rate=rate_text, duration=duration_text)
    made.globals["outcomes"] = OUTCOME_LABELS
    return made


def inline() -> dict[str, str]:
    """``style`` and ``script`` of a page, and the hash by which its policy allows each."""
    texts = {name: (_HERE / file).read_text() for name, file in (("style", "style.css"), ("script", "sort.js"))}
    hashes = {f"{name}_hash": base64.b64encode(sha256(text.encode()).digest()).decode() for name, text in texts.items()}
    return hashes | {name: Markup(text) for name, text in texts.items()}  # noqa: S704 (our own files)
