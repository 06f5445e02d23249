"""``POST /v1/logs``: log records that an SDK of OpenTelemetry exports become events of jobs, each once."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import re
import time
import tomllib
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
import structlog
from google.rpc.status_pb2 import Status
from opentelemetry import trace
from opentelemetry._logs import LogRecord
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import LogRecordExportResult, SimpleLogRecordProcessor
from opentelemetry.sdk.resources import Resource

from app.dev.embedded import EmbeddedPostgres
from app.edge import writes
from app.edge.forms.fields import TEXT_CHARACTERS_MAX
from app.edge.forms.otlp import ATTRIBUTES_MAX, Record, records_of
from app.edge.problems import respond
from app.edge.routes import otlp
from app.runtime.settings.config import OtlpSettings
from app.runtime.state.kept_files import FIRST_TOKEN, FirstToken
from app.trust import callers
from ledger import canonical
from ledger.errors import InvalidInputError, ProblemError
from ledger.facts import problems
from ledger.facts.problems import ProblemType, Retry
from tests.app.otlp_requests import SPAN_ID, TRACE_ID, pairs, protobuf_of, record, request_of
from tests.app.service_thread import serving
from tests.app.test_lineage import Ledger, new_id
from tests.conftest import connected_to

CONTEXT = trace.set_span_in_context(
    trace.NonRecordingSpan(
        trace.SpanContext(int(TRACE_ID, 16), int(SPAN_ID, 16), is_remote=False, trace_flags=trace.TraceFlags.SAMPLED)
    )
)
PAGE = Path(__file__).parents[2] / "docs" / "otlp.md"
PROTOBUF, JSON = "application/x-protobuf", "application/json"
SETTINGS = {
    "auth": {"mode": "tokens"},
    "otlp": {"attributes": {"dc_id": "k8s.cluster.name"}, "types": {"job.done": "JobCompleted"}},
}


@pytest.fixture(scope="module")
def ledger(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ledger]:
    folder, first = tmp_path_factory.mktemp("otlp"), callers.new_token()
    FIRST_TOKEN.store(folder, FirstToken("root", first.digest.hex()))
    with serving(postgres, folder, "otlp", **SETTINGS) as url:
        yield Ledger(url, first.text)


def send(
    ledger: Ledger, body: Any, media_type: str = JSON, status: int = 200, token: str | None = None, **headers: str
) -> httpx.Response:
    """The answer to a request; a body that is an object is sent in JSON or protobuf, as the media type says."""
    if isinstance(body, dict):
        body = orjson.dumps(body) if media_type == JSON else protobuf_of(body)
    headers |= {"Authorization": f"Bearer {token or ledger.token}", "Content-Type": media_type}
    answer = ledger.root.post("/v1/logs", content=body, headers=headers)
    assert (answer.status_code, answer.headers["content-type"]) == (status, media_type), answer.text
    return answer


def rejected(answer: httpx.Response) -> tuple[int, str]:
    """How many records were rejected, and why."""
    if answer.headers["content-type"] == PROTOBUF:
        partial = ExportLogsServiceResponse.FromString(answer.content).partial_success
        return partial.rejected_log_records, partial.error_message
    told = answer.json().get("partialSuccess", {})
    return int(told.get("rejectedLogRecords", 0)), told.get("errorMessage", "")


def events(ledger: Ledger, job_id: str) -> list[dict[str, Any]]:
    params = {"tenant_id": "acme"}
    items: list[dict[str, Any]] = ledger.root.get(f"/v1/jobs/{job_id}/events", params=params).json()["items"]
    return items


def blocks(language: str, page: Path = PAGE) -> list[str]:
    """The examples of a page in this language."""
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def exporter(ledger: Ledger, **more: Any) -> OTLPLogExporter:
    headers = {"Authorization": f"Bearer {ledger.token}"}
    return OTLPLogExporter(f"{ledger.url}/v1/logs", headers=headers, **more)


@pytest.mark.parametrize("compression", [Compression.NoCompression, Compression.Gzip])
def test_records_that_the_sdk_exports_are_a_job_that_is_found(ledger: Ledger, compression: Compression) -> None:
    job_id, at_ns = new_id(), 1795268400_250_000_000
    provider = LoggerProvider(Resource({"service.name": "worker", "k8s.cluster.name": "use1"}))
    provider.add_log_record_processor(SimpleLogRecordProcessor(exporter(ledger, compression=compression)))
    logger = provider.get_logger("scheduler")

    def emit(type_: str, **fields: Any) -> None:
        attributes = {"job.id": job_id, **{f"tallystick.{name}": value for name, value in fields.items()}}
        logger.emit(LogRecord(timestamp=at_ns, event_name=type_, attributes=attributes, body="said", context=CONTEXT))

    emit("JobCreated", **{"spec.image": "etl:3", "spec.by.team": "data"}, assigned_dcs=["use1"])
    emit("JobAccepted", worker_count="4")
    emit("JobProgressReported", completed=7)
    assert ledger.job(job_id)["status"] == "RUNNING"
    emit("job.done", final_status=0, aggregate_metrics={"rows": 7, "hosts": ["a", "b"], "share": 0.5})
    done = ledger.job(job_id)
    assert (done["status"], done["actor"], done["spec"]) == (
        "COMPLETED",
        "ci",
        {"image": "etl:3", "by": {"team": "data"}},
    )
    assert done["result"]["aggregate_metrics"] == {"rows": 7, "hosts": ["a", "b"], "share": 0.5}
    told = [event["payload"] for event in events(ledger, job_id)]
    assert {each["trace_time"] for each in told} == {1795268400.25}
    assert {each["traceparent"] for each in told} == {f"00-{TRACE_ID}-{SPAN_ID}-01"}
    assert [each.get("dc_id") for each in told] == [None, "use1", "use1", None]
    assert (told[1]["worker_count"], told[2]["completed"], told[3]["final_status"]) == (4, 7, "0")
    params = {"tenant_id": "acme", "where": f"trace:{TRACE_ID}", "dc": "use1"}
    assert job_id in [each["job_id"] for each in ledger.root.get("/v1/jobs", params=params).json()["items"]]


def test_the_example_of_the_page_puts_its_job_on_record(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_LOGS_ENDPOINT", f"{ledger.url}/v1/logs")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_LOGS_HEADERS", f"Authorization=Bearer%20{ledger.token}")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "use1")
    names: dict[str, Any] = {}
    exec(blocks("python")[0], names)
    names["provider"].shutdown()
    job = ledger.job("load-7")
    assert (job["status"], job["error"], job["spec"]) == ("FAILED", "disk full", {"image": "etl:3"})
    given = tomllib.loads(blocks("toml")[0])["otlp"]
    record = Record({"etl.run.id": "load-8", "k8s.cluster.name": "use1"}, "etl.run.started", None, 0, None)
    event = {"type": "JobAccepted", "job_id": "load-8", "dc_id": "use1"}
    assert otlp.event_of(record, OtlpSettings(**given)) == event


@pytest.mark.parametrize("media_type", [JSON, PROTOBUF])
def test_a_job_that_fails_says_why(ledger: Ledger, media_type: str) -> None:
    by_attribute, by_body, long = new_id(), new_id(), new_id()
    failed = [record("JobFailed", job_id) for job_id in (by_attribute, by_body, long)]
    failed[0]["attributes"] += pairs({"exception.message": "disk full"})
    failed[2]["body"] = {"stringValue": "x\0" * 100_000}
    created = [record("JobCreated", job_id) for job_id in (by_attribute, by_body, long)]
    # The creations come last: threads overtake each other.
    answer = send(ledger, request_of(*failed, *created, service_name="use1"), media_type)
    assert answer.content == (b"{}" if media_type == JSON else b"")
    assert ledger.job(by_attribute)["error"] == "disk full"
    assert ledger.job(by_body)["error"] == "a line of a log"
    assert ledger.job(long)["error"] == "x" * TEXT_CHARACTERS_MAX
    assert events(ledger, by_body)[-1]["payload"]["failed_dc"] == "use1"


def test_what_is_sent_again_in_any_parts_adds_nothing(ledger: Ledger) -> None:
    job_id = new_id()
    told = [
        record("JobCreated", job_id, spec={"n": 1}),
        *(record("JobProgressReported", job_id, at_ns=time.time_ns() + n, completed=1) for n in range(3)),
        record("JobCompleted", job_id),
    ]
    cluster = {"k8s_cluster.name": "use1"}
    assert rejected(send(ledger, request_of(*told, told[1], **cluster))) == (0, "")
    types = ["JobCreated", *["JobProgressReported"] * 3, "JobCompleted"]
    assert ledger.types(job_id) == types
    head = ledger.head()
    again = [request_of(*told, **cluster), *(request_of(each, **cluster) for each in reversed(told))]
    with ThreadPoolExecutor(8) as pool:
        for media_type in (JSON, PROTOBUF):
            answers = list(pool.map(lambda request: send(ledger, request, media_type), again * 2))  # noqa: B023
            assert {rejected(answer) for answer in answers} == {(0, "")}
    assert (ledger.head(), ledger.types(job_id)) == (head, types)


@pytest.mark.parametrize("media_type", [JSON, PROTOBUF])
def test_what_is_not_on_record_is_rejected_with_its_reason_and_the_others_are_taken(
    ledger: Ledger, media_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writes, "JOB_WAIT_S", 0.0)
    good, ended, absent = new_id(), new_id(), new_id()
    send(ledger, request_of(record("JobCreated", ended), record("JobCompleted", ended)))
    told = {
        "about no job: a record without type is none of the events of jobs": record(None),
        "about no job: 'JobDone' is none of the events of jobs": record("JobDone", good),
        "JobCreated without a job id": record("JobCreated"),
        "ci has not the right write for tenant beta": record("JobCreated", good, tenant_id="beta"),
        "tenant_id: must name a tenant": record("JobCreated", good, tenant_id="No Tenant"),
        "job_id: must be a job id": record("JobCreated", "no id"),
        "dc_id: is required": record("JobAccepted", good),
        "spec: ": record("JobCreated", good, spec=["no object"]),
        "spec.n: an integer is beyond": record("JobCreated", new_id(), spec={"n": 2**60}),
        f"job {ended} has ended": record("JobFailed", ended, error="late"),
        absent: record("JobCompleted", absent),
    }
    with structlog.testing.capture_logs() as logged:
        send(ledger, request_of(told[absent]), media_type, 503)
        answers = [send(ledger, request_of(each, record("JobCreated", new_id())), media_type) for each in told.values()]
        send(ledger, request_of(told[absent]), media_type, 503)
        whole = send(ledger, request_of(*told.values(), record("JobCreated", good)), media_type)
    for reason, answer in zip(told, answers, strict=True):
        count, message = rejected(answer)
        assert count == 1, reason
        assert message.startswith("1: "), message
        assert reason in message
    assert ledger.types(good) == ["JobCreated"]
    count, message = rejected(whole)
    assert (count, message.count("; ")) == (len(told), otlp.REASONS_MAX)
    assert message.endswith(f"{len(told) - otlp.REASONS_MAX}: other reasons")
    assert {line["rejected"] for line in logged if line["event"] == "logs_rejected"} == {1, len(told)}


def test_a_record_of_a_job_whose_creation_is_on_its_way_is_sent_again_by_the_sdk(ledger: Ledger) -> None:
    job_id = new_id()
    answer = send(ledger, request_of(record("JobCompleted", job_id)), PROTOBUF, 503)
    assert answer.headers["retry-after"] == "1"
    assert f"job {job_id} is not known yet" in Status.FromString(answer.content).message
    results = []
    provider = LoggerProvider()
    sender = exporter(ledger)
    export = sender.export

    def exported(batch: Any) -> LogRecordExportResult:
        results.append(export(batch))
        return results[-1]

    sender.export = exported  # type: ignore[method-assign]
    provider.add_log_record_processor(SimpleLogRecordProcessor(sender))
    done = LogRecord(timestamp=time.time_ns(), event_name="JobCompleted", attributes={"job.id": job_id})
    with ThreadPoolExecutor(1) as pool:
        emitting = pool.submit(provider.get_logger("worker").emit, done)
        send(ledger, request_of(record("JobCreated", job_id)))
        emitting.result(30)
    assert results == [LogRecordExportResult.SUCCESS]
    assert ledger.types(job_id) == ["JobCreated", "JobCompleted"]


def test_records_of_two_requests_that_wait_for_each_others_creation_are_all_taken_however_old_they_are(
    ledger: Ledger,
) -> None:
    an_hour_ago_ns = time.time_ns() - 3_600_000_000_000
    first, second, *others = (new_id() for _ in range(2 + 2 * writes.JOBS_AT_ONCE))

    def created(*jobs: str) -> list[dict[str, Any]]:
        return [record("JobCreated", job, at_ns=an_hour_ago_ns) for job in jobs]

    def request(unknown: str, *jobs: str) -> dict[str, Any]:
        return request_of(record("JobCompleted", unknown, at_ns=an_hour_ago_ns), *created(*jobs))

    one, other = request(first, *others[::2], second), request(second, *others[1::2], first)
    assert send(ledger, one, PROTOBUF, 503).headers["retry-after"] == "1"
    assert rejected(send(ledger, other)) == rejected(send(ledger, one)) == (0, "")
    assert [ledger.types(job) for job in (first, second)] == [["JobCreated", "JobCompleted"]] * 2


PROBLEMS = [
    each
    for each in vars(problems).values()
    if isinstance(each, ProblemType) and each is not problems.REPORT_ELSEWHERE  # it is of reports alone
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda each: each.name)
def test_a_problem_has_a_status_by_which_exporters_retry_if_and_only_if_a_retry_may_solve_it(
    problem: ProblemType,
) -> None:
    route = next(each for each in otlp.router.routes if isinstance(each, otlp.OtlpRoute))
    answer = route.problem(respond(ProblemError(problem, "why")), {"type": "http", "headers": []})
    assert (answer.status_code in (429, 502, 503, 504)) == (problem.retry is Retry.LATER)
    assert orjson.loads(answer.body).keys() == {"message"}


def test_a_wait_for_a_creation_ends_and_begins_anew_for_a_later_record(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = request_of(record("JobCompleted", new_id()))
    for wait_s, forgotten_s, status in ((60, 120, 503), (0, 120, 200), (60, 120, 503), (0, 0, 503), (0, 120, 200)):
        monkeypatch.setattr(writes, "JOB_WAIT_S", wait_s)
        monkeypatch.setattr(writes, "JOB_WAIT_FORGOTTEN_S", forgotten_s)
        assert rejected(send(ledger, absent, status=status))[0] == (status == 200)


def test_unknown_jobs_beyond_the_bound_are_forgotten_the_least_recent_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writes, "UNKNOWN_JOBS_MAX", 2)
    reports = writes.Reports(submitter=None, sealing=None)
    jobs = [("acme", name) for name in "abc"]
    assert all(reports.may_be_created(job) for job in jobs)
    monkeypatch.setattr(writes, "JOB_WAIT_S", 0.0)
    assert [reports.may_be_created(job) for job in jobs[1:]] == [False, False]
    assert reports._waits_s == {}


def deep(depth: int) -> dict[str, Any]:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return record("JobCreated", "deep", spec={"a": value})


def test_a_body_that_is_no_request_is_refused_in_its_own_encoding_and_never_to_be_sent_again(ledger: Ledger) -> None:
    head, logs = ledger.head(), request_of(record("JobCreated", "bad-input"))
    good = protobuf_of(logs)
    for reason, body in {
        "ends within a field": good[:-1],
        "is not UTF-8": good.replace(b"bad-input", b"bad-inp\xff\xfe"),
        "there is no wire type 3": b"\x0b",
        "a number does not end": b"\x0a" + b"\xff" * 10,
    }.items():
        assert reason in Status.FromString(send(ledger, body, PROTOBUF, 400).content).message
    for reason, text in {
        "not JSON": b"{",
        "no object": b"[]",
        "resourceLogs: must be a list of objects": b'{"resourceLogs": [1]}',
        "resourceLogs: is not of the type": b'{"resourceLogs": {}}',
        "traceId: ": orjson.dumps({"resourceLogs": [{"scopeLogs": [{"logRecords": [{"traceId": 1}]}]}]}),
        "timeUnixNano: ": orjson.dumps({"resourceLogs": [{"scopeLogs": [{"logRecords": [{"timeUnixNano": "x"}]}]}]}),
        "must be a number of 64 bits": orjson.dumps(logs).replace(b'"timeUnixNano":"', b'"timeUnixNano":"9999'),
        "no value of OTLP": orjson.dumps(logs).replace(b'{"stringValue":"JobCreated"}', b'{"stringValue":1}'),
        "intValue": orjson.dumps(logs).replace(b'{"stringValue":"JobCreated"}', b'{"intValue":"1e3"}'),
    }.items():
        assert reason in send(ledger, text, status=400).json()["message"], reason
    assert ledger.head() == head


@pytest.mark.parametrize("media_type", [JSON, PROTOBUF])
def test_a_record_beyond_a_bound_is_rejected_and_those_of_other_programs_beside_it_are_taken(
    ledger: Ledger, media_type: str
) -> None:
    good = new_id()
    created = record("JobCreated", good)
    named = {f"tallystick.spec.n{n}": "x" for n in range(ATTRIBUTES_MAX + 1)}
    beyond = {
        "nested more than 64 deep": deep(30 if media_type == PROTOBUF else 70),
        "a record or resource has more than": {"attributes": pairs(named | {"job.id": "wide"})},
    }
    for reason, told in beyond.items():
        count, message = rejected(send(ledger, request_of(told, created), media_type))
        assert (count, reason in message) == (1, True), message
    request = request_of(record("JobCreated", new_id()), **named)
    request["resourceLogs"] += request_of(record("JobCompleted", good))["resourceLogs"]
    assert rejected(send(ledger, request, media_type))[0] == 1
    assert ledger.types(good) == ["JobCreated", "JobCompleted"]


def test_the_attributes_of_a_resource_are_read_once_however_many_scopes_it_has() -> None:
    request = request_of(**{f"a{n}": "x" for n in range(ATTRIBUTES_MAX)})
    request["resourceLogs"][0]["scopeLogs"] *= 5000
    body = orjson.dumps(request)
    began_s = time.process_time()
    assert len([*records_of(body, is_protobuf=False)]) == 5001
    assert time.process_time() - began_s < 2


def test_no_name_of_an_attribute_takes_long_or_much_memory() -> None:
    record = Record({"job.id": "j", f"tallystick.spec.{'a.' * 2_000_000}z": 1}, "JobCreated", None, 0, None)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInputError, match="nested more than 64 deep"):
            otlp.event_of(record, OtlpSettings())
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


def test_a_field_of_one_record_is_in_no_other_record_of_its_resource() -> None:
    above = {"tallystick.spec": {"by": {"team": "data"}}, "tallystick.spec.more": {"a": 1}}
    own = {"tallystick.spec.by.user": "u-1", "tallystick.spec.more": {"b": 1}, "tallystick.spec.at": "x"}
    specs = [
        otlp.event_of(Record(above | each, "JobCreated", None, 0, None), OtlpSettings())["spec"] for each in (own, {})
    ]
    assert specs == [
        {"by": {"team": "data", "user": "u-1"}, "more": {"b": 1}, "at": "x"},
        {"by": {"team": "data"}, "more": {"a": 1}},
    ]


@pytest.mark.parametrize(
    "given",
    [
        {"tallystick.spec.a.b": 1, "tallystick.spec.a": 2},
        {"tallystick.spec.a": 2, "tallystick.spec.a.b": 1},
        {"tallystick.spec": {"a": {"b": 1}}, "tallystick.spec.a": 2},
        {"tallystick.spec": {"a": 1}, "tallystick.spec.a": {"b": 2}},
        {"tallystick.spec": "a", "tallystick.spec.a": 2},
    ],
)
def test_a_field_that_is_a_value_and_an_object_is_rejected_in_any_order(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=r"is a value and an object|is given twice"):
        otlp.event_of(Record(given, "JobCreated", None, 0, None), OtlpSettings())


def test_bodies_are_plain_or_gzip_and_bounded_either_way(ledger: Ledger) -> None:
    head, good = ledger.head(), protobuf_of(request_of(record(None)))
    packed = gzip.compress(good)
    for reason, body in {
        "not gzip": good,
        "truncated": packed[:-9],
        "bytes behind": packed + b"x",
    }.items():
        answer = send(ledger, body, PROTOBUF, 400, **{"Content-Encoding": "gzip"})
        assert reason in Status.FromString(answer.content).message
    bomb = gzip.compress(bytes(64 << 20))
    assert len(bomb) < 1 << 17
    for body, more in ((bomb, {"Content-Encoding": "gzip"}), (bytes(17 << 20), {})):
        answer = send(ledger, body, PROTOBUF, 413, **more)
        assert "16777216 bytes" in Status.FromString(answer.content).message
    answer = send(ledger, good, PROTOBUF, 415, **{"Content-Encoding": "zstd"})
    assert Status.FromString(answer.content).message == "send the body plain or as gzip"
    headers = {"Authorization": f"Bearer {ledger.token}", "Content-Type": "text/plain"}
    answer = ledger.root.post("/v1/logs", content=b"", headers=headers)
    assert (answer.status_code, answer.json()["message"]) == (415, "send application/json, not text/plain")
    for body in (b"\x0a\x00" * (otlp.RECORDS_MAX + 1), b"\x0a\x04\x0a\x00\x0a\x00" * 30_000):
        send(ledger, body, PROTOBUF, 413)
    send(ledger, b'{"resourceLogs": [' + b"{}," * 500_000 + b"{}]}", status=413)
    assert send(ledger, {"resourceLogs": []}).content == b"{}"
    assert ledger.head() == head


def test_rights_are_checked_before_a_body_and_a_tenant_of_others_is_on_record_as_refused(ledger: Ledger) -> None:
    reader, both = ledger.issue("read", "acme"), ledger.issue("write", "team-*")
    created = request_of(record("JobCreated", new_id()))
    answer = send(ledger, created, PROTOBUF, 403, token=reader)
    assert "has not the right write" in Status.FromString(answer.content).message
    assert send(ledger, created, JSON, 401, token="tally_wrong").json().keys() == {"message"}
    count, message = rejected(send(ledger, created, token=both))
    assert (count, message) == (1, "1: no tenant is named, and the token may write to several, or to all")
    job_id = new_id()
    named = request_of(record("JobCreated", job_id), tallystick_tenant_id="team-a")
    assert rejected(send(ledger, named, token=both)) == (0, "")
    assert ledger.job(job_id, "team-a")["status"] == "SUBMITTED"
    foreign = record("JobCreated", new_id(), tenant_id="beta")
    answer = send(ledger, request_of(foreign), PROTOBUF, 403)
    assert "has not the right write for tenant beta" in Status.FromString(answer.content).message
    count, message = rejected(send(ledger, request_of(foreign, record("JobCreated", new_id()))))
    assert (count, message) == (1, "1: ci has not the right write for tenant beta")

    def refusals() -> list[Any]:
        items = ledger.root.get("/v1/chain/entries", params={"tenant_id": "_system", "limit": 1000}).json()["items"]
        entries = [orjson.loads(item["payload"]) for item in items if item["action"] == "ACCESS_REFUSED"]
        return [refusal for entry in entries for refusal in entry["refusals"]]

    deadline = time.monotonic() + 30
    while not any(each.get("tenant_id") == "beta" for each in refusals()):
        assert time.monotonic() < deadline, refusals()


def test_no_record_gets_into_the_chain_of_the_ledger_itself(ledger: Ledger) -> None:
    named, unnamed = record("JobCreated", "log-of-system", tenant_id="_system"), record("JobCreated", "log-of-system")
    for token in (ledger.issue("write", "*"), ledger.issue("write", "_system")):
        assert rejected(send(ledger, request_of(named, unnamed), token=token))[0] == 2
    assert ledger.job("log-of-system", "_system")["status"] == 404


def test_a_tenant_whose_events_are_private_or_must_be_signed_is_no_exception(ledger: Ledger) -> None:
    job_id, token = new_id(), ledger.issue("write", "private")
    declared = {"fields": ["spec.user"], "subject": "spec.user"}
    ledger.root.put("/v1/tenants/private/privacy", json=declared).raise_for_status()
    created = request_of(record("JobCreated", job_id, spec={"user": "u-1"}))
    for media_type in (JSON, PROTOBUF, JSON):
        assert rejected(send(ledger, created, media_type, token=token)) == (0, "")
    assert ledger.types(job_id, "private") == ["JobCreated"]
    ledger.root.put("/v1/tenants/private/signatures", json={"types": ["JobFailed"]}).raise_for_status()
    failed = request_of(record("JobFailed", job_id, error="disk full"))
    count, message = rejected(send(ledger, failed, token=token))
    assert (count, "sign" in message) == (1, True)
    assert ledger.types(job_id, "private") == ["JobCreated"]


def test_no_key_lets_a_private_value_be_guessed(ledger: Ledger, postgres: EmbeddedPostgres) -> None:
    job_id, token, at_ns = new_id(), ledger.issue("write", "guessed"), time.time_ns()
    ledger.root.put("/v1/tenants/guessed/privacy", json={"fields": ["spec.user"], "subject": "spec.user"})
    guessed = [f"u-{number}" for number in range(3)]
    told = record("JobCreated", job_id, at_ns=at_ns, spec={"user": guessed[1]}, tenant_id="guessed")
    for _ in range(2):
        assert rejected(send(ledger, request_of(told), token=token)) == (0, "")
    assert ledger.types(job_id, "guessed") == ["JobCreated"]
    event = {"type": "JobCreated", "job_id": job_id, "tenant_id": "guessed", "trace_time": at_ns / 1e9}
    contents = [canonical.encode(event | {"spec": {"user": user}}) for user in guessed]
    keys = [hashlib.sha256(b"%d\n%b" % (at_ns, content)).hexdigest() for content in contents]

    async def known() -> set[str]:
        async with connected_to(postgres.superuser_url("otlp")) as connection:
            rows = await connection.fetch("SELECT key FROM scheduler.idempotency WHERE route = $1", writes.Route.LOGS)
            return {row["key"] for row in rows}

    stored = asyncio.run(known())
    assert stored
    assert stored.isdisjoint(keys)


def test_a_quota_that_is_used_up_is_answered_so_that_the_sdk_waits(
    postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, first = tmp_path_factory.mktemp("otlp_quota"), callers.new_token()
    FIRST_TOKEN.store(folder, FirstToken("root", first.digest.hex()))
    quota = {"tenant_requests": 1, "burst": "4s"}
    with serving(postgres, folder, "otlp_quota", auth={"mode": "tokens"}, quota=quota) as url:
        ledger = Ledger(url, first.text)
        told = request_of(*(record("JobCreated", new_id()) for _ in range(4)))
        assert rejected(send(ledger, told)) == (0, "")
        answer = send(ledger, request_of(*(record("JobCreated", new_id()) for _ in range(4))), PROTOBUF, 429)
        assert int(answer.headers["retry-after"]) >= 1
        assert "quota.tenant_requests" in Status.FromString(answer.content).message
