"""Events keep the span that they belong to (W3C Trace Context), and jobs are found by their trace."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from app.dev.embedded import EmbeddedPostgres
from tallystick_client import Client
from tests.app.service_thread import serving

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = f"00-{TRACE}-00f067aa0ba902b7-01"
OTHER = f"00-{'a' * 32}-00f067aa0ba902b7-00"


@pytest.fixture(scope="module")
def url(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(postgres, tmp_path_factory.mktemp("traces"), "traces") as url:
        yield url


def spans(url: str, tenant: str, job_id: str) -> list[str | None]:
    with Client(url) as client:
        return [event["payload"].get("traceparent") for event in client.list_events(tenant, job_id)]


def submit(url: str, tenant: str, job_id: str, span: str | None = None, status: int = 201, **body: Any) -> Any:
    headers = {} if span is None else {"traceparent": span}
    answer = httpx.post(
        f"{url}/v1/jobs", json={"tenant_id": tenant, "job_id": job_id, "spec": {}, **body}, headers=headers, timeout=60
    )
    assert answer.status_code == status, answer.text
    return answer.json()


def test_an_event_has_the_span_of_its_request_or_its_own(url: str) -> None:
    submit(url, "acme", "of-header", SPAN)
    submit(url, "acme", "its-own", OTHER, traceparent=SPAN)
    submit(url, "acme", "none")
    httpx.post(
        f"{url}/v1/jobs/of-header/events",
        json={"tenant_id": "acme", "type": "JobCompleted"},
        headers={"traceparent": OTHER},
        timeout=60,
    ).raise_for_status()
    assert spans(url, "acme", "of-header") == [SPAN, OTHER]
    assert spans(url, "acme", "its-own") == [SPAN]
    assert spans(url, "acme", "none") == [None]


@pytest.mark.parametrize(
    "span",
    ["", "00", SPAN.upper(), f"ff{SPAN[2:]}", f"00-{'0' * 32}-00f067aa0ba902b7-01", f"00-{TRACE}-{'0' * 16}-01", "é"],
)
def test_a_header_that_names_no_span_is_passed_over(url: str, span: str) -> None:
    job_id = f"passed-{abs(hash(span))}"
    httpx.post(
        f"{url}/v1/jobs",
        json={"tenant_id": "acme", "job_id": job_id},
        headers=[(b"traceparent", span.encode("latin-1"))],
        timeout=60,
    ).raise_for_status()
    assert spans(url, "acme", job_id) == [None]


def test_a_field_that_names_no_span_is_refused(url: str) -> None:
    refused = submit(url, "acme", "refused", traceparent="00-short", status=422)
    assert "must be a traceparent of W3C Trace Context" in refused["detail"]


def test_a_repetition_in_another_span_is_the_same_request(url: str) -> None:
    body, path = {"tenant_id": "acme", "job_id": "repeated"}, f"{url}/v1/jobs"
    answers = [
        httpx.post(path, json=body, headers={"Idempotency-Key": "once", "traceparent": span}, timeout=60)
        for span in (SPAN, OTHER)
    ]
    assert [answer.status_code for answer in answers] == [201, 201], answers[1].text
    assert spans(url, "acme", "repeated") == [SPAN]


def test_lines_of_a_batch_have_their_own_spans(url: str) -> None:
    lines = [{"tenant_id": "acme", "type": "JobCreated", "job_id": f"line-{number}", "spec": {}} for number in range(2)]
    lines[0]["traceparent"] = SPAN
    headers = {"Content-Type": "application/x-ndjson", "traceparent": OTHER}
    content = "\n".join(map(json.dumps, lines))
    httpx.post(f"{url}/v1/events", content=content, headers=headers, timeout=60).raise_for_status()
    assert [spans(url, "acme", f"line-{number}") for number in range(2)] == [[SPAN], [None]]


def test_jobs_are_found_by_their_trace_with_and_without_an_index(url: str) -> None:
    submit(url, "searched", "traced", SPAN)
    submit(url, "searched", "elsewhere", OTHER)
    submit(url, "searched", "untraced", spec={"trace": TRACE})

    def found() -> list[str]:
        with Client(url) as client:
            return [job["job_id"] for job in client.list_jobs("searched", where=f"trace:{TRACE}")]

    assert found() == ["traced"]
    httpx.put(f"{url}/v1/tenants/searched/search", json={"fields": ["trace"]}, timeout=60).raise_for_status()
    submit(url, "searched", "traced-later", SPAN)
    assert found() == ["traced-later", "traced"]


def test_a_client_sends_the_span_of_its_environment_by_way_of_a_spool_too(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACEPARENT", SPAN)
    with Client(url) as client:
        client.create_job("clients", {}, job_id="direct")
    with (
        Client("http://127.0.0.1:9", spool=tmp_path / "spool", patience_s=0.0) as client,
        client.job("clients", job_id="spooled"),
    ):
        pass
    monkeypatch.setenv("TRACEPARENT", OTHER)
    with Client(url, spool=tmp_path / "spool") as client:
        assert client.flush() == 0
        client.job("clients", job_id="direct-begun").begin()
        client.job("clients", job_id="direct-begun").begin()
    assert spans(url, "clients", "direct") == [SPAN]
    assert spans(url, "clients", "spooled") == [SPAN] * 3
    assert spans(url, "clients", "direct-begun") == [OTHER] * 2


def test_a_chain_whose_events_name_spans_verifies(url: str) -> None:
    submit(url, "verified", "traced", SPAN)
    found = httpx.get(f"{url}/v1/chain/verify", params={"tenant_id": "verified"}, timeout=60).json()
    assert (found["valid"], found["first_break"]) == (True, None)


def test_metrics_have_the_trace_of_a_request_as_exemplar_where_openmetrics_is_asked_for(url: str) -> None:
    submit(url, "measured", "traced", SPAN)
    httpx.get(f"{url}/v1/jobs", params={"tenant_id": "measured"}, headers={"traceparent": OTHER}, timeout=60)
    asked = {"Accept": "application/openmetrics-text; version=1.0.0"}
    answer = httpx.get(f"{url}/metrics", headers=asked, timeout=60)
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    parse: Any = text_string_to_metric_families
    families = {family.name: family for family in parse(answer.text)}
    exemplars = {
        sample.labels["route"]: sample.exemplar.labels["trace_id"]
        for sample in families["http_request_duration_seconds"].samples
        if sample.exemplar is not None
    }
    assert (exemplars["/v1/jobs"], TRACE in answer.text) == (OTHER.split("-")[1], True)
    assert "trace_id" not in httpx.get(f"{url}/metrics", timeout=60).text
