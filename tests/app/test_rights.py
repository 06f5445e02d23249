"""Every route needs a right, which one place says, and asks for it before it reads a body."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import MutableMapping
from pathlib import Path
from typing import Annotated, Any

import pytest
from fastapi import APIRouter, Depends, Query, Request
from fastapi.routing import APIRoute

from app.edge.accepted import AccessControl
from app.edge.application import ROUTERS, create_app
from app.edge.listener import listening
from app.edge.routes.jobs import submissions
from app.edge.routing import LeanRoute, RightedRoute
from app.node.wiring import running
from app.runtime.principals import EVERYBODY, RULES, UNLISTED, Needs, Principal, Right
from app.runtime.state.node import Node
from app.trust.callers import OpenToAll
from tests.app.conftest import MakeSettings
from tests.app.served import Serve
from tests.conftest import Database

DEADLINE_S = 60
ROUTES = [route for router in ROUTERS for route in router.routes]


def name_of(route: APIRoute) -> str:
    (method,) = route.methods
    return f"{method} {route.path}"


def test_every_route_has_a_right_and_every_right_a_route() -> None:
    assert {type(route) for route in ROUTES if not isinstance(route, RightedRoute)} == set()
    assert sorted(name_of(route) for route in ROUTES) == sorted(RULES)


def test_the_page_says_what_each_route_needs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "access.md").read_text()
    told = re.findall(r"^\| `((?:GET|PUT|POST|DELETE) [^`]+)` \| (?:`(\w+)`|—) \| ([^|]+) \|$", page, re.MULTILINE)
    assert told == [(route, rule.right or "", rule.needs.value) for route, rule in RULES.items()]


def test_what_ends_keys_or_private_fields_is_the_admins() -> None:
    for name in RULES:
        if name.startswith(
            (
                "POST /v1/keys",
                "PUT /v1/tenants/{tenant_id}/privacy",
                "POST /v1/tenants/{tenant_id}/erasures",
                "POST /v1/tokens",
                "DELETE /v1/t",
                "DELETE /v1/w",
            )
        ):
            assert RULES[name].right is Right.ADMIN, name


class Asked(OpenToAll):
    """Knows every caller as ``principal``, and what asked for him."""

    def __init__(self, principal: Principal) -> None:
        self.principal = principal
        self.routes: list[str] = []

    def known(self, scope: MutableMapping[str, Any]) -> Principal:
        self.routes.append(f"{scope['method']} {scope['path']}")
        return self.principal

    async def caller(self, scope: MutableMapping[str, Any]) -> Principal:
        return self.known(scope)


NOBODY = Principal("nobody", "token", ())


async def test_every_route_asks_for_its_right_before_it_reads_the_body(
    database: Database, make_settings: MakeSettings
) -> None:
    async with running(make_settings(), database.service_url) as (_service, services):
        services[AccessControl].callers = asked = Asked(NOBODY)
        async with listening(services) as (url, _serving), asyncio.timeout(DEADLINE_S):
            for route in ROUTES:
                asked.routes.clear()
                status = await status_without_body(url, route)
                rule = RULES[name_of(route)]
                if rule.right is not None:
                    assert (status, len(asked.routes)) == (b"403", 1), name_of(route)
                else:
                    assert status != b"403", name_of(route)
                if rule.needs is not Needs.NOTHING:
                    assert asked.routes, name_of(route)


async def test_what_changes_something_is_refused_unread_while_the_node_takes_no_writes(
    database: Database, make_settings: MakeSettings
) -> None:
    # Signing in and out changes nothing that is kept.
    changing = [route for route in ROUTES if not name_of(route).startswith("GET ") and "console" not in route.path]
    assert len(changing) > 10
    async with (
        running(make_settings(), database.service_url) as (_service, services),
        listening(services) as (url, _serving),
        asyncio.timeout(DEADLINE_S),
    ):
        services[Node].accepting = False
        for route in changing:
            assert await status_without_body(url, route) == b"503", name_of(route)


async def test_a_plain_write_is_asked_for_its_right_once_whoever_answers_it(
    database: Database, make_settings: MakeSettings
) -> None:
    plain = [route for route in submissions.routes if isinstance(route, APIRoute)]
    async with (
        running(make_settings(), database.service_url) as (_service, services),
        listening(services) as (url, _serving),
        asyncio.timeout(DEADLINE_S),
    ):
        for route in plain:
            for principal, body, status in ((NOBODY, "", b"403"), (EVERYBODY, "{}", b"422")):
                services[AccessControl].callers = asked = Asked(principal)
                assert await status_without_body(url, route, PLAIN, body) == status, name_of(route)
                assert len(asked.routes) == 1, name_of(route)
        for body in ('{"tenant_id": "acme"}', '{"tenant_id": "acme", "job_id": "looked-up"}'):
            services[AccessControl].callers = asked = Asked(EVERYBODY)
            assert await status_without_body(url, plain[0], PLAIN, body) == b"201"
            assert len(asked.routes) == 1


PLAIN = "Content-Type: application/json"
"""A header that no plain request is without, in place of one that none has."""


async def status_without_body(url: str, route: APIRoute, header: str = "Expect: 100-continue", body: str = "") -> bytes:
    """The status that a request is answered with of which only the head was sent, or ``body`` too."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    (method,) = route.methods
    path = route.path.replace(":path}", "}")
    for name in route.param_convertors:
        path = path.replace(f"{{{name}}}", "1")
    if any(each.name == "tenant_id" for each in route.dependant.query_params):
        path += "?tenant_id=acme"
    length = f"Content-Length: {len(body) or 10}\r\n" if method != "GET" else ""
    writer.write(f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{header}\r\n{length}\r\n{body}".encode())
    line = await reader.readline()
    writer.close()
    return line.split(b" ")[1]


async def endpoint(request: Request, job_id: str) -> None:
    return


async def wanting(request: Request, tenant_id: Annotated[str, Query()]) -> None:
    return


async def depending(request: Request, services: Annotated[None, Depends(endpoint)]) -> None:
    return


def test_a_lean_route_that_would_ignore_a_dependency_is_refused_at_start() -> None:
    router = APIRouter(route_class=LeanRoute)
    router.post("/v1/lean/{job_id}")(endpoint)
    assert [route.rule for route in router.routes if isinstance(route, LeanRoute)] == [UNLISTED]
    for path, function, more in (
        ("/v1/lean/{job_id}", endpoint, {"dependencies": [Depends(endpoint)]}),
        ("/v1/lean", wanting, {}),
        ("/v1/lean", depending, {}),
    ):
        with pytest.raises(TypeError, match="LeanRoute"):
            router.post(path, **more)(function)
    with pytest.raises(TypeError, match="LeanRoute"):
        APIRouter(route_class=LeanRoute, dependencies=[Depends(endpoint)]).post("/v1/lean/{job_id}")(endpoint)


async def test_the_description_says_what_each_operation_needs(serve: Serve) -> None:
    async with serve() as served, served.client(None) as nobody:
        text = (await nobody.get("/openapi.json")).text
        document = json.loads(text)
    assert document["components"]["securitySchemes"] == {"token": {"type": "http", "scheme": "bearer"}}
    assert document["security"] == [{"token": []}]
    assert served.root not in text
    told = document["paths"]["/v1/events"]["post"]["description"]
    assert told.endswith("Needs the right `write` for each tenant that the body names.")
    assert document["paths"]["/livez"]["get"]["description"].endswith("Needs no caller.")


def test_the_application_refuses_to_begin_without_a_service_that_a_route_names() -> None:
    with pytest.raises(LookupError, match=r"/v1/jobs names services that are not wired: .*EventWrites"):
        create_app({})
