"""The report on the jobs of a tenant, as one page: the figures of ``GET /v1/jobs/summary``, grouped in several ways.

It has the style, script and words of the report that Spark makes (``pipeline.page``), and fewer tables: figures hold no
single jobs, queue times or senders.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from pipeline.page import OUTCOME_LABELS, environment, inline

_POLICY: Final = (
    "default-src 'none'; style-src 'sha256-{style_hash}'; script-src 'sha256-{script_hash}'; base-uri 'none'; "
    "form-action 'none'"
)
_TITLES: Final = {"hour": "By hour", "day": "By day", "dc": "By data centre", "error": "By error"}
_HEADINGS: Final = {"hour": "hour, UTC", "day": "day, UTC", "dc": "data centre", "error": "error"}
_OF_TIME: Final = {"hour": len("2026-11-30T13:45"), "day": len("2026-11-30")}
"""Characters of a time that tell one hour or day from another."""


class ReportFigures(NamedTuple):
    """Summaries of the same jobs, as ``GET /v1/jobs/summary`` shows them, and the number of entries that they follow
    from."""

    summaries: Sequence[Mapping[str, Any]]
    entries: int


class Source(NamedTuple):
    """Where and when a report is made."""

    log_origin: str
    node_id: str
    version: str
    made_at: str


def spark_options(tenant_id: str, since: str | None, until: str | None, by: Sequence[str]) -> list[str]:
    """What ``tally pipeline report`` is to report on: the same jobs."""
    named = [("-t", tenant_id), ("--from", since), ("--to", until), *(("--by", field) for field in by)]
    return [part for name, value in named if value is not None for part in (name, value)]


def spark_command(options: Sequence[str]) -> str:
    """The command by which Spark makes a report with these ``spark_options``."""
    return shlex.join(["tally", "pipeline", "report", "--dest", f"reports/{options[1]}", *options])


def to_html(figures: ReportFigures, source: Source) -> str:
    """The page on ``figures``."""
    first = figures.summaries[0]
    fields = [each["by"] for each in figures.summaries if each["by"] not in _TITLES]
    form = inline()
    return (
        environment(Path(__file__).parent)
        .get_template("job_report.html.j2")
        .render(
            tenant_id=first["tenant_id"],
            period=_period(first["since"], first["until"]),
            all=_row(first["all"]),
            tables=[_table(each) for each in figures.summaries],
            consistency=first["consistency"],
            entries=figures.entries,
            source=source,
            command=spark_command(spark_options(first["tenant_id"], first["since"], first["until"], fields)),
            policy=_POLICY.format(**form),
            **form,
        )
    )


def _period(since: str | None, until: str | None) -> str:
    begin, end = (None if each is None else each[: _OF_TIME["hour"]].replace("T", " ") for each in (since, until))
    if begin is None:
        return "All jobs" if end is None else f"Up to {end}"
    return f"From {begin} on" if end is None else f"{begin} to {end}"


def _table(summary: Mapping[str, Any]) -> dict[str, Any]:
    by, left_out = summary["by"], summary["groups_left_out"]
    rows = [_row(group) | {"value": group["value"] and _value(by, group["value"])} for group in summary["groups"]]
    order = "newest first" if by in _OF_TIME else "most jobs first"
    return {
        "title": _TITLES.get(by, f"By {by}"),
        "caption": f"Jobs created, {order}",
        "heading": _HEADINGS.get(by, by),
        "rows": rows,
        "left_out": left_out,
        "other": summary["other"],
    }


def _value(by: str, value: str) -> str:
    return value[: _OF_TIME[by]].replace("T", " ") if by in _OF_TIME else value


def _row(counted: Mapping[str, Any]) -> dict[str, Any]:
    """Jobs of one group: by outcome, ``open``, and run times in seconds."""
    statuses, times = counted["statuses"], counted["run_times"] or {}
    ended = {name: statuses.get(name.upper(), 0) for name in OUTCOME_LABELS}
    return {
        "jobs": counted["jobs"],
        "by_trace_time": counted["by_trace_time"],
        **ended,
        "ended": sum(ended.values()),
        "open": counted["jobs"] - sum(ended.values()),
        "by_status": {name.lower(): jobs for name, jobs in statuses.items() if name.lower() not in ended},
        "run_jobs": times.get("jobs", 0),
        **{f"{name}_s": times[f"{name}_ms"] / 1000 if times else None for name in ("p50", "p95", "max")},
    }
