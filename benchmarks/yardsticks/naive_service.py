"""The yardstick of ``submit_global``: the ledger that one would write first, on ``chained_log.sql``.

One transaction a request: lock the tenant's head, link, insert, move the head, commit. No WAL, no batches, no state of
jobs, no tree, no signatures. Database URL in ``BENCH_DATABASE_URL``.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
from fastapi import FastAPI, Response

from benchmarks.yardsticks.models import ChainPlace, Durability, JobAnswer, JobRequest
from benchmarks.yardsticks.serving import serve

POOL_CONNECTIONS = 16
_BEGIN_TENANT = "INSERT INTO scheduler.chain_heads (tenant_id, head_seq) VALUES ($1, 0) ON CONFLICT DO NOTHING"
_LOCK = "SELECT head_seq, head_chain_link FROM scheduler.chain_heads WHERE tenant_id = $1 FOR UPDATE"
_INSERT = """
INSERT INTO scheduler.scheduler_log
       (tenant_id, seq, t_hlc, hlc_physical, hlc_logical, hlc_node, job_id, action, link_version, prev_chain_link,
        chain_link, payload_digest, payload)
VALUES ($1, $2, $3, $4, $5, 'naive', $6, 'ENQUEUE', 2, $7, $8, $9, $10)
"""
_MOVE = """
UPDATE scheduler.chain_heads SET head_seq = $2, head_chain_link = $3, head_hlc = $4, updated_at = now()
 WHERE tenant_id = $1
"""


class NaiveLedger:
    """Chains each event in a transaction of its own."""

    def __init__(self, pool: asyncpg.Pool[asyncpg.Record]) -> None:
        self._pool = pool
        self._physical_ms = self._logical = 0
        self._tenants: set[str] = set()

    async def submit(self, job: JobRequest) -> JobAnswer:
        """Chain one JobCreated; durable and chained when this returns."""
        fields = {"type": "JobCreated", "fence_token": 1, "spec": job.spec, "assigned_dcs": job.assigned_dcs}
        payload = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        digest = hashlib.sha256(payload.encode())
        tenant_id = job.tenant_id
        async with self._pool.acquire() as connection:
            if tenant_id not in self._tenants:
                await connection.execute(_BEGIN_TENANT, tenant_id)
                self._tenants.add(tenant_id)
            async with connection.transaction():
                head_seq, prev = await connection.fetchrow(_LOCK, tenant_id) or (0, None)
                # Drawn under the lock, so that HLCs rise with seq.
                physical_ms, logical = self._tick()
                t_hlc, seq = f"{physical_ms}:{logical}:naive", head_seq + 1
                job_id = f"local-{physical_ms}-gate0a1b2c-{logical:05d}"
                link = _link(tenant_id, seq, t_hlc, job_id, prev, digest.digest())
                row = (tenant_id, seq, t_hlc, physical_ms, logical, job_id, prev, link, digest.hexdigest(), payload)
                await connection.execute(_INSERT, *row)
                await connection.execute(_MOVE, tenant_id, seq, link, t_hlc)
        return JobAnswer(
            job_id=job_id,
            tenant_id=tenant_id,
            type="JobCreated",
            action="ENQUEUE",
            hlc=t_hlc,
            at="2024-01-11T00:00:00.000Z",
            epoch=1,
            lsn=seq,
            fence_token=1,
            durability=Durability(requested="GLOBAL", achieved="GLOBAL", survives=["process"]),
            chain=ChainPlace(seq=seq, chain_link=link, prev_chain_link=prev),
            session="",
        )

    def _tick(self) -> tuple[int, int]:
        now_ms = time.time_ns() // 1_000_000
        if now_ms > self._physical_ms:
            self._physical_ms, self._logical = now_ms, 0
        else:
            self._logical += 1
        return self._physical_ms, self._logical


def _link(tenant_id: str, seq: int, t_hlc: str, job_id: str, prev: str | None, payload_digest: bytes) -> str:
    """Chain link, version 2, of an entry that was born here."""
    fields = (
        tenant_id.encode(),
        seq.to_bytes(8, "big"),
        t_hlc.encode(),
        job_id.encode(),
        b"ENQUEUE",
        bytes.fromhex(prev or ""),
        payload_digest,
        b"",
    )
    data = b"".join(len(field).to_bytes(4, "big") + field for field in fields)
    return hashlib.sha256(b"tallystick.chain-link.v2\n" + data).hexdigest()


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    url = os.environ["BENCH_DATABASE_URL"]
    async with asyncpg.create_pool(url, min_size=POOL_CONNECTIONS, max_size=POOL_CONNECTIONS) as pool:
        app.state.ledger = NaiveLedger(pool)
        yield


app = FastAPI(lifespan=_lifespan)


@app.post("/v1/jobs", status_code=201)
async def submit_job(job: JobRequest, response: Response) -> JobAnswer:
    """Chain, answer."""
    ledger: NaiveLedger = app.state.ledger
    answer = await ledger.submit(job)
    response.headers["Location"] = f"/v1/jobs/{answer.job_id}?tenant_id={answer.tenant_id}"
    return answer


if __name__ == "__main__":
    serve(app)
