"""The oldest PostgreSQL that this machine has, Debian's: a service does all its work on it, as on our own."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from app.dev.embedded import EmbeddedPostgres
from app.store.migrate import migrate
from app.store.schema import MIGRATIONS, catalog
from pipeline.places import parse_place
from pipeline.source import open_pieces
from tests.app.bundles import bundle_of
from tests.app.service_thread import serving
from tests.conftest import Database, connected_to
from tests.ledger.ledger_in_memory import SIGNER, build
from tests.server_copies import scratch_folder
from tests.tally import run_tally

DEBIAN = Path("/usr/lib/postgresql")
NDJSON = {"content-type": "application/x-ndjson"}
BUNDLED = 40


def oldest() -> Path:
    """Folder of the programs of the oldest server that Debian's packages have installed."""
    found = sorted(DEBIAN.glob("*/bin/postgres"), key=lambda path: int(path.parts[-3]))
    if not found:
        pytest.fail("install a PostgreSQL beside our own; on Debian: sudo apt-get install postgresql", pytrace=False)
    return found[0].parent


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    """A migrated server of the oldest PostgreSQL."""
    folder = scratch_folder()
    server = EmbeddedPostgres(folder / "postgres", oldest())
    try:
        server.start()
        migrate(server.owner_url())
        yield server
    finally:
        server.remove()
        shutil.rmtree(folder, ignore_errors=True)


def test_a_service_on_the_oldest_postgres_does_all_its_work(server: EmbeddedPostgres, tmp_path: Path) -> None:
    keys = tmp_path / "trusted.pem"
    keys.write_text(SIGNER.public_key_pem)
    settings = {"bundle": {"trusted_keys": keys}, "chain": {"checkpoint_interval": "20ms"}}
    with (
        serving(server, tmp_path / "node", "oldest", **settings) as url,
        httpx.Client(base_url=url, timeout=60, trust_env=False) as client,
    ):
        # 1. Written at each level, read at each.
        job = client.post("/v1/jobs", json={"tenant_id": "acme", "spec": {"n": 1}, "durability": "GLOBAL"}).json()
        assert job["chain"]["seq"] == 1
        lines = "\n".join(json.dumps({"tenant_id": "acme", "type": "JobCreated", "spec": {"n": n}}) for n in range(300))
        session = client.post("/v1/events?durability=LOCAL", content=lines, headers=NDJSON).headers["tally-session"]
        with_session = {"headers": {"Tally-Session": session}}
        listed = client.get(
            "/v1/jobs", params={"tenant_id": "acme", "status": "submitted", "limit": 1000}, **with_session
        )
        assert len(listed.json()["items"]) == 301
        for level in ("eventual", "session", "strong"):
            read = client.get(f"/v1/jobs/{job['job_id']}", params={"tenant_id": "acme", "consistency": level})
            assert read.json()["spec"] == {"n": 1}
        # 2. Signed, verified, exported.
        assert client.post("/v1/snapshots", json={"tenant_id": "acme"}).json()["to_seq"] == 301
        verdict = client.get("/v1/chain/verify", params={"tenant_id": "acme"}).json()
        assert (verdict["valid"], verdict["entries_checked"], verdict["signed_to_seq"]) == (True, 301, 301)
        assert client.post("/v1/bundles/export", json={"tenant_id": "acme"}).status_code == 200
        # 3. Imported, and not twice.
        bundle = bundle_of(build(BUNDLED, tenant_id="site", snapshots_to=(BUNDLED,)))
        for imported in (BUNDLED, 0):
            answer = client.post("/v1/bundles/import", files={"file": ("site.tar", bundle)}).json()
            assert (answer["imported"], answer["entries"]) == (imported, BUNDLED)
        verdict = client.get("/v1/chain/verify", params={"tenant_id": "site"}).json()
        assert (verdict["valid"], verdict["entries_checked"]) == (True, BUNDLED)
        # 4. Read by the pipeline, and verified straight from the database.
        database = Database.of(server, "oldest")
        with parse_place(database.service_url).open() as opened:
            pieces = opened.pieces(["acme"], rows_a_piece=100)
            assert sum(batch.num_rows for _, reader in open_pieces(pieces) for batch in reader.entries()) == 301
        told = verified_with_dsn(database.service_url)
        assert (told["valid"], told["entries_checked"]) == (True, 301)


def verified_with_dsn(url: str) -> dict[str, object]:
    done = run_tally("verify", "--tenant", "acme", "--dsn", url, "--json")
    assert done.returncode in (0, 3), done.stdout + done.stderr
    told: dict[str, object] = json.loads(done.stdout)
    return told


def test_the_version_is_the_one_that_the_test_is_about(server: EmbeddedPostgres) -> None:
    async def version() -> int:
        async with connected_to(server.superuser_url()) as connection:
            return connection.get_server_version().major

    assert asyncio.run(version()) == int(oldest().parts[-2])


async def test_it_tells_the_schema_in_the_same_words(server: EmbeddedPostgres) -> None:
    async with connected_to(server.service_url()) as connection:
        assert await catalog(connection) == (MIGRATIONS / "schema.txt").read_text().splitlines()
