"""The heads of chains as this node has seen them: none of them may go back, or become another."""

from __future__ import annotations

from collections.abc import Collection

import structlog

from app.node.state import Node
from app.pending.quarantine import Quarantine
from app.store import Connection, chaining
from app.store.chaining import ChainHead
from ledger.errors import ChainDamagedError, ClockSkewError, InvalidInputError
from ledger.hlc import Hlc

log = structlog.get_logger()


class SeenHeads:
    """Heads by tenant. ``known`` begins with what a start has read; the appender keeps it."""

    def __init__(self, node: Node, quarantine: Quarantine, known: dict[str, ChainHead]) -> None:
        self._node = node
        self._quarantine = quarantine
        self.known = known

    def check_never_seen(self, missing: Collection[str]) -> None:
        """Refuse that tenants have no head which this node has seen.

        Raises:
            ChainDamagedError: names the first.
        """
        for tenant in sorted(missing):
            if (seen := self.known.get(tenant)) is not None:
                raise ChainDamagedError(tenant, f"its head is gone, which this node has seen at seq {seen.seq}")

    def check(self, heads: dict[str, ChainHead]) -> None:
        """Refuse to extend chains that are shorter than this node has seen them, or others.

        Raises:
            ChainDamagedError: names the first that is.
        """
        for tenant, head in heads.items():
            self._quarantine.check(tenant)
            if (fault := chaining.head_fault(head)) is not None:
                raise ChainDamagedError(tenant, fault)
            seen = self.known.get(tenant)
            if seen is not None and (head.seq < seen.seq or (head.seq == seen.seq and head[:2] != seen[:2])):
                raise ChainDamagedError(
                    tenant,
                    f"its head stands at seq {head.seq} ({head.chain_link}), but this node has seen seq {seen.seq} "
                    f"({seen.chain_link})",
                )

    async def learn_time(self, connection: Connection, heads: dict[str, ChainHead]) -> None:
        """Let the clock follow heads that other nodes of this ledger left: what is written after them gets a later
        HLC. Heads that an import left teach nothing."""
        for tenant, head in heads.items():
            if head.hlc is None or head == self.known.get(tenant):
                continue
            try:
                hlc = Hlc.parse(head.hlc)
                if await chaining.is_by_node(connection, tenant, head.seq):
                    self._node.clock.receive(hlc, self._node.wall.now_ms())
            except (ClockSkewError, InvalidInputError) as error:
                log.warning("head_hlc_refused", tenant_id=tenant, error=str(error))
