"""Checks rows of the idempotency table against chained entries, which record their Idempotency-Key (``ledger.keyed``).

The table is not part of the chain, so its rows prove nothing. A changed or copied row would answer a request with
another event. So the entry that a row names is compared with the request: its key and its event. If private fields were
encrypted, only type and job of the event can be compared.

A removed row would let its request be recorded twice. So a request without a row is searched among the keyed entries in
memory before it is taken as new::

    newest KEYED_MAX keyed entries that this node followed since its start, of all tenants
    and those among the last ENTRIES_READ of a tenant, or ENTRIES_READ_BYTES, read with its first keyed request

Rows are kept ``RETENTION_DAYS`` by the clock of PostgreSQL, and a restore brings entries back without them. So an entry
is no evidence for a missing row if it is about that old, in the future, or was followed long after it was written.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from typing import Final

import msgspec
import orjson

from app.runtime.sharing import in_turns
from app.runtime.tasks import keep_newest
from app.store.following import FollowedEntry
from app.store.idempotency import ENTRIES_READ, RETENTION_DAYS, ChainedLine, KeyedEntry, NamedEntry, key_row_error
from app.write.pending.backlog import Pending
from app.write.pending.requests import LEDGER_ROUTE, Draft, EventLines, RequestKey, RequestName
from ledger import canonical, keyed
from ledger.chain.record import IdempotencyKey
from ledger.decoding import decoder_of
from ledger.errors import KeyRowError, LedgerError, ProblemError
from ledger.facts.events import ACTIONS, ACTOR, TRACEPARENT
from ledger.facts.problems import IDEMPOTENCY_KEY_UNPROVEN
from ledger.hlc import Hlc
from ledger.signed_events import MEMBER as SIGNATURE

KEYED_MAX: Final = 50_000
"""Keyed entries that are remembered, some 200 bytes each; the oldest is evicted first."""
TENANTS_MAX: Final = 10_000
"""Tenants whose last entries were read; the oldest is evicted first."""
KEPT_MS: Final = (RETENTION_DAYS - 1) * 86_400_000
"""Greatest age of an entry whose row must exist: clocks of nodes and of PostgreSQL may differ by a day."""
AHEAD_MS: Final = 60_000
"""How far the clock of the node that wrote an entry may be ahead of this one's."""
FOLLOWED_WITHIN_MS: Final = 3_600_000
"""Greatest age of an entry when it is followed: older ones may have been restored."""

_MARK: Final = f'"{keyed.MEMBER}":"'
_UNREADABLE: Final = (LedgerError, ValueError, TypeError, KeyError, AttributeError)
"""Errors that an edited entry may raise."""
assert ENTRIES_READ <= KEYED_MAX


class _Keyed(msgspec.Struct):
    """The one member of a payload that is read, which takes a third of the time of reading all."""

    idempotency: str | None = None


_KEYED: Final = decoder_of(_Keyed)
assert _Keyed.__struct_fields__ == (keyed.MEMBER,)


class KeyedEntries:
    """The keyed entries in memory of one node; belongs to its event loop."""

    def __init__(self, load: Callable[[str], Awaitable[Sequence[KeyedEntry]]], now_ms: Callable[[], int]) -> None:
        """``load`` reads the keyed entries among the last ones of a tenant."""
        self._load = load
        self._now_ms = now_ms
        self._known: OrderedDict[str, KeyedEntry] = OrderedDict()
        """By key digest, which covers the tenant too."""
        self._loaded: OrderedDict[str, None] = OrderedDict()
        self._loading = asyncio.Lock()
        """Held by the request that reads entries; other requests wait for its result."""

    async def seq_of(self, tenant_id: str, digests: Iterable[str]) -> int | None:
        """Seq of the tenant's entry with one of these key digests; None if no known entry must have a row."""
        if tenant_id not in self._loaded:
            async with self._loading:
                for entry in await self._load(tenant_id) if tenant_id not in self._loaded else ():
                    self._note(entry)
                keep_newest(self._loaded, tenant_id, None, TENANTS_MAX)
        now_ms = self._now_ms()
        entries = [entry for entry in map(self._known.get, digests) if entry is not None]
        return next((each.seq for each in entries if -KEPT_MS < each.hlc_physical - now_ms < AHEAD_MS), None)

    def followed(self, entries: Mapping[str, Sequence[FollowedEntry]]) -> None:
        """Take the followed entries of each tenant. Imported entries are skipped: their keys are of another ledger."""
        oldest_ms = self._now_ms() - FOLLOWED_WITHIN_MS
        for of_tenant in entries.values():
            for entry in of_tenant:
                if entry.origin is None and entry.hlc_physical.__class__ is int and entry.hlc_physical > oldest_ms:
                    self._note(KeyedEntry(entry.seq, entry.hlc_physical, _digest_in(entry.payload)))

    def _note(self, entry: KeyedEntry) -> None:
        if entry.digest is not None:
            keep_newest(self._known, entry.digest, entry, KEYED_MAX)


def _digest_in(payload: object) -> str | None:
    """The key digest in the payload of an entry; None if it has none."""
    if not isinstance(payload, str) or _MARK not in payload:
        return None
    try:
        return _KEYED.decode(payload).idempotency
    except msgspec.DecodeError:
        return None


async def check_lines(chained: Sequence[ChainedLine], drafts: EventLines | Sequence[Draft], key: RequestKey) -> None:
    """Return if the entry of each line is the event of its draft.

    Raises:
        KeyRowError: names the first line that is not, that the request does not have, or whose row holds a value that
            this service never writes.
        ProblemError: the entry may be the event, but records no key.
    """
    async for line in in_turns(chained):
        if not 0 <= line.line < len(drafts):
            raise key_row_error(
                line.tenant_id, key.key, line.seq, f"is of line {line.line}, and the request has {len(drafts)} lines"
            )
        event = None
        with suppress(*_UNREADABLE):
            event = _event_of(line, drafts[line.line], key)
        if event is None:
            raise key_row_error(
                line.tenant_id,
                key.key,
                line.seq,
                f"names seq {line.seq}, whose entry is not the event of this request",
            )
        if keyed.digest_in(orjson.loads(event.payload)) is None:
            raise ProblemError(
                IDEMPOTENCY_KEY_UNPROVEN,
                f"Idempotency-Key {key.key!r} was used before, it seems for seq {line.seq}, job {event.job_id}: that "
                "entry is from before entries said their key, so nothing proves it. Nothing was stored now: take that "
                "job for the outcome if it is yours, else send the request under a new key",
            )


def is_bound(line: ChainedLine, key: RequestName, of_request: Mapping[int, Pending]) -> bool:
    """Whether the entry that a row of the request ``key`` names belongs to it, and so decides about the records
    ``of_request``, by line.

    An entry records its key. An entry older than this rule is accepted if it equals the event of its line, or if the
    records have no key either: they come from the same WAL, which is trusted. An entry at the HLC of a record must
    equal that record, else it is forged.
    """
    pending = of_request.get(line.line)
    try:
        if (event := keyed.kept_event(line.job_id, line.action, line.payload)) is None:
            return False
        if pending is not None and pending.hlc.text() == line.t_hlc:
            return event == (pending.job_id, ACTIONS[pending.record_type], pending.payload.decode())
        facts, (tenant_id, route, name) = orjson.loads(event.payload), key
        if route == LEDGER_ROUTE:
            # An entry of the ledger about itself has the key of its subject and its facts.
            del facts["type"]
            digest_of_facts = sha256(canonical.encode(facts)).digest()
            return (name, line.body_digest) == (f"{event.action}:{event.job_id}", digest_of_facts)
        if (digest := keyed.digest_in(facts)) is not None:
            return digest == keyed.key_digest(tenant_id, IdempotencyKey(route, name, line.line, line.body_digest))
        if pending is not None:
            return _is_same_fact(event, Hlc.parse(line.t_hlc), pending)
        return all(keyed.digest_in(orjson.loads(each.payload)) is None for each in of_request.values())
    except _UNREADABLE:
        return False


def _is_same_fact(event: keyed.KeptEvent, hlc: Hlc, pending: Pending) -> bool:
    """Whether an entry without a key equals ``pending`` except for the key."""
    facts = orjson.loads(pending.payload)
    facts.pop(keyed.MEMBER, None)
    is_job = event.job_id == pending.job_id or (
        _is_made_at(event.job_id, hlc) and _is_made_at(pending.job_id, pending.hlc)
    )
    return is_job and (event.action, event.payload) == (ACTIONS[pending.record_type], canonical.encode(facts).decode())


def _is_made_at(job_id: str, hlc: Hlc) -> bool:
    """Whether a node made the id for a job created at ``hlc``."""
    return job_id.endswith(f"-{hlc.logical:05d}") and f"-{hlc.physical_ms}-" in job_id


def proven(line: ChainedLine, key: RequestKey) -> ChainedLine:
    """``line`` with the body digest of its entry, as that of the row may be false. If an old entry has no key, the line
    is returned unchanged.

    Raises:
        KeyRowError: the entry has another key.
    """
    if (said := _said_by(line)) is None:
        return line
    for body_digest in (line.body_digest, key.body_digest, key.other_digest):
        if body_digest is not None and said == key_digest_of(line.tenant_id, key, line.line, body_digest):
            return line._replace(body_digest=body_digest)
    raise key_row_error(
        line.tenant_id,
        key.key,
        line.seq,
        f"names seq {line.seq}, whose entry came with another key or body than the row says",
    )


def are_rows_whole(tenant_id: str, named: Iterable[NamedEntry], now_ms: int) -> bool:
    """Whether each row names its own entry, and each entry that must have a row has one."""
    for each in named:
        said = _said_by(each)
        if each.key is not None and said != keyed.key_digest(tenant_id, each.key):
            return False
        if each.key is None and said is not None and (each.hlc_physical or 0) > now_ms - KEPT_MS:
            return False
    return True


def _said_by(entry: ChainedLine | NamedEntry) -> str | None:
    """The key digest of an entry; None if it has none or is unreadable."""
    try:
        event = keyed.kept_event(entry.job_id, entry.action, entry.payload)
        return None if event is None else keyed.digest_in(orjson.loads(event.payload))
    except _UNREADABLE:
        return None


def key_digest_of(tenant_id: str, key: RequestKey, line: int, body_digest: bytes) -> str:
    """The key digest that the event of this line records."""
    return keyed.key_digest(tenant_id, IdempotencyKey(key.route, key.key, line, body_digest))


def row_gone(tenant_id: str, key: RequestKey, seq: int) -> KeyRowError:
    """The error when the chain holds the event of a line, but the table has no row for it."""
    return key_row_error(
        tenant_id, key.key, seq, f"that the entry at seq {seq} came with is gone", "; nothing was stored now"
    )


def gone(tenant_id: str, key: RequestKey) -> KeyRowError:
    """The error when chained lines are no longer in the table."""
    return key_row_error(tenant_id, key.key, 0, "is gone")


def _event_of(line: ChainedLine, draft: Draft, key: RequestKey) -> keyed.KeptEvent | None:
    """The event of the entry of ``line``, if it matches ``draft`` and records ``key`` or no key."""
    event = keyed.kept_event(line.job_id, line.action, line.payload)
    if event is None or line.epoch <= 0 or line.lsn <= 0 or line.tenant_id != draft.tenant_id:
        return None
    is_job = _is_made_at(event.job_id, Hlc.parse(line.t_hlc)) if draft.job_id is None else event.job_id == draft.job_id
    if event.action != draft.event.action or not is_job:
        return None
    facts = orjson.loads(event.payload)
    said = {} if keyed.digest_in(facts) is None else {keyed.MEMBER: facts[keyed.MEMBER]}
    digest = keyed.key_digest(line.tenant_id, IdempotencyKey(key.route, key.key, line.line, line.body_digest))
    if said not in ({}, {keyed.MEMBER: digest}):
        return None
    if draft.seal is not None or line.body_digest != key.body_digest:
        return event if facts["type"] == draft.event.name else None
    asked = {"type": draft.event.name, "fence_token": facts["fence_token"], **draft.fields, **said}
    # Any client that may write for the tenant may repeat the request, in any span; the event keeps its first of both.
    for member in (ACTOR, TRACEPARENT):
        asked.pop(member, None)
        asked |= {member: facts[member]} if member in facts else {}
    # So may a caller that signs it again: the event keeps its first signature.
    asked |= {SIGNATURE: facts[SIGNATURE]} if SIGNATURE in facts and SIGNATURE in asked else {}
    return event if canonical.encode(asked).decode() == event.payload else None
