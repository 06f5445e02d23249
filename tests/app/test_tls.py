"""TLS of the service's own: what it speaks, whom it lets wait, and how its certificates change."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop

from app.dev.embedded import EmbeddedPostgres
from app.runtime.settings.config import load_settings
from app.trust.tls import ServerTls, TlsFiles
from ledger.errors import ConfigurationError
from tests.app.certificates import Authority, Pair
from tests.app.chains import until
from tests.app.conftest import MakeSettings, RunServer
from tests.app.service_thread import serving
from tests.app.test_raw_requests import answers
from tests.app.test_silent_clients import closed_by_service
from tests.tally import run_tally

DEADLINE_S = 60
CONNECTIONS_MAX = 20
ASK = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
HSTS = "strict-transport-security"


@dataclass(frozen=True)
class Secured:
    """A service that speaks TLS."""

    url: str
    authority: Authority
    pair: Pair

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("https://").split(":")
        return host, int(port)

    def client(self, **given: Any) -> httpx.Client:
        return httpx.Client(
            base_url=self.url, verify=self.authority.client(), timeout=DEADLINE_S, trust_env=False, **given
        )

    @contextmanager
    def connected(self, context: ssl.SSLContext | None = None, sent: bytes = b"") -> Iterator[ssl.SSLSocket]:
        context = context or self.authority.client()
        with (
            socket.create_connection(self.address, DEADLINE_S) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as connection,
        ):
            connection.sendall(sent)
            yield connection


@pytest.fixture(scope="module")
def secured(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """One in the event loop of ``tally serve``."""
    folder: Path = tmp_path_factory.mktemp("tls")
    authority = Authority(folder / "certificates")
    pair = authority.issue("service", with_rsa=True)
    http = {"connections_max": CONNECTIONS_MAX, "header_timeout": "3s", "body_timeout": "3s"}
    tls = {"cert": pair.cert, "key": pair.key}
    with serving(postgres, folder, "tls", uvloop.new_event_loop, http=http, tls=tls) as url:
        yield Secured(url, authority, pair)


def all_of(connection: socket.socket) -> bytes:
    """All that comes until the service ends the connection, as TLS ends one: a cut is no end."""
    received = b""
    while piece := connection.recv(65536):
        received += piece
    return received


def test_what_is_served_is_served_over_tls_and_browsers_are_told_to_stay(secured: Secured) -> None:
    assert secured.url.startswith("https://127.0.0.1:")
    with secured.client() as client:
        made = client.post("/v1/jobs", json={"tenant_id": "acme"})
        assert made.status_code == 201
        lines = "".join('{"tenant_id": "acme", "type": "JobCreated", "spec": {"n": "%s"}}\n' % ("x" * 500) * 2000)
        form = {"Content-Type": "application/x-ndjson"}
        assert client.post("/v1/events", content=lines, headers=form).json()["accepted"] == 2000
        told = client.get("/v1/chain/entries", params={"tenant_id": "acme", "limit": 1000})
        assert len(told.content) > 500_000
        refused = client.post("/v1/jobs", json={"tenant_id": "A"})
        assert refused.status_code == 422
        for answer in (made, told, refused):
            assert answer.headers[HSTS] == "max-age=31536000"


def test_nothing_is_told_of_staying_where_tls_is_not_spoken(postgres: EmbeddedPostgres, tmp_path: Path) -> None:
    with serving(postgres, tmp_path, "no_tls") as url:
        assert HSTS not in httpx.get(f"{url}/livez").headers


def test_requests_behind_each_other_are_answered_in_their_order(secured: Secured) -> None:
    asked = [b"GET /v1/jobs/none-%d?tenant_id=acme HTTP/1.1\r\nHost: localhost\r\n" % n for n in range(20)]
    asked[-1] += b"Connection: close\r\n"
    with secured.connected(sent=b"".join(each + b"\r\n" for each in asked)) as connection:
        found = answers(all_of(connection))
    assert [answer.status for answer in found] == [404] * 20
    assert all(f"none-{n}".encode() in answer.body for n, answer in enumerate(found))


def test_many_records_that_come_at_once_are_all_answered(secured: Secured) -> None:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = secured.authority.client().wrap_bio(incoming, outgoing, server_hostname="localhost")
    asked = [b"GET /v1/jobs/none-%d?tenant_id=acme HTTP/1.1\r\nHost: localhost\r\n\r\n" % n for n in range(30)]
    with socket.create_connection(secured.address, DEADLINE_S) as connection:

        def after(step: Callable[[], Any]) -> Any:
            while True:
                try:
                    return step()
                except ssl.SSLWantReadError:
                    connection.sendall(outgoing.read())
                    incoming.write(connection.recv(65536))

        after(tls.do_handshake)
        for each in (*asked, asked[0].replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")):
            tls.write(each)
        received = b""
        while piece := after(lambda: tls.read(65536)):
            received += piece
    assert [answer.status for answer in answers(received)] == [404] * 31


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_both_versions_of_today_are_spoken_with_keys_that_nobody_keeps(
    secured: Secured, version: ssl.TLSVersion
) -> None:
    context = secured.authority.client()
    context.maximum_version = version
    with secured.connected(context, ASK) as connection:
        name, protocol, _ = connection.cipher() or ("", "", 0)
        assert protocol == version.name.replace("_", ".")
        assert name.startswith(("ECDHE-", "TLS_"))
        assert connection.selected_alpn_protocol() is None
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_the_newer_version_is_preferred(secured: Secured) -> None:
    with secured.connected() as connection:
        assert connection.version() == "TLSv1.3"


@pytest.mark.parametrize("ciphers", ["AES128-GCM-SHA256", "ECDHE-RSA-AES128-SHA", "ECDHE-RSA-AES256-SHA384", "aNULL"])
def test_weak_ciphers_are_refused(secured: Secured, ciphers: str) -> None:
    context = secured.authority.client()
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(f"{ciphers}:@SECLEVEL=0")
    with pytest.raises(ssl.SSLError), secured.connected(context):
        pass


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1])
def test_older_versions_are_refused(secured: Secured, version: ssl.TLSVersion) -> None:
    context = secured.authority.client()
    context.minimum_version = context.maximum_version = version
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.raises(ssl.SSLError), secured.connected(context):
        pass


def test_who_speaks_plain_http_is_told_so(secured: Secured) -> None:
    answer = httpx.get(secured.url.replace("https", "http") + "/livez", timeout=DEADLINE_S)
    assert (answer.status_code, answer.json()["type"].rpartition("/")[2]) == (400, "malformed-http")
    assert "https://" in answer.json()["detail"]


def test_what_is_neither_is_ended(secured: Secured) -> None:
    with socket.create_connection(secured.address, DEADLINE_S) as connection:
        connection.sendall(os.urandom(64) * 10)
        assert b"HTTP" not in all_of(connection)


def test_a_handshake_that_does_not_go_on_is_ended(secured: Secured) -> None:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    hello = secured.authority.client().wrap_bio(incoming, outgoing, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        hello.do_handshake()
    said, began_s = outgoing.read(), time.monotonic()
    with ExitStack() as stack:
        begun = [stack.enter_context(socket.create_connection(secured.address, DEADLINE_S)) for _ in range(3)]
        for connection, size in zip(begun, (0, 1, 100), strict=True):
            connection.sendall(said[:size])
        for connection in begun:
            ended = select.poll()
            ended.register(connection, select.POLLIN)
            assert ended.poll(DEADLINE_S * 1000)
            assert time.monotonic() - began_s > 2


def test_handshakes_that_do_not_go_on_keep_nobody_out(secured: Secured) -> None:
    with ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(secured.address, DEADLINE_S))
            for _ in range(CONNECTIONS_MAX * 3)
        ]
        with secured.client() as client:
            assert client.get("/livez").status_code == 200
        assert len(closed_by_service(silent)) > CONNECTIONS_MAX * 2


def test_while_every_connection_is_busy_a_new_one_is_refused_over_tls(secured: Secured) -> None:
    asked = b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 41\r\n"
    with ExitStack() as stack:
        for _ in range(CONNECTIONS_MAX):
            busy = stack.enter_context(secured.connected(sent=asked + b"Expect: 100-continue\r\n\r\n"))
            assert busy.recv(65536).startswith(b"HTTP/1.1 100 ")
        stalled = [stack.enter_context(socket.create_connection(secured.address, DEADLINE_S)) for _ in range(3)]
        with secured.connected() as connection:
            (answer,) = answers(all_of(connection))
            assert (answer.status, answer.problem) == (503, "not-ready")
        assert [all_of(each) for each in stalled] == [b""] * 3


def test_what_is_refused_is_told_and_the_connection_ends(secured: Secured) -> None:
    for refused, status in ((b"GET / HTTP/1.1\r\n\r\n", 400), (b"nonsense\r\n\r\n", 400), (ASK[:-2], 408)):
        with secured.connected(sent=refused) as connection:
            (answer,) = answers(all_of(connection))
            connection.unwrap()
            assert answer.status == status
            assert (answer.headers["connection"], HSTS in answer.headers) == ("close", True)


def test_a_connection_that_says_nothing_is_closed_as_tls_closes(secured: Secured) -> None:
    with secured.connected(sent=ASK) as connection:
        assert all_of(connection).startswith(b"HTTP/1.1 200 ")


def test_who_does_not_read_the_answers_is_cut_off(secured: Secured) -> None:
    asked = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100
    with socket.socket() as plain:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        plain.settimeout(DEADLINE_S)
        plain.connect(secured.address)
        with secured.authority.client().wrap_socket(plain, server_hostname="localhost") as connection:
            connection.sendall(asked)
            ended = select.poll()
            ended.register(connection, select.POLLERR | select.POLLHUP)
            assert ended.poll(DEADLINE_S * 1000), "the connection is still there"


def test_who_reads_slowly_gets_all_of_the_last_answer(secured: Secured) -> None:
    asked = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
    last = asked.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    with secured.connected(sent=asked * 30 + last) as connection:
        connection.settimeout(DEADLINE_S)
        received = bytearray()
        while piece := connection.recv(4096):
            received += piece
    found = answers(bytes(received))
    assert len(found) == 31
    assert {len(answer.body) for answer in found} == {int(found[0].headers["content-length"])}


async def test_a_certificate_is_replaced_while_the_service_runs(
    secured: Secured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.trust.tls.LOOK_INTERVAL_S", 0.2)

    def served() -> int:
        return serial_at(secured)

    with secured.client() as kept, secured.client() as other:
        assert kept.get("/livez").status_code == 200
        before = served()
        secured.pair.take(secured.authority.issue("next"))
        await until(lambda: served() == secured.pair.serial, "the new one is served")
        assert served() != before
        assert kept.get("/livez").status_code == 200

        whole = secured.pair.key.read_bytes()
        secured.pair.key.write_bytes(secured.authority.issue("other").key.read_bytes())
        await until(lambda: "cannot be used" in tls_check(other), "it is told")
        assert served() == secured.pair.serial
        assert other.get("/readyz").status_code == 200
        secured.pair.key.write_bytes(whole)
        await until(lambda: tls_check(other) == "ok", "it is whole")

        soon = secured.authority.issue("soon", lives=timedelta(days=13))
        secured.pair.take(soon)
        await until(lambda: "expires at" in tls_check(other), "it is told")
        assert served() == soon.serial
        secured.pair.take(secured.authority.issue("last", with_rsa=True))
        await until(lambda: tls_check(other) == "ok", "it is whole")


def serial_at(secured: Secured) -> int:
    from cryptography import x509

    with secured.connected() as connection:
        shown = connection.getpeercert(binary_form=True)
    assert shown is not None
    return x509.load_der_x509_certificate(shown).serial_number


def tls_check(client: httpx.Client) -> str:
    check = client.get("/readyz").json()["checks"]["tls"]
    return "ok" if check["ok"] else str(check["detail"])


async def test_a_stop_does_not_wait_for_clients_that_keep_their_connections(
    run_server: RunServer, make_settings: MakeSettings, tmp_path: Path
) -> None:
    authority = Authority(tmp_path / "certificates")
    pair = authority.issue("service")
    settings = make_settings(tls={"cert": pair.cert, "key": pair.key}, shutdown_grace="60s")
    async with run_server(settings) as client:
        host, port = str(client.base_url).removeprefix("https://").rstrip("/").split(":")
        kept = await asyncio.open_connection(host, int(port), ssl=authority.client(), server_hostname="localhost")
        waiting = await asyncio.open_connection(host, int(port))
        kept[1].write(ASK)
        assert (await kept[0].readline()).startswith(b"HTTP/1.1 200")
        began_s = time.monotonic()
    assert time.monotonic() - began_s < 20
    for _, writer in (kept, waiting):
        writer.close()


# What is read


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "certificates")


def test_a_key_that_others_can_read_is_refused(authority: Authority) -> None:
    pair = authority.issue("service")
    pair.key.chmod(0o640)
    with pytest.raises(ConfigurationError, match="0640"):
        ServerTls(TlsFiles(pair.cert, pair.key))


def test_files_that_are_no_pair_are_refused_by_name(authority: Authority, tmp_path: Path) -> None:
    pair, other = authority.issue("service"), authority.issue("other")
    for cert, key, said in (
        (pair.cert, other.key, r"tls\.cert .*service\.pem and tls\.key .*other\.key"),
        (pair.key, pair.key, r"tls\.cert .*service\.key holds no certificates"),
        (tmp_path / "none.pem", pair.key, r"tls\.cert .*none\.pem cannot be read"),
        (pair.cert, tmp_path / "none.key", r"key file .*none\.key cannot be read"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            ServerTls(TlsFiles(cert, key))


def test_a_certificate_that_has_expired_is_told(authority: Authority) -> None:
    pair = authority.issue("service", lives=timedelta(days=-1))
    assert "expired at" in (ServerTls(TlsFiles(pair.cert, pair.key)).fault() or "")


def test_certificate_and_key_are_set_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="tls: cert and key belong together"):
        load_settings(tls={"cert": tmp_path / "cert.pem"})


# The command


async def test_the_command_asks_over_tls_and_trusts_the_ca_that_it_is_told(secured: Secured) -> None:
    ask = ("token", "list", "--json")
    there = {"TALLY_URL": secured.url}
    found = await asyncio.to_thread(run_tally, *ask, **there, TALLY_CA=str(secured.authority.ca_file))
    assert found.returncode == 0, found.stderr
    untold = await asyncio.to_thread(run_tally, *ask, **there)
    assert untold.returncode == 1
    assert "certificate verify failed" in untold.stderr
    wrong = await asyncio.to_thread(run_tally, *ask, **there, TALLY_CA="none.pem")
    assert wrong.returncode == 1
    assert "TALLY_CA none.pem is no file of CA certificates" in wrong.stderr
