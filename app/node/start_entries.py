"""Entries of ``_system`` about a start: lost records of the WAL, a fork of the log, keys that it does not name yet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from app.node.start.procedure import StartedNode
from app.runtime.logs import log
from app.runtime.state.losses import (
    ASIDE,
    FORK,
    JOBS_LISTED_MAX,
    LOST,
    Loss,
    Losses,
    LsnRange,
    fork_subject,
    jobs_of,
    losses_of,
    merged,
    without,
)
from app.runtime.state.node import Node
from app.store import node as node_store
from app.store.reading import Pool, reading, run_in
from app.trust.key_changes import KeyChanges
from app.write.intake.returning import Returned, Returning
from app.write.intake.system_entries import SystemEntries
from app.write.pending.backlog import Pending
from ledger.errors import ChainDamagedError, EventRefusedError
from ledger.facts.events import SystemAction
from wal.truncation import mark_returned


async def record_start(started: StartedNode, system_entries: SystemEntries, key_changes: KeyChanges) -> None:
    """Record the start, as far as the chain lacks it.

    An earlier process may have ended at any point here, so the chain is queried once it holds all records of that
    process. While Postgres does not answer, this waits.
    """
    try:
        await started.node.chained.reached(started.wal.last_lsn)
        if (fork := FORK.load(started.wal.folder)) is not None:
            subject, facts = fork_subject(fork.to_origin), msgspec.to_builtins(fork)
            await _unless_refused(system_entries.record(SystemAction.LOG_FORKED, subject, facts))
            FORK.store(started.wal.folder, None)
        await _unless_refused(key_changes.record_start())
    except ChainDamagedError as error:
        log.error("start_not_recorded", error=str(error))


async def record_losses(
    started: StartedNode,
    pool: Pool,
    system_entries: SystemEntries,
    losses: Losses,
    recovered: Callable[[Pending], None],
) -> None:
    """Append the records of logs that were moved away, of which ``recovered`` gets each, then record permanent losses.

    A process may end anywhere in here: the next one reads all again, finds the appended entries in the chain, and
    records the rest.
    """
    try:
        await _record_losses(started, pool, system_entries, losses, recovered)
    except Exception as error:
        losses.unread = str(error)
        raise
    losses.unread = None


async def _record_losses(
    started: StartedNode,
    pool: Pool,
    system_entries: SystemEntries,
    losses: Losses,
    recovered: Callable[[Pending], None],
) -> None:
    folder, node, lost = started.wal.folder, started.node, started.wal.lost
    asides = ASIDE.load(folder)
    returned = await Returning(
        node=node,
        system=system_entries,
        folder=folder,
        recovered=recovered,
        asides=asides,
        kept=started.control.history,
        kept_lsn=started.wal.recovered.last_lsn,
        pool=pool,
        waiting=started.recovered,
    ).run()
    if not (lost or asides or returned.ends):
        return
    jobs = jobs_of(each for gap in returned.gaps for each in gap.payloads)
    gaps: list[LsnRange] = [(gap.first_lsn, gap.last_lsn) for gap in returned.gaps]
    gone = losses_of(merged([*without(lost, returned.found), *gaps]), jobs)
    for loss in gone:
        log.error("wal_records_lost", node_id=node.node_id, what=loss.text)
    # An abandoned range is recorded even if all of it came back, or if its content is unknown.
    unknown = [Loss(first, last, []) for first, last in lost if last < first]
    whole = [each for each in lost if each[0] <= each[1] and not without([each], returned.found)]
    for loss in [*gone, *(() if returned.has_known else unknown)]:
        await asyncio.to_thread(losses.note, loss)
    known = await run_in(reading(pool), node_store.recorded_losses, node.node_id)
    for loss in [*gone, *unknown, *(Loss(first, first - 1, []) for first, _ in whole)]:
        if (loss.first_lsn, loss.last_lsn) not in known:
            await _record_loss(node, system_entries, losses, loss, returned.appended)
    await asyncio.to_thread(_forget_set_aside, folder, returned)


async def _record_loss(node: Node, system_entries: SystemEntries, losses: Losses, loss: Loss, appended: int) -> None:
    facts: dict[str, object] = {
        "first_lsn": loss.first_lsn,
        "last_lsn": loss.last_lsn,
        "epoch": node.epoch,
        "node_id": node.node_id,
        "appended": appended,
    }
    if loss.jobs:
        facts["jobs"] = [msgspec.structs.asdict(each) for each in loss.jobs[:JOBS_LISTED_MAX]]
    try:
        position = await system_entries.record(SystemAction.WAL_LOST, f"wal:{node.node_id}", facts)
    except (EventRefusedError, ChainDamagedError) as error:
        log.error("start_not_recorded", error=str(error))
    else:
        await asyncio.to_thread(losses.recorded_at, loss, position.seq)


def _forget_set_aside(folder: Path, returned: Returned) -> None:
    for path in returned.ends:
        mark_returned(path)
    ASIDE.store(folder, {})
    LOST.store(folder, [])


async def _unless_refused(recording: Coroutine[Any, Any, object]) -> None:
    """Await ``recording``. If Postgres refuses the entry, this start continues, and the next one retries."""
    try:
        await recording
    except EventRefusedError as error:
        log.error("start_not_recorded", error=str(error))
