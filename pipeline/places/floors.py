"""Where the chains of a database begin: what left each with a prune, by its own entries.

The rules are those of the service (:mod:`ledger.verification.floor_check`). Entries up to a floor may still be stored
while they are removed; a reader passes over them, except to fold jobs that are compared with the job table.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

from ledger.facts.events import SYSTEM_TENANT
from ledger.machines.retention import Floor
from ledger.verification.floor_check import floor_of, from_floor
from ledger.verification.left_index import IndexSource, index_of_left
from ledger.verification.range_fold import ChainBounds
from ledger.verification.verdict import Break, Findings, Found
from pipeline.arrow import Row
from signing import retention_statement
from signing.keys import Keyring

Result = TypeVar("Result")


class FoundFloor(NamedTuple):
    """What the entries about retention of one chain say of its beginning."""

    floor: Floor | None
    found: Found
    breaks: tuple[Break, ...]


NOWHERE = FoundFloor(None, Found(), ())


def floors_of(rows: Iterable[Row], origin: str | None, keyring: Keyring | None) -> dict[str, FoundFloor]:
    """The floors of chains, by tenant. ``rows`` are the entries about retention, each after its tenant, by tenant and
    seq. Without ``keyring`` no statement is judged, and all count."""
    found: dict[str, FoundFloor] = {}
    for tenant_id, of_tenant in groupby(rows, key=lambda row: row[0]):
        if tenant_id == SYSTEM_TENANT:
            continue
        breaks: list[Break] = []
        findings = Findings(breaks.append)
        log = "" if origin is None else f"{origin}/{tenant_id}"
        floor = floor_of([row[1:] for row in of_tenant], partial(retention_statement.judge, log, keyring), findings)
        found[tenant_id] = FoundFloor(floor, findings.found, tuple(breaks))
    return found


def begun_at(
    ends: ChainBounds,
    at: FoundFloor,
    read: Callable[[int, int, int], Mapping[int, bytes]],
    sources: Sequence[IndexSource],
) -> ChainBounds:
    """``ends`` of a chain that begins at a floor: its tiles are from ``read``, its index from one of ``sources``."""
    breaks = [*at.breaks]
    findings = Findings(breaks.append)
    findings.merge(at.found)

    async def tiles(level: int, first: int, last: int) -> Mapping[int, bytes]:
        return read(level, first, last)

    if at.floor is not None:
        ends = _finished(from_floor(ends, tiles, at.floor, findings))
        ends = ends._replace(job_index=_finished(index_of_left(sources, at.floor)))
    return ends._replace(found=findings.found, breaks=breaks)


def _finished(steps: Coroutine[Any, Any, Result]) -> Result:
    """The result of a coroutine that waits for nothing; the caller may run in an event loop itself."""
    try:
        steps.send(None)
    except StopIteration as ended:
        result: Result = ended.value
        return result
    raise AssertionError("the stored tiles are read without waiting")
