"""Pages are files of the package, kept by browsers by their content, and may load nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from app.dev.embedded import EmbeddedPostgres
from app.edge.routes.pages import CONSOLE
from tests.app.service_thread import serving
from tests.app.test_docs import Page


@pytest.fixture(scope="module")
def client(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with (
        serving(postgres, tmp_path_factory.mktemp("pages"), "pages") as url,
        httpx.Client(base_url=url, timeout=30) as client,
    ):
        yield client


def test_the_root_leads_to_the_console(client: httpx.Client) -> None:
    answer = client.get("/")
    assert (answer.status_code, answer.headers["location"]) == (307, "console")
    assert client.get("/", follow_redirects=True).headers["content-type"] == "text/html; charset=utf-8"


def test_all_that_the_console_loads_is_served_beside_it_as_what_it_is(client: httpx.Client) -> None:
    page = Page(client.get("/console").text)
    assert page.inline == []
    for name in [each for each in page.loaded if each.startswith("console/")]:
        answer = client.get(name)
        assert answer.status_code == 200, name
        assert answer.headers["content-type"] == CONSOLE[name.rpartition("/")[2]].media_type
    assert "needs JavaScript" in client.get("/console").text


def test_a_browser_may_load_nothing_else_run_nothing_in_the_page_and_frame_it_nowhere(client: httpx.Client) -> None:
    for path in ("/console", *(f"/console/{name}" for name in CONSOLE if name != "index.html")):
        answer = client.get(path)
        policy = dict(part.partition(" ")[::2] for part in answer.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == policy["form-action"] == "'self'"
        assert policy["trusted-types"] == "'none'"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cross-origin-opener-policy"] == "same-origin"


def test_what_a_browser_has_is_not_sent_again_until_it_changes(client: httpx.Client) -> None:
    for path in ("/console", "/console/console.css"):
        first = client.get(path)
        assert first.headers["cache-control"] == "no-cache"
        for known in (first.headers["etag"], f'"other", W/{first.headers["etag"]}', "*"):
            again = client.get(path, headers={"If-None-Match": known})
            assert (again.status_code, again.content) == (304, b"")
            assert again.headers["etag"] == first.headers["etag"]
            assert again.headers["content-security-policy"] == first.headers["content-security-policy"]
        assert client.get(path, headers={"If-None-Match": '"other"'}).content == first.content


def test_head_tells_of_a_page_without_sending_it(client: httpx.Client) -> None:
    answer, page = client.head("/console"), client.get("/console")
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["etag"] == page.headers["etag"]
    assert answer.headers["content-length"] == str(len(page.content))


def test_nothing_else_of_the_package_is_served(client: httpx.Client) -> None:
    for name in ("index.html", "__init__.py", "..%2f__init__.py", "LICENSE", "nothing.js"):
        answer = client.get(f"/console/{name}")
        assert (answer.status_code, answer.headers["content-type"]) == (404, "application/problem+json"), name
