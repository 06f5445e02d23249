"""What is wrong with a request or a setting is said in words, and a misspelt field by its own name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from app.edge.forms.validation import LISTED_MAX, invalid
from app.runtime.settings.config import Settings, load_settings
from app.runtime.settings.words import WORDS
from ledger import names
from ledger.errors import ConfigurationError
from tests.app.client import Client

TENANT = WORDS[names.anchored(names.TENANT_ID)]
NDJSON = {"Content-Type": "application/x-ndjson"}


def patterns_in(schema: object) -> Iterator[str]:
    """The regular expressions of a JSON schema, wherever they are."""
    if isinstance(schema, dict):
        found = schema.get("pattern")
        if isinstance(found, str):
            yield found
        for each in schema.values():
            yield from patterns_in(each)
    elif isinstance(schema, list):
        for each in schema:
            yield from patterns_in(each)


async def test_every_form_that_a_request_or_a_setting_must_have_is_said_in_words(shared_client: Client) -> None:
    described = (await shared_client.get("/openapi.json")).json()
    bodies = [each.get("requestBody") for path in described["paths"].values() for each in path.values()]
    schemas = [described["components"]["schemas"], described["paths"], bodies, Settings.model_json_schema()]
    answers = {"responses"}
    assert {each for each in patterns_in(without(schemas, answers)) if each not in WORDS} == set()
    assert not any(re.search(r"[\[{^$\\]", said) for said in WORDS.values())


def without(schema: Any, names: set[str]) -> Any:
    """A JSON schema but for what stands under these names."""
    if isinstance(schema, dict):
        return {name: without(each, names) for name, each in schema.items() if name not in names}
    return [without(each, names) for each in schema] if isinstance(schema, list) else schema


async def refused(answer: httpx.Response) -> tuple[str, str]:
    """The field that an answer is about, and what it says of it."""
    assert answer.status_code == 422, answer.text
    body = answer.json()
    return body["path"], body["detail"]


async def test_a_bad_tenant_is_told_in_words_wherever_it_stands(shared_client: Client) -> None:
    line = b'{"tenant_id":"Acme Corp","type":"JobCreated"}'
    for answer, where in (
        (await shared_client.post("/v1/jobs", json={"tenant_id": "Acme Corp"}), ""),
        (await shared_client.post("/v1/events", content=line, headers=NDJSON), "line 1: "),
        (await shared_client.get("/v1/jobs?tenant_id=Acme+Corp"), ""),
        (await shared_client.post("/v1/snapshots", json={"tenant_id": "Acme Corp"}), ""),
    ):
        path, detail = await refused(answer)
        assert path == "tenant_id"
        assert detail.startswith(f"{where}tenant_id: {TENANT}")
    _, detail = await refused(await shared_client.post("/v1/jobs/a%20b/cancel", json={"tenant_id": "acme"}))
    assert detail == f"job_id: {WORDS[names.anchored(names.JOB_ID)]}"


@pytest.mark.parametrize(
    ("path", "body", "wrong", "said"),
    [
        ("/v1/jobs", {"tenant": "a"}, "tenant", "the nearest is tenant_id, which is required"),
        ("/v1/jobs", {"tenantId": "a"}, "tenantId", "the nearest is tenant_id, which is required"),
        ("/v1/jobs", {"tenant_id": "a", "assigned_dc": ["x"]}, "assigned_dc", "the nearest is assigned_dcs"),
        ("/v1/jobs", {"zzz": 1}, "zzz", "there are tenant_id, fence_token, "),
        ("/v1/jobs/j/events", {"tenant_id": "a", "type": "JobAccepted", "dc": "x"}, "dc", "the nearest is dc_id"),
        (
            "/v1/jobs/j/events",
            {"tenant_id": "a", "typ": "JobAccepted"},
            "typ",
            "the nearest is type, which is required",
        ),
        ("/v1/commitments", {"tenant_id": "a", "comitment": {}}, "comitment", "the nearest is commitment, which is"),
        (
            "/v1/commitments",
            {"tenant_id": "a", "commitment": {"kind": "Lease", "resorce": "r", "holder": "h"}},
            "commitment.resorce",
            "the nearest is resource, which is required",
        ),
        (
            "/v1/commitments",
            {
                "tenant_id": "a",
                "commitment": {
                    "kind": "Placement",
                    "capsule": "c",
                    "node": "n",
                    "reservation": {"cpu_milis": 1},
                },
            },
            "commitment.reservation.cpu_milis",
            "the nearest is cpu_millis",
        ),
        ("/v1/webhooks", {"tenant_id": "a", "uri": "https://x"}, "uri", "the nearest is url, which is required"),
    ],
)
async def test_a_misspelt_field_is_told_by_its_name_with_the_nearest_that_there_is(
    shared_client: Client, path: str, body: dict[str, Any], wrong: str, said: str
) -> None:
    found, detail = await refused(await shared_client.post(path, json=body, headers={"Idempotency-Key": "k"}))
    assert found == wrong
    assert detail.startswith(f"{wrong}: there is no such field; {said}")


async def test_what_is_missing_alone_is_told_as_required(shared_client: Client) -> None:
    assert await refused(await shared_client.post("/v1/jobs", json={"spec": {}})) == (
        "tenant_id",
        "tenant_id: is required",
    )
    assert await refused(await shared_client.post("/v1/jobs/j/events", json={"tenant_id": "a"})) == (
        "type",
        "type: is required",
    )


async def test_a_misspelt_line_or_parameter_is_told_by_its_name(shared_client: Client) -> None:
    line = b'{"tenant_id":"a","type":"JobCompleted","job":"j"}'
    _, detail = await refused(await shared_client.post("/v1/events", content=line, headers=NDJSON))
    assert detail == "line 1: job: there is no such field; the nearest is job_id, which is required"
    path, detail = await refused(await shared_client.get("/v1/jobs?tenant=a"))
    assert (path, detail) == ("tenant", "tenant: there is no such query parameter; the nearest is tenant_id")


async def test_a_run_of_a_namespace_without_a_tenant_is_told_what_to_set(shared_client: Client) -> None:
    event = {"eventType": "START", "run": {"runId": "r"}, "job": {"namespace": "spark", "name": "n"}}
    answer = await shared_client.post("/api/v1/lineage", json=event)
    assert answer.status_code == 422
    assert answer.json()["detail"] == (
        "lineage.tenants names no tenant for namespace 'spark': add one to that setting, or give the emitter a token "
        "that may write to one tenant alone"
    )


def test_a_wrong_setting_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TALLY_REGION", "US East")
    with pytest.raises(ConfigurationError, match=r"^region: must be 1 to 32 of a-z and 0-9$"):
        load_settings()


def test_of_many_fields_so_many_are_listed() -> None:
    form: Any = TypedDict("form", {f"field{number}": int for number in range(LISTED_MAX + 3)})  # type: ignore[misc]
    form.__pydantic_config__ = {"extra": "forbid"}
    adapter: TypeAdapter[Any] = TypeAdapter(form)
    with pytest.raises(ValidationError) as raised:
        adapter.validate_python({"zzz": 1, "yyy": 2})
    assert str(invalid(raised.value, form=adapter)).endswith(f"field{LISTED_MAX - 1} and 3 more")
    assert str(invalid(raised.value)) == "zzz: there is no such field"
