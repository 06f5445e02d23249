"""What goes into the write path and what comes out of it: events, keys and receipts of requests.

The events of a request of several lines are kept in columns from the request to the WAL (``EventLines``). A line like
most is never an object: ``ledger._native.event_lines`` reads, checks and writes it in canonical form in one pass. Any
other is a ``Draft``, and in the columns too; so is a line whose private fields are sealed. A caller that needs a draft
of a line that was read gets one, made then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import orjson

from app.store.appended import ChainPosition
from ledger import canonical, keyed, private_fields
from ledger.chain.record import IdempotencyKey
from ledger.facts.events import ACTOR, JOB_EVENTS, Durability, EventType
from ledger.machines.job_fold import creation_digest
from ledger.positions import Epoch, Lsn
from ledger.private_fields import PRIVATE_MARK, Path
from signing.private_keys import DataKey

LEDGER_ROUTE = 255
"""Stands, in keyed records, where other requests have their route: what the ledger writes once about itself."""


class FieldSeal(NamedTuple):
    """Encrypts the private values of one event; its key is durable."""

    key: DataKey
    tenant_id: str
    values: Sequence[tuple[Path, bytes]]

    def seal(self, fields: dict[str, object], hlc: str) -> dict[str, object]:
        """``fields`` as they are stored with an event of this HLC; they take the same room with any HLC."""
        for path, plaintext in self.values:
            associated = private_fields.associated_data(self.tenant_id, hlc, self.key.key_id, path)
            sealed = private_fields.to_json(self.key.seal(plaintext, associated))
            fields = private_fields.with_value(fields, path, sealed)
        return fields


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
    seal: FieldSeal | None = None

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
    level = given.pop("durability", None)
    return Draft(
        given.pop("tenant_id"),
        job_id or given.pop("job_id", None),
        event,
        given,
        given.pop("fence_token", None),
        event.durability if level is None else Durability[level],
        given.pop("subject", None),
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


EVENTS_BY_TYPE: Final = {event.record_type: event for event in JOB_EVENTS.values()}
CREATED: Final = JOB_EVENTS["JobCreated"].record_type

JobOfLine = tuple[str, str | None]
"""(tenant, job id); no id of a job that is to be created under one that the node makes."""
ReadLines = tuple[
    Sequence[JobOfLine | None],
    Sequence[int],
    Sequence[int | None],
    Sequence[bytes],
    Sequence[int],
    Sequence[int],
    Sequence[str | None],
]
"""What ``native.event_lines`` answers; a line without a job was left to Python."""

_FENCE_BEFORE_IT_IS_CHOSEN: Final = 1
"""What a payload says that was written first; one digit."""


class EventLines:
    """Columns in the order of the lines, which count from 0. ``sources`` is what was sent, of lines that are read;
    ``actor`` sent it, None where nobody is known."""

    def __init__(self, sources: Sequence[bytes] = (), actor: str | None = None) -> None:
        self.jobs: list[JobOfLine] = []
        self.types: list[int] = []
        """Types of WAL records."""
        self.fences: list[int | None] = []
        """Fence tokens, where they were given."""
        self.creations: list[str | None] = []
        """As ``creation_of``, of creations under an id that others may use too; None of all other lines."""
        self.drafts: dict[int, Draft] = {}
        """Lines that are objects, by number."""
        self.tenants: set[str] = set()
        self.level = Durability.NONE
        """The highest level that a line asks for."""
        self.sources = sources
        self.actor = actor
        self._opening = b"{" if actor is None else b'{"%b":%b,' % (ACTOR.encode(), canonical.encode(actor))
        """What the payload of a line that was read begins with; it was written without the actor."""
        self._payloads: list[bytes] = []
        self._fence_at: list[int] = []
        self._key_at: list[int] = []
        """Where in its payload the fence of a line stands, and where the member of its key would."""

    @classmethod
    def of(cls, drafts: Sequence[Draft]) -> EventLines:
        """Lines that are objects all."""
        lines = cls()
        lines.extend(len(drafts), None, dict(enumerate(drafts)))
        return lines

    def extend(self, count: int, read: ReadLines | None, drafts: Mapping[int, Draft]) -> None:
        """Take ``count`` lines more, which count from 0 here. Those that ``read`` does not have, or all without it, are
        in ``drafts``."""
        first = len(self.jobs)
        blank: Any = [None] * count
        jobs, types, fences, payloads, fence_at, key_at, creations = read or (blank,) * 7
        self.jobs += jobs  # type: ignore[arg-type]
        self.types += types
        self.fences += fences
        self.creations += creations
        self._payloads += payloads
        self._fence_at += fence_at
        self._key_at += key_at
        for number, draft in drafts.items():
            self.put(first + number, draft)
        self.tenants.update([job[0] for job in self.jobs[first:]])
        levels = {EVENTS_BY_TYPE[number].durability for number in set(types) - {None}}
        self.level = max([self.level, *levels, *(draft.durability for draft in drafts.values())])

    def put(self, number: int, draft: Draft) -> None:
        """The line is this object from now on."""
        self.drafts[number] = draft
        self.jobs[number] = (draft.tenant_id, draft.job_id)
        self.types[number] = draft.event.record_type
        self.fences[number] = draft.fence_token
        self.creations[number] = creation_of(draft)

    @property
    def are_plain(self) -> bool:
        """Whether all lines were read, and none names a fence."""
        return not self.drafts and self.fences.count(None) == len(self.fences)

    def payloads(self, lines: range, fences: Sequence[int]) -> list[bytes]:
        """``payload`` of these lines, without keys, where all lines ``are_plain``."""
        if fences.count(_FENCE_BEFORE_IT_IS_CHOSEN) != len(fences):
            return [self.payload(number, fence, None) for number, fence in zip(lines, fences, strict=True)]
        payloads = self._payloads[lines.start : lines.stop]
        if self.actor is None:
            return payloads
        opening = self._opening
        return [opening + payload[1:] for payload in payloads]

    def __len__(self) -> int:
        return len(self.jobs)

    def __getitem__(self, number: int) -> Draft:
        return self.drafts.get(number) or draft_of(orjson.loads(self.sources[number]), None, None, self.actor)

    def payload(self, number: int, fence_token: int, key: IdempotencyKey | None) -> bytes:
        """The canonical payload of a line; of one that is to be sealed, as long as it will be."""
        if number in self.drafts:
            return payload_of(self.drafts[number], fence_token, key)
        payload = self._payloads[number]
        if key is not None:
            at = self._key_at[number]
            said = b'"%b":"%b",' % (keyed.MEMBER.encode(), keyed.key_digest(self.jobs[number][0], key).encode())
            payload = payload[:at] + said + payload[at:]
        if self.fences[number] is None and fence_token != _FENCE_BEFORE_IT_IS_CHOSEN:
            at = self._fence_at[number]
            payload = payload[:at] + b"%d" % fence_token + payload[at + 1 :]
        return payload if self.actor is None else self._opening + payload[1:]


def payload_of(draft: Draft, fence_token: int, key: IdempotencyKey | None, hlc: str = "") -> bytes:
    """The canonical payload of an event; what is private in it is sealed for an event of this HLC."""
    fields = draft.fields if draft.seal is None else draft.seal.seal(draft.fields, hlc)
    facts = {"type": draft.event.name, "fence_token": fence_token, **fields}
    if key is not None:
        facts[keyed.MEMBER] = keyed.key_digest(draft.tenant_id, key)
    return canonical.encode(facts)


def creation_of(draft: Draft) -> str | None:
    """The ``creation_digest`` of what ``draft`` says of its job, where it creates one under an id that others may use
    too; None where sealed values are part of it."""
    is_comparable = draft.job_id is not None and draft.event.record_type == CREATED and draft.seal is None
    return _digest_of(draft.fields) if is_comparable else None


def creation_in(payload: bytes) -> str | None:
    """As ``creation_of``, of a creation that waits in the WAL."""
    is_sealed = f'"{PRIVATE_MARK}"'.encode() in payload
    return None if is_sealed else _digest_of(orjson.loads(payload))


def _digest_of(fields: Mapping[str, Any]) -> str:
    return creation_digest(fields.get("spec", {}), fields.get("assigned_dcs", []))
