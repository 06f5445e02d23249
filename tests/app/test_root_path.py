"""Behind a proxy that serves the ledger below a path of its own."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import urlsplit

import httpx
import pytest

from app.dev.embedded import EmbeddedPostgres
from tallystick_client import Client
from tests.app.service_thread import serving
from tests.browser import browsing

PREFIX = "/ledger"
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "date", "server"}


class Proxy(ThreadingHTTPServer):
    """Passes on what is below ``PREFIX``, without it, and nothing else."""

    daemon_threads = True

    def __init__(self, service: str) -> None:
        super().__init__(("127.0.0.1", 0), _Passing)
        self.service = urlsplit(service)
        self.url = f"http://127.0.0.1:{self.server_port}{PREFIX}"
        self.refused: list[str] = []
        """Paths that are not below the prefix."""


class _Passing(BaseHTTPRequestHandler):
    server: Proxy

    def _pass_on(self) -> None:
        if not self.path.startswith(f"{PREFIX}/"):
            self.server.refused.append(self.path)
            self.send_error(404)
            return
        node = http.client.HTTPConnection(self.server.service.netloc)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        node.request(self.command, self.path.removeprefix(PREFIX), body or None, dict(self.headers))
        answer = node.getresponse()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in HOP_BY_HOP:
                self.send_header(name, value)
        self.send_header("Connection", "close")
        self.end_headers()
        try:
            while piece := answer.read1(65536):
                self.wfile.write(piece)
                self.wfile.flush()
        except OSError:
            pass  # the browser has left
        finally:
            node.close()

    def do_GET(self) -> None:
        self._pass_on()

    def do_POST(self) -> None:
        self._pass_on()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def proxy(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    settings = {"http": {"root_path": PREFIX}}
    with serving(postgres, tmp_path_factory.mktemp("below"), "below", **settings) as url, Proxy(url) as server:
        thread = Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_client_writes_and_reads_below_a_path_and_is_given_addresses_below_it(proxy: Proxy) -> None:
    with Client(proxy.url) as client:
        with client.job("acme", {"name": "nightly"}, job_id="j1"):
            pass
        assert client.get_job("acme", "j1")["status"] == "COMPLETED"
        made = client.ask("POST", "/v1/jobs", content=b'{"tenant_id":"acme","job_id":"j2","spec":{}}', key="k")
        report = client.ask("POST", "/v1/reports", content=b'{"tenant_id":"acme"}')
    assert made.headers["Location"] == f"{PREFIX}/v1/jobs/j2"
    assert report.headers["Location"].startswith(f"{PREFIX}/v1/reports/")
    assert httpx.get(f"{proxy.url}/openapi.json").json()["servers"] == [{"url": PREFIX}]
    assert proxy.refused == []


def test_the_console_and_the_pages_beside_it_work_below_a_path(proxy: Proxy) -> None:
    with Client(proxy.url) as client:
        client.create_job("acme", {"name": "shown"}, job_id="j3")
    with browsing() as browser:
        page = browser.new_page()
        asked: list[str] = []
        page.on("response", lambda answer: asked.append(f"{answer.status} {answer.url}"))
        page.goto(f"{proxy.url}/")
        page.get_by_role("link", name="Jobs").first.click()
        page.get_by_text("j3").first.wait_for()
        assert page.url.startswith(f"{proxy.url}/console#/jobs")
        for beside in ("Verify a file offline", "API"):
            page.get_by_role("link", name=beside).first.click()
            page.wait_for_load_state("networkidle")
            page.go_back()
    assert proxy.refused == []
    assert [line for line in asked if not line.startswith(("200", "304", "307"))] == []
