"""The description of the API is OpenAPI 3.1 to the letter, and says of every part of every route what it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from app.dev.embedded import EmbeddedPostgres
from ledger.facts.problems import PROBLEMS
from tests.app.service_thread import serving
from tests.app.test_openapi import OPERATIONS

UNSAID = ("", "Successful Response")


@pytest.fixture(scope="module")
def document(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    with serving(postgres, tmp_path_factory.mktemp("openapi"), "openapi_valid") as url:
        yield httpx.get(f"{url}/openapi.json", trust_env=False, timeout=60).json()


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def test_it_is_openapi_3_1(document: dict[str, Any]) -> None:
    assert document["openapi"].startswith("3.1.")
    assert [error.message for error in OpenAPIV31SpecValidator(document).iter_errors()] == []


def test_every_route_is_in_it_under_a_name_of_its_own(document: dict[str, Any]) -> None:
    found = list(operations(document))
    assert sorted((method, path) for method, path, _ in found) == sorted(OPERATIONS)
    names = [operation["operationId"] for *_, operation in found]
    assert len(set(names)) == len(names)


def test_every_parameter_header_and_answer_says_what_it_is(document: dict[str, Any]) -> None:
    unsaid = []
    for method, path, operation in operations(document):
        parts = [(f"parameter {part['name']}", part) for part in operation.get("parameters", [])]
        for status, answer in operation["responses"].items():
            parts.append((f"answer {status}", answer))
            parts += [(f"header {name} of {status}", header) for name, header in answer.get("headers", {}).items()]
        unsaid += [(method, path, name) for name, part in parts if part.get("description", "") in UNSAID]
    assert unsaid == []


def test_every_problem_is_named(document: dict[str, Any]) -> None:
    said = document["components"]["schemas"]["Problem"]["description"]
    for kind in PROBLEMS:
        assert f"- `{kind.name}` ({kind.status}): {kind.title}" in said


def test_operations_are_called_as_clients_would_call_them(document: dict[str, Any]) -> None:
    names = {operation["operationId"] for *_, operation in operations(document)}
    assert {"submit_job", "read_job", "list_jobs", "verify_chain"} <= names
