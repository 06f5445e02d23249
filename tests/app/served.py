"""A node that asks who calls, and clients of it that say so."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from app.edge.accepted import Services
from app.edge.listener import listening
from app.node.wiring import running
from app.runtime.settings.config import Settings
from app.runtime.state.kept_files import FIRST_TOKEN, FirstToken
from app.trust import callers
from tests.app.client import Client


class Served:
    """A node that asks for tokens, and clients of it."""

    def __init__(self, url: str, services: Services, root: str) -> None:
        self.url = url
        self.services = services
        self.root = root

    def client(self, token: str | None, **more: Any) -> Client:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        return Client(base_url=self.url, headers=headers | more, timeout=30, trust_env=False)

    async def issue(self, *rights: str, tenants: str = "*", name: str = "somebody", **more: Any) -> dict[str, Any]:
        """A new token, as the answer has it."""
        async with self.client(self.root) as root:
            wanted = {"name": name, "rights": rights, "tenants": tenants.split(","), **more}
            answer = await root.post("/v1/tokens", json=wanted)
        assert answer.status_code == 201, answer.text
        found: dict[str, Any] = answer.json()
        return found


Serve = Callable[..., Any]
"""Runs a node that asks for tokens: ``async with serve() as served``; takes the node's folder, and settings."""


@asynccontextmanager
async def serving_with_tokens(settings: Settings, database_url: str, *, with_first: bool) -> AsyncIterator[Served]:
    """A node of these settings, to which a first token is given where there is none yet."""
    first = callers.new_token()
    if with_first and not settings.data_dir.exists():
        settings.data_dir.mkdir()
        FIRST_TOKEN.store(settings.data_dir, FirstToken("root", first.digest.hex()))
    async with AsyncExitStack() as stack:
        _service, services = await stack.enter_async_context(running(settings, database_url))
        url, _serving = await stack.enter_async_context(listening(services))
        yield Served(url, services, first.text)
