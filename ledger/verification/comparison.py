"""Verdict objects with what comparing a checkpoint came to, where roots or proofs were compared and not entries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ledger.verification.verdict import KINDS

_GRAVER_LAST: Final = ("not_checked", "ok", "unknown_key", "broken")
"""Verdicts on checkpoints by what remains when several were compared."""


def rollback(size: int, detail: str, expected: str, actual: str | None) -> dict[str, Any]:
    """The break that the first ``size`` entries are not those of a checkpoint; roots are hex."""
    return {"seq": size, "kind": "rollback", "detail": detail, "expected": expected, "actual": actual}


def with_checkpoint(
    verdict: Mapping[str, Any], outcome: str, source: str, found_break: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """``verdict`` with what the comparison with a checkpoint that ``source`` holds came to; ``found_break`` is the one
    it found. What was broken before stays broken.
    """
    found = dict(verdict)
    verdicts = found["verdicts"] = dict(verdict["verdicts"])
    verdicts["checkpoint"] = max(verdicts["checkpoint"], outcome, key=_GRAVER_LAST.index)
    found["valid"] = not {"broken", "unknown_key"} & set(verdicts.values())
    if outcome != "unknown_key":
        found["compared_with"] = ", ".join(filter(None, (verdict["compared_with"], source)))
    return found if found_break is None else with_break(found, found_break)


def with_break(verdict: Mapping[str, Any], found_break: Mapping[str, Any]) -> dict[str, Any]:
    """``verdict`` with one more break, of the aspect ``checkpoint``."""
    breaks = [item for item in (verdict["first_break"], found_break) if item is not None]
    first = min(breaks, key=_order)
    verdicts = {**verdict["verdicts"], "checkpoint": "broken"}
    counts = {**verdict.get("breaks", {})}
    counts[found_break["kind"]] = counts.get(found_break["kind"], 0) + 1
    return {**verdict, "verdicts": verdicts, "valid": False, "first_break": first, "breaks": counts}


def _order(found_break: Mapping[str, Any]) -> tuple[int, int]:
    """Lowest seq first; breaks of the place itself, which no kind of a chain's names, before those of its entries."""
    kind = found_break["kind"]
    return found_break["seq"], KINDS.index(kind) if kind in KINDS else -1
