"""Every route, asked by callers of every right, for their own tenant, another one, and all: as the table says, and the
chains stay as they are where it says no."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import asyncpg
import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings

from app.dev.embedded import EmbeddedPostgres
from app.runtime.principals import ACTS, RULES, Needs, Right
from ledger.facts.events import SystemAction
from tests.app.bundles import bundle_of
from tests.app.otlp_requests import record, request_of
from tests.app.served import Serve, Served
from tests.app.service_thread import serving
from tests.app.test_access_records import entries
from tests.app.test_openapi import OPERATIONS, REQUESTS, with_an_end
from tests.app.witness import Witness
from tests.conftest import EXAMPLES, EXAMPLES_USUAL
from tests.ledger.callers import P256
from tests.ledger.ledger_in_memory import SIGNER, build

OWN, OTHER = "own", "other"
NUMBERS = {route: number for number, route in enumerate(RULES)}
NDJSON = {"Content-Type": "application/x-ndjson"}


class Asked(NamedTuple):
    """A request about a tenant."""

    path: str
    sent: dict[str, Any]


def _body(**more: Any) -> Callable[[str], dict[str, Any]]:
    return lambda tenant: {"json": {"tenant_id": tenant, **more}}


def _import(tenant: str) -> dict[str, Any]:
    return {"files": {"file": (f"{tenant}.tar", io.BytesIO(bundle_of(build(3, tenant_id=tenant))))}}


def _lines(**more: Any) -> Callable[[str], dict[str, Any]]:
    return lambda tenant: {"content": json.dumps({"tenant_id": tenant, **more}), "headers": NDJSON}


def _key() -> Callable[[str], dict[str, Any]]:
    return lambda _: {"json": {}}


SENT: dict[str, Callable[[str], dict[str, Any]]] = {
    "POST /v1/jobs": _body(),
    "POST /v1/jobs/{job_id}/events": _body(type="JobAccepted", dc_id="use1"),
    "POST /v1/jobs/{job_id}/cancel": _body(),
    "POST /v1/events": _lines(type="JobCreated"),
    "POST /v1/commitments": lambda tenant: {
        "json": {"tenant_id": tenant, "commitment": {"kind": "Lease", "resource": "r", "holder": "h"}},
        "headers": {"Idempotency-Key": "once"},
    },
    "PUT /v1/nodes/{node}/capacity": _body(capacity={}),
    "POST /api/v1/lineage": lambda tenant: {
        "json": {"eventType": "START", "run": {"runId": "run"}, "job": {"namespace": tenant, "name": "job"}}
    },
    "POST /v1/logs": lambda tenant: {"json": request_of(record("JobCreated", "log", tenant_id=tenant))},
    "POST /v1/stats": lambda tenant: {"json": {"tenant_id": tenant, "job_id": "one", "dc_id": "use1"}},
    "POST /v1/bundles/export": _body(),
    "POST /v1/reports": _body(),
    "POST /v1/bundles/import": _import,
    "POST /v1/snapshots": _body(),
    "POST /v1/chain/acknowledge": _body(reason="seen"),
    "POST /v1/exclusions": lambda tenant: {"json": {"tenant_id": tenant, "log": f"bad/{tenant}", "reason": "it lies"}},
    "POST /v1/log/{tenant_id}/cosignatures": lambda _: {"content": "note", "headers": {"Content-Type": "text/plain"}},
    "POST /v1/exchange/regions/{region}/retire": lambda _: {"json": {"reason": "lost"}},
    "POST /v1/exchange/regions/{region}/admit": lambda _: {"json": {"key_id": "0123456789abcdef"}},
    "POST /v1/exchange/regions/{region}/revoke": lambda _: {"json": {"key_id": "0123456789abcdef", "reason": "lost"}},
    "POST /v1/keys/rotate": _key(),
    "POST /v1/keys/{key_id}/admit": _key(),
    "POST /v1/keys/{key_id}/revoke": _key(),
    "PUT /v1/tenants/{tenant_id}/privacy": lambda _: {"json": {"fields": []}},
    "PUT /v1/tenants/{tenant_id}/rules": lambda _: {"json": {"version": 2}},
    "PUT /v1/tenants/{tenant_id}/search": lambda _: {"json": {"fields": ["spec.image"]}},
    "POST /v1/tenants/{tenant_id}/erasures": lambda _: {"json": {"subject": "nobody"}},
    "PUT /v1/retention": lambda _: {"json": {"period": "400d"}},
    "POST /v1/callers": lambda tenant: {
        "json": {"name": "ci", "tenants": [tenant], "public_key_pem": P256.caller.key.public_key_pem}
    },
    "PUT /v1/tenants/{tenant_id}/signatures": lambda _: {"json": {"types": []}},
    "POST /v1/holds": _body(reason="a lawsuit"),
    "POST /v1/prunes": _body(dry_run=True),
    "POST /v1/webhooks": _body(url="https://receiver.example.org/"),
    "POST /v1/webhooks/{webhook_id}/replay": lambda _: {"json": {"from_seq": 1}},
    "POST /v1/console/session": lambda _: {"json": {}},
    "POST /v1/tenants/{tenant_id}/scitt/entries": lambda _: {
        "content": "no statement",
        "headers": {"Content-Type": "application/cose"},
    },
    "POST /v1/tokens": lambda tenant: {"json": {"name": "x", "rights": ["read"], "tenants": [tenant]}},
}
"""What a request of each route sends, about a tenant; what is not here sends nothing."""
QUERIES = {
    "GET /v1/watch": "&from_seq=1&to_seq=1",
    "GET /v1/cancellations": "&dc=use1",
    "GET /v1/chain/receipt": "&seq=1",
    "GET /v1/exchange/lacking": "&from_seq=1&to_seq=1",
    "DELETE /v1/holds/{hold_id}": "&reason=closed",
    "DELETE /v1/callers/{key_id}": "?reason=left",
}
"""What a request of each route asks beside a tenant."""
PARTS = {
    "{job_id}": "one",
    "{report_id}": "0" * 32,
    "{node}": "n1",
    "{region}": "eu1",
    "{key_id}": "0123456789abcdef",
    "{snapshot_id}": "1",
    "{token_id}": "0123456789abcdef",
    "{webhook_id}": "0123456789abcdef",
    "{hold_id}": "0123456789abcdef",
    "{kid}": "0123456789abcdef",
    "{statement_id}": "0" * 64,
    "{name}": "swagger-ui.css",
    "{file}": "console.css",
    "{bundle:path}": "000.p/1",
    "{tile:path}": "0/000.p/1",
}


def asked(route: str, tenant: str) -> Asked:
    path = route.partition(" ")[2]
    query = "" if "{tenant_id}" in path else f"?tenant_id={tenant}" if RULES[route].needs is Needs.NAMED else ""
    for name, value in {**PARTS, "{tenant_id}": tenant}.items():
        path = path.replace(name, value)
    return Asked(path + query + QUERIES.get(route, ""), SENT[route](tenant) if route in SENT else {})


def allowed(route: str, right: Right, pattern: str, tenant: str) -> bool:
    """Whether the table has the route answered to a caller of one right."""
    rule = RULES[route]
    if rule.right is None:
        return True
    if right is not rule.right:
        return False
    if rule.needs is Needs.EVERY:
        return pattern == "*"
    return pattern in ("*", tenant) or rule.needs is Needs.ANY


async def heads(superuser: asyncpg.Connection) -> list[Any]:
    """The ends of the tenants' chains, and what ``_system`` says beside refusals."""
    entries = await superuser.fetchval(
        "SELECT count(*) FROM scheduler.scheduler_log WHERE tenant_id = '_system' AND action <> 'ACCESS_REFUSED'"
    )
    rows = await superuser.fetch(
        "SELECT tenant_id, head_seq, head_chain_link FROM scheduler.chain_heads WHERE tenant_id <> '_system' ORDER BY 1"
    )
    return [entries, *(tuple(row) for row in rows)]


async def statuses(served: Served, token: str | None, wanted: list[tuple[str, str]]) -> Iterator[tuple[str, str, int]]:
    found = []
    async with served.client(token) as client:
        for route, tenant in wanted:
            for way in ({}, {"Idempotency-Key": f"{route}/{tenant}/{token}"[-100:].replace(" ", "-")}):
                # Without the key the connection answers single writes, with it the framework does.
                if way and RULES[route].right is not Right.WRITE:
                    continue
                request = asked(route, tenant)
                headers = {**request.sent.pop("headers", {}), **way}
                method = route.partition(" ")[0]
                answer = await client.request(method, request.path, headers=headers, **request.sent)
                assert answer.status_code < 500 or answer.status_code == 503, (route, answer.text)
                found.append((route, tenant, answer.status_code))
    return iter(found)


STRIDE = 1 if EXAMPLES > EXAMPLES_USUAL else 3
"""Of the callers without the right, one of so many asks; at each route others."""


def is_asked(route: str, right: Right, number: int) -> bool:
    """Whether a caller whom the table refuses asks; whoever has the right for another tenant always does."""
    return right is RULES[route].right or (NUMBERS[route] + number) % STRIDE == 0


@pytest.mark.exhaustive
async def test_every_route_is_answered_as_the_table_says_and_what_is_refused_changes_nothing(
    serve: Serve, superuser: asyncpg.Connection, tmp_path: Path
) -> None:
    trusted = tmp_path / "trusted.pem"
    trusted.write_text(SIGNER.public_key_pem)
    witness = Witness("witness.example")
    given = {
        "bundle": {"trusted_keys": trusted},
        # A report goes on behind its answer, while the next is asked for.
        "quota": {"exports": 2},
        "log": {"witnesses": [witness.verifier_key]},
        "lineage": {"tenants": {tenant: tenant for tenant in (OWN, OTHER)}},
    }
    async with serve(**given) as served, served.client(served.root) as root:
        for tenant in (OWN, OTHER):
            body = {"tenant_id": tenant, "job_id": "one", "durability": "GLOBAL"}
            assert (await root.post("/v1/jobs", json=body)).status_code == 201
        callers = [(right, pattern) for right in Right for pattern in (OWN, "*")]
        tokens = {}
        for right, pattern in callers:
            name = f"{right}.{'all' if pattern == '*' else pattern}"
            tokens[right, pattern] = (await served.issue(right, tenants=pattern, name=name))["token"]
        every = [(route, tenant) for route in RULES for tenant in (OWN, OTHER)]
        before = await heads(superuser)
        # Where the tenant decides nothing, one is enough.
        for route, tenant, status in await statuses(served, None, every[::2]):
            assert (status == 401) == (RULES[route].needs is not Needs.NOTHING), (route, tenant, status)
        for number, ((right, pattern), token) in enumerate(tokens.items()):
            asked_for = [each for each in every[:: 2 if pattern == "*" else 1] if is_asked(each[0], right, number)]
            refused = [each for each in asked_for if not allowed(each[0], right, pattern, each[1])]
            for route, tenant, status in await statuses(served, token, refused):
                assert status == 403, (right, pattern, route, tenant)
        assert await heads(superuser) == before
        for (right, pattern), token in tokens.items():
            granted = [each for each in every if allowed(each[0], right, pattern, each[1])]
            for route, tenant, status in await statuses(served, token, granted):
                assert status not in (401, 403, 429), (right, pattern, route, tenant)
        assert {act["route"] for act in await entries(superuser, SystemAction.ACT_ALLOWED)} == ACTS
        async with served.client(tokens[Right.READ, OWN]) as reader, served.client(tokens[Right.AUDIT, OWN]) as auditor:
            assert (await reader.get("/v1/jobs/one")).json()["tenant_id"] == OWN
            assert {each["tenant_id"] for each in (await auditor.get("/v1/tenants")).json()["items"]} == {OWN}


# --- requests that are made up --------------------------------------------------------------------

SECRET = "of-nobody-elses-business"


@pytest.fixture(scope="module")
def weak(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """A service in which another tenant has secrets, and a token that may read its own tenant alone."""
    from app.runtime.state.kept_files import FIRST_TOKEN, FirstToken
    from app.trust import callers

    folder, first = tmp_path_factory.mktemp("weak"), callers.new_token()
    FIRST_TOKEN.store(folder, FirstToken("root", first.digest.hex()))
    with serving(postgres, folder, "weak_token", auth={"mode": "tokens"}, read={"wait": "20ms"}) as url:
        with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {first.text}"}, timeout=60) as root:
            for tenant in (OWN, SECRET):
                body = {"tenant_id": tenant, "job_id": f"job-{tenant}", "spec": {"image": tenant}}
                root.post("/v1/jobs", json={**body, "durability": "GLOBAL"}).raise_for_status()
                root.post("/v1/snapshots", json={"tenant_id": tenant}).raise_for_status()
            wanted = {"name": "weak", "rights": ["read"], "tenants": [OWN]}
            made = root.post("/v1/tokens", json=wanted).raise_for_status().json()
        yield url, made["token"]


@pytest.fixture(scope="module")
def weak_schema(weak: tuple[str, str]) -> schemathesis.schemas.BaseSchema:
    return schemathesis.openapi.from_url(f"{weak[0]}/openapi.json")


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_a_weak_token_gets_no_data_of_another_tenant(
    weak: tuple[str, str], weak_schema: schemathesis.schemas.BaseSchema, method: str, path: str
) -> None:
    _, token = weak
    headers = {"Authorization": f"Bearer {token}"}

    @given(weak_schema[path][method].as_strategy())
    @settings(max_examples=REQUESTS, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    def check(case: schemathesis.Case[Any]) -> None:
        answer = with_an_end(case).call(headers=headers)
        assert answer.status_code < 500 or answer.status_code == 503, answer.content
        assert SECRET.encode() not in answer.content
        assert token.encode() not in answer.content

    check()
