"""Clients of a replicated ledger: they write, repeat what has a key, read, all at every level, and note the answers."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import aiohttp

from tests.crash.operations import Operation, Recorder
from tests.crash.quorum.cluster import Cluster, disk_of
from tests.crash.quorum.history import Read, Wrote, now_s

TENANTS = ("acme", "beta")
LEVELS = ("LOCAL", "LOCAL", "REGIONAL", "REGIONAL", "GLOBAL")
CONSISTENCIES = ("session", "strong", "eventual", "bounded_staleness")
WRITERS, READERS, ADJUSTERS = 4, 2, 2
MODULES = ("one", "two", "three")
ANSWER_WITHIN_S = 6.0
REMEMBERED = 200
MAX_STALENESS_MS = 3000
PROPOSED_MAX = 5
"""Times that one proposal is sent until its answer counts as lost."""
NOBODY_S = 0.05
"""How long a client waits when no process answers."""
PAUSE_S = 0.0 if os.environ.get("TORTURE_ROUNDS") else 0.1
"""How long a client pauses between its requests: in `make test` their number is not what matters."""


class Clients:
    """All clients of a cluster, until told to end."""

    def __init__(self, cluster: Cluster, draw: random.Random, recorder: Recorder) -> None:
        self._cluster = cluster
        self._recorder = recorder
        self._epochs = dict.fromkeys(MODULES, 0)
        """The epoch of the newest adjustment of each module, as any client was told last."""
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
            await asyncio.sleep(PAUSE_S)
            if self._keyed and self._draw.random() < 0.25:
                number, tenant_id, level, key = self._draw.choice(self._keyed)
                await self._submit(session, number, tenant_id, level, key)
                continue
            number, tenant_id = next(self._numbers), self._draw.choice(TENANTS)
            level, is_keyed = self._draw.choice(LEVELS), self._draw.random() < 0.4
            if is_keyed:
                self._keyed = [*self._keyed[-REMEMBERED:], (number, tenant_id, level, f"key-{number}")]
            await self._submit(session, number, tenant_id, level, f"key-{number}" if is_keyed else None)

    async def adjust(self, session: aiohttp.ClientSession) -> None:
        """One adjustment of a module after the other, each if the newest is the one that was heard of last."""
        while not self._has_ended:
            await asyncio.sleep(PAUSE_S)
            module, epoch = self._draw.choice(MODULES), next(self._numbers)
            expected = self._epochs[module]
            began_s = now_s()
            output = await self._propose(session, module, expected, epoch)
            self._recorder.note(
                Operation(
                    op="adjust",
                    object=f"module:{TENANTS[0]}/m/{module}",
                    client=f"adjuster-{id(asyncio.current_task())}",
                    invoked_s=began_s,
                    completed_s=now_s(),
                    input={"expected": expected, "epoch": epoch},
                    output=output,
                )
            )
            if output is not None:
                self._epochs[module] = epoch if output["accepted"] else output["epoch"]

    async def _propose(
        self, session: aiohttp.ClientSession, module: str, expected: int, epoch: int
    ) -> dict[str, Any] | None:
        """Propose it, at one process after the other under one key; None where that was not answered."""
        names = {"mission": "m", "module": module}
        body = {
            "tenant_id": TENANTS[0],
            "commitment": {"kind": "ModuleAdjustment", **names, "replicas": 1, "epoch": epoch},
            "precondition": {"kind": "ModuleAdjustmentVersion", **names, "epoch": expected},
        }
        headers = {"Idempotency-Key": f"adjust-{epoch}"}
        for _ in range(PROPOSED_MAX):
            process = self._process()
            if process is not None:
                url = f"{process[1]}/v1/commitments"
                answer = await _asked(lambda url=url: session.post(url, json=body, headers=headers))  # type: ignore[misc]
                if answer is not None and answer.status == 201:
                    return {"accepted": True}
                if answer is not None and answer.told.get("reason") == "adjustment-version":
                    return {"accepted": False, "epoch": answer.told["current_epoch"]}
                assert answer is None or answer.status == 503, answer
            await asyncio.sleep(NOBODY_S)
        return None

    async def read(self, session: aiohttp.ClientSession) -> None:
        """One read after the other, of what somebody wrote."""
        while not self._has_ended:
            await asyncio.sleep(PAUSE_S)
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
        status, told, is_replay = answer or Answered(None, {}, False)
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
        if key is not None:
            self._record(wrote, tenant_id, is_replay)
        if status in (200, 201):
            self._wrote = [*self._wrote[-REMEMBERED:], (tenant_id, wrote)]
        if status is None or status == 503:
            await asyncio.sleep(NOBODY_S)
        else:
            said = self._cluster.processes[name].last_words() if name in self._cluster.processes else ""
            assert status == 201 or told["type"].endswith("/fenced"), f"{wrote}: {told}\n{said}"

    def _record(self, wrote: Wrote, tenant_id: str, is_replay: bool) -> None:
        output = {"hlc": wrote.hlc, "job_id": wrote.job_id, "replayed": is_replay} if wrote.status == 201 else None
        self._recorder.note(
            Operation(
                op="write",
                object=f"key:{tenant_id}/{wrote.key}",
                client=f"writer-{id(asyncio.current_task())}",
                invoked_s=wrote.began_s,
                completed_s=wrote.ended_s,
                input={"n": wrote.number, "durability": wrote.level},
                output=output,
            )
        )

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
        status, told, _ = answer or Answered(None, {}, False)
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


class Answered(NamedTuple):
    """An answer: its status and body, and whether it says that it is a replay."""

    status: int | None
    told: dict[str, Any]
    is_replay: bool


async def _asked(ask: Callable[[], Any]) -> Answered | None:
    """The answer, None when it was lost."""
    try:
        async with ask() as answer:
            is_replay = answer.headers.get("Idempotent-Replay") == "true"
            return Answered(answer.status, await answer.json(content_type=None), is_replay)
    except (aiohttp.ClientError, TimeoutError):
        return None


def hash_of(key: str) -> int:
    """The same in every run."""
    return sum(key.encode())


@asynccontextmanager
async def working(cluster: Cluster, draw: random.Random, recorder: Recorder) -> AsyncIterator[Clients]:
    """Clients at work; on leaving they have ended, and whatever went wrong with one is raised."""
    clients = Clients(cluster, draw, recorder)
    timeout = aiohttp.ClientTimeout(total=ANSWER_WITHIN_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        at_work: list[Callable[[aiohttp.ClientSession], Awaitable[None]]] = [clients.write] * WRITERS
        async with asyncio.TaskGroup() as group:
            for work in (*at_work, *[clients.read] * READERS, *[clients.adjust] * ADJUSTERS):
                group.create_task(work(session))
            try:
                yield clients
            finally:
                clients.end()
        await clients.repeat_all(session)
