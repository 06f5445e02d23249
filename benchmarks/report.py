"""What comes out: ``latest.json`` for programs, a table for people."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.row import Outcome, Row

Results = Mapping[str, object]
"""The document of ``latest.json``."""


def document(
    commit: str, machine: Mapping[str, object], fsync_p50_us: float, found: Sequence[tuple[Row, Outcome]]
) -> dict[str, object]:
    """The results in the form that the interfaces fix."""
    return {
        "commit": commit,
        "machine": dict(machine),
        "fsync_p50_us": fsync_p50_us,
        "rows": [
            {
                "name": row.name,
                "ours": _rounded(outcome.ours),
                "against": _rounded(outcome.against),
                "unit": row.unit,
                "ratio": _rounded(outcome.ratio),
                "floor": row.floor,
                "runs": outcome.runs,
                "what": f"{row.what} ({outcome.note})" if outcome.note else row.what,
            }
            for row, outcome in found
        ],
    }


def store(path: Path, results: Results) -> None:
    """Write ``results``, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".new")
    unfinished.write_text(json.dumps(results, indent=2) + "\n")
    unfinished.rename(path)


def table(found: Sequence[tuple[Row, Outcome]], failed: Collection[str]) -> Table:
    """Both raw figures, ratio and floor of every row, and by how much a floor was missed."""
    shown = Table(box=box.SIMPLE_HEAD)
    for heading in ("row", "ours", "against", "unit", "ratio", "floor", "verdict"):
        is_number = heading in ("ours", "against", "ratio", "floor")
        shown.add_column(heading, justify="right" if is_number else "left", no_wrap=heading != "verdict")
    for row, outcome in found:
        shown.add_row(
            row.name,
            f"{outcome.ours:,.4g}" if outcome.ours < 1000 else f"{outcome.ours:,.0f}",
            f"{outcome.against:,.4g}" if outcome.against < 1000 else f"{outcome.against:,.0f}",
            row.unit,
            f"{outcome.ratio:.2f}",
            f"{row.floor:g}",
            verdict(row, outcome),
        )
    for name in failed:
        shown.add_row(name, "", "", "", "", "", "[bold red]failed[/]")
    return shown


def verdict(row: Row, outcome: Outcome) -> str:
    """Whether the floor was reached, and if not, how far below it the ratio is."""
    if outcome.ratio >= row.floor:
        return "[green]holds[/]"
    return f"[bold yellow]missed by {(1 - outcome.ratio / row.floor):.0%}[/]"


def notes(console: Console, found: Sequence[tuple[Row, Outcome]], failed: Mapping[str, str]) -> None:
    """What each row compares and what else was seen, or why it failed."""
    for row, outcome in found:
        console.print(f"[bold]{row.name}[/]: ", end="", highlight=False)
        text = f"{row.what} ({outcome.note})" if outcome.note else row.what
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    for name, reason in failed.items():
        console.print(f"[bold]{name}[/] [bold red]failed[/]: ", end="", highlight=False)
        console.print(reason, markup=False, highlight=False, soft_wrap=True)


def _rounded(value: float) -> float:
    """Six significant digits: more would pretend."""
    return float(f"{value:.6g}")
