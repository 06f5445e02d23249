"""``POST /api/v1/lineage``: what the client of OpenLineage tells of runs becomes jobs, once, whatever comes when."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import httpx
import pytest
import structlog
from openlineage.client import OpenLineageClient
from openlineage.client.event_v2 import (
    Dataset,
    DatasetEvent,
    InputDataset,
    Job,
    JobEvent,
    OutputDataset,
    Run,
    RunEvent,
    RunState,
)
from openlineage.client.facet_v2 import (
    error_message_run,
    job_type_job,
    nominal_time_run,
    output_statistics_output_dataset,
    parent_run,
    tags_job,
)

from app.dev.embedded import EmbeddedPostgres
from app.edge.routes import lineage
from app.edge.routes.lineage import NAMES_MAX, TEXT_CHARACTERS_MAX
from app.runtime.state.kept_files import FIRST_TOKEN, FirstToken
from app.trust import callers
from tests.app.service_thread import serving

AT = "2026-11-21T13:40:00.250Z"
PRODUCER = "https://example.org/scheduler"
TENANTS = {"dags": "acme", "dags-*": "beta", "dags-ml-*": "gamma"}


class Ledger:
    """A service, and a token of its tenant acme alone."""

    def __init__(self, url: str, root: str) -> None:
        self.url = url
        self.root = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {root}"}, timeout=60, trust_env=False)
        self.token = self.issue("write", "acme")

    def issue(self, right: str, tenant: str) -> str:
        wanted = {"name": "ci", "rights": [right], "tenants": [tenant]}
        made: str = self.root.post("/v1/tokens", json=wanted).raise_for_status().json()["token"]
        return made

    def tell(self, body: Any, token: str | None = None, status: int = 200) -> Any:
        headers = {"Authorization": f"Bearer {token or self.token}"}
        answer = self.root.post("/api/v1/lineage", json=body, headers=headers)
        assert answer.status_code == status, answer.text
        return answer.json()

    def job(self, run_id: str, tenant: str = "acme") -> dict[str, Any]:
        found: dict[str, Any] = self.root.get(
            f"/v1/jobs/{run_id}", params={"tenant_id": tenant, "consistency": "strong"}
        ).json()
        return found

    def types(self, run_id: str, tenant: str = "acme") -> list[str]:
        listed = self.root.get(f"/v1/jobs/{run_id}/events", params={"tenant_id": tenant}).raise_for_status().json()
        return [event["type"] for event in listed["items"]]

    def head(self) -> int:
        seq: int = self.root.get("/v1/chain/head", params={"tenant_id": "acme"}).raise_for_status().json()["seq"]
        return seq


@pytest.fixture(scope="module")
def ledger(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ledger]:
    folder, first = tmp_path_factory.mktemp("lineage"), callers.new_token()
    FIRST_TOKEN.store(folder, FirstToken("root", first.digest.hex()))
    settings = {"auth": {"mode": "tokens"}, "lineage": {"tenants": TENANTS}}
    with serving(postgres, folder, "lineage", **settings) as url:
        yield Ledger(url, first.text)


@pytest.fixture
def client(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> OpenLineageClient:
    """The client as Airflow and others make it: of two variables of the environment."""
    monkeypatch.setenv("OPENLINEAGE_URL", ledger.url)
    monkeypatch.setenv("OPENLINEAGE_API_KEY", ledger.token)
    return OpenLineageClient()


def run_event(state: RunState, run_id: str, run: Any = None, job: Any = None, **more: Any) -> RunEvent:
    return RunEvent(
        eventTime=AT,
        eventType=state,
        run=Run(runId=run_id, facets=run or {}),
        job=Job(namespace="airflow-prod", name="daily.load", facets=job or {}),
        producer=PRODUCER,
        **more,
    )


def plain(state: str | None, run_id: str, namespace: str = "dags", **more: Any) -> dict[str, Any]:
    event = {
        "eventType": state,
        "eventTime": AT,
        "run": {"runId": run_id},
        "job": {"namespace": namespace, "name": "n"},
    }
    return {**event, **more}


def new_id() -> str:
    return str(uuid.uuid4())


def test_a_run_that_the_client_tells_of_is_a_job_that_is_found(ledger: Ledger, client: OpenLineageClient) -> None:
    run_id, dag_run = new_id(), new_id()
    parent = parent_run.ParentRunFacet(
        run=parent_run.Run(runId=dag_run), job=parent_run.Job(namespace="airflow-prod", name="daily")
    )
    job = {
        "jobType": job_type_job.JobTypeJobFacet(processingType="BATCH", integration="AIRFLOW", jobType="TASK"),
        "tags": tags_job.TagsJobFacet(tags=[tags_job.TagsJobFacetFields(key="team", value="ml")]),
    }
    nominal = nominal_time_run.NominalTimeRunFacet(nominalStartTime="2026-11-21T00:00:00Z")
    written = output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet(rowCount=7, size=1000)
    source = InputDataset(namespace="postgres://db:5432", name="public.orders")
    table = OutputDataset(namespace="s3://lake", name="orders", outputFacets={"outputStatistics": written})
    client.emit(run_event(RunState.START, run_id, {"parent": parent, "nominalTime": nominal}, job, inputs=[source]))
    client.emit(run_event(RunState.RUNNING, run_id))
    assert ledger.job(run_id)["status"] == "RUNNING"
    client.emit(run_event(RunState.COMPLETE, run_id, inputs=[source], outputs=[table]))
    done = ledger.job(run_id)
    assert (done["status"], done["actor"], done["spec"]) == (
        "COMPLETED",
        "ci",
        {
            "namespace": "airflow-prod",
            "name": "daily.load",
            "producer": PRODUCER,
            "parent": {"run_id": dag_run, "namespace": "airflow-prod", "name": "daily"},
            "nominal_start": "2026-11-21T00:00:00Z",
            "integration": "AIRFLOW",
            "kind": "TASK",
            "labels": {"team": "ml", "openlineage_client_version": version("openlineage-python")},
            "inputs": ["postgres://db:5432/public.orders"],
        },
    )
    assert done["result"]["aggregate_metrics"] == {
        "inputs": ["postgres://db:5432/public.orders"],
        "outputs": ["s3://lake/orders"],
        "output_rows": 7,
        "output_bytes": 1000,
    }
    listed = ledger.root.get(f"/v1/jobs/{run_id}/events", params={"tenant_id": "acme"}).json()["items"]
    assert [event["type"] for event in listed] == ["JobCreated", "JobAccepted", "JobProgressReported", "JobCompleted"]
    assert {event["payload"]["trace_time"] for event in listed} == {1795268400.25}
    for where in (f"spec.parent.run_id:{dag_run}", "spec.inputs:postgres://db:5432/public.orders"):
        params = {"tenant_id": "acme", "where": where, "dc": "airflow-prod"}
        assert [each["job_id"] for each in ledger.root.get("/v1/jobs", params=params).json()["items"]] == [run_id]


def test_a_client_may_compress_what_it_sends(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT__TYPE", "http")
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT__URL", ledger.url)
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT__AUTH", f'{{"type": "api_key", "apiKey": "{ledger.token}"}}')
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT__COMPRESSION", "gzip")
    run_id = new_id()
    OpenLineageClient().emit(run_event(RunState.START, run_id))
    assert ledger.types(run_id) == ["JobCreated", "JobAccepted"]


def test_a_run_that_fails_says_why_and_one_that_is_aborted_is_cancelled(
    ledger: Ledger, client: OpenLineageClient
) -> None:
    failed, aborted, silent, of_spark = (new_id() for _ in range(4))
    error = error_message_run.ErrorMessageRunFacet(message="disk full", programmingLanguage="python", stackTrace="at x")
    for run_id in (failed, aborted, silent):
        client.emit(run_event(RunState.START, run_id))
    client.emit(run_event(RunState.FAIL, failed, {"errorMessage": error}))
    client.emit(run_event(RunState.FAIL, silent))
    client.emit(run_event(RunState.ABORT, aborted))
    exception = {"message": "[USER_RAISED_EXCEPTION] boom", "stackTrace": "at y"}
    ledger.tell(plain("FAIL", of_spark) | {"run": {"runId": of_spark, "facets": {"spark.exception": exception}}})
    assert ledger.job(of_spark)["error"] == "[USER_RAISED_EXCEPTION] boom"
    assert (ledger.job(failed)["status"], ledger.job(failed)["error"]) == ("FAILED", "disk full")
    assert ledger.job(silent)["error"] == "the run failed and did not say why"
    assert ledger.job(aborted)["status"] == "CANCELLED"


def test_events_in_any_order_and_again_make_one_job_once(ledger: Ledger) -> None:
    states = ("START", "RUNNING", "COMPLETE")
    for order in itertools.permutations(states):
        run_id = new_id()
        for state in order:
            ledger.tell(plain(state, run_id))
        assert (ledger.job(run_id)["status"], ledger.job(run_id)["spec"]["name"]) == ("COMPLETED", "n"), order
        told = ledger.types(run_id)
        assert sorted(told) == sorted(set(told))
        head = ledger.head()
        for state in (*states, *order, "FAIL", "ABORT"):
            ledger.tell(plain(state, run_id))
            ledger.tell(plain(state, run_id, producer="another"))
        assert (ledger.head(), ledger.job(run_id)["status"]) == (head, "COMPLETED"), order


def test_an_end_that_is_heard_of_first_is_a_job_that_ended(ledger: Ledger) -> None:
    for state, status in (("FAIL", "FAILED"), ("ABORT", "CANCELLED"), ("RUNNING", "RUNNING")):
        run_id = new_id()
        assert ledger.tell(plain(state, run_id)) == {"events": 1, "recorded": 1}
        assert (ledger.job(run_id)["status"], ledger.types(run_id)[0]) == (status, "JobCreated")


async def test_a_start_that_comes_many_times_at_once_is_one(ledger: Ledger) -> None:
    run_id, headers = new_id(), {"Authorization": f"Bearer {ledger.token}"}
    async with httpx.AsyncClient(base_url=ledger.url, headers=headers, timeout=60, trust_env=False) as client:
        asked = [client.post("/api/v1/lineage", json=plain("START", run_id)) for _ in range(12)]
        assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}
    assert ledger.types(run_id) == ["JobCreated", "JobAccepted"]


def test_what_is_about_no_run_is_well_and_records_nothing(ledger: Ledger, client: OpenLineageClient) -> None:
    head = ledger.head()
    client.emit(DatasetEvent(eventTime=AT, dataset=Dataset(namespace="s3://lake", name="orders"), producer=PRODUCER))
    client.emit(JobEvent(eventTime=AT, job=Job(namespace="dags", name="n"), producer=PRODUCER))
    client.emit(run_event(RunState.OTHER, new_id()))
    nothing = {"events": 1, "recorded": 0}
    for event in (
        plain("PAUSED", new_id()),
        plain(None, new_id()),
        plain("START", "no id of a job"),
        plain("START", ""),
    ):
        assert ledger.tell(event) == nothing
    assert ledger.tell([]) == {"events": 0, "recorded": 0}
    assert ledger.head() == head


def test_the_tenant_is_that_of_the_namespace_else_the_only_one_of_the_token(ledger: Ledger) -> None:
    both = ledger.issue("write", "*")
    for namespace, tenant in (("dags", "acme"), ("dags-eu", "beta"), ("dags-ml-eu", "gamma")):
        run_id = new_id()
        ledger.tell(plain("START", run_id, namespace), both)
        assert ledger.job(run_id, tenant)["tenant_id"] == tenant
    run_id = new_id()
    ledger.tell(plain("START", run_id, "elsewhere"))
    assert ledger.job(run_id)["tenant_id"] == "acme"
    with structlog.testing.capture_logs() as logged:
        refused = ledger.tell(plain("START", new_id(), "elsewhere"), both, 422)
    assert "lineage.tenants names no tenant" in refused["detail"]
    assert [line["reason"] for line in logged if line["event"] == "lineage_refused"] == [refused["detail"]]
    assert ledger.tell(plain("START", new_id(), "dags-eu"), status=403)["tenant_id"] == "beta"
    reader = ledger.issue("read", "acme")
    ledger.tell(plain("START", new_id()), reader, 403)


def test_no_run_is_told_into_the_chain_of_the_ledger_itself(ledger: Ledger) -> None:
    run_id = new_id()
    told = ledger.tell(plain("START", run_id, "elsewhere"), ledger.issue("write", "_system"), 422)
    assert "lineage.tenants names no tenant" in told["detail"]
    assert ledger.job(run_id, "_system")["status"] == 404


def test_a_batch_is_taken_whole_or_not_at_all(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [new_id() for _ in range(50)]
    batch = [plain(state, run_id) for state in ("START", "COMPLETE") for run_id in runs]
    assert ledger.tell([*batch, plain("OTHER", new_id())]) == {"events": 101, "recorded": 100}
    assert {ledger.job(run_id)["status"] for run_id in runs} == {"COMPLETED"}
    head = ledger.head()
    ledger.tell([plain("START", new_id()), plain("START", new_id(), "dags-eu")], status=403)
    ledger.tell([plain("START", new_id()), {"no": "event"}], status=422)
    monkeypatch.setattr(lineage, "EVENTS_MAX", 2)
    ledger.tell([plain("START", new_id())] * 3, status=413)
    assert ledger.head() == head


@pytest.mark.parametrize("body", [0, 1, "START", {}, [[]], {"run": {"runId": 1}, "job": {}}, {"run": {"runId": "x"}}])
def test_what_is_no_event_is_refused(ledger: Ledger, body: Any) -> None:
    assert ledger.tell(body, status=422)["type"].endswith("/invalid-request")


def test_facets_of_any_size_and_form_leave_a_small_spec() -> None:
    large = "x" * 100_000 + "\0"
    many = [{"namespace": "n\0", "name": f"{number}{large}", "outputFacets": 1} for number in range(1000)]
    tags = {"tags": [{"key": f"k{number}", "value": large} for number in range(1000)]}
    event = plain("START", "r", large, inputs=many, outputs=many, producer=large)
    event["job"]["facets"] = {"tags": tags, "sql": {"query": large}, "jobType": [], "ownership": {"owners": many}}
    event["run"]["facets"] = {
        "parent": "none",
        "nominalTime": {"nominalStartTime": 7},
        "spark.logicalPlan": {"plan": many},
    }
    read = lineage.read_event(event)
    assert read is not None
    spec = read.fields("JobCreated")["spec"]
    assert len(spec["inputs"]) == len(spec["outputs"]) == len(spec["owners"]) == len(spec["labels"]) == NAMES_MAX
    texts = [*spec["inputs"], *spec["labels"].values(), spec["namespace"], spec["producer"]]
    assert max(map(len, texts)) <= TEXT_CHARACTERS_MAX
    assert not [text for text in texts if "\0" in text]
    assert spec.keys() == {"namespace", "name", "producer", "inputs", "outputs", "owners", "labels"}
    assert len(read.fields("JobAccepted")["dc_id"]) == 256
