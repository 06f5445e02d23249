"""How far each tenant's chain was last verified, kept beside the WAL where a database administrator cannot reach it.

``<wal folder>/verified.json``, replaced by temp file, fsync, rename and directory fsync::

    {"version": 1, "tenants": {"acme": {"seq": 23000, "chain_link": "64 hex digits"}}}

A position stands at the end of a snapshot, or at seq 0, so that verifying from there on meets whole snapshots. The
entry at a position must still have that link the next time. A file that is missing or damaged means that
verification begins at seq 1 again, which is safe.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import structlog

from wal.segment import store_file

FILE_NAME = "verified.json"
VERSION = 1

_LINK = re.compile(r"[0-9a-f]{64}")

log = structlog.get_logger()


class Position(NamedTuple):
    """The last entry verified and its link."""

    seq: int
    chain_link: str


def forget(wal_folder: Path) -> None:
    """Verify every chain from its beginning the next time."""
    (wal_folder / FILE_NAME).unlink(missing_ok=True)


class VerifiedPositions:
    """The positions of one node, in memory and in its WAL folder."""

    def __init__(self, wal_folder: Path) -> None:
        self._path = wal_folder / FILE_NAME
        self._by_tenant = _load(self._path)

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
        tenants = {tenant: position._asdict() for tenant, position in sorted(self._by_tenant.items())}
        content = orjson.dumps({"version": VERSION, "tenants": tenants})
        store_file(self._path, content)


def _load(path: Path) -> dict[str, Position]:
    try:
        return _parse(orjson.loads(path.read_bytes()))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        log.warning("verified_positions_unreadable", file=str(path), error=repr(error))
        return {}


def _parse(content: Any) -> dict[str, Position]:
    if content["version"] != VERSION:
        raise ValueError(f"version {content['version']} is not known")
    positions = {tenant: Position(**fields) for tenant, fields in content["tenants"].items()}
    for position in positions.values():
        if not (type(position.seq) is int and position.seq >= 1 and _LINK.fullmatch(position.chain_link)):
            raise ValueError(f"{position} is no position")
    return positions
