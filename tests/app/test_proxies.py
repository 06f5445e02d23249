"""Proxies: which of them are believed, and what of what they say."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.dev.embedded import EmbeddedPostgres
from app.edge.answers import path_outside
from app.edge.connection.heads import TrustedProxies
from app.runtime.settings.config import load_settings
from ledger.errors import ConfigurationError
from tests.app.conftest import MakeSettings, RunServer
from tests.app.served import Serve
from tests.app.service_thread import serving
from tests.waiting import until

PROXIES = TrustedProxies([ip_network("10.0.0.0/8"), ip_network("fd00::/8")])
HTTPS = {"X-Forwarded-Proto": "https"}
HSTS = "strict-transport-security"


def believed(**headers: str | list[str]) -> tuple[str, tuple[str, int]]:
    """Scheme and client that a trusted proxy's request has in the end."""
    scope = believing(**headers)
    return scope["scheme"], scope["client"]


def believing(**headers: str | list[str]) -> dict[str, Any]:
    """The scope that a trusted proxy's request has in the end."""
    said = [
        (name.replace("_", "-").encode(), each.encode("latin-1"))
        for name, values in headers.items()
        for each in ([values] if isinstance(values, str) else values)
    ]
    scope: dict[str, Any] = {"scheme": "http", "client": ("10.0.0.1", 1234), "headers": said}
    PROXIES.believe(scope)
    return scope


@pytest.mark.parametrize(
    ("said", "scheme"),
    [("https", "https"), ("HTTPS", "https"), ("http", "http"), ("https, http", "http"), ("wss", "http"), ("", "http")],
)
def test_the_scheme_is_what_the_proxy_itself_said_last(said: str, scheme: str) -> None:
    assert believed(x_forwarded_proto=said)[0] == scheme


@pytest.mark.parametrize(
    ("said", "client"),
    [
        ("203.0.113.9", "203.0.113.9"),
        ("198.51.100.1, 203.0.113.9", "203.0.113.9"),
        ("203.0.113.9, 10.1.1.1, 10.2.2.2", "203.0.113.9"),
        ("198.51.100.1, 203.0.113.9:4711, 10.2.2.2", "203.0.113.9"),
        (["198.51.100.1", "203.0.113.9, 10.2.2.2"], "203.0.113.9"),
        ("[2001:db8::1]:4711", "2001:db8::1"),
        ("2001:DB8::1, fd00::7", "2001:db8::1"),
        ("::ffff:203.0.113.9, ::ffff:10.2.2.2", "203.0.113.9"),
        ("10.3.3.3, 10.2.2.2", "10.3.3.3"),
    ],
)
def test_the_client_is_the_last_address_that_is_no_proxy(said: str, client: str) -> None:
    assert believed(x_forwarded_for=said)[1] == (client, 0)


@pytest.mark.parametrize("said", ["unknown", "", "203.0.113.9, evil", "a:b", "1.2.3.4.5", "\x80"])
def test_what_is_no_address_leaves_the_one_of_the_connection(said: str) -> None:
    assert believed(x_forwarded_for=said)[1] == ("10.0.0.1", 1234)


@pytest.mark.parametrize(
    ("said", "path"),
    [
        ("/jobs", "/jobs/v1"),
        ("/a/b/", "/a/b/v1"),
        ("/other, /jobs", "/jobs/v1"),
        (["/other", "/jobs"], "/jobs/v1"),
        ("", "/v1"),
        ("/", "/v1"),
        ("//evil.example", "/ledger/v1"),
        ("https://evil.example", "/ledger/v1"),
        ("/" + "a" * 128, "/ledger/v1"),
        ("/a\x80", "/ledger/v1"),
        ([], "/ledger/v1"),
    ],
)
def test_paths_are_below_the_prefix_that_the_proxy_itself_said_last(said: str | list[str], path: str) -> None:
    assert path_outside(believing(x_forwarded_prefix=said), "/ledger", "/v1") == path


def test_only_named_addresses_are_believed() -> None:
    assert [PROXIES.has((host, 1)) for host in ("10.9.9.9", "::ffff:10.9.9.9", "fd00::1")] == [True] * 3
    assert [PROXIES.has((host, 1)) for host in ("11.0.0.1", "fe80::1", "localhost", "")] == [False] * 4
    assert not PROXIES.has(None)


def test_nobody_is_served_through_a_proxy_without_being_asked_who_he_is() -> None:
    proxied = {"trusted_proxies": ["10.0.0.7"]}
    with pytest.raises(ConfigurationError, match=r"http\.trusted_proxies names a proxy.*set auth\.mode to tokens"):
        load_settings(http=proxied)
    assert load_settings(http=proxied, auth={"mode": "tokens"}).http.is_loopback
    assert load_settings(http=proxied, auth=OPEN).http.is_loopback


OPEN = {"allow_open": True}


@pytest.fixture(scope="module")
def behind(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("proxies")
    with serving(postgres, folder, "behind_proxy", http={"trusted_proxies": ["127.0.0.0/8"]}, auth=OPEN) as url:
        yield url


def test_answers_that_went_over_the_proxys_tls_tell_browsers_to_stay(behind: str) -> None:
    body = {"tenant_id": "acme"}
    for headers, is_told in ((HTTPS, True), ({}, False), ({"X-Forwarded-Proto": "http"}, False)):
        found = [
            httpx.get(f"{behind}/livez", headers=headers),
            httpx.get(f"{behind}/v1/nothing", headers=headers),
            httpx.post(f"{behind}/v1/jobs", json=body, headers=headers),
        ]
        assert [answer.status_code for answer in found] == [200, 404, 201]
        assert [HSTS in answer.headers for answer in found] == [is_told] * 3


def test_addresses_are_below_the_prefix_that_the_proxy_says_with_each_request(behind: str) -> None:
    with httpx.Client(base_url=behind) as client:
        for said, prefix in (
            ({"X-Forwarded-Prefix": "/ledger"}, "/ledger"),
            ({}, ""),
            ({"X-Forwarded-Prefix": "x"}, ""),
        ):
            client.headers = httpx.Headers(said)
            job = client.post("/v1/jobs", json={"tenant_id": "acme"})
            assert job.headers["Location"] == f"{prefix}/v1/jobs/{job.json()['job_id']}"
            report = client.post("/v1/reports", json={"tenant_id": "acme"})
            assert report.headers["Location"] == f"{prefix}/v1/reports/{report.json()['report_id']}"
            until(
                lambda at=report: client.get(f"/v1/reports/{at.json()['report_id']}").status_code == 200, "it is made"
            )
            assert client.get("/openapi.json").json()["servers"] == [{"url": prefix or "/"}]


async def test_others_are_not_believed(run_server: RunServer, make_settings: MakeSettings) -> None:
    for proxies in ([], ["192.0.2.0/24"]):
        async with run_server(make_settings(http={"trusted_proxies": proxies}, auth=OPEN)) as client:
            assert HSTS not in (await client.get("/livez", headers=HTTPS)).headers
            described = await client.get("/openapi.json", headers={"X-Forwarded-Prefix": "/ledger"})
            assert described.json()["servers"] == [{"url": "/"}]


@pytest.mark.parametrize(("proxies", "address"), [(["127.0.0.1"], "203.0.113.9"), ([], "127.0.0.1")])
async def test_records_name_the_client_behind_the_proxy(serve: Serve, proxies: list[str], address: str) -> None:
    async with serve(http={"trusted_proxies": proxies}) as served:
        reader = await served.issue("read", tenants="acme")
        async with served.client(reader["token"]) as client, served.client(served.root) as root:
            said = {"X-Forwarded-For": "203.0.113.9"}
            assert (await client.get("/v1/jobs?tenant_id=other", headers=said)).status_code == 403
            told = (await root.get("/v1/access-log?tenant_id=other")).json()["items"]
            assert [each["address"] for each in told if each["kind"] == "refusal"] == [address]


def test_a_proxy_is_an_address_or_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TALLY_AUTH__MODE", "tokens")
    monkeypatch.setenv("TALLY_HTTP__TRUSTED_PROXIES", "10.0.0.7, fd00::/8")
    assert load_settings().http.trusted_proxies == [ip_network("10.0.0.7/32"), ip_network("fd00::/8")]
    for wrong in ("proxy.example.org", "10.0.0.1/8", "10.0.0.0/33"):
        with pytest.raises(ConfigurationError, match=r"http\.trusted_proxies\.0: must be an address or a network"):
            load_settings(http={"trusted_proxies": [wrong]})


@pytest.mark.parametrize(
    ("given", "in_the_clear"),
    [
        ({}, True),
        ({"http": {"trusted_proxies": ["10.0.0.7"]}}, False),
        ({"tls": {"cert": "cert.pem", "key": "key.pem"}}, False),
        ({"http": {"listen": "127.0.0.1:8080"}}, False),
        ({"auth": {"allow_open": True}}, False),
    ],
)
def test_tokens_that_travel_in_the_clear_are_known(given: dict[str, Any], in_the_clear: bool) -> None:
    sections = {"http": {"listen": "0.0.0.0:8080"} | given.pop("http", {}), "auth": {"mode": "tokens"}} | given
    assert load_settings(**sections).tokens_in_the_clear is in_the_clear


async def test_tokens_that_travel_in_the_clear_are_told(run_server: RunServer, make_settings: MakeSettings) -> None:
    settings = make_settings(http={"listen": "0.0.0.0:0"}, auth={"mode": "tokens"})
    async with run_server(settings) as client:
        url = str(client.base_url).replace("0.0.0.0", "127.0.0.1")
        ready = await client.get(f"{url}/readyz")
        assert ready.status_code == 200
        assert "tokens travel in the clear" in ready.json()["checks"]["tls"]["detail"]
