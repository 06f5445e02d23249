"""The page of a report: one HTML file that needs nothing else, made from the tables that were written."""

from __future__ import annotations

import base64
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, NamedTuple
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
from pipeline.report.summaries import SPANS

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
        amount=amount_text,
        count=count_text,
        rate=rate_text,
        duration=duration_text,
        width=width_text,
        window=lambda at_ms: window_text(at_ms, report["period"]["window_ms"], clock),
        moment=lambda at_ms: NOTHING if at_ms is None else short_moment_text(at_ms, clock),
        utc=lambda at_ms: NOTHING if at_ms is None else short_moment_text(at_ms, Clock.HLC),
        ends=lambda row: sum(row[name] for name in access.ENDS),
        text=_text,
        command=lambda value: _text(value, COMMAND_MAX),
    )
    environment.globals.update(plot_height=HEIGHT, plot_view=VIEW)
    style, script = ((_HERE / name).read_text() for name in ("style.css", "sort.js"))
    return environment.get_template("report.html.j2").render(
        report=report,
        shown=shown,
        figures=figures(report, shown),
        outcome_bar=outcome_bar,
        on_trace=clock is Clock.TRACE,
        lead=lead(report),
        title=title(report),
        job_url=partial(_job_url, report["console"]),
        tiles=tiles(report),
        stuck_why=why_stuck(report),
        left_out=left_out(report),
        not_known=not_known(report),
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
        return NOTHING
    shown = visible(value)
    return shown if len(shown) <= characters_max else f"{shown[: characters_max - 1]}…"


# --- sentences ------------------------------------------------------------------------------------


class Tile(NamedTuple):
    """One headline number: what it counts, the number, what more there is to say; ``style`` is its class."""

    what: str
    number: str
    more: str
    style: str = ""
    before: str = ""
    """The same in the period before."""


TENANTS_NAMED_MAX = 3
TIMES_AS_MANY_MIN = 3
"""A larger growth is told as a factor, not in percent."""


def lead(report: dict[str, Any]) -> str:
    """The report in two or three sentences."""
    counts, rates, times, at_end = report["in_period"], report["rates"], report["times_s"], report["at_end"]
    told = [f"{_jobs(counts['created'])} created and {count_text(counts['ended'])} ended in this period."]
    if counts["ended"]:
        share = counts["completed"] / counts["ended"]
        others = [
            f"{rate_text(rates[name])} {text}"
            for name, text in (
                ("failure_rate", "failed"),
                ("timeout_rate", "timed out"),
                ("cancellation_rate", "were cancelled"),
            )
            if rates[name]
        ]
        told.append(f"Of those that ended, {', '.join([f'{rate_text(share)} completed', *others])}.")
    if times["queue"]["jobs"] and times["run"]["jobs"]:
        waited = _or_less("waited", times["queue"]["p50"]) or "did not wait"
        ran = _or_less("ran", times["run"]["p50"]) or "were done at once"
        queued, ended = (count_text(times[span]["jobs"]) for span in ("queue", "run"))
        told.append(f"Half of the {queued} that were accepted {waited}, and half of the {ended} that then ended {ran}.")
    if at_end["stuck"]:
        told.append(f"{_jobs(at_end['stuck'], 'looks', 'look')} stuck.")
    return " ".join(told)


def title(report: dict[str, Any]) -> str:
    """What the report is about: its tenants by name where they were asked for, else how many there are."""
    asked, all_tenants = report["read"]["tenants_asked"], report["read"]["tenants"]
    if not asked:
        return f"{count_text(all_tenants)} {'tenant' if all_tenants == 1 else 'tenants'}"
    more = f" and {len(asked) - TENANTS_NAMED_MAX} more" if len(asked) > TENANTS_NAMED_MAX else ""
    return ", ".join(asked[:TENANTS_NAMED_MAX]) + more


def tiles(report: dict[str, Any]) -> list[Tile]:
    """The headline numbers, each with how it was in the period before where that is known."""
    return [tile._replace(before=_before(report, tile.style)) for tile in _tiles(report)]


def _before(report: dict[str, Any], style: str) -> str:
    last = report["before"]
    if last is None or not last["in_period"]["created"] + last["in_period"]["ended"]:
        return ""
    if style in SPANS:
        return f"before: {duration_text(last['times_s'][style]['p50'])}"
    if style not in last["in_period"]:
        return ""
    now, then = report["in_period"][style], last["in_period"][style]
    if not then:
        return f"before: {count_text(then)}"
    if now >= TIMES_AS_MANY_MIN * then:
        return f"before: {count_text(then)}, now {now / then:,.0f} times as many"
    return f"before: {count_text(then)}, {'+' if now >= then else '−'}{rate_text(abs(now - then) / then)}"


def _tiles(report: dict[str, Any]) -> list[Tile]:
    counts, rates, times, at_end = report["in_period"], report["rates"], report["times_s"], report["at_end"]
    share = counts["completed"] / counts["ended"] if counts["ended"] else None
    queue, run = times["queue"], times["run"]
    of_ended = "of those that ended"
    return [
        Tile("Created", count_text(counts["created"]), f"{count_text(counts['ended'])} ended", "created"),
        Tile("Completed", count_text(counts["completed"]), f"{rate_text(share)} {of_ended}", "completed"),
        Tile("Failed", count_text(counts["failed"]), f"{rate_text(rates['failure_rate'])} {of_ended}", "failed"),
        Tile(
            "Timed out", count_text(counts["timed_out"]), f"{rate_text(rates['timeout_rate'])} {of_ended}", "timed_out"
        ),
        Tile(
            "Cancelled",
            count_text(counts["cancelled"]),
            f"{rate_text(rates['cancellation_rate'])} {of_ended}",
            "cancelled",
        ),
        Tile("Open at the end", count_text(at_end["open"]), f"{count_text(at_end['stuck'])} of them stuck"),
        Tile("Queue time, median", duration_text(queue["p50"]), _of(queue, "accepted"), "queue"),
        Tile("Run time, median", duration_text(run["p50"]), _of(run, "accepted and ended"), "run"),
    ]


def _of(times: dict[str, Any], which: str) -> str:
    """What percentiles are of, and how far the last 1 in 100 lies out."""
    return f"of {count_text(times['jobs'])} {which}; 99 of 100 within {duration_text(times['p99'])}"


def why_stuck(report: dict[str, Any]) -> str:
    """Where the threshold for stuck jobs comes from."""
    if report["at_end"]["stuck_after_is_asked"]:
        return "that is what --stuck-after asks for."
    if report["times_s"]["total"]["jobs"] < ENDED_JOBS_MIN:
        return f"fewer than {ENDED_JOBS_MIN} jobs have ended, too few to tell what is usual."
    return (
        "within that time, or an hour if that is longer, 99 of 100 jobs that ended in this period had come from "
        "creation to their end. --stuck-after sets another."
    )


def left_out(report: dict[str, Any]) -> str:
    """What is in the ledger and not, or not wholly, in the report."""
    counts = report["left_out"]
    texts = (
        ("private_values", "private values, which are encrypted"),
        ("jobs_with_times_backwards", "times of jobs that run backwards"),
        ("jobs_without_time", "jobs without a time of this clock"),
        ("events_without_trace_time", "times of events without trace_time"),
    )
    told = [f"{count_text(counts[name])} {text}" for name, text in texts if counts[name]]
    return "; ".join(told) or "nothing"


def not_known(report: dict[str, Any]) -> dict[str, str]:
    """What of who did what is not known, by the table that it is about."""
    who, tenants = report["who"], report["read"]["tenants"]
    unnamed, private = count_text(who["events_without_actor"]), count_text(who["events_of_private_actors"])
    silent = count_text(tenants - who["tenants_with_reads"])
    if who["acts"] is None:
        system = "What was allowed and refused is in the chain of _system, which was not read with this."
    else:
        asked = " of the tenants asked for" if report["read"]["tenants_asked"] else ""
        system = f"What the chain of _system tells{asked}."
        if who["refusals_not_listed"]:
            more = count_text(who["refusals_not_listed"])
            system += f" {more} more refusals were counted without saying whose, as there were too many kinds at once."
    return {
        "events": f"{unnamed} events do not say who sent them, as nobody was asked then; {private} were sent by "
        "principals whose name is private, all of a tenant in one row.",
        "reads": f"Of {silent} of {count_text(tenants)} tenants no chain tells of a read: either nobody read, or "
        "privacy.log_reads of the service does not name them, and only the access log of each node tells.",
        "system": system,
    }


def _or_less(did: str, duration_s: float) -> str:
    """How long they did it; empty when that reads as no time at all."""
    return f"{did} {duration_text(duration_s)} or less" if round(duration_s * 1000) else ""


def _jobs(count: int, one: str = "was", many: str = "were") -> str:
    return f"{count_text(count)} {'job' if count == 1 else 'jobs'} {one if count == 1 else many}"
