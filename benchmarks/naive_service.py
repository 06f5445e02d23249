"""The baseline of ``submit_global``: the service one would write first, on the same table with the same indexes.

One transaction a request: lock the tenant's head, link, insert, move the head, commit. No WAL, no batches, no
merged job state, no tree, no signatures. Database URL in ``BENCH_DATABASE_URL``.
"""

from __future__ import annotations

import hashlib
import os
import time

import asyncpg
import uvloop
from fastapi import APIRouter, Request, Response

from app.config import Settings
from app.http.body import JSON_MEDIA_TYPE, parse, read_body
from app.http.requests import JOB_REQUEST
from app.http.routing import LeanRoute
from app.http.writing import receipt_answer
from app.node.session import SECRET_BYTES, SessionTokens
from app.pending.requests import Receipt
from app.store.chaining import LOG_COLUMNS
from app.store.growth import ChainPosition
from benchmarks.serving import application, serve
from ledger import canonical
from ledger.chain import LINK_VERSION, link
from ledger.hlc import Clock
from ledger.machines.events import JOB_EVENTS, Durability

CREATED = JOB_EVENTS["JobCreated"]
POOL_CONNECTIONS = 16
NODE_ID = "naive"

_BODY_BYTES_MAX = min(Settings().http.body_bytes_max, Settings().wal.record_bytes_max)
_SESSIONS = SessionTokens(bytes(SECRET_BYTES))
_LOCK = "SELECT head_seq, head_chain_link FROM scheduler.chain_heads WHERE tenant_id = $1 FOR UPDATE"
_INSERT = (
    f"INSERT INTO scheduler.scheduler_log ({', '.join(LOG_COLUMNS)})"
    f" VALUES ({', '.join(f'${number}' for number in range(1, len(LOG_COLUMNS) + 1))})"
)
_MOVE = (
    "UPDATE scheduler.chain_heads SET head_seq = $2, head_chain_link = $3, head_hlc = $4, updated_at = now()"
    " WHERE tenant_id = $1"
)
_BEGIN_TENANT = "INSERT INTO scheduler.chain_heads (tenant_id, head_seq) VALUES ($1, 0) ON CONFLICT DO NOTHING"

router = APIRouter(route_class=LeanRoute)


class NaiveLedger:
    """Chains each event in a transaction of its own."""

    def __init__(self, pool: asyncpg.Pool[asyncpg.Record]) -> None:
        self._pool = pool
        self._clock = Clock(NODE_ID, 5000)
        self._tenants: set[str] = set()

    async def submit(self, tenant_id: str, fields: dict[str, object]) -> Receipt:
        """Chain one JobCreated; durable and chained when this returns."""
        payload = canonical.encode({"type": CREATED.name, "fence_token": 1, **fields})
        digest = hashlib.sha256(payload)
        async with self._pool.acquire() as connection:
            if tenant_id not in self._tenants:
                await connection.execute(_BEGIN_TENANT, tenant_id)
                self._tenants.add(tenant_id)
            async with connection.transaction():
                head = await connection.fetchrow(_LOCK, tenant_id)
                assert head is not None
                head_seq, prev = head
                # Drawn under the lock, so that HLCs rise with seq.
                hlc = self._clock.tick(time.time_ns() // 1_000_000)
                t_hlc, seq = hlc.text(), head_seq + 1
                job_id = f"local-{hlc.physical_ms}-gate0a1b2c-{hlc.logical:05d}"
                chain_link = link(
                    tenant_id=tenant_id,
                    seq=seq,
                    t_hlc=t_hlc,
                    job_id=job_id,
                    action=CREATED.action,
                    prev_chain_link=bytes.fromhex(prev or ""),
                    payload_digest=digest.digest(),
                ).hex()
                row = (tenant_id, seq, t_hlc, *hlc, job_id, CREATED.action, LINK_VERSION, prev, chain_link)
                await connection.execute(_INSERT, *row, digest.hexdigest(), payload.decode(), None)
                await connection.execute(_MOVE, tenant_id, seq, chain_link, t_hlc)
        return Receipt(
            job_id=job_id,
            tenant_id=tenant_id,
            event=CREATED,
            hlc=t_hlc,
            epoch=1,
            lsn=seq,
            fence_token=1,
            requested=Durability.GLOBAL,
            achieved=Durability.GLOBAL,
            survives=("process",),
            chain=ChainPosition(seq, chain_link, prev),
            replayed=False,
        )


@router.post("/v1/jobs", status_code=201)
async def submit_job(request: Request) -> Response:
    """Read, check, chain, answer."""
    given = parse(JOB_REQUEST, await read_body(request, JSON_MEDIA_TYPE, _BODY_BYTES_MAX))
    fields = {name: given[name] for name in ("spec", "assigned_dcs") if name in given}
    ledger: NaiveLedger = request.app.state.ledger
    return receipt_answer(_SESSIONS, await ledger.submit(given["tenant_id"], fields))


async def main() -> None:
    """Serve until SIGTERM."""
    url = os.environ["BENCH_DATABASE_URL"]
    async with asyncpg.create_pool(url, min_size=POOL_CONNECTIONS, max_size=POOL_CONNECTIONS) as pool:
        app = application()
        app.router.routes.extend(router.routes)
        app.state.ledger = NaiveLedger(pool)
        await serve(app)


if __name__ == "__main__":
    uvloop.run(main())
