"""Delivery to one receiver: the entries that it asks for, in the order of ``seq``, each until it is accepted.

Invariants::

    delivered_seq moves only past entries that the receiver confirmed, does not ask for, or is known to have rejected
    a batch is sent again with the same bytes until it is confirmed or rejected, by any node
    a node sends nothing after its hold of the webhook has expired
    the position goes back where an administrator asks for a replay, by the node that delivers, between two messages

Meaning of the answer::

    200 to 299                      accepted: the position is stored, then the next batch is sent
    none, 300 to 399, 501 to 599,   away: the same batch is retried, after longer and longer pauses, for ever
    408, 425, 429
    410                             gone: nothing is sent until an administrator resumes the webhook
    500, other 400 to 499           rejected: the entries are sent one by one. An entry rejected REFUSALS_MIN times is
                                    skipped once the receiver accepts a later one. It is then sent once more; if it is
                                    rejected again it is a dead letter. A receiver that rejects everything loses nothing

A prune leaves what is not delivered yet, except where the webhook is stopped. A webhook whose next entry has left is
stopped, with where the entry is: nothing is passed over.

*Which webhooks a node delivers to*: those it holds, each with its own task. A hold lasts ``HOLD_S`` by the clock of
PostgreSQL, and a live node renews it. If a node dies, or cannot reach PostgreSQL, other nodes take over its webhooks
once its holds expire; if it stops, immediately.
"""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from secrets import token_hex
from time import monotonic
from typing import NoReturn, TypeVar

import httpx

from app.runtime.logs import log
from app.runtime.metrics import Metrics
from app.runtime.outgoing import client_of
from app.runtime.postgres import DATABASE_FAULTS
from app.runtime.settings.types import IpNetwork, is_syslog_url
from app.runtime.tasks import is_set_within, kept_running
from app.share.webhooks import sending, syslog
from app.share.webhooks.formats import Format, is_receiver
from app.share.webhooks.sending import Answer, Names, Outcome, context_of_secret, message_of
from app.store import webhooks as store
from app.store.chain_reads import ListedEntry
from app.store.entry_check import EntryCheck
from app.store.reading import Pool, reading, run_in
from app.store.webhooks import Place, Webhook
from app.trust.retention import RetentionReader
from app.trust.subject_keys import SubjectKeys
from ledger.errors import ArchivedError, ChainDamagedError, DatabaseUnavailableError, LedgerError
from ledger.facts.events import ACTOR, SystemAction

BATCH_ENTRIES_MAX = 500
PAUSE_FIRST_S = 1.0
PAUSE_MAX_S = 60.0
IDLE_S = 1.0
"""Longest time between reads of the webhook's state."""
COLLECT_S = 0.1
"""Time that the first new entry waits for others to share its batch."""
REFUSALS_MIN = 3
"""Rejections of an entry before later entries are tried."""
BEHIND_MAX = 10
"""Entries tried after a rejected one."""

Value = TypeVar("Value")

Beyond = Callable[[int], Awaitable[None]]
"""Returns once the chain has an entry after a seq."""
Follow = Callable[[str], AbstractAsyncContextManager[Beyond]]
"""Follows the chain of a tenant, which must have one."""


class NotHeldError(LedgerError):
    """This node no longer holds the webhook."""


@dataclass(frozen=True, kw_only=True)
class WebhookServices:
    """The node's services that webhooks use."""

    pool: Pool
    check: EntryCheck
    retention: RetentionReader
    keys: SubjectKeys
    note: Callable[[SystemAction, str, dict[str, object]], Awaitable[None]]
    """Writes an entry of ``_system``."""
    follow: Follow
    log_origin: str
    networks: Sequence[IpNetwork]
    authorities: bytes
    """Certificates (DER) beside those of the system that receivers' are traced to."""
    metrics: Metrics
    report: Callable[[BaseException, str], object]
    """Called with each error about damaged stored rows, and the part that met it."""

    def secret(self, webhook: Webhook) -> bytes:
        """The secret that signs messages to the webhook: 32 bytes.

        Raises:
            PrivacyUnavailableError: this node does not have the ledger's master key.
        """
        return self.keys.derived(context_of_secret(webhook))

    async def record(self, action: SystemAction, webhook: Webhook, actor: str | None, **more: object) -> None:
        """Record a change of the webhook in ``_system``.

        Raises:
            LedgerError: as ``SystemEntries.note``.
        """
        facts = {ACTOR: actor, "webhook_id": webhook.webhook_id, "tenant_id": webhook.tenant_id, **more}
        await self.note(
            action, f"webhook:{webhook.webhook_id}", {name: value for name, value in facts.items() if value is not None}
        )


@dataclass(eq=False)
class Delivery:
    """Delivery to one webhook while this node holds it."""

    webhook: Webhook
    _holder: str
    _services: WebhookServices
    _names: Names
    _context: ssl.SSLContext
    held_until_s: float = 0.0
    """Time of ``time.monotonic`` from which nothing is sent."""
    failing_since: datetime | None = None
    _entries_max: int = field(init=False)
    _failures: int = 0
    _refusals: int = 0
    _client: httpx.AsyncClient = field(init=False)
    task: asyncio.Task[None] = field(init=False)
    """The task that delivers."""

    def __post_init__(self) -> None:
        self._entries_max = self._batch_max

    @property
    def _batch_max(self) -> int:
        """Most entries of a message."""
        is_single = self.webhook.format == Format.CLOUDEVENTS and not is_syslog_url(self.webhook.url)
        return 1 if is_single else BATCH_ENTRIES_MAX

    async def run(self) -> None:
        """Deliver until another node holds the webhook, it is stopped or removed, or PostgreSQL is unavailable."""
        async with client_of(self._context, timeout_s=None) as self._client:
            try:
                while True:
                    try:
                        with suppress(ArchivedError):  # the chain is followed again, from behind what left
                            await self._deliver()
                    except ChainDamagedError as error:
                        self._services.report(error, "webhook")
                        await self._failed(Answer(Outcome.AWAY, str(error)))
            except (NotHeldError, DatabaseUnavailableError) as error:
                log.info("webhook_left", webhook_id=self.webhook.webhook_id, reason=str(error))

    async def _deliver(self) -> None:
        while not (await self._ask(store.place)).head_seq:  # noqa: ASYNC110 (no event reports that a chain begins)
            await asyncio.sleep(IDLE_S)
        async with self._services.follow(self.webhook.tenant_id) as beyond:
            while True:
                place = await self._ask(store.place)
                if not await self._go_on(place):
                    with suppress(TimeoutError):
                        async with asyncio.timeout(IDLE_S):
                            await beyond(place.head_seq)
                            await asyncio.sleep(COLLECT_S)

    async def _ask(self, work: Callable[..., Awaitable[Value | None]], *given: object) -> Value:
        """The result of ``work``, a function of the store, for the webhook.

        Raises:
            NotHeldError: this node does not hold the webhook; nothing was stored.
        """
        stored = await run_in(reading(self._services.pool), work, self.webhook.webhook_id, self._holder, *given)
        if stored is None or stored is False:
            raise NotHeldError("the webhook was removed, or another node delivers to it")
        return stored

    async def _go_on(self, place: Place) -> bool:
        """Send one message until the receiver answers it; False if there is nothing to send yet."""
        ends_seq = place.sending_seq if place.again_seq is None else place.again_seq
        if ends_seq > place.head_seq:
            raise ChainDamagedError(
                self.webhook.tenant_id,
                f"a message to webhook {self.webhook.webhook_id} would end at seq {ends_seq}, and the chain ends at "
                f"{place.head_seq}",
            )
        if place.replay_seq is not None:
            await self._ask(store.go_back)
            return True
        if place.again_seq is not None:
            await self._send_again(place.again_seq)
            return True
        is_begun = place.sending_seq > place.delivered_seq
        entries, end_seq = await self._read(
            place.delivered_seq, place.sending_seq if is_begun else place.head_seq, self._entries_max
        )
        if entries:
            if not is_begun:
                await self._ask(store.begin_batch, entries[-1].seq)
            await self._send(entries)
        elif end_seq > place.delivered_seq:
            await self._ask(store.pass_over, end_seq)
        return bool(entries) or end_seq < place.head_seq

    async def _read(self, after_seq: int, upto_seq: int, limit: int) -> tuple[list[ListedEntry], int]:
        services, webhook = self._services, self.webhook
        try:
            async with (
                reading(services.pool) as connection,
                services.retention.leaving(connection, webhook.tenant_id, after_seq + 1),
            ):
                return await store.entries(connection, services.check, webhook, after_seq, upto_seq, limit)
        except ArchivedError as error:
            await self._stop(Answer(Outcome.GONE, str(error)))

    async def _send(self, entries: Sequence[ListedEntry]) -> None:
        answer = await self._answer(entries)
        if answer.outcome is Outcome.TAKEN:
            await self._confirm(entries[-1].seq, len(entries))
            self._entries_max = min(2 * self._entries_max, self._batch_max)
        elif answer.outcome is Outcome.GONE:
            await self._stop(answer)
        elif len(entries) > 1:
            self._entries_max = 1
            await self._ask(store.begin_batch, entries[0].seq)
        else:
            self._refusals += 1
            if self._refusals < REFUSALS_MIN or not await self._passes(entries[0], answer):
                await self._failed(answer)

    async def _passes(self, entry: ListedEntry, answer: Answer) -> bool:
        """Whether the receiver accepts the entry after all, or a later one; entries rejected before that one are
        redelivered. The first is retried before each next one: a receiver that has just recovered accepts it first."""
        refused = [entry.seq]
        behind, _ = await self._read(entry.seq, (await self._ask(store.place)).head_seq, BEHIND_MAX)
        for other in behind:
            tried = await self._try([other])
            if tried.outcome is Outcome.TAKEN:
                await self._confirm(other.seq, 1, refused, answer.said)
                return True
            if tried.outcome is Outcome.REFUSED:
                refused.append(other.seq)
                tried = await self._try([entry])
            if tried.outcome is Outcome.TAKEN:
                await self._confirm(entry.seq, 1)
                return True
            if tried.outcome is not Outcome.REFUSED:
                break
        return False

    async def _send_again(self, seq: int) -> None:
        """Redeliver a rejected entry; if it is rejected again, it is a dead letter."""
        entries, _ = await self._read(seq - 1, seq, 1)
        if not entries:
            raise ChainDamagedError(self.webhook.tenant_id, f"seq {seq}, which a webhook is to be sent again, is gone")
        answer = await self._answer(entries, redelivered=True)
        if answer.outcome is Outcome.GONE:
            await self._stop(answer)
        refusal = answer.said if answer.outcome is Outcome.REFUSED else None
        if refusal is not None:
            await self._services.record(SystemAction.WEBHOOK_DEAD_LETTERED, self.webhook, None, seq=seq, reason=refusal)
        await self._ask(store.settle, seq, refusal)
        self._services.metrics.count("webhook_dead_letters", refusal is not None)
        self._succeeded(refusal is None)

    async def _answer(self, entries: Sequence[ListedEntry], *, redelivered: bool = False) -> Answer:
        """The receiver's answer to the entries; retried while it is away."""
        while (answer := await self._try(entries, redelivered=redelivered)).outcome is Outcome.AWAY:
            await self._failed(answer)
        return answer

    async def _try(self, entries: Sequence[ListedEntry], *, redelivered: bool = False) -> Answer:
        webhook, services = self.webhook, self._services
        if not is_receiver(webhook.url, webhook.format):
            return Answer(
                Outcome.AWAY,
                f"{webhook.url} is no address for a webhook of format {webhook.format}: remove the webhook and add it "
                "again",
            )
        source = f"{services.log_origin}/{webhook.tenant_id}"
        if monotonic() >= self.held_until_s:
            raise NotHeldError(f"webhook {webhook.webhook_id} may be another node's by now")
        if is_syslog_url(webhook.url):
            messages = syslog.framed(webhook.format, entries, source)
            return await syslog.attempt(self._context, webhook.url, messages, self._names, services.networks)
        try:
            secret = services.secret(webhook)
        except LedgerError as error:
            return Answer(Outcome.AWAY, str(error))
        message = message_of(webhook, entries, source, redelivered=redelivered)
        return await sending.attempt(self._client, webhook.url, message, secret, self._names, services.networks)

    async def _confirm(self, seq: int, taken: int, refused: Sequence[int] = (), reason: str = "") -> None:
        await self._ask(store.confirm, seq, refused, reason)
        self._succeeded(taken)

    def _succeeded(self, taken: int) -> None:
        self._services.metrics.count("webhook_entries", taken)
        if self.failing_since is not None:
            log.info("webhook_resumed", webhook_id=self.webhook.webhook_id)
        self.failing_since, self._failures, self._refusals = None, 0, 0

    async def _failed(self, answer: Answer) -> None:
        """Record the failure, and wait before the next attempt."""
        since = await self._ask(store.fail, answer.said)
        if self.failing_since is None:
            log.warning("webhook_interrupted", webhook_id=self.webhook.webhook_id, error=answer.said)
        self.failing_since = since
        self._services.metrics.count("webhook_failures")
        pause_s = min(PAUSE_FIRST_S * 2.0 ** min(self._failures, 30), PAUSE_MAX_S)
        self._failures += 1
        await asyncio.sleep(max(answer.retry_after_s, pause_s * random.uniform(0.5, 1)))  # noqa: S311 (spreads retries)

    async def _stop(self, answer: Answer) -> NoReturn:
        await self._ask(store.stop, answer.said)
        log.warning("webhook_stopped", webhook_id=self.webhook.webhook_id, error=answer.said)
        raise NotHeldError(f"webhook {self.webhook.webhook_id} is stopped")


HOLD_S = 6.0
RENEW_S = 1.0
RENEW_TIMEOUT_S = 2.0
LET_GO_TIMEOUT_S = 0.2
"""Longest that a stop waits for requests, and for PostgreSQL."""
assert RENEW_S + RENEW_TIMEOUT_S < HOLD_S


class Deliveries:
    """Holds webhooks and delivers to them. Belongs to one event loop."""

    def __init__(self, services: WebhookServices, may_hold: Callable[[], bool]) -> None:
        """``may_hold`` returns whether this node can sign; one that cannot leaves webhooks to others."""
        self.changed = asyncio.Event()
        """Set when a webhook is added or resumed, so that its delivery starts immediately."""
        self._services = services
        self._may_hold = may_hold
        self._holder = token_hex(8)
        self._held: dict[str, Delivery] = {}
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
                    self._leave(lambda held: monotonic() >= held.held_until_s)
                await is_set_within(self.changed, RENEW_S)
                self.changed.clear()
        finally:
            tasks = [held.task for held in self._held.values()]
            self._leave(lambda _: True)
            if tasks:
                await asyncio.wait(tasks, timeout=LET_GO_TIMEOUT_S)
            with suppress(DatabaseUnavailableError, *DATABASE_FAULTS):
                await run_in(reading(self._services.pool, timeout_s=LET_GO_TIMEOUT_S), store.let_go, self._holder)

    async def _hold(self) -> None:
        asked_s = monotonic()
        if not self._may_hold():
            self._leave(lambda _: True)
            return
        webhooks = await run_in(
            reading(self._services.pool, timeout_s=RENEW_TIMEOUT_S), store.hold, self._holder, HOLD_S
        )
        if webhooks and self._context is None:
            # It reads the certificate authorities, which takes longer than a turn of the event loop may.
            self._context = await asyncio.to_thread(_context_of, self._services.authorities)
        rows = {webhook.webhook_id: webhook for webhook in webhooks}
        # A webhook without a row may be locked now: its delivery lasts until the hold expires, and detects a removal
        # itself.
        self._leave(
            lambda held: (
                held.task.done()
                or asked_s >= held.held_until_s
                or rows.get(held.webhook.webhook_id, held.webhook) != held.webhook
            )
        )
        for webhook in webhooks:
            if (held := self._held.get(webhook.webhook_id)) is None:
                assert self._context is not None
                held = Delivery(webhook, self._holder, self._services, self._names, self._context)
                held.task = asyncio.create_task(kept_running(held.run))
                self._held[webhook.webhook_id] = held
            held.held_until_s = asked_s + HOLD_S

    def _leave(self, which: Callable[[Delivery], bool]) -> None:
        for webhook_id in [webhook_id for webhook_id, held in self._held.items() if which(held)]:
            self._held.pop(webhook_id).task.cancel()

    def values(self) -> dict[str, float]:
        """Metrics: how many webhooks this node delivers to, and for how many seconds the one that fails longest has."""
        now = datetime.now(UTC)
        failing_s = [(now - held.failing_since).total_seconds() for held in self._held.values() if held.failing_since]
        return {"webhooks_held": len(self._held), "webhook_failing_seconds": max(failing_s, default=0.0)}


def _context_of(authorities: bytes) -> ssl.SSLContext:
    """The TLS context of connections to receivers."""
    context = ssl.create_default_context()
    if authorities:
        context.load_verify_locations(cadata=authorities)
    return context
