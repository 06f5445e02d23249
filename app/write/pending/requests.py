"""Input and output of the write path: events, keys and receipts of requests.

The events of a request of several lines stay in columns from the request to the WAL (``EventLines``). Most lines never
become objects: ``ledger._native.event_lines`` reads, checks and encodes them in canonical form in one pass. Every other
line, and every line with sealed private fields, is a ``Draft`` and in the columns too. A ``Draft`` of a line that was
read is made on demand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import orjson

from app.store.appended import ChainPosition
from ledger import canonical, keyed, private_fields, signed_events
from ledger.chain.record import IdempotencyKey
from ledger.facts.events import ACTOR, JOB_EVENTS, Durability, EventType
from ledger.machines.job_fold import creation_digest
from ledger.positions import Epoch, Lsn
from ledger.private_fields import PRIVATE_MARK, Path
from signing.private_keys import DataKey

LEDGER_ROUTE = 255
"""The route in keyed records of entries that the ledger writes once about itself."""


class FieldSeal(NamedTuple):
    """Encrypts the private values of one event; its key is durable."""

    key: DataKey
    tenant_id: str
    values: Sequence[tuple[Path, bytes]]

    def seal(self, fields: dict[str, object], hlc: str) -> dict[str, object]:
        """``fields`` as stored with an event of this HLC; their size is the same for any HLC."""
        for path, plaintext in self.values:
            associated = private_fields.associated_data(self.tenant_id, hlc, self.key.key_id, path)
            sealed = private_fields.to_json(self.key.seal(plaintext, associated))
            fields = private_fields.with_value(fields, path, sealed)
        return fields


class Draft(NamedTuple):
    """One validated job event that has no identity yet.

    ``fields`` holds the type's own fields as the caller gave them, omitted ones absent.
    ``job_id`` may be None only for JobCreated; the node then makes one.
    ``subject`` owns the private fields; ``seal`` is set if the event has any.
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
        """The sender, None without authentication."""
        actor = self.fields.get(ACTOR)
        return None if actor is None else str(actor)


def draft_of(given: dict[str, Any], event: EventType | None, job_id: str | None, actor: str | None) -> Draft:
    """The event of a checked body ``given`` from ``actor``; ``given`` is consumed."""
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
    """An ``Idempotency-Key`` on one route; ``body_digest`` distinguishes a repeated request from another one.

    ``other_digest`` is the body digest of the same request under another declaration of private fields.
    """

    route: int
    key: str
    body_digest: bytes
    other_digest: bytes | None = None


def line_key(key: RequestKey, line: int) -> IdempotencyKey:
    """The key of one line of a request."""
    return IdempotencyKey(key.route, key.key, line, key.body_digest)


RequestName = tuple[str, int, str]
"""(tenant, route, key) of a keyed request; a request with lines of several tenants has several names."""


class Receipt(NamedTuple):
    """The outcome of one submitted event.

    ``achieved`` is a level that has been reached; ``chain`` is None if the answer was given before chaining. For one
    keyed request every field except ``replayed`` is the same each time.
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
    """The outcome of one NDJSON request; ``job_ids`` are the ids of its JobCreated lines, in order."""

    accepted: int
    requested: Durability
    achieved: Durability
    survives: tuple[str, ...]
    first_hlc: str
    last_hlc: str
    job_ids: list[str]
    epoch: Epoch
    first_lsn: Lsn
    last_lsn: Lsn
    replayed: bool


EVENTS_BY_TYPE: Final = {event.record_type: event for event in JOB_EVENTS.values()}
CREATED: Final = JOB_EVENTS["JobCreated"].record_type

JobOfLine = tuple[str, str | None]
"""(tenant, job id); None for a new job whose id the node makes."""
ReadLines = tuple[
    Sequence[JobOfLine | None],
    Sequence[int],
    Sequence[int | None],
    Sequence[bytes],
    Sequence[int],
    Sequence[int],
    Sequence[str | None],
    Sequence[int],
]
"""The result of ``native.event_lines``; a line without a job is left to Python."""

_FENCE_BEFORE_IT_IS_CHOSEN: Final = 1
"""Placeholder fence in a payload that is encoded before the fence is known; one digit."""


class EventLines:
    """Columns in line order; lines are numbered from 0. ``sources`` are the bytes of the read lines; ``actor`` is the
    sender, None without authentication."""

    def __init__(self, sources: Sequence[bytes] = (), actor: str | None = None) -> None:
        self.jobs: list[JobOfLine] = []
        self.types: list[int] = []
        """Types of WAL records."""
        self.fences: list[int | None] = []
        """Given fence tokens."""
        self.creations: list[str | None] = []
        """``creation_of`` each creation with a caller's id; None for all other lines."""
        self.drafts: dict[int, Draft] = {}
        """Lines that are objects, by number."""
        self.tenants: set[str] = set()
        self.level = Durability.NONE
        """The highest level that a line asks for."""
        self.sources = sources
        self.actor = actor
        self._opening = b"{" if actor is None else b'{"%b":%b,' % (ACTOR.encode(), canonical.encode(actor))
        """First bytes of the payload of each read line, which is encoded without the actor."""
        self._payloads: list[bytes] = []
        self._fence_at: list[int] = []
        self._key_at: list[int] = []
        """Offset in each payload at which the key's member is inserted; ``_fence_at`` is that of the fence."""
        self._signature_at: list[int] = []
        self._signatures: list[bytes] = []
        """Members ``signature`` of all lines, none if they are not signed."""

    @classmethod
    def of(cls, drafts: Sequence[Draft]) -> EventLines:
        """Lines that are all objects."""
        lines = cls()
        lines.extend(len(drafts), None, dict(enumerate(drafts)))
        return lines

    def extend(self, count: int, read: ReadLines | None, drafts: Mapping[int, Draft]) -> None:
        """Add ``count`` lines, numbered from 0 here. Lines that ``read`` does not have, or all without ``read``, are in
        ``drafts``."""
        first = len(self.jobs)
        blank: Any = [None] * count
        jobs, types, fences, payloads, fence_at, key_at, creations, signature_at = read or (blank,) * 8
        self.jobs += jobs  # type: ignore[arg-type]
        self.types += types
        self.fences += fences
        self.creations += creations
        self._payloads += payloads
        self._fence_at += fence_at
        self._key_at += key_at
        self._signature_at += signature_at
        for number, draft in drafts.items():
            self.put(first + number, draft)
        self.tenants.update([job[0] for job in self.jobs[first:]])
        levels = {EVENTS_BY_TYPE[number].durability for number in set(types) - {None}}
        self.level = max([self.level, *levels, *(draft.durability for draft in drafts.values())])

    def put(self, number: int, draft: Draft) -> None:
        """Replace the line with this object."""
        self.drafts[number] = draft
        self.jobs[number] = (draft.tenant_id, draft.job_id)
        self.types[number] = draft.event.record_type
        self.fences[number] = draft.fence_token
        self.creations[number] = creation_of(draft)

    @property
    def are_plain(self) -> bool:
        """Whether all lines were read, and all have a fence or none has."""
        return not self.drafts and self.fences.count(None) in (0, len(self.fences))

    def payloads(self, lines: range, fences: Sequence[int], key: RequestKey | None) -> list[bytes]:
        """The canonical payloads of these lines, none of which MUST be an object."""
        here = slice(lines.start, lines.stop)
        payloads = self._payloads[here]
        # From the back to the front, so that the offsets of what is inserted later hold.
        if self._signatures:
            signed = zip(payloads, self._signature_at[here], self._signatures[here], strict=True)
            payloads = [b"%b%b,%b" % (payload[:at], member, payload[at:]) for payload, at, member in signed]
        if key is not None:
            said = keyed.members([job[0] for job in self.jobs[here]], line_key(key, lines.start))
            members = zip(payloads, self._key_at[here], said, strict=True)
            payloads = [b"%b%b%b" % (payload[:at], member, payload[at:]) for payload, at, member in members]
        if None in self.fences[here] and fences.count(_FENCE_BEFORE_IT_IS_CHOSEN) != len(fences):
            chosen = zip(payloads, self._fence_at[here], self.fences[here], fences, strict=True)
            payloads = [
                payload if given is not None else b"%b%d%b" % (payload[:at], fence, payload[at + 1 :])
                for payload, at, given, fence in chosen
            ]
        if self.actor is None:
            return payloads
        opening = self._opening
        return [opening + payload[1:] for payload in payloads]

    def __len__(self) -> int:
        return len(self.jobs)

    def __getitem__(self, number: int) -> Draft:
        if (draft := self.drafts.get(number)) is not None:
            return draft
        given = orjson.loads(self.sources[number])
        if self._signatures:
            given |= orjson.loads(b"{%b}" % self._signatures[number])
        return draft_of(given, None, None, self.actor)

    def payload(self, number: int, fence_token: int, key: RequestKey | None) -> bytes:
        """The canonical payload of a line; for a line to be sealed, bytes of its final length."""
        if number in self.drafts:
            return payload_of(self.drafts[number], fence_token, None if key is None else line_key(key, number))
        return self.payloads(range(number, number + 1), [fence_token], key)[0]

    @property
    def are_signed(self) -> bool:
        """Whether the caller signed the lines."""
        return bool(self._signatures)

    def type_name(self, number: int) -> str:
        """The name of a line's type."""
        return EVENTS_BY_TYPE[self.types[number]].name

    def signed_payload(self, number: int) -> bytes:
        """What the caller of a line with a fence token signs of its payload."""
        if (draft := self.drafts.get(number)) is None:
            return self._payloads[number]
        return signed_events.signed_payload(
            {"type": draft.event.name, "fence_token": draft.fence_token, **draft.fields}
        )

    def sign(self, members: list[bytes]) -> None:
        """Give all lines their members ``signature``."""
        self._signatures = members
        for number, draft in self.drafts.items():
            self.drafts[number] = draft._replace(fields={**draft.fields, **orjson.loads(b"{%b}" % members[number])})


def payload_of(draft: Draft, fence_token: int, key: IdempotencyKey | None, hlc: str = "") -> bytes:
    """The canonical payload of an event; its private fields are sealed for this HLC."""
    facts = {
        "type": draft.event.name,
        "fence_token": fence_token,
        **(draft.fields if draft.seal is None else draft.seal.seal(draft.fields, hlc)),
    }
    if key is not None:
        facts[keyed.MEMBER] = keyed.key_digest(draft.tenant_id, key)
    return canonical.encode(facts)


def creation_of(draft: Draft) -> str | None:
    """The ``creation_digest`` of ``draft``, if it creates a job with a caller's id; None if sealed values are part of
    it."""
    is_comparable = draft.job_id is not None and draft.event.record_type == CREATED and draft.seal is None
    return _digest_of(draft.fields) if is_comparable else None


def creation_in(payload: bytes) -> str | None:
    """``creation_of`` a creation that waits in the WAL."""
    return None if f'"{PRIVATE_MARK}"'.encode() in payload else _digest_of(orjson.loads(payload))


def _digest_of(fields: Mapping[str, Any]) -> str:
    return creation_digest(fields.get("spec", {}), fields.get("assigned_dcs", []))
