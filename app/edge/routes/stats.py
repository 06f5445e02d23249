"""``POST /v1/stats``: reports about running jobs, one JSON object or one a line.

Fire and forget: the answer reports queued lines, not stored ones. The lines of a request take four steps:

    1. it is admitted            later, when more requests come than the loop has time for beside its jobs
    2. its body is dropped       unread, when more bodies come than there is room or time to check
    3. its lines are sampled     before they are looked at, the fewer the fuller the queue or the shorter the time
    4. all that are kept are checked before the first is queued, and one that is wrong refuses the request

    1 <= lines <= LINES_MAX        len(line) <= LINE_BYTES_MAX        len(body) <= BODY_BYTES_MAX
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from app.edge.accepted import AcceptedDep, Service
from app.edge.answers import JSON_MEDIA_TYPE, json_answer
from app.edge.forms.body import NDJSON_MEDIA_TYPE, read_body
from app.edge.forms.requests import STATS_REPORT
from app.edge.forms.validation import LineModel, at_line
from app.edge.routing import PROBLEM_RESPONSE, LeanRoute, answered
from app.runtime.answers.jobs import StatsAnswer
from app.runtime.metrics import Metrics
from app.runtime.settings.config import Settings
from app.runtime.state.node import Node
from app.write.stats import Chunk, StatsIntake
from ledger import rfc3339
from ledger.errors import ClockSkewError, InvalidInputError

router = APIRouter(route_class=LeanRoute, tags=["stats"], responses=PROBLEM_RESPONSE)

LINES_MAX = 10_000
"""Most reports in one request."""
LINE_BYTES_MAX = 8192
"""Longest report."""
BODY_BYTES_MAX = 1 << 20
"""Longest request, where ``http.body_bytes_max`` allows as much."""
LINES_PER_TURN = 50
"""Lines checked and written out before others get as long as that took."""

_REPORTS = LineModel("report", STATS_REPORT, LINES_MAX)
_REPORT = {"$ref": "#/components/schemas/StatsReport"}


@router.post(
    "/v1/stats",
    status_code=202,
    responses=answered(StatsAnswer, 202),
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                JSON_MEDIA_TYPE: {"schema": _REPORT},
                NDJSON_MEDIA_TYPE: {
                    "schema": {"type": "string", "format": "binary", "description": "One StatsReport a line."},
                    "x-item-schema": _REPORT,
                },
            },
        }
    },
)
async def report_stats(
    request: Request,
    accepted: AcceptedDep,
    node: Service[Node],
    settings: Service[Settings],
    intake: Service[StatsIntake],
    metrics: Service[Metrics],
) -> Response:
    """Report how jobs are doing. Never in the ledger: counted, sampled under pressure, kept for a while in files."""
    node.check_accepting()
    await intake.admit()
    one = request.headers.get("content-type", "").partition(";")[0].strip().lower() == JSON_MEDIA_TYPE
    body = await read_body(
        request, JSON_MEDIA_TYPE if one else NDJSON_MEDIA_TYPE, min(BODY_BYTES_MAX, settings.http.body_bytes_max)
    )
    async with intake.turn(len(body)) as is_mine:
        if not is_mine:
            dropped = 1 if one else body.count(b"\n") + (not body.endswith(b"\n"))
            metrics.count("stats_dropped", dropped, "busy")
            return json_answer({"accepted": 0, "dropped": dropped, "sample_rate": 0.0}, 202)
        with intake.checking.charged():
            lines = [body] if one else _REPORTS.split(body)
        # Reports of one request are of few tenants.
        answer = await take(lines, one, settings.hlc.max_clock_skew_ms, cache(accepted.check_tenant), intake, metrics)
    return json_answer(answer, 202)


async def take(
    lines: Sequence[bytes],
    one: bool,
    max_skew_ms: int,
    check: Callable[[str], None],
    intake: StatsIntake,
    metrics: Metrics,
) -> dict[str, float]:
    """Sample ``lines``, check the sampled ones, and queue them with their weight; ``check`` refuses tenants that the
    caller may not report about.

    Raises:
        InvalidInputError: the first invalid line; with its number unless it is the only ``one``.
        ClockSkewError: the time of a report lies too far ahead.
    """
    weight, now_ms = intake.weight(), time.time_ns() // 1_000_000
    numbers = intake.sample(range(1, len(lines) + 1), weight)
    chunks: list[Chunk] = []
    for first in range(0, len(numbers), LINES_PER_TURN):
        turn = numbers[first : first + LINES_PER_TURN]
        kept = [lines[number - 1] for number in turn]
        began_s = time.perf_counter()
        with intake.checking.charged():
            chunks.append(_checked(kept, [None] if one else turn, weight, now_ms, max_skew_ms, check))
        if first + len(turn) < len(numbers):
            # Others get as long as that took.
            await asyncio.sleep(time.perf_counter() - began_s)
    accepted = sum(chunk.lines for chunk in chunks if intake.offer(chunk))
    metrics.count("stats_reports", len(lines))
    metrics.count("stats_dropped", len(lines) - len(numbers), "sampled")
    metrics.count("stats_dropped", len(numbers) - accepted, "full")
    return {"accepted": accepted, "dropped": len(lines) - accepted, "sample_rate": 1 / weight}


def _checked(
    lines: Sequence[bytes],
    numbers: Sequence[int | None],
    weight: int,
    now_ms: int,
    max_skew_ms: int,
    check: Callable[[str], None],
) -> Chunk:
    """The reports in ``lines``, which have these numbers, as they are written: each with its times and its weight."""
    data = bytearray()
    for number, report in zip(numbers, _REPORTS.check(lines, numbers, LINE_BYTES_MAX), strict=True):
        check(report["tenant_id"])
        with at_line(number):
            report["time"] = _time_of(report, now_ms, max_skew_ms)
        data += orjson.dumps({**report, "received": rfc3339.text_of(now_ms), "weight": weight}) + b"\n"
    return Chunk(bytes(data), len(lines))


def _time_of(report: dict[str, Any], now_ms: int, max_skew_ms: int) -> str:
    """The time of ``report``, given in one of two ways, else the current time; removes ``time_ms``.

    Raises:
        InvalidInputError: both are given, or the calendar has no such time.
        ClockSkewError: too far ahead: it would end windows for which others still report.
    """
    given_ms, text = report.pop("time_ms", None), report.get("time")
    if text is not None and given_ms is not None:
        raise InvalidInputError("time_ms: give it or time, not both", ("time_ms",))
    if text is not None:
        try:
            given_ms, _ = rfc3339.milliseconds_of(text)
        except InvalidInputError as error:
            raise InvalidInputError(f"time: {error}", ("time",)) from None
    elif given_ms is None:
        given_ms = now_ms
    if given_ms < 0:
        raise InvalidInputError("time: lies before 1970", ("time",))
    if given_ms > now_ms + max_skew_ms:
        raise ClockSkewError(
            f"the time of the report is {given_ms - now_ms} ms ahead; at most {max_skew_ms} ms are taken"
        )
    text = rfc3339.text_of(given_ms)
    assert text is not None, "it is not far from now"
    return text
