"""A node whose entries left: its write-ahead log still has them, and does not bring them back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from app.dev.embedded import EmbeddedPostgres
from app.node.start.restore import restore_from_wal
from ledger.positions import Lsn
from tests.app.conftest import MakeSettings
from tests.app.exchanging import Ledger
from tests.app.starting import changed_control
from tests.app.test_exchange_pruned import archiving, head_seq, is_valid, prune, run_jobs
from tests.conftest import fresh_database


@pytest.fixture
def ledger(postgres: EmbeddedPostgres, tmp_path: Path, make_settings: MakeSettings) -> Iterator[Ledger]:
    with fresh_database(postgres) as database:
        alone = Ledger("use1", database, make_settings)
        alone.make_key(tmp_path)
        yield alone


async def test_records_whose_entries_left_are_not_chained_again(
    ledger: Ledger, tmp_path: Path, make_settings: MakeSettings
) -> None:
    archive = archiving(tmp_path / "archive")
    async with ledger.running(**archive) as client:
        await run_jobs(client, 1, 2)
        await prune(client, ledger, 6)
        head = await head_seq(client)
    settings = make_settings(ledger.region, region=ledger.region, port=ledger.port)
    # A node that was killed and started much later: its control file lags behind PostgreSQL.
    changed_control(settings, chained_lsn=Lsn(0))
    async with ledger.running(**archive) as client:
        assert await head_seq(client) == head
        assert await is_valid(client)
    # A restore looks at every record, whatever the positions say.
    assert await restore_from_wal(settings, ledger.database.service_url) == ([], [])
    async with ledger.running(**archive) as client:
        await run_jobs(client, 3)
        assert await head_seq(client) == head + 3
        assert await is_valid(client)
