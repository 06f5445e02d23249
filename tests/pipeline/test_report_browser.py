"""The page of a report in a real browser: nothing overflows, plots show marks within their frames, dark is dark."""

from __future__ import annotations

import html
import json
import re
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pipeline.report.page.build import page
from pipeline.report.page.contents import Contents, Some, largest
from pipeline.report.page.words import lead
from pipeline.report.summaries import OUTCOMES, PERCENTILES, SPANS

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--dump-dom", "--virtual-time-budget=5000"),
)
WIDTHS = (1280, 400)
NAME_PX_MAX = 240
ACTOR = {
    "tenant_id": "t" * 63,
    "actor": "oidc:" + "n" * 250,
    "is_private": False,
    "jobs_created": 3,
    "events": 9,
    **dict.fromkeys(("cancel", "complete", "fail", "timeout"), 1),
}
MEASURE = """
const told = [...document.querySelectorAll('iframe')].map(frame => {
  const of = frame.contentDocument, style = frame.contentWindow.getComputedStyle(of.body);
  const plots = [...of.querySelectorAll('svg.plot')].map(plot => {
    const box = plot.getBoundingClientRect(), marks = [...plot.querySelectorAll('.mark rect, path.line, circle')]
      .map(mark => mark.getBoundingClientRect());
    return {seen: marks.filter(m => m.width > 0 && m.height > 0).length,
      within: marks.every(m => m.left >= box.left - 1 && m.right <= box.right + 1 && m.top >= box.top - 1
        && m.bottom <= box.bottom + 1)};
  });
  const names = [...of.querySelectorAll('table bdi')].map(name => name.getBoundingClientRect().width);
  return {widest: Math.max(...names),
    wide: of.documentElement.scrollWidth, plots, ground: style.backgroundColor, ink: style.color,
    requests: frame.contentWindow.performance.getEntriesByType('resource').map(each => each.name)
      .filter(name => !name.startsWith('data:'))};
});
document.body.innerHTML = '<pre id="told"></pre>'; document.getElementById('told').textContent = JSON.stringify(told);
"""


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
    windows = [row(10 + at * 7 % 50, window=at * 86_400_000) for at in range(60)]
    groups = [row(1000 - at % 900, tenant_id=f"tenant-{at}-" + "x" * 300, dc=f"dc-{at}") for at in range(tenants)]
    whole = row(3000)
    by_tenant: list[tuple[str | None, list[int]]] = [
        ("a" * 60, [each["created"] for each in windows]),
        (None, [1] * 60),
    ]
    contents = Contents(
        windows,
        largest(groups, "tenant_id", "created"),
        largest(groups, "dc", "ended"),
        [row(40 + at, hour=at) for at in range(24)],
        by_tenant,
        *([], [], [], []),
        {
            "actors": Some([dict(ACTOR) for _ in range(15)], 40),
            **{name: Some([], 0) for name in ("readers", "acts", "refusals")},
        },
        *([], tenants, []),
    )
    report = {
        "period": {"clock": "hlc", "from": "2026-01-01", "to": "2026-03-01", "window_ms": 86_400_000},
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
            "tenants_asked": [],
            "tenants": tenants,
            "entries": 9,
            "job_events": 9,
            "first_hlc": "1:0:n",
            "last_hlc": "2:0:n",
        },
        "made": {"at": "now", "version": "1", "command": "report", "verify": "tally pipeline verify " + "x" * 200},
    }
    return page(report, contents)


def seen(folder: Path, *flags: str) -> list[dict[str, Any]]:
    """What a browser makes of the page at each width. The copy that is measured lacks the policy against scripts."""
    text = html.escape(re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", shown(300)))
    frames = "".join(f'<iframe width="{width}" height="900" srcdoc="{text}"></iframe>' for width in WIDTHS)
    file = folder / "frames.html"
    file.write_text(f"<meta charset=utf-8><body>{frames}<script>window.onload = () => {{{MEASURE}}}</script>")
    command = ["chromium", *FLAGS, *flags, f"--user-data-dir={folder / 'profile'}", file.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    told = re.search(r'<pre id="told">(.*?)</pre>', dom, re.DOTALL)
    assert told is not None, dom[:500]
    found: list[dict[str, Any]] = json.loads(html.unescape(told[1]))
    return found


def luminance(colour: str) -> float:
    """Relative luminance of ``rgb(r, g, b)`` (WCAG 2.2)."""
    parts = [int(each) / 255 for each in re.findall(r"\d+", colour)[:3]]
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize(("scheme", "is_dark"), [("1", False), ("0", True)])
def test_a_browser_shows_the_page_whole_in_light_and_dark(tmp_path: Path, scheme: str, is_dark: bool) -> None:
    for width, found in zip(WIDTHS, seen(tmp_path, f"--blink-settings=preferredColorScheme={scheme}"), strict=True):
        assert found["wide"] <= width, "the page is no wider than its window"
        assert found["widest"] <= NAME_PX_MAX, "a long name leaves room for the numbers beside it"
        assert len(found["plots"]) == 6
        assert all(plot["seen"] and plot["within"] for plot in found["plots"]), found["plots"]
        assert found["requests"] == []
        light, dark = sorted((luminance(found["ground"]), luminance(found["ink"])), reverse=True)
        assert (light + 0.05) / (dark + 0.05) > 7
        assert (luminance(found["ground"]) < 0.1) is is_dark


def test_the_printed_page_is_small_and_its_outcomes_differ_without_colour(tmp_path: Path) -> None:
    page_file, printed = tmp_path / "report.html", tmp_path / "report.pdf"
    page_file.write_text(shown(300))
    flags = [flag for flag in FLAGS if flag != "--dump-dom"]
    command = ["chromium", *flags, f"--user-data-dir={tmp_path / 'profile'}", f"--print-to-pdf={printed}"]
    subprocess.run([*command, page_file.as_uri()], capture_output=True, timeout=120, check=True)

    assert printed.read_bytes().startswith(b"%PDF")
    assert printed.stat().st_size < 1_000_000
    on_paper = page_file.read_text().partition("@media print")[2]
    fills = re.findall(r"--(?:completed|timed-out|failed): #(\w\w)(\w\w)(\w\w)", on_paper)
    grey = sorted([1.0, *(luminance("rgb({}, {}, {})".format(*(int(part, 16) for part in each))) for each in fills)])
    assert len(grey) == 4
    assert all((lighter + 0.05) / (darker + 0.05) > 1.5 for darker, lighter in pairwise(grey)), grey


def test_a_page_is_bounded_allows_no_script_and_names_nothing_outside() -> None:
    text = shown(5000)
    assert len(text) < 300_000
    assert "4,980 others" in text
    assert "default-src 'none'" in text
    assert "<script" not in text
    assert not re.findall(r"(?:src|href)=[\"'](?!#|data:)", text.replace("xmlns='http://www.w3.org/2000/svg'", ""))


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
    assert lead(report).endswith(told)
