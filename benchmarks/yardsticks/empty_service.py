"""The yardstick of ``submit_local``: FastAPI as one would set it up first, the same models, and a handler that does
nothing. The answer is as long as the service's was when this was frozen."""

from __future__ import annotations

from fastapi import FastAPI, Response

from benchmarks.yardsticks.models import Durability, JobAnswer, JobRequest
from benchmarks.yardsticks.serving import serve

SESSION = "dDIgYmVuY2gtMGExYjJjM2QgMSAxMDAwMCAxNzA0OTMxMjAwMDAwIDAgYmVuY2gtMGExYjJjM2Q" + "x" * 60
app = FastAPI()


@app.post("/v1/jobs", status_code=201)
async def submit_job(job: JobRequest, response: Response) -> JobAnswer:
    """Answer what nobody did."""
    job_id = "local-1704931200000-gate0a1b2c-00000"
    response.headers["Location"] = f"/v1/jobs/{job_id}?tenant_id={job.tenant_id}"
    response.headers["Tally-Session"] = SESSION
    return JobAnswer(
        job_id=job_id,
        tenant_id=job.tenant_id,
        type="JobCreated",
        action="ENQUEUE",
        hlc="1704931200000:0:node-0a1b2c3d",
        at="2024-01-11T00:00:00.000Z",
        epoch=1,
        lsn=10_000,
        fence_token=1,
        durability=Durability(requested=job.durability, achieved=job.durability, survives=["process"]),
        chain=None,
        session=SESSION,
    )


if __name__ == "__main__":
    serve(app)
