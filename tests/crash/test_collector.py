"""A real OpenTelemetry Collector before the ledger, with the configurations of the docs: it forwards log records of
programs to ``POST /v1/logs``, and gets the spans of a node; `make torture` builds it from its source."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from subprocess import Popen
from typing import Any, NamedTuple

import asyncpg
import httpx
import pytest

from app.dev.embedded import EmbeddedPostgres
from app.runtime.state.kept_files import FIRST_TOKEN, FirstToken
from app.trust import callers
from tests.app.chains import until as awaited
from tests.app.otlp_requests import SPAN_ID, TRACE_ID, protobuf_of, record, request_of
from tests.app.service_thread import serving
from tests.app.test_lineage import Ledger, new_id
from tests.app.test_otlp import PAGE, blocks, events
from tests.app.test_tracing import CALLER, receiving, submit
from tests.conftest import Database
from tests.crash.conftest import Launch
from tests.crash.test_kill_otlp import on_record
from tests.go_programs import built, free_port, is_open, process
from tests.waiting import until

VERSION = "v0.161.0"
CORE, CONTRIB = "go.opentelemetry.io/collector", "github.com/open-telemetry/opentelemetry-collector-contrib"
MANIFEST = f"""
dist: {{name: collector, output_path: .}}
receivers: [gomod: {CORE}/receiver/otlpreceiver {VERSION}]
processors: [gomod: {CONTRIB}/processor/filterprocessor {VERSION}]
exporters: [gomod: {CORE}/exporter/otlphttpexporter {VERSION}]
extensions: [gomod: {CONTRIB}/extension/storage/filestorage {VERSION}]
"""
METRICS_PAGE = PAGE.with_name("metrics.md")
SETTINGS = {"auth": {"mode": "tokens"}}
JOBS, ROUNDS = 40, 3
pytestmark = [pytest.mark.torture, pytest.mark.foreign, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def program() -> Path:
    """A Collector with what the configurations of the docs need."""
    builder = ("go", "run", f"{CORE}/cmd/builder@{VERSION}", "--config=manifest.yaml", "--skip-strict-versioning")
    return built("collector", builder, files={"manifest.yaml": MANIFEST})


class Collector(NamedTuple):
    """A Collector with a configuration of the docs, which may run several times in its folder."""

    program: Path
    folder: Path
    port: int
    configuration: str

    @classmethod
    def of(cls, program: Path, folder: Path, page: Path, addresses: Mapping[str, str]) -> Collector:
        """The Collector that a page configures, with other ``addresses`` than there."""
        port = free_port()
        (configuration,) = blocks("yaml", page)
        for example, here in {"127.0.0.1:4318": f"127.0.0.1:{port}", **addresses}.items():
            assert configuration.count(example) == 1
            configuration = configuration.replace(example, here)
        (folder / "config.yaml").write_text(configuration)
        return cls(program, folder, port, configuration)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def running(self, *options: str, token: str = "") -> AbstractContextManager[Popen[bytes]]:
        """The Collector runs, with more ``options``; the token is of its exporter."""
        given = [part for option in ("service::telemetry::metrics::level=none", *options) for part in ("--set", option)]
        command = (self.program, "--config", self.folder / "config.yaml", *given)
        log = self.folder / "log"
        return process(*command, is_ready=lambda: is_open(self.port), log=log, LEDGER_TOKEN=token)

    def send(self, *records: Mapping[str, Any], **resource: Any) -> None:
        """Send records as a program does, in a request that the Collector acknowledges."""
        self.post(request_of(*records, **resource))

    def post(self, request: Mapping[str, Any]) -> None:
        """Send a request that the Collector acknowledges."""
        url, headers = f"http://127.0.0.1:{self.port}/v1/logs", {"Content-Type": "application/x-protobuf"}
        answer = httpx.post(url, content=protobuf_of(request), headers=headers, timeout=60, trust_env=False)
        assert answer.status_code == 200, answer.text


def before(ledger_url: str, program: Path, folder: Path) -> Collector:
    """A Collector before the ledger."""
    addresses = {"http://ledger.example.org:8080": ledger_url, "/var/lib/otelcol": str(folder)}
    return Collector.of(program, folder, PAGE, addresses)


def exporter(*options: str) -> list[str]:
    """Options of the exporter to the ledger, which tries again soon."""
    return [f"exporters::otlp_http/ledger::{each}" for each in ("retry_on_failure::initial_interval=100ms", *options)]


@pytest.fixture(scope="module")
def ledger(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ledger]:
    folder, first = tmp_path_factory.mktemp("collector"), callers.new_token()
    FIRST_TOKEN.store(folder, FirstToken("root", first.digest.hex()))
    with serving(postgres, folder, "collector", **SETTINGS) as url:
        yield Ledger(url, first.text)


@pytest.mark.parametrize(
    "options",
    [(), ("encoding=json",), ("compression=none",), ("encoding=json", "compression=none")],
    ids=lambda options: "+".join(options) or "as it is",
)
def test_jobs_that_programs_log_are_on_record_and_nothing_else_is_sent(
    program: Path, ledger: Ledger, tmp_path: Path, options: tuple[str, ...]
) -> None:
    collector, job_id = before(ledger.url, program, tmp_path), new_id()
    with collector.running(*exporter(*options), token=ledger.token):
        created = record("JobCreated", job_id, spec={"image": "etl:3", "sizes": [1, 2.5]})
        span = {"traceId": TRACE_ID, "spanId": SPAN_ID, "flags": 1}
        named = {"eventName": "JobFailed", "attributes": record(None, job_id)["attributes"]}
        collector.send(created, record(None), service_name="use1")
        collector.send(record("JobAccepted", job_id, worker_count=4) | span, service_name="use1")
        collector.send(record(None) | named, {"eventName": "Other"}, service_name="use1")
        until(lambda: ledger.job(job_id)["status"] == "FAILED", "the job is on record")
    job = ledger.job(job_id)
    assert (job["error"], job["spec"]) == ("a line of a log", {"image": "etl:3", "sizes": [1, 2.5]})
    assert ledger.types(job_id) == ["JobCreated", "JobAccepted", "JobFailed"]
    accepted = events(ledger, job_id)[1]["payload"]
    assert (accepted["dc_id"], accepted["traceparent"]) == ("use1", f"00-{TRACE_ID}-{SPAN_ID}-01")
    assert re.findall("(?i)partial|deprecated|permanent|dropp", collector.log) == []


def test_records_that_the_ledger_rejects_are_in_the_collectors_log_and_not_sent_again(
    program: Path, ledger: Ledger, tmp_path: Path
) -> None:
    collector, ended, good = before(ledger.url, program, tmp_path), new_id(), new_id()
    with collector.running(*exporter(), token=ledger.token):
        collector.send(record("JobCreated", ended), record("JobCompleted", ended))
        until(lambda: ledger.job(ended).get("status") == "COMPLETED", "the job has ended")
        head = ledger.head()
        collector.send(record("JobFailed", ended), record("JobCreated", good))
        until(lambda: ledger.job(good).get("status") == "SUBMITTED", "the other record is taken")
        until(lambda: f"1: job {ended} has ended" in collector.log, "the reason is logged")
    with collector.running(*exporter(), token=ledger.token):
        collector.send(record("JobCompleted", good))
        until(lambda: ledger.job(good)["status"] == "COMPLETED", "a later record is taken")
    assert ledger.head() == head + 2
    assert collector.log.count(f"1: job {ended} has ended") == 1


@pytest.mark.parametrize("encoding", ["proto", "json"])
def test_a_batch_of_as_many_records_as_a_collector_makes_is_taken_whole(
    program: Path, ledger: Ledger, tmp_path: Path, encoding: str
) -> None:
    collector, jobs = before(ledger.url, program, tmp_path), [new_id() for _ in range(8192)]
    batch = (f"sending_queue::batch::{each}" for each in ("min_size=8192", "max_size=8192", "flush_timeout=60s"))
    with collector.running(*exporter(f"encoding={encoding}", *batch), token=ledger.token):
        for part in range(0, len(jobs), 512):
            each = [request_of(record("JobCreated", job))["resourceLogs"][0] for job in jobs[part : part + 512]]
            collector.post({"resourceLogs": each})
        for job in (jobs[-1], jobs[0]):
            until(lambda: ledger.job(job).get("status") == "SUBMITTED", "it is on record", pause_s=1)  # noqa: B023


def test_a_quota_that_is_used_up_makes_the_collector_wait_and_loses_nothing(
    program: Path, postgres: EmbeddedPostgres, tmp_path: Path
) -> None:
    folder, first = tmp_path / "node", callers.new_token()
    folder.mkdir()
    FIRST_TOKEN.store(folder, FirstToken("root", first.digest.hex()))
    quota, every = {"tenant_requests": 4, "burst": "2s"}, {"tenant_id": "acme", "limit": 1000}
    with serving(postgres, folder, "collector_quota", **SETTINGS, quota=quota) as url:
        ledger = Ledger(url, first.text)
        collector, jobs = before(url, program, tmp_path), [new_id() for _ in range(JOBS)]

        def are_listed() -> bool:  # which is charged to the quota of the tenant, too
            listed = ledger.root.get("/v1/jobs", params=every).json().get("items", [])
            return sorted(each["job_id"] for each in listed) == sorted(jobs)

        batch = (f"sending_queue::batch::{each}" for each in ("min_size=1", "max_size=8"))
        with collector.running(*exporter(*batch), token=ledger.token):
            for job in jobs:
                collector.send(record("JobCreated", job))
            until(are_listed, "all jobs are on record", pause_s=2)
        assert "Status Code 429, Message=" in collector.log


async def test_nothing_that_a_collector_took_is_lost_or_there_twice_whenever_it_or_the_ledger_is_killed(
    program: Path,
    database: Database,
    tmp_path: Path,
    launch: Launch,
    superuser: asyncpg.Connection,
    seed: int,
    torture_rounds: Callable[[int], int],
) -> None:
    chance, port, sent = random.Random(seed), free_port(), 0
    collector = before(f"http://127.0.0.1:{port}", program, tmp_path)
    began_ns = time.time_ns() - 3_600_000_000_000  # as after an outage: no record is new
    for _ in range(torture_rounds(ROUNDS)):
        child = await launch(tmp_path / "node", database.service_url, port=port)
        with collector.running(*exporter()) as running:
            await child.ready()
            # Ends come before their creations.
            jobs, dies_at = range(sent, sent + JOBS), chance.randrange(JOBS, 2 * JOBS)
            for at, (type_, job) in enumerate(itertools.product(("JobCompleted", "JobCreated"), jobs)):
                each = record(type_, f"job-{job}", at_ns=began_ns + job)
                await asyncio.to_thread(collector.send, each, tallystick_tenant_id="acme")
                if at == dies_at:
                    await child.kill()
            sent, said = sent + JOBS, len(collector.log)
            # A batch that waits seconds has been tried for two.
            await awaited(lambda: re.search('"interval": "[1-9][0-9.]*s', collector.log[said:]), "it tries")  # noqa: B023
            running.kill()
    expected = Counter((f"job-{number}", action) for number in range(sent) for action in ("ENQUEUE", "COMPLETE"))
    child = await launch(tmp_path / "node", database.service_url, port=port)
    await child.ready()
    with collector.running(*exporter()):
        await awaited(lambda: _is_on_record(superuser, expected), "all of it is on record")
    assert await on_record(superuser) == expected
    assert "artial success" not in collector.log


async def _is_on_record(superuser: asyncpg.Connection, expected: Counter[tuple[str, str]]) -> bool:
    return await on_record(superuser) >= expected


def test_the_spans_of_a_node_come_through_a_collector_as_children_of_the_callers_span(
    program: Path, postgres: EmbeddedPostgres, tmp_path: Path
) -> None:
    trace = "a5" * 16
    with receiving() as receiver:
        addresses = {"http://traces.example.org:4318": receiver.url.removesuffix("/v1/traces")}
        collector = Collector.of(program, tmp_path, METRICS_PAGE, addresses)
        endpoint = f"http://127.0.0.1:{collector.port}/v1/traces"
        tracing = {"tracing": {"endpoint": endpoint}}
        with collector.running(), serving(postgres, tmp_path / "node", "collected", **tracing) as url:
            submit(url, "traced", trace)
            spans = receiver.named(trace, {"POST /v1/jobs", "fsync", "chain"})
            until(lambda: "sign" in {span.name for span in receiver.spans()}, "signing has spans")
    request = spans["POST /v1/jobs"]
    assert request.parent_span_id.hex() == CALLER
    assert {spans[name].parent_span_id for name in ("fsync", "chain")} == {request.span_id}
    resource = receiver.requests[0].resource_spans[0].resource
    assert "tallystick" in [each.value.string_value for each in resource.attributes if each.key == "service.name"]
