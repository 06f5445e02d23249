"""The database of a v1 scheduler: its schema as it was published, and chains as it writes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from typing import Any, NamedTuple

import asyncpg

from app.dev.embedded import EmbeddedPostgres
from ledger import canonical
from tests.conftest import administer, execute

SCHEMA = """
CREATE SCHEMA scheduler;
CREATE TABLE scheduler.scheduler_log (
  id BIGSERIAL PRIMARY KEY,
  t_hlc TEXT NOT NULL,
  job_id TEXT NOT NULL,
  action TEXT NOT NULL,
  prev_chain_link TEXT,
  chain_link TEXT NOT NULL,
  payload JSONB NOT NULL,
  tenant_id TEXT NOT NULL,
  created_at TIMESTAMPTZ NOT NULL DEFAULT NOW()
);
CREATE INDEX idx_scheduler_log_hlc ON scheduler.scheduler_log (t_hlc);
CREATE INDEX idx_scheduler_log_tenant_hlc ON scheduler.scheduler_log (tenant_id, t_hlc);
CREATE INDEX idx_scheduler_log_job ON scheduler.scheduler_log (job_id);
CREATE TABLE scheduler.batch_snapshot (
  id BIGSERIAL PRIMARY KEY,
  snapshot_hlc TEXT NOT NULL,
  from_chain_link TEXT NOT NULL,
  to_chain_link TEXT NOT NULL,
  entry_count INTEGER NOT NULL,
  merkle_root TEXT NOT NULL,
  dsse_envelope JSONB,
  created_at TIMESTAMPTZ NOT NULL DEFAULT NOW()
);
CREATE TABLE scheduler.chain_heads (
  tenant_id TEXT PRIMARY KEY,
  head_chain_link TEXT NOT NULL,
  head_hlc TEXT NOT NULL,
  updated_at TIMESTAMPTZ NOT NULL DEFAULT NOW()
);
"""
INSERT_ROW = """
INSERT INTO scheduler.scheduler_log (t_hlc, job_id, action, prev_chain_link, chain_link, payload, tenant_id)
VALUES ($1, $2, $3, $4, $5, $6, $7)"""
BEGAN_MS = 1_704_585_600_000


class Fact(NamedTuple):
    """One row before it is linked."""

    t_hlc: str
    job_id: str
    action: str
    payload: Any


def facts(jobs: int, node: str = "scheduler-prod-01") -> list[Fact]:
    """Jobs that were queued, taken, run and ended, every fifth of them failed."""
    found = []
    for number in range(jobs):
        job = f"job-{number:04}"
        end: tuple[str, Any] = ("FAIL", {"error": "exit 1"}) if number % 5 == 4 else ("COMPLETE", {"result": None})
        steps: list[tuple[str, Any]] = [
            ("ENQUEUE", {"image": "a/b:1", "env": {"ß": "ü", "A": 1.5}, "n": number}),
            ("DEQUEUE", {"worker": 7}),
            ("EXECUTE", []),
            end,
        ]
        found += [
            Fact(f"{BEGAN_MS + 10 * number}:{at}:{node}", job, action, payload)
            for at, (action, payload) in enumerate(steps)
        ]
    return found


def canonical_text(payload: Any) -> str:
    """A payload as v1 is taken to hash it."""
    return canonical.encode(payload).decode()


def jsonb_text(payload: Any) -> str:
    """A payload as PostgreSQL prints it: shorter names first."""

    def ordered(value: Any) -> Any:
        if isinstance(value, dict):
            names = sorted(value, key=lambda name: (len(name.encode()), name.encode()))
            return {name: ordered(value[name]) for name in names}
        return value

    return json.dumps(ordered(payload), ensure_ascii=False)


def linked(chain: Sequence[Fact], text: Callable[[Any], str] = canonical_text) -> list[tuple[Any, ...]]:
    """The rows of a chain: HLC, job, action, links, payload as JSON."""
    rows: list[tuple[Any, ...]] = []
    prev: str | None = None
    for t_hlc, job_id, action, payload in chain:
        digest = sha256(text(payload).encode()).hexdigest()
        link = sha256(f"{t_hlc}{job_id}{action}{prev or 'genesis'}{digest}".encode()).hexdigest()
        rows.append((t_hlc, job_id, action, prev, link, json.dumps(payload)))
        prev = link
    return rows


@contextmanager
def v1_database(postgres: EmbeddedPostgres, name: str) -> Iterator[str]:
    """URL of an empty v1 database."""
    administer(postgres, f"CREATE DATABASE {name}")
    try:
        yield postgres.superuser_url(name)
    finally:
        administer(postgres, f"DROP DATABASE {name} WITH (FORCE)")


async def store(url: str, tenant: str, rows: Sequence[tuple[Any, ...]]) -> None:
    """Store a chain and its head."""
    connection = await asyncpg.connect(url)
    try:
        await connection.executemany(
            INSERT_ROW,
            [(*row, tenant) for row in rows],
        )
        await connection.execute(
            "INSERT INTO scheduler.chain_heads (tenant_id, head_chain_link, head_hlc) VALUES ($1, $2, $3)",
            tenant,
            rows[-1][4],
            rows[-1][0],
        )
    finally:
        await connection.close()


async def create(url: str) -> None:
    """Create the schema."""
    await execute(url, SCHEMA)
