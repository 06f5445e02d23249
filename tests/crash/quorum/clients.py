"""Clients of a replicated ledger: they write, repeat what has a key, read, all at every level, and note the answers."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from tests.crash.quorum.cluster import Cluster, disk_of
from tests.crash.quorum.history import Read, Wrote, now_s

TENANTS = ("acme", "beta")
LEVELS = ("LOCAL", "LOCAL", "REGIONAL", "REGIONAL", "GLOBAL")
CONSISTENCIES = ("session", "strong", "eventual", "bounded_staleness")
WRITERS, READERS = 4, 2
ANSWER_WITHIN_S = 6.0
REMEMBERED = 200
MAX_STALENESS_MS = 3000
NOBODY_S = 0.05
"""How long a client waits when no process answers."""


class Clients:
    """All clients of a cluster, until told to end."""

    def __init__(self, cluster: Cluster, draw: random.Random) -> None:
        self._cluster = cluster
        self._history = cluster.history
        self._draw = draw
        self._numbers = itertools.count(1)
        self._keyed: list[tuple[int, str, str, str]] = []
        """Number, tenant, level and key of requests that may be repeated."""
        self._wrote: list[tuple[str, Wrote]] = []
        """What may be read, with its tenant."""
        self._has_ended = False

    async def write(self, session: aiohttp.ClientSession) -> None:
        """One request after the other, at whatever process says it answers."""
        while not self._has_ended:
            if self._keyed and self._draw.random() < 0.25:
                number, tenant_id, level, key = self._draw.choice(self._keyed)
                await self._submit(session, number, tenant_id, level, key)
                continue
            number, tenant_id = next(self._numbers), self._draw.choice(TENANTS)
            level, is_keyed = self._draw.choice(LEVELS), self._draw.random() < 0.4
            if is_keyed:
                self._keyed = [*self._keyed[-REMEMBERED:], (number, tenant_id, level, f"key-{number}")]
            await self._submit(session, number, tenant_id, level, f"key-{number}" if is_keyed else None)

    async def read(self, session: aiohttp.ClientSession) -> None:
        """One read after the other, of what somebody wrote."""
        while not self._has_ended:
            if not self._wrote:
                await asyncio.sleep(NOBODY_S)
                continue
            tenant_id, wrote = self._draw.choice(self._wrote)
            await self._find(session, tenant_id, wrote, self._draw.choice(CONSISTENCIES))

    async def repeat_all(self, session: aiohttp.ClientSession) -> None:
        """Send every request with a key that is remembered once more."""
        for number, tenant_id, level, key in list(self._keyed):
            await self._submit(session, number, tenant_id, level, key)

    def end(self) -> None:
        """Send nothing more."""
        self._has_ended = True

    def _process(self) -> tuple[str, str] | None:
        urls = list(self._cluster.urls.items())
        return self._draw.choice(urls) if urls else None

    async def _submit(
        self, session: aiohttp.ClientSession, number: int, tenant_id: str, level: str, key: str | None
    ) -> None:
        process = self._process() if key is None else self._process_of(key)
        if process is None:
            await asyncio.sleep(NOBODY_S)
            return
        name, url = process
        body = {"tenant_id": tenant_id, "spec": {"n": number}, "durability": level}
        headers = {} if key is None else {"Idempotency-Key": key}
        began_s = now_s()
        answer = await _asked(lambda: session.post(f"{url}/v1/jobs", json=body, headers=headers))
        status, told = answer if answer is not None else (None, {})
        durability = told.get("durability") or {}
        wrote = Wrote(
            number=number,
            began_s=began_s,
            ended_s=now_s(),
            process=name,
            disk=disk_of(name),
            level=level,
            key=key,
            status=status,
            achieved=durability.get("achieved") or told.get("achieved"),
            job_id=told.get("job_id"),
            hlc=told.get("hlc"),
            session=told.get("session"),
        )
        self._history.note(wrote)
        if status in (200, 201):
            self._wrote = [*self._wrote[-REMEMBERED:], (tenant_id, wrote)]
        if status is None or status == 503:
            await asyncio.sleep(NOBODY_S)
        else:
            said = self._cluster.processes[name].last_words() if name in self._cluster.processes else ""
            assert status == 201 or told["type"].endswith("/fenced"), f"{wrote}: {told}\n{said}"

    def _process_of(self, key: str) -> tuple[str, str] | None:
        """A process of the node that a key is always sent to."""
        node = ("a", "b")[hash_of(key) % 2]
        urls = [(name, url) for name, url in self._cluster.urls.items() if name.startswith(node)]
        return self._draw.choice(urls) if urls else None

    async def _find(self, session: aiohttp.ClientSession, tenant_id: str, wrote: Wrote, consistency: str) -> None:
        process = self._process()
        if process is None:
            await asyncio.sleep(NOBODY_S)
            return
        name, url = process
        asks: dict[str, Any] = {"tenant_id": tenant_id, "consistency": consistency}
        if consistency == "bounded_staleness":
            asks["max_staleness_ms"] = MAX_STALENESS_MS
        headers = {"Tally-Session": wrote.session} if consistency == "session" and wrote.session else {}
        began_s = now_s()
        address = f"{url}/v1/jobs/{wrote.job_id}"
        answer = await _asked(lambda: session.get(address, params=asks, headers=headers))
        status, told = answer if answer is not None else (None, {})
        self._history.note(
            Read(
                number=wrote.number,
                began_s=began_s,
                ended_s=now_s(),
                process=name,
                consistency=consistency,
                has_session=bool(headers),
                may_have_lost=not wrote.is_final,
                max_staleness_s=MAX_STALENESS_MS / 1000,
                status=status,
                problem=str(told.get("type", "")).rpartition("/")[2] or None,
                found=told.get("spec", {}).get("n") if status == 200 else None,
            )
        )


async def _asked(ask: Callable[[], Any]) -> tuple[int, dict[str, Any]] | None:
    """Status and body of an answer, None when it was lost."""
    try:
        async with ask() as answer:
            return answer.status, await answer.json(content_type=None)
    except (aiohttp.ClientError, TimeoutError):
        return None


def hash_of(key: str) -> int:
    """The same in every run."""
    return sum(key.encode())


@asynccontextmanager
async def working(cluster: Cluster, draw: random.Random) -> AsyncIterator[Clients]:
    """Clients at work; on leaving they have ended, and whatever went wrong with one is raised."""
    clients = Clients(cluster, draw)
    timeout = aiohttp.ClientTimeout(total=ANSWER_WITHIN_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        at_work: list[Callable[[aiohttp.ClientSession], Awaitable[None]]] = [clients.write] * WRITERS
        async with asyncio.TaskGroup() as group:
            for work in (*at_work, *[clients.read] * READERS):
                group.create_task(work(session))
            try:
                yield clients
            finally:
                clients.end()
        await clients.repeat_all(session)
