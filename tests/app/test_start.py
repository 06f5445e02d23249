"""Starting: refused whenever WAL, database and folder do not fit together, and always in a higher epoch."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg
import pytest

from app import lost_wal
from app.config import Settings
from app.main import Service
from app.start import start_node
from app.store import node as node_store
from app.store.chaining import WalPosition
from ledger.errors import LedgerError, StartRefusedError, WalCorruptError, WalLockedError
from ledger.hlc import Hlc
from tests.app.chains import Chains, numbers, until
from tests.app.conftest import BackUp, MakeSettings, RunNode
from tests.app.drafts import GLOBAL, LOCAL, created, key, progressed
from tests.app.postgres_proxy import PostgresProxy, proxy_to
from tests.conftest import Database
from wal import control as wal_control
from wal.segment import list_segments


@pytest.fixture
async def proxy(database: Database) -> AsyncIterator[PostgresProxy]:
    """A proxy in front of the database."""
    async with proxy_to(database.service_url) as proxy:
        yield proxy


def wal_folder(settings: Settings) -> Path:
    """The WAL folder of the one node that lives below ``settings.data_dir``."""
    (folder,) = [path for path in settings.wal_dir.iterdir() if path.is_dir()]
    return folder


def kept_size(settings: Settings) -> int:
    """Size of the checkpoint of tenant acme beside the WAL, 0 when there is none."""
    path = wal_folder(settings) / "checkpoints" / "acme"
    return int(path.read_text().split("\n")[1]) if path.exists() else 0


def changed_control(settings: Settings, **changes: object) -> None:
    """Change what the control file says, well formed."""
    folder = wal_folder(settings)
    known = wal_control.load(folder)
    assert known is not None
    wal_control.store(folder, known._replace(**changes))  # type: ignore[arg-type]


async def write(service: Service, *ns: int, tenant_id: str = "acme") -> None:
    """Chain one job a number."""
    for n in ns:
        await service.submitter.submit(created(tenant_id, n), key=None)


async def assert_refused(
    run_node: RunNode,
    settings: Settings,
    kind: type[LedgerError],
    match: str,
    *,
    url: str | None = None,
    accept_lost_wal: bool = False,
) -> None:
    """The start is refused, and whatever node lived here can start again: nothing was locked or changed for good."""
    before = {path: path.read_bytes() for path in sorted(wal_folder(settings).glob("*.wal"))}
    with pytest.raises(kind, match=match):
        async with run_node(settings, url=url, accept_lost_wal=accept_lost_wal):
            pass
    assert {path: path.read_bytes() for path in sorted(wal_folder(settings).glob("*.wal"))} == before


@asynccontextmanager
async def superuser_of(database: Database) -> AsyncIterator[asyncpg.Connection]:
    """A superuser's connection, for as long as the context is open."""
    connection = await asyncpg.connect(database.superuser_url)
    try:
        yield connection
    finally:
        await connection.close()


# --- who ------------------------------------------------------------------------------------------


async def test_a_second_process_on_the_same_folder_is_refused_and_the_first_goes_on(
    service: Service, run_node: RunNode, chains: Chains
) -> None:
    with pytest.raises(WalLockedError, match="in use by process"):
        async with run_node():
            pass
    await write(service, 1)
    assert numbers(await chains.sound("acme")) == [1]


async def test_a_node_keeps_the_ids_it_made_and_takes_the_ones_it_is_given(
    run_node: RunNode, make_settings: MakeSettings
) -> None:
    made = []
    for _ in range(2):
        async with run_node() as service:
            made.append((service.node.node_id, service.node.gate))
    assert made[0] == made[1]
    async with run_node(make_settings("other", node_id="node-x", gate="gate7", region="use1")) as service:
        assert (service.node.node_id, service.node.gate, service.node.region) == ("node-x", "gate7", "use1")
        receipt = await service.submitter.submit(created("acme", 1), key=None)
        assert receipt.hlc.endswith(":node-x")
        assert receipt.job_id.startswith("use1-")
        assert "-gate7-" in receipt.job_id


async def test_a_node_that_forgot_which_it_is_does_not_leave_its_wal_behind(
    run_node: RunNode, make_settings: MakeSettings, chains: Chains
) -> None:
    async with run_node() as service:
        await write(service, 1)
        node_id = service.node.node_id
    kept = make_settings().wal_dir / "node.json"
    for left in ("", "[]", '{"node_id": 5}', None):
        kept.unlink(missing_ok=True)
        if left is not None:
            kept.write_text(left)
        with pytest.raises(StartRefusedError, match="set"):
            async with run_node():
                pass
    async with run_node(make_settings(node_id=node_id)) as service:
        await write(service, 2)
        assert service.node.epoch == 2
    async with run_node() as service:
        assert service.node.node_id == node_id
    assert numbers(await chains.sound("acme")) == [1, 2]


@pytest.mark.parametrize(
    "altered",
    [
        {"node_id": "Node-1"},
        {"node_id": "../elsewhere"},
        {"node_id": "node-1\n"},
        {"node_id": ""},
        {"gate": "gate-7"},
        {"gate": None},
        {"region": "use1"},
        {"node_id": "node-another"},
    ],
    ids=str,
)
async def test_an_altered_identity_is_refused_with_its_file_and_what_to_do(
    run_node: RunNode, make_settings: MakeSettings, altered: dict[str, object]
) -> None:
    async with run_node():
        pass
    kept = make_settings().wal_dir / "node.json"
    written = kept.read_bytes()
    kept.write_text(json.dumps(json.loads(written) | altered))
    await assert_refused(run_node, make_settings(), StartRefusedError, r"node\.json.*set ")
    assert sorted(path.name for path in kept.parent.iterdir()) == sorted(["node.json", json.loads(written)["node_id"]])
    kept.write_bytes(written)
    async with run_node() as service:
        assert service.node.epoch == 2


async def test_two_nodes_never_make_job_ids_with_one_gate(
    service: Service, run_node: RunNode, make_settings: MakeSettings
) -> None:
    gate = service.node.gate
    taken = make_settings("other", gate=gate)
    with pytest.raises(StartRefusedError, match=f"gate {gate}"):
        async with run_node(taken):
            pass
    shutil.rmtree(taken.data_dir)
    async with run_node(make_settings("other", gate=gate, region="elsewhere")) as elsewhere:
        assert elsewhere.node.gate == gate
    # A gate that was only made, not configured, is made anew.
    settings = make_settings("third")
    settings.wal_dir.mkdir(parents=True)
    (settings.wal_dir / "node.json").write_text(f'{{"node_id": "node-third", "gate": "{gate}"}}')
    async with run_node(settings) as third:
        assert third.node.node_id == "node-third"
        assert third.node.gate != gate


# --- the database ---------------------------------------------------------------------------------


async def test_a_database_without_the_schema_is_refused(
    run_node: RunNode, make_settings: MakeSettings, empty_database: Database
) -> None:
    with pytest.raises(StartRefusedError, match="migrate"):
        async with run_node(make_settings(), url=empty_database.service_url):
            pass


async def test_a_login_that_postgres_does_not_know_is_refused_at_once(
    run_node: RunNode, make_settings: MakeSettings, database: Database
) -> None:
    with pytest.raises(StartRefusedError, match="Postgres refuses"):
        async with run_node(make_settings(), url=re.sub(":[^:@/]+@", ":wrong@", database.service_url)):
            pass


async def test_a_start_waits_for_a_database_that_is_not_up_yet(
    run_node: RunNode, proxy: PostgresProxy, chains: Chains
) -> None:
    await proxy.refuse()

    async def start() -> None:
        async with run_node(url=proxy.url) as service:
            await write(service, 1)

    starting = asyncio.create_task(start())
    await asyncio.sleep(0)
    await proxy.accept()
    await starting
    assert numbers(await chains.sound("acme")) == [1]


async def test_a_ledger_keeps_the_origin_it_began_with(
    run_node: RunNode, make_settings: MakeSettings, superuser: asyncpg.Connection
) -> None:
    async with run_node(make_settings(log={"origin": "example.org/ledger"})):
        pass
    async with run_node():
        pass
    with pytest.raises(StartRefusedError, match=r"example\.org/ledger"):
        async with run_node(make_settings(log={"origin": "example.org/other"})):
            pass
    assert await superuser.fetchval("SELECT log_origin FROM scheduler.ledger_identity") == "example.org/ledger"


# --- epochs ---------------------------------------------------------------------------------------


async def test_each_start_takes_a_higher_epoch_and_keeps_where_the_past_ones_ended(
    run_node: RunNode, make_settings: MakeSettings, chains: Chains, superuser: asyncpg.Connection
) -> None:
    ends = {}
    for epoch in range(1, 5):
        async with run_node() as service:
            assert service.node.epoch == epoch
            if epoch != 3:
                await write(service, epoch)
                await until(chains.key_recorded, "the node has recorded its key")
            node_id = service.node.node_id
            ends[epoch] = service.writer.next_lsn - 1
            position = await chains.position(node_id)
            assert (position["epoch"], position["wal_id"]) == (epoch, service.node.wal_id)
    rows = await superuser.fetch("SELECT epoch, end_lsn FROM scheduler.wal_epochs WHERE node_id = $1", node_id)
    del ends[4]
    assert {row["epoch"]: row["end_lsn"] for row in rows} == ends
    assert numbers(await chains.sound("acme")) == [1, 2, 4]
    known = wal_control.load(wal_folder(make_settings()))
    assert known is not None
    assert (known.epoch, known.wal_id) == (4, position["wal_id"])


async def test_a_crash_between_the_epoch_of_the_control_file_and_that_of_postgres_costs_one_epoch(
    run_node: RunNode, make_settings: MakeSettings, chains: Chains
) -> None:
    async with run_node() as service:
        await write(service, 1)
    changed_control(make_settings(), epoch=2)
    async with run_node() as service:
        assert service.node.epoch == 3
        await write(service, 2)
        assert (await chains.position(service.node.node_id))["epoch"] == 3
    assert numbers(await chains.sound("acme")) == [1, 2]


async def test_a_crash_before_the_very_first_epoch_reached_postgres_costs_one_epoch(
    run_node: RunNode, make_settings: MakeSettings, chains: Chains
) -> None:
    settings = make_settings(node_id="node-a")
    folder = settings.wal_dir / "node-a"
    folder.mkdir(parents=True)
    wal_control.store(folder, wal_control.Control(wal_control.new_wal_id(), "node-a", 1, Hlc(5, 0, "node-a")))
    async with run_node(settings) as service:
        assert service.node.epoch == 2
        await write(service, 1)
    assert numbers(await chains.sound("acme")) == [1]


async def test_the_epoch_is_taken_only_from_the_position_that_was_judged(
    run_node: RunNode, chains: Chains, superuser: asyncpg.Connection
) -> None:
    async with run_node() as service:
        await write(service, 1)
    now = await chains.position(service.node.node_id)
    judged = WalPosition(now["wal_id"], now["epoch"], now["chained_lsn"], now["seen_durable_lsn"])
    for stale in (None, judged._replace(epoch=judged.epoch - 1), judged._replace(chained_lsn=judged.chained_lsn - 1)):
        assert not await node_store.take_epoch(
            superuser,
            node_id=service.node.node_id,
            wal_id=judged.wal_id,
            epoch=9,
            chained_lsn=judged.chained_lsn,
            ends={judged.epoch: 1},
            expected=stale,
        )
    assert await chains.position(service.node.node_id) == now
    assert await superuser.fetchval("SELECT count(*) FROM scheduler.wal_epochs") == 0


async def test_a_process_that_another_start_overtook_is_fenced(
    run_node: RunNode, make_settings: MakeSettings, chains: Chains
) -> None:
    async with run_node(make_settings("one")) as first:
        await write(first, 1)
        await until(chains.key_recorded, "nothing is being written")
        shutil.copytree(make_settings("one").data_dir, make_settings("two").data_dir)
        async with run_node(make_settings("two")) as second:
            assert (second.node.node_id, second.node.epoch) == (first.node.node_id, 2)
            await write(second, 2)
            with pytest.raises(LedgerError, match="epoch 2 has taken over"):
                await write(first, 3)
            await write(second, 4)
    assert numbers(await chains.sound("acme")) == [1, 2, 4]


# --- the wrong WAL --------------------------------------------------------------------------------


async def test_a_folder_with_another_wal_is_refused_and_nothing_in_it_is_touched(
    run_node: RunNode, make_settings: MakeSettings
) -> None:
    async with run_node() as service:
        await write(service, 1)
    changed_control(make_settings(), wal_id=wal_control.new_wal_id())
    await assert_refused(run_node, make_settings(), StartRefusedError, "the disk was lost or swapped")


async def test_a_folder_without_a_wal_is_refused_and_taken_when_the_loss_is_accepted(
    run_node: RunNode, make_settings: MakeSettings, chains: Chains
) -> None:
    settings = make_settings(node_id="node-a")
    async with run_node(settings) as service:
        await write(service, 1, 2)
        await until(chains.key_recorded, "the node has recorded its key")
        last_lsn, wal_id = service.node.chained.lsn, service.node.wal_id
    shutil.rmtree(wal_folder(settings))
    with pytest.raises(StartRefusedError, match="no WAL"):
        async with run_node(settings):
            pass
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


async def test_a_wal_that_is_given_up_is_set_aside_not_deleted(
    run_node: RunNode, make_settings: MakeSettings, chains: Chains
) -> None:
    settings = make_settings()
    async with run_node(settings) as service:
        await write(service, 1)
        wal_id = service.node.wal_id
    foreign_wal_id = wal_control.new_wal_id()
    changed_control(settings, wal_id=foreign_wal_id)
    folder = wal_folder(settings)
    before = {path.name: path.read_bytes() for path in folder.glob("*.wal")}
    async with run_node(settings, accept_lost_wal=True) as service:
        assert service.node.wal_id not in (wal_id, foreign_wal_id)
        await write(service, 2)
    assert {path.name: path.read_bytes() for path in (folder / "lost-1").glob("*.wal")} == before
    async with run_node(settings) as service:
        await write(service, 3)
    assert numbers(await chains.sound("acme")) == [1, 2, 3]


async def test_a_damaged_control_file_is_refused_and_given_up_when_the_loss_is_accepted(
    run_node: RunNode, make_settings: MakeSettings, chains: Chains
) -> None:
    settings = make_settings()
    async with run_node(settings) as service:
        await write(service, 1)
    control = wal_folder(settings) / wal_control.CONTROL_NAME
    control.write_bytes(control.read_bytes()[:-1] + b"x")
    await assert_refused(run_node, settings, WalCorruptError, "control")
    async with run_node(settings, accept_lost_wal=True) as service:
        await write(service, 2)
        await until(lambda: recorded_losses(chains), "the loss is recorded")
    assert numbers(await chains.sound("acme")) == [1, 2]


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


async def test_a_wal_shorter_than_what_was_durable_is_refused_and_its_loss_recorded_when_accepted(
    run_node: RunNode, make_settings: MakeSettings, proxy: PostgresProxy, chains: Chains
) -> None:
    settings = make_settings(shutdown_grace="500ms")
    _first_lost, last_seen = await lose_tail(run_node, proxy, settings, chains)
    await assert_refused(run_node, settings, WalCorruptError, f"LSN {last_seen} is known to be durable")
    assert numbers(await chains.sound("acme")) == [1, 2, 3]
    async with run_node(settings, accept_lost_wal=True) as service:
        assert service.writer.next_lsn > last_seen
        await write(service, 20)
        await until(lambda: recorded_losses(chains), "the loss is recorded")
    ((first, last),) = await recorded_losses(chains)
    assert last == last_seen
    assert first <= last
    survivors = set(numbers(await chains.sound("acme"))) - {20}
    assert survivors == set(range(1, 10 - (last - first + 1)))
    async with run_node(settings) as service:
        await write(service, 21)


async def test_a_loss_is_recorded_by_the_next_start_when_a_crash_came_before_its_entry(
    run_node: RunNode,
    make_settings: MakeSettings,
    proxy: PostgresProxy,
    chains: Chains,
    database: Database,
) -> None:
    settings = make_settings(shutdown_grace="500ms")
    _first_lost, last_seen = await lose_tail(run_node, proxy, settings, chains)
    # 1. A start after which the process dies at once.
    started = await start_node(settings, database.service_url, accept_lost_wal=True)
    started.lock.release()
    ((first, last),) = lost_wal.load(wal_folder(settings))
    assert [(first, last)] == started.lost
    assert last == last_seen
    # 2. A start that goes well.
    async with run_node(settings, accept_lost_wal=True):
        await until(lambda: recorded_losses(chains), "the loss is recorded")
    async with run_node(settings):
        assert lost_wal.load(wal_folder(settings)) == []
    assert await recorded_losses(chains) == [(first, last)]


async def test_a_wal_whose_oldest_unchained_segment_was_removed_is_refused_until_the_loss_is_accepted(
    run_node: RunNode, make_settings: MakeSettings, proxy: PostgresProxy, chains: Chains
) -> None:
    wal = {"segment_bytes": "64 KiB", "batch_max_bytes": "4 KiB", "record_bytes_max": "64 KiB"}
    settings = make_settings(shutdown_grace="500ms", wal=wal)
    async with run_node(settings, url=proxy.url) as service:
        await write(service, 1)
        await until(chains.key_recorded, "the node has recorded its key")
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


async def test_a_database_older_than_a_cleanly_stopped_wal_is_refused_and_left_alone(
    run_node: RunNode, make_settings: MakeSettings, back_up: BackUp
) -> None:
    async with run_node() as service:
        await write(service, 1, 2)
    older = await back_up()
    async with run_node() as service:
        await write(service, 3)
    async with superuser_of(older) as superuser:
        before = await superuser.fetch("SELECT * FROM scheduler.wal_positions")
        await assert_refused(run_node, make_settings(), StartRefusedError, "older copy", url=older.service_url)
        assert await superuser.fetch("SELECT * FROM scheduler.wal_positions") == before
    async with run_node() as service:
        await write(service, 4)


async def test_a_database_older_than_the_checkpoint_beside_a_crashed_wal_is_refused(
    run_node: RunNode, make_settings: MakeSettings, back_up: BackUp
) -> None:
    async with run_node() as service:
        await write(service, 1, 2)
    older = await back_up()
    async with run_node() as service:
        await write(service, 3, 4)
        await until(lambda: kept_size(make_settings()) == 4, "the checkpoint is kept")
        shutil.copytree(make_settings().data_dir, make_settings("crashed").data_dir)
    crashed = make_settings("crashed")
    await assert_refused(run_node, crashed, StartRefusedError, "this node signed", url=older.service_url)


async def test_a_database_that_never_heard_of_the_node_is_refused(
    run_node: RunNode, make_settings: MakeSettings, back_up: BackUp
) -> None:
    fresh = await back_up()
    async with run_node() as service:
        await write(service, 1)
    await assert_refused(run_node, make_settings(), StartRefusedError, "never heard", url=fresh.service_url)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ("DELETE FROM scheduler.scheduler_log WHERE seq > 7 AND", "ends at seq 7"),
        ("UPDATE scheduler.scheduler_log SET chain_link = repeat('ab', 32) WHERE seq = 9 AND", "differs"),
    ],
)
async def test_a_chain_that_is_not_the_one_this_node_signed_is_not_extended(
    run_node: RunNode,
    make_settings: MakeSettings,
    chains: Chains,
    superuser: asyncpg.Connection,
    change: str,
    match: str,
) -> None:
    async with run_node() as service:
        await write(service, *range(9))
        await until(lambda: kept_size(make_settings()) == 9, "the checkpoint is kept")
    async with superuser.transaction():
        await superuser.execute("SET LOCAL session_replication_role = replica")
        await superuser.execute(change + " tenant_id = 'acme'")
        await superuser.execute(
            "UPDATE scheduler.chain_heads SET (head_seq, head_chain_link, head_hlc) ="
            " (SELECT seq, chain_link, t_hlc FROM scheduler.scheduler_log WHERE tenant_id = 'acme'"
            "   ORDER BY seq DESC LIMIT 1) WHERE tenant_id = 'acme'"
        )
    before = await chains.entries("acme")
    await assert_refused(run_node, make_settings(), StartRefusedError, match)
    assert await chains.entries("acme") == before


async def test_a_damaged_checkpoint_beside_the_wal_is_refused_with_what_to_do(
    run_node: RunNode, make_settings: MakeSettings
) -> None:
    async with run_node() as service:
        await write(service, 1)
        kept = wal_folder(make_settings()) / "checkpoints" / "acme"
        await until(kept.exists, "the checkpoint is kept")
    kept.write_text(kept.read_text().replace("\n1\n", "\n2\n"))
    await assert_refused(run_node, make_settings(), StartRefusedError, "beside the WAL is damaged")


def _noise(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x80" * 30)


STRAYS: dict[str, tuple[str, Callable[[Path], object], str | None]] = {
    "an editor's swap file": ("checkpoints/.acme.swp", _noise, None),
    "a folder whose name is no tenant's": ("checkpoints/Old", Path.mkdir, None),
    "a checkpoint that is no text": ("checkpoints/acme", _noise, "checkpoints/acme cannot be read as the checkpoint"),
    "a folder in the place of a checkpoint": ("checkpoints/beta", Path.mkdir, "checkpoints/beta cannot be read"),
    "a folder in the place of the control file": ("control", Path.mkdir, "control cannot be read"),
    "a segment that leads nowhere": (
        f"{99:020d}-9.wal",
        lambda path: path.symlink_to("/nowhere/at/all"),
        "cannot be recovered: .*-9.wal",
    ),
    "losses of no form": ("lost.json", lambda path: path.write_text('[["a", null]]'), "lost.json cannot be read"),
    "held records of no form": (
        "held.json",
        lambda path: path.write_text('{"version": 1, "tenants": {"p": {"reason": "r", "seen": null, "lsns": [-5]}}}'),
        "held.json cannot be read",
    ),
}


@pytest.mark.parametrize("name", STRAYS)
async def test_what_lies_beside_the_wal_is_passed_over_or_refused_by_name(
    run_node: RunNode, make_settings: MakeSettings, name: str
) -> None:
    place, put, match = STRAYS[name]
    async with run_node() as service:
        await write(service, 1)
        await until((wal_folder(make_settings()) / "checkpoints" / "acme").exists, "the checkpoint is kept")
    path = wal_folder(make_settings()) / place
    if path.exists():
        path.unlink()
    put(path)
    if match is None:
        async with run_node() as again:
            assert again.node.failure is None
    else:
        with pytest.raises(LedgerError, match=match):
            async with run_node():
                pass


async def test_a_node_with_a_new_key_goes_on_from_the_checkpoint_of_the_old_one(
    run_node: RunNode, make_settings: MakeSettings, chains: Chains
) -> None:
    settings = make_settings()
    async with run_node(settings) as service:
        await write(service, 1)
        kept = wal_folder(settings) / "checkpoints" / "acme"
        await until(kept.exists, "the checkpoint is kept")
        old = kept.read_text()
    (settings.data_dir / "keys" / "signing.pem").unlink()
    async with run_node(settings) as service:
        await write(service, 2)
        await until(lambda: kept_size(settings) == 2, "a new checkpoint is kept")
    key_hash, old_key_hash = (note.split()[-1][:5] for note in (kept.read_text(), old))
    assert key_hash != old_key_hash
    about_keys = [entry for entry in await chains.sound("_system") if entry["job_id"].startswith("key:")]
    assert [entry["action"] for entry in about_keys] == ["KEY_ADDED", "KEY_ROTATED"]


# --- the clock ------------------------------------------------------------------------------------

HOUR_MS = 3_600_000


async def highest_after(run_node: RunNode, settings: Settings, n: int) -> Hlc:
    """The HLC of an event that a new start takes."""
    async with run_node(settings) as service:
        return Hlc.parse((await service.submitter.submit(created("acme", n), key=None)).hlc)


async def test_the_clock_goes_on_from_the_control_file_when_the_wall_clock_was_set_back(
    run_node: RunNode, make_settings: MakeSettings
) -> None:
    settings = make_settings()
    async with run_node(settings) as service:
        await write(service, 1)
        node_id = service.node.node_id
    ahead = Hlc(time.time_ns() // 1_000_000 + HOUR_MS, 5, node_id)
    changed_control(settings, highest_hlc=ahead)
    assert await highest_after(run_node, settings, 2) > ahead


async def test_the_clock_goes_on_from_postgres_and_from_the_wal_when_the_control_file_lags(
    run_node: RunNode, make_settings: MakeSettings, proxy: PostgresProxy, chains: Chains
) -> None:
    settings = make_settings(shutdown_grace="500ms")
    async with run_node(settings, url=proxy.url) as service:
        await write(service, 1)
        await until(chains.key_recorded, "the node has recorded its key")
        node_id = service.node.node_id
        service.node.clock.observe(Hlc(time.time_ns() // 1_000_000 + HOUR_MS, 0, node_id))
        chained = Hlc.parse((await service.submitter.submit(created("acme", 2), key=None)).hlc)
    changed_control(settings, highest_hlc=Hlc(0, 0, node_id))
    async with run_node(settings, url=proxy.url) as service:
        assert service.node.clock.last >= chained
        await proxy.refuse()
        service.node.clock.observe(Hlc(time.time_ns() // 1_000_000 + 2 * HOUR_MS, 0, node_id))
        local = Hlc.parse((await service.submitter.submit(created("acme", 3, durability=LOCAL), key=None)).hlc)
    changed_control(settings, highest_hlc=Hlc(0, 0, node_id))
    later = await highest_after(run_node, settings, 4)
    assert later > local > chained


async def test_the_clock_goes_on_from_postgres_when_the_wal_is_gone(
    run_node: RunNode, make_settings: MakeSettings, chains: Chains
) -> None:
    settings = make_settings(node_id="node-a")
    async with run_node(settings) as service:
        await write(service, 1)
        service.node.clock.observe(Hlc(time.time_ns() // 1_000_000 + HOUR_MS, 3, "node-a"))
        chained = Hlc.parse((await service.submitter.submit(created("beta", 2), key=None)).hlc)
    shutil.rmtree(wal_folder(settings))
    async with run_node(settings, accept_lost_wal=True) as service:
        later = await service.submitter.submit(created("acme", 3), key=None)
        assert Hlc.parse(later.hlc) > chained
    assert numbers(await chains.sound("acme")) == [1, 3]


async def test_the_backlog_that_a_stop_left_is_chained_by_the_next_start_with_its_own_hlcs(
    run_node: RunNode, make_settings: MakeSettings, proxy: PostgresProxy, chains: Chains
) -> None:
    settings = make_settings(shutdown_grace="500ms")
    async with run_node(settings, url=proxy.url) as service:
        job = await service.submitter.submit(created("acme", 0), key=None)
        await proxy.refuse()
        drafts = [created("acme", n, durability=LOCAL) for n in range(1, 50)]
        receipts = [await service.submitter.submit(draft, key=None) for draft in drafts]
        receipts.append(await service.submitter.submit(progressed("acme", job.job_id, 1), key=None))
    async with run_node(settings) as service:
        await until(lambda: service.node.chained.lsn >= receipts[-1].lsn, "the backlog drains")
        entries = await chains.sound("acme")
        assert [entry["t_hlc"] for entry in entries[1:]] == [receipt.hlc for receipt in receipts]
        late = await service.submitter.submit(created("acme", 50), key=None)
        assert late.chain is not None
        assert late.epoch == 2
        assert GLOBAL is late.achieved


async def test_records_that_are_in_the_chain_already_are_found_there_not_chained_again(
    run_node: RunNode,
    make_settings: MakeSettings,
    proxy: PostgresProxy,
    chains: Chains,
    superuser: asyncpg.Connection,
) -> None:
    async with run_node() as service:
        await until(chains.key_recorded, "the node has recorded its key")
        await service.submitter.submit_lines([created("acme", n) for n in range(40)], durability=GLOBAL, key=None)
        keyed = await service.submitter.submit(created("acme", 40), key=key("k"))
    before = await chains.sound("acme")
    # As an import of this node's own records would leave it: the rows are there, the position is behind them.
    await superuser.execute("UPDATE scheduler.wal_positions SET chained_lsn = chained_lsn - 30")
    changed_control(make_settings(), chained_lsn=0, signed_lsn=0)
    await superuser.execute("DELETE FROM scheduler.idempotency")
    proxy.cut_before("FROM scheduler.scheduler_log WHERE tenant_id = $1 AND t_hlc = ANY")
    async with run_node(url=proxy.url) as service:
        again = asyncio.create_task(service.submitter.submit(created("acme", 40), key=key("k")))
        await until(lambda: service.node.chained.lsn >= keyed.lsn, "the position is where it was")
        assert await again == keyed._replace(replayed=True, epoch=keyed.epoch)
        assert proxy.sprung == 1
        assert await chains.entries("acme") == before
        await write(service, 41)
        assert service.node.failure is None
    assert numbers(await chains.sound("acme")) == list(range(42))
