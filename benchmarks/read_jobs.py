"""``read_job`` and ``list_jobs``: jobs read on 64 connections, against etcd's range reads with answers as long."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import orjson

from benchmarks.bench import Bench, wait_for
from benchmarks.events import job_spec
from benchmarks.http_client import Client, Target, get, post
from benchmarks.in_turn import Compared, compare
from benchmarks.ledger_checks import check_service
from benchmarks.load import Load, Side, followed
from benchmarks.processes import tally_serve
from benchmarks.processor_time import children_with, taken_s
from benchmarks.row import Outcome, Row, expect
from benchmarks.submit import TENANT
from benchmarks.yardsticks import etcd, etcd_ranges

JOBS = 100_000
LINES = 2000
PAGE_JOBS = 100
READS = 5000
"""Requests that are sent over and over, of jobs drawn from all."""
LISTED_TIMEOUT_S = 120.0
ANSWER_TOLERANCE = 0.15
"""How far the mean sizes of the answers may differ."""
_SEED = 20_241_118


class _Kind(NamedTuple):
    """What one row reads: so many jobs a request; ``value_bytes`` makes etcd's answers as long as ours."""

    jobs: int
    value_bytes: int


_ONE = _Kind(1, 150)
_PAGE = _Kind(PAGE_JOBS, 410)


def _bodies() -> Iterator[bytes]:
    """NDJSON of all jobs."""
    numbers = random.Random(_SEED)
    for first in range(0, JOBS, LINES):
        yield b"\n".join(
            orjson.dumps(
                {
                    "tenant_id": TENANT,
                    "type": "JobCreated",
                    "job_id": f"job-{number:06d}",
                    "spec": job_spec(numbers),
                    "assigned_dcs": ["use1"],
                }
            )
            for number in range(first, first + LINES)
        )


async def _fill(url: str) -> None:
    """Record all jobs, and wait until lists know them."""
    client = await Client.connect(Target.of(url))
    try:
        for body in _bodies():
            await client.ask(post("/v1/events?durability=LOCAL", body, kind="ndjson"))
        await followed(url)
        async with asyncio.timeout(LISTED_TIMEOUT_S):
            while True:
                page = await client.get(f"/v1/jobs?tenant_id={TENANT}&limit=1&consistency=eventual")
                if page["consistency"]["as_of_seq"] == JOBS:
                    return
                await asyncio.sleep(0.1)
    finally:
        client.close()


def _requests(kind: _Kind) -> list[bytes]:
    if kind.jobs > 1:
        return [get(f"/v1/jobs?tenant_id={TENANT}&status=SUBMITTED&limit={kind.jobs}")]
    numbers = random.Random(_SEED)
    return [get(f"/v1/jobs/job-{numbers.randrange(JOBS):06d}?tenant_id={TENANT}") for _ in range(READS)]


@contextmanager
def _service(bench: Bench, kind: _Kind) -> Iterator[Compared]:
    with (
        bench.fresh_database() as database,
        bench.fresh_folder() as folder,
        tally_serve(database.service_url, folder) as url,
    ):
        wait_for(_fill(url))

        def check(_: Load) -> str:
            return wait_for(check_service(url, {TENANT: JOBS}))

        processes = [*children_with("cli"), bench.postgres_pid()]
        yield Compared(
            "ours", Side(url, partial(_requests, kind), status=200), check, taken_s=partial(taken_s, processes)
        )


def _ranges(kind: _Kind) -> list[bytes]:
    numbers = random.Random(_SEED)
    return etcd_ranges.ranges([numbers.randrange(JOBS - kind.jobs) for _ in range(READS)], kind.jobs)


@contextmanager
def _etcd(bench: Bench, kind: _Kind) -> Iterator[Compared]:
    with bench.fresh_folder() as folder, etcd.served(folder) as url:
        etcd_ranges.fill(url, JOBS, kind.value_bytes)
        side = Side(url, partial(_ranges, kind), status=200)
        yield Compared("etcd", side, taken_s=partial(taken_s, children_with("etcd")))


def _measure(kind: _Kind, bench: Bench) -> Outcome:
    compared = compare(bench, partial(_service, bench, kind), partial(_etcd, bench, kind))
    for ours, against in compared.loads:
        ratio = ours.answer_bytes / against.answer_bytes
        expect(abs(ratio - 1) <= ANSWER_TOLERANCE, f"our answers are {ratio:.2f} times as long as those of etcd")
    return compared.outcome_by_processor_time()


READ = Row(
    "read_job",
    "requests/CPU-s",
    0.13,
    "GET /v1/jobs/{id} of 100,000 jobs, 64 connections, each entry recomputed, against etcd, one member: a range read "
    "of one key through its JSON gateway, with an answer as long; processor time, PostgreSQL's included",
    partial(_measure, _ONE),
)
LIST = Row(
    "list_jobs",
    "requests/CPU-s",
    0.19,
    "GET /v1/jobs of one status, pages of 100 of 100,000 jobs, 64 connections, each entry recomputed, against etcd, "
    "one member: a range read of 100 keys through its JSON gateway, with an answer as long; processor time, "
    "PostgreSQL's included",
    partial(_measure, _PAGE),
)
