"""What verifying commands show alike: verdicts, what was found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.markup import escape
from rich.table import Table

from terminal.outcome import out

_COLOURS: Final = {"ok": "green", "not_checked": "yellow", "unknown_key": "magenta", "broken": "red"}


def coloured(verdict: str) -> str:
    """The verdict on one aspect as markup."""
    return f"[{_COLOURS[verdict]}]{verdict}[/]"


def print_verdicts(verdicts: Mapping[str, str]) -> None:
    """One row for each aspect that was checked."""
    table = Table("checked", "verdict")
    for aspect, result in verdicts.items():
        table.add_row(aspect, coloured(result))
    out.print(table)


def print_findings(
    verdict: Mapping[str, Any], memory: Mapping[str, Any] | None, not_checked: Sequence[str] = ()
) -> None:
    """What was compared and said from outside, what was left out, and where the first break is."""
    if memory is not None:
        out.print(f"memory: {memory['says']}", markup=False)
    for anchor in verdict["anchors"]:
        said = f"anchored to seq {anchor['to_seq']} by {anchor['kind']} {anchor['by']} at {anchor['time']}: "
        out.print(said + " ".join(filter(None, (anchor["status"], anchor["detail"]))), markup=False)
    for text in not_checked:
        out.print(f"not checked: {text}", markup=False)
    first = verdict["first_break"]
    if first is None:
        return
    place = f"seq {first['seq']}, " if first["seq"] else ""
    out.print(f"[bold red]first break:[/] {place}{first['kind']}: {escape(first['detail'])}")
    if (first["expected"], first["actual"]) != (None, None):
        out.print(f"  expected {first['expected']}\n  actual   {first['actual']}", markup=False)
