"""The description of the API holds: schemathesis makes up requests from it and checks every answer against it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from app.dev.embedded import EmbeddedPostgres
from app.edge.application import ROUTERS
from tests.app.service_thread import serving
from tests.conftest import EXAMPLES

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    unsupported_method,
]
OPERATIONS = [
    (method, route.path_format)
    for router in ROUTERS
    for route in router.routes
    if isinstance(route, APIRoute) and route.include_in_schema
    for method in sorted(route.methods or ())
]
REQUESTS = EXAMPLES // 10
"""Of each operation; many where many examples of each property are asked for."""
STREAMS = {"/v1/watch"}
"""Paths whose answers have no end unless the query names one."""


def with_an_end(case: schemathesis.Case[Any]) -> schemathesis.Case[Any]:
    """The request, so that its answer ends."""
    if case.path in STREAMS:
        case.query = {**(case.query or {}), "from_seq": 1, "to_seq": 1}
        case.headers.pop("Last-Event-ID", None)
    return case


@pytest.fixture(scope="module")
def base_url(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("openapi")
    with serving(postgres, folder, "openapi", read={"wait": "20ms"}) as url:
        httpx.post(f"{url}/v1/jobs", json={"tenant_id": "acme", "job_id": "known"}).raise_for_status()
        yield url


@pytest.fixture(scope="module")
def api_schema(base_url: str) -> schemathesis.schemas.BaseSchema:
    return schemathesis.openapi.from_url(f"{base_url}/openapi.json")


@schemathesis.serializer("application/x-ndjson", "application/cose")
def _as_lines(_context: object, value: object) -> object:
    return value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_every_answer_is_one_that_the_description_allows(
    api_schema: schemathesis.schemas.BaseSchema, method: str, path: str
) -> None:
    @given(api_schema[path][method].as_strategy())
    @settings(max_examples=REQUESTS, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    def check(case: schemathesis.Case[Any]) -> None:
        with_an_end(case).call_and_validate(checks=CHECKS)

    check()


def test_every_operation_says_what_it_does_and_that_it_may_answer_a_problem(base_url: str) -> None:
    document = httpx.get(f"{base_url}/openapi.json").json()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert operation["description"], (method, path)
            problem = operation["responses"]["default"]["content"]["application/problem+json"]
            assert problem["schema"] == {"$ref": "#/components/schemas/Problem"}, (method, path)
            assert "422" not in operation["responses"], (method, path)


def test_every_name_that_the_description_refers_to_is_in_it(base_url: str) -> None:
    document = httpx.get(f"{base_url}/openapi.json")
    names = document.json()["components"]["schemas"].keys()
    referred = {part.split('"')[0] for part in document.text.split('"#/components/schemas/')[1:]}
    assert referred - names == set()
