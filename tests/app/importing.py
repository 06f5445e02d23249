"""Importing into a fresh database without a service around: many small ledgers, each from nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import asyncpg

from app.bundle.importer import BundleImporter, Imported
from app.bundle.staging import StagedFile
from app.metrics import Metrics
from app.node import Node
from app.store import chaining
from ledger.hlc import Clock

NODE = "node-m"


def importer_on(pool: asyncpg.Pool, trusted_keys: Path | None, skew_ms: int = 5000) -> BundleImporter:
    """An importer as the service wires it, but that tenants begin without an entry in ``_system``."""

    async def begin_tenant(tenant_id: str) -> None:
        async with pool.acquire() as connection:
            await chaining.create_heads(connection, [tenant_id])

    return BundleImporter(
        pool=pool,
        node=Node(NODE, "local", "gate", "0" * 32, 1, Clock(NODE, skew_ms)),
        trusted_keys=trusted_keys,
        begin_tenant=begin_tenant,
        check_heads=lambda heads: None,
        on_imported=lambda growth: None,
        metrics=Metrics(),
    )


def staged(path: Path) -> StagedFile:
    """A file as an upload leaves it."""
    return StagedFile(path.name, path, sha256(path.read_bytes()).hexdigest())


async def import_files(
    url: str, trusted_keys: Path, calls: Sequence[Sequence[Path]], *, dry_run: bool = False, skew_ms: int = 5000
) -> list[Imported]:
    """What each call came to, one after the other."""
    async with asyncpg.create_pool(url, min_size=1, max_size=2) as pool:
        importer = importer_on(pool, trusted_keys, skew_ms)
        return [await importer.run([staged(path) for path in paths], dry_run=dry_run) for paths in calls]


def import_all(url: str, trusted_keys: Path, *calls: Sequence[Path], dry_run: bool = False) -> list[Imported]:
    """``import_files`` from outside of an event loop."""
    return asyncio.run(import_files(url, trusted_keys, calls, dry_run=dry_run))
