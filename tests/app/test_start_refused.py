"""Starts that are refused: with a WAL that is not the one PostgreSQL knows, or a PostgreSQL that went back."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

import asyncpg
import pytest

from app.node.start.procedure import start_node
from app.runtime.settings.config import Settings
from app.runtime.state.losses import LOST
from app.store.sessions import AT_A_NODE
from app.write.followers.checkpoints import NAME, CheckpointJournal
from ledger.errors import LedgerError, StartRefusedError, WalCorruptError
from signing import private_keys
from tests.app.chain_builder import unguarded
from tests.app.chains import Chains, numbers, until
from tests.app.conftest import BackUp, MakeSettings, RunNode
from tests.app.drafts import LOCAL, created
from tests.app.postgres_proxy import PostgresProxy
from tests.app.starting import assert_no_start, assert_refused, changed_control, kept_size, wal_folder, write
from tests.app.test_followers import halted
from tests.conftest import Database, connected_to
from tests.running_copy import copy_running
from wal import control as wal_control
from wal.segment import list_segments

# --- the wrong WAL --------------------------------------------------------------------------------


async def test_a_folder_without_a_wal_is_refused_and_taken_when_the_loss_is_accepted(
    run_node: RunNode, make_settings: MakeSettings, chains: Chains
) -> None:
    settings = make_settings(node_id="node-a")
    async with run_node(settings) as service:
        await write(service, 1, 2)
        await service.key_changes.recorded.wait()
        last_lsn, wal_id = service.node.chained.lsn, service.node.wal_id
    shutil.rmtree(wal_folder(settings))
    await assert_no_start(run_node(settings), StartRefusedError, match="no WAL")
    async with run_node(settings, accept_lost_wal=True) as service:
        assert service.node.epoch == 2
        assert service.node.wal_id != wal_id
        await write(service, 3)
        await until(lambda: recorded_losses(chains), "the loss is recorded")
        first = wal_control.load(wal_folder(settings))
        assert first is not None
        assert first.durable_lsn == last_lsn
    assert await recorded_losses(chains) == [(last_lsn + 1, last_lsn)]
    assert numbers(await chains.sound("acme")) == [1, 2, 3]
    async with run_node(settings) as service:
        await write(service, 4)
    assert await recorded_losses(chains) == [(last_lsn + 1, last_lsn)]


async def recorded_losses(chains: Chains) -> list[tuple[int, int]]:
    """First and last LSN of each loss that ``_system`` records."""
    facts = [json.loads(entry["payload"]) for entry in await chains.sound("_system") if entry["action"] == "WAL_LOST"]
    return [(fact["first_lsn"], fact["last_lsn"]) for fact in facts]


def damage_control(folder: Path) -> None:
    control = folder / wal_control.CONTROL_NAME
    content = control.read_bytes()
    control.write_bytes(content[:-1] + bytes((content[-1] ^ 1,)))


async def test_another_wal_or_a_damaged_control_file_is_refused_and_set_aside_when_the_loss_is_accepted(
    run_node: RunNode, make_settings: MakeSettings, chains: Chains
) -> None:
    settings = make_settings()
    async with run_node(settings) as service:
        await write(service, 1)
        wal_id = service.node.wal_id
    foreign_wal_id = secrets.token_hex(16)
    changed_control(settings, wal_id=foreign_wal_id)
    await assert_refused(run_node, settings, StartRefusedError, "the disk was lost or swapped")
    folder = wal_folder(settings)
    before = {path.name: path.read_bytes() for path in folder.glob("*.wal")}
    async with run_node(settings, accept_lost_wal=True) as service:
        assert service.node.wal_id not in (wal_id, foreign_wal_id)
        await write(service, 2)
    assert {path.name: path.read_bytes() for path in (folder / "lost-1").glob("*.wal")} == before
    losses = await recorded_losses(chains)
    damage_control(folder)
    await assert_refused(run_node, settings, WalCorruptError, "control")
    async with run_node(settings, accept_lost_wal=True) as service:
        await write(service, 3)

        async def is_recorded() -> bool:
            return len(await recorded_losses(chains)) > len(losses)

        await until(is_recorded, "the loss is recorded")
    async with run_node(settings) as service:
        await write(service, 4)
    assert numbers(await chains.sound("acme")) == [1, 2, 3, 4]


# --- a WAL that lost records ----------------------------------------------------------------------


async def lose_tail(run_node: RunNode, proxy: PostgresProxy, settings: Settings, chains: Chains) -> tuple[int, int]:
    """Leave a WAL cut below what Postgres saw durable: first LSN lost and last LSN seen."""
    async with run_node(settings, url=proxy.url) as service:
        await write(service, 1, 2, 3)
        await until(chains.key_recorded, "the node has recorded its key")
        first_lost = service.writer.next_lsn
        await proxy.refuse()
        for n in range(4, 10):
            await service.submitter.submit(created("acme", n, durability=LOCAL), key=None)
        last_seen = service.writer.durable_lsn
    segment = list_segments(wal_folder(settings))[-1].path
    data = segment.read_bytes()
    cut_at = data.index(b'{"fence_token":1,"spec":{"n":4}') - 200
    os.truncate(segment, max(120, cut_at))
    await proxy.accept()
    return first_lost, last_seen


async def test_a_wal_shorter_than_what_was_durable_is_refused_and_its_loss_recorded_when_accepted_though_a_crash_came(
    run_node: RunNode,
    make_settings: MakeSettings,
    proxy: PostgresProxy,
    chains: Chains,
    database: Database,
) -> None:
    settings = make_settings(shutdown_grace="500ms")
    first_lost, last_seen = await lose_tail(run_node, proxy, settings, chains)
    await assert_refused(run_node, settings, WalCorruptError, f"LSN {last_seen} is known to be durable")
    assert numbers(await chains.sound("acme")) == [1, 2, 3]
    # 1. A start after which the process dies at once, behind one that died when it had written down the loss.
    LOST.store(wal_folder(settings), [(first_lost, last_seen)])
    started = await start_node(settings, database.service_url, accept_lost_wal=True)
    started.lock.release()
    ((first, last),) = LOST.load(wal_folder(settings))
    assert [(first, last)] == started.wal.lost
    assert first <= last == last_seen
    # 2. A start that goes well.
    async with run_node(settings, accept_lost_wal=True) as service:
        assert service.writer.next_lsn > last_seen
        await write(service, 20)
        await until(lambda: recorded_losses(chains), "the loss is recorded")
    survivors = set(numbers(await chains.sound("acme"))) - {20}
    assert survivors == set(range(1, 10 - (last - first + 1)))
    async with run_node(settings) as service:
        await write(service, 21)
        assert LOST.load(wal_folder(settings)) == []
    assert await recorded_losses(chains) == [(first, last)]


async def test_a_wal_whose_oldest_unchained_segment_was_removed_is_refused_until_the_loss_is_accepted(
    run_node: RunNode, make_settings: MakeSettings, proxy: PostgresProxy, chains: Chains
) -> None:
    wal = {"segment_bytes": "64 KiB", "batch_max_bytes": "4 KiB", "record_bytes_max": "64 KiB"}
    settings = make_settings(shutdown_grace="500ms", wal=wal)
    async with run_node(settings, url=proxy.url) as service:
        await write(service, 1)
        await service.key_changes.recorded.wait()
        await until(lambda: service.node.chained.lsn == service.writer.durable_lsn, "all is chained")
        chained_lsn = service.node.chained.lsn
        await proxy.refuse()
        for n in range(2, 602):
            await service.submitter.submit(created("acme", n, durability=LOCAL), key=None)
        last_lsn = service.writer.durable_lsn
    await proxy.accept()
    first, second, *_ = list_segments(wal_folder(settings))
    first.path.unlink()
    await assert_refused(run_node, settings, StartRefusedError, f"begins with {second.base_lsn}")
    async with run_node(settings, accept_lost_wal=True) as service:
        await until(lambda: recorded_losses(chains), "the loss is recorded")
        await write(service, 1000)
    assert await recorded_losses(chains) == [(chained_lsn + 1, second.base_lsn - 1)]
    kept = last_lsn - second.base_lsn + 1
    assert numbers(await chains.sound("acme")) == [1, *range(602 - kept, 602), 1000]


# --- a database that went back --------------------------------------------------------------------


async def test_a_start_does_not_wait_for_ever_for_what_another_session_keeps_locked(
    run_node: RunNode, make_settings: MakeSettings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.node.start.connecting.LOCK_TIMEOUT_S", 0.3)
    async with run_node() as service:
        await write(service, 1)
    async with halted(database, "SELECT FROM scheduler.wal_positions FOR UPDATE"), asyncio.timeout(20):
        await assert_no_start(run_node(), StartRefusedError, match='"wal_positions".*see pg_locks')
    started = await start_node(make_settings(), database.service_url, accept_lost_wal=False)
    started.lock.release()
    later = await started.connection.fetchval("SHOW lock_timeout")
    assert later == AT_A_NODE["lock_timeout"], "what comes later has bounds of its own"
    await started.connection.close()


async def test_a_database_older_than_the_wal_or_than_its_checkpoint_or_from_before_the_node_is_refused_and_left_alone(
    run_node: RunNode, make_settings: MakeSettings, back_up: BackUp
) -> None:
    settings, crashed = make_settings(), make_settings("crashed")
    fresh = await back_up()
    async with run_node() as service:
        await write(service, 1, 2)
    older = await back_up()
    async with run_node() as service:
        await write(service, 3, 4)
        await until(lambda: kept_size(settings) == 4, "the checkpoint is kept")
        copy_running(settings.data_dir, crashed.data_dir)
    async with connected_to(older.superuser_url) as superuser:
        before = await superuser.fetch("SELECT * FROM scheduler.wal_positions")
        await assert_refused(run_node, settings, StartRefusedError, "older copy", url=older.service_url)
        await assert_refused(run_node, crashed, StartRefusedError, "this node signed", url=older.service_url)
        assert await superuser.fetch("SELECT * FROM scheduler.wal_positions") == before
    await assert_refused(run_node, settings, StartRefusedError, "never heard", url=fresh.service_url)
    async with run_node() as service:
        await write(service, 5)


async def test_a_chain_that_is_not_the_one_this_node_signed_is_not_extended(
    run_node: RunNode, make_settings: MakeSettings, chains: Chains, superuser: asyncpg.Connection
) -> None:
    async with run_node() as service:
        await write(service, *range(9))
        await until(lambda: kept_size(make_settings()) == 9, "the checkpoint is kept")
    for change, match in (
        ("UPDATE scheduler.scheduler_log SET chain_link = repeat('ab', 32) WHERE seq = 9 AND", "differs"),
        ("DELETE FROM scheduler.scheduler_log WHERE seq > 7 AND", "ends at seq 7"),
    ):
        async with unguarded(superuser):
            await superuser.execute(change + " tenant_id = 'acme'")
            await superuser.execute(
                "UPDATE scheduler.chain_heads SET (head_seq, head_chain_link, head_hlc) ="
                " (SELECT seq, chain_link, t_hlc FROM scheduler.scheduler_log WHERE tenant_id = 'acme'"
                "   ORDER BY seq DESC LIMIT 1) WHERE tenant_id = 'acme'"
            )
        before = await chains.entries("acme")
        await assert_refused(run_node, make_settings(), StartRefusedError, match)
        assert await chains.entries("acme") == before


async def test_an_origin_that_is_gone_or_another_is_refused_with_the_one_that_was_signed_and_nothing_is_written(
    run_node: RunNode, make_settings: MakeSettings, superuser: asyncpg.Connection
) -> None:
    async with run_node() as service:
        await write(service, 1)
        await until(lambda: kept_size(make_settings()), "the checkpoint is kept")
    (was,) = await superuser.fetch("SELECT * FROM scheduler.ledger_identity")
    for change, said in (
        ("DELETE FROM scheduler.ledger_identity", "has no row"),
        ("INSERT INTO scheduler.ledger_identity (log_origin) VALUES ('another.example')", "says another.example"),
    ):
        await superuser.execute(change)
        changed = await superuser.fetch("SELECT * FROM scheduler.ledger_identity")
        match = f"signed the log {was['log_origin']}, but scheduler.ledger_identity {said}"
        await assert_refused(run_node, make_settings(), StartRefusedError, match)
        assert await superuser.fetch("SELECT * FROM scheduler.ledger_identity") == changed
    await superuser.execute("UPDATE scheduler.ledger_identity SET log_origin = $1", was["log_origin"])
    async with run_node() as service:
        await write(service, 2)


def _noise(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x80" * 30)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _change(path: Path) -> None:
    kept = CheckpointJournal(path.parent)
    kept.store({"acme": (kept.load("acme") or "").replace("\n1\n", "\n2\n")})


def _empty(path: Path) -> None:
    kept = CheckpointJournal(path.parent)
    kept.store(dict.fromkeys(kept.load_all(), ""))


STRAYS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "a checkpoint that was changed": (NAME, _change, "beside the WAL is damaged"),
    "checkpoints that are none": (NAME, _empty, "the checkpoint of tenant .* beside the WAL is damaged"),
    "a journal of checkpoints that is none": (NAME, _noise, "checkpoints.journal is no journal of checkpoints"),
    "a folder in the place of the checkpoints": (NAME, _folder, "checkpoints.journal cannot be read"),
    "a folder in the place of the lock": ("LOCK", _folder, "cannot be used: .*LOCK.* move away what stands"),
    "a folder in the place of the keys": ("keys", _folder, "keys, which says with what key .* .*not a regular file"),
    "a folder in the place of the control file": ("control", _folder, "control cannot be read"),
    "a segment that leads nowhere": (
        f"{99:020d}-9.wal",
        lambda path: path.symlink_to("/nowhere/at/all"),
        "cannot be recovered: .*-9.wal.* Free space where the disk is full",
    ),
    "losses of no form": ("lost.json", lambda path: path.write_text('[["a", null]]'), "lost.json cannot be read"),
    "held records of no form": (
        "held.json",
        lambda path: path.write_text('{"version": 1, "tenants": {"p": {"reason": "r", "seen": null, "lsns": [-5]}}}'),
        "held.json cannot be read",
    ),
}


async def test_what_lies_beside_the_wal_is_passed_over_or_refused_by_name(
    run_node: RunNode, make_settings: MakeSettings, tmp_path: Path
) -> None:
    async with run_node() as service:
        await write(service, 1)
        await until(lambda: kept_size(make_settings()), "the checkpoint is kept")
    folder = wal_folder(make_settings())
    shutil.copytree(folder, tmp_path / "kept")
    for place, put, match in STRAYS.values():
        put(folder / place)
        await assert_no_start(run_node(), LedgerError, match=match)
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "kept", folder)
    # What an editor leaves.
    _noise(folder / ".checkpoints.journal.swp")
    async with run_node() as again:
        assert again.node.failure is None


async def test_a_node_with_a_new_key_goes_on_from_the_checkpoint_of_the_old_one(
    run_node: RunNode, make_settings: MakeSettings, chains: Chains, tmp_path: Path
) -> None:
    settings = make_settings()
    async with run_node(settings) as service:
        await write(service, 1)
        await service.key_changes.recorded.wait()
        await until(lambda: kept_size(settings), "the checkpoint is kept")
        old = CheckpointJournal(wal_folder(settings)).load("acme") or ""
    new = private_keys.generate(settings.data_dir / "keys" / "new.pem")
    changed = make_settings(signing={"key_uri": f"file:{new.path}"})
    async with run_node(changed) as service:
        await write(service, 2)
        await service.key_changes.recorded.wait()
        await until(lambda: kept_size(settings) == 2, "a new checkpoint is kept")
        kept = CheckpointJournal(wal_folder(settings)).load("acme") or ""
    key_hash, old_key_hash = (note.split()[-1][:5] for note in (kept, old))
    assert key_hash != old_key_hash
    about_keys = [entry for entry in await chains.sound("_system") if entry["job_id"].startswith("key:")]
    assert [entry["action"] for entry in about_keys] == ["KEY_ADDED", "KEY_ROTATED"]
    # Without the file of the key that signed, nobody can vouch for the next one: the node chains and says so.
    new.path.unlink()
    async with run_node(make_settings(signing={"key_uri": f"file:{tmp_path}/third.pem"})) as service:
        await write(service, 3)
        assert "tally keys admit" in str(service.keys.not_admitted)
        assert kept_size(settings) == 2
