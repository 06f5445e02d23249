"""The form of pages about jobs: numbers in words, templates, and the style sheet, script and bar of outcomes.

The report of the pipeline (``pipeline.report.page``) and that of a service (``app.pages.job_report``) share it. A page
loads nothing; its Content-Security-Policy allows its style and script by their digests.
"""

from __future__ import annotations

import base64
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from jinja2 import Environment

SECOND_MS: Final = 1000
MINUTE_MS: Final = 60 * SECOND_MS
HOUR_MS: Final = 60 * MINUTE_MS
DAY_MS: Final = 24 * HOUR_MS
WEEK_MS: Final = 7 * DAY_MS

_UNITS: Final = ((DAY_MS, "d"), (HOUR_MS, "h"), (MINUTE_MS, "min"), (SECOND_MS, "s"))
_ROUND_FROM_DAYS: Final = 100
NOTHING: Final = "–"


def duration_text(duration_s: float | None) -> str:
    """A duration in its two largest units, ``3 d 4 h``; under a minute to three digits, ``1.25 s``, ``17 ms``."""
    if duration_s is None:
        return NOTHING
    if (duration_ms := round(duration_s * 1000)) < SECOND_MS:
        return f"{duration_ms} ms" if duration_ms else "0 s"
    if duration_ms < MINUTE_MS:
        return f"{duration_ms / SECOND_MS:.3g} s"
    if duration_ms >= _ROUND_FROM_DAYS * DAY_MS:
        return f"{round(duration_ms / DAY_MS):,} d"
    (unit_ms, name), (smaller_ms, smaller) = next(each for each in pairwise(_UNITS) if duration_ms >= each[0][0])
    count, rest = divmod(round(duration_ms / smaller_ms), unit_ms // smaller_ms)
    return f"{count:,} {name} {rest} {smaller}" if rest else f"{count:,} {name}"


def count_text(count: int | None) -> str:
    """A count with separated thousands."""
    return NOTHING if count is None else f"{count:,}"


def rate_text(rate: float | None) -> str:
    """A share in percent; only exact zero reads 0 %, only exact one 100 %."""
    if rate is None:
        return NOTHING
    if 0 < rate < 0.0005:
        return "<0.1 %"
    if 0.9995 <= rate < 1:
        return ">99.9 %"
    return f"{rate * 100:.1f} %" if rate not in (0, 1) else f"{rate * 100:.0f} %"


# --- templates; a page is one file that loads nothing -----------------------------------------------


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
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

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
    from markupsafe import Markup

    texts = {name: (_HERE / file).read_text() for name, file in (("style", "style.css"), ("script", "sort.js"))}
    hashes = {f"{name}_hash": base64.b64encode(sha256(text.encode()).digest()).decode() for name, text in texts.items()}
    return hashes | {name: Markup(text) for name, text in texts.items()}  # noqa: S704 (our own files)
