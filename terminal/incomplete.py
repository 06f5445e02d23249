"""Why a verification that found nothing wrong is incomplete, in one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ledger.exit_code import OWN_SOURCES, unchecked, without_jobs
from terminal.counted import counted
from terminal.outcome import err


def print_why_incomplete(verdicts: Sequence[Mapping[str, Any]], *, is_any_key: bool) -> None:
    """Say on standard error what ``verdicts`` leave unchecked; ``is_any_key`` says whether keys were named."""
    err.print(f"exit code 3, not everything is checked: {'; '.join(_reasons(verdicts, is_any_key))}", markup=False)


def _reasons(verdicts: Sequence[Mapping[str, Any]], is_any_key: bool) -> list[str]:
    left = [unchecked(_as_judged(verdict)) for verdict in verdicts if "error" not in verdict]
    unsigned = [each.unsigned_entries for each in left if each.unsigned_entries]
    late = [each.entries_before for each in left if each.entries_before]
    aspects = dict.fromkeys(aspect for each in left for aspect in each.aspects)
    reasons = []
    if not is_any_key:
        reasons.append("no --keys are given, so no signature is judged")
    elif aspects:
        reasons.append(f"not checked: {', '.join(aspects)}")
    for found, where in ((unsigned, "that no snapshot signs yet"), (late, "before the first one here")):
        if found:
            entries, ledgers = counted(sum(found), "entry", "entries"), counted(len(found), "ledger")
            reasons.append(f"{entries} of {ledgers} {where}")
    return reasons


def _as_judged(verdict: Mapping[str, Any]) -> Mapping[str, Any]:
    """The verdict object as its exit code was found: archives and bundles hold no job states."""
    return without_jobs(verdict) if {*OWN_SOURCES} & {*verdict["verdicts"]} else verdict
