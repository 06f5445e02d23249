"""Turning a batch of pending events into rows of the log, in memory, before Postgres sees any of it.

Decides duplicates, assigns ``seq``, links, and merges job state. A pure function of the batch, the locked
heads, the keys already chained and the stored job states; the appender runs it inside its transaction.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import orjson

from app.store.chaining import ChainHead
from app.store.notary import LinkRow
from app.write.backlog import Pending
from app.write.requests import ChainPosition
from ledger import canonical, jobs
from ledger.chain import LINK_VERSION, Linker
from ledger.errors import IdempotencyReusedError, LedgerError
from ledger.events import ACTIONS, EVENTS_BY_ACTION, SYSTEM_RECORD_TYPES, SystemAction

_TENANT_CREATED = next(n for n, action in SYSTEM_RECORD_TYPES.items() if action is SystemAction.TENANT_CREATED)

KeyedRequest = tuple[str, int, str]
"""(tenant, route, key)."""


class DuplicateLineError(LedgerError):
    """The keyed line is chained already, by this node or another; nothing was added."""


@dataclass(slots=True)
class LinkedBatch:
    """Rows and outcomes of one batch; ``outcomes`` runs parallel to the pending events."""

    log_rows: list[tuple[object, ...]] = field(default_factory=list)
    idempotency_rows: list[tuple[str, int, str, int, bytes, int, int, int]] = field(default_factory=list)
    """(tenant, route, key, line, body digest, seq, epoch, LSN) of each keyed line."""
    links: dict[str, list[LinkRow]] = field(default_factory=dict)
    """New entries by tenant, in seq order; the last of each is the new head."""
    job_states: dict[tuple[str, str], jobs.JobState] = field(default_factory=dict)
    job_rows: list[tuple[object, ...]] = field(default_factory=list)
    """Rows of ``JOB_COLUMNS`` that store ``job_states``."""
    outcomes: list[ChainPosition | LedgerError] = field(default_factory=list)


def refused_payload(pending: Pending, sqlstate: str) -> bytes:
    """Payload of the REFUSED entry that stands in for an event Postgres would not take."""
    return canonical.encode(
        {
            "type": "Refused",
            "sqlstate": sqlstate,
            "record_type": pending.record_type,
            "job_id": base64.b64encode(pending.job_id.encode()).decode(),
            "payload": base64.b64encode(pending.payload).decode(),
        }
    )


def link_batch(
    batch: Sequence[Pending],
    *,
    heads: Mapping[str, ChainHead],
    new_tenants: set[str],
    chained_keys: Mapping[KeyedRequest, Mapping[int, bytes]],
    job_states: Mapping[tuple[str, str], jobs.JobState],
    linkers: dict[str, Linker],
    refused_sqlstate: str | None = None,
) -> LinkedBatch:
    """Chain ``batch`` onto ``heads``.

    Args:
        batch: events in LSN order.
        heads: locked head of every tenant in the batch.
        new_tenants: tenants whose head was created in this transaction.
        chained_keys: body digest by line of every keyed request in the batch that has chained lines.
        job_states: stored state of every job in the batch that has one.
        linkers: per-tenant linkers, filled as needed.
        refused_sqlstate: when given, the batch is one event that Postgres refused with this code, and
            a REFUSED entry takes its place.
    """
    linked = LinkedBatch()
    keys_in_batch: dict[KeyedRequest, dict[int, bytes]] = {}
    ends = {tenant: (head.seq, bytes.fromhex(head.chain_link or "")) for tenant, head in heads.items()}
    states = linked.job_states
    for pending in batch:
        tenant_id = pending.tenant_id
        refusal = _duplicate(pending, new_tenants, chained_keys, keys_in_batch)
        if refusal is not None:
            linked.outcomes.append(refusal)
            continue
        if refused_sqlstate is None:
            job_id, action, payload = pending.job_id, ACTIONS[pending.record_type], pending.payload
        else:
            job_id, action = f"refused:{pending.hlc.node_id}:{pending.lsn}", SystemAction.REFUSED.value
            payload = refused_payload(pending, refused_sqlstate)

        seq, prev_link = ends[tenant_id]
        seq += 1
        hlc = pending.hlc
        t_hlc = hlc.text()
        digest = hashlib.sha256(payload)
        linker = linkers.get(tenant_id)
        if linker is None:
            linker = linkers[tenant_id] = Linker(tenant_id)
        link = linker.link(seq, t_hlc, job_id, action, prev_link, digest.digest())
        ends[tenant_id] = (seq, link)
        link_hex = link.hex()
        prev_hex = prev_link.hex() or None
        digest_hex = digest.hexdigest()
        linked.log_rows.append(
            (
                tenant_id,
                seq,
                t_hlc,
                hlc.physical_ms,
                hlc.logical,
                hlc.node_id,
                job_id,
                action,
                LINK_VERSION,
                prev_hex,
                link_hex,
                digest_hex,
                payload.decode(),
            )
        )
        links = linked.links.get(tenant_id)
        if links is None:
            links = linked.links[tenant_id] = []
        links.append(LinkRow(seq, t_hlc, link_hex))
        linked.outcomes.append(ChainPosition(seq, link_hex, prev_hex))
        key = pending.idempotency
        if key is not None:
            linked.idempotency_rows.append(
                (tenant_id, key.route, key.key, key.line, key.body_digest, seq, pending.epoch, pending.lsn)
            )
        if action in EVENTS_BY_ACTION:
            job = (tenant_id, job_id)
            fact = jobs.event_fact(action, orjson.loads(payload), hlc, digest_hex, job_id, seq)
            known = states.get(job) or job_states.get(job)
            states[job] = jobs.merge(known, fact) if known is not None else fact
    linked.job_rows = [_job_row(job, state) for job, state in states.items()]
    return linked


def tenant_begun_by(pending: Pending) -> str | None:
    """The tenant whose beginning this event records, None for any other event."""
    return pending.job_id.removeprefix("tenant:") if pending.record_type == _TENANT_CREATED else None


def _duplicate(
    pending: Pending,
    new_tenants: set[str],
    chained_keys: Mapping[KeyedRequest, Mapping[int, bytes]],
    keys_in_batch: dict[KeyedRequest, dict[int, bytes]],
) -> LedgerError | None:
    """Why this event must not be chained, None when it must. First chained wins."""
    begun = tenant_begun_by(pending)
    if begun is not None and begun not in new_tenants:
        return DuplicateLineError("the tenant exists already")
    key = pending.idempotency
    if key is None:
        return None
    request = (pending.tenant_id, key.route, key.key)
    lines_here = keys_in_batch.setdefault(request, {})
    for lines in (chained_keys.get(request), lines_here):
        if not lines:
            continue
        if next(iter(lines.values())) != key.body_digest:
            return IdempotencyReusedError(
                f"Idempotency-Key {key.key!r} was used before with another body; use a new key"
            )
        if key.line in lines:
            return DuplicateLineError(f"line {key.line} of this keyed request is chained already")
    lines_here[key.line] = key.body_digest
    return None


def _job_row(job: tuple[str, str], state: jobs.JobState) -> tuple[object, ...]:
    """The row of ``JOB_COLUMNS`` that stores ``state``."""
    physical, logical, node = state.created.order[:3] if state.created is not None else (None, None, None)
    return (*job, jobs.status(state), physical, logical, node, state.last_seq, jobs.to_json(state).decode())
