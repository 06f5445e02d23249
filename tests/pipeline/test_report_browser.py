"""The page of a report in a real browser: nothing overflows, plots show marks within their frames, dark is dark."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, Page

from pipeline.report.page import Some, folded, largest, page, templates
from pipeline.report.tables import OUTCOMES, PERCENTILES, SPANS
from tests.browser import browsing

WIDTHS = (1280, 390)
LONGEST = ("tenant_id", "job_id", "status", "dc", "run_s", "accepted", "ended")
REASONS = ("status", "reason", "is_private", "jobs", "tenants", "ended", "tenant_id", "job_id")
NAME_PX_MAX = 240
ACTOR = {
    "tenant_id": "t" * 63,
    "actor": "oidc:" + "n" * 250,
    "is_private": False,
    "jobs_created": 3,
    "events": 9,
    **dict.fromkeys(("cancel", "complete", "fail", "timeout"), 1),
}
MEASURE = """() => {
  const style = getComputedStyle(document.body);
  const plots = [...document.querySelectorAll('svg.plot')].map(plot => {
    const box = plot.getBoundingClientRect(), marks = [...plot.querySelectorAll('.mark rect, path.line, circle')]
      .map(mark => mark.getBoundingClientRect());
    return {seen: marks.filter(m => m.width > 0 && m.height > 0).length,
      within: marks.every(m => m.left >= box.left - 1 && m.right <= box.right + 1 && m.top >= box.top - 1
        && m.bottom <= box.bottom + 1)};
  });
  const names = [...document.querySelectorAll('table bdi')].map(name => name.getBoundingClientRect().width);
  return {widest: Math.max(...names),
    wide: document.documentElement.scrollWidth, plots, ground: style.backgroundColor, ink: style.color,
    requests: performance.getEntriesByType('resource').map(each => each.name)
      .filter(name => !name.startsWith('data:'))};
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as browser:
        yield browser


@pytest.fixture(scope="module")
def opened(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Page:
    """A page on many tenants."""
    file = tmp_path_factory.mktemp("report") / "report.html"
    file.write_text(shown(300))
    page = browser.new_page()
    page.goto(file.as_uri())
    return page


def row(created: int, **keys: Any) -> dict[str, Any]:
    """A row of counts, with times."""
    counts = {name: created // (at + 2) for at, name in enumerate(OUTCOMES)}
    ended = sum(counts.values())
    rates = {"failure_rate": "failed", "cancellation_rate": "cancelled", "timeout_rate": "timed_out"}
    return {
        **keys,
        "created": created,
        "accepted": created,
        "ended": ended,
        **counts,
        **{name: counts[of] / ended if ended else None for name, of in rates.items()},
        **{f"{span}_jobs": ended for span in SPANS},
        **{f"{span}_p{each}_s": each * created / 9 for span in SPANS for each in PERCENTILES},
    }


def shown(tenants: int) -> str:
    """A page on many tenants with long names, in 60 windows."""
    windows = folded(
        [row(0 if at in range(20, 40) else 10 + at * 7 % 50, window=at * 86_400_000, open=at) for at in range(60)]
    )
    groups = [row(1000 - at % 900, tenant_id=f"tenant-{at}-" + "x" * 300, dc=f"dc-{at}") for at in range(tenants)]
    whole = row(3000)
    by_tenant: list[tuple[str | None, list[int]]] = [
        ("a" * 60, [each["created"] for each in windows]),
        (None, [1] * len(windows)),
    ]
    contents = {
        "windows": windows,
        "tenants": largest(groups, "tenant_id", "created"),
        "dcs": largest(groups, "dc", "ended"),
        "hours": [row(40 + at, hour=at) for at in range(24)],
        "by_tenant": by_tenant,
        "longest": [
            {**dict.fromkeys(LONGEST), "tenant_id": "acme", "job_id": f"job-{at}", "run_s": at * 7 % 10}
            for at in range(9)
        ],
        **{name: [] for name in ("stuck", "cancelled", "cancellers", "measures")},
        "reasons": Some(
            [{**dict.fromkeys(REASONS), "reason": "disk " * 60, "jobs": 5, "tenants": 1, "status": "FAILED"}], 40
        ),
        "labels": [("spec.team", Some([{**row(9), "value": "red", "is_private": False}], 1))],
        "who": {
            "actors": Some([dict(ACTOR) for _ in range(15)], 40),
            **{name: Some([], 0) for name in ("readers", "acts", "refusals")},
        },
        "ledger": Some([], tenants),
    }
    report = {
        "period": {"clock": "hlc", "from": "2026-01-01", "to": "2026-03-01", "window_ms": 86_400_000},
        "before": {
            "in_period": {**whole, "created": 1500, "failed": 100},
            "times_s": {span: {"p50": 9.0} for span in SPANS},
        },
        "console": "https://ledger.example",
        "in_period": whole,
        "rates": whole,
        "times_s": {span: {"jobs": 9, **{f"p{each}": each * 1.0 for each in PERCENTILES}} for span in SPANS},
        "at_end": {
            "open": 4,
            "stuck": 0,
            "known_to": "2026-03-01",
            "stuck_after_s": 3600.0,
            "stuck_after_is_asked": True,
        },
        "cancel_requests": 0,
        "who": {
            "events_without_actor": 0,
            "events_of_private_actors": 0,
            "reads": 0,
            "tenants_with_reads": 0,
            **dict.fromkeys(("acts", "refusals", "refusals_not_listed")),
        },
        "left_out": dict.fromkeys(
            ("private_values", "jobs_with_times_backwards", "jobs_without_time", "events_without_trace_time"), 0
        ),
        "read": {
            "place": "memory",
            "log_origins": ["log/1"],
            "tenants_asked": [f"tenant-{at}" for at in range(5)],
            "tenants": tenants,
            "entries": 9,
            "job_events": 9,
            "first_hlc": "1:0:n",
            "last_hlc": "2:0:n",
        },
        "made": {"at": "now", "version": "1", "command": "report", "verify": "tally pipeline verify " + "x" * 200},
    }
    return page(report, contents)


def luminance(colour: str) -> float:
    """Relative luminance of ``rgb(r, g, b)`` (WCAG 2.2)."""
    parts = [int(each) / 255 for each in re.findall(r"\d+", colour)[:3]]
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_the_page_whole_in_light_and_dark(opened: Page, scheme: Literal["light", "dark"]) -> None:
    opened.emulate_media(color_scheme=scheme)
    for width in WIDTHS:
        opened.set_viewport_size({"width": width, "height": 900})
        found = opened.evaluate(MEASURE)
        assert found["wide"] <= width, "the page is no wider than its window"
        assert found["widest"] <= NAME_PX_MAX, "a long name leaves room for the numbers beside it"
        assert len(found["plots"]) == 7
        assert all(plot["seen"] and plot["within"] for plot in found["plots"]), found["plots"]
        assert found["requests"] == []
        light, dark = sorted((luminance(found["ground"]), luminance(found["ink"])), reverse=True)
        assert (light + 0.05) / (dark + 0.05) > 7
        assert (luminance(found["ground"]) < 0.1) is (scheme == "dark")


def test_the_printed_page_is_small_and_its_outcomes_differ_without_colour(opened: Page) -> None:
    opened.emulate_media(color_scheme="light")
    printed = opened.pdf(tagged=True)
    assert printed.startswith(b"%PDF")
    assert len(printed) < 1_000_000
    on_paper = opened.content().partition("@media print")[2]
    fills = re.findall(r"--(?:completed|timed-out|failed): #(\w\w)(\w\w)(\w\w)", on_paper)
    grey = sorted([1.0, *(luminance("rgb({}, {}, {})".format(*(int(part, 16) for part in each))) for each in fills)])
    assert len(grey) == 4
    assert all((lighter + 0.05) / (darker + 0.05) > 1.5 for darker, lighter in pairwise(grey)), grey


def test_a_page_is_bounded_allows_no_script_but_its_own_and_loads_nothing() -> None:
    text = shown(5000)
    assert len(text) < 300_000
    assert "4,980 others" in text
    assert "default-src 'none'" in text
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    (allowed,) = re.findall(r"script-src 'sha256-([^']+)'", text)
    assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() == allowed
    loaded = re.findall(
        r"(?:src|href)=[\"'](?!#|data:)([^\"']*)", text.replace("xmlns='http://www.w3.org/2000/svg'", "")
    )
    assert {*loaded} == {f"https://ledger.example/console#/job/acme/job-{at}" for at in range(9)}, "links of jobs alone"


def test_the_page_says_whose_it_is_how_it_was_before_and_folds_what_is_empty() -> None:
    text = shown(9)
    assert "<title>Job report of tenant-0, tenant-1, tenant-2 and 2 more, 2026-01-01 to 2026-03-01</title>" in text
    assert "job report of <bdi>tenant-0, tenant-1, tenant-2 and 2 more</bdi> · <bdi>log/1</bdi>" in text
    assert "before: 1,500, +100 %" in text
    assert "before: 100, now 10 times as many" in text
    assert "20 windows in which nothing happened" in text
    assert text.count('<rect class="gap"') == 6, "one in each plot over time"
    assert "until 1970-02-10 00:00:00 UTC\nnothing happened, 20 jobs open" in text


def test_a_table_sorts_by_the_heading_that_is_clicked_and_says_so(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text(shown(30))
    opened = browser.new_page()
    opened.goto((tmp_path / "report.html").as_uri())
    longest = opened.locator("#jobs table").first
    times = longest.locator("tbody td:nth-child(5)")
    for way, expected in (("descending", sorted), ("ascending", sorted)):
        longest.get_by_role("button", name="run time").press("Enter")
        assert longest.locator("th[aria-sort]").get_attribute("aria-sort") == way
        shown_s = [float(text.split()[0]) for text in times.all_inner_texts()]
        assert shown_s == expected(shown_s, reverse=way == "descending")
    tenants = opened.locator("#groups table").first
    tenants.get_by_role("button", name="created").click()
    tenants.get_by_role("button", name="created").click()
    assert tenants.locator("tbody tr:last-child th").inner_text() == "10 others", "which stay below"
    opened.close()


@pytest.mark.parametrize(
    ("queue_s", "run_s", "told"),
    [
        (2.0, 235.0, "accepted waited 2 s or less, and half of the 5 that then ended ran 3 min 55 s or less."),
        (
            0.0,
            0.001,
            "Half of the 7 that were accepted did not wait, and half of the 5 that then ended ran 1 ms or less.",
        ),
        (0.0004, 0.0, "did not wait, and half of the 5 that then ended were done at once."),
    ],
)
def test_times_that_read_as_none_are_said_in_words(queue_s: float, run_s: float, told: str) -> None:
    report = {
        "in_period": {"created": 1, "ended": 0},
        "rates": {},
        "times_s": {"queue": {"jobs": 7, "p50": queue_s}, "run": {"jobs": 5, "p50": run_s}},
        "at_end": {"stuck": 0},
    }
    words = templates({"clock": "hlc", "window_ms": 1}).get_template("words.j2").module
    assert str(words.lead(report)).endswith(told)
