"""Importing into fresh databases without a service around: small ledgers, each from nothing, and what they hold."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import asyncpg

from app.dev.embedded import EmbeddedPostgres
from app.runtime.metrics import Metrics
from app.runtime.state.node import Node
from app.share.bundle.importer import BundleImporter
from app.share.bundle.staging import StagedFile
from app.store import chaining
from app.store.entry_check import EntryCheck
from app.store.exchange import Import
from app.trust.retention import RetentionReader
from app.write.chain.view import ReadHeads
from ledger.hlc import Clock
from ledger.machines import jobs
from ledger.verification import ENTRY_COLUMNS
from signing.keys import Keyring
from tests.app.chains import Chains
from tests.conftest import connected_to, fresh_database
from tests.ledger.job_facts import fact_of, merge
from tests.ledger.ledger_in_memory import SIGNER, Ledger

NODE = "node-m"
LOG = "log.importing"
"""Log origin of the importing ledger."""


def importer_on(pool: asyncpg.Pool, trusted_keys: Path | None, skew_ms: int = 5000) -> BundleImporter:
    """An importer as the service wires it, but that it begins tenants without an entry in ``_system`` and believes
    their heads."""

    async def begin_tenant(tenant_id: str) -> None:
        async with pool.acquire() as connection:
            await chaining.create_heads(connection, [tenant_id])

    async def read_heads(
        connection: asyncpg.Connection, tenant_ids: Collection[str], read: ReadHeads = chaining.read_heads
    ) -> dict[str, chaining.ChainHead]:
        return await read(connection, sorted(tenant_ids))

    async def held_keys() -> Keyring:
        return Keyring([SIGNER.public_key])

    return BundleImporter(
        pool=pool,
        node=Node(NODE, "local", "gate", "0" * 32, 1, Clock(NODE, skew_ms)),
        folder=Path(tempfile.gettempdir()),
        trusted_keys=trusted_keys,
        begin_tenant=begin_tenant,
        read_heads=read_heads,
        on_imported=lambda growth: None,
        on_damaged=lambda error: None,
        metrics=Metrics(),
        retention=RetentionReader(
            pool=pool, check=EntryCheck(lambda tenant_id: None), keyring=held_keys, origin=lambda name: f"{LOG}/{name}"
        ),
    )


def staged(path: Path) -> StagedFile:
    """A file as an upload leaves it."""
    return StagedFile.at(path, path.name, sha256(path.read_bytes()).hexdigest())


async def import_files(
    url: str, trusted_keys: Path, calls: Sequence[Sequence[Path]], *, dry_run: bool = False, skew_ms: int = 5000
) -> list[Import]:
    """What each call came to, one after the other."""
    async with asyncpg.create_pool(url, min_size=1, max_size=2) as pool:
        importer = importer_on(pool, trusted_keys, skew_ms)
        return [await importer.run([staged(path) for path in paths], dry_run=dry_run) for paths in calls]


def import_all(url: str, trusted_keys: Path, *calls: Sequence[Path], dry_run: bool = False) -> list[Import]:
    """``import_files`` from outside of an event loop."""
    return asyncio.run(import_files(url, trusted_keys, calls, dry_run=dry_run))


@contextmanager
def fresh(postgres: EmbeddedPostgres) -> Iterator[tuple[str, Callable[[str], list[Any]]]]:
    """URL of a fresh ledger, and how to read its chains, each row checked."""
    with fresh_database(postgres) as database:

        async def sound(tenant: str) -> list[Any]:
            async with connected_to(database.superuser_url) as connection:
                return await Chains(connection).sound(tenant)

        yield database.service_url, lambda tenant: asyncio.run(sound(tenant))


def links(entries: list[Any]) -> list[str]:
    """The links of a chain."""
    return [entry["chain_link"] for entry in entries]


def states(entries: list[Any]) -> dict[str, Any]:
    """What the jobs of a chain are, but for where in the chain they were touched last."""
    folded: dict[str, jobs.JobState] = {}
    for entry in entries:
        hlc = (entry["hlc_physical"], entry["hlc_logical"], entry["hlc_node"])
        payload = json.loads(entry["payload"])
        fact = fact_of(entry["action"], payload, hlc, entry["payload_digest"], entry["job_id"], 1)
        if fact is not None:
            known = folded.get(fact.job_id)
            folded[fact.job_id] = fact if known is None else merge(known, fact)
    return {job_id: (jobs.status(state), state) for job_id, state in folded.items()}


def signed(ledger: Ledger) -> Ledger:
    """The ledger with one snapshot over all of it."""
    ledger.snapshots = []
    ledger.sign(len(ledger.entries))
    return ledger


def in_memory(entry: Any) -> dict[str, Any]:
    """A row of the log as ``Ledger`` has it."""
    return {name: entry[name] for name in ENTRY_COLUMNS}
