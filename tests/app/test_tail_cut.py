"""Somebody who owns the database cuts a tail and makes head, tree, snapshots and jobs fit: who finds out, by what."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest

from app.dev.embedded import EmbeddedPostgres
from app.runtime.settings.config import Settings
from app.write.followers import checkpoints
from cli.verify import Request, verify_by_service
from cli.verify_database import verify_database
from lab.tampering import cut_tail
from ledger.errors import ProofError, StartRefusedError
from ledger.verification import TreeHead
from pipeline.cli.verify import gone, observations
from pipeline.places import place_of
from signing import note, private_keys
from signing.anchors import ExternalWitnesses
from signing.checkpoint import judge_kept, parse, sign_checkpoint
from signing.keys import Keyring
from signing.memory import Memory, remember_observed
from tests.app.chains import followed, until
from tests.app.conftest import MakeSettings, RunServer
from tests.app.starting import assert_no_start, wal_folder
from tests.app.witness import Witness
from tests.conftest import Database, fresh_database
from tests.tally import run_tally

WHOLE, CUT = 6, 3
NOBODY = ExternalWitnesses([], [])


@pytest.fixture
def settings(make_settings: MakeSettings) -> Settings:
    return make_settings(
        chain={"checkpoint_interval": "20ms"}, log={"witnesses": [Witness().verifier_key], "origin": "log.example"}
    )


@pytest.fixture
def other_database(postgres: EmbeddedPostgres) -> Iterator[Database]:
    with fresh_database(postgres) as database:
        yield database


async def grow(client: httpx.AsyncClient, size: int) -> str:
    """Write until there are ``size`` entries; the checkpoint that covers them."""
    while True:
        head = await client.get("/v1/chain/head", params={"tenant_id": "acme"})
        if head.status_code == 200 and head.json()["seq"] >= size:
            break
        (await client.post("/v1/jobs", json={"tenant_id": "acme"})).raise_for_status()

    async def checkpoint() -> str | None:
        note = await client.get("/v1/log/acme/checkpoint")
        return note.text if note.status_code == 200 and int(note.text.split("\n")[1]) >= size else None

    return await until(checkpoint, "a checkpoint covers it")


async def cut(superuser: asyncpg.Connection) -> None:
    """Cut the tail once the job table is at its end: what it would still add has no entries any more."""
    await until(lambda: followed(superuser), "the job table is at the chain's end")
    await superuser.execute("SET session_replication_role = replica")
    await cut_tail(superuser, "acme", CUT)


def forget_checkpoints(settings: Settings) -> None:
    """Take away what the node keeps beside its WAL, as somebody who owns the machine too could."""
    (wal_folder(settings) / checkpoints.NAME).unlink()


async def by_rows(database: Database, heads: list[TreeHead], keyring: Keyring | None) -> dict[str, Any]:
    request = Request("acme", None, None, keyring=keyring, kept=None, external=NOBODY)
    return await verify_database(database.service_url, request, heads, [])


async def test_the_nodes_own_checkpoint_finds_it(
    run_server: RunServer, settings: Settings, superuser: asyncpg.Connection
) -> None:
    async with run_server(settings) as client:
        await grow(client, WHOLE)
        await cut(superuser)
        verdict = (await client.get("/v1/chain/verify", params={"tenant_id": "acme"})).json()
    assert verdict["first_break"]["kind"] == "rollback"
    assert (verdict["verdicts"]["checkpoint"], verdict["compared_with"]) == ("broken", "node")
    await assert_no_start(run_server(settings), StartRefusedError)


async def test_a_kept_checkpoint_finds_it_and_without_one_nothing_is_claimed(
    run_server: RunServer, settings: Settings, superuser: asyncpg.Connection, database: Database
) -> None:
    async with run_server(settings) as client:
        kept = await grow(client, WHOLE)
        keyring = Keyring.from_json((await client.get("/v1/keys")).json())
    await cut(superuser)
    alone = await by_rows(database, [], keyring)
    assert alone["valid"]
    assert (alone["compared_with"], alone["verdicts"]["checkpoint"]) == (None, "not_checked")
    verdict = await by_rows(database, judge_kept(kept, keyring).heads, keyring)
    assert not verdict["valid"]
    assert (verdict["first_break"]["kind"], verdict["compared_with"]) == ("rollback", "file")


async def test_on_the_command_line_it_is_a_rollback_to_whoever_looked_before(
    run_server: RunServer, settings: Settings, superuser: asyncpg.Connection, database: Database, tmp_path: Path
) -> None:
    async with run_server(settings) as client:
        await grow(client, WHOLE)
        (await client.post("/v1/snapshots", json={"tenant_id": "acme"})).raise_for_status()
        (tmp_path / "keys.json").write_text((await client.get("/v1/keys")).text)

    async def verify(*options: str, code: int) -> dict[str, Any]:
        command = ("verify", "-t", "acme", "--json", "--dsn", database.service_url, "--keys", tmp_path / "keys.json")
        done = await asyncio.to_thread(run_tally, *command, *options)
        assert done.returncode == code, done.stdout + done.stderr
        told: dict[str, Any] = json.loads(done.stdout)
        return told

    first = await verify(code=0)
    assert (first["verdicts"]["checkpoint"], first["compared_with"]) == ("not_checked", None)
    assert (first["memory"]["first_look"], first["memory"]["remembered"]["size"]) == (True, WHOLE)
    assert "this is the first look at this log" in first["memory"]["says"]
    again = await verify(code=0)
    assert (again["verdicts"]["checkpoint"], again["compared_with"]) == ("ok", "memory")
    await cut(superuser)
    found = await verify(code=2)
    assert (found["first_break"]["kind"], found["verdicts"]["checkpoint"]) == ("rollback", "broken")
    assert f"held by memory covers {WHOLE} entries, there are {CUT}" in found["first_break"]["detail"]
    assert (await verify(code=2))["first_break"] == found["first_break"], "what broke is not remembered"
    unseen = await verify("--no-state", code=3)
    assert (unseen["valid"], unseen["compared_with"], "memory" in unseen) == (True, None, False)

    # A tenant that is gone whole is no tenant that never was, and is missed where all are verified.
    for table in ("scheduler_log", "batch_snapshot", "chain_heads", "merkle_head", "merkle_tile", "jobs"):
        await superuser.execute(f"DELETE FROM scheduler.{table} WHERE tenant_id = 'acme'")
    assert (await verify(code=2))["first_break"]["kind"] == "rollback"
    with place_of("--dsn", database.superuser_url).open() as opened:
        assert opened.tenants() == ["_system"]
        memory = Memory.open(Path(first["memory"]["state"]))
        keyring = Keyring.load(tmp_path / "keys.json")
        observed = observations(opened, ["_system"], keyring, memory)
        assert gone(observed, keyring, memory, ["_system", "acme"]) == []
        lost = gone(observed, keyring, memory, ["_system"])
        assert [each.checkpoint.origin for each in lost] == ["log.example/acme"]


async def by_service(client: httpx.AsyncClient, state: Path) -> dict[str, Any]:
    request = Request("acme", None, None, keyring=None, kept=None, external=NOBODY, memory=Memory.open(state))
    found = await asyncio.to_thread(verify_by_service, str(client.base_url), request)
    remember_observed(Memory.open(state), [found["memory"]])
    return found


async def test_whoever_verified_before_finds_it_and_what_was_written_over_it(
    run_server: RunServer, settings: Settings, superuser: asyncpg.Connection, tmp_path: Path
) -> None:
    state = tmp_path / "auditor"
    async with run_server(settings) as client:
        await grow(client, WHOLE)
        first = await by_service(client, state)
        assert (first["memory"]["first_look"], first["memory"]["remembered"]["size"]) == (True, WHOLE)
        await grow(client, WHOLE + 1)
        second = await by_service(client, state)
        assert (second["compared_with"], second["valid"]) == ("node, memory", True)
        size = second["memory"]["remembered"]["size"]
        assert size > WHOLE
    await cut(superuser)
    forget_checkpoints(settings)
    async with run_server(settings) as client:
        for length, detail in (
            (CUT + 1, f"the checkpoint holds {size} entries"),
            (size + 3, "the proof does not lead to the root"),  # longer than it ever was, and of other entries
        ):
            await grow(client, length)
            told = (await client.get("/v1/chain/verify", params={"tenant_id": "acme"})).json()
            assert told["valid"], "nothing that is left inside tells"
            found = await by_service(client, state)
            assert (found["first_break"]["kind"], found["verdicts"]["checkpoint"]) == ("rollback", "broken")
            assert detail in found["first_break"]["detail"]
            assert found["memory"]["remembered"]["size"] == size


async def test_a_checkpoint_by_a_key_that_does_not_count_is_an_unknown_key_and_no_damage(
    run_server: RunServer, settings: Settings, superuser: asyncpg.Connection, tmp_path: Path
) -> None:
    async with run_server(settings) as client:
        await grow(client, WHOLE)
        assert (await by_service(client, tmp_path / "auditor"))["valid"]
        stored = await superuser.fetchval("SELECT checkpoint FROM scheduler.merkle_head WHERE tenant_id = 'acme'")
        forged = sign_checkpoint(parse(note.parse(stored).text), private_keys.generate(tmp_path / "stranger.pem"))
        await superuser.execute("UPDATE scheduler.merkle_head SET checkpoint = $1 WHERE tenant_id = 'acme'", forged)
        found = await by_service(client, tmp_path / "auditor")
        assert (found["verdicts"]["checkpoint"], found["first_break"]) == ("unknown_key", None)


async def test_a_ledger_set_up_anew_under_an_old_name_is_no_rollback(
    run_server: RunServer, make_settings: MakeSettings, database: Database, other_database: Database, tmp_path: Path
) -> None:
    state, roots = tmp_path / "auditor", set()
    for length, own in ((WHOLE, database), (CUT, other_database)):
        settings = make_settings(f"of-{length}", chain={"checkpoint_interval": "20ms"}, log={"origin": "log.example"})
        async with run_server(settings, url=own.service_url) as client:
            await grow(client, length)
            found = await by_service(client, state)
        assert (found["valid"], found["memory"]["first_look"]) == (True, True)
        roots.add(found["memory"]["root_key"])
    assert len(roots) == 2
    assert len(Memory.open(state).logs) == 2


async def test_an_outsider_who_kept_a_checkpoint_finds_it_by_a_consistency_proof(
    run_server: RunServer, settings: Settings, superuser: asyncpg.Connection
) -> None:
    async with run_server(settings) as client:
        await grow(client, WHOLE)
        witness = Witness()
        with httpx.Client(base_url=str(client.base_url), trust_env=False, timeout=30) as direct:
            await asyncio.to_thread(witness.watch, direct, "acme", int(time.time()))
    await cut(superuser)
    forget_checkpoints(settings)
    async with run_server(settings) as client:
        await grow(client, CUT + 1)
        with httpx.Client(base_url=str(client.base_url), trust_env=False, timeout=30) as direct:
            with pytest.raises(httpx.HTTPStatusError, match="422"):
                await asyncio.to_thread(witness.watch, direct, "acme", int(time.time()))
            # Longer than it ever was, and of other entries.
            await grow(client, WHOLE + 3)
            verdict = (await client.get("/v1/chain/verify", params={"tenant_id": "acme"})).json()
            assert verdict["valid"], "nothing that is left inside tells"
            with pytest.raises(ProofError):
                await asyncio.to_thread(witness.watch, direct, "acme", int(time.time()))


async def test_a_cosignature_that_was_forgotten_in_the_database_finds_it_too(
    run_server: RunServer, settings: Settings, superuser: asyncpg.Connection
) -> None:
    async with run_server(settings) as client:
        note = Witness().cosign(await grow(client, WHOLE), int(time.time()))
        headers = {"content-type": "text/plain"}
        (await client.post("/v1/log/acme/cosignatures", content=note, headers=headers)).raise_for_status()
    await superuser.execute("CREATE TEMP TABLE kept AS SELECT * FROM scheduler.checkpoint_cosignature")
    await cut(superuser)
    await superuser.execute("INSERT INTO scheduler.checkpoint_cosignature OVERRIDING SYSTEM VALUE SELECT * FROM kept")
    forget_checkpoints(settings)
    async with run_server(settings) as client:
        for size in (CUT, WHOLE + 1):
            await grow(client, size)
            verdict = (await client.get("/v1/chain/verify", params={"tenant_id": "acme"})).json()
            assert verdict["verdicts"]["checkpoint"] == "broken"
            assert verdict["first_break"]["kind"] == "rollback"
            assert [(each["kind"], each["status"]) for each in verdict["anchors"]] == [("witness", "broken")]
