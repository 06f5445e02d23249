"""One tenant's rows are damaged: its acknowledged events wait in the WAL, every other tenant goes on.

Each case damages tenant ``acme`` as the superuser can while a node runs, writes on, mends the rows, and starts the
node again: everything that was acknowledged is then chained exactly once.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import asyncpg
import pytest
from asyncpg.transaction import Transaction

from app.node.service import Service
from app.node.start.procedure import start_node
from app.write.pending import quarantine
from app.write.pending.backlog import Pending
from app.write.pending.requests import EventLines, Receipt
from ledger.errors import ChainDamagedError, HeldBackError, StartRefusedError
from ledger.hlc import Hlc
from tests.app.chain_builder import edit
from tests.app.chains import Chains, followed, numbers, until
from tests.app.conftest import MakeSettings, RunNode
from tests.app.drafts import GLOBAL, LOCAL, created, key
from tests.app.starting import wal_folder
from tests.conftest import Database
from wal.control import CONTROL_NAME
from wal.segment import list_segments

Connection = asyncpg.Connection

PHANTOM = """
INSERT INTO scheduler.scheduler_log (tenant_id, seq, t_hlc, hlc_physical, hlc_logical, hlc_node, job_id, action,
       link_version, prev_chain_link, chain_link, payload_digest, payload)
SELECT 'acme', head_seq + 1, '1:0:x', 1, 0, 'x', 'inserted', 'ENQUEUE', 2, 'p', 'l', 'd', '{}'
  FROM scheduler.chain_heads WHERE tenant_id = 'acme'
"""
KEEP_HEAD = "CREATE TABLE kept_head AS SELECT * FROM scheduler.chain_heads WHERE tenant_id = 'acme'"
MEND_HEAD = (
    "DELETE FROM scheduler.chain_heads WHERE tenant_id = 'acme';"
    "INSERT INTO scheduler.chain_heads SELECT * FROM kept_head"
)
DROP_CHECKS = (
    "ALTER TABLE scheduler.chain_heads DROP CONSTRAINT IF EXISTS chain_heads_link,"
    " DROP CONSTRAINT IF EXISTS chain_heads_hlc, DROP CONSTRAINT IF EXISTS chain_heads_seq"
)
MAKE_CHECKS = (
    "ALTER TABLE scheduler.chain_heads ADD CONSTRAINT chain_heads_seq CHECK (head_seq >= 0),"
    " ADD CONSTRAINT chain_heads_link CHECK ((head_seq = 0) = (head_chain_link IS NULL)),"
    " ADD CONSTRAINT chain_heads_hlc CHECK ((head_seq = 0) = (head_hlc IS NULL))"
)


def head(change: str) -> tuple[str, str]:
    """Damage to the head, and what mends it, but for the checks of the table."""
    done = f"{KEEP_HEAD};{DROP_CHECKS};UPDATE scheduler.chain_heads SET {change} WHERE tenant_id = 'acme'"
    return done, MEND_HEAD


def of_tenant(tenant: str, statements: str) -> str:
    """Of another tenant than acme."""
    return statements.replace("'acme'", f"'{tenant}'").replace("kept_head", f'"kept_head_{tenant}"')


class Case(NamedTuple):
    """A damage, what mends it, and what is said of it."""

    name: str
    damage: str
    mend: str
    said: str


CASES = [
    Case(
        "a row beyond the head",
        PHANTOM,
        "DELETE FROM scheduler.scheduler_log WHERE payload_digest = 'd'",
        "duplicate key value",
    ),
    Case("a head moved back", *head("head_seq = head_seq - 1"), "this node has seen seq"),
    Case("a head emptied", *head("head_seq = 0, head_chain_link = NULL, head_hlc = NULL"), "this node has seen seq"),
    Case("a head with another link", *head("head_chain_link = repeat('0', 64)"), "this node has seen seq"),
    Case("a head moved on", *head("head_seq = head_seq + 1000"), "where the log has no entry"),
    Case(
        "a head as far as a bigint goes", *head("head_seq = 9223372036854775807"), "stands at seq 9223372036854775807"
    ),
    Case("a head with no link at all", *head("head_chain_link = NULL"), "link None"),
    Case("a head whose link is no hex", *head("head_chain_link = 'zz'"), "link 'zz'"),
    Case(
        "a head without seq",
        "ALTER TABLE scheduler.chain_heads ALTER head_seq DROP NOT NULL;" + head("head_seq = NULL")[0],
        f"{MEND_HEAD};ALTER TABLE scheduler.chain_heads ALTER head_seq SET NOT NULL",
        "seq None",
    ),
    Case(
        "a head removed", f"{KEEP_HEAD};DELETE FROM scheduler.chain_heads WHERE tenant_id = 'acme'", MEND_HEAD, "gone"
    ),
    Case(
        "a constraint that refuses every row of the tenant",
        "ALTER TABLE scheduler.scheduler_log ADD CONSTRAINT no_acme CHECK (tenant_id <> 'acme') NOT VALID",
        "ALTER TABLE scheduler.scheduler_log DROP CONSTRAINT no_acme",
        "no_acme",
    ),
]


async def local(service: Service, tenant_id: str, n: int) -> Receipt:
    """An event acknowledged once it is durable here."""
    return await service.submitter.submit(created(tenant_id, n, durability=LOCAL), key=None)


async def chained(service: Service, tenant_id: str, n: int) -> Receipt:
    """An event acknowledged once it is chained."""
    receipt = await service.submitter.submit(created(tenant_id, n), key=None)
    assert receipt.chain is not None
    return receipt


async def meet(service: Service, said: str) -> HeldBackError:
    """Write to ``acme`` until the damage is met: the event is held back and its caller is told."""
    with pytest.raises(
        HeldBackError, match=rf"{said}.*restore the rows from a backup, then restart the node$"
    ) as caught:
        await service.submitter.submit(created("acme", 100), key=None)
    return caught.value


@pytest.fixture
async def damaged(
    run_node: RunNode, make_settings: MakeSettings, superuser: Connection
) -> AsyncIterator[tuple[Service, HeldBackError]]:
    """A node that has met a row beyond the head of ``acme``, where numbers 1 and 2 are chained and 100 is not."""
    async with run_node(make_settings()) as service:
        await service.key_changes.recorded.wait()
        await chained(service, "acme", 1)
        await chained(service, "acme", 2)
        await superuser.execute(PHANTOM)
        yield service, await meet(service, "duplicate key")


async def test_tenants_are_quarantined_and_what_was_acknowledged_is_chained_once_after_the_repair(
    run_node: RunNode, make_settings: MakeSettings, chains: Chains, superuser: Connection
) -> None:
    settings = make_settings()
    cases = [(f"tenant-{at:02}", case) for at, case in enumerate(CASES)]
    async with run_node(settings) as service:
        await until(chains.key_recorded, "the node has recorded its key")
        for tenant, case in cases:
            beside = f"{tenant}-beside"
            await chained(service, tenant, 1)
            await chained(service, tenant, 2)
            await edit(superuser, of_tenant(tenant, case.damage))
            # 1. Acknowledged before the node can know, in one batch with another tenant.
            drafts = [created(tenant, 3, durability=LOCAL), created(beside, 4, durability=LOCAL)]
            await service.submitter.submit_lines(EventLines.of(drafts), durability=LOCAL, key=None)
            await until(lambda tenant=tenant: tenant in service.node.damaged, f"{case.name} is met")
            assert case.said in service.node.damaged[tenant], case.name
            # 2. Refused from now on, while others go on.
            with pytest.raises(ChainDamagedError, match=f"tally verify --tenant {tenant}"):
                await chained(service, tenant, 5)
            await chained(service, beside, 6)
            await chained(service, f"{tenant}-new", 7)
            assert service.node.failure is None, case.name
        folder = service._started.wal.folder
    assert set(quarantine.load(folder)) == {tenant for tenant, _ in cases}
    # 3. Mended and started again.
    for tenant, case in cases:
        await edit(superuser, of_tenant(tenant, case.mend))
    await edit(superuser, MAKE_CHECKS)
    async with run_node(settings) as service:
        await until(lambda: not quarantine.load(folder), "what was held back is chained")
        for tenant, _ in cases:
            await chained(service, tenant, 8)
        assert service.node.damaged == {}
    for tenant, case in cases:
        assert numbers(await chains.sound(tenant)) == [1, 2, 3, 8], case.name
        assert numbers(await chains.sound(f"{tenant}-beside")) == [4, 6], case.name
        assert numbers(await chains.sound(f"{tenant}-new")) == [7], case.name


async def test_the_caller_of_a_held_event_learns_where_it_is_kept(damaged: tuple[Service, HeldBackError]) -> None:
    service, error = damaged
    assert error.tenant_id == "acme"
    assert error.lsn <= service.node.chained.lsn, "the chain goes on behind it, and other records may follow at once"
    assert error.epoch == service.node.epoch
    assert f"kept at LSN {error.lsn}" in str(error)
    assert quarantine.load(service._started.wal.folder)["acme"].lsns == {error.lsn}


async def test_a_chain_that_is_not_mended_stays_quarantined_and_nothing_is_lost(
    damaged: tuple[Service, HeldBackError],
    run_node: RunNode,
    make_settings: MakeSettings,
    chains: Chains,
    superuser: Connection,
    database: Database,
) -> None:
    service, error = damaged
    await service.stop()
    async with run_node(make_settings()) as again:
        await until(lambda: "acme" in again.node.damaged, "the damage is met again")
        await chained(again, "beta", 1)
        assert quarantine.load(again._started.wal.folder)["acme"].lsns == {error.lsn}
    await edit(superuser, "DELETE FROM scheduler.scheduler_log WHERE payload_digest = 'd'")
    # A start that dies between chaining what was held and saying so finds it in the chain.
    listed = quarantine.load(service._started.wal.folder)
    async with run_node(make_settings()) as mended:
        await until(lambda: not quarantine.load(mended._started.wal.folder), "what was held back is chained")
    quarantine.store(service._started.wal.folder, listed)
    async with run_node(make_settings()) as mended:
        await until(lambda: not quarantine.load(mended._started.wal.folder), "it is found there")
        await chained(mended, "acme", 3)
    assert numbers(await chains.sound("acme")) == [1, 2, 100, 3]


async def test_a_head_without_its_entry_is_not_extended_by_a_start(
    run_node: RunNode, make_settings: MakeSettings, chains: Chains, superuser: Connection
) -> None:
    async with run_node(make_settings()) as service:
        await chained(service, "acme", 1)
    await superuser.execute(KEEP_HEAD)
    await edit(superuser, "UPDATE scheduler.chain_heads SET head_seq = head_seq + 1 WHERE tenant_id = 'acme'")
    async with run_node(make_settings()) as service:
        assert "where the log has no entry" in service.node.damaged["acme"]
        with pytest.raises(ChainDamagedError):
            await chained(service, "acme", 2)
    await edit(superuser, MEND_HEAD)
    async with run_node(make_settings()) as service:
        await chained(service, "acme", 3)
    assert numbers(await chains.sound("acme")) == [1, 3]


async def test_a_head_cut_below_what_the_node_saw_is_not_extended_by_the_next_start(
    run_node: RunNode, make_settings: MakeSettings, chains: Chains, superuser: Connection
) -> None:
    settings = make_settings(chain={"checkpoint_interval": "1h"})
    async with run_node(settings) as service:
        await chained(service, "acme", 1)
        await chained(service, "acme", 2)
        await until(lambda: followed(superuser), "the job table is at the chain's end")
        await superuser.execute(KEEP_HEAD)
        await edit(
            superuser,
            "DELETE FROM scheduler.scheduler_log WHERE tenant_id = 'acme' AND seq = 2;"
            "UPDATE scheduler.chain_heads h SET head_seq = 1, head_chain_link = l.chain_link, head_hlc = l.t_hlc"
            "  FROM scheduler.scheduler_log l WHERE h.tenant_id = 'acme' AND l.tenant_id = 'acme' AND l.seq = 1",
        )
        await meet(service, "this node has seen seq 2")
    async with run_node(settings) as service:
        assert "this node has seen seq 2" in service.node.damaged["acme"]
        with pytest.raises(ChainDamagedError):
            await chained(service, "acme", 3)
        await chained(service, "beta", 4)
        folder = service._started.wal.folder
    assert numbers(await chains.entries("acme")) == [1]
    # Nor by one that gives its WAL up, and with it the list of who was quarantined.
    (folder / CONTROL_NAME).write_bytes(b"")
    for accepts in (True, False):
        async with run_node(settings, accept_lost_wal=accepts) as service:
            assert "this node has seen seq 2" in service.node.damaged["acme"]
            await chained(service, "beta", 5 + accepts)


async def test_requests_with_a_key_and_in_lines_say_that_they_are_held_back(
    damaged: tuple[Service, HeldBackError], run_node: RunNode, make_settings: MakeSettings, superuser: Connection
) -> None:
    service, _ = damaged
    await service.stop()
    async with run_node(make_settings()) as again:
        # The tenant is tried again at start, so the first of these may be taken, and is held back then.
        outcomes = await asyncio.gather(
            again.submitter.submit(created("acme", 3), key=key("one")),
            again.submitter.submit_lines(
                EventLines.of([created("acme", 4), created("beta", 5)]), durability=GLOBAL, key=None
            ),
            again.submitter.submit_lines(
                EventLines.of([created("acme", 6), created("beta", 7)]), durability=GLOBAL, key=key("two")
            ),
            return_exceptions=True,
        )
        assert all(isinstance(outcome, ChainDamagedError) for outcome in outcomes), outcomes
        with pytest.raises(ChainDamagedError):
            await again.submitter.submit(created("acme", 3), key=key("one"))
        await chained(again, "beta", 8)


async def test_a_damaged_system_chain_keeps_new_tenants_out_and_no_other(
    run_node: RunNode, make_settings: MakeSettings, chains: Chains, superuser: Connection
) -> None:
    settings = make_settings()
    async with run_node(settings) as service:
        await chained(service, "acme", 1)
        await until(chains.key_recorded, "the node has recorded its key")
        await superuser.execute(PHANTOM.replace("'acme'", "'_system'"))
        await local(service, "beta", 2)
        await until(lambda: "_system" in service.node.damaged, "the damage is met")
        await chained(service, "acme", 3)
        await chained(service, "beta", 4)
        with pytest.raises(ChainDamagedError, match="tenant _system is damaged"):
            await chained(service, "gamma", 5)
        assert service.node.failure is None
    await edit(superuser, "DELETE FROM scheduler.scheduler_log WHERE payload_digest = 'd'")
    async with run_node(settings) as service:
        await chained(service, "gamma", 5)
    begun = [entry["job_id"] for entry in await chains.sound("_system") if entry["action"] == "TENANT_CREATED"]
    assert sorted(begun) == ["tenant:acme", "tenant:beta", "tenant:gamma"]


async def test_the_wal_keeps_what_is_held_back_whatever_its_age(
    run_node: RunNode, make_settings: MakeSettings, superuser: Connection
) -> None:
    wal = {"segment_bytes": "64 KiB", "batch_max_bytes": "4 KiB", "record_bytes_max": "64 KiB", "retain": "1s"}
    async with run_node(make_settings(wal=wal)) as service:
        await chained(service, "acme", 1)
        await superuser.execute(PHANTOM)
        error = await meet(service, "duplicate key")
        drafts = [created("beta", n) for n in range(600)]
        await service.submitter.submit_lines(EventLines.of(drafts), durability=GLOBAL, key=None)
        await service.notary.sign_now("beta")
        await service.notary.sign_now("_system")
        segments = list_segments(service._started.wal.folder)
        assert len(segments) > 1
        assert service.upkeep.settled_lsn() < error.lsn


async def test_a_wal_without_what_is_held_back_is_refused_until_the_loss_is_accepted_and_recorded(
    damaged: tuple[Service, HeldBackError],
    run_node: RunNode,
    make_settings: MakeSettings,
    database: Database,
    chains: Chains,
    superuser: Connection,
) -> None:
    service, error = damaged
    await service.stop()
    settings, folder = make_settings(), service._started.wal.folder
    async with run_node(settings) as again:
        await until(lambda: "acme" in again.node.damaged, "the damage is met again")
        await chained(again, "beta", 1)
    list_segments(folder)[0].path.unlink()
    with pytest.raises(StartRefusedError, match=f"lists LSN {error.lsn}, which is not chained yet"):
        await start_node(settings, database.service_url, accept_lost_wal=False)
    await edit(superuser, "DELETE FROM scheduler.scheduler_log WHERE payload_digest = 'd'")
    async with run_node(settings, accept_lost_wal=True) as again:
        assert (error.lsn, error.lsn) in again._started.wal.lost
        await chained(again, "acme", 3)
    assert numbers(await chains.sound("acme")) == [1, 2, 3]


def test_the_list_of_held_records_is_read_as_it_was_written_and_as_earlier_versions_wrote_it(tmp_path: Path) -> None:
    listed = {
        "acme": quarantine.TenantDamage("cut", (41, "ab"), {23, 17, 18}),
        "beta": quarantine.TenantDamage("locked", None, set(), 20),
    }
    quarantine.store(tmp_path, listed)
    assert quarantine.load(tmp_path) == listed
    written = json.loads((tmp_path / quarantine.NAME).read_text())
    assert written["tenants"]["acme"]["lsns"] == [17, 18, 23]
    del written["tenants"]["beta"]
    del written["tenants"]["acme"]["from_lsn"]
    (tmp_path / quarantine.NAME).write_text(json.dumps({**written, "version": 1}))
    assert quarantine.load(tmp_path) == {"acme": listed["acme"]}
    quarantine.store(tmp_path, {})
    assert quarantine.load(tmp_path) == {}


async def test_a_tenant_found_damaged_as_its_records_are_chained_is_listed_before_they_are_passed_over(
    run_node: RunNode, make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make_settings()
    async with run_node(settings) as service:
        await chained(service, "acme", 1)
        appender, folder, commit = service.appender, wal_folder(settings), Transaction.commit
        connected, listed = appender._connected, list[set[int]]()

        async def found_meanwhile() -> Connection:
            appender.found_damaged(ChainDamagedError("acme", "an import met a row that is not as it was"))
            return await connected()

        async def noted(transaction: Transaction) -> None:
            known = quarantine.load(folder)
            listed.append(known["acme"].lsns if "acme" in known else set())
            await commit(transaction)

        monkeypatch.setattr(appender, "_connected", found_meanwhile)
        monkeypatch.setattr(Transaction, "commit", noted)
        # A tenant that begins: so they are not chained in one statement.
        lines = EventLines.of([created("acme", 2), created("beta", 1)])
        receipt = await service.submitter.submit_lines(lines, durability=LOCAL, key=None)
        await until(lambda: service.node.chained.lsn >= receipt.last_lsn, "they are passed over, or chained")
        assert len(listed[0]) == 1


async def test_a_tenant_found_damaged_while_the_list_is_being_written_is_listed_before_it_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = quarantine.Quarantine(tmp_path, {}, {})
    acme, beta = (
        Pending(lsn, 1, Hlc(lsn, 0, "n"), 1, name, "j", b"", None, None) for lsn, name in ((1, "acme"), (2, "beta"))
    )
    loop, fsync = asyncio.get_running_loop(), os.fsync

    async def find_beta() -> None:
        if "beta" not in held:
            held.begin("beta", "an import met it", None, (acme, beta))

    def fsync_meanwhile(descriptor: int) -> None:
        asyncio.run_coroutine_threadsafe(find_beta(), loop).result()
        fsync(descriptor)

    monkeypatch.setattr("os.fsync", fsync_meanwhile)
    held.begin("acme", "cut", None, (acme, beta))
    await held.hold((acme,))
    await held.hold((beta,))
    listed = quarantine.load(tmp_path)
    assert {name: each.lsns for name, each in listed.items()} == {"acme": {1}, "beta": {2}}


async def test_records_that_come_before_and_after_the_damage_is_found_are_listed_until_they_are_chained(
    tmp_path: Path,
) -> None:
    held = quarantine.Quarantine(tmp_path, {}, {})
    before, other, after = (
        Pending(lsn, 1, Hlc(lsn, 0, "n"), 1, name, "j", b"", None, None)
        for lsn, name in ((1, "acme"), (2, "beta"), (3, "acme"))
    )
    held.begin("acme", "cut", None, (before, other))
    await held.hold((other,))
    assert quarantine.load(tmp_path)["acme"].lsns == {1}, "it stood in the backlog"
    await held.hold((other, after))
    assert quarantine.load(tmp_path)["acme"].lsns == {1, 3}, "it was acknowledged since"
    await held.release((before, after))
    assert quarantine.load(tmp_path)["acme"].lsns == {1, 3}, "a quarantined tenant is not chained"


@pytest.mark.parametrize(
    "change", [{"lsns": [0]}, {"lsns": [True]}, {"lsns": ["1"]}, {"from_lsn": 0}, {"seen": [1]}, {"reason": None}]
)
def test_a_list_of_held_records_of_no_form_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    tenant = {"reason": "cut", "seen": None, "lsns": [1], **change}
    (tmp_path / quarantine.NAME).write_text(json.dumps({"version": 2, "tenants": {"acme": tenant}}))
    with pytest.raises(StartRefusedError, match="cannot be read"):
        quarantine.load(tmp_path)


def test_a_list_of_held_records_of_a_later_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / quarantine.NAME).write_text('{"version": 3, "tenants": {}}')
    with pytest.raises(StartRefusedError, match="cannot be read"):
        quarantine.load(tmp_path)
