"""A service killed in the middle of an import: the same call again brings what is missing, and nothing twice."""

from __future__ import annotations

import asyncio
from pathlib import Path

import asyncpg
import httpx
import pytest

from tests.app.bundles import bundle_of
from tests.app.chains import Chains, until
from tests.conftest import Database
from tests.crash.conftest import Launch
from tests.ledger.ledger_in_memory import SIGNER, build

ENTRIES = 3_000
HELD_AT = (1, 1500, 2700)
"""Seqs at which one import after the other is killed; a thousand entries are stored at a time."""
GATE = 7_001
"""Advisory lock that the import is held at while it stores the row of one seq."""


async def hold_at(superuser: asyncpg.Connection, seq: int) -> None:
    await superuser.execute("SELECT pg_advisory_lock($1)", GATE)
    await superuser.execute(
        f"""
        CREATE OR REPLACE FUNCTION public.hold() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF NEW.tenant_id = 'acme' AND NEW.seq = {seq} THEN PERFORM pg_advisory_xact_lock({GATE}); END IF;
            RETURN NEW;
        END $$;
        CREATE OR REPLACE TRIGGER hold BEFORE INSERT ON scheduler.scheduler_log
            FOR EACH ROW EXECUTE FUNCTION public.hold();
        """
    )


async def is_held(superuser: asyncpg.Connection) -> bool:
    query = "SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND objid = $1 AND NOT granted)"
    return bool(await superuser.fetchval(query, GATE))


async def send(url: str, bundles: list[bytes]) -> httpx.Response:
    files = [("file", (f"{n}.tar", bundle)) for n, bundle in enumerate(bundles)]
    async with httpx.AsyncClient(timeout=120, trust_env=False) as client:
        return await client.post(f"{url}/v1/bundles/import", files=files)


async def test_a_killed_import_is_finished_by_repeating_it(
    launch: Launch,
    database: Database,
    superuser: asyncpg.Connection,
    tmp_path: Path,
) -> None:
    chains = Chains(superuser)
    keys = tmp_path / "trusted.pem"
    keys.write_text(SIGNER.public_key_pem)
    first, other = build(ENTRIES // 2), build(ENTRIES // 2, begin_ms=1_704_931_200_300)
    for ledger in (first, other):
        ledger.sign(ENTRIES // 2)
    bundles = [bundle_of(first), bundle_of(other)]
    for seq in HELD_AT:
        child = await launch(tmp_path / "node", database.service_url, bundle__trusted_keys=keys)
        url = await child.ready()
        await hold_at(superuser, seq)
        sending = asyncio.create_task(send(url, bundles))
        await until(lambda: is_held(superuser), f"the import has come to seq {seq}")
        await child.kill()
        with pytest.raises(httpx.HTTPError):
            await sending
        await superuser.execute("SELECT pg_advisory_unlock($1)", GATE)
        await superuser.execute("DROP TRIGGER hold ON scheduler.scheduler_log")
        stored = len(await chains.sound("acme"))
        assert stored == (seq - 1) // 1000 * 1000
    child = await launch(tmp_path / "node", database.service_url, bundle__trusted_keys=keys)
    url = await child.ready()
    told = await child.says("bundle_import_unfinished")
    assert (told["position"], told["entries"]) == ((HELD_AT[-1] - 1) // 1000 * 1000, ENTRIES)
    answer = (await send(url, bundles)).raise_for_status().json()
    again = (await send(url, bundles)).raise_for_status().json()
    entries = await chains.sound("acme")
    in_order = [(entry["hlc_physical"], entry["hlc_logical"]) for entry in entries]
    assert (answer["entries"], answer["imported"] + answer["duplicates"]) == (ENTRIES, ENTRIES)
    assert (answer["imported"], again["imported"], again["duplicates"]) == (len(entries), 0, ENTRIES)
    assert in_order == sorted(in_order)
    hlcs = {row["t_hlc"] for row in (*first.entries, *other.entries)}
    assert {entry["t_hlc"] for entry in entries if entry["action"] != "CONFLICT"} == hlcs
    assert again["conflicts"] == answer["conflicts"]
    assert not list((tmp_path / "node" / "wal").glob("*/staging/*"))
