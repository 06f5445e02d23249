"""Whose turn comes next with a follower: who is waited for, what has come together, and a rush behind all others."""

from __future__ import annotations

from collections.abc import Callable

import asyncpg
import pytest

from app.store import following
from app.store.appended import AppendedEntries
from app.store.chaining import _ROW_BYTES, LOG_COLUMNS, LogRows, Piece
from app.write.followers.followers import TableFollower
from app.write.followers.job_table import JobTable
from ledger.positions import BEFORE_FIRST
from tests.app.chains import until
from tests.app.conftest import RunNode
from tests.app.drafts import created
from tests.conftest import Database


async def chain_jobs(run_node: RunNode, count: int) -> None:
    """A node that chains so many entries of tenant acme, and ends."""
    async with run_node() as service:
        for number in range(count):
            await service.submitter.submit(created("acme", number), key=None)


def job_follower(database: Database, waiting: Callable[[], int] = lambda: 0) -> TableFollower:
    """A follower of the job table that no node runs: the test gives it its turns."""
    return TableFollower(
        JobTable(lambda *_: None),
        lambda: following.connect(database.service_url, 5),
        lambda _: BEFORE_FIRST,
        waiting,
    )


async def test_what_is_chained_while_others_are_followed_comes_together_first(
    run_node: RunNode, superuser: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed_to = "SELECT seq FROM scheduler.follower_positions WHERE follower = 'jobs' AND tenant_id = $1"

    async def stands_at(tenant_id: str, seq: int) -> bool:
        return bool(await superuser.fetchval(followed_to, tenant_id) == seq)

    monkeypatch.setattr("app.write.followers.followers.SEARCH_INTERVAL_S", 3600)
    async with run_node() as service:
        for tenant_id in ("acme", "globex"):
            await service.submitter.submit(created(tenant_id, 1), key=None)
            await until(lambda tenant_id=tenant_id: stands_at(tenant_id, 1), "the first entry is followed")
        await until(lambda: service.job_table._idle.is_set(), "all is followed")
        monkeypatch.setattr("app.write.followers.followers.COLLECT_S", 3600)
        for tenant_id in ("acme", "globex"):
            await service.submitter.submit(created(tenant_id, 2), key=None)
        service.job_table.follow_now("globex")
        await until(lambda: stands_at("globex", 2), "what somebody waits for is followed")
        assert await stands_at("acme", 1)
        await service.job_table.drain(60)
        assert await stands_at("acme", 2)


async def test_a_rush_is_followed_behind_it_or_when_it_has_lasted_or_grown_enough(
    run_node: RunNode, database: Database, superuser: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_node() as service:
        await service.submitter.submit(created("acme", 1), key=None)
    await superuser.execute("DELETE FROM scheduler.follower_positions WHERE tenant_id = 'acme'")
    # Nobody but the test says when the time to come together is over.
    monkeypatch.setattr("app.write.followers.followers.COLLECT_S", 3600)
    monkeypatch.setattr("app.write.followers.followers.RUSH_ENTRIES", 3)

    async def is_followed(*came: int, looked: bool = False, waiting: int = 0) -> bool:
        """Whether the tenant is to be followed once so many entries have come together each time, and others wait."""
        follower = job_follower(database, lambda: waiting)
        seq = 0
        for entries in came:
            follower.chained(grown(range(seq + 1, seq + entries + 1)))
            seq += entries
            follower._collected()
        if looked:
            await follower._find_behind()
            follower._lose_connection()
        return "acme" in follower._behind

    assert await is_followed(2)
    assert not await is_followed(3)
    assert not await is_followed(3, 4)
    assert not await is_followed(3, looked=True)
    assert await is_followed(3, 2)
    assert await is_followed(2, waiting=2)
    assert not await is_followed(2, waiting=3)
    with monkeypatch.context() as patched:
        patched.setattr("app.write.followers.followers.RUSH_BYTES_MAX", 7 * (_ROW_BYTES + 2))
        assert not await is_followed(3, 3)
        assert await is_followed(3, 3, 3)
    with monkeypatch.context() as patched:
        patched.setattr("app.write.followers.followers.RUSH_S", 0)
        assert await is_followed(3)


async def test_a_place_that_moves_while_it_is_locked_time_and_again_is_being_followed_and_is_not_told(
    run_node: RunNode, database: Database, superuser: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await chain_jobs(run_node, 4)
    monkeypatch.setattr("app.write.followers.followers.LOCK_REPORTED_AFTER_S", 0)
    place = "scheduler.follower_positions {} WHERE tenant_id = 'acme'"
    await superuser.execute("SET session_replication_role = replica")
    await superuser.execute("UPDATE " + place.format("SET seq = 1"))
    follower = job_follower(database)

    async def told_when_locked(looks: int) -> set[str]:
        """What is told before a turn that meets the lock, after so many looks."""
        async with superuser.transaction():
            await superuser.execute("SELECT FROM " + place.format("") + " FOR UPDATE")
            for _ in range(looks):
                await follower._find_behind()
            told = {*follower.locked}
            assert await follower._follow(("acme",))
        return told

    assert await told_when_locked(1) == set()
    assert await told_when_locked(1) == {"acme"}
    await superuser.execute("UPDATE " + place.format("SET seq = 2"))
    assert await told_when_locked(1) == set()
    assert await told_when_locked(2) == {"acme"}
    follower._lose_connection()


async def test_turns_that_take_long_get_shorter_and_a_tenant_of_few_entries_waits_for_none_of_many(
    run_node: RunNode, database: Database, superuser: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_node() as service:
        for number in range(8):
            await service.submitter.submit(created("acme", number), key=None)
        await service.submitter.submit(created("globex", 1), key=None)
    await superuser.execute("DELETE FROM scheduler.follower_positions WHERE follower = 'jobs'")
    monkeypatch.setattr("app.write.followers.followers.ENTRIES_A_TURN", 4)
    follower, followed = job_follower(database), []
    follower._observe = lambda entries: followed.append({name: len(of) for name, of in entries.items()})
    for long_s in (0.0, 0.0, 60.0, 60.0):
        monkeypatch.setattr("app.write.followers.followers.TURN_LONG_S", long_s)
        assert await follower._follow(("acme", "globex"))
    follower._lose_connection()
    assert followed == [{"globex": 1, "acme": 3}, {"acme": 2}, {"acme": 1}, {"acme": 2}]


async def test_a_rush_that_goes_on_after_a_lull_goes_first_again(
    run_node: RunNode, database: Database, superuser: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await chain_jobs(run_node, 6)
    monkeypatch.setattr("app.write.followers.followers.COLLECT_S", 3600)
    monkeypatch.setattr("app.write.followers.followers.RUSH_ENTRIES", 3)
    monkeypatch.setattr("app.write.followers.followers.ENTRIES_A_TURN", 2)

    async def is_followed_on(first: int, meanwhile: int, *, hurries: bool = False) -> bool:
        """Whether the next turn comes at once when so many entries came meanwhile, behind ``first`` that had come."""
        await superuser.execute("DELETE FROM scheduler.follower_positions WHERE tenant_id = 'acme'")
        follower = job_follower(database)
        follower.chained(grown(range(10, 10 + first)))
        follower._collected()
        if hurries:
            follower.follow_now("acme")
        follower._behind.clear()
        follower.chained(grown(range(20, 20 + meanwhile)))
        assert await follower._follow(("acme",))
        follower._lose_connection()
        assert await superuser.fetchval("SELECT seq FROM scheduler.follower_positions WHERE tenant_id = 'acme'") == 2
        assert "acme" in follower._collected_tenants
        return "acme" in follower._behind

    assert await is_followed_on(2, 2)
    assert not await is_followed_on(2, 3)
    assert await is_followed_on(2, 3, hurries=True)
    with monkeypatch.context() as patched:
        patched.setattr("app.write.followers.followers.RUSH_BYTES_MAX", 3 * (_ROW_BYTES + 2))
        assert await is_followed_on(2, 3)
    with monkeypatch.context() as patched:
        patched.setattr("app.write.followers.followers.RUSH_S", 0)
        assert await is_followed_on(3, 3), "it has lasted"


def grown(seqs: range) -> AppendedEntries:
    """New rows of tenant acme with these seqs, as they come behind the commit."""
    rows = [tuple({"tenant_id": "acme", "seq": n, "payload": "{}"}.get(name) for name in LOG_COLUMNS) for n in seqs]
    return AppendedEntries(LogRows([Piece("acme", seqs[0], len(seqs), rows)]), {"acme": []})
