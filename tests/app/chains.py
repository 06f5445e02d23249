"""Reading chains as the superuser, and holding them to their rules row by row, the naive way."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import asyncpg

from app.node.service import Service
from app.runtime.settings.config import Settings
from ledger import chain
from ledger.hlc import Hlc
from ledger.machines import jobs
from ledger.machines.job_figures import without_fields
from ledger.verification import JOB_COLUMNS
from ledger.verification.projection_check import StoredJob, stored_form
from tests.ledger.job_facts import fact_of, merge
from wal.reader import Record, read

Entry = asyncpg.Record
"""A row of the log, every column."""

UNTIL_S = 120.0
"""How long a test waits for something that must come."""
_LOOK_FIRST_S = 0.005
_LOOK_LAST_S = 0.1


async def until(condition: Callable[[], Any], what: str, timeout_s: float = UNTIL_S) -> Any:
    """Wait until ``condition()``, which may be async, is true; its value then. Fails after ``timeout_s``.

    What is long in coming is looked for ever more seldom, as each look takes from what it waits for.
    """
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s
    wait_s = _LOOK_FIRST_S
    while True:
        value = condition()
        if isinstance(value, Awaitable):
            value = await value
        if value:
            return value
        assert loop.time() < deadline_s, f"not within {timeout_s:g} s: {what}"
        await asyncio.sleep(wait_s)
        wait_s = min(wait_s * 1.5, _LOOK_LAST_S)


async def places(superuser: asyncpg.Connection) -> dict[str, tuple[int, int]]:
    """By tenant, where the job table is and where its chain ends."""
    rows = await superuser.fetch(
        "SELECT h.tenant_id, coalesce(p.seq, 0), h.head_seq FROM scheduler.chain_heads h"
        "  LEFT JOIN scheduler.follower_positions p ON p.tenant_id = h.tenant_id AND p.follower = $1",
        "jobs",
    )
    return {row[0]: (row[1], row[2]) for row in rows}


async def followed(superuser: asyncpg.Connection) -> bool:
    """Whether the job table is at the end of every chain."""
    return all(seq == head_seq for seq, head_seq in (await places(superuser)).values())


@asynccontextmanager
async def held(superuser: asyncpg.Connection) -> AsyncIterator[None]:
    """Nobody chains while the context is open."""
    async with superuser.transaction():
        await superuser.execute("SELECT FROM scheduler.chain_heads FOR UPDATE")
        yield


async def committed(superuser: asyncpg.Connection) -> dict[str, object]:
    """What is in the log, by counts, heads and the position in the WAL."""
    position = await superuser.fetchrow("SELECT chained_lsn, seen_durable_lsn FROM scheduler.wal_positions")
    assert position is not None
    return {
        "rows": await superuser.fetchval("SELECT count(*) FROM scheduler.scheduler_log"),
        "keys": await superuser.fetchval("SELECT count(*) FROM scheduler.idempotency"),
        "heads": {each["tenant_id"]: each["head_seq"] for each in await superuser.fetch("TABLE scheduler.chain_heads")},
        "position": tuple(position),
    }


class Chains:
    """The chains of one database."""

    def __init__(self, superuser: asyncpg.Connection) -> None:
        self._superuser = superuser

    async def entries(self, tenant_id: str) -> list[Entry]:
        """The tenant's rows in seq order."""
        return await self._superuser.fetch(
            "SELECT * FROM scheduler.scheduler_log WHERE tenant_id = $1 ORDER BY seq", tenant_id
        )

    async def head(self, tenant_id: str) -> tuple[int, str | None]:
        """The tenant's head: seq and link; (0, None) when there is none."""
        row = await self._superuser.fetchrow(
            "SELECT head_seq, head_chain_link FROM scheduler.chain_heads WHERE tenant_id = $1", tenant_id
        )
        return tuple(row) if row else (0, None)

    async def tenants(self) -> list[str]:
        """Every tenant that has a head."""
        rows = await self._superuser.fetch("SELECT tenant_id FROM scheduler.chain_heads ORDER BY tenant_id")
        return [row["tenant_id"] for row in rows]

    async def position(self, node_id: str) -> asyncpg.Record:
        """What Postgres knows of the node's WAL."""
        row = await self._superuser.fetchrow("SELECT * FROM scheduler.wal_positions WHERE node_id = $1", node_id)
        assert row is not None
        return row

    async def key_recorded(self) -> bool:
        """Whether the one node there is has recorded its key, the last thing that a start does."""
        return "KEY_ADDED" in [entry["action"] for entry in await self.entries("_system")]

    async def sound(self, tenant_id: str) -> list[Entry]:
        """The tenant's rows, after checking each: seq gapless, digest, links, HLC columns, head, job states."""
        if self._superuser.is_in_transaction():
            return await self._sound(tenant_id)
        async with self._superuser.transaction(isolation="repeatable_read"):
            return await self._sound(tenant_id)

    async def _sound(self, tenant_id: str) -> list[Entry]:
        entries = await self.entries(tenant_id)
        assert [entry["seq"] for entry in entries] == list(range(1, len(entries) + 1))
        for before, entry in itertools.pairwise([None, *entries]):
            assert entry is not None
            check_entry(before, entry)
        last = entries[-1] if entries else None
        assert await self.head(tenant_id) == ((last["seq"], last["chain_link"]) if last else (0, None))
        await self._check_jobs(tenant_id, entries)
        return entries

    async def _check_jobs(self, tenant_id: str, entries: list[Entry]) -> None:
        """The stored job states are the fold of the chain as far as they follow it, merged here in another order."""
        folded: dict[str, jobs.JobState] = {}
        # One statement: within the caller's transaction each sees what the follower has committed meanwhile.
        rows = await self._superuser.fetch(
            f"SELECT p.seq, {', '.join(f'j.{column}' for column in JOB_COLUMNS[:-1])}, j.seqs::text"
            "  FROM (VALUES ($1::text)) AS t (tenant_id)"
            "  LEFT JOIN scheduler.follower_positions p ON p.follower = 'jobs' AND p.tenant_id = t.tenant_id"
            "  LEFT JOIN scheduler.jobs j ON j.tenant_id = t.tenant_id",
            tenant_id,
        )
        followed_seq = rows[0][0]
        for entry in reversed(entries[: followed_seq or 0]):
            fact = fact_of(
                entry["action"],
                json.loads(entry["payload"]),
                Hlc.parse(entry["t_hlc"]),
                entry["payload_digest"],
                entry["job_id"],
                entry["seq"],
            )
            if fact is None:
                continue
            known = folded.get(entry["job_id"])
            folded[entry["job_id"]] = fact if known is None else merge(known, fact)
        stored = (StoredJob(*row[1:]) for row in rows if row["job_id"] is not None)
        # Which fields the tenant is searched by, no entry says.
        assert {job._replace(figure=without_fields(job.figure)) for job in stored} == {
            stored_form(state) for state in folded.values()
        }


def check_entry(before: Entry | None, entry: Entry) -> None:
    """One row holds together, and follows the row before it."""
    assert entry["payload_digest"] == hashlib.sha256(entry["payload"].encode()).hexdigest()
    assert entry["t_hlc"] == f"{entry['hlc_physical']}:{entry['hlc_logical']}:{entry['hlc_node']}"
    assert entry["prev_chain_link"] == (before["chain_link"] if before else None)
    assert entry["link_version"] == 2
    link = chain.link(
        tenant_id=entry["tenant_id"],
        seq=entry["seq"],
        t_hlc=entry["t_hlc"],
        job_id=entry["job_id"],
        action=entry["action"],
        prev_chain_link=bytes.fromhex(entry["prev_chain_link"] or ""),
        payload_digest=bytes.fromhex(entry["payload_digest"]),
        origin=(entry["origin"] or "").encode(),
    )
    assert entry["chain_link"] == link.hex()


def numbers(entries: list[Entry]) -> list[int]:
    """Field ``n`` of each job's spec, which tests number their events by; rows without one are left out."""
    payloads = [json.loads(entry["payload"]) for entry in entries]
    return [payload["spec"]["n"] for payload in payloads if "n" in payload.get("spec", {})]


def wal_of(settings: Settings, service: Service, upto_lsn: int) -> list[Record]:
    """What stands durably in the WAL, read from its files."""
    return list(read(settings.wal_dir / service.node.node_id, 1, service.node.node_id, upto_lsn))
