"""The page put together: tables read back, plots drawn, the template filled in.

Its size is bounded whatever the ledger holds: at most ``GROUPS_MAX`` rows of tenants or data centres and one for all
others, ``ROWS_MAX`` of a list, ``WINDOWS_MAX`` windows; a text is cut at ``TEXT_MAX`` characters,
a command at ``COMMAND_MAX``.
"""

from __future__ import annotations

import base64
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from pipeline.report import access, texts
from pipeline.report.folder import Row, visible
from pipeline.report.page import figures, plots, words
from pipeline.report.page.contents import Contents, contents
from pipeline.report.period import Clock

TEXT_MAX: Final = 120
COMMAND_MAX: Final = 4_000
"""A command is of use only when it is whole."""
_HERE: Final = Path(__file__).parent


def write_page(report: dict[str, Any], folder: Path) -> None:
    """Write ``report.html`` for the headline numbers ``report`` and the tables in ``folder``."""
    (folder / "report.html").write_text(page(report, contents(report, folder)), encoding="utf-8")


def page(report: dict[str, Any], shown: Contents) -> str:
    """The page as HTML."""
    clock = Clock(report["period"]["clock"])
    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        amount=texts.amount_text,
        count=texts.count_text,
        rate=texts.rate_text,
        duration=texts.duration_text,
        width=texts.width_text,
        window=lambda at_ms: texts.window_text(at_ms, report["period"]["window_ms"], clock),
        moment=lambda at_ms: texts.NOTHING if at_ms is None else texts.short_moment_text(at_ms, clock),
        utc=lambda at_ms: texts.NOTHING if at_ms is None else texts.short_moment_text(at_ms, Clock.HLC),
        ends=lambda row: sum(row[name] for name in access.ENDS),
        text=_text,
        command=lambda value: _text(value, COMMAND_MAX),
    )
    environment.globals.update(plot_height=plots.HEIGHT, plot_view=plots.VIEW)
    style, script = ((_HERE / name).read_text() for name in ("style.css", "sort.js"))
    return environment.get_template("report.html.j2").render(
        report=report,
        shown=shown,
        figures=figures.figures(report, shown),
        outcome_bar=figures.outcome_bar,
        on_trace=clock is Clock.TRACE,
        lead=words.lead(report),
        title=words.title(report),
        job_url=partial(_job_url, report["console"]),
        tiles=words.tiles(report),
        stuck_why=words.why_stuck(report),
        left_out=words.left_out(report),
        not_known=words.not_known(report),
        style=Markup(style),  # noqa: S704 (our own file)
        style_hash=_hash(style),
        script=Markup(script),  # noqa: S704 (our own file)
        script_hash=_hash(script),
    )


def _hash(text: str) -> str:
    """As a Content-Security-Policy names what may stand in a page."""
    return base64.b64encode(sha256(text.encode()).digest()).decode()


def _job_url(console: str | None, row: Row) -> str | None:
    """Where the console shows the job of ``row``; None without a console, and for names that no service gives."""
    names = (row.get("tenant_id"), row.get("job_id"))
    if console is None or not all(names):
        return None
    return f"{console}/console#/job/" + "/".join(quote(str(name), safe="") for name in names)


def _text(value: str | None, characters_max: int = TEXT_MAX) -> str:
    """A text from the ledger, cut, with nothing in it that could turn or hide what stands around it."""
    if value is None:
        return texts.NOTHING
    shown = visible(value)
    return shown if len(shown) <= characters_max else f"{shown[: characters_max - 1]}…"
