"""How far each tenant's chain was last verified, kept beside the WAL where a database administrator cannot reach it.

``<wal folder>/verified.json``, replaced by temp file, fsync, rename and directory fsync::

    {"version": 1, "tenants": {"acme": {"seq": 23000, "chain_link": "64 hex digits"}}}

A position stands at the end of a snapshot, or at seq 0, so that verifying from there on meets whole snapshots. The
entry at a position must still have that link the next time. A file that is missing or damaged means that
verification begins at seq 1 again, which is safe.
"""

from __future__ import annotations

from pathlib import Path
from threading import Lock
from typing import Annotated, Final, Literal

import msgspec
import structlog

from app.runtime.state.kept_file import KeptFile
from ledger.errors import StartRefusedError

FILE_NAME = "verified.json"

log = structlog.get_logger()


class Position(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The last entry verified and its link."""

    seq: Annotated[int, msgspec.Meta(ge=1)]
    chain_link: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class _Positions(msgspec.Struct):
    version: Literal[1]
    tenants: dict[str, Position]


_FILE: Final = KeptFile[_Positions](FILE_NAME, _Positions, b'{"version":1,"tenants":{}}', "it is made again")


def forget(wal_folder: Path) -> None:
    """Verify every chain from its beginning the next time."""
    (wal_folder / FILE_NAME).unlink(missing_ok=True)


class VerifiedPositions:
    """The positions of one node, in memory and in its WAL folder."""

    def __init__(self, wal_folder: Path) -> None:
        self._folder = wal_folder
        self._storing = Lock()
        self._by_tenant: dict[str, Position] = {}
        try:
            self._by_tenant = _FILE.load(wal_folder).tenants
        except StartRefusedError as error:
            log.warning("verified_positions_unreadable", error=str(error))

    def get(self, tenant_id: str) -> Position | None:
        """Where the tenant was last verified, None before the first time."""
        return self._by_tenant.get(tenant_id)

    def tenants(self) -> list[str]:
        """Tenants that were verified before."""
        return sorted(self._by_tenant)

    def advance(self, tenant_id: str, position: Position) -> bool:
        """Note that the tenant is verified up to ``position``; a lower one changes nothing.

        Returns:
            Whether it changed, so that ``store`` has something to do.
        """
        held = self._by_tenant.get(tenant_id)
        if held is not None and held.seq >= position.seq:
            return False
        self._by_tenant[tenant_id] = position
        return True

    def store(self) -> None:
        """Write the file; on return it survives a crash. Blocks on the disk.

        Raises:
            OSError: the disk refuses; the positions in memory stay.
        """
        # Verifications end at the same time, each on a thread of its own.
        with self._storing:
            _FILE.store(self._folder, _Positions(1, dict(sorted(self._by_tenant.items()))))
