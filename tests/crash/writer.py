"""One client whose requests a test chooses one by one, and the states of a node it can wait for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from tests.crash.load import Book, Fact, Sent, http_session

LOOK_INTERVAL_S = 0.02
"""Between two looks at a state that is waited for, so that the node has the core meanwhile."""


class Writer:
    """Creates jobs, and writes into a book what was answered."""

    def __init__(self, book: Book, session: aiohttp.ClientSession, url: str) -> None:
        self.book = book
        self.session = session
        self.url = url

    async def create(
        self, level: str | None, *, tenant_id: str = "acme", key: str | None = None, named: bool = True
    ) -> Sent:
        """Create a job, with an id of its own when ``named``; whatever the answer is.

        Raises:
            aiohttp.ClientError: there is none.
        """
        fact = new_job(self.book, tenant_id)
        sent = Sent.created(fact if named else fact._replace(job_id=None), level, key)
        self.book.sent.append(sent)
        self.book.note(sent, await sent.send(self.session, self.url))
        return sent

    async def created(
        self, level: str | None, *, tenant_id: str = "acme", key: str | None = None, named: bool = True
    ) -> Sent:
        """As ``create``; the job must be acknowledged."""
        sent = await self.create(level, tenant_id=tenant_id, key=key, named=named)
        assert sent.is_acknowledged, sent.answer
        return sent

    async def ready(self) -> None:
        """Return once the node says that it is ready."""
        while (await self.readiness())[0] != 200:
            await asyncio.sleep(LOOK_INTERVAL_S)

    async def readiness(self) -> tuple[int, str]:
        """Status and text of ``/readyz``."""
        async with self.session.get(f"{self.url}/readyz") as answer:
            return answer.status, await answer.text()

    async def positions(self) -> dict[str, int]:
        """The node's positions."""
        async with self.session.get(f"{self.url}/v1/node") as answer:
            positions: dict[str, int] = (await answer.json())["positions"]
            return positions

    async def until(self, position: str, lsn: int) -> None:
        """Return once the position of that name is at ``lsn`` or above."""
        while (await self.positions())[position] < lsn:
            await asyncio.sleep(LOOK_INTERVAL_S)

    async def heard(self) -> None:
        """What was sent before is under way in the service once later requests have been answered."""
        for _ in range(5):
            async with self.session.get(f"{self.url}/livez") as answer:
                assert answer.status == 200


def new_job(book: Book, tenant_id: str = "acme") -> Fact:
    """A job with a number and an id of its own."""
    number = book.next_number()
    return Fact(number, tenant_id, f"job-{number}", "JobCreated", {"spec": {"n": number}})


@asynccontextmanager
async def writer(url: str, book: Book) -> AsyncIterator[Writer]:
    """A writer to ``url``."""
    async with http_session() as session:
        yield Writer(book, session, url)
