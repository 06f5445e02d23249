"""The client repeats what may be repeated, as long as it was told to, and says what the service said."""

import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from cli.client import TOKEN_VARIABLE, LedgerClient
from tallystick_client import ProblemError, TransientError, UnreachableError
from tallystick_client.core import Core

Answer = tuple[int, dict[str, str], bytes]
PATIENCE_S = 60.0
PROBLEM = b'{"type": "https://tallystick.dev/problems/backlog-full", "detail": "too many events wait", "line": 3}'


class Scripted(ThreadingHTTPServer):
    """A real HTTP server that gives prepared answers in order and remembers the requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers: list[Answer] = []
        self.keys: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Scripted

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.keys.append(self.headers["Idempotency-Key"])
        status, headers, body = self.server.answers.pop(0)
        self.send_response(status)
        sent = {"Content-Length": str(len(body)), "Content-Type": "application/json", **headers}
        for name, value in sent.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def service() -> Iterator[Scripted]:
    with Scripted() as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("status", [429, 503])
def test_a_keyed_request_is_repeated_with_its_key_until_the_service_takes_it(service: Scripted, status: int) -> None:
    service.answers = [(status, {"Retry-After": "0"}, PROBLEM), (200, {}, b'{"accepted": 1}')]
    waited: list[str] = []

    with LedgerClient(service.url, patience_s=PATIENCE_S, on_wait=lambda error, _: waited.append(str(error))) as client:
        assert client.post("/v1/jobs", {}, key="k-1") == {"accepted": 1}

    assert service.keys == ["k-1", "k-1"]
    assert waited == [f"backlog-full ({status}): line 3: too many events wait"]


def test_a_request_without_a_key_is_never_repeated(service: Scripted) -> None:
    service.answers = [(503, {"Retry-After": "0"}, PROBLEM), (200, {}, b"{}")]

    with LedgerClient(service.url) as client, pytest.raises(ProblemError) as refused:
        client.post("/v1/jobs", {})

    assert (refused.value.status, refused.value.kind) == (503, "backlog-full")
    assert len(service.keys) == 1


def test_a_refusal_that_repeating_cannot_change_is_final(service: Scripted) -> None:
    service.answers = [(422, {}, PROBLEM.replace(b"backlog-full", b"invalid-event")), (200, {}, b"{}")]

    with LedgerClient(service.url) as client, pytest.raises(ProblemError, match="line 3"):
        client.post("/v1/jobs", {}, key="k-1")

    assert len(service.keys) == 1


def test_a_service_that_stays_full_longer_than_the_patience_is_given_up(service: Scripted) -> None:
    service.answers = [(503, {"Retry-After": "30"}, PROBLEM)]

    with LedgerClient(service.url, patience_s=1.0) as client, pytest.raises(ProblemError):
        client.post("/v1/jobs", {}, key="k-1")


def test_a_proxy_that_cannot_reach_the_ledger_is_asked_again(service: Scripted) -> None:
    page: Answer = (502, {"Content-Type": "text/html"}, b"<html>")
    service.answers = [page, (200, {}, b"{}"), page]

    with LedgerClient(service.url, patience_s=PATIENCE_S) as client:
        client.post("/v1/jobs", {}, key="k-1")
        with pytest.raises(UnreachableError, match="502, text/html"):
            client.post("/v1/jobs", {})


def test_nothing_at_the_address_is_unreachable() -> None:
    with LedgerClient("http://127.0.0.1:9", patience_s=0.0) as client, pytest.raises(UnreachableError):
        client.get("/v1/node")


@pytest.mark.parametrize(
    ("failures", "retry_after_s", "expected"),
    [(1, 0.0, 0.25), (4, 0.0, 2.0), (31, 0.0, 10.0), (1, 7.0, 7.0), (1, 86400.0, 60.0)],
)
def test_waits_double_within_bounds_and_honour_retry_after(
    failures: int, retry_after_s: float, expected: float
) -> None:
    refused = TransientError(503, "not-ready", "not yet", {})
    refused.retry_after_s = retry_after_s
    wait_s = Core(["http://ledger"], None, 0.0, 1.0, transport=None).turn(failures, refused)
    assert wait_s == expected if retry_after_s else expected / 2 <= wait_s <= expected


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_no_proxy_is_shown_the_token_for_this_machine(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as proxy, socket.socket() as silent:
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        monkeypatch.setenv(TOKEN_VARIABLE, "tally_secret")
        silent.bind(("127.0.0.1", 0))  # which does not listen
        url = f"http://{host}:{silent.getsockname()[1]}"
        with LedgerClient(url, patience_s=0, timeout_s=5) as client, pytest.raises(UnreachableError):
            client.get("/v1/whoami")
        proxy.setblocking(False)
        with pytest.raises(BlockingIOError):
            proxy.accept()
