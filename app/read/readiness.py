"""Whether this node accepts requests: the checks of ``/readyz``. Each returns None, or the fault as text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from app.runtime.state.node import Node
from app.store import chain_reads
from app.store.reading import Pool, reading, run_in
from ledger.errors import DatabaseUnavailableError

Check = Callable[[], str | None]
DATABASE_CHECK_TIMEOUT_S: Final = 2.0


@dataclass(kw_only=True, eq=False)
class Readiness:
    """The checks of a node, by name."""

    node: Node
    pool: Pool
    needed: Mapping[str, Check]
    """The node is unready if one of these fails."""
    reported: Mapping[str, Check]
    """These are reported but never make the node unready: writes do not need them."""
    database_fault: str | None = None
    """The database's fault at the last check, by ``/readyz`` or ``/metrics``."""

    async def ask_database(self) -> None:
        """Check whether the database answers, and set ``database_fault``, which the metrics report as well."""
        self.database_fault = None
        try:
            await run_in(reading(self.pool, timeout_s=DATABASE_CHECK_TIMEOUT_S), chain_reads.ping)
        except DatabaseUnavailableError as error:
            self.database_fault = str(error)

    async def faults(self) -> dict[str, str | None]:
        """The present faults by check, for the checks that the node needs to be ready."""
        await self.ask_database()
        return {
            "accepting": None if self.node.accepting else "stopping",
            "writer": None if self.node.failure is None else str(self.node.failure),
            "database": self.database_fault,
            **{name: check() for name, check in self.needed.items()},
        }
