"""The heads of chains as this node has seen them: none of them may go back, or become another."""

from __future__ import annotations

from collections.abc import Collection

import structlog

from app.runtime.state.node import Node
from app.store import Connection, chaining
from app.store.chaining import ChainEnd, ChainHead
from app.write.pending.quarantine import Quarantine
from ledger.errors import ClockSkewError, InvalidInputError
from ledger.hlc import Hlc
from ledger.verification.verdict import damaged

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
                detail = f"its head is gone, which this node has seen at seq {seen.seq}"
                raise damaged(tenant, "head", seen.seq, detail)

    async def check(self, connection: Connection, heads: dict[str, ChainHead]) -> dict[str, ChainEnd]:
        """Refuse to extend chains that are shorter than this node has seen them, or others, or end where there is no
        entry. Returns the ends of those that end elsewhere than this node knows.

        Raises:
            ChainDamagedError: names the first that is.
        """
        for tenant, head in heads.items():
            self._quarantine.check(tenant)
            if (fault := chaining.head_fault(head)) is not None:
                raise damaged(tenant, "head", 0, fault)
            seen = self.known.get(tenant)
            if seen is not None and (head.seq < seen.seq or (head.seq == seen.seq and head[:2] != seen[:2])):
                raise damaged(
                    tenant,
                    "head",
                    seen.seq,
                    f"its head stands at seq {head.seq} ({head.chain_link}), but this node has seen seq {seen.seq} "
                    f"({seen.chain_link})",
                )
        moved = {tenant: head for tenant, head in heads.items() if head != self.known.get(tenant)}
        ends = await chaining.read_ends(connection, moved)
        for tenant, head in moved.items():
            if (fault := chaining.end_fault(head, ends.get(tenant))) is not None:
                raise damaged(tenant, "head", head.seq, fault)
        return ends

    def learn_time(self, heads: dict[str, ChainHead], ends: dict[str, ChainEnd]) -> None:
        """Let the clock follow ``ends`` that other nodes of this ledger left: what is written after them gets a later
        HLC. Those that an import left teach nothing."""
        for tenant, end in ends.items():
            if not end.is_by_node:
                continue
            try:
                self._node.clock.receive(Hlc.parse(heads[tenant].hlc or ""), self._node.wall.now_ms())
            except (ClockSkewError, InvalidInputError) as error:
                log.warning("head_hlc_refused", tenant_id=tenant, error=str(error))
