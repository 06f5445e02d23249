"""The webhooks that this node delivers to: those it holds, each with a task of its own.

A hold lasts ``HOLD_S`` by the clock of PostgreSQL, and a node that lives makes it last. So when a node dies, or cannot
reach PostgreSQL, others take its webhooks over as soon as their holds are over; when it stops, at once.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from secrets import token_hex
from time import monotonic
from typing import NamedTuple

import structlog

from app.runtime.database_faults import DATABASE_FAULTS
from app.runtime.metrics import Metrics
from app.runtime.settings.types import IpNetwork
from app.runtime.tasks.running import kept_running
from app.share.webhooks.delivery import Bury, Delivery, Follow
from app.share.webhooks.names import Names
from app.store import webhooks as store
from app.store.entry_check import EntryCheck
from app.store.reading import Pool, reading
from app.store.webhooks import Webhook
from ledger.errors import DatabaseUnavailableError

HOLD_S = 6.0
RENEW_S = 1.0
RENEW_TIMEOUT_S = 2.0
LET_GO_TIMEOUT_S = 0.2
"""A stop does not wait longer for requests to end, nor for PostgreSQL."""
assert RENEW_S + RENEW_TIMEOUT_S < HOLD_S

log = structlog.get_logger()


class _Held(NamedTuple):
    delivery: Delivery
    task: asyncio.Task[None]


@dataclass(eq=False, kw_only=True)
class Deliveries:
    """Holds webhooks and delivers to them. Belongs to one event loop."""

    pool: Pool
    check: EntryCheck
    may_hold: Callable[[], bool]
    """Whether this node could sign: one that could not leaves webhooks to others."""
    secret: Callable[[Webhook], bytes]
    bury: Bury
    follow: Follow
    networks: Sequence[IpNetwork]
    metrics: Metrics
    report: Callable[[BaseException, str], object]
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set where a webhook was added or resumed, to have it begin at once."""

    def __post_init__(self) -> None:
        self._holder = token_hex(8)
        self._held: dict[str, _Held] = {}
        self._names = Names()
        self._context: ssl.SSLContext | None = None

    async def run(self) -> None:
        """Hold and deliver until cancelled."""
        try:
            while True:
                try:
                    await self._hold()
                except (DatabaseUnavailableError, *DATABASE_FAULTS) as error:
                    log.warning("webhooks_not_held", error=str(error))
                    self._leave(lambda held: monotonic() >= held.delivery.held_until_s)
                with suppress(TimeoutError):
                    async with asyncio.timeout(RENEW_S):
                        await self.changed.wait()
                self.changed.clear()
        finally:
            tasks = [held.task for held in self._held.values()]
            self._leave(lambda _: True)
            if tasks:
                await asyncio.wait(tasks, timeout=LET_GO_TIMEOUT_S)
            with suppress(DatabaseUnavailableError, *DATABASE_FAULTS):
                async with reading(self.pool, timeout_s=LET_GO_TIMEOUT_S) as connection:
                    await store.let_go(connection, self._holder)

    async def _hold(self) -> None:
        asked_s = monotonic()
        if not self.may_hold():
            self._leave(lambda _: True)
            return
        async with reading(self.pool, timeout_s=RENEW_TIMEOUT_S) as connection:
            webhooks = await store.hold(connection, self._holder, HOLD_S)
        if webhooks and self._context is None:
            # It reads the certificate authorities, which takes longer than a turn of the event loop may.
            self._context = await asyncio.to_thread(ssl.create_default_context)
        rows = {webhook.webhook_id: webhook for webhook in webhooks}

        def is_over(held: _Held) -> bool:
            """Its task has ended, others may have delivered meanwhile, or its row was changed. One of which no row came
            may be locked just now: it lasts as long as it is held, and finds out itself that it was removed."""
            known = held.delivery.webhook
            is_late = asked_s >= held.delivery.held_until_s
            return held.task.done() or is_late or rows.get(known.webhook_id, known) != known

        self._leave(is_over)
        for webhook in webhooks:
            if webhook.webhook_id not in self._held:
                self._begin(webhook)
            self._held[webhook.webhook_id].delivery.held_until_s = asked_s + HOLD_S

    def _begin(self, webhook: Webhook) -> None:
        assert self._context is not None
        delivery = Delivery(
            webhook=webhook,
            holder=self._holder,
            pool=self.pool,
            check=self.check,
            secret=self.secret,
            bury=self.bury,
            follow=self.follow,
            names=self._names,
            networks=self.networks,
            context=self._context,
            metrics=self.metrics,
            report=self.report,
            held_until_s=0.0,
        )
        self._held[webhook.webhook_id] = _Held(delivery, asyncio.create_task(kept_running(delivery.run)))

    def _leave(self, which: Callable[[_Held], bool]) -> None:
        for webhook_id in [webhook_id for webhook_id, held in self._held.items() if which(held)]:
            self._held.pop(webhook_id).task.cancel()

    def state(self) -> tuple[int, float]:
        """How many webhooks this node delivers to, and for how many seconds the one that fails longest has."""
        now = datetime.now(UTC)
        failing = [now - held.delivery.failing_since for held in self._held.values() if held.delivery.failing_since]
        return len(self._held), max((each.total_seconds() for each in failing), default=0.0)
