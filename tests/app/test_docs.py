"""The page that describes the API needs nothing but this service: no internet, no inline script."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from urllib.parse import urljoin, urlsplit

import httpx
import pytest

from app.dev.embedded import EmbeddedPostgres
from tests.app.service_thread import serving

TYPES = {"js": "text/javascript", "css": "text/css", "png": "image/png", "json": "application/json"}


@pytest.fixture(scope="module")
def client(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with (
        serving(postgres, tmp_path_factory.mktemp("docs"), "docs") as url,
        httpx.Client(base_url=url, timeout=30) as client,
    ):
        yield client


class Page(HTMLParser):
    """What a page loads, and whatever script or style stands in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.inline: list[str] = []
        self._within = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._within = tag
        self.inline += [name for name, _ in attrs if name == "style" or name.startswith("on")]
        self.loaded += [value for name, value in attrs if name in ("src", "href") and value]

    def handle_endtag(self, tag: str) -> None:
        self._within = ""

    def handle_data(self, data: str) -> None:
        if self._within in ("script", "style") and data.strip():
            self.inline.append(data)


def test_everything_that_the_page_loads_is_served_here(client: httpx.Client) -> None:
    answer = client.get("/docs")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    page = Page(answer.text)
    assert len(page.loaded) == 4
    start = client.get(urljoin(str(answer.url), "docs/start.js")).text
    named = page.loaded + re.findall(r'url: "([^"]*)"', start)
    assert len(named) == 5
    for name in named:
        assert urlsplit(name).netloc == "", "it names another server"
        asset = client.get(urljoin(str(answer.url), name))
        assert asset.status_code == 200, name
        assert asset.headers["content-type"].split(";")[0] == TYPES[name.rpartition(".")[2]]
        assert len(asset.content) > 100


def test_the_style_loads_nothing_by_itself(client: httpx.Client) -> None:
    style = client.get("/docs/swagger-ui.css").text
    assert re.findall(r"@import|url\((?![\"']?data:)", style) == []


def test_a_browser_may_load_nothing_else_and_run_nothing_that_stands_in_the_page(client: httpx.Client) -> None:
    answer = client.get("/docs")
    assert Page(answer.text).inline == []
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert not {"unsafe", "http"} & set(re.findall(r"unsafe|http", answer.headers["content-security-policy"]))
    assert "validatorUrl: null" in client.get("/docs/start.js").text


def test_there_is_nothing_else_below_it(client: httpx.Client) -> None:
    for name in ("__init__.py", "..%2fmain.py", "nothing", "oauth2-redirect"):
        answer = client.get(f"/docs/{name}")
        assert (answer.status_code, answer.headers["content-type"]) == (404, "application/problem+json")
