"""Starting: refused whenever WAL, database and folder do not fit together, and always in a higher epoch."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import shutil
import time
from zlib import crc32

import asyncpg
import pytest
from structlog.testing import capture_logs

from app.node.service import Service
from app.runtime.settings.config import Settings
from app.store import node as node_store
from app.store.chaining import WalPosition
from app.write.pending.requests import EventLines
from ledger.errors import LedgerError, StartRefusedError, WalLockedError
from ledger.hlc import Hlc
from ledger.positions import Epoch, Lsn
from tests.app.chains import Chains, numbers, until
from tests.app.conftest import MakeSettings, RunNode
from tests.app.drafts import GLOBAL, LOCAL, created, key, progressed
from tests.app.postgres_proxy import PostgresProxy
from tests.app.starting import assert_no_start, assert_refused, changed_control, wal_folder, write
from tests.conftest import Database
from tests.running_copy import copy_running
from wal import control as wal_control

# --- who ------------------------------------------------------------------------------------------


async def test_a_second_process_on_the_same_folder_is_refused_and_the_first_goes_on(
    service: Service, run_node: RunNode, chains: Chains
) -> None:
    await assert_no_start(run_node(), WalLockedError, match="in use by process")
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
        await assert_no_start(run_node(), StartRefusedError, match="set")
    async with run_node(make_settings(node_id=node_id)) as service:
        await write(service, 2)
        assert service.node.epoch == 2
    async with run_node() as service:
        assert service.node.node_id == node_id
    assert numbers(await chains.sound("acme")) == [1, 2]


async def test_an_altered_identity_is_refused_with_its_file_and_what_to_do(
    run_node: RunNode, make_settings: MakeSettings
) -> None:
    async with run_node():
        pass
    kept = make_settings().wal_dir / "node.json"
    written = kept.read_bytes()
    node_id = json.loads(written)["node_id"]
    for altered in (
        {"node_id": "Node-1"},
        {"node_id": "../elsewhere"},
        {"node_id": "node-1\n"},
        {"node_id": ""},
        {"gate": "gate-7"},
        {"gate": None},
        {"region": "use1"},
        {"node_id": "node-another"},
    ):
        kept.write_text(json.dumps(json.loads(written) | altered))
        await assert_refused(run_node, make_settings(), StartRefusedError, r"node\.json.*set ")
        assert sorted(path.name for path in kept.parent.iterdir()) == sorted(["node.json", node_id]), altered
    kept.write_bytes(written)
    async with run_node() as service:
        assert service.node.epoch == 2


async def test_two_nodes_never_make_job_ids_with_one_gate(
    service: Service, run_node: RunNode, make_settings: MakeSettings
) -> None:
    gate = service.node.gate
    taken = make_settings("other", gate=gate)
    await assert_no_start(run_node(taken), StartRefusedError, match=f"gate {gate}")
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


async def test_a_folder_in_which_everybody_may_swap_the_keys_is_reported_at_each_start(
    run_node: RunNode, make_settings: MakeSettings
) -> None:
    settings = make_settings()
    async with run_node(settings):
        settings.data_dir.chmod(0o777)
    with capture_logs() as lines:
        async with run_node(settings):
            pass
    reported = [line for line in lines if line["event"] == "folder_writable_by_others"]
    assert [(line["folder"], line["do"].rpartition(": ")[2]) for line in reported] == [
        (str(settings.data_dir), f"chmod o-w {settings.data_dir}")
    ]


# --- the database ---------------------------------------------------------------------------------


async def test_a_database_without_the_schema_is_refused(
    run_node: RunNode, make_settings: MakeSettings, empty_database: Database
) -> None:
    await assert_no_start(run_node(make_settings(), url=empty_database.service_url), StartRefusedError, match="migrate")


async def test_a_login_that_postgres_does_not_know_is_refused_at_once(
    run_node: RunNode, make_settings: MakeSettings, database: Database
) -> None:
    await assert_no_start(
        run_node(make_settings(), url=re.sub(":[^:@/]+@", ":wrong@", database.service_url)),
        StartRefusedError,
        match="Postgres refuses",
    )


IN_THIS = "DO $$ BEGIN EXECUTE format('{}', current_database()); END $$"
HINDRANCES = {
    "read-only transaction.*default_transaction_read_only": (
        "ALTER DATABASE %I SET default_transaction_read_only = on",
        "ALTER DATABASE %I RESET default_transaction_read_only",
    ),
    "permission denied for table wal_positions.*grant that role again": (
        "REVOKE INSERT ON scheduler.wal_positions FROM tallystick_service",
        "GRANT INSERT ON scheduler.wal_positions TO tallystick_service",
    ),
    "Postgres refuses: permission denied for database": (
        "REVOKE CONNECT ON DATABASE %I FROM PUBLIC",
        "GRANT CONNECT ON DATABASE %I TO PUBLIC",
    ),
    '(?s)check constraint "closed".*mend what it says': (
        "ALTER TABLE scheduler.wal_positions ADD CONSTRAINT closed CHECK (false) NOT VALID",
        "ALTER TABLE scheduler.wal_positions DROP CONSTRAINT closed",
    ),
}
"""By what a start says of it: what keeps it from writing, and what ends that."""


async def test_a_start_that_cannot_write_says_what_postgres_said_and_what_helps(
    run_node: RunNode, superuser: asyncpg.Connection
) -> None:
    for said, (hinder, mend) in HINDRANCES.items():
        await superuser.execute(IN_THIS.format(hinder))
        await assert_no_start(run_node(), StartRefusedError, match=said)
        await superuser.execute(IN_THIS.format(mend))
    async with run_node() as service:
        await write(service, 1)


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
    await assert_no_start(
        run_node(make_settings(log={"origin": "example.org/other"})), StartRefusedError, match=r"example\.org/ledger"
    )
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
    # An epoch that wrote nothing is not in the history; the present one always is.
    assert known.history == ((1, 1), (2, ends[1] + 1), (4, ends[2] + 1))
    assert known.durable_lsn == known.committed_lsn


async def test_a_control_file_of_version_1_is_taken_over_and_its_history_told_by_the_segments(
    run_node: RunNode, make_settings: MakeSettings, chains: Chains
) -> None:
    firsts = []
    for epoch in (1, 2, 3):
        async with run_node() as service:
            firsts.append((epoch, service.writer.next_lsn))
            await write(service, epoch)
            await until(chains.key_recorded, "the node has recorded its key")
        path = wal_folder(make_settings()) / "control"
        data = path.read_bytes()
        version_1 = data[:9] + b"\1" + data[10:136]
        path.write_bytes(version_1 + crc32(version_1).to_bytes(4, "big"))
    async with run_node() as service:
        await write(service, 4)
        firsts.append((4, service.writer.next_lsn - 1))
    known = wal_control.load(wal_folder(make_settings()))
    assert known is not None
    assert known.history == tuple(firsts)
    assert numbers(await chains.sound("acme")) == [1, 2, 3, 4]


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
    wal_control.store(folder, wal_control.Control(secrets.token_hex(16), "node-a", 1, Hlc(5, 0, "node-a")))
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
            ends={Epoch(judged.epoch): Lsn(1)},
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
        copy_running(make_settings("one").data_dir, make_settings("two").data_dir)
        async with run_node(make_settings("two")) as second:
            assert (second.node.node_id, second.node.epoch) == (first.node.node_id, 2)
            await write(second, 2)
            with pytest.raises(LedgerError, match="epoch 2 has taken over"):
                await write(first, 3)
            await write(second, 4)
    assert numbers(await chains.sound("acme")) == [1, 2, 4]


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
        await service.submitter.submit_lines(
            EventLines.of([created("acme", n) for n in range(40)]), durability=GLOBAL, key=None
        )
        keyed = await service.submitter.submit(created("acme", 40), key=key("k"))
    before = await chains.sound("acme")
    # As an import of this node's own records would leave it: the rows are there, the position is behind them.
    chained_lsn = await superuser.fetchval(
        "UPDATE scheduler.wal_positions SET chained_lsn = chained_lsn - 30 RETURNING chained_lsn"
    )
    changed_control(make_settings(), chained_lsn=chained_lsn, signed_lsn=0)
    await superuser.execute("DELETE FROM scheduler.idempotency")
    proxy.cut_before("AS hlc(physical, logical, node)")
    async with run_node(url=proxy.url) as service:
        again = asyncio.create_task(service.submitter.submit(created("acme", 40), key=key("k")))
        await until(lambda: service.node.chained.lsn >= keyed.lsn, "the position is where it was")
        assert await again == keyed._replace(replayed=True, epoch=keyed.epoch)
        assert proxy.sprung == 1
        assert await chains.entries("acme") == before
        await write(service, 41)
        assert service.node.failure is None
    assert numbers(await chains.sound("acme")) == list(range(42))
