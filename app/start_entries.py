"""What ``_system`` must say of a start: a WAL that was given up, a fork of the log, keys that it does not name yet."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import structlog

from app.intake.system_entries import SystemEntries
from app.keys.changes import KeyChanges
from app.node import unrecorded
from app.start.procedure import StartedNode
from ledger.errors import ChainDamagedError, EventRefusedError
from ledger.machines.events import SystemAction
from ledger.positions import before

log = structlog.get_logger()


async def record_start(started: StartedNode, system_entries: SystemEntries, key_changes: KeyChanges) -> None:
    """Record it, as far as it is not there.

    An earlier process may have ended at any point here, so the chain itself is asked, once it holds all
    that process left; while Postgres does not answer, that waits.
    """
    node = started.node
    try:
        for first_lsn, last_lsn in started.lost:
            facts: dict[str, object] = {"first_lsn": first_lsn, "last_lsn": last_lsn, "epoch": node.epoch}
            facts["node_id"] = node.node_id
            await _unless_refused(system_entries.record(SystemAction.WAL_LOST, f"wal:{node.node_id}", facts))
        await node.chained.reached(before(started.next_lsn))
        if started.fork is not None:
            fork = started.fork
            await _unless_refused(system_entries.record(SystemAction.LOG_FORKED, fork.subject, fork.facts()))
            unrecorded.FORK.store(started.folder, None)
        await _unless_refused(key_changes.record_start())
    except ChainDamagedError as error:
        log.error("start_not_recorded", error=str(error))


async def _unless_refused(recording: Coroutine[Any, Any, object]) -> None:
    """Record it; should Postgres refuse that very entry, the next start tries again, and this one goes on."""
    try:
        await recording
    except EventRefusedError as error:
        log.error("start_not_recorded", error=str(error))
