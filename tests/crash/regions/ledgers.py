"""The ledgers of three regions as processes, each on a database of its own, that exchange with each other."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from app.dev.cluster import free_port
from app.dev.embedded import EmbeddedPostgres
from signing.private_keys import generate
from tests.conftest import Database, fresh_database
from tests.crash.conftest import Launch
from tests.crash.serve_process import ServeProcess

REGIONS = ("use1", "eu1", "ap1")


@contextmanager
def databases_of(postgres: EmbeddedPostgres, *names: str) -> Iterator[dict[str, Database]]:
    """A fresh database for each name; dropped afterwards. Not in an event loop."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(fresh_database(postgres)) for name in names}


class Ledgers:
    """Three ledgers that have not started, with keys that each of them trusts. A write at GLOBAL waits for a majority
    of them."""

    def __init__(self, launch: Launch, databases: Mapping[str, Database], folder: Path) -> None:
        self.folder, self.databases = folder, databases
        self._launch = launch
        self.ports = {region: free_port() for region in REGIONS}
        self.processes: dict[str, ServeProcess] = {}
        self.trusted = folder / "trusted"
        self.trusted.mkdir()
        for region in REGIONS:
            key = generate(folder / region / "keys" / "signing.pem")
            (self.trusted / f"{region}.pem").write_text(key.public_key_pem)

    def url(self, region: str) -> str:
        return f"http://127.0.0.1:{self.ports[region]}"

    def peer_url(self, asking: str, asked: str) -> str:
        """Where the ledger of region ``asking`` asks that of ``asked``."""
        return self.url(asked)

    async def start_all(self) -> None:
        await asyncio.gather(*map(self.start, REGIONS))

    async def start(self, region: str, on: str | None = None, **settings: object) -> None:
        """Start a ledger on its database, or on the one named ``on``, and wait until it answers."""
        peers = [{"url": self.peer_url(region, each), "region": each} for each in REGIONS if each != region]
        given = {
            "port": self.ports[region],
            "region": region,
            "bundle__trusted_keys": self.trusted,
            "exchange__peers": json.dumps(peers),
            "exchange__is_global": "true",
            "exchange__interval": "200ms",
            "write__timeout": "3s",
        }
        child = await self._launch(self.folder / region, self.databases[on or region].service_url, **given | settings)
        self.processes[region] = child
        await child.ready()
