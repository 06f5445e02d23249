"""Keys over time: rotated and revoked, whatever dies in between, and never believed without their entries."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import stat
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest
import structlog
from msgspec.structs import replace

from app.node.service import Service
from app.runtime.settings.config import Settings
from app.trust import node_keys
from app.trust.node_keys import Retired
from app.write.pending.requests import EventLines
from ledger.errors import UnknownKeyError
from signing import private_keys
from signing.checkpoint import open_checkpoint
from signing.checkpoint import read as read_checkpoint
from signing.keys import ECDSA_P256, Keyring
from signing.snapshot import open_snapshot, sign_snapshot
from tests.app.admitting import admit_node
from tests.app.chain_builder import edit
from tests.app.chains import Chains, until
from tests.app.conftest import MakeSettings, RunNode, RunServer
from tests.app.drafts import GLOBAL, created
from tests.app.starting import assert_no_start, kept_size, wal_folder
from tests.app.test_stop_control import made
from wal.segment import UNNAMED_SUFFIX

Client = httpx.AsyncClient


async def add_jobs(client: Client, count: int, tenant_id: str = "acme") -> None:
    """Chain ``count`` entries."""
    for _ in range(count):
        answer = await client.post("/v1/jobs", json={"tenant_id": tenant_id, "durability": "GLOBAL"})
        assert answer.status_code == 201, answer.text


async def sign(client: Client, tenant_id: str = "acme") -> dict[str, Any]:
    """The newest snapshot, once everything is signed; asked until the service can."""

    async def signed() -> dict[str, Any] | None:
        answer = await client.post("/v1/snapshots", json={"tenant_id": tenant_id})
        return answer.json() if answer.status_code in (200, 201) else None

    return await until(signed, "everything is signed")


async def keys_of(client: Client) -> dict[str, dict[str, Any]]:
    """What ``/v1/keys`` says, by key id."""
    return {key["key_id"]: key for key in (await client.get("/v1/keys")).json()["keys"]}


async def signing_key(client: Client) -> str:
    """Id of the one key that signs snapshots now."""
    (key_id,) = [key_id for key_id, key in (await keys_of(client)).items() if key["signs_snapshots"]]
    return key_id


async def rotate(client: Client, **body: Any) -> dict[str, Any]:
    """Rotate; the answer."""
    answer = await client.post("/v1/keys/rotate", json=body)
    assert answer.status_code == 201, answer.text
    return answer.json()


async def verdict_of(client: Client, tenant_id: str = "acme") -> dict[str, Any]:
    """The service's verdict on the tenant."""
    return (await client.get("/v1/chain/verify", params={"tenant_id": tenant_id})).json()


def problem(answer: httpx.Response) -> tuple[int, str]:
    """Status and kind of a refusal."""
    return answer.status_code, answer.json()["type"].rsplit("/", 1)[-1]


def signer_of(snapshot: dict[str, Any]) -> str:
    """Id of the key that signed."""
    return snapshot["dsse_envelope"]["signatures"][0]["keyid"]


async def about_keys(chains: Chains) -> list[tuple[str, dict[str, Any]]]:
    """Action and payload of every entry about a key."""
    entries = await chains.sound("_system")
    return [(entry["action"], json.loads(entry["payload"])) for entry in entries if entry["job_id"].startswith("key:")]


async def test_after_a_rotation_the_new_key_signs_and_of_the_old_one_only_what_came_before_stays_valid(
    client: Client, chains: Chains, superuser: asyncpg.Connection, make_settings: MakeSettings
) -> None:
    await add_jobs(client, 2)
    first = await sign(client)
    old = await signing_key(client)

    answer = await rotate(client)
    await add_jobs(client, 2)
    second = await sign(client)

    new = answer["key"]["key_id"]
    assert (signer_of(first), signer_of(second)) == (old, new)
    keyring = Keyring.from_json((await client.get("/v1/keys")).json())
    for snapshot in (first, second):
        assert open_snapshot(json.dumps(snapshot["dsse_envelope"]), keyring).verdict == "ok"
    verdict = await verdict_of(client)
    assert (verdict["valid"], verdict["verdicts"]["signatures"]) == (True, "ok")
    ((_, added), (action, rotated)) = await about_keys(chains)
    assert (added["key_id"], action) == (old, "KEY_ROTATED")
    assert (rotated["key_id"], rotated["previous_key_id"]) == (new, old)
    listed = await keys_of(client)
    saved = Keyring.from_json((await client.get("/v1/keys")).json())
    assert saved.root_key_id == old == Keyring.from_json(saved.to_json()).root_key_id
    assert listed[old]["not_after"] == answer["previous"]["not_after"]
    assert datetime.fromisoformat(listed[old]["not_after"]) == datetime.fromisoformat(rotated["not_after"])
    assert [listed[key_id]["signs_snapshots"] for key_id in (old, new)] == [False, True]
    files = [
        path for path in (make_settings().data_dir / "keys").iterdir() if private_keys.load(str(path)).key_id == new
    ]
    assert [stat.S_IMODE(path.stat().st_mode) for path in files] == [0o600]

    thief = private_keys.load(str(make_settings().data_dir / "keys" / "signing.pem"))
    await add_jobs(client, 2)
    forged_seq = await forge(superuser, client, thief)
    verdict = await verdict_of(client)
    assert (verdict["valid"], verdict["verdicts"]["signatures"]) == (False, "unknown_key")
    assert (verdict["first_break"]["seq"], verdict["first_break"]["kind"]) == (forged_seq, "snapshot-signature")
    assert "expired" in verdict["first_break"]["detail"]

    # An end and a revocation that are taken out of the table hold by the chain.
    assert (await client.post(f"/v1/keys/{old}/revoke", json={"from_hlc": "1:0:n"})).status_code == 200
    await superuser.execute("UPDATE scheduler.signing_keys SET not_after = NULL, revoked_from_hlc = NULL")
    listed = await keys_of(client)
    assert (listed[old]["revoked_from_hlc"], listed[old]["not_after"] is not None) == ("1:0:n", True)
    assert (await verdict_of(client))["verdicts"]["signatures"] == "unknown_key"
    await superuser.execute("DELETE FROM scheduler.signing_keys WHERE key_id = $1", old)
    assert (await keys_of(client))[old]["revoked_from_hlc"] == "1:0:n"


async def forge(superuser: asyncpg.Connection, client: Client, thief: private_keys.FileSigner) -> int:
    """Sign what is not signed yet as the service would, with the key of ``thief``; the last seq of it.

    The claim is made by the service itself, whose own snapshot then gives way to the forged one.
    """
    real = await sign(client)
    ring = Keyring.from_json((await client.get("/v1/keys")).json())
    claim = open_snapshot(json.dumps(real["dsse_envelope"]), ring).claim
    envelope, _ = sign_snapshot(replace(claim, key_id=thief.key_id), thief)
    change = "UPDATE scheduler.batch_snapshot SET dsse_envelope = $2 WHERE id = $1"
    await edit(superuser, change, real["id"], json.dumps(envelope))
    return claim.to_seq


async def test_a_restart_goes_on_with_the_rotated_key_and_from_the_checkpoint_of_the_old_one(
    run_server: RunServer, make_settings: MakeSettings, superuser: asyncpg.Connection
) -> None:
    settings = make_settings()
    async with run_server(settings) as client:
        await add_jobs(client, 2)
        old_keys = (await client.get("/v1/keys")).json()
        kept = await until(lambda: checkpoint_text(superuser), "a checkpoint is signed")
        new = (await rotate(client))["key"]["key_id"]
    (settings.data_dir / "keys" / "signing.pem").unlink()
    (folder,) = [path.parent for path in settings.wal_dir.glob("*/keys")]
    assert [key.key_id for key in node_keys.key_files(folder, settings.signing_key_uri)] == [new, new]
    async with run_server(settings) as client:
        await add_jobs(client, 1)
        assert signer_of(await sign(client)) == new == await signing_key(client)
        keys = (await client.get("/v1/keys")).json()
        verdict = await verdict_of(client)
    assert (verdict["valid"], verdict["compared_with"]) == (True, "node")
    assert open_checkpoint(kept, keys["log_verifier_keys"]) == open_checkpoint(kept, Keyring.from_json(old_keys))


async def checkpoint_text(superuser: asyncpg.Connection) -> str | None:
    """The stored checkpoint of acme."""
    return await superuser.fetchval("SELECT checkpoint FROM scheduler.merkle_head WHERE tenant_id = 'acme'")


async def test_checkpoints_of_quiet_tenants_are_signed_anew_by_a_new_key_so_that_the_old_one_can_be_revoked(
    client: Client, superuser: asyncpg.Connection
) -> None:
    await add_jobs(client, 1)
    before = await until(lambda: checkpoint_text(superuser), "a checkpoint is signed")
    old = (await rotate(client))["previous"]["key_id"]

    assert (await client.post(f"/v1/keys/{old}/revoke", json={"reason": "stolen"})).status_code == 200
    after = await until(lambda: changed(superuser, before), "the checkpoint is signed again")

    ring = Keyring.from_json((await client.get("/v1/keys")).json())
    assert open_checkpoint(after, ring).size == 1
    with pytest.raises(Exception, match="none of the keys"):
        open_checkpoint(before, ring)


async def changed(superuser: asyncpg.Connection, before: str) -> str | None:
    """The stored checkpoint once it is another one."""
    text = await checkpoint_text(superuser)
    return text if text != before else None


# --- dying in between ---------------------------------------------------------------------------------


async def test_a_rotation_that_died_before_it_was_kept_has_changed_nothing(
    run_server: RunServer, make_settings: MakeSettings, superuser: asyncpg.Connection
) -> None:
    settings = make_settings()
    async with run_server(settings) as client:
        await add_jobs(client, 1)
        old = await signing_key(client)
    new = private_keys.generate(settings.data_dir / "keys" / "signing-1.pem")
    await superuser.execute(
        "INSERT INTO scheduler.signing_keys (key_id, algorithm, public_key_pem, not_before, node_id)"
        " SELECT $1, $2, $3, now(), node_id FROM scheduler.signing_keys",
        new.key_id,
        new.algorithm,
        new.public_key_pem,
    )
    async with run_server(settings) as client:
        await add_jobs(client, 1)
        assert signer_of(await sign(client)) == old
        assert list(await keys_of(client)) == [old]


async def test_rotations_that_died_once_they_were_kept_are_completed_by_the_next_start(
    run_server: RunServer, make_settings: MakeSettings, chains: Chains
) -> None:
    settings = make_settings()
    async with run_server(settings) as client:
        await add_jobs(client, 2)
        old = signer_of(await sign(client))
        await add_jobs(client, 1)
    recorded = ["KEY_ADDED"]

    async def are_recorded() -> bool:
        return [action for action, _ in await about_keys(chains)] == recorded

    # Whether or not the end of the old key is known; and one rotation behind another.
    for are_ends_known in ([True], [False], [True, True]):
        end_ms = time.time_ns() // 1_000_000
        for number, is_end_known in enumerate(are_ends_known):
            new = switch_keys(settings, end_ms + number if is_end_known else None, number=len(recorded))
            recorded.append("KEY_ROTATED")
        async with run_server(settings) as client:
            assert signer_of(await sign(client)) == new
            await until(are_recorded, "the rotations are recorded")
            await add_jobs(client, 1)
            assert signer_of(await sign(client)) == new
            assert (await verdict_of(client))["valid"]
            listed = await keys_of(client)
            assert listed[old]["not_after"] is not None
            assert [listed[key_id]["signs_snapshots"] for key_id in (old, new)] == [False, True]
            await add_jobs(client, 1)
        old = new
    async with run_server(settings) as client:
        assert await signing_key(client) == new
    assert await are_recorded()


def switch_keys(settings: Settings, end_ms: int | None, *, number: int = 1) -> str:
    """Leave the folder as a process does that dies after the third step of a rotation; id of the new key."""
    (folder,) = [path.parent for path in settings.wal_dir.glob("*/keys")]
    keys = node_keys.open_keys(folder, settings)
    new = private_keys.generate(settings.data_dir / "keys" / f"signing-{number}.pem")
    keys.retired = [*keys.retired, Retired.by(new, keys.signer.key_id, end_ms, keys.uri_of(keys.signer))]
    keys.signer = keys.log_signer = new
    keys.store()
    return new.key_id


async def action_recorded(chains: Chains, action: str) -> bool:
    """Whether an entry about a key has this action."""
    return action in [each for each, _ in await about_keys(chains)]


async def test_a_rotation_while_postgres_hangs_is_told_as_late_and_recorded_when_it_answers(
    run_server: RunServer, make_settings: MakeSettings, superuser: asyncpg.Connection, chains: Chains
) -> None:
    async with run_server(make_settings(write={"timeout": "5s"})) as client:
        await add_jobs(client, 1)
        await until(chains.key_recorded, "the start is recorded")
        async with superuser.transaction():
            await superuser.execute("LOCK TABLE scheduler.scheduler_log IN SHARE MODE")
            answer = await client.post("/v1/keys/rotate", json={})
            assert problem(answer) == (503, "durability-timeout")
        await until(lambda: action_recorded(chains, "KEY_ROTATED"), "the rotation is recorded")
        await add_jobs(client, 1)
        await sign(client)
        assert (await verdict_of(client))["valid"]


async def test_a_rotation_whose_files_cannot_be_written_changes_nothing_and_says_why(
    run_server: RunServer, make_settings: MakeSettings, chains: Chains
) -> None:
    settings = make_settings()
    async with run_server(settings) as client:
        await add_jobs(client, 1)
        await until(chains.key_recorded, "the start is recorded")
        own = await signing_key(client)
        folder = settings.data_dir / "keys"
        folder.rename(settings.data_dir / "moved")
        folder.touch()
        answer = await client.post("/v1/keys/rotate", json={})
        assert problem(answer) == (503, "signing-unavailable")
        assert f"key file {folder}/" in answer.json()["detail"]
        folder.unlink()
        (settings.data_dir / "moved").rename(folder)
        kept = wal_folder(settings) / node_keys.NAME
        in_the_way = kept.with_name(f"{kept.name}{UNNAMED_SUFFIX}")
        await until(lambda: made(in_the_way), "nothing is written")
        answer = await client.post("/v1/keys/rotate", json={})
        assert problem(answer) == (503, "signing-unavailable")
        assert answer.json()["detail"] == f"{kept} cannot be written: Is a directory"
        assert await signing_key(client) == own
        in_the_way.rmdir()
        assert (await rotate(client))["previous"]["key_id"] == own
        await add_jobs(client, 1)
        await sign(client)
        assert (await verdict_of(client))["valid"]


async def test_a_rotation_whose_end_the_disk_does_not_take_is_ended_once_it_does(
    run_server: RunServer, make_settings: MakeSettings, superuser: asyncpg.Connection, chains: Chains
) -> None:
    settings = make_settings()
    async with run_server(settings) as client:
        await add_jobs(client, 1)
        await until(chains.key_recorded, "the start is recorded")
        kept = wal_folder(settings) / node_keys.NAME
        in_the_way = kept.with_name(f"{kept.name}{UNNAMED_SUFFIX}")
        with structlog.testing.capture_logs() as logs:
            async with superuser.transaction():
                await superuser.execute("LOCK TABLE scheduler.scheduler_log IN SHARE MODE")
                rotating = asyncio.create_task(rotate(client))
                await until(lambda: "key_rotated" in [line["event"] for line in logs], "the new key signs")
                await until(lambda: made(in_the_way), "nothing is written")
            delayed = "key_change_delayed"
            await until(lambda: rotating.done() or delayed in [line["event"] for line in logs], "it is tried")
        in_the_way.rmdir()
        answer = await rotating
        assert json.loads(kept.read_bytes())["retired"] == []
        await add_jobs(client, 1)
        assert signer_of(await sign(client)) == answer["key"]["key_id"]


async def test_another_key_in_the_settings_is_a_rotation(
    run_server: RunServer, make_settings: MakeSettings, tmp_path: Path, chains: Chains
) -> None:
    async with run_server() as client:
        await add_jobs(client, 1)
        old = signer_of(await sign(client))
    new = private_keys.generate(tmp_path / "other.pem", ECDSA_P256)
    async with run_server(make_settings(signing={"key_uri": f"file:{new.path}"})) as client:
        await add_jobs(client, 1)
        assert signer_of(await sign(client)) == new.key_id
        await until(lambda: action_recorded(chains, "KEY_ROTATED"), "the rotation is recorded")
        assert (await keys_of(client))[old]["not_after"] is not None
        assert (await verdict_of(client))["valid"]


async def test_a_separate_log_key_is_rotated_by_itself(
    run_server: RunServer, make_settings: MakeSettings, tmp_path: Path
) -> None:
    new = private_keys.generate(tmp_path / "p256.pem", ECDSA_P256)
    async with run_server(make_settings(signing={"key_uri": f"file:{new.path}"})) as client:
        await add_jobs(client, 1)
        log_key = next(key["key_id"] for key in (await keys_of(client)).values() if key["signs_checkpoints"])
        await rotate(client)
        assert (await keys_of(client))[log_key]["signs_checkpoints"]
        answer = await rotate(client, log_key=True)
        assert (answer["previous"]["key_id"], answer["key"]["signs_checkpoints"]) == (log_key, True)
        await add_jobs(client, 1)
        assert (await sign(client))["to_seq"] == 2


async def test_a_damaged_file_of_keys_stops_the_start(run_node: RunNode, make_settings: MakeSettings) -> None:
    settings = make_settings()
    async with run_node(settings):
        (file,) = settings.wal_dir.glob("*/keys")
    file.write_text(file.read_text()[:-20])
    await assert_no_start(run_node(settings), Exception, match="with what key this node signs, is damaged")


# --- refusals -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def refusals() -> Iterator[list[str]]:
    """Why the service refused keys, as its log says it."""
    reasons: list[str] = []
    with structlog.testing.capture_logs() as lines:
        yield reasons
    reasons += [line["reason"] for line in lines if line["event"] == "new_key_refused"]


async def test_a_caller_names_only_keys_of_the_folders_that_the_settings_name(
    run_server: RunServer, make_settings: MakeSettings, tmp_path: Path, chains: Chains
) -> None:
    allowed, other = tmp_path / "allowed", tmp_path / "other"
    (allowed / "below").mkdir(parents=True)
    for name in ("good", "below/deep", "of-another", "../other/key"):
        (allowed / name).parent.mkdir(exist_ok=True)
        private_keys.generate(allowed / f"{name}.pem")
    if os.geteuid() == 0:  # Nobody else may give a file away.
        os.chown(allowed / "of-another.pem", 12345, 12345)
    else:
        (allowed / "of-another.pem").unlink()
    (allowed / "wide.pem").write_bytes((allowed / "good.pem").read_bytes())
    (allowed / "wide.pem").chmod(0o644)
    (allowed / "no-key.pem").write_text("a secret that nobody may read out of an answer")
    (allowed / "no-key.pem").chmod(0o600)
    (allowed / "link.pem").symlink_to(other / "key.pem")
    (allowed / "loop.pem").symlink_to(allowed / "loop.pem")
    refused = [
        "/etc/passwd",
        "file:/etc/shadow",
        "/nowhere/at/all.pem",
        f"{other}/key.pem",
        f"{allowed}/../other/key.pem",
        f"file:{allowed}/%2e%2e/other/key.pem",
        *(
            f"{allowed}/{name}.pem"
            for name in ("below/deep", "of-another", "wide", "no-key", "link", "loop", "missing")
        ),
        str(allowed),
        "hsm:2?label=ledger",
        "awskms:alias/other",
        "gpg:whatever",
    ]
    own_keys = str(tmp_path / "node" / "keys")
    settings = make_settings(signing={"uris_allowed": [f"file:{allowed}", "awskms:alias/ledger", own_keys]})
    async with run_server(settings) as client:
        await refuse_what_cannot_be(client, tmp_path, chains)
        with refusals() as reasons:
            answers = [await client.post("/v1/keys/rotate", json={"new_key_uri": uri}) for uri in refused]
        assert {answer.status_code for answer in answers} == {422}
        assert len({answer.content for answer in answers}) == 1, "an answer tells of a file"
        assert len(reasons) == len(refused) - 2
        answer = await rotate(client, new_key_uri=f"file:{allowed}/good.pem")
        assert (
            answer["key"]["key_id"] == private_keys.load(str(allowed / "good.pem")).key_id == await signing_key(client)
        )


async def refuse_what_cannot_be(client: Client, tmp_path: Path, chains: Chains) -> None:
    """Ask for what can be neither rotated nor revoked, and revoke an old key."""
    await add_jobs(client, 1)
    await until(chains.key_recorded, "the start is recorded")
    own = await signing_key(client)
    for uri in ("\0", "file:/a%00b", "a" * 5000):
        answer = await client.post("/v1/keys/rotate", json={"new_key_uri": uri})
        assert problem(answer) == (422, "invalid-request"), uri
    for uri in ("hsm:\0", "hv:\0"):
        answer = await client.post("/v1/keys/rotate", json={"new_key_uri": uri})
        assert problem(answer) in [(422, "invalid-request"), (503, "signing-unavailable")], uri
    missing = {"new_key_uri": f"file:{tmp_path}/none.pem"}
    assert problem(await client.post("/v1/keys/rotate", json=missing)) == (422, "invalid-request")
    assert problem(await client.post("/v1/keys/rotate", json={"log_key": True})) == (422, "invalid-request")
    assert problem(await client.post("/v1/keys/rotate", json={"new": 1})) == (422, "invalid-request")
    assert problem(await client.post(f"/v1/keys/{'0' * 16}/revoke", json={})) == (404, "not-found")
    assert problem(await client.post("/v1/keys/nobody/revoke", json={})) == (422, "invalid-request")
    assert problem(await client.post(f"/v1/keys/{own}/revoke", json={})) == (409, "key-conflict")
    old = (await rotate(client))["previous"]["key_id"]
    again = {"new_key_uri": str(tmp_path / "node" / "keys" / "signing.pem")}
    assert problem(await client.post("/v1/keys/rotate", json=again)) == (409, "key-conflict")
    for body, expected in (
        ({"from_hlc": "x"}, (422, "invalid-request")),
        ({"from_hlc": "9999999999999:0:n"}, (400, "clock-skew")),
        ({"from_hlc": "5000:0:n", "reason": "stolen"}, None),
        ({"from_hlc": "5000:0:n"}, (409, "key-conflict")),
        ({}, (409, "key-conflict")),
        ({"from_hlc": "4000:0:n"}, None),
    ):
        answer = await client.post(f"/v1/keys/{old}/revoke", json=body)
        assert (None if answer.status_code == 200 else problem(answer)) == expected, body
    assert (await keys_of(client))[old]["revoked_from_hlc"] == "4000:0:n"
    assert [action for action, _ in await about_keys(chains)] == [
        "KEY_ADDED", "KEY_ROTATED", "KEY_REVOKED", "KEY_REVOKED"
    ]  # fmt: skip


async def test_a_revocation_names_snapshots_from_its_hlc_on_and_leaves_earlier_ones(client: Client) -> None:
    snapshots = []
    for _ in range(3):
        await add_jobs(client, 2)
        snapshots.append(await sign(client))
    old = (await rotate(client))["previous"]["key_id"]
    await add_jobs(client, 2)
    snapshots.append(await sign(client))

    answer = await client.post(f"/v1/keys/{old}/revoke", json={"from_hlc": snapshots[1]["snapshot_hlc"]})

    assert answer.json()["revoked_from_hlc"] == snapshots[1]["snapshot_hlc"]
    saved = Keyring.from_json((await client.get("/v1/keys")).json())
    verdicts = [open_snapshot(json.dumps(each["dsse_envelope"]), saved).verdict for each in snapshots]
    assert verdicts == ["ok", "unknown_key", "unknown_key", "ok"]
    first = (await verdict_of(client))["first_break"]
    assert (first["seq"], first["kind"], first["actual"]) == (snapshots[1]["to_seq"], "snapshot-signature", old)


# --- what the database administrator cannot do --------------------------------------------------------


async def test_a_key_that_stands_in_the_table_alone_is_not_trusted(
    client: Client, superuser: asyncpg.Connection, tmp_path: Path
) -> None:
    await add_jobs(client, 2)
    thief = private_keys.generate(tmp_path / "thief.pem")
    await superuser.execute(
        "INSERT INTO scheduler.signing_keys VALUES ($1, $2, $3, now() - interval '1 day', NULL, NULL, 'node-x')",
        thief.key_id,
        thief.algorithm,
        thief.public_key_pem,
    )
    await forge(superuser, client, thief)

    assert thief.key_id not in await keys_of(client)
    verdict = await verdict_of(client)
    assert (verdict["verdicts"]["signatures"], verdict["first_break"]["kind"]) == ("unknown_key", "snapshot-signature")


# --- several nodes ------------------------------------------------------------------------------------


async def test_a_node_whose_key_another_one_revoked_chains_on_and_signs_again_once_it_has_another_key(
    run_server: RunServer, make_settings: MakeSettings, chains: Chains
) -> None:
    async with contextlib.AsyncExitStack() as running:
        one = await running.enter_async_context(run_server(make_settings("one")))
        await until(chains.key_recorded, "the first node's key is the root")
        two = await running.enter_async_context(run_server(make_settings("two")))
        await admit_node(one, two)
        await add_jobs(one, 2)
        await sign(one)
        (stolen,) = [
            key["key_id"] for key in (await keys_of(two)).values() if key["node_id"] == (await node_id_of(one))
        ]
        answer = await two.post(f"/v1/keys/{stolen}/revoke", json={"reason": "node one was stolen"})
        assert (answer.status_code, answer.json()["revocation_reason"]) == (200, "node one was stolen")

        await add_jobs(one, 2)
        refused = await one.post("/v1/snapshots", json={"tenant_id": "acme"})
        assert problem(refused) == (503, "signing-unavailable")
        ready = await one.get("/readyz")
        assert (ready.status_code, ready.json()["checks"]["signing"]["ok"]) == (200, False)
        assert stolen in ready.json()["checks"]["signing"]["detail"]

        await rotate(one)
        assert problem(await one.post("/v1/snapshots", json={"tenant_id": "acme"})) == (503, "signing-unavailable")
        await admit_node(two, one)
        await sign(one)
        assert (await one.get("/readyz")).json()["checks"]["signing"]["ok"]
        for client in (one, two):
            assert (await verdict_of(client))["valid"]


async def test_what_a_revoked_key_of_another_node_signed_last_is_signed_again_while_its_tenant_is_quiet(
    run_server: RunServer, make_settings: MakeSettings, superuser: asyncpg.Connection, chains: Chains
) -> None:
    async with run_server(make_settings("one")) as one:
        await until(chains.key_recorded, "the first node's key is the root")
        async with run_server(make_settings("two")) as two:
            await admit_node(one, two)
            two_id = await node_id_of(two)
            (stolen,) = [key["key_id"] for key in (await keys_of(one)).values() if key["node_id"] == two_id]
            await add_jobs(one, 1, "other")
            await sign(one, "other")
            await add_jobs(two, 2)
            await sign(two)
            before = await checkpoint_text(superuser)
            others = "SELECT signed_at FROM scheduler.merkle_head WHERE tenant_id = 'other'"
            other_signed_at = await superuser.fetchval(others)
            await until(lambda: kept_size(make_settings("one")) == 2, "the other node keeps it, too")

            assert (await one.post(f"/v1/keys/{stolen}/revoke", json={"reason": "stolen"})).status_code == 200

            async def has_receipt() -> bool:
                answer = await one.get("/v1/chain/receipt", params={"tenant_id": "acme", "seq": 1})
                return answer.status_code == 200

            await until(has_receipt, "the same tree is signed by a key that counts")
            ring = Keyring.from_json((await one.get("/v1/keys")).json())

            async def is_signed_again() -> bool:
                """The other node may sign it once more before it hears that its key counts no longer."""
                after = await checkpoint_text(superuser) or ""
                try:
                    return after != before and open_checkpoint(after, ring) == read_checkpoint(before or "")
                except UnknownKeyError:
                    return False

            await until(is_signed_again, "nor by the other node since")
            assert await superuser.fetchval(others) == other_signed_at, "what counts is not signed again"


async def node_id_of(client: Client) -> str:
    """The node's id."""
    return (await client.get("/v1/node")).json()["node_id"]


async def test_entries_from_before_the_key_are_signed_as_well(
    service: Service, superuser: asyncpg.Connection, chains: Chains
) -> None:
    await service.submitter.submit_lines(
        EventLines.of([created("acme", n) for n in range(3)]), durability=GLOBAL, key=None
    )
    await superuser.execute("UPDATE scheduler.signing_keys SET not_before = now() + interval '1 hour'")

    await service.notary.sign_now("acme")

    row = await superuser.fetchrow("SELECT dsse_envelope FROM scheduler.batch_snapshot WHERE tenant_id = 'acme'")
    ring = Keyring(item.key for item in (await service.trust.published()).admitted)
    assert open_snapshot(row["dsse_envelope"], ring).verdict == "ok"
