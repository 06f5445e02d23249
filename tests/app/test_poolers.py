"""A real PgBouncer between the ledger and PostgreSQL: which of its modes a node works with, and which it refuses."""

from __future__ import annotations

import asyncio
import os
import pwd
import re
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import pytest

from app.store.migrate import migrate
from ledger.errors import StartRefusedError
from tests.app.chains import Chains, until
from tests.app.conftest import RunNode, RunServer
from tests.app.starting import assert_no_start
from tests.conftest import Database
from tests.tally import run_tally

pytestmark = pytest.mark.debian_tools

TAKEN_APART = "leads to a pooler that gives the transactions of one session to several.*pool_mode = session"
POOL_SIZE = 12
"""Sessions of PostgreSQL that each pool has: more than a node of these tests holds."""
PROGRAM = "/usr/sbin/pgbouncer"


@contextmanager
def bouncing(database: Database, folder: Path) -> Iterator[int]:
    """A PgBouncer, and its port; each mode is a database of that name."""
    server = urlsplit(database.service_url)
    at = f"host={server.hostname} port={server.port} dbname={database.name}"
    login = f"user={server.username} password={server.password}"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    configuration = folder / "pgbouncer.ini"
    modes = "".join(f"{mode} = {at} {login} pool_mode={mode}\n" for mode in ("session", "transaction", "statement"))
    configuration.write_text(
        f"[databases]\n{modes}small = {at} {login} pool_mode=session pool_size=2\n[pgbouncer]\n"
        f"listen_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = any\n"
        f"default_pool_size = {POOL_SIZE}\n"
    )
    # PgBouncer refuses to run as root.
    nobody = pwd.getpwnam("nobody") if os.geteuid() == 0 else None
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [PROGRAM, str(configuration)],
            stdout=log,
            stderr=log,
            user=nobody and nobody.pw_uid,
            group=nobody and nobody.pw_gid,
            extra_groups=nobody and [],
        )
    try:
        yield port
    finally:
        process.kill()
        process.wait()


@pytest.fixture
async def pooler(database: Database) -> AsyncIterator[str]:
    """The URL of a PgBouncer, without the name of a database."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        with bouncing(database, Path(name)) as port:
            url = f"postgresql://anybody@127.0.0.1:{port}"

            async def answers() -> bool:
                try:
                    await (await asyncpg.connect(f"{url}/session?sslmode=disable")).close()
                except OSError:
                    return False
                return True

            await until(answers, "PgBouncer answers")
            yield url


async def test_a_node_works_behind_a_pool_of_sessions(
    run_server: RunServer, pooler: str, superuser: asyncpg.Connection, chains: Chains
) -> None:
    name = await superuser.fetchval("SELECT current_database()")
    await superuser.execute(f"ALTER DATABASE {name} SET row_security = on")
    async with run_server(url=f"{pooler}/session?sslmode=disable") as client:
        fields = {"fields": ["spec.image"]}
        (await client.put("/v1/tenants/acme/search", json=fields)).raise_for_status()
        job = {"tenant_id": "acme", "job_id": "one", "spec": {"image": "a", "n": 1}, "durability": "GLOBAL"}
        (await client.post("/v1/jobs", json=job)).raise_for_status()
        found = await client.get("/v1/jobs?tenant_id=acme&where=spec.image:a&consistency=strong")
        assert [each["job_id"] for each in found.raise_for_status().json()["items"]] == ["one"]
        followed = "SELECT seq FROM scheduler.follower_positions WHERE follower = 'jobs' AND tenant_id = 'acme'"

        async def is_followed() -> bool:
            return bool(await superuser.fetchval(followed))

        await until(is_followed, "the job table follows, and the terms with it")
    assert len(await chains.sound("acme")) == 1


@pytest.mark.parametrize("mode", ["transaction", "statement"])
async def test_a_pool_that_takes_sessions_apart_is_refused_by_name(run_node: RunNode, pooler: str, mode: str) -> None:
    await assert_no_start(run_node(url=f"{pooler}/{mode}?sslmode=disable"), StartRefusedError, match=TAKEN_APART)


async def test_a_command_that_asks_postgresql_itself_refuses_such_a_pool(pooler: str) -> None:
    url = f"{pooler}/transaction?sslmode=disable"
    with pytest.raises(StartRefusedError, match=TAKEN_APART):
        await asyncio.to_thread(migrate, url)
    refused = await asyncio.to_thread(run_tally, "verify", "-t", "acme", "--dsn", url)
    assert refused.returncode == 1
    assert re.search(TAKEN_APART, refused.stderr)
    shown = await asyncio.to_thread(run_tally, "safekeeper", "status", "127.0.0.1:1", "--dsn", url)
    assert re.search("PostgreSQL does not say what is chained: .*" + TAKEN_APART, shown.stdout)


async def test_a_pool_of_too_few_sessions_is_refused_with_how_many_a_node_needs(
    run_node: RunNode, pooler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.store.sessions.CONNECT_TIMEOUT_S", 3.0)
    said = "gave no more than 2 sessions.*as many as a node needs"
    await assert_no_start(run_node(url=f"{pooler}/small?sslmode=disable"), StartRefusedError, match=said)
