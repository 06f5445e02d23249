"""A ledger that a released version left is migrated and taken over by this one (``docs/upgrade.md``)."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from app.dev.account import find_package
from app.store.migrate import migrate
from tests.app.conftest import MakeSettings, RunServer
from tests.conftest import Database

RELEASED = sorted(path for path in (Path(__file__).parent / "released").iterdir() if path.is_dir())


@pytest.fixture(params=RELEASED, ids=lambda path: path.name)
def left(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


@pytest.fixture
async def database(left: Path, empty_database: Database) -> Database:
    """What that version left in PostgreSQL, migrated."""
    dump = gzip.decompress((left / "database.sql.gz").read_bytes())
    psql = [
        find_package() / "pginstall18" / "bin" / "psql",
        "--quiet",
        "-v",
        "ON_ERROR_STOP=1",
        empty_database.superuser_url,
    ]
    subprocess.run(psql, input=dump, check=True, capture_output=True)
    connection = await asyncpg.connect(empty_database.superuser_url)
    # Keys are known for seven days, and that version was here just now.
    await connection.execute("UPDATE scheduler.idempotency SET created_at = now()")
    await connection.close()
    await asyncio.to_thread(migrate, empty_database.owner_url)
    return empty_database


async def test_a_ledger_of_a_released_version_goes_on_under_this_one(
    left: Path, run_server: RunServer, make_settings: MakeSettings, tmp_path: Path
) -> None:
    said: dict[str, Any] = json.loads((left / "said.json").read_text())
    shutil.unpack_archive(left / "node.tar.gz", tmp_path / "node")
    async with run_server(make_settings("node", node_id="node-old")) as client:
        # What was durable and not chained is chained by the start; a session of then is waited for.
        waiting = await client.get(
            "/v1/jobs/waiting", params={"tenant_id": "acme"}, headers={"Tally-Session": said["session"]}
        )
        assert (waiting.status_code, waiting.json()["status"]) == (200, "SUBMITTED")
        for before in said["answers"]:
            again = await client.post(before["path"], json=before["body"], headers={"Idempotency-Key": before["key"]})
            # Members that came since are added to what was answered; a problem has none.
            added = {"home_region": None} if again.is_success else {}
            answer = {**json.loads(before["answer"]), **added}
            assert (again.status_code, again.json()) == (before["status"], answer), before["key"]
            assert again.headers["Idempotent-Replay"] == "true"
        (await client.get("/v1/jobs/waiting", params={"tenant_id": "globex"})).raise_for_status()
        new = {"tenant_id": "acme", "spec": {}, "assigned_dcs": ["use1"], "durability": "GLOBAL"}
        assert (await client.post("/v1/jobs", json=new)).status_code == 201
        for job_id, status in said.get("jobs", {}).items():
            read = await client.get(f"/v1/jobs/{job_id}", params={"tenant_id": "acme", "consistency": "strong"})
            assert (read.status_code, read.json()["status"]) == (200, status)
        for tenant_id in ("globex", "_system"):
            rest = (await client.get("/v1/chain/verify", params={"tenant_id": tenant_id})).json()
            assert (rest["valid"], rest["first_break"]) == (True, None)
        verified = (await client.get("/v1/chain/verify", params={"tenant_id": "acme"})).json()
        assert (verified["valid"], verified["entries_checked"], verified["compared_with"]) == (True, 45, "node")
        size = int(said["checkpoint"].splitlines()[1])
        sizes = {"tenant_id": "acme", "first": size, "second": 45}
        await client.post("/v1/snapshots", json={"tenant_id": "acme"})
        proof = (await client.get("/v1/chain/proof/consistency", params=sizes)).json()
        assert bytes.fromhex(proof["first_root"]) == base64.b64decode(said["checkpoint"].splitlines()[2])
