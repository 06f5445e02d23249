"""Logs of other nodes, at the safekeepers of this node and below its ``wal.dir``: their owners, and whether they hold
unchained records, as after a node was lost with its disk and another one replaced it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

from app.node.start.connecting import connected_for_now
from app.node.start.quorum import members_of
from app.runtime.logs import log
from app.runtime.settings.config import Settings
from app.store import node as node_store
from app.store.chaining import WalPosition
from app.store.reading import Pool, reading, run_in
from ledger.errors import InvalidInputError, LedgerError, WalFilesError
from ledger.positions import BEFORE_FIRST, Lsn
from ledger.text import first_of
from wal import control as wal_control
from wal.reader import scan_segment
from wal.replication.frames import status_or_fault, unchained_in
from wal.replication.leading import Members
from wal.replication.messages import StatusReport
from wal.segment import list_segments, opened

NAMED_MAX = 20
"""Nodes that a refusal, or a readiness check, names."""
CONFIRM_S = 10.0
"""A log is abandoned once neither its end nor its position in PostgreSQL moved for so long: a running node chains."""
LOOK_AGAIN_S = 60.0
"""Interval of the checks whether abandoned logs are chained by now."""
LOOK_INTERVAL_S = 600.0
"""Interval of the checks while no log is abandoned."""


async def ask_members(members: Members) -> tuple[dict[str, StatusReport], dict[str, str]]:
    """Ask every member which logs it keeps; each answer is waited for ``members.timeout_s``. Returns the answers by
    address, and the errors of the other members."""
    asked = (asyncio.to_thread(status_or_fault, each, members.tls, members.timeout_s) for each in members.addresses)
    pairs = dict(zip(members.addresses, await asyncio.gather(*asked), strict=True))
    return (
        {address: answer for address, answer in pairs.items() if isinstance(answer, StatusReport)},
        {address: answer for address, answer in pairs.items() if isinstance(answer, str)},
    )


async def refuse_unknown(settings: Settings, database_url: str, node_id: str) -> None:
    """Refuse a name of which no member keeps a log and the ledger has no position: a mistyped name would become a node,
    with a log on every member, for ever.

    Raises:
        InvalidInputError: it is such a name.
        StartRefusedError: PostgreSQL does not answer.
    """
    async with connected_for_now(database_url) as connection:
        known = set(await node_store.positions(connection))
    if node_id in known:
        return
    members = members_of(settings)
    keepers, faults = await ask_members(members) if members is not None else ({}, {})
    known |= {wal.node_id for keeper in keepers.values() for wal in keeper.wals}
    if node_id in known:
        return
    named = first_of(sorted(known), NAMED_MAX) or "none"
    silent = f". {', '.join(sorted(faults))} did not answer" if faults else ""
    raise InvalidInputError(
        f"there is no node {node_id}: neither wal_positions in PostgreSQL nor a safekeeper of replication.members "
        f"knows it. The nodes there are: {named}{silent}. Nothing was changed"
    )


LeftLog: TypeAlias = tuple[str, str]
"""An abandoned or unreadable log of another node: the node's id, and what the log holds, where, and what to do."""


def _left(node_id: str, where: str, last_lsn: int, chained_lsn: Lsn, remedy: str) -> LeftLog:
    """A log with records above its chained position; ``remedy`` says how to chain them."""
    return (
        node_id,
        f"the log of node {node_id}, kept at {where}, ends with LSN {last_lsn}, {last_lsn - chained_lsn} above what is "
        f"chained of it: if that node does not run any more, {remedy}",
    )


def _unread(node_id: str, where: str, reason: str) -> LeftLog:
    return (
        node_id,
        f"the log of node {node_id}, kept at {where}, cannot be read, and may hold records that are not chained: "
        f"{reason}",
    )


class OtherLogs:
    """Looks for abandoned logs of nodes other than ``node_id``, at ``members`` and in the folders of ``wal_dir``. It
    ignores logs of which this ledger has no position: safekeepers may serve several ledgers.
    """

    def __init__(self, node_id: str, wal_dir: Path, members: Members | None, pool: Pool) -> None:
        self._node_id, self._wal_dir, self._members, self._pool = node_id, wal_dir, members, pool
        self._left: frozenset[LeftLog] = frozenset()

    def fault(self) -> str | None:
        """What ``/readyz`` reports; None when no log is abandoned."""
        return first_of(sorted(text for _, text in self._left), NAMED_MAX, "; ") or None

    async def run(self) -> None:
        """Check at start, and then at intervals, for ever."""
        while True:
            found = await self._find()
            if found - self._left:
                await asyncio.sleep(CONFIRM_S)
                found &= await self._find()
            for node_id, text in sorted(found - self._left):
                log.warning("wal_left_unchained", node_id=node_id, what=text)
            self._left = found
            await asyncio.sleep(LOOK_AGAIN_S if found else LOOK_INTERVAL_S)

    async def _find(self) -> frozenset[LeftLog]:
        positions = await run_in(reading(self._pool), node_store.positions)
        positions.pop(self._node_id, None)
        if not positions:
            return frozenset()
        left: set[LeftLog] = set(await asyncio.to_thread(lambda: list(self._in_folders(positions))))
        if self._members is not None:
            keepers, _ = await ask_members(self._members)
            left |= {*_at_members(keepers, positions), *_unread_at_members(keepers, positions)}
        return frozenset(left)

    def _in_folders(self, positions: Mapping[str, WalPosition]) -> Iterator[LeftLog]:
        for node_id, position in positions.items():
            folder = self._wal_dir / node_id
            try:
                control = wal_control.load(folder) if folder.is_dir() else None
                last_lsn = _end_of(folder, node_id) if control is not None else BEFORE_FIRST
            except (OSError, LedgerError) as error:
                reason = error.damage if isinstance(error, WalFilesError) else str(error)
                yield _unread(node_id, str(folder), f"{reason}. The start of that node says what to do")
                continue
            if control is not None and control.wal_id == position.wal_id and last_lsn > position.chained_lsn:
                yield _left(
                    node_id,
                    str(folder),
                    last_lsn,
                    position.chained_lsn,
                    f"start it once more, TALLY_NODE_ID={node_id} tally serve, with this wal.dir",
                )


def _at_members(keepers: Mapping[str, StatusReport], positions: Mapping[str, WalPosition]) -> Iterator[LeftLog]:
    """The abandoned logs at members: the longest copy of each node's log."""
    copies = [
        (wal.node_id, max(wal.tail.lsn, wal.durable_lsn), address, wal)
        for address, keeper in keepers.items()
        for wal in keeper.wals
        if (position := positions.get(wal.node_id)) and unchained_in(wal, position.wal_id, position.chained_lsn)
    ]
    longest = {copy[0]: copy for copy in sorted(copies, key=lambda copy: copy[:3])}
    for node_id, last_lsn, address, wal in longest.values():
        remedy = (
            f"take its log over: tally failover --node {node_id}"
            if wal.configuration.is_quorum
            else f"bring its records in by a bundle: tally bundle export --from-wal, in the folder {node_id} there"
        )
        yield _left(node_id, address, last_lsn, positions[node_id].chained_lsn, remedy)


def _unread_at_members(keepers: Mapping[str, StatusReport], positions: Mapping[str, WalPosition]) -> Iterator[LeftLog]:
    """Logs of which members cannot read at least half of the copies: the readable ones may lack the end."""
    copies = [(wal, address) for address, keeper in keepers.items() for wal in keeper.wals if wal.node_id in positions]
    for node_id in {wal.node_id for wal, _ in copies}:
        failed = [(address, wal.detail) for wal, address in copies if wal.node_id == node_id and wal.state == "failed"]
        if 2 * len(failed) >= sum(wal.node_id == node_id for wal, _ in copies):
            yield _unread(node_id, ", ".join(address for address, _ in failed), "; ".join(why for _, why in failed))


def _end_of(folder: Path, node_id: str) -> Lsn:
    """The last LSN of the log in ``folder``."""
    for segment in list_segments(folder)[-1:]:
        with opened(segment.path) as descriptor:
            return scan_segment(descriptor, segment.base_lsn, node_id).last_lsn
    return BEFORE_FIRST
