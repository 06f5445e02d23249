"""A service killed at each step of a prune: the chain verifies as the old one or as the new, and the prune goes on."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import orjson

from tests.app.chains import until
from tests.conftest import Database
from tests.crash.conftest import Launch
from tests.tally import run_tally

JOBS = 1_000
ENTRIES = 3 * JOBS
REMOVED_AT = (1, 1500, 2900)
"""Seqs of the rows at which the removal is killed."""
GATE = 7_002
"""Advisory lock that the node is held at while it stores the PRUNED entry."""
BLOCKED = "SELECT pid FROM pg_locks WHERE NOT granted AND pg_backend_pid() = ANY(pg_blocking_pids(pid))"


async def hold_the_entry(superuser: asyncpg.Connection) -> None:
    await superuser.execute("SELECT pg_advisory_lock($1)", GATE)
    await superuser.execute(
        f"""
        CREATE FUNCTION public.hold() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF NEW.action = 'PRUNED' THEN PERFORM pg_advisory_xact_lock({GATE}); END IF;
            RETURN NEW;
        END $$;
        CREATE TRIGGER hold BEFORE INSERT ON scheduler.scheduler_log FOR EACH ROW EXECUTE FUNCTION public.hold();
        """
    )


async def is_blocked(superuser: asyncpg.Connection) -> bool:
    return await superuser.fetchval(BLOCKED) is not None


async def roll_back(superuser: asyncpg.Connection) -> None:
    """End what the killed node had begun, also where it had sent its COMMIT."""
    await superuser.execute(f"SELECT pg_terminate_backend(pid) FROM ({BLOCKED}) AS blocked")
    await until(lambda: is_over(superuser), "the killed node's transaction is over")


async def is_over(superuser: asyncpg.Connection) -> bool:
    return not await is_blocked(superuser)


async def first_seq(superuser: asyncpg.Connection) -> int:
    return int(await superuser.fetchval("SELECT min(seq) FROM scheduler.scheduler_log WHERE tenant_id = 'acme'"))


async def verified(database: Database, keys: Path) -> tuple[bool, int]:
    """Whether the chain is valid by its rows alone, and from which seq on."""
    words = ("verify", "-t", "acme", "--dsn", database.service_url, "--keys", str(keys), "--json")
    found = json.loads((await asyncio.to_thread(run_tally, *words)).stdout)
    return found["valid"], found["verified_from_seq"]


async def fill(client: httpx.AsyncClient) -> None:
    """Jobs that have ended, signed, under a policy by which they may leave."""
    lines = []
    for number in range(JOBS):
        job = {"tenant_id": "acme", "job_id": f"job-{number}"}
        lines += [
            {**job, "type": "JobCreated", "spec": {}, "assigned_dcs": ["dc1"]},
            {**job, "type": "JobAccepted", "dc_id": "dc1"},
            {**job, "type": "JobCompleted", "final_status": "ok"},
        ]
    body, headers = b"\n".join(map(orjson.dumps, lines)), {"Content-Type": "application/x-ndjson"}
    answer = await client.post("/v1/events?durability=GLOBAL", content=body, headers=headers)
    assert answer.status_code == 200, answer.text
    assert (await client.post("/v1/snapshots", json={"tenant_id": "acme"})).status_code == 201
    assert (await client.put("/v1/retention?tenant_id=acme", json={"period": "1s"})).status_code == 200

    async def may_leave() -> bool:
        found = (await client.get("/v1/retention?tenant_id=acme")).json()
        return bool(found["prunable_to_seq"] >= ENTRIES)

    await until(may_leave, "all entries are archived and old")


async def test_a_prune_that_is_killed_at_any_step_is_finished_by_the_next_start(
    launch: Launch, database: Database, superuser: asyncpg.Connection, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"archive__url": tmp_path / "archive", "archive__interval": "1s"}
    keys = tmp_path / "keys.json"
    # Before the entry is chained: it is in the node's log.
    child = await launch(tmp_path / "node", database.service_url, **settings)
    async with httpx.AsyncClient(base_url=await child.ready(), timeout=120, trust_env=False) as client:
        keys.write_bytes((await client.get("/v1/keys")).content)
        await fill(client)
        await hold_the_entry(superuser)
        pruning = asyncio.create_task(client.post("/v1/prunes", json={"tenant_id": "acme"}))
        await until(lambda: is_blocked(superuser), "the node stores the entry")
        await child.kill()
        await asyncio.wait([pruning])
        assert pruning.exception() is not None, "nothing was answered"
    await roll_back(superuser)
    await superuser.execute("SELECT pg_advisory_unlock($1)", GATE)
    await superuser.execute("DROP TRIGGER hold ON scheduler.scheduler_log")
    assert await verified(database, keys) == (True, 1)
    # While rows leave: the next start has chained the entry.
    first = 1
    for seq in REMOVED_AT:
        async with superuser.transaction():
            row = "SELECT FROM scheduler.scheduler_log WHERE tenant_id = 'acme' AND seq = $1 FOR UPDATE"
            await superuser.execute(row, seq)
            child = await launch(tmp_path / "node", database.service_url, **settings)
            await until(lambda: is_blocked(superuser), f"the node removes entry {seq}")
            await child.kill()
            await roll_back(superuser)
        before, first = first, await first_seq(superuser)
        assert before < first <= seq or seq == first == 1
        assert await verified(database, keys) == (True, ENTRIES + 1)
    # The last start finishes it.
    child = await launch(tmp_path / "node", database.service_url, **settings)
    async with httpx.AsyncClient(base_url=await child.ready(), timeout=120, trust_env=False) as client:

        async def has_left() -> bool:
            return await first_seq(superuser) == ENTRIES + 1

        await until(has_left, "the rest has left")
        verdict = (await client.get("/v1/chain/verify?tenant_id=acme")).json()
        assert (verdict["valid"], verdict["verified_from_seq"]) == (True, ENTRIES + 1)
        gone = await client.get("/v1/jobs/job-7?tenant_id=acme")
        assert (gone.status_code, gone.json()["archive"]) == (410, str(tmp_path / "archive"))
