"""Registering, listing and removing webhooks, each change on record in ``_system`` before it is made."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from secrets import token_hex
from typing import NamedTuple

from app.runtime.metrics import Metrics
from app.runtime.principals import Principal, Right
from app.runtime.settings.types import IpNetwork
from app.share.webhooks.delivery import Deliveries, DeliveryServices, Follow
from app.share.webhooks.sending import context_of_secret
from app.store import webhooks as store
from app.store.entry_check import EntryCheck
from app.store.reading import Pool, reading
from app.store.webhooks import DeadLetter, ListedWebhook, Webhook
from app.trust.subject_keys import SubjectKeys
from ledger.errors import InvalidInputError, NotFoundError
from ledger.facts.events import ACTOR, SystemAction

WEBHOOKS_MAX = 256
"""Webhooks of a ledger: a node may have to deliver to all of them, with a message of each in memory."""
WEBHOOKS_OF_TENANT_MAX = 16

_is_id = re.compile("[0-9a-f]{16}").fullmatch

Note = Callable[[SystemAction, str, dict[str, object]], Awaitable[None]]


class ShownWebhook(NamedTuple):
    """A webhook, and the first entries that it refused."""

    webhook: ListedWebhook
    refused: Sequence[DeadLetter]


@dataclass(eq=False, kw_only=True)
class WebhookRegistry:
    """Knows the webhooks of the ledger, and ``deliveries`` to those that this node holds. ``note`` writes an entry of
    ``_system``, ``follow`` is as ``Delivery`` has it."""

    pool: Pool
    check: EntryCheck
    keys: SubjectKeys
    note: Note
    follow: Follow
    networks: Sequence[IpNetwork]
    metrics: Metrics
    report: Callable[[BaseException, str], object]
    """Is given each error that says that stored rows are damaged, and the part that met it."""

    def __post_init__(self) -> None:
        services = DeliveryServices(
            pool=self.pool,
            check=self.check,
            secret=self.secret,
            bury=self.bury,
            follow=self.follow,
            networks=self.networks,
            metrics=self.metrics,
            report=self.report,
        )
        self.deliveries = Deliveries(services, may_hold=lambda: self.keys.is_usable)
        self.metrics.read(self.deliveries.values)

    def secret(self, webhook: Webhook) -> bytes:
        """What messages to the webhook are signed with: 32 bytes.

        Raises:
            PrivacyUnavailableError: this node does not have the ledger's master key.
        """
        return self.keys.derived(context_of_secret(webhook))

    async def add(self, webhook: Webhook, from_seq: int | None, by: Principal) -> tuple[ShownWebhook, bytes]:
        """Register a receiver of what comes from ``from_seq`` on, and its secret.

        Raises:
            InvalidInputError: there are as many as there may be.
            PrivacyUnavailableError: this node does not have the ledger's master key.
            DatabaseUnavailableError: PostgreSQL cannot be reached.
            LedgerError: as ``SystemEntries.note``.
        """
        async with reading(self.pool) as connection:
            await self.keys.begin(connection)
        secret = self.secret(webhook)
        more = {"url": webhook.url, "actions": webhook.actions, "job": webhook.job, "from_seq": from_seq}
        bounds = {"most": WEBHOOKS_MAX, "most_of_tenant": WEBHOOKS_OF_TENANT_MAX}
        async with reading(self.pool) as connection, connection.transaction():
            if not await store.add(connection, webhook, from_seq, by.id, **bounds):
                raise InvalidInputError(
                    f"a tenant may have {WEBHOOKS_OF_TENANT_MAX} webhooks, the ledger {WEBHOOKS_MAX}: remove one first"
                )
            await self._note(SystemAction.WEBHOOK_ADDED, webhook.webhook_id, webhook.tenant_id, by.id, **more)
        self.deliveries.changed.set()
        return await self.find(webhook.webhook_id, by), secret

    async def listed(self, tenant_id: str) -> list[ShownWebhook]:
        """The tenant's webhooks, the first one first."""
        async with reading(self.pool) as connection:
            found = await store.listed(connection, tenant_id)
            return [ShownWebhook(each, await store.dead_letters(connection, each.webhook_id)) for each in found]

    async def find(self, webhook_id: str, by: Principal) -> ShownWebhook:
        """One webhook.

        Raises:
            NotFoundError: there is none of this id that the caller may administer.
        """
        async with reading(self.pool) as connection:
            found = await store.find(connection, webhook_id) if _is_id(webhook_id) else None
            if found is None or not by.may(Right.ADMIN, found.tenant_id):
                raise NotFoundError(f"there is no webhook {webhook_id}")
            return ShownWebhook(found, await store.dead_letters(connection, webhook_id))

    async def remove(self, webhook_id: str, by: Principal) -> ShownWebhook:
        """Deliver nothing more to the webhook, and forget it; as it was.

        Raises:
            NotFoundError: as ``find``.
            LedgerError: as ``SystemEntries.note``.
        """
        shown = await self.find(webhook_id, by)
        await self._note(SystemAction.WEBHOOK_REMOVED, webhook_id, shown.webhook.tenant_id, by.id)
        async with reading(self.pool) as connection:
            await store.remove(connection, webhook_id)
        return shown

    async def send_again(self, webhook_id: str, by: Principal) -> ShownWebhook:
        """Deliver what the webhook refused once more, and go on if it was stopped.

        Raises:
            NotFoundError: as ``find``.
        """
        await self.find(webhook_id, by)
        async with reading(self.pool) as connection:
            await store.send_again(connection, webhook_id)
        self.deliveries.changed.set()
        return await self.find(webhook_id, by)

    async def bury(self, webhook: Webhook, seq: int, reason: str) -> None:
        """Put on record that the webhook refused this entry and takes others.

        Raises:
            LedgerError: as ``SystemEntries.note``; then it is no dead letter.
        """
        action = SystemAction.WEBHOOK_DEAD_LETTERED
        await self._note(action, webhook.webhook_id, webhook.tenant_id, None, seq=seq, reason=reason)

    async def _note(
        self, action: SystemAction, webhook_id: str, tenant_id: str, actor: str | None, **more: object
    ) -> None:
        facts = {ACTOR: actor, "webhook_id": webhook_id, "tenant_id": tenant_id, **more}
        given = {name: value for name, value in facts.items() if value is not None}
        await self.note(action, f"webhook:{webhook_id}", given)


def new_webhook(tenant_id: str, url: str, actions: Sequence[str] | None, job: str | None) -> Webhook:
    """A webhook under a new id; ``actions`` in order and once each."""
    return Webhook(token_hex(8), tenant_id, url, sorted(set(actions)) if actions else None, job)
