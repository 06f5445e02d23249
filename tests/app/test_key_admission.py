"""A key is admitted, never self-introduced: what a further node, an operator and a hostile administrator see."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest

from app.node.service import Service
from app.runtime.settings.config import Settings
from app.trust import node_keys
from ledger import canonical
from ledger.errors import ConfigurationError, DatabaseWentBackError, KeyConflictError, StartRefusedError
from ledger.facts.events import SystemAction
from ledger.hlc import Hlc
from ledger.verification import SNAPSHOT_COLUMNS
from ledger.verification.entry_check import ENTRY_COLUMNS
from signing import key_statement, private_keys
from signing.key_history import added_facts, revoked_facts, root_facts, rotated_facts
from signing.private_keys import FileSigner
from tests import tally
from tests.app import chain_builder
from tests.app.admitting import admit_node, is_admitted, waiting_keys
from tests.app.chains import Chains, until
from tests.app.conftest import MakeSettings, RunNode, RunServer
from tests.app.starting import assert_no_start, assert_refused, forget_checkpoint, wal_folder, write
from tests.app.test_key_changes import add_jobs, keys_of, node_id_of, problem, rotate, sign, signer_of, verdict_of
from tests.conftest import Database
from tests.ledger.ledger_in_memory import Ledger, build


def seen_of_keys(settings: Settings) -> dict[str, Any]:
    """What the node's file of keys says."""
    return json.loads((wal_folder(settings) / node_keys.NAME).read_text())


def key_of(settings: Settings) -> FileSigner:
    """The key that the node of ``settings`` signs with."""
    return private_keys.load(settings.signing_key_uri)


async def run_tally(client: httpx.AsyncClient, *arguments: str, code: int = 0) -> str:
    """What a command against the node says."""
    done = await asyncio.to_thread(tally.run_tally, *arguments, TALLY_URL=str(client.base_url))
    assert done.returncode == code, done.stderr + done.stdout
    return done.stdout


async def enter(service: Service, action: SystemAction, facts: dict[str, Any]) -> None:
    """Chain an entry about a key as a node would, whatever it says."""
    await service.system_entries.record(action, f"key:{facts['key_id']}", facts)


# --- a further node -------------------------------------------------------------------------------------


async def test_a_further_node_chains_signs_nothing_and_says_how_it_is_admitted(
    run_server: RunServer, make_settings: MakeSettings, chains: Chains, capsys: pytest.CaptureFixture[str]
) -> None:
    async with run_server(make_settings("one")) as one:
        await until(chains.key_recorded, "the first node's key is the root")
        async with run_server(make_settings("two")) as two:
            new_id = key_of(make_settings("two")).key_id
            assert f"tally keys admit {new_id}" in capsys.readouterr().out
            await add_jobs(two, 2)
            refused = await two.post("/v1/snapshots", json={"tenant_id": "acme"})
            assert problem(refused) == (503, "signing-unavailable")
            unproved = await two.get("/v1/chain/receipt", params={"tenant_id": "acme", "seq": 1})
            assert (problem(unproved), "this node signs no receipt" in unproved.text) == (problem(refused), True)
            ready = await two.get("/readyz")
            said = ready.json()["checks"]["admission"]
            assert (ready.status_code, said["ok"]) == (200, False)
            assert f"tally keys admit {new_id}" in said["detail"]
            await until(lambda: waiting_keys(one), "the new key is in the chain")
            assert "NOT ADMITTED" in await run_tally(one, "keys", "list")
            assert list(await waiting_keys(one)) == [new_id]
            assert new_id not in await keys_of(one)
            assert (await chains._superuser.fetch("SELECT 1 FROM scheduler.batch_snapshot")) == []
            unable = await two.post(f"/v1/keys/{new_id}/admit", json={})
            assert problem(unable) == (409, "key-conflict")
            assert problem(await two.post(f"/v1/keys/{'0' * 16}/admit", json={})) == (404, "not-found")

            told = await run_tally(one, "keys", "admit", "--all-known")
            assert "no key of an earlier version waits" in told
            assert f"tally keys admit {new_id}" in told
            told = await run_tally(one, "keys", "admit", new_id)
            assert f"key {new_id} of node {await node_id_of(two)} is admitted by" in told
            await until(lambda: is_admitted(two), "the node knows that it is admitted")
            assert signer_of(await sign(two)) == new_id
            assert problem(await one.post(f"/v1/keys/{new_id}/admit", json={})) == (409, "key-conflict")
            for client in (one, two):
                assert (await verdict_of(client))["verdicts"]["signatures"] == "ok"
                listed = await keys_of(client)
                assert listed[new_id]["admitted_by"] == key_of(make_settings("one")).key_id
    # The chain remembers it.
    async with run_server(make_settings("two")) as two:
        assert await is_admitted(two)
        await add_jobs(two, 1)
        await sign(two)


async def test_a_first_start_logs_nothing_wrong(
    run_server: RunServer, make_settings: MakeSettings, chains: Chains, capsys: pytest.CaptureFixture[str]
) -> None:
    async with run_server() as client:
        await until(chains.key_recorded, "the key is recorded")
        await add_jobs(client, 1)
        await sign(client)
        assert (await verdict_of(client))["verdicts"]["signatures"] == "ok"
        assert all(check["ok"] for check in (await client.get("/readyz")).json()["checks"].values())
    said = capsys.readouterr()
    assert "error" not in said.out + said.err
    assert "warning" not in said.out + said.err


# --- whoever has the database ---------------------------------------------------------------------------


async def rewrite(superuser: asyncpg.Connection, signer: FileSigner) -> None:
    """Other payloads in acme below its signed snapshot, everything made to fit, signed again with ``signer``."""

    async def rows(table: str, columns: tuple[str, ...], order: str) -> list[dict[str, Any]]:
        found = await superuser.fetch(
            f"SELECT {', '.join(columns)} FROM scheduler.{table} WHERE tenant_id = 'acme' ORDER BY {order}"
        )
        return [dict(row) for row in found]

    ledger = Ledger("acme", await rows("scheduler_log", ENTRY_COLUMNS, "seq"))
    row = ledger.entry(2)
    row["payload"] = canonical.encode({**json.loads(row["payload"]), "forged": True}).decode()
    ledger.relink(2)
    for snapshot in await rows("batch_snapshot", SNAPSHOT_COLUMNS, "from_seq"):
        ledger.sign(snapshot["to_seq"], signer)
    ledger.store_head()
    ledger.store_tree()
    ledger.store_jobs()
    await chain_builder.replace(superuser, ledger, "batch_snapshot", "jobs")


async def test_a_node_that_the_administrator_starts_gains_nothing_that_verifies(
    run_server: RunServer,
    run_node: RunNode,
    make_settings: MakeSettings,
    superuser: asyncpg.Connection,
    chains: Chains,
    database: Database,
) -> None:
    async with run_server(make_settings("honest")) as client:
        await until(chains.key_recorded, "the first node's key is the root")
        await add_jobs(client, 4)
        stolen_word = (await sign(client))["dsse_envelope"]
        honest_id = key_of(make_settings("honest")).key_id

    # A node of his own introduces its key, and says in every form that it counts.
    rogue_settings = make_settings("rogue")
    async with run_node(rogue_settings) as rogue:
        thief = key_of(rogue_settings)
        await until(lambda: chains_name(chains, thief.key_id), "the rogue's key is in the chain")
        with pytest.raises(KeyConflictError):
            await rogue.key_changes.admit(thief.key_id, None)
        seq, link = await chains.head("_system")
        after = key_statement.Anchor(seq, str(link))
        facts = added_facts(thief.public_key, rogue.node.node_id)
        for action, said in (
            (SystemAction.KEY_ADMITTED, facts),
            (SystemAction.KEY_ROTATED, rotated_facts(thief.public_key, "x", honest_id, 4102444800000)),
            (SystemAction.KEY_ADDED, root_facts(thief.public_key, "x")),
            (SystemAction.KEY_REVOKED, revoked_facts(honest_id, "x", Hlc(1, 0, "n"), "forged")),
        ):
            await enter(rogue, action, said)
            await enter(rogue, action, key_statement.sign(action, said, honest_id, after, thief))
        await enter(rogue, SystemAction.KEY_ADMITTED, {**facts, key_statement.FIELD: stolen_word})
    await rewrite(superuser, thief)

    # Another node without any memory of its own, and verification from the rows.
    async with run_server(make_settings("auditor")) as client:
        verdict = await verdict_of(client)
        assert (verdict["valid"], verdict["verdicts"]["signatures"]) == (False, "unknown_key")
        assert verdict["first_break"]["actual"] == thief.key_id
        listed = await keys_of(client)
        assert thief.key_id not in listed
        assert listed[honest_id]["revoked_from_hlc"] is None
        assert listed[honest_id]["not_after"] is None
        told = await run_tally(
            client, "verify", "-t", "acme", "--dsn", database.service_url, "--no-state", "--json", code=4
        )
        assert json.loads(told)["verdicts"]["signatures"] == "unknown_key"


async def replace_system(superuser: asyncpg.Connection, root: FileSigner) -> None:
    """The chain of ``_system`` as if the ledger had begun with ``root``: links, head and tree made to fit."""
    rows = await superuser.fetch(
        f"SELECT {', '.join(ENTRY_COLUMNS)} FROM scheduler.scheduler_log WHERE tenant_id = '_system' ORDER BY seq"
    )
    ledger = Ledger("_system", [dict(row) for row in rows])
    (first,) = [row for row in ledger.entries if row["action"] == SystemAction.KEY_ADDED]
    said = {"type": SystemAction.KEY_ADDED.value, **root_facts(root.public_key, str(first["hlc_node"]))}
    first |= {"job_id": f"key:{root.key_id}", "payload": canonical.encode(said).decode()}
    ledger.relink()
    ledger.store_head()
    ledger.store_tree()
    await chain_builder.replace(superuser, ledger)


async def test_a_chain_of_keys_that_is_replaced_under_a_running_node_stops_it_and_no_start_believes_it(
    run_node: RunNode, make_settings: MakeSettings, superuser: asyncpg.Connection, chains: Chains, tmp_path: Path
) -> None:
    settings = make_settings(chain={"checkpoint_interval": "20ms"})
    thief = private_keys.generate(tmp_path / "thief.pem")
    signed = "SELECT tenant_id, checkpoint FROM scheduler.merkle_head WHERE checkpoint IS NOT NULL"
    snapshots = "SELECT count(*) FROM scheduler.batch_snapshot"
    async with run_node(settings) as service:
        await until(chains.key_recorded, "the key is recorded")
        await write(service, 1, 2)
        kept = service._started.checkpoints

        async def is_kept() -> bool:
            return kept.size("_system") == (await chains.head("_system"))[0] and kept.size("acme") == 2

        await until(is_kept, "the chain is signed to its end")
        await until(lambda: seen_of_keys(settings)["root_key_id"], "the root is kept")
        await replace_system(superuser, thief)
        await until(lambda: service.node.failure, "the node stops")
        assert isinstance(service.node.failure, DatabaseWentBackError)
        assert "tenant _system differs" in str(service.node.failure)
        with pytest.raises(DatabaseWentBackError):
            await write(service, 3)
    assert [row["tenant_id"] for row in await superuser.fetch(signed)] == ["acme"], "the new chain is not signed"
    assert await superuser.fetchval(snapshots) == 0
    await assert_refused(run_node, settings, StartRefusedError, "_system differs .* history was rewritten")
    # Nor where there is no checkpoint of it: the node knows its root.
    forget_checkpoint(wal_folder(settings), "_system")
    await assert_refused(run_node, settings, StartRefusedError, f"begins with key {thief.key_id}, .* root key")
    assert [row["tenant_id"] for row in await superuser.fetch(signed)] == ["acme"]


async def chains_name(chains: Chains, key_id: str) -> bool:
    """Whether an entry of ``_system`` is about the key."""
    return f"key:{key_id}" in [entry["job_id"] for entry in await chains.entries("_system")]


async def test_without_keys_from_outside_no_signature_counts_as_checked(
    run_server: RunServer, make_settings: MakeSettings, chains: Chains, database: Database, tmp_path: Path
) -> None:
    async with run_server() as client:
        await until(chains.key_recorded, "the key is recorded")
        await add_jobs(client, 2)
        await sign(client)
        by_rows = ("verify", "-t", "acme", "--dsn", database.service_url, "--no-state", "--json")
        assert json.loads(await run_tally(client, *by_rows, code=3))["verdicts"]["signatures"] == "not_checked"
        saved = tmp_path / "keys.json"
        saved.write_text((await client.get("/v1/keys")).text)
        told = await run_tally(client, *by_rows, "--keys", str(saved))
        assert json.loads(told)["verdicts"]["signatures"] == "ok"


async def test_a_row_of_the_table_neither_ends_nor_revokes_a_key(
    client: httpx.AsyncClient, superuser: asyncpg.Connection, chains: Chains
) -> None:
    await until(chains.key_recorded, "the key is recorded")
    await add_jobs(client, 2)
    await sign(client)
    (key_id,) = await keys_of(client)
    await superuser.execute(
        "UPDATE scheduler.signing_keys"
        "   SET revoked_from_hlc = '1:0:n', not_before = '2000-01-01', not_after = '2000-01-01'"
    )
    listed = (await keys_of(client))[key_id]
    assert (listed["revoked_from_hlc"], listed["not_after"]) == (None, None)
    assert (await verdict_of(client))["verdicts"]["signatures"] == "ok"


async def test_a_chain_that_begins_with_another_root_stops_the_node(
    run_node: RunNode, make_settings: MakeSettings, chains: Chains
) -> None:
    settings = make_settings()
    async with run_node(settings) as service:
        await until(chains.key_recorded, "the key is recorded")
        await until(lambda: seen_of_keys(settings)["root_key_id"], "the root is kept")
        known = service.keys.signer.key_id
    seen = seen_of_keys(settings)
    assert seen["root_key_id"] == known
    path = wal_folder(settings) / node_keys.NAME
    path.write_text(json.dumps({**seen, "root_key_id": "0123456789abcdef"}))
    await assert_no_start(
        run_node(settings), StartRefusedError, match=f"begins with key {known}.* root key 0123456789abcdef"
    )
    path.write_text(json.dumps({**seen, "root_key_id": "no key"}))
    await assert_no_start(run_node(settings), ConfigurationError, match=r"damaged .*root_key_id")


# --- a root that is kept offline ------------------------------------------------------------------------


async def test_a_ledger_may_begin_with_a_root_key_that_no_machine_holds(
    run_server: RunServer, make_settings: MakeSettings, tmp_path: Path
) -> None:
    root = private_keys.generate(tmp_path / "safe" / "root.pem")
    public = tmp_path / "root.pub.pem"
    public.write_text(root.public_key_pem)
    settings = make_settings("one", signing={"root_key": str(public)})
    async with run_server(settings) as one:
        own_id = key_of(settings).key_id
        await until(lambda: waiting_keys(one), "the node's key is in the chain")
        assert not await is_admitted(one)
        assert (await one.get("/v1/keys")).json()["root_key_id"] == root.key_id
        assert problem(await one.post(f"/v1/keys/{own_id}/admit", json={})) == (409, "key-conflict")

        # A key that is not the root, and the statement for another key, are refused before anything is written.
        stranger = private_keys.generate(tmp_path / "stranger.pem")
        await run_tally(one, "keys", "admit", own_id, "--root-key", str(stranger.path), code=1)
        (waiting,) = (await waiting_keys(one)).values()
        after = key_statement.Anchor(**waiting["introduced_by"])
        for facts in (added_facts(stranger.public_key, "n"), {**waiting["facts"], "node_id": "other"}):
            said = key_statement.sign("KEY_ADMITTED", facts, root.key_id, after, root)[key_statement.FIELD]
            answer = await one.post(f"/v1/keys/{own_id}/admit", json={"statement": said})
            assert problem(answer) == (422, "invalid-request")

        await run_tally(one, "keys", "admit", own_id, "--root-key", str(root.path))
        await until(lambda: is_admitted(one), "the node knows that it is admitted")
        await add_jobs(one, 2)
        assert signer_of(await sign(one)) == own_id
        assert (await verdict_of(one))["verdicts"]["signatures"] == "ok"

        # The root also revokes, even the key in use; the node asks for another.
        await run_tally(one, "keys", "revoke", own_id, "--root-key", str(root.path), "--reason", "stolen")
        assert (await keys_of(one))[own_id]["revocation_reason"] == "stolen"
        await rotate(one)
        assert not await is_admitted(one)
    other = make_settings("one", signing={"root_key": str(stranger.path)})
    await assert_no_start(run_server(other), ConfigurationError, match=r"signing\.root_key")


# --- ledgers that were begun before keys were admitted --------------------------------------------------


async def old_ledger(superuser: asyncpg.Connection, *introduced: tuple[SystemAction, dict[str, Any]]) -> None:
    """The chain of ``_system`` as earlier versions wrote it."""
    ledger = Ledger("_system")
    for number, (action, facts) in enumerate(introduced, 1):
        payload = canonical.encode({"type": action.value, **facts})
        row = dict.fromkeys(ENTRY_COLUMNS)
        row |= {"seq": number, "t_hlc": f"{number}:0:old", "hlc_physical": number, "hlc_logical": 0, "hlc_node": "old"}
        row |= {"job_id": f"key:{facts['key_id']}", "action": action.value, "link_version": 2}
        row |= {"payload": payload.decode(), "payload_digest": hashlib.sha256(payload).hexdigest()}
        ledger.entries.append(row)
    ledger.relink()
    ledger.store_head()
    await chain_builder.insert(superuser, ledger)


async def test_a_ledger_of_an_earlier_version_is_upgraded_by_its_root(
    run_server: RunServer, make_settings: MakeSettings, superuser: asyncpg.Connection, tmp_path: Path
) -> None:
    await superuser.execute("SET session_replication_role = replica")
    settings = make_settings()
    root = private_keys.generate(tmp_path / "first.pem")
    now = private_keys.load_or_generate(settings.signing_key_uri)
    other = private_keys.generate(tmp_path / "other.pem")
    await old_ledger(
        superuser,
        (SystemAction.KEY_ADDED, added_facts(root.public_key, "old")),
        (SystemAction.KEY_ADDED, added_facts(other.public_key, "old-2")),
        (SystemAction.KEY_ROTATED, rotated_facts(now.public_key, "old", root.key_id, 4102444800000)),
    )
    acme = build(20)
    acme.snapshots = []
    acme.sign(20, other)
    await chain_builder.insert(superuser, acme)

    async with run_server(settings) as client:
        # Until somebody has looked at the list, only the root counts.
        assert list(await keys_of(client)) == [root.key_id]
        assert set(await waiting_keys(client)) == {other.key_id, now.key_id}
        assert (await verdict_of(client))["verdicts"]["signatures"] == "unknown_key"
        assert not await is_admitted(client)
        await run_tally(client, "keys", "admit", "--all-known", code=1)

        told = json.loads(
            await run_tally(client, "keys", "admit", "--all-known", "--root-key", str(root.path), "--json")
        )
        assert {key["key_id"] for key in told["admitted"]} == {other.key_id, now.key_id}
        await until(lambda: is_admitted(client), "the node knows that it is admitted")
        assert (await verdict_of(client))["verdicts"]["signatures"] == "ok"
        await sign(client)
        listed = await keys_of(client)
        assert listed[root.key_id]["not_after"] is not None
        # From now on nothing counts without a statement, and --all-known takes no key that came later.
        async with run_server(make_settings("two")) as two:
            await until(lambda: waiting_keys(client), "the new node's key is in the chain")
            told = json.loads(await run_tally(client, "keys", "admit", "--all-known", "--json"))
            assert told == {"admitted": []}
            await admit_node(client, two)


async def test_the_root_of_an_old_ledger_that_still_signs_closes_it_to_unsigned_revocations(
    run_server: RunServer, run_node: RunNode, make_settings: MakeSettings, superuser: asyncpg.Connection, chains: Chains
) -> None:
    await superuser.execute("SET session_replication_role = replica")
    settings = make_settings()
    root = private_keys.load_or_generate(settings.signing_key_uri)
    await old_ledger(superuser, (SystemAction.KEY_ADDED, added_facts(root.public_key, "old")))
    async with run_node(settings) as service:
        await until(lambda: chains_admit(chains, root.key_id), "the root vouches for itself")
        await enter(service, SystemAction.KEY_REVOKED, revoked_facts(root.key_id, "x", Hlc(1, 0, "n"), None))
        published = await service.trust.published()
        assert [item.key.revoked_from_hlc for item in published.admitted] == [None]


async def chains_admit(chains: Chains, key_id: str) -> bool:
    """Whether an entry of ``_system`` says that the key is admitted."""
    return ("KEY_ADMITTED", f"key:{key_id}") in [
        (entry["action"], entry["job_id"]) for entry in await chains.entries("_system")
    ]


async def test_a_database_that_refuses_to_tell_of_keys_ends_no_node(
    run_node: RunNode, superuser: asyncpg.Connection, capsys: pytest.CaptureFixture[str]
) -> None:
    async with run_node() as service:
        await write(service, "acme", 1)
        said: list[str] = []

        def delayed() -> bool:
            said.append(capsys.readouterr().out)
            lines = "".join(said).splitlines()
            return any("permission denied" in line and "database_refuses" in line for line in lines)

        await until(service.key_changes.recorded.is_set, "the start is recorded")
        await superuser.execute("REVOKE SELECT ON scheduler.scheduler_log FROM tallystick_service")
        await until(delayed, "what looks after keys says why it waits")
        assert service.node.failure is None
        await superuser.execute("GRANT SELECT ON scheduler.scheduler_log TO tallystick_service")
        await write(service, "acme", 1)
