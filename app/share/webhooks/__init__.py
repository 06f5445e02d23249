"""Registering, listing, pausing, replaying and removing webhooks. Each change is recorded in ``_system`` before it is
made."""

from __future__ import annotations

import re
from collections.abc import Sequence
from secrets import token_hex

from app.runtime.principals import Principal, Right
from app.share.webhooks.delivery import Deliveries, WebhookServices
from app.share.webhooks.formats import is_receiver
from app.store import webhooks as store
from app.store.reading import reading, run_in
from app.store.webhooks import ShownWebhook, Webhook
from ledger.errors import InvalidInputError, NotFoundError
from ledger.facts.events import SystemAction

WEBHOOKS_MAX = 256
"""Webhooks of a ledger: one node may have to deliver to all, with a message of each in memory."""
WEBHOOKS_OF_TENANT_MAX = 16

_is_id = re.compile("[0-9a-f]{16}").fullmatch


class WebhookRegistry:
    """The webhooks of the ledger, and ``deliveries`` to those that this node holds."""

    def __init__(self, services: WebhookServices) -> None:
        self._services = services
        self.deliveries = Deliveries(services, may_hold=lambda: services.keys.is_usable)
        services.metrics.read(self.deliveries.values)

    async def add(self, webhook: Webhook, from_seq: int | None, by: Principal) -> tuple[ShownWebhook, bytes]:
        """Register a receiver of entries from ``from_seq`` on; returns it and its secret.

        Raises:
            ArchivedError: that entry has left.
            InvalidInputError: the ledger has its maximum of webhooks.
            PrivacyUnavailableError: this node does not have the ledger's master key.
            DatabaseUnavailableError: PostgreSQL cannot be reached.
            LedgerError: as ``SystemEntries.note``.
        """
        async with reading(self._services.pool) as connection:
            if from_seq is not None:
                await self._services.retention.refuse_left(connection, webhook.tenant_id, from_seq)
            await self._services.keys.begin(connection)
        secret = self._services.secret(webhook)
        async with reading(self._services.pool) as connection, connection.transaction():
            if not await store.add(
                connection, webhook, from_seq, by.id, most=WEBHOOKS_MAX, most_of_tenant=WEBHOOKS_OF_TENANT_MAX
            ):
                raise InvalidInputError(
                    f"a tenant may have {WEBHOOKS_OF_TENANT_MAX} webhooks, the ledger {WEBHOOKS_MAX}: remove one first"
                )
            await self._services.record(
                SystemAction.WEBHOOK_ADDED,
                webhook,
                by.id,
                url=webhook.url,
                actions=webhook.actions,
                job=webhook.job,
                format=webhook.format,
                from_seq=from_seq,
            )
        self.deliveries.changed.set()
        return await self.find(webhook.webhook_id, by), secret

    async def listed(self, tenant_id: str) -> list[ShownWebhook]:
        """The tenant's webhooks, oldest first."""
        return await run_in(reading(self._services.pool), store.shown, tenant_id=tenant_id)

    async def find(self, webhook_id: str, by: Principal) -> ShownWebhook:
        """One webhook.

        Raises:
            NotFoundError: the caller may administer no webhook of this id.
        """
        async with reading(self._services.pool) as connection:
            found = await store.shown(connection, webhook_id=webhook_id) if _is_id(webhook_id) else []
        if not found or not by.may(Right.ADMIN, found[0].webhook.tenant_id):
            raise NotFoundError(f"there is no webhook {webhook_id}")
        return found[0]

    async def remove(self, webhook_id: str, by: Principal) -> ShownWebhook:
        """Stop deliveries to the webhook and delete it; returns it as it was.

        Raises:
            NotFoundError: as ``find``.
            LedgerError: as ``SystemEntries.note``.
        """
        shown = await self.find(webhook_id, by)
        await self._services.record(SystemAction.WEBHOOK_REMOVED, shown.webhook, by.id)
        await run_in(reading(self._services.pool), store.remove, webhook_id)
        return shown

    async def resume(self, webhook_id: str, by: Principal, *, with_dead_letters: bool) -> ShownWebhook:
        """Resume the webhook if it was stopped or paused, and redeliver the entries that it rejected if asked.

        Raises:
            NotFoundError: as ``find``.
            ArchivedError: an entry that it is to be sent has left since it was stopped.
        """
        found = await self.find(webhook_id, by)
        async with reading(self._services.pool) as connection:
            again = [each.seq for each in found.refused if with_dead_letters or each.is_again]
            first_seq = min([*again, found.delivered_seq + 1])
            await self._services.retention.refuse_left(connection, found.webhook.tenant_id, first_seq)
            await store.resume(connection, webhook_id, with_dead_letters=with_dead_letters)
        self.deliveries.changed.set()
        return await self.find(webhook_id, by)

    async def pause(self, webhook_id: str, by: Principal) -> ShownWebhook:
        """Deliver nothing to the webhook until it is resumed; a message that is being sent may still arrive.

        Raises:
            NotFoundError: as ``find``.
        """
        await self.find(webhook_id, by)
        await run_in(reading(self._services.pool), store.pause, webhook_id)
        return await self.find(webhook_id, by)

    async def replay(self, webhook_id: str, from_seq: int, by: Principal) -> ShownWebhook:
        """Deliver all entries from ``from_seq`` on again, which the webhook's position has passed; while the webhook is
        stopped, once it is resumed.

        Raises:
            NotFoundError: as ``find``.
            InvalidInputError: the position is before that entry.
            ArchivedError: that entry has left.
        """
        found = await self.find(webhook_id, by)
        if from_seq > found.delivered_seq:
            raise InvalidInputError(
                f"from_seq: up to {found.delivered_seq} is delivered, so there is nothing to deliver again",
                ("from_seq",),
            )
        async with reading(self._services.pool) as connection:
            await self._services.retention.refuse_left(connection, found.webhook.tenant_id, from_seq)
            await store.replay(connection, webhook_id, from_seq)
        return await self.find(webhook_id, by)


def new_webhook(tenant_id: str, url: str, actions: Sequence[str] | None, job: str | None, form: str) -> Webhook:
    """A webhook under a new id; ``actions`` in order and once each.

    Raises:
        InvalidInputError: entries cannot be delivered there in this format.
    """
    if not is_receiver(url, form):
        raise InvalidInputError(f"format: a message of syslog is one entry, so {form} is not for it", ("format",))
    return Webhook(token_hex(8), tenant_id, url, sorted(set(actions)) if actions else None, job, form)
