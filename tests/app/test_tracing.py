"""Spans of requests, of their fsync and chaining, and of signing: as a receiver of OTLP/HTTP gets them."""

from __future__ import annotations

import gzip
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import orjson
import pytest
import structlog
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from app.dev.embedded import EmbeddedPostgres
from app.node.wiring import LoadedFiles
from app.runtime.settings.config import load_settings
from app.runtime.state import node
from app.runtime.state.node import Rises
from ledger.errors import ConfigurationError
from ledger.positions import Lsn
from tests.app.otlp_requests import record, request_of
from tests.app.service_thread import serving
from tests.waiting import until

CALLER = "00f067aa0ba902b7"
UNASKED = """
import sys, app.node.serving
of_tracing = ("opentelemetry.sdk", "opentelemetry.exporter", "app.runtime.tracing")
print([name for name in sys.modules if name.startswith(of_tracing)])
"""
"""The framework imports the API of OpenTelemetry by itself, where it is installed."""


class Receiver(ThreadingHTTPServer):
    """Takes spans on a port of its own; while ``is_failing`` it refuses them for good."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Taking)
        self.requests: list[ExportTraceServiceRequest] = []
        self.is_failing = False
        self.is_endless = False
        """Whether its answers do not end."""
        self.refused = self.sent_bytes = 0
        self.url = f"http://127.0.0.1:{self.server_port}/v1/traces"

    def spans(self, trace: str | None = None) -> list[Span]:
        scopes = [scope for each in self.requests for part in each.resource_spans for scope in part.scope_spans]
        found = [span for scope in scopes for span in scope.spans]
        return [span for span in found if trace is None or span.trace_id.hex() == trace]

    def named(self, trace: str, names: set[str]) -> dict[str, Span]:
        """The spans of a trace, once there are these."""
        until(lambda: {span.name for span in self.spans(trace)} >= names, f"the spans {names} are sent")
        return {span.name: span for span in self.spans(trace)}


class _Taking(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers["Content-Encoding"] == "gzip":
            body = gzip.decompress(body)
        if self.server.is_failing:
            self.server.refused += 1
        else:
            self.server.requests.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(400 if self.server.is_failing else 200)
        self.send_header("Content-Length", str(1 << 40) if self.server.is_endless else "0")
        self.end_headers()
        with suppress(OSError):
            while self.server.is_endless:
                self.server.sent_bytes += self.wfile.write(bytes(1 << 16))
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def receiving() -> Iterator[Receiver]:
    """A receiver in a thread of its own."""
    with Receiver() as receiver:
        thread = threading.Thread(target=receiver.serve_forever, args=(0.05,))
        thread.start()
        yield receiver
        receiver.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def url(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory, receiver: Receiver) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("tracing")
    with serving(postgres, folder, "tracing", tracing={"endpoint": receiver.url}) as url:
        yield url


def submit(url: str, job_id: str, trace: str, durability: str = "GLOBAL", flags: str = "01", **headers: str) -> None:
    body = {"tenant_id": "acme", "job_id": job_id, "durability": durability}
    span = {"traceparent": f"00-{trace}-{CALLER}-{flags}"}
    httpx.post(f"{url}/v1/jobs", json=body, headers={**span, **headers}, timeout=60).raise_for_status()


def attributes(span: Span) -> dict[str, str | int]:
    return {each.key: each.value.string_value or each.value.int_value for each in span.attributes}


# An unusual header makes the framework answer, the usual ones the fast path.
@pytest.mark.parametrize("headers", [{}, {"X-Other": "1"}, {"Idempotency-Key": "once"}])
def test_a_write_is_a_child_of_its_caller_and_has_fsync_and_chain_as_children(
    url: str, receiver: Receiver, headers: dict[str, str]
) -> None:
    trace = f"{len(str(headers)):032x}"
    submit(url, f"whole-{trace}", trace, **headers)
    spans = receiver.named(trace, {"POST /v1/jobs", "fsync", "chain"})
    request, fsync, chain = spans["POST /v1/jobs"], spans["fsync"], spans["chain"]
    assert (request.parent_span_id.hex(), request.kind) == (CALLER, Span.SPAN_KIND_SERVER)
    assert attributes(request) == {
        "http.request.method": "POST", "http.route": "/v1/jobs", "http.response.status_code": 201
    }  # fmt: skip
    assert fsync.parent_span_id == chain.parent_span_id == request.span_id
    assert request.start_time_unix_nano <= fsync.start_time_unix_nano < fsync.end_time_unix_nano
    assert fsync.end_time_unix_nano == chain.start_time_unix_nano < chain.end_time_unix_nano
    assert chain.end_time_unix_nano <= request.end_time_unix_nano


LINES = b"".join(
    b'{"tenant_id":"acme","type":"%b","job_id":"line-%d"%b}\n' % (type_, number, more)
    for number in range(3)
    for type_, more in ((b"JobCreated", b""), (b"JobAccepted", b',"dc_id":"use1","worker_count":1'))
)
LOGS = request_of(
    *(record(type_, f"log-{number}", dc_id="use1") for number in range(3) for type_ in ("JobCreated", "JobAccepted")),
    tallystick_tenant_id="acme",
)


@pytest.mark.parametrize(
    ("route", "body", "headers", "again_steps"),
    [
        ("/v1/events?durability=GLOBAL", LINES, {"Content-Type": "application/x-ndjson"}, {"fsync", "chain"}),
        ("/v1/events", LINES, {"Content-Type": "application/x-ndjson", "Idempotency-Key": "batch"}, set()),
        ("/v1/logs", orjson.dumps(LOGS), {"Content-Type": "application/json"}, set()),
    ],
)
def test_a_batch_has_one_child_for_each_step_of_its_records_and_a_repeated_one_none(
    url: str, receiver: Receiver, route: str, body: bytes, headers: dict[str, str], again_steps: set[str]
) -> None:
    first, again = (f"{number}{len(headers) + len(route):031x}" for number in (1, 2))
    for trace in (first, again):
        span = {"traceparent": f"00-{trace}-{CALLER}-01"}
        answer = httpx.post(f"{url}{route}", content=body, headers={**headers, **span}, timeout=60)
        assert answer.status_code == 200, answer.text
    name = f"POST {route.partition('?')[0]}"
    assert receiver.named(again, {name}).keys() == {name, *again_steps}
    spans = receiver.named(first, {name, "fsync", "chain"})
    assert len(receiver.spans(first)) == 3
    request = spans[name]
    fsync, chain = spans["fsync"], spans["chain"]
    assert fsync.parent_span_id == chain.parent_span_id == request.span_id
    assert request.start_time_unix_nano <= fsync.start_time_unix_nano < chain.start_time_unix_nano
    assert fsync.end_time_unix_nano < chain.end_time_unix_nano <= request.end_time_unix_nano


def test_a_batch_of_which_a_part_was_sent_before_has_the_steps_of_the_others(url: str, receiver: Receiver) -> None:
    part, whole = "6" * 32, "7" * 32
    old, new = (record("JobCreated", job_id, tenant_id="acme") for job_id in ("sent-before", "sent-now"))
    for trace, records in ((part, [old]), (whole, [old, new])):
        headers = {"Content-Type": "application/json", "traceparent": f"00-{trace}-{CALLER}-01"}
        httpx.post(f"{url}/v1/logs", json=request_of(*records), headers=headers, timeout=60).raise_for_status()
    assert receiver.named(whole, {"POST /v1/logs"}).keys() == {"POST /v1/logs", "fsync", "chain"}


def test_a_write_that_is_answered_before_it_is_chained_has_no_span_of_that(url: str, receiver: Receiver) -> None:
    trace = "b" * 32
    submit(url, "local", trace, "LOCAL")
    assert receiver.named(trace, {"POST /v1/jobs", "fsync"}).keys() == {"POST /v1/jobs", "fsync"}


def test_a_repeated_write_has_no_steps_of_the_first(url: str, receiver: Receiver) -> None:
    first, again = "c" * 32, "d" * 32
    for trace in (first, again):
        submit(url, "repeated", trace, **{"Idempotency-Key": "repeated"})
    receiver.named(first, {"POST /v1/jobs", "fsync", "chain"})
    assert receiver.named(again, {"POST /v1/jobs"}).keys() == {"POST /v1/jobs"}


def test_a_read_and_a_refusal_have_a_span_and_what_is_not_sampled_has_none(url: str, receiver: Receiver) -> None:
    sampled, unsampled = "e" * 32, "f" * 32
    for trace, flags in ((unsampled, "00"), (sampled, "01")):
        headers = {"traceparent": f"00-{trace}-{CALLER}-{flags}"}
        assert httpx.get(f"{url}/v1/jobs/none", headers=headers, timeout=60).status_code == 404
    span = receiver.named(sampled, {"GET /v1/jobs/{job_id}"})["GET /v1/jobs/{job_id}"]
    assert attributes(span)["http.response.status_code"] == 404
    assert receiver.spans(unsampled) == []


def test_signing_has_spans_of_its_own_with_how_many_tenants(url: str, receiver: Receiver) -> None:
    submit(url, "signed", "a" * 32)
    httpx.post(f"{url}/v1/snapshots", json={"tenant_id": "acme"}, timeout=60).raise_for_status()

    def signed() -> set[str | int]:
        found = [attributes(span) for span in receiver.spans() if span.name == "sign" and not span.parent_span_id]
        return {each["tallystick.signed"] for each in found if int(each["tallystick.tenants"]) >= 1}

    until(lambda: signed() == {"checkpoints", "snapshots"}, "both kinds of signing have spans")


def test_an_endpoint_that_refuses_spans_costs_a_request_nothing_and_is_logged_once(
    url: str, receiver: Receiver
) -> None:
    with structlog.testing.capture_logs() as lines:

        def named(event: str) -> list[object]:
            return [line["endpoint"] for line in lines if line["event"] == event]

        receiver.is_failing = True
        for number in range(3):
            submit(url, f"refused-{number}", f"{number + 1:x}" * 32)
            until(lambda: receiver.refused > number, "each is tried")  # noqa: B023
        receiver.is_failing = False
        submit(url, "taken", "9" * 32)
        receiver.named("9" * 32, {"POST /v1/jobs"})
        until(lambda: named("spans_sent_again"), "the end of it is logged")
    assert named("spans_not_sent") == [receiver.url]


def test_an_answer_of_an_endpoint_that_does_not_end_is_not_read_on(url: str, receiver: Receiver) -> None:
    receiver.is_endless = True
    submit(url, "endless", "a" * 32)
    receiver.named("a" * 32, {"POST /v1/jobs"})
    submit(url, "after", "b" * 32)
    receiver.named("b" * 32, {"POST /v1/jobs"})
    receiver.is_endless = False
    assert receiver.sent_bytes < 64 << 20


def test_a_node_serves_and_stops_while_no_collector_is_there(postgres: EmbeddedPostgres, tmp_path: Path) -> None:
    with Receiver() as gone:
        endpoint = gone.url
    with serving(postgres, tmp_path, "untraced", tracing={"endpoint": endpoint}) as url:
        submit(url, "served", "8" * 32)


def test_without_an_endpoint_no_sdk_of_opentelemetry_is_imported() -> None:
    run = subprocess.run([sys.executable, "-c", UNASKED], capture_output=True, text=True, check=True, timeout=120)
    assert run.stdout.strip() == "[]"


def test_an_endpoint_without_the_packages_stops_the_start_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.delitem(sys.modules, "app.runtime.tracing", raising=False)
    settings = load_settings(tracing={"endpoint": "http://127.0.0.1:4318/v1/traces"})
    with pytest.raises(ConfigurationError, match=r"pip install 'tallystick\[tracing\]'"):
        LoadedFiles.of(settings)


def test_a_rise_that_is_forgotten_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "RISES_MAX", 3)
    rises = Rises()
    for lsn in (2, 4):
        rises.note(Lsn(lsn))
    assert rises.reached_s(Lsn(1)) == rises.reached_s(Lsn(2)) != rises.reached_s(Lsn(3))
    assert rises.reached_s(Lsn(5)) is None
    for lsn in (6, 8):
        rises.note(Lsn(lsn))
    assert rises.reached_s(Lsn(4)) is None
    assert rises.reached_s(Lsn(5)) is not None
