"""The page of a report: one HTML file that needs nothing else, made from the tables that were written."""

from __future__ import annotations

import base64
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from pipeline.report import access
from pipeline.report.folder import Row, visible
from pipeline.report.lists import ENDED_JOBS_MIN
from pipeline.report.page.contents import Contents, contents, figures, outcome_bar
from pipeline.report.page.plots import HEIGHT, VIEW
from pipeline.report.period import (
    NOTHING,
    Clock,
    amount_text,
    count_text,
    duration_text,
    rate_text,
    short_moment_text,
    width_text,
    window_text,
)

TEXT_MAX: Final = 120
COMMAND_MAX: Final = 4_000
"""A command is of use only when it is whole."""
_HERE: Final = Path(__file__).parent


def write_page(report: dict[str, Any], folder: Path) -> None:
    """Write ``report.html`` for the headline numbers ``report`` and the tables in ``folder``."""
    (folder / "report.html").write_text(page(report, contents(report, folder)), encoding="utf-8")


def templates(period: dict[str, Any]) -> Environment:
    """The templates of a page, with the filters that write numbers, times and texts of ``period``."""
    clock, width_ms = Clock(period["clock"]), period["window_ms"]
    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        amount=amount_text,
        count=count_text,
        rate=rate_text,
        duration=duration_text,
        width=width_text,
        window=lambda at_ms: window_text(at_ms, width_ms, clock),
        moment=lambda at_ms: NOTHING if at_ms is None else short_moment_text(at_ms, clock),
        utc=lambda at_ms: NOTHING if at_ms is None else short_moment_text(at_ms, Clock.HLC),
        ends=lambda row: sum(row[name] for name in access.ENDS),
        text=_text,
        command=lambda value: _text(value, COMMAND_MAX),
    )
    environment.globals.update(plot_height=HEIGHT, plot_view=VIEW)
    return environment


def page(report: dict[str, Any], shown: Contents) -> str:
    """The page as HTML."""
    style, script = ((_HERE / name).read_text() for name in ("style.css", "sort.js"))
    return (
        templates(report["period"])
        .get_template("report.html.j2")
        .render(
            report=report,
            shown=shown,
            figures=figures(report, shown),
            outcome_bar=outcome_bar,
            on_trace=report["period"]["clock"] == Clock.TRACE,
            job_url=partial(_job_url, report["console"]),
            ended_jobs_min=ENDED_JOBS_MIN,
            style=Markup(style),  # noqa: S704 (our own file)
            style_hash=_hash(style),
            script=Markup(script),  # noqa: S704 (our own file)
            script_hash=_hash(script),
        )
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
        return NOTHING
    shown = visible(value)
    return shown if len(shown) <= characters_max else f"{shown[: characters_max - 1]}…"
