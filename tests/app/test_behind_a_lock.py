"""What a node knows and tells while records of a tenant wait for a lock, and of what it does once that is gone."""

from __future__ import annotations

from collections.abc import Sequence

import asyncpg
import pytest

from app.write.chain.appender import Appender
from app.write.pending.backlog import Pending
from app.write.pending.requests import EventLines
from ledger.errors import DurabilityTimeoutError, IdempotencyReusedError, JobEndedError
from tests.app.chains import Chains, followed, numbers, until
from tests.app.conftest import MakeSettings, RunNode
from tests.app.drafts import GLOBAL, LOCAL, completed, created, key, progressed
from tests.app.test_followers import halted
from tests.app.test_locked_rows import HEAD
from tests.conftest import Database


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.store.chaining.LOCK_TIMEOUT_S", 0.3)
    monkeypatch.setattr("app.write.followers.followers.SEARCH_INTERVAL_S", 0.1)


async def test_an_end_that_waits_is_not_forgotten_for_older_entries_that_are_followed(
    run_node: RunNode, make_settings: MakeSettings, database: Database, superuser: asyncpg.Connection
) -> None:
    async with run_node(make_settings()) as service:
        submit = service.submitter.submit
        job_id = (await submit(created("acme", 0), key=None)).job_id
        async with halted(database, HEAD):
            await submit(progressed("acme", job_id, 1), key=None)
            await until(lambda: "acme" in service.node.waiting, "the lock is met")
            await submit(completed("acme", job_id, durability=LOCAL), key=None)
            await submit(created("beta", 0), key=None)
            await superuser.execute("DELETE FROM scheduler.follower_positions WHERE tenant_id = 'acme'")

            async def is_followed_again() -> bool:
                place = "SELECT seq FROM scheduler.follower_positions WHERE tenant_id = 'acme'"
                found = await superuser.fetchval(place)
                return bool(found == 1) and await followed(superuser)

            await until(is_followed_again, "what is chained is followed again")
            with pytest.raises(JobEndedError):
                await submit(progressed("acme", job_id, 2), key=None)
        await until(lambda: not service.node.waiting and not len(service.backlog), "the lock is gone")


async def test_a_key_whose_record_waits_is_known_after_a_restart_too(
    run_node: RunNode, make_settings: MakeSettings, database: Database, chains: Chains
) -> None:
    settings = make_settings(shutdown_grace="1s", write={"timeout": "1s"})
    one, lines = created("acme", 1, durability=LOCAL), EventLines.of([created("acme", n) for n in (2, 3)])
    async with run_node(settings) as service:
        await service.submitter.submit(created("acme", 0), key=None)
    async with halted(database, HEAD):
        async with run_node(settings) as service:
            first = await service.submitter.submit(one, key=key("one"))
            with pytest.raises(DurabilityTimeoutError):
                await service.submitter.submit_lines(lines, durability=GLOBAL, key=key("lines"))
            await until(lambda: "acme" in service.node.waiting, "the lock is met")
            await service.submitter.submit(created("beta", 0), key=None)
        async with run_node(settings) as service:
            assert await service.submitter.submit(one, key=key("one")) == first._replace(replayed=True)
            with pytest.raises(IdempotencyReusedError):
                await service.submitter.submit(created("acme", 4, durability=LOCAL), key=key("one", "another body"))
            with pytest.raises(DurabilityTimeoutError):
                await service.submitter.submit_lines(lines, durability=GLOBAL, key=key("lines"))
    async with run_node(settings) as service:
        assert (await service.submitter.submit_lines(lines, durability=GLOBAL, key=key("lines"))).replayed
        await until(lambda: not len(service.backlog), "what waited is chained")
    assert numbers(await chains.sound("acme")) == [0, 1, 2, 3]


async def test_chaining_what_waited_is_told_as_all_chaining_is(
    run_node: RunNode, make_settings: MakeSettings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[bool] = []
    """At the beginning of each transaction, whether the WAL is told that one is under way."""
    chain = Appender._chain

    async def noted(appender: Appender, batch: Sequence[Pending]) -> None:
        told.append(appender.is_chaining)
        await chain(appender, batch)

    async with run_node(make_settings()) as service:
        await service.submitter.submit(created("acme", 0), key=None)
        monkeypatch.setattr(Appender, "_chain", noted)
        async with halted(database, HEAD):
            await service.submitter.submit(created("acme", 1, durability=LOCAL), key=None)
            await until(lambda: "acme" in service.node.waiting, "the lock is met")
        await until(lambda: not service.node.waiting and not len(service.backlog), "the lock is gone")
    assert len(told) >= 2
    assert all(told)
