"""Callers who show a certificate: whom TLS lets in, and who they are then."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509

from app.runtime.settings.config import load_settings
from app.trust import callers
from app.trust.tls import CallerCertificate
from ledger.errors import ConfigurationError
from tests.app.certificates import Authority, Pair
from tests.app.chains import until
from tests.app.conftest import MakeSettings
from tests.app.oidc_issuer import AUDIENCE, Issuer
from tests.app.served import serving_with_tokens
from tests.conftest import Database

WRITER = {"name": "writer", "rights": ["write", "read"], "tenants": ["team-*"]}
SPIFFE = {"name": "spiffe://example.org/ci", "rights": ["audit"], "tenants": ["*"]}
HOST = {"name": "ci.example.org", "rights": ["read"], "tenants": ["acme"]}
Connect = Callable[..., httpx.AsyncClient]


@asynccontextmanager
async def connecting(
    make_settings: MakeSettings, database: Database, authority: Authority, **more: Any
) -> AsyncIterator[Connect]:
    """Makes clients of a service that takes certificates: ``connect(pair, token)``; its token is ``connect.token``.

    Its ``auth.mode`` is ``tokens``, unless ``more`` says another, with what belongs to it.
    """
    pair = authority.issue("service")
    auth = {"client_ca": authority.ca_file, "certificates": [WRITER, SPIFFE, HOST], "mode": "tokens", **more}
    settings = make_settings(tls={"cert": pair.cert, "key": pair.key}, auth=auth)
    async with serving_with_tokens(settings, database.service_url, with_first=True) as served:

        def connected(pair: Pair | None = None, token: str | None = None) -> httpx.AsyncClient:
            headers = {} if token is None else {"Authorization": f"Bearer {token}"}
            context = authority.client(pair)
            return httpx.AsyncClient(base_url=served.url, headers=headers, verify=context, timeout=30, trust_env=False)

        connected.token = served.root  # type: ignore[attr-defined]
        yield connected


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """The authority that the service of these tests goes by."""
    return Authority(tmp_path_factory.mktemp("certificates") / "shared")


@pytest.fixture(scope="module")
async def connect(
    make_shared_settings: MakeSettings, shared_database: Database, authority: Authority
) -> AsyncIterator[Connect]:
    """Makes clients of the service that these tests share."""
    async with connecting(make_shared_settings, shared_database, authority) as connect:
        yield connect


def issued(authority: Authority, common_name: str | None, *names: x509.GeneralName, **more: Any) -> Pair:
    return authority.issue(f"caller-{len(names)}", names, common_name=common_name, is_client=True, **more)


@asynccontextmanager
async def refused(client: httpx.AsyncClient) -> AsyncIterator[None]:
    async with client:
        with pytest.raises((httpx.TransportError, ssl.SSLError)):
            await client.get("/livez")
        yield


async def test_a_certificate_says_who_calls_and_its_name_has_the_rights(connect: Connect, authority: Authority) -> None:
    async with connect(issued(authority, "writer")) as client:
        assert (await client.get("/v1/whoami")).json() == {
            "principal": "cert:writer",
            "source": "certificate",
            "token_id": None,
            "expires_at": None,
            "grants": [{"rights": ["read", "write"], "tenants": ["team-*"]}],
        }
        # The first is answered from the connection, the second by the framework.
        for headers in ({}, {"Idempotency-Key": "k"}):
            for tenant, status in (("team-a", 201), ("acme", 403)):
                answer = await client.post("/v1/jobs", json={"tenant_id": tenant}, headers=headers)
                assert answer.status_code == status, answer.text
        (job, _) = (await client.get("/v1/jobs?tenant_id=team-a")).json()["items"]
        assert job["actor"] == "cert:writer"


@pytest.mark.parametrize(
    ("common_name", "names", "principal"),
    [
        (None, [x509.UniformResourceIdentifier(SPIFFE["name"])], SPIFFE),
        (None, [x509.DNSName("ci.example.org")], HOST),
        ("nobody", [x509.DNSName("other.example.org"), x509.DNSName("ci.example.org")], HOST),
        ("writer", [x509.UniformResourceIdentifier(SPIFFE["name"])], SPIFFE),
    ],
)
async def test_names_beside_the_subject_count_first(
    connect: Connect,
    authority: Authority,
    common_name: str | None,
    names: list[x509.GeneralName],
    principal: dict[str, Any],
) -> None:
    async with connect(issued(authority, common_name, *names)) as client:
        assert (await client.get("/v1/whoami")).json()["principal"] == f"cert:{principal['name']}"


async def test_an_unknown_name_is_nobody(connect: Connect, authority: Authority) -> None:
    for common_name, names in (
        ("stranger", []),
        ("writer2", [x509.DNSName("*.example.org")]),
        (None, [x509.RFC822Name("writer")]),
    ):
        async with connect(issued(authority, common_name, *names)) as client:
            for answer in (
                await client.get("/v1/whoami"),
                await client.post("/v1/jobs", json={"tenant_id": "team-a"}),
            ):
                assert (answer.status_code, answer.json()["type"].rpartition("/")[2]) == (401, "unauthenticated")


async def test_without_a_certificate_a_token_is_asked_for(connect: Connect) -> None:
    async with connect() as client:
        assert (await client.get("/livez")).status_code == 200
        assert (await client.get("/v1/whoami")).status_code == 401
    async with connect(None, connect.token) as client:  # type: ignore[attr-defined]
        assert (await client.get("/v1/whoami")).json()["principal"] == "root"


async def test_a_token_beside_a_certificate_decides(connect: Connect, authority: Authority) -> None:
    writer = issued(authority, "writer")
    async with connect(writer, connect.token) as client:  # type: ignore[attr-defined]
        assert (await client.get("/v1/whoami")).json()["principal"] == "root"
    async with connect(writer, callers.new_token().text) as client:
        assert (await client.get("/v1/whoami")).status_code == 401
        assert (await client.post("/v1/jobs", json={"tenant_id": "team-a"})).status_code == 401


async def test_beside_an_issuer_too(
    make_settings: MakeSettings, database: Database, authority: Authority, issuer: Issuer
) -> None:
    writer = issued(authority, "writer")
    oidc = {"issuer": issuer.url, "audience": [AUDIENCE]}
    async with connecting(make_settings, database, authority, mode="oidc", oidc=oidc) as connect:
        for shown, principal in ((None, "cert:writer"), (issuer.token(), "oidc:ada"), (connect.token, "root")):  # type: ignore[attr-defined]
            async with connect(writer, shown) as client:
                assert (await client.get("/v1/whoami")).json()["principal"] == principal
        async with connect(writer, issuer.token(exp=1)) as client:
            assert (await client.get("/v1/whoami")).status_code == 401


async def test_a_certificate_of_another_authority_ends_the_handshake(
    connect: Connect, authority: Authority, tmp_path: Path
) -> None:
    other = Authority(tmp_path / "other", "authority")
    async with refused(connect(issued(other, "writer"))):
        pass


async def test_an_expired_certificate_ends_the_handshake(connect: Connect, authority: Authority) -> None:
    async with refused(connect(issued(authority, "writer", lives=timedelta(seconds=-1)))):
        pass


async def test_a_certificate_of_a_service_is_not_one_of_a_caller(connect: Connect, authority: Authority) -> None:
    async with refused(connect(authority.issue("not-a-caller", common_name="writer"))):
        pass


async def test_another_authority_takes_the_place_of_the_first_without_a_restart(
    make_settings: MakeSettings, database: Database, tmp_path: Path
) -> None:
    authority, other = Authority(tmp_path / "certificates"), Authority(tmp_path / "other", "next")
    former = issued(authority, "writer")
    later = other.issue("later", (), common_name="writer", is_client=True)
    async with connecting(make_settings, database, authority) as connect, connect(former) as kept:
        assert (await kept.get("/v1/whoami")).status_code == 200
        service = authority.client()
        authority.ca_file.write_bytes(other.ca_file.read_bytes())

        async def is_known() -> bool:
            service.load_cert_chain(later.cert, later.key)
            async with httpx.AsyncClient(base_url=kept.base_url, verify=service, trust_env=False) as client:
                try:
                    return (await client.get("/v1/whoami")).json()["principal"] == "cert:writer"
                except (httpx.TransportError, ssl.SSLError):
                    return False

        await until(is_known, "the new authority's certificates count")
        service.load_cert_chain(former.cert, former.key)
        async with refused(httpx.AsyncClient(base_url=kept.base_url, verify=service, trust_env=False)):
            pass
        assert (await kept.get("/v1/whoami")).status_code == 200


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_who_resumes_a_session_is_who_began_it(
    connect: Connect, authority: Authority, version: ssl.TLSVersion
) -> None:
    async with connect() as client:
        host, port = client.base_url.host, client.base_url.port or 0
    context = authority.client(issued(authority, "writer"))
    context.maximum_version = version

    def ask(session: ssl.SSLSession | None) -> tuple[bytes, ssl.SSLSession | None, bool]:
        with (
            socket.create_connection((host, port), 30) as plain,
            context.wrap_socket(plain, server_hostname="localhost", session=session) as connection,
        ):
            connection.sendall(b"GET /v1/whoami HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
            return answer, connection.session, bool(connection.session_reused)

    _, session, _ = await asyncio.to_thread(ask, None)
    answer, _, is_resumed = await asyncio.to_thread(ask, session)
    assert is_resumed
    assert b'"principal":"cert:writer"' in answer


def test_a_certificate_that_expires_on_a_living_connection_has_no_names() -> None:
    assert CallerCertificate(("writer",), 1.0).names_now() == ()


@pytest.mark.parametrize(
    ("auth", "said"),
    [
        ({"mode": "none", "client_ca": "ca.pem"}, "another mode than none"),
        ({"mode": "tokens", "certificates": [WRITER]}, "certificates need client_ca"),
        ({"mode": "tokens", "client_ca": "ca.pem"}, r"auth\.client_ca needs tls\.cert and tls\.key"),
        ({"mode": "tokens", "certificates": [{**WRITER, "name": ""}]}, r"auth\.certificates\.0\.name"),
        ({"mode": "tokens", "certificates": [{**WRITER, "name": "a\nb"}]}, r"auth\.certificates\.0\.name"),
        ({"mode": "tokens", "certificates": [{**WRITER, "rights": []}]}, r"auth\.certificates\.0\.rights"),
        ({"mode": "tokens", "certificates": [{**WRITER, "rights": ["own"]}]}, r"auth\.certificates\.0\.rights"),
        ({"mode": "tokens", "certificates": [{**WRITER, "tenants": ["A"]}]}, r"auth\.certificates\.0\.tenants"),
    ],
)
def test_settings_of_certificates_that_say_nothing_whole_are_refused(auth: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        load_settings(auth=auth)


def test_the_environment_says_certificates_in_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TALLY_AUTH__MODE", "tokens")
    monkeypatch.setenv("TALLY_AUTH__CLIENT_CA", "ca.pem")
    monkeypatch.setenv("TALLY_TLS__CERT", "cert.pem")
    monkeypatch.setenv("TALLY_TLS__KEY", "key.pem")
    monkeypatch.setenv("TALLY_AUTH__CERTIFICATES", json.dumps([WRITER]))
    (read,) = load_settings().auth.certificates
    assert (read.name, read.rights, read.tenants) == ("writer", ["write", "read"], ["team-*"])
