"""What goes into the write path and what comes out of it."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from app.store.appended import ChainPosition
from ledger.facts.events import ACTOR, JOB_EVENTS, Durability, EventType
from ledger.positions import Epoch, Lsn

LEDGER_ROUTE = 255
"""Stands, in keyed records, where other requests have their route: what the ledger writes once about itself."""


class Seal(Protocol):
    """Encrypts the private fields of one event; its key is durable."""

    def seal(self, fields: dict[str, object], hlc: str, /) -> dict[str, object]:
        """``fields`` as they are stored with an event of this HLC; they take the same room with any HLC."""
        ...


class Draft(NamedTuple):
    """One validated job event that has no identity yet.

    ``fields`` holds the type's own fields as the caller gave them, omitted ones absent.
    ``job_id`` may be None only for JobCreated; the node then makes one.
    ``subject`` says whose private fields these are; ``seal`` is there when the event has some.
    """

    tenant_id: str
    job_id: str | None
    event: EventType
    fields: dict[str, object]
    fence_token: int | None
    durability: Durability
    subject: str | None = None
    seal: Seal | None = None

    @property
    def actor(self) -> str | None:
        """Who sent it, None where nobody is known."""
        actor = self.fields.get(ACTOR)
        return None if actor is None else str(actor)


def draft_of(given: dict[str, Any], event: EventType | None, job_id: str | None, actor: str | None) -> Draft:
    """The event that a checked body ``given`` of ``actor`` describes; ``given`` is used up."""
    if actor is not None:
        given[ACTOR] = actor
    if event is None:
        event = JOB_EVENTS[given.pop("type")]
    tenant_id = given.pop("tenant_id")
    level = given.pop("durability", None)
    subject = given.pop("subject", None)
    return Draft(
        tenant_id,
        job_id or given.pop("job_id", None),
        event,
        given,
        given.pop("fence_token", None),
        event.durability if level is None else Durability[level],
        subject,
    )


class RequestKey(NamedTuple):
    """An ``Idempotency-Key`` on one route; ``body_digest`` tells the same request from another.

    ``other_digest`` is how the same request was told apart while the tenant's private fields were others.
    """

    route: int
    key: str
    body_digest: bytes
    other_digest: bytes | None = None


RequestName = tuple[str, int, str]
"""(tenant, route, key): what a keyed request is known by; one with lines of several tenants has several names."""


class Receipt(NamedTuple):
    """The outcome of one submitted event.

    ``achieved`` is a level that has been reached when this exists; ``chain`` is None when the answer
    was given before chaining. For one keyed request every field but ``replayed`` is the same each time.
    """

    job_id: str
    tenant_id: str
    event: EventType
    hlc: str
    epoch: Epoch
    lsn: Lsn
    fence_token: int
    requested: Durability
    achieved: Durability
    survives: tuple[str, ...]
    chain: ChainPosition | None
    replayed: bool


class BatchReceipt(NamedTuple):
    """The outcome of one NDJSON request; ``job_ids`` are those of its JobCreated lines, in order."""

    accepted: int
    requested: Durability
    achieved: Durability
    survives: tuple[str, ...]
    first_hlc: str
    last_hlc: str
    job_ids: list[str]
    epoch: Epoch
    last_lsn: Lsn
    replayed: bool


class Drafts(Protocol):
    """The events of one request, each as an object when it is asked for."""

    def __len__(self) -> int: ...
    def __getitem__(self, number: int, /) -> Draft: ...
