"""The index of jobs of a running node: from entry 1 on, whatever is restarted, changed, or leaves."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import httpx
import msgspec
import pytest

from app.read import proofs
from app.read.verification import ChainVerifier
from app.store.jobs import index as store
from app.write.followers import job_indexer
from app.write.followers.job_indexer import JobIndexer
from app.write.pending.requests import EventLines
from ledger.errors import ArchivedError
from ledger.exit_code import ExitCode, exit_code_of_receipt, exit_code_of_verdict
from ledger.job_index import covering, root_of
from ledger.job_index.proof import RunProof, verify_job
from ledger.machines.retention import SUBJECT
from ledger.verification import Verdict
from signing.keys import Keyring
from signing.receipt_judging import judged
from signing.snapshot import open_snapshot
from tests.app.chain_builder import edit as edit_behind_triggers
from tests.app.chains import until
from tests.app.conftest import MakeSettings, RunNode
from tests.app.drafts import GLOBAL, created
from tests.app.forging import forge_last_snapshot
from tests.app.shared import Shared, sharing
from tests.app.test_notary import snapshots_of, write
from tests.app.test_prunes import TENANT as PRUNED
from tests.app.test_prunes import Running, RunSite, fill, run
from tests.conftest import Database
from tests.ledger import naive_job_index as naive
from tests.ledger.blocks import BLOCK_ENTRIES, short_blocks

__all__ = ["run"]

LONGER_BLOCK = 64
SNAPSHOTS = {"batch_size": 7, "batch_interval": "1h"}


@pytest.fixture(scope="module", autouse=True)
def _short_blocks() -> object:
    with pytest.MonkeyPatch.context() as patched:
        short_blocks(patched, job_indexer)
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


async def keyring(client: httpx.AsyncClient) -> Keyring:
    return Keyring.from_json((await client.get("/v1/keys")).json())


async def test_the_receipt_of_a_job_proves_that_nothing_was_left_out_up_to_the_newest_snapshot(
    shared: Shared, tenant: str
) -> None:
    await write(shared.service, tenant, 40)
    await shared.service.notary.sign_now(tenant)
    job_id = await shared.superuser.fetchval(
        "SELECT job_id FROM scheduler.scheduler_log WHERE tenant_id = $1 AND seq = 5", tenant
    )
    async with httpx.AsyncClient(base_url=shared.url) as client:
        await client.post(f"/v1/jobs/{job_id}/cancel", json={"tenant_id": tenant, "reason": "r", "requestor": "o"})
        answer = await client.get(f"/v1/jobs/{job_id}/receipt", params={"tenant_id": tenant})
        found = judged(answer.content, await keyring(client)).to_json()
    assert found["verdicts"]["completeness"] == "ok"
    assert (found["receipt"]["complete_to_seq"], found["receipt"]["covers"]) == (40, "job")
    assert [each["seq"] for each in found["receipt"]["entries"]] == [5, 41]
    assert found["limits"][0].startswith("what came after seq 40")


async def test_a_job_without_entries_has_a_receipt_that_says_so_and_one_with_entries_has_none(
    shared: Shared, tenant: str
) -> None:
    await write(shared.service, tenant, 40)
    async with httpx.AsyncClient(base_url=shared.url) as client:
        params = {"tenant_id": tenant, "absent": "true"}
        await shared.service.notary.sign_now(tenant)
        answer = await client.get("/v1/jobs/nobody-made-me/receipt", params=params)
        found = judged(answer.content, await keyring(client)).to_json()
        assert (found["receipt"]["covers"], found["receipt"]["complete_to_seq"]) == ("absent", 40)
        assert (found["verdicts"]["completeness"], exit_code_of_receipt(found)) == ("ok", ExitCode.FINE)
        job_id = await shared.superuser.fetchval(
            "SELECT job_id FROM scheduler.scheduler_log WHERE tenant_id = $1 AND seq = 5", tenant
        )
        refused = await client.get(f"/v1/jobs/{job_id}/receipt", params=params)
        assert (refused.status_code, refused.json()["path"]) == (422, "job_id")
        nobody = await client.get("/v1/jobs/j/receipt", params={"tenant_id": "nobody", "absent": "true"})
        assert nobody.status_code == 404


async def test_all_entries_of_a_job_or_none_are_proved_by_the_index_of_any_snapshot_that_has_one(
    shared: Shared, tenant: str
) -> None:
    await write(shared.service, tenant, 40)
    await shared.service.notary.sign_now(tenant)
    job_id = await shared.superuser.fetchval(
        "SELECT job_id FROM scheduler.scheduler_log WHERE tenant_id = $1 AND seq = 5", tenant
    )
    async with httpx.AsyncClient(base_url=shared.url) as client:
        keys = await keyring(client)
        snapshots = (await client.get("/v1/snapshots", params={"tenant_id": tenant})).json()["items"]
        for snapshot in (None, *(each["id"] for each in snapshots)):
            for asked in (job_id, "nobody-made-me"):
                params = {"tenant_id": tenant, "job_id": asked} | (
                    {} if snapshot is None else {"snapshot_id": snapshot}
                )
                answer = (await client.get("/v1/chain/proof/job", params=params)).json()
                opened = open_snapshot(json.dumps(answer["dsse_envelope"]), keys)
                assert (opened.verdict, opened.claim.to_seq) == ("ok", answer["tree_size"])
                assert isinstance(opened.claim.job_index, list)
                roots = [bytes.fromhex(root) for root in opened.claim.job_index]
                entries = [(each["leaf_index"], bytes.fromhex(each["leaf_hash"])) for each in answer["entries"]]
                assert [index for index, _ in entries] == ([4] if asked == job_id and answer["tree_size"] > 4 else [])
                runs = msgspec.convert(answer["runs"], list[RunProof])
                verify_job(asked, answer["tree_size"], roots, entries, runs)
        unknown = await client.get(
            "/v1/chain/proof/job", params={"tenant_id": tenant, "job_id": "j", "snapshot_id": 2**40}
        )
        assert unknown.status_code == 404


async def test_a_stored_run_that_was_changed_proves_nothing_until_it_was_made_again(
    shared: Shared, tenant: str
) -> None:
    superuser = shared.superuser
    await write(shared.service, tenant, 40)
    await shared.service.notary.sign_now(tenant)
    job_id = await superuser.fetchval(
        "SELECT job_id FROM scheduler.scheduler_log WHERE tenant_id = $1 AND seq = 5", tenant
    )
    async with httpx.AsyncClient(base_url=shared.url) as client:

        async def status() -> list[int]:
            params = {"tenant_id": tenant}
            proof = await client.get("/v1/chain/proof/job", params=params | {"job_id": job_id})
            return [proof.status_code, (await client.get(f"/v1/jobs/{job_id}/receipt", params=params)).status_code]

        assert await status() == [200, 200]
        await superuser.execute(
            "UPDATE scheduler.job_index_piece SET leaves = overlay(leaves placing '\\x00'::bytea from 1)"
            " WHERE tenant_id = $1",
            tenant,
        )
        assert await status() == [409, 409]

        async def is_made_again() -> bool:
            return await status() == [200, 200]

        await until(is_made_again, "the index is made again from the entries")


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


async def test_the_index_goes_on_where_a_prune_ends_inside_a_block(
    run: RunSite, superuser: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the node starts again while that block is still open."""
    short_blocks(monkeypatch, job_indexer, entries=LONGER_BLOCK)
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
        assert claim.job_index == [root.hex() for root in naive.roots(log[:size], LONGER_BLOCK)]

    async with run() as node:
        await fill(node)
        await node.service.submitter.submit_lines(EventLines.of([created(PRUNED, 99)]), durability=GLOBAL, key=None)
        await read()
        pruned = await node.prune()
        await node.removed(pruned.planned.plan.to_seq)
        assert (await node.first_seq() - 1) % LONGER_BLOCK, "the prune ends inside a block"
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


async def verdict_of(node: Running) -> Verdict:
    verdict: Verdict = (await node.services[ChainVerifier].again(PRUNED)).verdict
    return verdict


async def proof_of(node: Running, job_id: str) -> dict[str, Any]:
    return await proofs.job(node.service._pool, node.service.retention, PRUNED, job_id, None)


async def log_of(superuser: asyncpg.Connection) -> list[naive.Entry]:
    rows = await superuser.fetch(
        "SELECT job_id, chain_link FROM scheduler.scheduler_log WHERE tenant_id = $1 ORDER BY seq", PRUNED
    )
    return [(row["job_id"], hashlib.sha256(b"\0" + bytes.fromhex(row["chain_link"])).digest()) for row in rows]


@pytest.mark.parametrize("block", [16, LONGER_BLOCK])
async def test_an_entry_that_the_operator_leaves_out_of_a_run_over_what_left_is_found(
    run: RunSite, superuser: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    """In the database, and in a bundle, by the service and by whoever reads the database."""
    short_blocks(monkeypatch, job_indexer, entries=block)
    async with run() as node:
        await fill(node)
        before = await log_of(superuser)
        pruned = await node.prune()
        await node.removed(to_seq := pruned.planned.plan.to_seq)
        await node.service.submitter.submit_lines(EventLines.of([created(PRUNED, 97)]), durability=GLOBAL, key=None)
        await node.service.notary.sign_now(PRUNED)
        assert (await verdict_of(node)).verdicts["snapshots"] == "ok"
        with pytest.raises(ArchivedError):
            await proof_of(node, before[0][0])
        log = before[:to_seq] + await log_of(superuser)
        lacking = [*log[:to_seq], ("of nobody", log[to_seq][1]), *log[to_seq + 1 :]]
        over = [place.begin < to_seq for place in covering(len(log))]
        assert any(is_over and place.end > to_seq for is_over, place in zip(over, covering(len(log)), strict=True))
        pairs = zip(naive.roots(log, block), naive.roots(lacking, block), over, strict=True)
        await forge_last_snapshot(
            node.service,
            superuser,
            PRUNED,
            job_index=[(bad if is_over else good).hex() for good, bad, is_over in pairs],
        )
        verdict = await verdict_of(node)
        assert verdict.first_break is not None
        assert (verdict.first_break.kind, verdict.first_break.seq) == ("snapshot-root", len(log))
        assert "job_index of entries" in verdict.first_break.detail
        # Without what was kept nobody can tell, and nobody says that it is right.
        await superuser.execute("DELETE FROM scheduler.job_index_left")
        unknown = await verdict_of(node)
        assert (unknown.first_break, unknown.verdicts["snapshots"]) == (None, "not_checked")
        assert exit_code_of_verdict(unknown.to_json(0.0)) == ExitCode.INCOMPLETE


@pytest.mark.parametrize("block", [4, LONGER_BLOCK])
async def test_a_chain_that_was_pruned_before_it_had_an_index_gets_one_from_its_floor_on(
    run: RunSite, superuser: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    """Compared as a whole, also with another prune above; proofs say where they begin."""
    short_blocks(monkeypatch, job_indexer, entries=block)
    with pytest.MonkeyPatch.context() as before:

        async def none(*_: object, **__: object) -> None:
            return None

        before.setattr(JobIndexer, "grown", none)
        async with run() as node:
            await fill(node)
            log = await log_of(superuser)
            to_seq = (await node.prune()).planned.plan.to_seq
            await node.removed(to_seq)
    await superuser.execute("DELETE FROM scheduler.job_index_left")
    begin = -(-to_seq // block) * block
    async with run() as node:
        while True:
            await write(node.service, PRUNED, 3)
            await node.service.notary.sign_now(PRUNED)
            claim = (await snapshots_of(superuser, PRUNED))[-1]["claim"]
            if isinstance(claim.job_index, list):
                break
            assert claim.to_seq <= begin + 100
        entries = log[:to_seq] + await log_of(superuser)
        assert (claim.index_begin, claim.job_index_from) == (begin, begin + 1)
        assert claim.job_index == [
            root_of(b"".join(naive.leaves(entries, place.level, place.begin, place.end, block))).hex()
            for place in covering(claim.to_seq, begin)
        ]
        assert (await verdict_of(node)).verdicts["snapshots"] == "ok"
        for job_id in (SUBJECT, entries[-1][0], "of nobody"):
            proved = await proof_of(node, job_id)
            mine = [index for index in range(begin, claim.to_seq) if entries[index][0] == job_id]
            assert (proved["from_seq"], proved["tree_size"]) == (begin + 1, claim.to_seq)
            assert [each["leaf_index"] for each in proved["entries"]] == mine
        await forge_last_snapshot(node.service, superuser, PRUNED, job_index=["00" * 32, *claim.job_index[1:]])
        assert (await verdict_of(node)).breaks == {"snapshot-root": 1}


async def test_an_index_is_made_again_behind_a_floor_by_what_was_kept(
    run: RunSite, superuser: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_indexer, "RETRY_PAUSE_S", 0.0)
    async with run() as node:
        await fill(node)
        before = await log_of(superuser)
        to_seq = (await node.prune()).planned.plan.to_seq
        await node.removed(to_seq)
        await superuser.execute("UPDATE scheduler.job_index_piece SET leaves = ''::bytea WHERE tenant_id = $1", PRUNED)
        for _ in range(6):
            await write(node.service, PRUNED, 3)
            await node.service.notary.sign_now(PRUNED)
        await until(lambda: not node.service.notary._indexer.behind, "the index has reached the snapshots")
        await write(node.service, PRUNED, 1)
        await node.service.notary.sign_now(PRUNED)
        log = before[:to_seq] + await log_of(superuser)
        claim = (await snapshots_of(superuser, PRUNED))[-1]["claim"]
        assert claim.index_begin == 0
        assert claim.job_index == [root.hex() for root in naive.roots(log[: claim.to_seq], BLOCK_ENTRIES)]
        assert await node.is_valid()
