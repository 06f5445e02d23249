"""What happens to a cluster under load: each fault is begun, seen to matter, and mended, until all is whole again."""

from __future__ import annotations

import asyncio
import random
import resource
import shutil
import signal

from tests.crash.quorum.cluster import Cluster, Member
from tests.crash.quorum.history import Struck, now_s

ANSWERS = 15
"""So many more writes are answered before a fault is mended."""


class Faults:
    """The faults of one run, drawn from ``draw``."""

    def __init__(self, cluster: Cluster, draw: random.Random) -> None:
        self._cluster = cluster
        self._history = cluster.history
        self._draw = draw

    async def strike(self, fault: str) -> None:
        """One fault, from its beginning to its end."""
        await self._cluster.settled()
        self._history.note(Struck(at_s=now_s(), fault=fault))
        await getattr(self, fault)()
        await self._cluster.settled()
        await self._history.goes_on(ANSWERS, "REGIONAL", "GLOBAL")

    def _member(self) -> Member:
        return self._draw.choice(self._cluster.members)

    # --- processes of the node --------------------------------------------------------------------

    async def writer_is_killed(self) -> None:
        """The standby takes over, and what was killed waits for it from then on."""
        cluster, disk, other = self._cluster, self._cluster.writer(), self._cluster.standby()
        await cluster.kill(disk)
        await cluster.answers(other)
        await cluster.launch(disk)

    async def writer_is_stopped(self) -> None:
        """A rolling restart of the node."""
        cluster, disk, other = self._cluster, self._cluster.writer(), self._cluster.standby()
        await cluster.stop(disk)
        await cluster.answers(other)
        await cluster.launch(disk)

    async def writer_hangs(self) -> None:
        """It wakes up when another writes, is fenced, and ends."""
        disk = self._cluster.writer()
        await self._overtaken(disk)
        await self._cluster.launch(disk)

    async def writer_loses_the_quorum(self) -> None:
        """It answers LOCAL alone until it is killed; what it answered stays on its disk, and the other takes over."""
        cluster, disk, other = self._cluster, self._cluster.writer(), self._cluster.standby()
        self._without_quorum(disk)
        await self._history.goes_on(ANSWERS, "LOCAL")
        await cluster.kill(disk)
        self._heal(disk)
        await cluster.answers(other)
        await cluster.launch(disk)

    async def writer_hangs_without_a_quorum(self) -> None:
        """It answers LOCAL alone, hangs, and wakes up with what it answered when another writes."""
        disk = self._cluster.writer()
        self._without_quorum(disk)
        await self._history.goes_on(ANSWERS, "LOCAL")
        await self._overtaken(disk)
        self._heal(disk)
        await self._cluster.launch(disk)

    async def _overtaken(self, disk: str) -> None:
        cluster, name, other = self._cluster, self._cluster.on(disk), self._cluster.standby()
        child = cluster.processes[name]
        child.signal(signal.SIGSTOP)
        await cluster.answers(other)
        await self._history.goes_on(ANSWERS, "REGIONAL", "GLOBAL")
        child.signal(signal.SIGCONT)
        await cluster.ended(name)
        assert child.returncode == 1, child.last_words()

    def _without_quorum(self, disk: str) -> None:
        links = self._cluster.links(disk)
        for link in self._draw.sample(links, len(links) // 2 + 1):
            self._draw.choice((link.cut, link.stall))()

    def _heal(self, disk: str) -> None:
        for link in self._cluster.links(disk):
            link.heal()

    async def writer_is_cut_off(self) -> None:
        """It has no quorum for a while, and goes on."""
        disk = self._cluster.writer()
        self._without_quorum(disk)
        await self._history.goes_on(ANSWERS, "LOCAL")
        self._heal(disk)

    async def other_node_is_killed(self) -> None:
        """Its own log is taken up by the next process on its disk."""
        await self._cluster.kill("b-1")
        await self._cluster.launch("b-1")

    async def standby_is_wiped(self) -> None:
        """It is a standby on an empty disk, and then writes there."""
        disk = self._cluster.standby()
        await self._cluster.wipe(disk)
        await self.writer_is_killed()

    # --- members ----------------------------------------------------------------------------------

    async def member_is_killed(self) -> None:
        """A minority is away."""
        member = self._member()
        await member.kill()
        await self._history.goes_on(ANSWERS, "REGIONAL", "GLOBAL")
        await member.start()

    async def member_hangs(self) -> None:
        """It keeps its connections, and says nothing."""
        member = self._member()
        member.signal(signal.SIGSTOP)
        await self._history.goes_on(ANSWERS, "REGIONAL", "GLOBAL")
        member.signal(signal.SIGCONT)

    async def member_disk_is_full(self) -> None:
        """No file of it may grow, for a limit stands for the full disk; it may end, and is started again then."""
        member = self._member()
        process = member.running
        _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, hard))
        await self._history.goes_on(ANSWERS, "REGIONAL", "GLOBAL")
        if process.poll() is None:
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (hard, hard))
        else:
            await member.start()

    async def member_is_wiped(self) -> None:
        """It comes back with an empty disk, as a new member."""
        member = self._member()
        await member.kill()
        await asyncio.to_thread(shutil.rmtree, member.folder)
        await self._history.goes_on(ANSWERS, "REGIONAL", "GLOBAL")
        await member.start()

    async def members_restart(self) -> None:
        """A rolling restart of all."""
        for member in self._cluster.members:
            await member.stop()
            await member.start()
            await self._cluster.settled()

    async def member_and_writer_are_killed(self) -> None:
        """Both at once."""
        member = self._member()
        await member.kill()
        await self.writer_is_killed()
        await member.start()

    async def all_are_killed(self) -> None:
        """Every safekeeper and every process of both nodes, as by a loss of power."""
        cluster = self._cluster
        disks = ["a-1", "a-2", "b-1"]
        for disk in disks:
            await cluster.kill(disk)
        for member in cluster.members:
            await member.kill()
        for member in cluster.members:
            await member.start()
        self._draw.shuffle(disks)
        for disk in disks:
            await cluster.launch(disk)

    # --- PostgreSQL -------------------------------------------------------------------------------

    async def postgres_hangs(self) -> None:
        """REGIONAL and LOCAL go on."""
        link = self._cluster.database.link
        link.stall()
        await self._history.goes_on(ANSWERS, "REGIONAL")
        link.heal()

    async def postgres_fails_over(self) -> None:
        """The synchronous standby takes over, once a run."""
        if not self._cluster.database.has_failed_over:
            await self._cluster.database.fail_over()


ALL = [name for name in vars(Faults) if not name.startswith("_") and name != "strike"]
