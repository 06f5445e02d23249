"""The database is lost: what was archived comes back into a new one, the same rows with the same links."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.dev.embedded import EmbeddedPostgres
from app.node.start.restore import restore_from_wal
from app.runtime.settings.config import Settings
from ledger.exit_code import ExitCode
from objects.store import ArchiveStore
from pipeline.archiving import Archived
from pipeline.archiving.filing import Ledger
from signing import private_keys
from signing.keys import Keyring
from tests.app.chains import Chains, until
from tests.app.conftest import MakeSettings, RunNode
from tests.app.drafts import GLOBAL, created, key
from tests.conftest import Database, connected_to, fresh_database
from tests.pipeline.archived_ledgers import archive_by, file_here
from tests.tally import run_tally

ROWS = (
    "SELECT tenant_id, seq, t_hlc, job_id, action, link_version, prev_chain_link, chain_link, payload::text,"
    " origin::text FROM scheduler.scheduler_log ORDER BY tenant_id, seq"
)
UNSIGNED = (
    "SELECT count(*) FROM scheduler.chain_heads h WHERE head_seq > coalesce("
    "(SELECT max(to_seq) FROM scheduler.batch_snapshot s WHERE s.tenant_id = h.tenant_id), 0)"
)


@pytest.fixture
def new_database(postgres: EmbeddedPostgres) -> Iterator[Database]:
    """Another migrated database, on which no node ever started."""
    with fresh_database(postgres) as database:
        yield database


@pytest.fixture
def settings(make_settings: MakeSettings) -> Settings:
    return make_settings(chain={"batch_size": 4, "batch_interval": "100ms"})


async def rows(database: Database, statement: str = ROWS) -> list[tuple[object, ...]]:
    async with connected_to(database.superuser_url) as connection:
        return [tuple(row) for row in await connection.fetch(statement)]


async def write(run_node: RunNode, settings: Settings, database: Database, *ns: int) -> None:
    """Chain a job a number in two tenants, and wait until all is signed."""
    async with run_node(settings, url=database.service_url) as service:
        await service.key_changes.recorded.wait()
        for n in ns:
            for tenant_id in ("acme", "globex"):
                draft = created(tenant_id, n)._replace(durability=GLOBAL)
                await service.submitter.submit(draft, key=key(f"{tenant_id}-{n}"))

        async def all_is_signed() -> bool:
            return await rows(database, UNSIGNED) == [(0,)]

        await until(all_is_signed, "all is signed", 60)


def archive(database: Database, settings: Settings, folder: Path) -> list[Archived]:
    signer, url = private_keys.load(str(settings.data_dir / "keys" / "signing.pem")), str(folder)
    with Ledger.connected(database.service_url) as ledger:
        ring = Keyring([signer.public_key])
        return archive_by(ledger, ArchiveStore(url), signer, ring, file_here(database.service_url, url))


def restore(settings: Settings, database: Database, *arguments: str) -> subprocess.CompletedProcess[str]:
    where = {"TALLY_DATA_DIR": str(settings.data_dir), "TALLY_DATABASE_URL": database.service_url}
    return run_tally("restore", "--from", "archive", *arguments, **where)


async def test_an_archive_brings_a_lost_database_back_and_the_wal_what_came_after(
    run_node: RunNode,
    settings: Settings,
    make_settings: MakeSettings,
    database: Database,
    new_database: Database,
    tmp_path: Path,
) -> None:
    await write(run_node, settings, database, 1, 2, 3)
    archived = {each.tenant_id: each.to_seq for each in archive(database, settings, tmp_path / "archive")}
    assert archived.keys() == {"_system", "acme", "globex"}
    await write(run_node, settings, database, 4, 5)
    lost = await rows(database)

    # One that does not hold, that nobody vouches for, or that nobody named, brings nothing back.
    other = make_settings("other")
    other.wal_dir.mkdir(parents=True)
    unknown = restore(other, new_database, str(tmp_path / "archive"))
    assert unknown.returncode == ExitCode.UNKNOWN_KEY, unknown.stderr
    file = next((tmp_path / "archive" / "entries").rglob("*.parquet"))
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    broken = restore(settings, new_database, str(tmp_path / "archive"))
    assert (broken.returncode, "digest" in broken.stderr) == (ExitCode.TAMPERED, True), broken.stderr
    file.write_bytes(whole)
    without = restore(settings, new_database)
    assert (without.returncode, "archive.url" in without.stderr) == (ExitCode.COULD_NOT_RUN, True)
    assert await rows(new_database) == []

    restored = restore(settings, new_database, str(tmp_path / "archive"), "--json")
    assert restored.returncode == 0, restored.stderr
    back = {each["tenant_id"]: each["to_seq"] for each in json.loads(restored.stdout)["bundles"]}
    assert back == archived
    assert await rows(new_database) == [row for row in lost if row[1] <= archived[str(row[0])]]
    assert not list(settings.data_dir.glob("restore-*"))

    await restore_from_wal(settings, new_database.service_url)
    assert await rows(new_database) == lost
    await write(run_node, settings, new_database, 6)
    async with connected_to(new_database.superuser_url) as connection:
        for tenant_id in archived:
            assert await Chains(connection).sound(tenant_id)
    heads = "SELECT tenant_id, seq, chain_link FROM scheduler.scheduler_log ORDER BY tenant_id, seq"
    assert set(await rows(database, heads)) < set(await rows(new_database, heads))


async def test_an_archive_comes_back_where_nothing_is_left_but_the_key(
    run_node: RunNode, settings: Settings, database: Database, new_database: Database, tmp_path: Path
) -> None:
    await write(run_node, settings, database, 1)
    archive(database, settings, tmp_path / "archive")
    shutil.copytree(settings.data_dir / "keys", tmp_path / "keys")
    shutil.rmtree(settings.data_dir)
    shutil.copytree(tmp_path / "keys", settings.data_dir / "keys")
    restored = restore(settings, new_database, str(tmp_path / "archive"))
    assert restored.returncode == 0, restored.stderr
    assert await rows(new_database) == await rows(database)
