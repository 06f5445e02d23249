"""Events like those of a cluster's scheduler, the same in every run."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import orjson

from ledger import canonical

TENANTS = tuple(f"tenant-{number:02d}" for number in range(10))
_SEED = 20_240_117
_JOBS_AT_ONCE = 50
"""Jobs of one stream that are under way together, so that their events mix."""


def job_spec(numbers: random.Random) -> dict[str, object]:
    """What a submitted job asks for."""
    return {
        "image": f"registry.example/batch/render:{numbers.randint(1, 99)}.{numbers.randint(0, 20)}",
        "command": ["render", "--scene", f"s{numbers.randint(1, 9999):04d}", "--frames", str(numbers.randint(1, 240))],
        "cpu_millis": numbers.choice((500, 1000, 2000, 4000)),
        "memory_mib": numbers.choice((512, 1024, 4096, 16384)),
        "gpu": numbers.choice((0, 0, 0, 1)),
        "qos": numbers.choice(("LS", "BE", "Burstable")),
    }


def job_requests(tenant_id: str, durability: str, count: int) -> list[bytes]:
    """Bodies of ``POST /v1/jobs``."""
    numbers = random.Random(_SEED)
    return [
        orjson.dumps(
            {
                "tenant_id": tenant_id,
                "spec": job_spec(numbers),
                "assigned_dcs": [numbers.choice(("use1", "euw1"))],
                "durability": durability,
            }
        )
        for _ in range(count)
    ]


EVENTS_A_JOB = 8


def job_events(numbers: random.Random, job_id: str) -> list[dict[str, Any]]:
    """The life of one job: ``EVENTS_A_JOB`` events in order, without their tenant."""
    dc_id = numbers.choice(("use1", "euw1"))
    about: dict[str, Any] = {"job_id": job_id}
    tasks = numbers.randint(8, 64)
    return [
        about | {"type": "JobCreated", "spec": job_spec(numbers), "assigned_dcs": [dc_id]},
        about | {"type": "JobAccepted", "dc_id": dc_id, "worker_count": numbers.randint(1, 16)},
        about | {"type": "WorkflowDispatched", "workflow_id": "wf-render", "dc_id": dc_id},
        *(
            about | {"type": "JobProgressReported", "dc_id": dc_id, "completed": tasks * part // 3, "failed": 0}
            for part in (1, 2, 3)
        ),
        about | {"type": "WorkflowCompleted", "workflow_id": "wf-render", "dc_id": dc_id},
        about
        | {
            "type": "JobCompleted",
            "final_status": "succeeded",
            "aggregate_metrics": {"cpu_s": numbers.randint(10, 9000), "tasks": tasks},
        },
    ]


def stream(name: str, jobs: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """``jobs * EVENTS_A_JOB`` events as (tenant, event), of all tenants in turn, many jobs under way at once."""
    numbers = random.Random(f"{_SEED} {name}")
    for first in range(0, jobs, _JOBS_AT_ONCE):
        lives = [
            (TENANTS[number % len(TENANTS)], job_events(numbers, f"{name}-{number:06d}"))
            for number in range(first, min(jobs, first + _JOBS_AT_ONCE))
        ]
        for step in range(EVENTS_A_JOB):
            for tenant, life in lives:
                yield tenant, life[step]


def created(tenant_id: str, count: int, payload_bytes: int) -> Iterator[bytes]:
    """Lines of JobCreated, a job each, whose canonical payload is ``payload_bytes`` long."""
    for number in range(count):
        spec: dict[str, object] = {
            "image": f"registry.example/batch/render:{number:06d}",
            "command": ["render", "--frames", "240"],
        }
        spec |= {"cpu_millis": 2000, "memory_mib": 4096, "qos": "Burstable", "padding": ""}
        fields = {"type": "JobCreated", "spec": spec, "assigned_dcs": ["use1"]}
        missing = payload_bytes - len(canonical.encode({**fields, "fence_token": 1}))
        assert missing >= 0
        spec["padding"] = "x" * missing
        yield orjson.dumps({"tenant_id": tenant_id, "job_id": f"job-{number:08d}", **fields})


def ndjson(events: Iterator[tuple[str, dict[str, Any]]], lines: int) -> Iterator[bytes]:
    """Bodies of ``POST /v1/events`` with up to ``lines`` lines each."""
    body: list[bytes] = []
    for tenant, event in events:
        body.append(orjson.dumps({"tenant_id": tenant, **event}))
        if len(body) == lines:
            yield b"\n".join(body)
            body = []
    if body:
        yield b"\n".join(body)
