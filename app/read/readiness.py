"""Whether this node takes requests: the checks of ``/readyz``, each None while nothing is wrong, else what is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from app.runtime.state.node import Node
from app.store import chain_reads
from app.store.reading import Pool, reading
from ledger.errors import DatabaseUnavailableError

Check = Callable[[], str | None]
DATABASE_CHECK_TIMEOUT_S: Final = 2.0


@dataclass(kw_only=True, eq=False)
class Readiness:
    """The checks of a node, by name."""

    node: Node
    pool: Pool
    needed: Mapping[str, Check]
    """Without these the node is not ready."""
    reported: Mapping[str, Check]
    """These are reported, and make the node unready in no case: writes go on without them."""
    database_fault: str | None = None
    """What was wrong with the database when it was asked last, for ``/readyz`` or ``/metrics``."""

    async def ask_database(self) -> None:
        """Find out whether the database answers: ``database_fault``, which the metrics report as well."""
        self.database_fault = None
        try:
            async with reading(self.pool, timeout_s=DATABASE_CHECK_TIMEOUT_S) as connection:
                await chain_reads.ping(connection)
        except DatabaseUnavailableError as error:
            self.database_fault = str(error)

    async def faults(self) -> dict[str, str | None]:
        """What is wrong now, by check, of all without which the node is not ready."""
        await self.ask_database()
        return {
            "accepting": None if self.node.accepting else "stopping",
            "writer": None if self.node.failure is None else str(self.node.failure),
            "database": self.database_fault,
            **{name: check() for name, check in self.needed.items()},
        }
