"""Nodes with a second key, of ML-DSA-44: made, admitted, rotated, revoked and lost as others; both sign."""

from __future__ import annotations

import asyncio
import json
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest

from app.runtime.settings.config import Settings
from app.trust import node_keys
from ledger.errors import ConfigurationError, StartRefusedError, UnknownKeyError
from signing import key_statement, note, private_keys
from signing.checkpoint import open_checkpoint
from signing.keys import Keyring
from signing.snapshot import open_snapshot
from tests.app.admitting import is_admitted, waiting_keys
from tests.app.chain_builder import edit
from tests.app.chains import Chains, until
from tests.app.conftest import MakeSettings, RunNode, RunServer
from tests.app.starting import assert_no_start, wal_folder
from tests.app.test_key_admission import key_of, run_tally
from tests.app.test_key_changes import about_keys, add_jobs, problem, rotate, sign, signing_key, verdict_of

Client = httpx.AsyncClient
BOTH = {"second": "ml-dsa-44"}
FILE = "signing.pem.ml-dsa-44.pem"


async def second_keys(client: Client) -> dict[str, dict[str, Any]]:
    """What ``/v1/keys`` says of second keys, by key id."""
    return {key["key_id"]: key for key in (await client.get("/v1/keys")).json()["second_keys"]}


async def second_key(client: Client) -> str:
    """Id of the one second key that signs now."""
    (key_id,) = [key_id for key_id, key in (await second_keys(client)).items() if key["signs_snapshots"]]
    return key_id


def signers(snapshot: dict[str, Any]) -> list[str]:
    return [each["keyid"] for each in snapshot["dsse_envelope"]["signatures"]]


async def ring_of(client: Client) -> Keyring:
    return Keyring.from_json((await client.get("/v1/keys")).json())


def both_signed(client: Client, tenant_id: str = "acme", size: int = 1) -> Callable[[], Awaitable[str | None]]:
    """Gives the served checkpoint, once it has this size and both keys that count now signed it."""

    async def signed() -> str | None:
        answer = await client.get(f"/v1/log/{tenant_id}/checkpoint")
        try:
            found = open_checkpoint(answer.text, (await ring_of(client)).demanding_both())
        except (UnknownKeyError, ConfigurationError):
            return None
        return answer.text if answer.status_code == 200 and found.size >= size else None

    return signed


async def is_signed_by(client: Client, key_id: str) -> bool:
    """Whether the served checkpoint has a line by this second key alone."""
    text = (await client.get("/v1/log/acme/checkpoint")).text
    keys = {key.key_id: key for key in await ring_of(client) if key.is_second}
    origin = text.partition("\n")[0]
    return [each for each, key in keys.items() if note.is_signed_by(text, origin, key)] == [key_id]


async def verify(client: Client, folder: Path, *more: str, keys: dict[str, Any] | None = None, code: int = 0) -> str:
    """What ``tally verify`` says of acme, by the keys of the ledger."""
    (folder / "keys.json").write_text(json.dumps(keys or (await client.get("/v1/keys")).json()))
    asked = ("verify", "-t", "acme", "--keys", str(folder / "keys.json"), "--no-state", "--json", *more)
    return await run_tally(client, *asked, code=code)


# --- both sign ----------------------------------------------------------------------------------------


async def test_from_its_first_start_a_node_signs_with_both(
    run_server: RunServer, make_settings: MakeSettings, chains: Chains, tmp_path: Path
) -> None:
    settings = make_settings(signing=BOTH)
    async with run_server(settings) as client:
        await add_jobs(client, 2)
        snapshot = await sign(client)
        checkpoint = await until(both_signed(client, size=2), "the checkpoint is signed by both")
        first, second = await signing_key(client), await second_key(client)
        assert signers(snapshot) == [first, second]
        answer = (await client.get("/v1/keys")).json()
        assert [key["algorithm"] for key in answer["keys"] + answer["second_keys"]] == ["ed25519", "ml-dsa-44"]
        assert (await second_keys(client))[second]["admitted_by"] == first
        assert second in await run_tally(client, "keys", "list")

        # A reader that knows first keys alone, one that knows both, and one that demands both.
        ring = Keyring.from_json(answer)
        old = Keyring.from_json({name: answer[name] for name in ("keys", "root_key_id", "log_verifier_keys")})
        for keys in (old, ring, ring.demanding_both()):
            assert open_snapshot(json.dumps(snapshot["dsse_envelope"]), keys).verdict == "ok"
            assert open_checkpoint(checkpoint, keys).size == 2
        (verifier_key,) = [key for key in answer["second_log_verifier_keys"] if "/acme+" in key]
        assert open_checkpoint(checkpoint, [verifier_key]).size == 2
        assert (await verdict_of(client))["verdicts"]["signatures"] == "ok"
        for signatures in ("any", "both"):
            await verify(client, tmp_path, "--signatures", signatures)
    ((_, root), (action, added)) = await about_keys(chains)
    assert (root["key_id"], action, added["key_id"]) == (first, "KEY_ADDED", second)
    assert added[key_statement.FIELD]["signatures"][0]["keyid"] == first
    path = settings.data_dir / "keys" / FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert private_keys.second_signer(str(path), may_generate=False).key_id == second


async def test_a_ledger_that_gets_a_second_key_later_is_covered_from_its_beginning(
    run_server: RunServer, make_settings: MakeSettings, tmp_path: Path
) -> None:
    async with run_server(make_settings()) as client:
        await add_jobs(client, 2)
        before = await sign(client)
        await add_jobs(client, 1, "quiet")
        first = await signing_key(client)
        assert (await client.get("/v1/keys")).json()["second_keys"] == []
        await run_tally(client, "verify", "-t", "acme", "--no-state", "--signatures", "both", code=1)
    async with run_server(make_settings(signing=BOTH)) as client:
        await until(both_signed(client, "quiet"), "the checkpoint of a quiet tenant has both signatures")
        assert await signing_key(client) == first
        await until(both_signed(client, size=2), "that of acme too")
        told = json.loads(await verify(client, tmp_path, "--signatures", "both"))
        assert told["verdicts"]["signatures"] == "ok"
        await add_jobs(client, 1)
        after = await sign(client)
        assert [len(signers(each)) for each in (before, after)] == [1, 2]
        await until(both_signed(client, size=3), "the new checkpoint has both")


async def test_by_rows_snapshots_of_before_count_once_one_with_both_is_behind_them(
    run_server: RunServer, make_settings: MakeSettings, tmp_path: Path, database: Any, superuser: asyncpg.Connection
) -> None:
    async with run_server(make_settings()) as client:
        await add_jobs(client, 2)
        await sign(client)
    dsn = ("--dsn", database.superuser_url, "--signatures", "both")
    async with run_server(make_settings(signing=BOTH)) as client:
        await until(both_signed(client, size=2), "the second key counts")
        told = json.loads(await verify(client, tmp_path, *dsn, code=3))
        assert (told["verdicts"]["signatures"], told["signed_to_seq"], told["valid"]) == ("not_checked", 0, True)
        assert json.loads(await verify(client, tmp_path, *dsn[:2]))["signed_to_seq"] == 2
        await add_jobs(client, 1)
        newest = await sign(client)
        told = json.loads(await verify(client, tmp_path, *dsn))
        assert (told["verdicts"]["signatures"], told["signed_to_seq"]) == ("ok", 3)

        # Whoever has broken Ed25519 alone leaves out the signature that he cannot make.
        change = "UPDATE scheduler.batch_snapshot SET dsse_envelope = $2 WHERE id = $1"
        envelope = newest["dsse_envelope"]
        stripped = {**envelope, "signatures": envelope["signatures"][:1]}
        await edit(superuser, change, newest["id"], json.dumps(stripped))
        assert json.loads(await verify(client, tmp_path, *dsn[:2]))["verdicts"]["signatures"] == "ok"
        told = json.loads(await verify(client, tmp_path, *dsn, code=3))
        assert (told["verdicts"]["signatures"], told["signed_to_seq"]) == ("not_checked", 0)

        # A wrong one is a break, for whoever holds the key, and named.
        wrong = [envelope["signatures"][0], {**envelope["signatures"][1], "sig": envelope["signatures"][0]["sig"]}]
        await edit(superuser, change, newest["id"], json.dumps({**envelope, "signatures": wrong}))
        for demanded in (dsn, dsn[:2]):
            first = json.loads(await verify(client, tmp_path, *demanded, code=2))["first_break"]
            assert first["kind"] == "snapshot-signature"
            assert f"the signature by key {await second_key(client)} does not hold" in first["detail"]
        old_keys = {**(await client.get("/v1/keys")).json(), "second_keys": []}
        assert json.loads(await verify(client, tmp_path, *dsn[:2], keys=old_keys))["valid"]


async def test_a_served_checkpoint_without_the_second_line_is_vouched_for_by_no_key(
    run_server: RunServer, make_settings: MakeSettings, tmp_path: Path, superuser: asyncpg.Connection
) -> None:
    async with run_server(make_settings(signing=BOTH)) as client:
        await add_jobs(client, 1)
        await sign(client)
        text = await until(both_signed(client), "the checkpoint is signed by both")
        parsed = note.parse(text)
        stripped = parsed._replace(signatures=parsed.signatures[:1]).encode()
        await superuser.execute("UPDATE scheduler.merkle_head SET checkpoint = $1 WHERE tenant_id = 'acme'", stripped)
        await verify(client, tmp_path)
        told = json.loads(await verify(client, tmp_path, "--signatures", "both", code=4))
        assert told["verdicts"]["checkpoint"] == "unknown_key"


async def test_a_node_without_the_setting_signs_with_one_and_takes_the_same_key_up_again(
    run_server: RunServer, make_settings: MakeSettings
) -> None:
    found = []
    for signing in (BOTH, {}, BOTH):
        async with run_server(make_settings(signing=signing)) as client:
            if not found:
                await rotate(client, second_key=True)
            await add_jobs(client, 1)
            snapshot = await sign(client)
            found.append([*signers(snapshot)])
            uses = [key["signs_snapshots"] for key in (await second_keys(client)).values()]
            assert sum(uses) == len(signing)
            assert (await verdict_of(client))["verdicts"]["signatures"] == "ok"
    assert found[0] == found[2]
    assert found[1] == found[0][:1]


# --- rotated and revoked ------------------------------------------------------------------------------


async def test_a_rotated_second_key_signs_from_then_on_and_after_a_restart(
    run_server: RunServer, make_settings: MakeSettings, chains: Chains, tmp_path: Path
) -> None:
    settings = make_settings(signing=BOTH)
    async with run_server(settings) as client:
        await add_jobs(client, 1)
        await sign(client)
        first, old = await signing_key(client), await second_key(client)
        new = json.loads(await run_tally(client, "keys", "rotate", "--second", "--json"))["key"]["key_id"]
        assert (await second_key(client), await signing_key(client)) == (new, first)
        assert (await second_keys(client))[old]["not_after"] is not None
        await until(lambda: is_signed_by(client, new), "the checkpoint of a quiet tenant is signed again")
        assert problem(await client.post("/v1/keys/rotate", json={"log_key": True, "second_key": True}))[0] == 422
        assert (await client.post(f"/v1/keys/{old}/revoke", json={"reason": "retired"})).status_code == 200
        await add_jobs(client, 1)
        assert signers(await sign(client)) == [first, new]
    action, rotated = (await about_keys(chains))[2]
    assert (action, rotated["key_id"], rotated["previous_key_id"]) == ("KEY_ROTATED", new, old)
    async with run_server(settings) as client:
        await add_jobs(client, 1)
        assert signers(await sign(client)) == [first, new]
        await until(both_signed(client, size=3), "both sign the checkpoint")
        await verify(client, tmp_path)


async def test_a_rotation_while_snapshots_wait_leaves_each_signed_by_keys_that_count(
    run_server: RunServer, make_settings: MakeSettings, tmp_path: Path, database: Any
) -> None:
    async with run_server(make_settings(signing=BOTH, chain={"batch_size": 1})) as client:
        for _ in range(3):
            await asyncio.gather(add_jobs(client, 8), rotate(client, second_key=True), rotate_later(client))
        await sign(client)
        assert len(await second_keys(client)) == 4
        told = await verify(client, tmp_path, "--dsn", database.superuser_url, "--signatures", "both")
        assert json.loads(told)["verdicts"]["signatures"] == "ok"


async def rotate_later(client: Client) -> None:
    """Rotate the first key once no other change is under way."""
    while (await client.post("/v1/keys/rotate", json={})).status_code != 201:
        await asyncio.sleep(0)


async def test_a_second_key_that_was_revoked_elsewhere_signs_nothing_until_another_takes_its_place(
    run_node: RunNode, run_server: RunServer, make_settings: MakeSettings, tmp_path: Path
) -> None:
    settings = make_settings(signing=BOTH)
    async with run_server(settings) as client:
        await add_jobs(client, 1)
        await sign(client)
        second = await second_key(client)
        root = settings.data_dir / "keys" / "signing.pem"
        await run_tally(client, "keys", "revoke", second, "--root-key", str(root))
        await add_jobs(client, 1)
        refused = await until(lambda: _refused(client), "the node knows that its key is revoked")
        assert f"key {second} is revoked" in refused.text
        assert "tally keys rotate --second" in refused.text
        await rotate(client, second_key=True)
        assert len(signers(await sign(client))) == 2


async def _refused(client: Client) -> httpx.Response | None:
    answer = await client.post("/v1/snapshots", json={"tenant_id": "acme"})
    return answer if answer.status_code == 503 else None


async def test_a_node_whose_keys_wait_names_both_and_signs_once_both_are_admitted(
    run_node: RunNode, run_server: RunServer, make_settings: MakeSettings, tmp_path: Path
) -> None:
    root = private_keys.generate(tmp_path / "root.pem")
    (tmp_path / "root.pub.pem").write_text(root.public_key_pem)
    settings = make_settings(signing={**BOTH, "root_key": str(tmp_path / "root.pub.pem")})
    async with run_server(settings) as client:
        waiting = await until(lambda: _both_waiting(client), "both keys are in the chain")
        said = (await client.get("/readyz")).json()["checks"]["admission"]["detail"]
        assert all(f"tally keys admit {key_id}" in said for key_id in waiting)
        assert (await client.get("/v1/keys")).json()["second_keys"] == []
        first, second = sorted(waiting, key=lambda key_id: waiting[key_id]["algorithm"] == "ml-dsa-44")
        await run_tally(client, "keys", "admit", first, "--root-key", str(root.path))
        assert not await is_admitted(client)
        await run_tally(client, "keys", "admit", second)
        await until(lambda: is_admitted(client), "the node knows that it is admitted")
        await add_jobs(client, 1)
        assert signers(await sign(client)) == [first, second]


async def _both_waiting(client: Client) -> dict[str, dict[str, Any]] | None:
    waiting = await waiting_keys(client)
    return waiting if len(waiting) == 2 else None


# --- files --------------------------------------------------------------------------------------------


async def test_another_key_takes_the_place_of_a_second_key_whose_file_is_lost(
    run_server: RunServer, make_settings: MakeSettings, chains: Chains, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = make_settings(signing=BOTH)
    async with run_server(settings) as client:
        await add_jobs(client, 1)
        await sign(client)
        first, old = await signing_key(client), await second_key(client)
    (settings.data_dir / "keys" / FILE).unlink()
    async with run_server(settings) as client:
        assert "second_key_lost" in capsys.readouterr().out
        await add_jobs(client, 1)
        new = await second_key(client)
        assert signers(await sign(client)) == [first, new]
        assert new != old
        assert (await verdict_of(client))["verdicts"]["signatures"] == "ok"
    action, rotated = (await about_keys(chains))[2]
    assert (action, rotated["key_id"], rotated["previous_key_id"]) == ("KEY_ROTATED", new, old)
    assert rotated[key_statement.FIELD]["signatures"][0]["keyid"] == first


@pytest.mark.parametrize("fault", ["mode", "algorithm", "text"])
async def test_a_second_key_file_that_cannot_be_used_stops_the_start(
    run_node: RunNode, make_settings: MakeSettings, fault: str
) -> None:
    settings = make_settings(signing=BOTH)
    async with run_node(settings):
        pass
    path = settings.data_dir / "keys" / FILE
    if fault == "mode":
        path.chmod(0o644)
    else:
        path.unlink()
        path.touch(0o600)
        path.write_text("no key" if fault == "text" else key_of(settings).path.read_text())
    says = {"mode": "has mode 0644", "algorithm": "key of ed25519, not of ml-dsa-44", "text": "PEM"}[fault]
    await assert_no_start(run_node(settings), ConfigurationError, f"{FILE}.*{says}")


async def test_a_second_key_is_no_first_key(run_node: RunNode, make_settings: MakeSettings, tmp_path: Path) -> None:
    made = private_keys.second_signer(f"file:{tmp_path}/second.pem", may_generate=True)
    settings = make_settings(signing={"key_uri": f"file:{made.path}"})
    await assert_no_start(run_node(settings), ConfigurationError, "key of ml-dsa-44, not of ed25519")


async def test_a_start_that_died_before_its_second_key_was_chained_is_completed_by_the_next(
    run_node: RunNode, run_server: RunServer, make_settings: MakeSettings, superuser: asyncpg.Connection
) -> None:
    """As after a restore of a database of before: the file of keys has it, chain and table do not."""
    async with run_server(make_settings()) as client:
        await add_jobs(client, 1)
        await sign(client)
    settings = make_settings(signing=BOTH)
    keys = node_keys.open_keys(wal_folder(settings), settings)
    keys.store()
    assert keys.second is not None
    async with run_server(settings) as client:
        await until(both_signed(client), "both sign the checkpoint")
        assert list(await second_keys(client)) == [keys.second.key_id]
        await superuser.execute("DELETE FROM scheduler.signing_keys WHERE algorithm = 'ml-dsa-44'")
    async with run_server(settings) as client:
        await add_jobs(client, 1)
        assert signers(await sign(client))[1] == keys.second.key_id
        assert list(await second_keys(client)) == [keys.second.key_id]
        assert (await verdict_of(client))["verdicts"]["signatures"] == "ok"


async def test_a_log_origin_too_long_for_the_second_key_stops_the_start(
    run_node: RunNode, make_settings: MakeSettings
) -> None:
    settings = make_settings(signing=BOTH, log={"origin": "o" * 192})
    await assert_no_start(run_node(settings), StartRefusedError, "longer than 191 bytes")


def test_the_second_key_stays_where_it_is_when_the_setting_names_another_first_key(
    make_settings: MakeSettings, tmp_path: Path
) -> None:
    folder = tmp_path / "wal"
    folder.mkdir()
    before = node_keys.open_keys(folder, settings := make_settings(signing=BOTH))
    before.store()
    other = private_keys.generate(tmp_path / "elsewhere" / "other.pem")
    moved: Settings = make_settings(signing={**BOTH, "key_uri": f"file:{other.path}"})
    after = node_keys.open_keys(folder, moved)
    assert (after.signer.key_id, after.second and after.second.key_id) == (
        other.key_id,
        before.second and before.second.key_id,
    )
    after.store()
    again = node_keys.open_keys(folder, moved)
    assert again.second is not None
    assert again.second.path == settings.data_dir / "keys" / FILE
