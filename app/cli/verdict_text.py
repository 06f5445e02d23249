"""What both verifying commands read and show alike: a kept checkpoint, verdicts, the first break."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from app.cli.outcome import out

CHECKPOINT_BYTES_MAX = 1 << 20
"""A kept checkpoint is read so far."""
_COLOURS = {"ok": "green", "not_checked": "yellow", "unknown_key": "magenta", "broken": "red"}


def read_checkpoint(path: Path) -> str:
    """The text of a kept checkpoint; bytes that are no text do not open as one.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        return file.read(CHECKPOINT_BYTES_MAX).decode("utf-8", "replace")


def print_verdicts(verdicts: Mapping[str, str]) -> None:
    """One row for each aspect that was checked."""
    table = Table("checked", "verdict")
    for aspect, result in verdicts.items():
        table.add_row(aspect, f"[{_COLOURS[result]}]{result}[/]")
    out.print(table)


def print_first_break(first: Mapping[str, Any] | None) -> None:
    """Where the first break is, and what stands there; nothing when there is none."""
    if first is None:
        return
    place = f"seq {first['seq']}, " if first["seq"] else ""
    out.print(f"[bold red]first break:[/] {place}{first['kind']}: {escape(first['detail'])}")
    if (first["expected"], first["actual"]) != (None, None):
        out.print(f"  expected {first['expected']}\n  actual   {first['actual']}", markup=False)
