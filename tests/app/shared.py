"""A node that the tests of a file share: each has a tenant of its own there, and finds those of the others beside it.

What a test stops, restarts, cuts off or sets for all tenants is a node of its own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg

from app.edge.accepted import Services
from app.edge.listener import listening
from app.node.service import Service
from app.node.wiring import running
from app.runtime.settings.config import Settings
from tests.app.chains import Chains
from tests.conftest import Database, connected_to


class Shared:
    """A node that listens, what it consists of, and the superuser of its database."""

    def __init__(self, url: str, service: Service, services: Services, superuser: asyncpg.Connection) -> None:
        self.url = url
        self.service = service
        self.services = services
        self.superuser = superuser
        self.chains = Chains(superuser)


@asynccontextmanager
async def sharing(settings: Settings, database: Database) -> AsyncIterator[Shared]:
    """A node of these settings, whose start is recorded: it writes nothing more by itself."""
    async with (
        running(settings, database.service_url) as (service, services),
        listening(services) as (url, _serving),
        connected_to(database.superuser_url) as superuser,
    ):
        await service.key_changes.recorded.wait()
        yield Shared(url, service, services, superuser)
