"""A chain that a test appends to by itself, and followers of the job table that a test gives their turns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import asyncpg

from app.store import following
from app.store.appended import AppendedEntries, ChainAppender
from app.store.chaining import ChainHead, copy_entries
from app.write.followers.followers import TableFollower
from app.write.followers.job_table import JobTable
from ledger import canonical
from ledger.facts.events import JOB_EVENTS
from ledger.hlc import Hlc
from ledger.positions import BEFORE_FIRST
from tests.conftest import Database

Event = tuple[str, str, int, Mapping[str, Any]]
"""Job, type of the event or action, physical time in ms, and fields."""
LOG_ORIGIN = "ledger.test/here"


class FollowedChain:
    """The chain of one tenant in one database."""

    def __init__(self, database: Database, superuser: asyncpg.Connection, tenant: str = "acme") -> None:
        self.tenant = tenant
        self._database = database
        self._superuser = superuser
        self._head = ChainHead(0, None, None)
        self.follower = self._new_follower()

    def _new_follower(self) -> TableFollower:
        return TableFollower(
            JobTable(lambda *_: None, LOG_ORIGIN),
            lambda: following.connect(self._database.service_url, 30),
            lambda _: BEFORE_FIRST,
        )

    async def append(self, events: Iterable[Event], origin: str | None = None) -> None:
        """Chain these events, as if another node had, or an import of entries of ``origin``."""
        appended = AppendedEntries()
        appender = ChainAppender(appended, {self.tenant: self._head}, {})
        for number, (job_id, name, at_ms, fields) in enumerate(events):
            hlc = Hlc(at_ms, self._head.seq + number, "node-a" if origin is None else "node-b")
            payload = {"type": name, "fence_token": 1, **fields}
            action = JOB_EVENTS[name].action if name in JOB_EVENTS else name
            appender.append(self.tenant, hlc, job_id, action, canonical.encode(payload), origin)
        appender.finish()
        if not appended.links:
            return
        ((_, *head),) = appended.heads()
        self._head = ChainHead(*head)
        async with self._superuser.transaction():
            await copy_entries(self._superuser, appended.log_rows)
            await self._superuser.execute(
                "INSERT INTO scheduler.chain_heads (tenant_id, head_seq, head_chain_link, head_hlc)"
                " VALUES ($1, $2, $3, $4) ON CONFLICT (tenant_id) DO UPDATE SET head_seq = excluded.head_seq,"
                " head_chain_link = excluded.head_chain_link, head_hlc = excluded.head_hlc",
                self.tenant,
                *head,
            )

    async def follow(self) -> None:
        """Let the follower take its turns until it is at the end of the chain."""
        self.follower._behind[self.tenant] = None
        await self.follower._follow_all()
        assert self.follower.last_error is None

    def restart(self) -> None:
        """Another follower goes on, which knows no job."""
        self.end()
        self.follower = self._new_follower()

    def end(self) -> None:
        """Close the follower's connection."""
        self.follower._lose_connection()
