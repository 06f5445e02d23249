"""Keys stay what the chain says of them, whatever a superuser writes into the tables."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import asyncpg
import pytest

from app.trust import node_keys
from app.trust.key_chain import KeyChain
from app.write.followers.checkpoints import CheckpointJournal
from ledger import canonical, chain, merkle
from signing import private_keys
from signing.checkpoint import Checkpoint, sign_checkpoint
from signing.key_history import added_facts
from tests.app.admitting import admit_node, waiting_keys
from tests.app.chain_builder import edit, insert, unguarded
from tests.app.chains import Chains, until
from tests.app.conftest import MakeSettings, RunServer
from tests.app.test_key_changes import Client, add_jobs, forge, keys_of, problem, rotate, sign, signer_of, verdict_of
from tests.ledger.ledger_in_memory import build


async def invent(superuser: asyncpg.Connection, key: private_keys.FileSigner, seq: int, prev_link: str) -> str:
    """Put a row into ``_system`` that introduces ``key``, with a link that is right for it; that link."""
    payload = canonical.encode({"type": "KEY_ADDED", **added_facts(key.public_key, "node-x")})
    digest = hashlib.sha256(payload).hexdigest()
    link = chain.link(
        tenant_id="_system",
        seq=seq,
        t_hlc="1000:0:node-x",
        job_id=f"key:{key.key_id}",
        action="KEY_ADDED",
        prev_chain_link=bytes.fromhex(prev_link),
        payload_digest=bytes.fromhex(digest),
        origin=b"",
    ).hex()
    async with unguarded(superuser):
        await superuser.execute("DELETE FROM scheduler.scheduler_log WHERE tenant_id = '_system' AND seq = $1", seq)
        await superuser.execute(
            "INSERT INTO scheduler.scheduler_log (tenant_id, seq, t_hlc, hlc_physical, hlc_logical, hlc_node, job_id,"
            "   action, link_version, prev_chain_link, chain_link, payload_digest, payload)"
            " VALUES ('_system', $1, '1000:0:node-x', 1000, 0, 'node-x', $2, 'KEY_ADDED', 2, $3, $4, $5, $6)",
            seq,
            f"key:{key.key_id}",
            prev_link,
            link,
            digest,
            payload.decode(),
        )
    return link


def node_folder(client_settings: MakeSettings) -> Path:
    """Where the WAL of the one node is."""
    (file,) = client_settings().wal_dir.glob("*/keys")
    return file.parent


async def system_is_kept(settings: MakeSettings, chains: Chains) -> bool:
    """Whether the checkpoint beside the WAL covers the whole of ``_system``."""
    head = await chains.head("_system")
    return head[0] > 0 and CheckpointJournal(node_folder(settings)).size("_system") == head[0]


async def test_a_key_that_an_invented_entry_beyond_the_head_introduces_is_not_trusted(
    run_server: RunServer, superuser: asyncpg.Connection, tmp_path: Path
) -> None:
    thief = private_keys.generate(tmp_path / "thief.pem")

    async def check(client: Client) -> None:
        assert thief.key_id not in await keys_of(client)
        verdict = await verdict_of(client)
        assert (verdict["verdicts"]["signatures"], verdict["first_break"]["actual"]) == ("unknown_key", thief.key_id)
        assert not (await verdict_of(client, "_system"))["valid"]

    async with run_server() as client:
        await add_jobs(client, 2)
        await forge(superuser, client, thief)
        await invent(superuser, thief, 1_000_000, "ab" * 32)
        await check(client)
    async with run_server() as client:
        await check(client)


async def test_a_key_that_a_rewritten_entry_introduces_is_not_trusted_and_no_signature_counts_as_good(
    run_server: RunServer, make_settings: MakeSettings, superuser: asyncpg.Connection, chains: Chains, tmp_path: Path
) -> None:
    thief = private_keys.generate(tmp_path / "thief.pem")
    async with run_server() as client:
        await add_jobs(client, 2)
        await sign(client)
        own = list(await keys_of(client))
        await until(chains.key_recorded, "the start is recorded")
        await rotate(client)
        await until(lambda: system_is_kept(make_settings, chains), "_system is signed")
        trusted = list(await keys_of(client))
    entries = await chains.entries("_system")
    tenant_seq = next(entry["seq"] for entry in entries if entry["action"] == "TENANT_CREATED")
    await invent(superuser, thief, tenant_seq, entries[tenant_seq - 2]["chain_link"] if tenant_seq > 1 else "")
    async with run_server() as client:
        assert list(await keys_of(client)) == trusted
        assert own[0] in trusted
        verdict = await verdict_of(client)
        assert (verdict["valid"], verdict["verdicts"]["signatures"]) == (False, "unknown_key")
        assert "_system" in verdict["first_break"]["detail"]
        assert not (await client.get("/readyz")).json()["checks"]["keys"]["ok"]

        async def is_reported() -> bool:
            said = (await client.get("/readyz")).json()["checks"]["breaks"]
            return "of _system (met by keys)" in (said["detail"] or "")

        await until(is_reported, "the fault is a break of _system")


@pytest.mark.parametrize("is_memory_lost", [False, True])
async def test_a_revocation_that_is_taken_out_of_chain_and_table_holds(
    run_server: RunServer,
    make_settings: MakeSettings,
    superuser: asyncpg.Connection,
    chains: Chains,
    *,
    is_memory_lost: bool,
) -> None:
    async with run_server() as client:
        await add_jobs(client, 2)
        await sign(client)
        old = (await rotate(client))["previous"]["key_id"]
        revocation = {"from_hlc": "1:0:n", "reason": "stolen"}
        assert (await client.post(f"/v1/keys/{old}/revoke", json=revocation)).status_code == 200
        await until(lambda: system_is_kept(make_settings, chains), "_system is signed")
        assert (await keys_of(client))[old]["revoked_from_hlc"] == "1:0:n"
        await edit(
            superuser,
            "UPDATE scheduler.scheduler_log SET job_id = 'x' || job_id"
            " WHERE tenant_id = '_system' AND action = 'KEY_REVOKED';"
            "UPDATE scheduler.signing_keys SET revoked_from_hlc = NULL, not_after = NULL",
        )
        assert (await keys_of(client))[old]["revoked_from_hlc"] == "1:0:n"
        assert (await verdict_of(client))["verdicts"]["signatures"] == "unknown_key"
    if is_memory_lost:
        file = node_folder(make_settings) / node_keys.NAME
        file.write_text(json.dumps({**json.loads(file.read_text()), "ended": {}}))
    async with run_server() as client:
        listed = (await keys_of(client))[old]
        assert (listed["revoked_from_hlc"] is None) == is_memory_lost
        assert listed["not_after"] is not None
        verdict = await verdict_of(client)
        assert (verdict["valid"], verdict["verdicts"]["signatures"]) == (False, "unknown_key")
        assert not (await verdict_of(client, "_system"))["valid"]


async def test_rows_of_the_table_that_hold_together_count_only_as_the_tree_that_was_signed(
    pool: asyncpg.Pool, superuser: asyncpg.Connection, tmp_path: Path, make_settings: MakeSettings
) -> None:
    await superuser.execute("SET session_replication_role = replica")
    await insert(superuser, build(2500, tenant_id="_system"))
    added, log_key = private_keys.generate(tmp_path / "added.pem"), private_keys.generate(tmp_path / "log.pem")
    last = await superuser.fetchval("SELECT head_chain_link FROM scheduler.chain_heads WHERE tenant_id = '_system'")
    link = await invent(superuser, added, 2501, last)
    await superuser.execute("UPDATE scheduler.chain_heads SET head_seq = 2501, head_chain_link = $1", link)
    rows = await superuser.fetch("SELECT chain_link FROM scheduler.scheduler_log ORDER BY seq")
    root = merkle.root([merkle.leaf_hash(bytes.fromhex(row["chain_link"])) for row in rows])

    async def said_with(root: bytes, root_key_id: str | None = None) -> tuple[list[str], str | None]:
        note = sign_checkpoint(Checkpoint("log.example/_system", 2501, root), log_key)
        keys = node_keys.open_keys(tmp_path, make_settings())
        keys.root_key_id = root_key_id
        chain = KeyChain(lambda _tenant: note, keys)
        async with pool.acquire() as connection:
            history = await chain.history(connection)
        return list(history.admitted), chain.fault

    assert await said_with(root) == ([added.key_id], None)
    events, fault = await said_with(bytes(32))
    assert (events, "not those that this node signed" in str(fault)) == ([], True)
    events, fault = await said_with(root, root_key_id="0123456789abcdef")
    assert (events, "this node knows its ledger by root key 0123456789abcdef" in str(fault)) == ([], True)


async def test_an_entry_that_follows_the_checkpoint_introduces_a_key_and_does_not_admit_it(
    run_server: RunServer, make_settings: MakeSettings, superuser: asyncpg.Connection, chains: Chains, tmp_path: Path
) -> None:
    added = private_keys.generate(tmp_path / "added.pem")
    async with run_server() as client:
        await add_jobs(client, 2)
        await until(chains.key_recorded, "the start is recorded")
        await until(lambda: system_is_kept(make_settings, chains), "_system is signed")
        seq, link = await chains.head("_system")
        new_link = await invent(superuser, added, seq + 1, link)
        await superuser.execute(
            "UPDATE scheduler.chain_heads SET head_seq = $1, head_chain_link = $2, head_hlc = '1000:0:node-x'"
            " WHERE tenant_id = '_system'",
            seq + 1,
            new_link,
        )
        assert list(await waiting_keys(client)) == [added.key_id]
        assert added.key_id not in await keys_of(client)
        await forge(superuser, client, added)
        verdict = await verdict_of(client)
        assert (verdict["verdicts"]["signatures"], verdict["first_break"]["actual"]) == ("unknown_key", added.key_id)
        await edit(
            superuser,
            f"DELETE FROM scheduler.scheduler_log WHERE tenant_id = '_system' AND seq = {seq + 1};"
            f"UPDATE scheduler.chain_heads SET head_seq = {seq}, head_chain_link = '{link}',"
            f" head_hlc = (SELECT t_hlc FROM scheduler.scheduler_log WHERE tenant_id = '_system' AND seq = {seq})"
            " WHERE tenant_id = '_system'",
        )
        assert await waiting_keys(client) == {}
        assert (await client.get("/readyz")).json()["checks"]["keys"]["ok"]


async def test_a_row_that_no_key_can_have_is_passed_over_and_the_chain_counts(
    run_server: RunServer, superuser: asyncpg.Connection
) -> None:
    async with run_server() as client:
        await add_jobs(client, 2)
        old = signer_of(await sign(client))
        await rotate(client)
        await superuser.execute(
            "ALTER TABLE scheduler.signing_keys ALTER public_key_pem DROP NOT NULL, ALTER algorithm DROP NOT NULL,"
            " ALTER node_id DROP NOT NULL"
        )
        for change in (
            "public_key_pem = NULL",
            "public_key_pem = 'x', algorithm = NULL, node_id = NULL",
            "revoked_from_hlc = 'x'",
            "not_after = '-infinity'",
            "not_after = '0001-01-01 BC'",
            "not_before = '294276-01-01'",
        ):
            await superuser.execute(f"UPDATE scheduler.signing_keys SET {change} WHERE key_id = $1", old)
            listed = await keys_of(client)
            assert listed[old]["not_after"] is not None, change
            assert listed[old]["public_key_pem"].startswith("-----BEGIN"), change
            assert (await verdict_of(client))["verdicts"]["signatures"] == "ok", change
        await superuser.execute(
            "UPDATE scheduler.signing_keys SET algorithm = 'x', node_id = 'x' WHERE key_id = $1", old
        )
        await superuser.execute(
            "ALTER TABLE scheduler.signing_keys ALTER public_key_pem SET NOT NULL, ALTER algorithm SET NOT NULL,"
            " ALTER node_id SET NOT NULL"
        )
    async with run_server() as client:
        assert (await verdict_of(client))["verdicts"]["signatures"] == "ok"


async def test_a_key_that_was_seen_revoked_signs_nothing_whatever_its_row_says(
    client: Client, superuser: asyncpg.Connection, make_settings: MakeSettings, run_server: RunServer
) -> None:
    await add_jobs(client, 1)
    own = signer_of(await sign(client))
    async with run_server(make_settings("two")) as other:
        await admit_node(client, other)
        assert (await other.post(f"/v1/keys/{own}/revoke", json={})).status_code == 200
    assert (await keys_of(client))[own]["revoked_from_hlc"] is not None
    await superuser.execute("UPDATE scheduler.signing_keys SET revoked_from_hlc = NULL")
    await add_jobs(client, 1)
    assert problem(await client.post("/v1/snapshots", json={"tenant_id": "acme"})) == (503, "signing-unavailable")


async def test_bounds_of_the_key_in_use_that_no_key_can_have_do_not_keep_it_from_signing(
    client: Client, superuser: asyncpg.Connection
) -> None:
    await superuser.execute(
        "ALTER TABLE scheduler.signing_keys DROP CONSTRAINT IF EXISTS signing_keys_check;"
        "UPDATE scheduler.signing_keys SET not_before = '294276-01-01', not_after = '0001-01-01 BC'"
    )
    await add_jobs(client, 2)
    assert (await sign(client))["to_seq"] == 2


async def test_rows_that_were_edited_neither_keep_a_key_from_signing_nor_stay_as_they_are(
    client: Client, superuser: asyncpg.Connection, make_settings: MakeSettings
) -> None:
    await add_jobs(client, 1)
    old = signer_of(await sign(client))
    new = (await rotate(client))["key"]["key_id"]
    said = "SELECT not_after, revoked_from_hlc, public_key_pem FROM scheduler.signing_keys WHERE key_id = $1"
    ended = await until(lambda: row_with_an_end(superuser, old), "the row says that the old key ended")
    await superuser.execute(
        "UPDATE scheduler.signing_keys SET revoked_from_hlc = '1:0:n', not_after = '2000-01-01', public_key_pem = 'x',"
        " node_id = 'another'"
    )
    assert "another" not in {key["node_id"] for key in (await client.get("/v1/keys")).json()["keys"]}
    await add_jobs(client, 2)
    assert signer_of(await sign(client)) == new
    third = (await rotate(client))["key"]["key_id"]
    assert await superuser.fetchrow(said, old) == ended
    assert (await superuser.fetchrow(said, third))["revoked_from_hlc"] is None


async def row_with_an_end(superuser: asyncpg.Connection, key_id: str) -> asyncpg.Record | None:
    """The row of the key once it ends."""
    return await superuser.fetchrow(
        "SELECT not_after, revoked_from_hlc, public_key_pem FROM scheduler.signing_keys"
        " WHERE key_id = $1 AND not_after IS NOT NULL",
        key_id,
    )
