"""Reading a ledger for its verification."""

from __future__ import annotations

import asyncpg

from app.store.chain_reader import consistent_reader
from app.turns import BYTES_PER_TURN
from app.write.requests import Draft
from ledger.events import JOB_EVENTS
from tests.app.chains import Chains
from tests.app.conftest import RunNode
from tests.app.drafts import GLOBAL


async def test_long_rows_are_handed_on_few_at_a_time(
    run_node: RunNode, chains: Chains, superuser: asyncpg.Connection[asyncpg.Record]
) -> None:
    text = "x" * (BYTES_PER_TURN // 3)
    drafts = [Draft("acme", None, JOB_EVENTS["JobCreated"], {"spec": {"t": text}}, None, GLOBAL) for _ in range(8)]
    async with run_node() as service:
        await service.submitter.submit_lines(drafts, durability=None, key=None)
    async with consistent_reader(superuser, "acme") as reader:
        for rows in (reader.entries(None, None), reader.entries_by_job(), reader.jobs()):
            assert [len(turn) async for turn in rows] == [2, 2, 2, 2]
    assert len(await chains.sound("acme")) == 8
