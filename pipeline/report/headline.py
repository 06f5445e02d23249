"""The headline numbers of a report: ``report.json``, and what ``--json`` prints. Plain ASCII, whatever a name holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ledger.machines.jobs import STATUSES
from pipeline.report.folder import rows_of
from pipeline.report.period import Clock, Period
from pipeline.report.summaries import OUTCOMES, PERCENTILES, SPANS
from pipeline.report.texts import moment_text

if TYPE_CHECKING:
    from pipeline.report.make import Made

FORMAT: Final = "tallystick.report.v1"


def report(
    period: Period,
    made: Made,
    facts: dict[str, Any],
    numbers: dict[str, Any],
    who: dict[str, Any],
    last: dict[str, Any] | None,
    folder: Path,
) -> dict[str, Any]:
    """The headline numbers of the report whose tables are in ``folder``; ``who`` are those of who did what, ``last``
    counts of the period before, where that is known."""
    whole = rows_of(folder, "all")[0]
    made_at = made.made_at.isoformat(timespec="seconds").replace("+00:00", "Z")
    return {
        "format": FORMAT,
        "period": {
            "clock": str(period.clock),
            "from": moment_text(period.start_ms, period.clock),
            "to": moment_text(period.end_ms, period.clock),
            "start_ms": period.start_ms,
            "end_ms": period.end_ms,
            "window_ms": period.window_ms,
            "first_window_ms": period.first_window_ms,
        },
        **_counted(whole),
        "before": None if last is None else _counted(last),
        "at_end": {
            "jobs": numbers["jobs"],
            "open": numbers["open"],
            "stuck": numbers["stuck"],
            "known_to": moment_text(period.known_ms, period.clock),
            "known_to_ms": period.known_ms,
            "stuck_after_s": numbers["stuck_after_ms"] / 1000,
            "stuck_after_is_asked": numbers["stuck_after_is_asked"],
            "by_status": {status: numbers[f"status_{status}"] for status in STATUSES},
        },
        "cancel_requests": numbers["cancel_requests"],
        "who": who,
        "left_out": {
            "private_values": facts["private_values"],
            "jobs_with_times_backwards": numbers["backwards"],
            "jobs_without_time": numbers["undated"],
            "events_without_trace_time": (
                facts["job_events"] - facts["trace_events"] if period.clock is Clock.TRACE else 0
            ),
        },
        "read": {
            "place": made.place,
            "log_origins": made.log_origins,
            "tenants_asked": made.tenants,
            "tenants": facts["tenants"],
            "entries": facts["entries"],
            "job_events": facts["job_events"],
            "first_hlc": facts["first_hlc"],
            "last_hlc": facts["last_hlc"],
        },
        "made": {"at": made_at, "version": made.version, "command": made.command, "verify": made.verify_command},
        "by": [*made.by],
        "console": made.console,
    }


def _counted(whole: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "in_period": {name: whole[name] for name in ("created", "accepted", "ended", *OUTCOMES)},
        "rates": {name: whole[name] for name in ("failure_rate", "cancellation_rate", "timeout_rate")},
        "times_s": {
            span: {"jobs": whole[f"{span}_jobs"], **{f"p{each}": whole[f"{span}_p{each}_s"] for each in PERCENTILES}}
            for span in SPANS
        },
    }


def write(report: dict[str, Any], folder: Path) -> None:
    """Write ``report.json``."""
    (folder / "report.json").write_text(text(report) + "\n")


def text(report: dict[str, Any]) -> str:
    """``report`` as JSON that a terminal shows as it is."""
    return json.dumps(report, indent=2, ensure_ascii=True)
