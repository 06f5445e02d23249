"""Which nodes' logs the safekeepers of this node keep, and which nodes the ledger knows."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import NamedTuple

from app.config import Settings
from app.start.connecting import connected_for_now
from app.start.quorum import members_of
from app.store import node as node_store
from ledger.errors import InvalidInputError, LedgerError
from wal.replication.address import split_address
from wal.replication.inquiry import Keeper, status
from wal.replication.leading import Members

NAMED_MAX = 20
"""Nodes that a refusal names."""


class Asked(NamedTuple):
    """What members answered, by address, and why the others did not."""

    keepers: Mapping[str, Keeper]
    faults: Mapping[str, str]

    def node_ids(self) -> set[str]:
        """The nodes whose logs the members that answered keep."""
        return {wal.node_id for keeper in self.keepers.values() for wal in keeper.wals}


async def ask_members(members: Members) -> Asked:
    """Ask every member which logs it keeps; each answer is waited for ``members.timeout_s``."""
    answers = await asyncio.gather(*(asyncio.to_thread(_ask, members, address) for address in members.addresses))
    pairs = dict(zip(members.addresses, answers, strict=True))
    return Asked(
        {address: answer for address, answer in pairs.items() if isinstance(answer, Keeper)},
        {address: answer for address, answer in pairs.items() if isinstance(answer, str)},
    )


def _ask(members: Members, address: str) -> Keeper | str:
    try:
        return status(*split_address(address), members.tls, members.timeout_s)
    except (OSError, LedgerError) as error:
        return str(error)


async def refuse_unknown(settings: Settings, database_url: str, node_id: str) -> None:
    """Refuse a name that no member keeps a log of and that the ledger has no position of: a mistyped one would be made
    a node, with a log on every member, for ever.

    Raises:
        InvalidInputError: it is such a name.
        StartRefusedError: PostgreSQL does not answer.
    """
    async with connected_for_now(database_url) as connection:
        known = set(await node_store.positions(connection))
    if node_id in known:
        return
    members = members_of(settings)
    asked = await ask_members(members) if members is not None else Asked({}, {})
    known |= asked.node_ids()
    if node_id in known:
        return
    named = ", ".join(sorted(known)[:NAMED_MAX]) or "none"
    more = f" and {len(known) - NAMED_MAX} more" if len(known) > NAMED_MAX else ""
    silent = f". {', '.join(sorted(asked.faults))} did not answer" if asked.faults else ""
    raise InvalidInputError(
        f"there is no node {node_id}: neither wal_positions in PostgreSQL nor a safekeeper of replication.members "
        f"knows it. The nodes there are: {named}{more}{silent}. Nothing was changed"
    )
