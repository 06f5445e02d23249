"""Safekeepers, two processes of one node on two disks, a second node, and a PostgreSQL with a synchronous standby.

Every member is reached over a link of its own from each disk, PostgreSQL over one for all, so that each can be cut.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import shutil
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import asyncpg

from app.dev.embedded import EmbeddedPostgres
from tests.app.chains import until
from tests.app.standby import Standby, standby_of
from tests.conftest import execute
from tests.crash.quorum.history import Fenced, History, Wiped, now_s
from tests.crash.quorum.links import Link
from tests.crash.serve_process import ServeProcess
from tests.server_copies import server_with_schema
from tests.tally import Tally
from tests.wal.replication.keepers import KeeperProcess

NODES = {"a-1": "node-a", "a-2": "node-a", "b-1": "node-b"}
"""By disk, the node that writes on it."""
SETTINGS = {
    "wal__ack_mode": "REPLICATED_QUORUM",
    "wal__segment_bytes": 1 << 17,
    "wal__batch_max_bytes": 1 << 15,
    "wal__record_bytes_max": 1 << 15,
    "wal__retain": "1s",
    "replication__timeout": "1s",
    "lease__ttl": "2s",
    "write__timeout": "4s",
    "read__wait": "2s",
    "shutdown_grace": "4s",
    "hlc__persistence_interval": "100ms",
    "chain__batch_interval": "300ms",
    "chain__checkpoint_interval": "100ms",
    "verify__on_start": "false",
}


class Member:
    """One safekeeper: a process that comes and goes, on a folder that may be lost."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process: KeeperProcess | None = None
        self.links: dict[str, Link] = {}

    @property
    def running(self) -> Tally:
        """Its process."""
        assert self.process is not None
        return self.process.process

    async def start(self) -> None:
        """Start it, and lead all links to it."""
        self.process = await asyncio.to_thread(KeeperProcess, self.folder)
        for link in self.links.values():
            link.lead_to(self.process.port)

    async def kill(self) -> None:
        """SIGKILL."""
        assert self.process is not None
        await asyncio.to_thread(self.process.close)

    async def stop(self) -> None:
        """SIGTERM, which it follows."""
        assert self.process is not None
        assert await asyncio.to_thread(self.process.stop) == 0, self.process.events[-20:]

    def signal(self, number: signal.Signals) -> None:
        """SIGSTOP, SIGCONT."""
        self.running.send_signal(number)


class Database:
    """PostgreSQL and its synchronous standby, which takes its place once."""

    def __init__(self, primary: EmbeddedPostgres, standby: Standby, link: Link) -> None:
        self._primary, self._standby, self.link = primary, standby, link
        self.has_failed_over = False

    @property
    def service_url(self) -> str:
        """Where the nodes log in, by way of the link."""
        parts = urlsplit(self._primary.service_url())
        return parts._replace(netloc=parts.netloc.replace(f":{parts.port}", f":{self.link.port}")).geturl()

    @property
    def replica_url(self) -> str:
        """Where the nodes read what may be older."""
        return self._standby.url(self._primary.service_url())

    @property
    def superuser_url(self) -> str:
        """Where the chain stands now."""
        url = self._primary.superuser_url()
        return self._standby.url(url) if self.has_failed_over else url

    async def fail_over(self) -> None:
        """The primary is gone at once, and its standby takes over."""
        pid = self._primary.postmaster_pid()
        assert pid is not None
        self.link.cut()
        os.kill(pid, signal.SIGQUIT)
        await until(lambda: self._primary.postmaster_pid() is None, "the primary is gone")
        connection = await asyncpg.connect(self._standby.url(self._primary.superuser_url("postgres")))
        try:
            assert await connection.fetchval("SELECT pg_promote(true, 60)")
        finally:
            await connection.close()
        self.has_failed_over = True
        self.link.heal()
        port = urlsplit(self._standby.url(self._primary.superuser_url())).port
        assert port is not None
        self.link.lead_to(port)


class Cluster:
    """All of it. ``processes`` are those that run, by a name that no other ever has; ``urls`` those that answer.

    ``disks`` are those on which a process is to run.
    """

    def __init__(
        self, folder: Path, history: History, database: Database, members: list[Member], disks: Sequence[str]
    ) -> None:
        self.folder = folder
        self.history = history
        self.database = database
        self.members = members
        self.disks = disks
        self.processes: dict[str, ServeProcess] = {}
        self.urls: dict[str, str] = {}
        self.ended_with: dict[str, str] = {}
        """By disk, exit code and last words of the process that ran there before."""
        self._told: list[asyncio.Task[None]] = []
        self._runs = itertools.count(1)

    # --- nodes ------------------------------------------------------------------------------------

    def on(self, disk: str) -> str:
        """The process that runs on a disk."""
        names = [name for name in self.processes if disk_of(name) == disk]
        assert len(names) == 1, f"the process on {disk} ended with {self.ended_with[disk]}"
        return names[0]

    def writer(self) -> str:
        """The disk on which node-a writes."""
        (name,) = (name for name in self.urls if NODES[disk_of(name)] == "node-a")
        return disk_of(name)

    def standby(self) -> str:
        """The disk on which it waits."""
        return "a-2" if self.writer() == "a-1" else "a-1"

    async def launch(self, disk: str, *arguments: str, **settings: object) -> ServeProcess:
        """A process on a disk, with ``arguments`` and other ``settings``; once it answers, that is known."""
        members = ",".join(f"127.0.0.1:{member.links[disk].port}" for member in self.members)
        child = await ServeProcess.launch(
            self.folder / disk,
            self.database.service_url,
            arguments=arguments,
            node_id=NODES[disk],
            database_replica_urls=self.database.replica_url,
            **({"replication__members": members} | SETTINGS | settings),
        )
        name = f"{disk}.{next(self._runs)}"
        self.processes[name] = child
        self._told.append(asyncio.create_task(self._listen(name, child)))
        return child

    async def begin_standby(self) -> None:
        """From here on a second process of node-a waits on a disk of its own."""
        self.disks = (*self.disks, "a-2")
        await self.launch("a-2")

    async def _listen(self, name: str, child: ServeProcess) -> None:
        """Know when it answers, that it is fenced, and that it has ended."""
        url = await child.ready_or_ended()
        if url is not None:
            self.urls[name] = url
            try:
                await child.says("wal_fencing_reject", math.inf)
                self.history.note(Fenced(at_s=now_s(), process=name))
            except AssertionError:
                pass
        await child.ended(math.inf)
        self.ended_with[disk_of(name)] = f"{child.returncode}:\n{child.last_words()}"
        self.urls.pop(name, None)
        self.processes.pop(name, None)

    async def ended(self, name: str) -> None:
        """Return once a process has ended and that is known here."""
        await until(lambda: name not in self.processes, f"{name} ends")

    async def kill(self, disk: str) -> None:
        """SIGKILL to whatever runs on a disk."""
        name = self.on(disk)
        self.processes[name].signal(signal.SIGKILL)
        await self.ended(name)

    async def stop(self, disk: str) -> None:
        """SIGTERM, which it follows."""
        name = self.on(disk)
        child = self.processes[name]
        child.signal(signal.SIGTERM)
        await self.ended(name)
        assert child.returncode == 0, child.last_words()

    async def wipe(self, disk: str) -> None:
        """Lose the disk of a process that does not write."""
        await self.kill(disk)
        await asyncio.to_thread(shutil.rmtree, self.folder / disk)
        self.history.note(Wiped(at_s=now_s(), disk=disk))
        await self.launch(disk)

    async def answers(self, disk: str) -> str:
        """Wait until the process on a disk answers; its URL."""

        def there() -> str | None:
            found = [url for name, url in self.urls.items() if disk_of(name) == disk]
            runs = any(disk_of(name) == disk for name in self.processes)
            assert runs, f"the process on {disk} ended with {self.ended_with[disk]}"
            return found[0] if found else None

        url: str = await until(there, f"the process on {disk} answers")
        return url

    async def settled(self) -> None:
        """Return once both nodes write, and all members follow them.

        A process that was overtaken, as may happen when nobody can keep a lease, is launched again; nothing else may
        have ended.
        """
        async with aiohttp.ClientSession() as session:
            await until(lambda: self._are_whole(session), "both nodes answer, and all members follow them")

    async def _are_whole(self, session: aiohttp.ClientSession) -> bool:
        for disk in self.disks:
            if not any(disk_of(name) == disk for name in self.processes):
                assert '"kind": "FencedError"' in self.ended_with[disk], self.ended_with[disk]
                await self.launch(disk)
        urls = list(self.urls.items())
        return {NODES[disk_of(name)] for name, _ in urls} == {NODES[disk] for disk in self.disks} and all(
            [await self._is_whole(session, url) for _, url in urls]
        )

    async def _is_whole(self, session: aiohttp.ClientSession, url: str) -> bool:
        try:
            async with session.get(f"{url}/v1/node") as answer:
                node = await answer.json()
        except aiohttp.ClientError:
            return False
        return bool(len(node["members"]) == len(self.members) and all(each["in_sync"] for each in node["members"]))

    # --- links ------------------------------------------------------------------------------------

    def links(self, disk: str) -> list[Link]:
        """Those between a disk's process and the members."""
        return [member.links[disk] for member in self.members]

    async def close(self) -> None:
        """End all processes and links."""
        for task in self._told:
            task.cancel()
        await asyncio.gather(*self._told, return_exceptions=True)
        for child in self.processes.values():
            child.signal(signal.SIGCONT)
            await child.kill()
        for member in self.members:
            if member.process is not None and member.process.process.poll() is None:
                member.signal(signal.SIGCONT)
                await member.kill()
            for link in member.links.values():
                await link.close()


def disk_of(process: str) -> str:
    """The disk that a process of this name runs on."""
    return process.partition(".")[0]


@asynccontextmanager
async def running_cluster(
    folder: Path,
    pair: tuple[EmbeddedPostgres, Standby],
    history: History,
    members: int,
    disks: Sequence[str],
) -> AsyncIterator[Cluster]:
    """A cluster, both nodes ready on ``disks`` and followed by all members; it is gone afterwards."""
    async with AsyncExitStack() as stack:
        port = urlsplit(pair[0].superuser_url()).port
        assert port is not None
        database = Database(*pair, Link(port))
        stack.push_async_callback(database.link.close)
        await database.link.open()
        keepers = [Member(folder / f"keeper-{n}") for n in range(members)]
        cluster = Cluster(folder, history, database, keepers, disks)
        stack.push_async_callback(cluster.close)
        for member in cluster.members:
            await member.start()
            assert member.process is not None
            for disk in NODES:
                link = member.links[disk] = Link(member.process.port)
                await link.open()
        for disk in disks:
            await cluster.launch(disk)
            await cluster.answers(disk)
        await cluster.settled()
        yield cluster


@contextmanager
def postgres_pair(folder: Path) -> Iterator[tuple[EmbeddedPostgres, Standby]]:
    """A PostgreSQL with the schema, and a standby that has what it says it committed."""
    primary = server_with_schema(folder)
    primary.start()
    try:
        with standby_of(primary) as standby:
            superuser = primary.superuser_url("postgres")
            asyncio.run(execute(superuser, "ALTER SYSTEM SET synchronous_standby_names = '*'"))
            asyncio.run(execute(superuser, "SELECT pg_reload_conf()"))
            yield primary, standby
    finally:
        primary.remove()
