"""A superuser puts something else in the place of tables, or locks them: nothing is acknowledged that is not stored,
what was is chained once they are back, and /readyz says why they are not."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import asyncpg
import httpx
import pytest

from ledger.facts.events import Durability
from tests.app.chains import Chains, numbers, until
from tests.app.conftest import MakeSettings, RunServer
from tests.app.drafts import GLOBAL, LOCAL
from tests.conftest import Database, connected_to
from tests.tally import run_tally

RULE = "CREATE RULE gone AS ON {0} TO scheduler.{1} DO INSTEAD NOTHING"
DROP_RULE = "DROP RULE gone ON scheduler.{0}"
ASIDE = "ALTER TABLE scheduler.scheduler_log RENAME TO aside"
VIEW = "CREATE VIEW scheduler.scheduler_log AS SELECT * FROM scheduler.aside"
BACK = "DROP VIEW scheduler.scheduler_log; ALTER TABLE scheduler.aside RENAME TO scheduler_log"
HIDING = "ROW LEVEL SECURITY"
HIDDEN = [f"ALTER TABLE scheduler.{name}" for name in ("wal_positions", "scheduler_log", "chain_heads")]
LOCK = "LOCK TABLE scheduler.scheduler_log IN ACCESS EXCLUSIVE MODE"


async def post(
    client: httpx.AsyncClient, n: int, level: Durability = GLOBAL, tenant_id: str = "acme"
) -> httpx.Response:
    body = {"tenant_id": tenant_id, "spec": {"n": n}, "durability": level.name}
    return await client.post("/v1/jobs", json=body)


async def readiness(client: httpx.AsyncClient) -> tuple[int, str]:
    answer = await client.get("/readyz")
    return answer.status_code, answer.text


@pytest.mark.parametrize(
    ("putting", "back", "said"),
    [
        (RULE.format("UPDATE", "chain_heads"), DROP_RULE.format("chain_heads"), "UPDATE RETURNING on relation"),
        (f"{ASIDE}; {VIEW}", BACK, "view"),
        (LOCK, None, "LockNotAvailableError"),
        *((f"{name} ENABLE {HIDING}", f"{name} DISABLE {HIDING}", "row-level security") for name in HIDDEN),
    ],
    ids=["rule on heads", "view", "lock", "hidden positions", "hidden log", "hidden heads"],
)
async def test_what_cannot_be_stored_is_not_acknowledged_as_stored_and_is_chained_once_it_can(
    run_server: RunServer,
    make_settings: MakeSettings,
    database: Database,
    chains: Chains,
    putting: str,
    back: str | None,
    said: str,
) -> None:
    async with run_server(make_settings(write={"timeout": "4s"})) as client, AsyncExitStack() as held:
        other = await held.enter_async_context(connected_to(database.superuser_url))
        assert (await post(client, 1)).status_code == 201
        if back is None:
            await other.execute("BEGIN")
        await other.execute(putting)
        early = await post(client, 2, LOCAL)
        assert (early.status_code, early.json()["durability"]["achieved"]) == (201, "LOCAL")
        late = await post(client, 3)
        assert (late.status_code, late.json()["type"].rpartition("/")[2]) == (503, "durability-timeout"), late.text

        async def is_said() -> bool:
            code, text = await readiness(client)
            return code == 503 and said in text

        await until(is_said, "/readyz says it")
        await other.execute("ROLLBACK" if back is None else back)

        async def is_ready() -> bool:
            return (await readiness(client))[0] == 200

        await until(is_ready, "chaining goes on by itself")
        assert (await post(client, 4)).status_code == 201
    assert numbers(await chains.sound("acme")) == [1, 2, 3, 4]


async def test_a_rule_does_not_keep_copied_rows_away(
    run_server: RunServer, superuser: asyncpg.Connection, chains: Chains
) -> None:
    async with run_server() as client:
        await superuser.execute(RULE.format("INSERT", "scheduler_log"))
        assert (await post(client, 1)).status_code == 201
        assert numbers(await chains.sound("acme")) == [1]


async def test_rows_that_are_hidden_are_not_verified_as_rows_that_are_gone(
    run_server: RunServer, database: Database, superuser: asyncpg.Connection
) -> None:
    async with run_server() as client:
        assert (await post(client, 1)).status_code == 201
        await superuser.execute(f"{HIDDEN[1]} ENABLE {HIDING}")
        assert (await client.get("/v1/chain/verify", params={"tenant_id": "acme"})).status_code == 503
        done = await asyncio.to_thread(run_tally, "verify", "--tenant", "acme", "--dsn", database.service_url)
        assert (done.returncode, "row-level security" in done.stderr) == (1, True), done.stdout + done.stderr
        await superuser.execute(f"{HIDDEN[1]} DISABLE {HIDING}")
        assert (await client.get("/v1/chain/verify", params={"tenant_id": "acme"})).json()["valid"]


async def test_a_detached_partition_stops_its_tenants_alone(
    run_server: RunServer, make_settings: MakeSettings, superuser: asyncpg.Connection, chains: Chains
) -> None:
    settings = make_settings()
    # In another partition each, and in another than _system.
    async with run_server(settings) as client:
        for tenant_id in ("beta", "delta"):
            assert (await post(client, 1, tenant_id=tenant_id)).status_code == 201
        part = await superuser.fetchval(
            "SELECT tableoid::regclass::text FROM scheduler.scheduler_log WHERE tenant_id = 'beta'"
        )
        bound = await superuser.fetchval(
            "SELECT pg_get_expr(relpartbound, oid) FROM pg_class WHERE oid = $1::text::regclass", part
        )
        await superuser.execute(f"ALTER TABLE scheduler.scheduler_log DETACH PARTITION {part}")
        early = await post(client, 2, LOCAL, "beta")
        assert early.status_code == 201
        refused = await post(client, 3, tenant_id="beta")
        assert (refused.status_code, refused.json()["type"].rpartition("/")[2]) == (409, "chain-damaged")
        assert "no partition" in refused.json()["detail"]
        code, text = await readiness(client)
        assert (code, "chains are damaged: beta" in text) == (200, True)
        assert (await post(client, 2, tenant_id="delta")).status_code == 201
        await superuser.execute(f"ALTER TABLE scheduler.scheduler_log ATTACH PARTITION {part} {bound}")
    async with run_server(settings) as client:

        async def takes() -> bool:
            return (await post(client, 4, tenant_id="beta")).status_code == 201

        await until(takes, "the tenant is whole again")
    entries = await chains.sound("beta")
    assert [entry["t_hlc"] for entry in entries][1] == early.json()["hlc"]
    assert numbers(entries)[:2] == [1, 2]
    assert numbers(entries)[-1] == 4
