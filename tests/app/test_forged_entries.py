"""An entry put into the table under this node's name holds together, and is not signed all the same."""

from __future__ import annotations

import asyncpg
import pytest

from app.node.service import Service
from app.store.notary import GrownTree, store_trees
from app.write.pending.requests import EventLines
from ledger.errors import SigningUnavailableError
from ledger.merkle import leaf_hash
from ledger.merkle.tiles import TileTree
from tests.app.admitting import admit_service
from tests.app.chains import Chains, until
from tests.app.conftest import MakeSettings, RunNode
from tests.app.drafts import GLOBAL, created
from tests.app.forging import forge
from tests.app.shared import Shared

SMALL_SEGMENTS = {"segment_bytes": 65536, "batch_max_bytes": 65536, "record_bytes_max": 65536}


async def write(service: Service, tenant_id: str, count: int = 1) -> None:
    await service.submitter.submit_lines(
        EventLines.of([created(tenant_id, n) for n in range(count)]), durability=GLOBAL, key=None
    )


async def signed_size(superuser: asyncpg.Connection, tenant_id: str) -> int:
    size: int = await superuser.fetchval(
        "SELECT coalesce(max(tree_size), 0) FROM scheduler.merkle_head WHERE tenant_id = $1 AND checkpoint IS NOT NULL",
        tenant_id,
    )
    return size


async def assert_signed_no_further(
    service: Service, superuser: asyncpg.Connection, seq: int, tenant_id: str = "acme"
) -> None:
    """The tenant is signed up to the forged entry and no further, which says so; another one goes on."""
    await until(lambda: tenant_id in service.node.unsigned, "the forged entry is met")
    assert f"seq {seq} (COMPLETE of job victim) bears the name of this node" in service.node.unsigned[tenant_id]
    with pytest.raises(SigningUnavailableError, match="bears the name of this node"):
        await service.notary.sign_now(tenant_id)
    beta = f"{tenant_id}-beta"
    await write(service, beta)

    async def is_signed() -> bool:
        return await signed_size(superuser, beta) == 1

    await until(is_signed, "the other tenant is signed")
    assert await signed_size(superuser, tenant_id) < seq
    assert service.node.failure is None


async def test_an_entry_forged_while_the_node_runs_is_not_signed(shared: Shared, tenant: str) -> None:
    service = shared.service
    await write(service, tenant, 3)
    await service.notary.sign_now(tenant)
    seq = await forge(shared.superuser, tenant, service.node.node_id)
    await write(service, tenant)
    await assert_signed_no_further(service, shared.superuser, seq, tenant)


async def test_an_entry_forged_while_the_node_is_down_is_not_signed(
    run_node: RunNode, superuser: asyncpg.Connection
) -> None:
    async with run_node() as service:
        for tenant_id in ("unsigned", "signed"):
            await write(service, tenant_id, 3)
        await service.notary.sign_now("signed")
        await until(lambda: service._started.checkpoints.size("signed") == 3, "the checkpoint is kept")
    seqs = {each: await forge(superuser, each, service.node.node_id) for each in ("unsigned", "signed")}
    async with run_node() as service:
        for tenant_id, seq in seqs.items():
            await assert_signed_no_further(service, superuser, seq, tenant_id)


async def test_an_entry_forged_into_a_chain_the_node_has_not_written_yet_is_not_signed(
    service: Service, run_node: RunNode, make_settings: MakeSettings, superuser: asyncpg.Connection
) -> None:
    async with run_node(make_settings("other")) as other:
        await admit_service(service, other)
        await write(other, "acme")
        await other.notary.sign_now("acme")
        await forge(superuser, "acme", service.node.node_id)
        await write(service, "acme")
        await until(lambda: "acme" in service.node.unsigned, "the forged entry is met")


async def test_an_entry_that_the_stored_tree_was_made_to_hold_is_not_signed_over(shared: Shared, tenant: str) -> None:
    service, superuser = shared.service, shared.superuser
    stored = "SELECT checkpoint FROM scheduler.merkle_head WHERE tenant_id = $1"
    await write(service, tenant, 3)
    await service.notary.sign_now(tenant)
    await until(lambda: service._started.checkpoints.size(tenant) == 3, "the checkpoint is kept")
    seq = await forge(superuser, tenant, service.node.node_id)
    tree = TileTree(0, {})
    links = [bytes.fromhex(entry["chain_link"]) for entry in await shared.chains.entries(tenant)]
    tree.append_leaf_hashes([leaf_hash(link) for link in links])
    note = await superuser.fetchval(stored, tenant)
    await store_trees(superuser, [GrownTree(tenant, tree, note)])
    await write(service, tenant)
    await until(lambda: tenant in service.node.unsigned, "the forged entry is met")
    assert f"seq {seq} (COMPLETE of job victim) bears the name of this node" in service.node.unsigned[tenant]
    assert await superuser.fetchval(stored, tenant) == note


async def test_what_an_earlier_process_chained_and_did_not_sign_is_found_in_the_wal_and_signed(
    run_node: RunNode, make_settings: MakeSettings, chains: Chains, superuser: asyncpg.Connection
) -> None:
    settings = make_settings(shutdown_grace="1s", wal=SMALL_SEGMENTS)
    async with run_node(settings) as service:
        await write(service, "acme", 3)
        await until(lambda: service._started.checkpoints.size("acme") == 3, "the checkpoint is kept")
    async with superuser.transaction():
        await superuser.execute("LOCK TABLE scheduler.merkle_head IN ACCESS EXCLUSIVE MODE")
        async with run_node(settings) as service:
            for _ in range(20):
                await write(service, "acme", 50)
            await write(service, "gamma", 3)
    async with run_node(settings) as service:
        await service.notary.sign_now("acme")
        await service.notary.sign_now("gamma")
        assert service.node.unsigned == {}
        assert await signed_size(superuser, "acme") == 1003
        assert await signed_size(superuser, "gamma") == 3
    await chains.sound("acme")
