"""The index of jobs of a running node: from entry 1 on, whatever is restarted, changed, or leaves."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator

import asyncpg
import pytest

from app.read.verification import ChainVerifier
from app.store import job_index as store
from app.write.followers import job_indexer
from app.write.followers.job_indexer import JobIndexer
from app.write.pending.requests import EventLines
from ledger.job_index import covering
from tests.app.chain_builder import edit as edit_behind_triggers
from tests.app.chains import until
from tests.app.conftest import MakeSettings, RunNode
from tests.app.drafts import GLOBAL, created
from tests.app.shared import Shared, sharing
from tests.app.test_notary import snapshots_of, write
from tests.app.test_prunes import TENANT as PRUNED
from tests.app.test_prunes import RunSite, fill, run
from tests.conftest import Database
from tests.ledger import naive_job_index as naive
from tests.ledger.blocks import BLOCK_ENTRIES, short_blocks

__all__ = ["run"]

SNAPSHOTS = {"batch_size": 7, "batch_interval": "1h"}


@pytest.fixture(scope="module", autouse=True)
def _short_blocks() -> object:
    with pytest.MonkeyPatch.context() as patched:
        short_blocks(patched, store, job_indexer)
        patched.setattr(job_indexer, "ENTRIES_A_TURN", 16 * BLOCK_ENTRIES)
        yield


@pytest.fixture(scope="module")
async def shared(make_shared_settings: MakeSettings, shared_database: Database) -> AsyncIterator[Shared]:
    async with sharing(make_shared_settings(chain=SNAPSHOTS), shared_database) as shared:
        yield shared


async def indexes(superuser: asyncpg.Connection, tenant: str, first: int = 0) -> list[int]:
    """Where the snapshots end that have an index, each of which is compared with the entries by the naive twin."""
    rows = await superuser.fetch(
        "SELECT seq, job_id, chain_link FROM scheduler.scheduler_log WHERE tenant_id = $1 ORDER BY seq", tenant
    )
    log = [(row["job_id"], hashlib.sha256(b"\0" + bytes.fromhex(row["chain_link"])).digest()) for row in rows]
    found = []
    for snapshot in (await snapshots_of(superuser, tenant))[first:]:
        claim = snapshot["claim"]
        if isinstance(claim.job_index, list):
            assert claim.job_index == [root.hex() for root in naive.roots(log[: claim.to_seq], BLOCK_ENTRIES)]
            found.append(claim.to_seq)
    return found


async def test_every_snapshot_has_the_index_of_all_entries_up_to_its_end(shared: Shared, tenant: str) -> None:
    service, superuser = shared.service, shared.superuser
    await write(service, tenant, 150)
    await service.notary.sign_now(tenant)
    for _ in range(3):
        await write(service, tenant, 3)
        await service.notary.sign_now(tenant)
    ends = await indexes(superuser, tenant)
    assert ends[-1] == 159
    assert len(ends) == len(await snapshots_of(superuser, tenant))
    verdict = (await shared.services[ChainVerifier].again(tenant)).verdict
    assert (verdict.is_valid, verdict.signed_to.seq) == (True, 159)


async def test_runs_that_were_merged_are_not_stored_any_more(shared: Shared, tenant: str) -> None:
    await write(shared.service, tenant, 150)
    await shared.service.notary.sign_now(tenant)
    stored = await store.directories(shared.superuser, tenant)
    assert [*stored] == sorted(place[:2] for place in covering(150) if place.end - place.begin >= BLOCK_ENTRIES)


async def test_the_index_goes_on_from_the_newest_snapshot_when_the_node_starts_again(
    run_node: RunNode, make_settings: MakeSettings, superuser: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    for size in (33, 66, 99):
        async with run_node(make_settings(chain=SNAPSHOTS)) as service:
            await write(service, "acme", 33)
            await service.notary.sign_now("acme")
            assert (await indexes(superuser, "acme"))[-1] == size
        monkeypatch.setattr(JobIndexer, "follow", None)


async def test_a_chain_of_before_gets_its_index_once_all_of_it_was_read(
    run_node: RunNode, make_settings: MakeSettings, superuser: asyncpg.Connection
) -> None:
    with pytest.MonkeyPatch.context() as patched:

        async def none(*_: object, **__: object) -> None:
            return None

        patched.setattr(JobIndexer, "grown", none)
        async with run_node(make_settings(chain=SNAPSHOTS)) as service:
            await write(service, "acme", 100)
            await service.notary.sign_now("acme")
    assert await indexes(superuser, "acme") == []
    async with run_node(make_settings(chain=SNAPSHOTS)) as service:
        await write(service, "acme", 1)
        await service.notary.sign_now("acme")
        assert await indexes(superuser, "acme") == [], "a turn takes 32 entries"
        await until(lambda: not service.notary._indexer.behind, "the index has reached the snapshots")
        await write(service, "acme", 2)
        await service.notary.sign_now("acme")
        assert await indexes(superuser, "acme") == [103]


@pytest.mark.parametrize("change", ["SET leaves = leaves || leaves", "SET leaves = ''::bytea", "DELETE"])
async def test_a_stored_run_that_was_changed_is_not_believed_and_the_index_is_made_again(
    run_node: RunNode,
    make_settings: MakeSettings,
    superuser: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
    change: str,
) -> None:
    monkeypatch.setattr(job_indexer, "RETRY_PAUSE_S", 0.0)
    async with run_node(make_settings(chain=SNAPSHOTS)) as service:
        await write(service, "acme", 30)
        await service.notary.sign_now("acme")
        statement = (
            f"UPDATE scheduler.job_index_piece {change}"
            if "SET" in change
            else f"{change} FROM scheduler.job_index_piece"
        )
        await superuser.execute(f"{statement} WHERE tenant_id = 'acme' AND level = 0")
        for _ in range(3):
            await write(service, "acme", 2)
            await service.notary.sign_now("acme")
        await until(lambda: not service.notary._indexer.behind, "the index has reached the snapshots")
        await write(service, "acme", 1)
        await service.notary.sign_now("acme")
        assert (await indexes(superuser, "acme"))[-1] == 37
        assert len(await store.directories(superuser, "acme")) == sum(
            place.end - place.begin >= BLOCK_ENTRIES for place in covering(37)
        )


async def test_an_index_that_no_trusted_key_signed_is_not_gone_on_from(
    run_node: RunNode, make_settings: MakeSettings, superuser: asyncpg.Connection
) -> None:
    """Whoever has the database puts another index into the newest snapshot: its signature does not hold."""
    async with run_node(make_settings(chain=SNAPSHOTS)) as service:
        await write(service, "acme", 9)
        await service.notary.sign_now("acme")
    rows = await snapshots_of(superuser, "acme")
    root = rows[-1]["claim"].job_index[0]
    payload = "(dsse_envelope ->> 'payload')"
    forged = f"""
        json_build_object('payload', translate(encode(convert_to(replace(convert_from(decode({payload}, 'base64'),
            'UTF8'), '{root}', '{"00" * 32}'), 'UTF8'), 'base64'), E'\\n', ''),
            'payloadType', dsse_envelope -> 'payloadType', 'signatures', dsse_envelope -> 'signatures')
    """
    await edit_behind_triggers(
        superuser, f"UPDATE scheduler.batch_snapshot SET dsse_envelope = {forged} WHERE to_seq = $1", rows[-1]["to_seq"]
    )
    async with run_node(make_settings(chain=SNAPSHOTS)) as service:
        await write(service, "acme", 1)
        (made,) = await service.notary.sign_now("acme")
        assert made["to_seq"] == 10
    last = await superuser.fetchval("SELECT max(id) FROM scheduler.batch_snapshot WHERE tenant_id = 'acme'")
    await superuser.execute("SET session_replication_role = replica")
    await superuser.execute("DELETE FROM scheduler.batch_snapshot WHERE tenant_id = 'acme' AND id <> $1", last)
    assert await indexes(superuser, "acme") == [10]


async def test_the_index_goes_on_where_a_prune_ends_inside_a_block(run: RunSite, superuser: asyncpg.Connection) -> None:
    log: list[naive.Entry] = []

    async def read() -> None:
        for row in await superuser.fetch(
            "SELECT job_id, chain_link FROM scheduler.scheduler_log WHERE tenant_id = $1 AND seq > $2 ORDER BY seq",
            PRUNED,
            len(log),
        ):
            log.append((row["job_id"], hashlib.sha256(b"\0" + bytes.fromhex(row["chain_link"])).digest()))

    async def last_is_right(size: int) -> None:
        claim = (await snapshots_of(superuser, PRUNED))[-1]["claim"]
        assert claim.to_seq == size
        assert claim.job_index == [root.hex() for root in naive.roots(log[:size], BLOCK_ENTRIES)]

    async with run() as node:
        await fill(node)
        await node.service.submitter.submit_lines(EventLines.of([created(PRUNED, 99)]), durability=GLOBAL, key=None)
        await read()
        pruned = await node.prune()
        await node.removed(pruned.planned.plan.to_seq)
        assert (await node.first_seq() - 1) % BLOCK_ENTRIES, "the prune ends inside a block"
        await read()
        await node.service.notary.sign_now(PRUNED)
        await last_is_right(len(log))
        assert await node.is_valid()
    async with run() as node:
        await node.service.submitter.submit_lines(EventLines.of([created(PRUNED, 98)]), durability=GLOBAL, key=None)
        await read()
        await node.service.notary.sign_now(PRUNED)
        await last_is_right(len(log))
        assert await node.is_valid()
