"""A node that comes back with records which an import has brought into the chain meanwhile."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from pathlib import Path

import pytest
import structlog

from app.runtime.settings.config import HlcSettings, Settings
from app.share.bundle.recovery import export_from_wal, survey
from app.write.pending.requests import Receipt
from ledger.hlc import Hlc
from signing.private_keys import load
from tests.app.bundles import bundle_of, rows_of, store
from tests.app.chains import Chains, numbers, until
from tests.app.conftest import MakeSettings, RunNode
from tests.app.drafts import LOCAL, created, key
from tests.app.importing import import_files
from tests.app.postgres_proxy import proxy_to
from tests.conftest import Database
from tests.ledger.ledger_in_memory import SIGNER, Ledger, build

COUNT = 60


@pytest.fixture
def settings(make_settings: MakeSettings) -> Settings:
    return make_settings(shutdown_grace="1s")


@pytest.fixture
async def stranded(run_node: RunNode, settings: Settings, database: Database) -> list[Receipt]:
    """What a node acknowledged after it lost its database, every third event keyed, and took along when it stopped."""
    async with proxy_to(database.service_url) as proxy, run_node(settings, url=proxy.url) as service:
        receipts = [await service.submitter.submit(created("acme", 0), key=None)]
        await until(lambda: service.node.chained.lsn >= service.writer.written_lsn, "all that is written is chained")
        await proxy.refuse()
        for n in range(1, COUNT):
            key_of_n = key(f"k-{n}") if n % 3 == 0 else None
            receipts.append(await service.submitter.submit(created("acme", n, durability=LOCAL), key=key_of_n))
        return receipts


def wal_bundle(settings: Settings, folder: Path) -> tuple[Path, Path]:
    """The bundle of what the node did not get to chain, and the key that signed it."""
    key_path = settings.data_dir / "keys" / "signing.pem"
    signer = load(str(key_path))
    pieces: list[bytes] = []
    export_from_wal(survey(settings.wal_dir), "acme", signer, signer, pieces.append)
    return store(folder, b"".join(pieces), "stranded.tar"), key_path


async def test_what_was_imported_from_its_wal_is_not_chained_again_and_its_keys_count(
    run_node: RunNode,
    settings: Settings,
    stranded: list[Receipt],
    database: Database,
    chains: Chains,
    tmp_path: Path,
) -> None:
    bundle, keys = wal_bundle(settings, tmp_path)
    (done,) = await import_files(database.service_url, keys, [[bundle]])
    assert done.imported == COUNT - 1
    before = await chains.sound("acme")
    async with run_node(settings) as service:
        await until(lambda: service.node.chained.lsn >= stranded[-1].lsn, "the backlog drains")
        assert await chains.entries("acme") == before
        for n in (3, 30, 57):
            again = await service.submitter.submit(created("acme", n), key=key(f"k-{n}"))
            assert (again.replayed, again.hlc) == (True, stranded[n].hlc)
            assert again.chain is not None
            assert again.chain.seq == n + 1
        await service.submitter.submit(created("acme", COUNT), key=None)
        assert service.node.failure is None
    assert numbers(await chains.sound("acme")) == list(range(COUNT + 1))


async def test_its_events_whose_hlcs_others_have_taken_are_kept_beside_those(
    run_node: RunNode,
    settings: Settings,
    stranded: list[Receipt],
    database: Database,
    chains: Chains,
    tmp_path: Path,
) -> None:
    bundle, _ = wal_bundle(settings, tmp_path)
    taken = Ledger("acme", rows_of(bundle.read_bytes())[9:12])
    for seq, row in enumerate(taken.entries, 1):
        row.update(seq=seq, payload=row["payload"].replace('"fence_token":1', '"fence_token":2'))
    taken.relink()
    taken.sign(3)
    keys = store(tmp_path, SIGNER.public_key_pem.encode(), "trusted.pem")
    await import_files(database.service_url, keys, [[store(tmp_path, bundle_of(taken), "taken.tar")]])
    with structlog.testing.capture_logs() as logs:
        async with run_node(settings) as service:
            await until(lambda: service.node.chained.lsn >= stranded[-1].lsn, "the backlog drains")
            again = await service.submitter.submit(created("acme", 12), key=key("k-12"))
            assert again.replayed
            assert service.node.failure is None
    told = [entry["lsn"] for entry in logs if entry["event"] == "hlc_conflict"]
    assert told == [stranded[n].lsn for n in (10, 11, 12)]
    entries = await chains.sound("acme")
    held = [entry for entry in entries if entry["action"] == "CONFLICT"]
    assert [entry["job_id"] for entry in held] == [stranded[n].job_id for n in (10, 11, 12)]
    assert len(entries) == COUNT + 3
    # What it exports from its WAL afterwards is in the chain as well, event for event.
    (done,) = await import_files(database.service_url, settings.data_dir / "keys" / "signing.pem", [[bundle]])
    assert (done.imported, done.duplicates, len(done.conflicts)) == (0, COUNT - 1, 3)


async def test_an_import_by_another_node_meets_the_appender_at_the_heads(
    run_node: RunNode, settings: Settings, database: Database, chains: Chains, tmp_path: Path
) -> None:
    keys = store(tmp_path, SIGNER.public_key_pem.encode(), "trusted.pem")
    bundle = store(tmp_path, bundle_of(build(3_000, snapshots_to=(3_000,))))
    async with run_node(settings) as service:
        await service.submitter.submit(created("acme", 0), key=None)
        importing = asyncio.create_task(import_files(database.service_url, keys, [[bundle]]))
        receipts = []
        while not importing.done():
            drafts = [created("acme", n) for n in range(len(receipts) + 1, len(receipts) + 21)]
            receipts += await asyncio.gather(*(service.submitter.submit(draft, key=None) for draft in drafts))
        (done,) = await importing
        assert service.node.failure is None
    entries = await chains.sound("acme")
    assert done.imported == 3_000
    assert len(entries) == 3_001 + len(receipts)
    by_hlc = {entry["t_hlc"]: entry["seq"] for entry in entries}
    assert all(receipt.chain is not None and by_hlc[receipt.hlc] == receipt.chain.seq for receipt in receipts)


def named(ledger: Ledger, node_id: str) -> Ledger:
    """The ledger as if that node had made it."""
    for row in ledger.entries:
        row.update(hlc_node=node_id, t_hlc=f"{row['hlc_physical']}:{row['hlc_logical']}:{node_id}")
    ledger.relink()
    return ledger


@pytest.mark.parametrize("node_id", ["node-1", None], ids=["of another ledger", "under this node's name"])
async def test_a_head_that_an_import_left_does_not_move_the_clock_nor_does_a_start_on_it(
    run_node: RunNode, settings: Settings, database: Database, tmp_path: Path, node_id: str | None
) -> None:
    keys = store(tmp_path, SIGNER.public_key_pem.encode(), "trusted.pem")
    ahead_ms = 60_000
    begin_ms = time.time_ns() // 1_000_000 + ahead_ms
    lenient = settings.model_copy(update={"hlc": HlcSettings(max_clock_skew=timedelta(hours=1))})
    async with run_node(lenient) as service:
        bundle = store(tmp_path, bundle_of(named(build(3, begin_ms=begin_ms), node_id or service.node.node_id)))
        await service.submitter.submit(created("acme", 0), key=None)
        await import_files(database.service_url, keys, [[bundle]], skew_ms=3_600_000)
        receipt = await service.submitter.submit(created("acme", 1), key=None)
        assert Hlc.parse(receipt.hlc).physical_ms < begin_ms
    await import_files(database.service_url, keys, [[bundle]], skew_ms=3_600_000)
    async with run_node(lenient) as service:
        assert service.node.clock.last.physical_ms < begin_ms
