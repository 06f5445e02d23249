"""Services as child processes, a PostgreSQL that may be killed, and the seed that a failing round prints."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from app.dev.cluster import DATABASE
from app.dev.embedded import EmbeddedPostgres
from tests.conftest import Database, copy_of, execute
from tests.crash.serve_process import ServeProcess
from tests.server_copies import scratch_folder, server_with_schema

Launch = Callable[..., Awaitable[ServeProcess]]

_numbers = itertools.count(1)


@pytest.fixture
def seed() -> int:
    """What all chance of a test is drawn from: ``SEED``, else a new one, printed when the test fails."""
    seed = int(os.environ.get("SEED") or random.SystemRandom().randrange(2**32))
    print(f"SEED={seed}")
    return seed


@pytest.fixture
def torture_rounds() -> Callable[[int], int]:
    """Rounds of a torture test: ``TORTURE_ROUNDS``, else as many as given."""
    return lambda usual: int(os.environ.get("TORTURE_ROUNDS") or usual)


@asynccontextmanager
async def launching() -> AsyncIterator[Launch]:
    """Starts children as ``ServeProcess.launch`` does; what still runs at the end is killed."""
    children: list[ServeProcess] = []

    async def start(*given: object, **settings: object) -> ServeProcess:
        child = await ServeProcess.launch(*given, **settings)
        children.append(child)
        return child

    try:
        yield start
    finally:
        for child in children:
            await child.kill()
        for child in children[-3:]:
            print(f"--- process {child.pid} ended with {child.returncode} and said last:\n{child.last_words()}")


@pytest.fixture
async def launch() -> AsyncIterator[Launch]:
    """As ``launching``, for one test."""
    async with launching() as launch:
        yield launch


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every account can enter, as the one that runs PostgreSQL must."""
    folder = scratch_folder()
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def mortal_postgres() -> Iterator[EmbeddedPostgres]:
    """A PostgreSQL that no other test uses, for killing; its own database is the template of others."""
    folder = scratch_folder()
    server = server_with_schema(folder / "postgres")
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder)


@pytest.fixture
def mortal_database(mortal_postgres: EmbeddedPostgres) -> Database:
    """A fresh migrated database on the PostgreSQL that may be killed."""
    mortal_postgres.ensure_alive()
    name = f"mortal_{next(_numbers)}"
    asyncio.run(execute(mortal_postgres.superuser_url("postgres"), copy_of(DATABASE, name)))
    return Database.of(mortal_postgres, name)
