"""Keys and declarations that a node holds in memory: never longer, nor older, than it may."""

from __future__ import annotations

import asyncio
from pathlib import Path
from time import monotonic

import asyncpg
import pytest

from app.store import privacy as store
from app.store.privacy import DeclaredFields
from app.trust.privacy_knowledge import PrivacyKnowledge
from app.trust.subject_keys import SubjectKeys
from tests.app.chains import until

SUBJECTS = 7


@pytest.fixture
async def keys(pool: asyncpg.Pool, tmp_path: Path) -> SubjectKeys:
    keys = SubjectKeys(pool, f"file:{tmp_path}/master.key")
    async with pool.acquire() as connection:
        await keys.begin(connection)
    keys.trust(monotonic())
    return keys


async def destroy(pool: asyncpg.Pool, tag: bytes) -> None:
    async with pool.acquire() as connection, connection.transaction():
        await store.destroy_keys(connection, "acme", tag, await store.next_revision(connection))


async def test_a_subject_has_one_key_whoever_asks_first(pool: asyncpg.Pool, keys: SubjectKeys, tmp_path: Path) -> None:
    other = SubjectKeys(pool, f"file:{tmp_path}/master.key")
    async with pool.acquire() as connection:
        await other.begin(connection)
    tags = [keys.tag("acme", f"subject {number}") for number in range(SUBJECTS)]
    assert tags == [other.tag("acme", f"subject {number}") for number in range(SUBJECTS)]
    assert keys.tag("beta", "subject 0") not in tags
    found = await asyncio.gather(*(one.of_subjects("acme", tags) for one in (keys, other, keys, other)))
    ids = [{tag: key.key_id for tag, key in each.items()} for each in found]
    assert ids == [ids[0]] * 4
    assert len(set(ids[0].values())) == SUBJECTS
    assert await pool.fetchval("SELECT count(*) FROM scheduler.subject_keys") == SUBJECTS
    assert set(await keys.by_id("beta", ids[0].values())) == set(), "a key belongs to its tenant"


@pytest.mark.parametrize("erased_meanwhile", [False, True])
async def test_a_key_that_was_read_while_erasures_were_taken_in_is_not_held(
    pool: asyncpg.Pool, keys: SubjectKeys, superuser: asyncpg.Connection, erased_meanwhile: bool
) -> None:
    tag = keys.tag("acme", "alice")
    async with pool.acquire() as connection:
        transaction = connection.transaction()
        await transaction.start()
        await store.read_state(connection, is_locked=True)
        asking = asyncio.create_task(keys.of_subjects("acme", [tag]))

        async def waits() -> bool:
            return bool(
                await superuser.fetchval("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
            )

        await until(waits, "making the key waits for the ledger's row")
        if erased_meanwhile:
            keys.forget("acme", "00" * 16, b"some other subject")
        await transaction.rollback()
    first = (await asking)[tag]
    await destroy(pool, tag)
    again = (await keys.of_subjects("acme", [tag]))[tag]
    assert (again.key_id != first.key_id) is erased_meanwhile


async def test_an_answer_that_was_overtaken_brings_no_older_declaration_back(
    pool: asyncpg.Pool, keys: SubjectKeys
) -> None:
    knowledge = PrivacyKnowledge(pool, keys)
    knowledge.learn(DeclaredFields("acme", ["spec"], None, 6))
    knowledge.learn(DeclaredFields("acme", [], None, 5))
    assert knowledge.declarations["acme"].fields == (("spec",),)
    knowledge.learn(DeclaredFields("acme", ["edited by hand"], None, 7))
    assert knowledge.declarations["acme"].fields == (("spec",),)


async def test_keys_are_let_go_with_what_is_learned(pool: asyncpg.Pool, keys: SubjectKeys) -> None:
    knowledge = PrivacyKnowledge(pool, keys)
    tags = [keys.tag("acme", name) for name in ("alice", "bob")]
    held = await keys.of_subjects("acme", tags)
    await destroy(pool, tags[0])
    ids = [held[tag].key_id for tag in tags]
    assert (await keys.by_id("acme", ids))[ids[0]] is not None
    await knowledge.refresh()
    shown = await keys.by_id("acme", ids)
    assert shown[ids[0]] is None
    assert shown[ids[1]] is not None
