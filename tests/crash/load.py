"""Concurrent requests of every kind that writes, and a book of what was sent and what was promised for it.

Each event carries a number of its own inside its payload, so that it is found again in the chain whatever
became of its answer. A client gives up at the first lost connection and goes on after the restart.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import aiohttp

from tests.crash.operations import Operation, Recorder

LEVELS = (None, "LOCAL", "REGIONAL", "GLOBAL")
TENANTS = ("acme", "beta", "corp", "delta-4", "new")
CLIENTS = 8
ANSWER_WITHIN_S = 120.0
JOBS_REMEMBERED = 30
"""Jobs that one client goes on writing about."""

PASSING_TROUBLE = ("durability-timeout", "not-ready", "backlog-full", "fenced")
"""Problems that a client of a failing node may see."""


class Fact(NamedTuple):
    """One event as it was sent. ``job_id`` is None when the node was to make one."""

    number: int
    tenant_id: str
    job_id: str | None
    type: str
    fields: dict[str, Any]


class Answer(NamedTuple):
    """What a client got, for comparing and for judging."""

    status: int
    body: bytes
    session: str | None
    location: str | None
    replayed: bool

    @property
    def told(self) -> dict[str, Any]:
        """The body as JSON."""
        told: dict[str, Any] = json.loads(self.body)
        return told

    def same(self) -> tuple[object, ...]:
        """What the answer to a repeated request must have in common with the first."""
        return self.status, self.body, self.session, self.location


class Sent:
    """One request and its answer; ``answer`` is None when it was lost."""

    def __init__(self, path: str, facts: list[Fact], body: bytes, key: str | None) -> None:
        self.path = path
        self.facts = facts
        self.body = body
        self.key = key
        self.answer: Answer | None = None

    @classmethod
    def created(cls, fact: Fact, level: str | None, key: str | None) -> Sent:
        """A request for a new job."""
        return cls._of_one("/v1/jobs", fact, level, key, {"job_id": fact.job_id} if fact.job_id else {})

    @classmethod
    def event(cls, fact: Fact, level: str | None, key: str | None) -> Sent:
        """A request about a job that exists; a cancellation has a route of its own."""
        if fact.type == "JobCancellationRequested":
            return cls._of_one(f"/v1/jobs/{fact.job_id}/cancel", fact, level, key, {})
        return cls._of_one(f"/v1/jobs/{fact.job_id}/events", fact, level, key, {"type": fact.type})

    @classmethod
    def _of_one(cls, path: str, fact: Fact, level: str | None, key: str | None, more: dict[str, str]) -> Sent:
        body = {"tenant_id": fact.tenant_id, **fact.fields, **more}
        if level is not None:
            body["durability"] = level
        return cls(path, [fact], json.dumps(body).encode(), key)

    @classmethod
    def batch(cls, facts: list[Fact], level: str | None, key: str | None) -> Sent:
        """An NDJSON request."""
        lines = [
            {"tenant_id": fact.tenant_id, "job_id": fact.job_id, "type": fact.type, **fact.fields} for fact in facts
        ]
        path = "/v1/events" + (f"?durability={level}" if level else "")
        return cls(path, facts, "\n".join(map(json.dumps, lines)).encode(), key)

    @property
    def is_batch(self) -> bool:
        """An NDJSON request."""
        return self.path.startswith("/v1/events")

    @property
    def answered(self) -> Answer:
        """The answer, which there is."""
        assert self.answer is not None
        return self.answer

    @property
    def is_acknowledged(self) -> bool:
        """The answer says that all was taken, at the level asked for."""
        return self.answer is not None and self.answer.status in (200, 201)

    @property
    def is_promised(self) -> bool:
        """The answer says that its events are durable at least: they must be in the chain."""
        if self.is_acknowledged:
            return True
        return self.problem == "durability-timeout" and self.answered.told["achieved"] != "NONE"

    @property
    def problem(self) -> str | None:
        """Name of the problem it was answered with."""
        if self.answer is None or self.answer.status < 400:
            return None
        return str(self.answer.told["type"]).rpartition("/")[2]

    async def send(self, session: aiohttp.ClientSession, url: str) -> Answer:
        """Send it, or send it again, as it is.

        Raises:
            aiohttp.ClientError: there is no answer.
        """
        headers = {"Content-Type": "application/x-ndjson" if self.is_batch else "application/json"}
        if self.key is not None:
            headers["Idempotency-Key"] = self.key
        async with session.post(url + self.path, data=self.body, headers=headers) as answer:
            return Answer(
                answer.status,
                await answer.read(),
                answer.headers.get("Tally-Session"),
                answer.headers.get("Location"),
                answer.headers.get("Idempotent-Replay") == "true",
            )


def number_of(payload: dict[str, Any]) -> int:
    """The number that an event carries, from its payload."""
    match payload["type"]:
        case "JobCreated":
            return int(payload["spec"]["n"])
        case "JobAccepted":
            return int(payload["worker_count"])
        case "JobProgressReported":
            return int(payload["completed"])
        case "JobCancellationRequested":
            return int(payload["reason"])
        case "JobCancellationAcked":
            return int(payload["workflows_cancelled"])
        case "JobCompleted":
            return int(payload["aggregate_metrics"]["n"])
        case "JobFailed":
            return int(payload["error"])
    raise AssertionError(f"nobody sent {payload}")


class Book:
    """Everything sent so far, in order of sending."""

    def __init__(self, recorder: Recorder | None = None) -> None:
        self.sent: list[Sent] = []
        self.acknowledged = 0
        self._recorder = recorder
        self._numbers = itertools.count(1)
        self._waiting: list[tuple[Callable[[], bool], asyncio.Event]] = []

    def next_number(self) -> int:
        """A number for one more event."""
        return next(self._numbers)

    async def send(self, sent: Sent, session: aiohttp.ClientSession, url: str) -> Answer:
        """As ``sent.send``; what has a key is recorded, where there is a recorder."""
        if self._recorder is None or sent.key is None:
            return await sent.send(session, url)
        operation = Operation(
            op="write",
            object=f"key:{sent.path}/{sent.key}",
            client=f"client-{id(asyncio.current_task())}",
            invoked_s=time.monotonic(),
            completed_s=0.0,
            input={"numbers": [fact.number for fact in sent.facts]},
        )
        try:
            answer = await sent.send(session, url)
            if answer.status in (200, 201):
                told = answer.told
                operation.input["durability"] = told["durability"]["requested"]
                operation.output = {
                    "hlc": told.get("hlc") or told["first_hlc"],
                    "job_id": told.get("job_id") or ",".join(told["job_ids"]),
                    "replayed": answer.replayed,
                }
            return answer
        finally:
            operation.completed_s = time.monotonic()
            self._recorder.note(operation)

    def note(self, sent: Sent, answer: Answer) -> None:
        """Write down the answer to ``sent``."""
        sent.answer = answer
        self.acknowledged += sent.is_acknowledged
        for holds, event in self._waiting:
            if holds():
                event.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Return once ``holds()``, which is asked after every answer."""
        event = asyncio.Event()
        self._waiting.append((holds, event))
        if not holds():
            await event.wait()
        self._waiting = [waiting for waiting in self._waiting if waiting[1] is not event]

    async def more_acknowledged(self, requests: int) -> None:
        """Return once so many more requests are acknowledged."""
        enough = self.acknowledged + requests
        await self.until(lambda: self.acknowledged >= enough)

    def tenants(self) -> set[str]:
        """The tenants that something is promised to be in the chain of."""
        return {fact.tenant_id for sent in self.sent if sent.is_promised for fact in sent.facts}

    def keyed(self, *, acknowledged: bool) -> list[Sent]:
        """The requests with an Idempotency-Key."""
        return [sent for sent in self.sent if sent.key is not None and sent.is_acknowledged is acknowledged]


class Client:
    """Sends one request after the other. Its jobs are its own, so it knows which of them it has ended."""

    def __init__(self, book: Book, draw: random.Random, tenants: list[str]) -> None:
        self._book = book
        self._draw = draw
        self._tenants = tenants
        self._jobs: list[tuple[str, str]] = []

    async def run(self, session: aiohttp.ClientSession, url: str, until: asyncio.Event) -> None:
        """Send until told to end, or until the connection is lost."""
        while not until.is_set():
            sent = self._request()
            self._book.sent.append(sent)
            try:
                answer = await self._book.send(sent, session, url)
            except aiohttp.ClientError:
                self._forget(sent)
                return
            self._book.note(sent, answer)
            self._learn(sent)

    def _forget(self, sent: Sent) -> None:
        """Write no more about a job while an event of it is in doubt: nobody may end it before that is repeated."""
        about = {(fact.tenant_id, fact.job_id) for fact in sent.facts}
        self._jobs = [job for job in self._jobs if job not in about]

    def _learn(self, sent: Sent) -> None:
        if not sent.is_promised:
            self._forget(sent)
            expected = sent.problem in PASSING_TROUBLE and sent.answered.status == 503
            assert expected, f"{sent.path} {sent.body[:200]!r} was answered {sent.answer}"
            return
        told = sent.answered.told
        for fact in sent.facts:
            if fact.type == "JobCreated" and (job_id := fact.job_id or told.get("job_id")):
                self._jobs.append((fact.tenant_id, job_id))
        del self._jobs[:-JOBS_REMEMBERED]

    # --- what it sends ----------------------------------------------------------------------------

    def _request(self) -> Sent:
        draw = self._draw
        chance = draw.random()
        if chance < 0.2:
            return self._batch()
        if not self._jobs or chance < 0.6:
            fact = self._created(draw.choice((None, "own")))
            return Sent.created(fact, draw.choice(LEVELS), self._key(fact.number, 0.3))
        tenant_id, job_id = draw.choice(self._jobs)
        fact = self._cancelled(tenant_id, job_id) if chance < 0.65 else self._event(tenant_id, job_id)
        return Sent.event(fact, draw.choice(LEVELS), self._key(fact.number, 0.3))

    def _cancelled(self, tenant_id: str, job_id: str) -> Fact:
        self._jobs.remove((tenant_id, job_id))
        number = self._book.next_number()
        return Fact(number, tenant_id, job_id, "JobCancellationRequested", {"reason": str(number)})

    def _created(self, job_id: str | None, tenant_id: str | None = None) -> Fact:
        number = self._book.next_number()
        fields: dict[str, Any] = {"spec": {"n": number, "image": "a/b:ü"}}
        if self._draw.random() < 0.5:
            fields["assigned_dcs"] = ["use1", "euw1"]
        own = None if job_id is None else f"job-{number}"
        return Fact(number, tenant_id or self._draw.choice(self._tenants), own, "JobCreated", fields)

    def _event(self, tenant_id: str, job_id: str) -> Fact:
        number = self._book.next_number()
        kind = self._draw.random()
        if kind < 0.6:
            fields: dict[str, Any] = {"dc_id": "use1", "completed": number, "failed": 0}
            return Fact(number, tenant_id, job_id, "JobProgressReported", fields)
        if kind < 0.8:
            return Fact(number, tenant_id, job_id, "JobAccepted", {"dc_id": "use1", "worker_count": number})
        self._jobs.remove((tenant_id, job_id))
        if kind < 0.9:
            fields = {"final_status": "Succeeded", "aggregate_metrics": {"n": number}}
            return Fact(number, tenant_id, job_id, "JobCompleted", fields)
        return Fact(number, tenant_id, job_id, "JobFailed", {"error": str(number)})

    def _batch(self) -> Sent:
        """New jobs with progress on each, of up to three tenants."""
        facts: list[Fact] = []
        for tenant_id in self._draw.sample(self._tenants, self._draw.choice((1, 1, 2, 3))):
            for _ in range(self._draw.choice((1, 3, 20))):
                created = self._created("own", tenant_id)
                number = self._book.next_number()
                fields = {"dc_id": "euw1", "completed": number}
                facts += [created, Fact(number, tenant_id, created.job_id, "JobProgressReported", fields)]
        return Sent.batch(facts, self._draw.choice(LEVELS), self._key(facts[0].number, 0.5))

    def _key(self, number: int, share: float) -> str | None:
        return f"key-{number}" if self._draw.random() < share else None


class Load:
    """Clients that survive the service: their jobs and their book go on over its restarts."""

    def __init__(self, draw: random.Random, *, clients: int = CLIENTS, recorder: Recorder | None = None) -> None:
        self.book = Book(recorder)
        self.tenants = list(TENANTS)
        """Tenants that are written to; may be changed at any time."""
        self._draw = draw
        self._clients = [Client(self.book, random.Random(draw.randrange(2**32)), self.tenants) for _ in range(clients)]

    @asynccontextmanager
    async def on(self, url: str) -> AsyncIterator[None]:
        """All clients at work on ``url``; leaving lets each finish its request."""
        until = asyncio.Event()
        async with http_session() as session:
            working = [asyncio.ensure_future(client.run(session, url, until)) for client in self._clients]
            try:
                yield
            finally:
                until.set()
                await asyncio.gather(*working)

    async def repeat_keyed(self, url: str, answered_max: int | None = None) -> None:
        """Repeat the keyed requests whose answer was lost, twice at once, and ``answered_max`` of the others.

        Raises:
            aiohttp.ClientError: the connection was lost.
        """
        answered = self.book.keyed(acknowledged=True)
        if answered_max is not None:
            answered = self._draw.sample(answered, min(answered_max, len(answered)))
        async with http_session() as session:
            for sent in self.book.keyed(acknowledged=False):
                one, other = await asyncio.gather(*(self.book.send(sent, session, url) for _ in range(2)))
                assert one.same() == other.same(), f"{sent.key} was answered {one} and {other}"
                self.book.note(sent, one)
                assert sent.is_acknowledged, f"{sent.key} {sent.body[:200]!r} was answered {one}"
                answered.append(sent)
            for first in range(0, len(answered), CLIENTS):
                some = answered[first : first + CLIENTS]
                answers = await asyncio.gather(*(self.book.send(sent, session, url) for sent in some))
                for sent, again in zip(some, answers, strict=True):
                    assert again.replayed, f"{sent.key} was taken for new: {again}"
                    assert again.same() == sent.answered.same(), f"{sent.key} was answered {sent.answer}, then {again}"


def http_session() -> aiohttp.ClientSession:
    """A session without limits of its own."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=ANSWER_WITHIN_S)
    )
