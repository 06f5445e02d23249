"""A node in this process on real files, real PostgreSQL and real sockets, and the chains it leaves behind."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from app.dev.embedded import EmbeddedPostgres
from app.edge.listener import listening
from app.node.service import Service
from app.node.wiring import running
from app.runtime.settings.config import Settings, load_settings
from tests.app.chains import Chains
from tests.app.client import Client
from tests.app.oidc_issuer import Checked, Issuer, issuing
from tests.app.postgres_proxy import PostgresProxy, proxy_to
from tests.app.served import Serve, Served, serving_with_tokens
from tests.app.shared import Shared, sharing
from tests.conftest import Database, connected_to, copy_of, fresh_database

MakeSettings = Callable[..., Settings]
RunNode = Callable[..., AbstractAsyncContextManager[Service]]
RunServer = Callable[..., AbstractAsyncContextManager[Client]]
BackUp = Callable[[], Awaitable[Database]]
CONNECTIONS_MAX = 4
"""Of the pool of a node: its tasks take turns."""

_tenants = itertools.count(1)


@pytest.fixture(autouse=True, scope="module")
def few_connections() -> Iterator[None]:
    """A node in this process takes no more connections than a test needs: each is a process, of 5 ms at the least."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("app.node.wiring.POOL_CONNECTIONS_MAX", CONNECTIONS_MAX)
        yield


def _settings_below(parent: Path) -> MakeSettings:
    """Settings of a node whose data is in a folder named ``folder`` below ``parent``.

    The same folder again means the same node again. Whatever else is given is a setting, sections as dicts.
    """

    def make(folder: str = "node", **given: Any) -> Settings:
        defaults: dict[str, Any] = {
            "data_dir": parent / folder,
            "port": 0,
            "shutdown_grace": "10s",
            "verify": {"on_start": False},
            # A machine that runs other things too is not what a test is about.
            "write": {"timeout": "60s"},
            "read": {"wait": "20s"},
        }
        return load_settings(**{**defaults, **given})

    return make


@pytest.fixture
def make_settings(tmp_path: Path) -> MakeSettings:
    """Settings of nodes whose data is below the test's own folder."""
    return _settings_below(tmp_path)


@pytest.fixture(scope="module")
def make_shared_settings(tmp_path_factory: pytest.TempPathFactory) -> MakeSettings:
    """Settings of nodes that the tests of a file share."""
    return _settings_below(tmp_path_factory.mktemp("shared"))


@pytest.fixture(scope="module")
def shared_database(postgres: EmbeddedPostgres) -> Iterator[Database]:
    """A migrated database that the tests of a file share."""
    with fresh_database(postgres) as database:
        yield database


@pytest.fixture(scope="module")
async def shared(make_shared_settings: MakeSettings, shared_database: Database) -> AsyncIterator[Shared]:
    """A running node that the tests of a file share; see ``tests.app.shared``."""
    async with sharing(make_shared_settings(), shared_database) as shared:
        yield shared


@pytest.fixture(scope="module")
async def served(make_shared_settings: MakeSettings, shared_database: Database) -> AsyncIterator[Served]:
    """The same of a node that asks for tokens."""
    settings = make_shared_settings(auth={"mode": "tokens"})
    async with serving_with_tokens(settings, shared_database.service_url, with_first=True) as served:
        yield served


@pytest.fixture
async def shared_superuser(shared_database: Database) -> AsyncIterator[asyncpg.Connection]:
    """A superuser's connection to ``shared_database``."""
    async with connected_to(shared_database.superuser_url) as connection:
        yield connection


@pytest.fixture
def tenant() -> str:
    """A tenant that no other test writes to; no such name begins with another one."""
    return f"tenant-{next(_tenants):04}"


@pytest.fixture
async def shared_client(shared: Shared, tenant: str) -> AsyncIterator[Client]:
    """A client of the node that the tests of a file share, and the tenant of this test."""
    async with Client(base_url=shared.url, timeout=60, trust_env=False) as client:
        client.tenant = tenant
        yield client


@pytest.fixture
async def back_up(postgres: EmbeddedPostgres, database: Database) -> AsyncIterator[BackUp]:
    """Copies the database as it is now, as a backup would; whoever is still connected to it is sent away."""
    made: list[str] = []
    maintenance = await asyncpg.connect(postgres.superuser_url("postgres"))

    async def copy() -> Database:
        name = f"{database.name}_backup_{len(made)}"
        while name not in made:
            await maintenance.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = $1", database.name
            )
            # A session that was about to begin is listed nowhere; PostgreSQL waits five seconds for it to go.
            with suppress(asyncpg.ObjectInUseError):
                await maintenance.execute(copy_of(database.name, name))
                made.append(name)
        return Database.of(postgres, name)

    yield copy
    for name in made:
        await maintenance.execute(f"DROP DATABASE {name} WITH (FORCE)")
    await maintenance.close()


@pytest.fixture
async def proxy(database: Database) -> AsyncIterator[PostgresProxy]:
    """A proxy in front of the database."""
    async with proxy_to(database.service_url) as proxy:
        yield proxy


@pytest.fixture
def run_node(database: Database, make_settings: MakeSettings) -> RunNode:
    """Runs a whole node in this event loop: ``async with run_node() as service``.

    Takes settings (those of ``make_settings()`` when none are given), ``url`` to reach the database by another
    way, and ``accept_lost_wal``.
    """

    @asynccontextmanager
    async def run(
        settings: Settings | None = None, *, url: str | None = None, accept_lost_wal: bool = False
    ) -> AsyncIterator[Service]:
        async with running(
            settings or make_settings(), url or database.service_url, accept_lost_wal=accept_lost_wal
        ) as (service, _services):
            yield service

    return run


@pytest.fixture
async def service(run_node: RunNode) -> AsyncIterator[Service]:
    """A running node, whose start is recorded: nothing is written that a test does not write."""
    async with run_node() as service:
        await service.key_changes.recorded.wait()
        yield service


@pytest.fixture
def run_server(database: Database, make_settings: MakeSettings) -> RunServer:
    """Runs a whole node that listens: ``async with run_server() as client``.

    Takes settings, ``url`` and ``accept_lost_wal`` as ``run_node`` does.
    """

    @asynccontextmanager
    async def run(
        settings: Settings | None = None, *, url: str | None = None, accept_lost_wal: bool = False
    ) -> AsyncIterator[Client]:
        async with AsyncExitStack() as stack:
            _service, services = await stack.enter_async_context(
                running(settings or make_settings(), url or database.service_url, accept_lost_wal=accept_lost_wal)
            )
            base_url, _serving = await stack.enter_async_context(listening(services))
            client = Client(base_url=base_url, timeout=30, trust_env=False)
            yield await stack.enter_async_context(client)

    return run


@pytest.fixture
async def client(run_server: RunServer) -> AsyncIterator[Client]:
    """A client of a node that listens on a port of its own."""
    async with run_server() as client:
        yield client


@pytest.fixture
def serve(database: Database, make_settings: MakeSettings) -> Serve:
    """Runs a node that asks for tokens, and listens: ``async with serve() as served``.

    Takes the node's folder, and settings; the first token is made for the node in the folder "node".
    """

    def run(folder: str = "node", **given: Any) -> AbstractAsyncContextManager[Served]:
        settings = make_settings(folder, **{"auth": {"mode": "tokens"}, **given})
        return serving_with_tokens(settings, database.service_url, with_first=folder == "node")

    return run


@pytest.fixture
def chains(superuser: asyncpg.Connection) -> Chains:
    """The chains of ``database`` as the superuser sees them."""
    return Chains(superuser)


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    """An OpenID Connect issuer of this test."""
    with issuing() as issuer:
        yield issuer


@pytest.fixture
def checked(issuer: Issuer) -> Checked:
    """What a node asks of that issuer's tokens."""
    return Checked(issuer)
