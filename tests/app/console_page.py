"""The web console as somebody uses it: a real browser on a real service, and what must never happen in it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Request, expect

from app.dev.embedded import EmbeddedPostgres
from app.runtime.state.kept_files import FIRST_TOKEN, FirstToken
from app.trust import callers
from tests.app.service_thread import serving
from tests.browser import browsing, violations

WAIT_MS = 30_000
"""How long something may take to show, on a machine that runs other things too."""
WIDE = {"width": 1280, "height": 900}
ZONE = "Australia/Brisbane"
"""Where the clock of who looks is ten hours ahead of UTC, in summer and in winter."""
TURN = """address => {
  history.pushState(null, "", address);
  window.dispatchEvent(new HashChangeEvent("hashchange"));
}"""
"""Goes to an address as a link does, and returns when the page there has begun to load."""
expect.set_options(timeout=WAIT_MS)


class Console:
    """The console of the service at ``url`` in a context of its own; ``root`` is a token with all rights."""

    def __init__(self, browser: Browser, url: str, root: str) -> None:
        self.url = url
        self.root = root
        self.elsewhere: list[str] = []
        """Addresses of other origins that a page asked for."""
        self.complaints: list[str] = []
        """What the browser complained of: errors of scripts, and of the policy."""
        self.browser = browser
        self.api = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {root}"}, timeout=60, trust_env=False)
        self.page = self.open().new_page()
        self._strangers = self.open()

    def open(self, **more: Any) -> BrowserContext:
        """Another browser, of somebody who has not signed in."""
        as_of_somebody = {"viewport": WIDE, "locale": "en-GB", "timezone_id": ZONE, **more}
        context = self.browser.new_context(reduced_motion="reduce", **as_of_somebody)
        context.set_default_timeout(WAIT_MS)
        context.on("request", self._note)
        context.on("page", self._listen)
        return context

    def stranger(self) -> Page:
        """The page of somebody who has not signed in; one at a time, until `tidy`."""
        return self._strangers.new_page()

    def tidy(self) -> None:
        """Nobody but root is there any more, and looks at a wide page in the light; no page asked another server, or
        tripped over its policy."""
        assert self.elsewhere == []
        assert self.complaints == []
        for context in self.browser.contexts:
            if context not in (self.page.context, self._strangers):
                context.close()
        for page in self._strangers.pages:
            page.close()
        self._strangers.clear_cookies()
        self.page.set_viewport_size(WIDE)
        self.page.emulate_media(color_scheme="light", media="screen")

    def _note(self, request: Request) -> None:
        if not request.url.removeprefix("blob:").startswith(self.url):
            self.elsewhere.append(request.url)

    def _listen(self, page: Page) -> None:
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", self._hear)

    def _hear(self, message: ConsoleMessage) -> None:
        # The browser itself says so of every answer that is not fine; the page tells in words.
        if message.type == "error" and not message.text.startswith("Failed to load resource"):
            self.complaints.append(message.text)

    def go(self, place: str, page: Page | None = None) -> Page:
        """The page at ``#/`` and ``place``; where one of the console is open, as by a link on it."""
        page = page or self.page
        if not page.url.startswith(f"{self.url}/console"):
            return self.load(place, page)
        page.evaluate(TURN, f"#/{place}")
        return self._shown(page)

    def load(self, place: str, page: Page | None = None) -> Page:
        """The page at ``#/`` and ``place``, loaded anew."""
        page = page or self.page
        if page.url.startswith(f"{self.url}/console"):
            page.evaluate("address => history.pushState(null, '', address)", f"#/{place}")
            page.reload()
        else:
            page.goto(f"{self.url}/console#/{place}")
        return self._shown(page)

    def _shown(self, page: Page) -> Page:
        expect(page.locator("main h1")).to_be_visible()
        expect(page.locator("[aria-busy=true]")).to_have_count(0)
        return page

    def sign_in(self, token: str | None = None, page: Page | None = None) -> Page:
        """Somebody shows a token, by default that of ``root``."""
        page = self.go("", page)
        page.get_by_label("Token", exact=True).fill(token or self.root)
        page.get_by_role("button", name="Sign in").click()
        return page

    def issue(self, name: str, *rights: str, tenants: str = "*") -> dict[str, str]:
        """A new token, as the answer has it."""
        wanted = {"name": name, "rights": rights, "tenants": [tenants]}
        made: dict[str, str] = self.api.post("/v1/tokens", json=wanted).raise_for_status().json()
        return made


def barriers(page: Page) -> list[str]:
    """What keeps people out who use the page otherwise than by looking and pointing, where axe calls it serious."""
    return [
        f"{each['id']}: {node['target']} {node['html'][:200]}"
        for each in violations(page)
        if each["impact"] in ("serious", "critical")
        for node in each["nodes"]
    ]


@contextmanager
def consoling(postgres: EmbeddedPostgres, folder: Path, database: str, **settings: Any) -> Iterator[Console]:
    """The console of a service that asks who calls, root signed in."""
    first = callers.new_token()
    FIRST_TOKEN.store(folder, FirstToken("root", first.digest.hex()))
    with serving(postgres, folder, database, **settings) as url, browsing() as browser:
        console = Console(browser, url, first.text)
        console.sign_in()
        expect(console.page.get_by_role("heading", name="Everything holds")).to_be_visible()
        yield console
        console.api.close()


def book(console: Console, tenant: str) -> None:
    """Two nodes of a tenant: on `full` more is reserved than it has, since it lost an accelerator."""
    has = {"cpu_millis": 4000, "memory_bytes": 8 << 30, "accelerators": {"A100": 2}}
    claimed = {"cpu_millis": 5000, "accelerators": {"A100": 2}}
    placed = {"kind": "Placement", "capsule": "capsule-1", "node": "full", "reservation": claimed}

    def set_capacity(node: str, **said: Any) -> None:
        body = {"tenant_id": tenant, **said}
        console.api.put(f"/v1/nodes/{node}/capacity", json=body).raise_for_status()

    set_capacity("full", capacity=has, overcommit={"cpu_millis": "1.5"})
    body = {"tenant_id": tenant, "commitment": placed}
    headers = {"Idempotency-Key": f"place-{tenant}"}
    console.api.post("/v1/commitments", json=body, headers=headers).raise_for_status()
    set_capacity("full", capacity={**has, "accelerators": {"A100": 1}}, overcommit={"cpu_millis": "1.5"})
    set_capacity("idle", capacity={"cpu_millis": 500})


def job(tenant: str, name: str, **more: Any) -> dict[str, Any]:
    """The body of a job to be created, chained before it is answered."""
    return {"tenant_id": tenant, "job_id": name, "durability": "GLOBAL", **more}


def send(console: Console, tenant: str, *events: dict[str, Any]) -> None:
    """Events in one request, chained when this returns."""
    lines = "\n".join(json.dumps({"tenant_id": tenant, **event}) for event in events)
    headers = {"Content-Type": "application/x-ndjson"}
    console.api.post("/v1/events?durability=GLOBAL", content=lines, headers=headers).raise_for_status()
