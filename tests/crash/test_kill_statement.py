"""``kill -9`` once a signed statement is durable, and before it is answered: sent again, it is registered once."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import asyncpg
import httpx

from ledger.chain import record
from ledger.facts.events import SystemAction
from tests.app.chains import Chains, until
from tests.app.signed_statements import statement
from tests.app.test_followers import halted
from tests.app.test_scitt_nodes import entry_in, post, register_caller, registered
from tests.conftest import Database
from tests.crash.conftest import Launch
from tests.crash.proof import wal_folder
from tests.ledger.callers import ED25519
from wal import reader

HOLD = "LOCK TABLE scheduler.scheduler_log IN EXCLUSIVE MODE"


async def test_a_statement_that_was_durable_when_the_process_died_is_registered_once(
    tmp_path: Path, database: Database, launch: Launch, superuser: asyncpg.Connection
) -> None:
    # 1. A statement is durable, and the process dies before anything is chained or answered.
    child = await launch(tmp_path / "node", database.service_url)
    async with httpx.AsyncClient(base_url=await child.ready(), timeout=60, trust_env=False) as client:
        await register_caller(client)
        assert (await post(client, statement(ED25519, b"first"))).is_success

        async def is_durable() -> bool:
            folder = wal_folder(tmp_path / "node")
            durable_lsn = (await client.get("/v1/node")).json()["positions"]["durable_lsn"]
            records = [record.decode(one.payload).payload for one in reader.read(folder, 1, folder.name, durable_lsn)]
            return [json.loads(each)["type"] for each in records].count(SystemAction.STATEMENT_REGISTERED) == 2

        async with halted(database, HOLD):
            posting = asyncio.create_task(post(client))
            await until(is_durable, "the statement is in the log of the node")
            await child.kill()
            (ended,) = await asyncio.gather(posting, return_exceptions=True)
            assert isinstance(ended, httpx.TransportError), ended
            assert len(await registered(superuser)) == 1

    # 2. The next process has chained it, or chains it now: sent again, many times at once, it is there once.
    child = await launch(tmp_path / "node", database.service_url)
    async with httpx.AsyncClient(base_url=await child.ready(), timeout=60, trust_env=False) as client:
        answers = await asyncio.gather(*(post(client) for _ in range(8)))
        assert {answer.status_code for answer in answers} == {201}
        assert len({entry_in(answer) for answer in answers}) == 1
        assert len(await registered(superuser)) == 2
    assert await Chains(superuser).sound("acme")
