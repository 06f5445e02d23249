"""``sign_check`` and ``ingest_signed``: what callers signed, against the same events without signatures.

Both sides are the service, and send the same events; each signature is of an Ed25519 key, and of a time and an id of
its own. Nothing is sent twice: a signed event that is repeated is in the chain once.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import orjson
import uvloop
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from benchmarks.apart import apart
from benchmarks.bench import Bench, wait_for
from benchmarks.events import EVENTS_A_JOB, job_requests, ndjson, stream
from benchmarks.http_client import Client, Target, post, with_header
from benchmarks.in_turn import Compared, compare
from benchmarks.ingest import CONNECTIONS, EVENTS, JOBS_A_CONNECTION, seconds_until_answered_and_chained
from benchmarks.ledger_checks import check_service
from benchmarks.load import Load, Side, followed
from benchmarks.processes import tally_serve
from benchmarks.row import Outcome, Row, interleave
from tallystick_client.signing import EventSigner

TENANT = "bench"
REQUESTS = 30_000
"""More than a run can send."""
LINES_A_REQUEST = 1000


class Caller:
    """A caller with a key of its own, the same in every run."""

    def __init__(self) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(bytes(32))
        public = self._key.public_key()
        der = public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        self.key_id = hashlib.sha256(der).hexdigest()[:16]
        self.public_pem = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()

    def sign(self, message: bytes) -> bytes:
        """An Ed25519 signature."""
        return self._key.sign(message)


def _jobs(is_signed: bool) -> list[bytes]:
    signer = EventSigner(Caller())
    bodies = itertools.islice(itertools.cycle(map(json.loads, job_requests(TENANT, "LOCAL", 2000))), REQUESTS)
    events = [{**body, "job_id": f"job-{number}", "fence_token": 1} for number, body in enumerate(bodies)]
    if is_signed:
        events = [signer.body("/v1/jobs", event, event["job_id"]) for event in events]
    return [post("/v1/jobs", orjson.dumps(event)) for event in events]


async def _register(url: str) -> None:
    client = await Client.connect(Target.of(url))
    wanted = {"name": "bench", "tenants": ["*"], "public_key_pem": Caller().public_pem}
    await client.ask(post("/v1/callers", orjson.dumps(wanted)), 201)
    client.close()


@contextmanager
def _served(bench: Bench) -> Iterator[str]:
    """A service that knows the caller."""
    with (
        bench.fresh_database() as database,
        bench.fresh_folder() as folder,
        tally_serve(database.service_url, folder) as url,
    ):
        wait_for(_register(url))
        yield url


@contextmanager
def _service(bench: Bench, *, is_signed: bool) -> Iterator[Compared]:
    with _served(bench) as url:

        def check(load: Load) -> str:
            return wait_for(check_service(url, {TENANT: load.answered}))

        side = Side(url, partial(_jobs, is_signed), settle=followed)
        yield Compared("signed" if is_signed else "unsigned", side, check)


def measure(bench: Bench) -> Outcome:
    """Signed writes against unsigned ones."""
    signed, unsigned = partial(_service, bench, is_signed=True), partial(_service, bench, is_signed=False)
    return compare(bench, signed, unsigned).outcome()


def measure_lines(bench: Bench) -> Outcome:
    """Requests of lines under one signature each, against the same without."""
    return interleave(bench, partial(_ingest, bench, True), partial(_ingest, bench, False)).outcome(
        f"{EVENTS:,} events"
    )


def _ingest(bench: Bench, is_signed: bool) -> float:
    with _served(bench) as url:
        rate, entries = apart(_send, url, is_signed)
        wait_for(check_service(url, entries))
    return rate


def _send(url: str, is_signed: bool) -> tuple[float, dict[str, int]]:
    signer, entries = EventSigner(Caller()), Counter[str]()
    requests: list[Sequence[bytes]] = []
    for number in range(CONNECTIONS):
        entries.update(tenant for tenant, _ in stream(f"stream{number}", JOBS_A_CONNECTION))
        fenced = (
            (tenant, {**event, "fence_token": 1}) for tenant, event in stream(f"stream{number}", JOBS_A_CONNECTION)
        )
        bodies = list(ndjson(fenced, LINES_A_REQUEST))
        made = [post("/v1/events", body, "ndjson") for body in bodies]
        if is_signed:
            headers = [signer.header(body, f"{number}-{at}") for at, body in enumerate(bodies)]
            made = [with_header(each, "Tally-Signature", header) for each, header in zip(made, headers, strict=True)]
        requests.append(made)
    return EVENTS / uvloop.run(seconds_until_answered_and_chained(Target.of(url), requests)), dict(entries)


assert EVENTS == CONNECTIONS * JOBS_A_CONNECTION * EVENTS_A_JOB
CHECK = Row(
    "sign_check",
    "requests/s",
    0.44,
    "single POST /v1/jobs at LOCAL, 64 connections, each signed by its caller with Ed25519, against the same without",
    measure,
)
LINES = Row(
    "ingest_signed",
    "events/s",
    0.33,
    f"POST /v1/events, {LINES_A_REQUEST} lines a request under one signature, until the last row is chained, against "
    "the same without",
    measure_lines,
)
