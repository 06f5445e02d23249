"""``kill -9`` once it is durable that somebody may do something, and before that is done: it stays on record, and what
it allowed is done or not, and is done when it is asked for again."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

import asyncpg
import httpx

from app.runtime.state.kept_files import FIRST_TOKEN, FirstToken
from app.trust import callers
from ledger.chain import record
from ledger.facts.events import SystemAction
from tests.app.chains import Chains, until
from tests.app.test_access_records import entries
from tests.app.test_followers import halted
from tests.conftest import Database
from tests.crash.conftest import Launch
from tests.crash.proof import wal_folder
from wal import reader

ROTATE, DECLARE = "POST /v1/keys/rotate", "PUT /v1/tenants/{tenant_id}/privacy"
REVOKE = "DELETE /v1/tokens/{token_id}"
HOLD = "LOCK TABLE scheduler.scheduler_log, scheduler.private_fields, scheduler.signing_keys IN EXCLUSIVE MODE"
"""What a table says can be read; nothing is chained, declared, or published as a key."""
FIELDS = {"fields": ["spec.user"], "subject": "spec.user"}


def acts_in(folder: Path, durable_lsn: int) -> Counter[str]:
    """Acts that the WAL says were allowed, by their route."""
    payloads = (
        json.loads(record.decode(one.payload).payload) for one in reader.read(folder, 1, folder.name, durable_lsn)
    )
    return Counter(said["route"] for said in payloads if said["type"] == SystemAction.ACT_ALLOWED)


async def test_an_act_that_was_allowed_is_on_record_whether_or_not_it_was_done(
    tmp_path: Path, database: Database, launch: Launch, superuser: asyncpg.Connection
) -> None:
    data_dir, first = tmp_path / "node", callers.new_token()
    data_dir.mkdir()
    FIRST_TOKEN.store(data_dir, FirstToken("root", first.digest.hex()))
    root = {"Authorization": f"Bearer {first.text}"}

    async def act(client: httpx.AsyncClient, route: str, token_id: str) -> httpx.Response:
        method, path = route.format(tenant_id="acme", token_id=token_id).split()
        body = {ROTATE: {}, DECLARE: FIELDS}.get(route)
        return await client.request(method, path, json=body)

    async def acted() -> Counter[str]:
        return Counter(said["route"] for said in await entries(superuser, SystemAction.ACT_ALLOWED))

    # 1. Three acts are allowed, and the process dies.
    child = await launch(data_dir, database.service_url, auth__mode="tokens")
    async with httpx.AsyncClient(base_url=await child.ready(), headers=root, timeout=60, trust_env=False) as client:
        await child.says("token_issued")
        assert (await client.post("/v1/jobs", json={"tenant_id": "acme", "durability": "GLOBAL"})).status_code == 201
        wanted = {"name": "other", "rights": ["read"], "tenants": ["acme"]}
        other = (await client.post("/v1/tokens", json=wanted)).json()
        before, keys = await acted(), (await client.get("/v1/keys")).json()
        allowed = Counter((ROTATE, DECLARE, REVOKE))

        async def are_durable() -> bool:
            positions = (await client.get("/v1/node")).json()["positions"]
            return acts_in(wal_folder(data_dir), positions["durable_lsn"]) == before + allowed

        async with halted(database, HOLD):
            acting = [asyncio.create_task(act(client, route, other["token_id"])) for route in allowed]
            await until(are_durable, "the acts are on record")
            assert await acted() == before
            await child.kill()
            ended = await asyncio.gather(*acting, return_exceptions=True)
            # None is answered as done: where the kill came late, some were told that the database is busy.
            answered = {each.status_code for each in ended if isinstance(each, httpx.Response)}
            assert answered <= {503}
            assert all(isinstance(each, httpx.TransportError | httpx.Response) for each in ended), ended

    # 2. The next one has them on record, once, and has done none of what was not.
    child = await launch(data_dir, database.service_url, auth__mode="tokens")
    async with httpx.AsyncClient(base_url=await child.ready(), headers=root, timeout=60, trust_env=False) as client:
        assert (await client.post("/v1/jobs", json={"tenant_id": "acme", "durability": "GLOBAL"})).status_code == 201
        assert await acted() == before + allowed
        assert (await client.get("/v1/keys")).json() == keys
        assert (await client.get("/v1/tenants/acme/privacy")).json()["fields"] == []
        listed = {each["token_id"]: each["revoked"] for each in (await client.get("/v1/tokens")).json()["items"]}
        shown = {"Authorization": f"Bearer {other['token']}"}
        told = await client.get("/v1/whoami", headers=shown)
        assert told.status_code == 401 or not listed[other["token_id"]]

        # 3. They are done when they are asked for again.
        again = [(await act(client, route, other["token_id"])).status_code for route in allowed]
        assert again == [201, 200, 200]

        async def are_recorded() -> bool:
            return await acted() == before + allowed + allowed

        # A token that is revoked already is answered once the act is durable, and nothing waits for the chain.
        await until(are_recorded, "the acts are chained")
        assert (await client.get("/v1/tenants/acme/privacy")).json()["fields"] == FIELDS["fields"]
        assert (await client.get("/v1/whoami", headers=shown)).status_code == 401
        assert len((await client.get("/v1/keys")).json()["keys"]) == len(keys["keys"]) + 1
        verdict = await client.get("/v1/chain/verify", params={"tenant_id": "_system"})
        assert verdict.json()["valid"], verdict.text
    assert await Chains(superuser).sound("_system")
