"""Checked events for the write path, as the HTTP layer would hand them over."""

from __future__ import annotations

import hashlib

from app.write.pending.requests import Draft, RequestKey
from ledger.facts.events import JOB_EVENTS, Durability

LOCAL = Durability.LOCAL
GLOBAL = Durability.GLOBAL


def created(tenant_id: str, n: int, *, durability: Durability = GLOBAL, job_id: str | None = None) -> Draft:
    """JobCreated whose spec carries ``n``; the node makes the job id when none is given."""
    return Draft(tenant_id, job_id, JOB_EVENTS["JobCreated"], {"spec": {"n": n}}, None, durability)


def accepted(tenant_id: str, job_id: str, dc_id: str, *, durability: Durability = GLOBAL) -> Draft:
    """JobAccepted by one datacentre."""
    fields: dict[str, object] = {"dc_id": dc_id, "worker_count": 1}
    return Draft(tenant_id, job_id, JOB_EVENTS["JobAccepted"], fields, None, durability)


def progressed(tenant_id: str, job_id: str, done: int, *, durability: Durability = LOCAL) -> Draft:
    """JobProgressReported with ``done`` completed."""
    fields: dict[str, object] = {"dc_id": "dc1", "completed": done, "failed": 0}
    return Draft(tenant_id, job_id, JOB_EVENTS["JobProgressReported"], fields, None, durability)


def completed(tenant_id: str, job_id: str, *, durability: Durability = GLOBAL) -> Draft:
    """JobCompleted."""
    return Draft(tenant_id, job_id, JOB_EVENTS["JobCompleted"], {"final_status": "ok"}, None, durability)


def key(name: str, body: str = "body", *, route: int = 1) -> RequestKey:
    """An Idempotency-Key that came with ``body``."""
    return RequestKey(route, name, hashlib.sha256(body.encode()).digest())
