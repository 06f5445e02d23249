"""One node goes from its log alone to a quorum, to all, and back, and loses its log, while clients write and read."""

from __future__ import annotations

import asyncio
import random
import shutil
from pathlib import Path

import pytest

from app.dev.embedded import EmbeddedPostgres
from tests.app.standby import Standby
from tests.crash.linearizability import violations
from tests.crash.operations import Recorder, load
from tests.crash.quorum.checker import judge
from tests.crash.quorum.clients import working
from tests.crash.quorum.cluster import Cluster, running_cluster
from tests.crash.quorum.history import History, Wiped, now_s
from tests.crash.quorum.test_quorum_processes import entries, returned, says_enough

DISK, OTHER = "a-1", "b-1"
ANSWERS = 10
ALONE = {"wal__ack_mode": "LOCAL_GROUP_SYNC", "replication__members": None}
OBSERVE = {"wal__ack_mode": "LOCAL_GROUP_SYNC"}
QUORUM = {"wal__ack_mode": "REPLICATED_QUORUM"}
ALL = {"wal__ack_mode": "REPLICATED_ALL"}


async def goes_on(cluster: Cluster, *, is_followed: bool) -> None:
    await cluster.answers(DISK)
    if is_followed:
        await cluster.settled()
    await cluster.history.goes_on(ANSWERS, "REGIONAL", "GLOBAL")


@pytest.mark.torture
@pytest.mark.timeout(0)
async def test_what_clients_were_told_holds_whatever_the_mode_becomes(
    open_folder: Path, pair: tuple[EmbeddedPostgres, Standby], seed: int
) -> None:
    draw = random.Random(seed)
    history, recorder = History(open_folder / "history.jsonl"), Recorder(open_folder / "operations.jsonl")
    async with running_cluster(open_folder, pair, history, 3, (DISK, OTHER)) as cluster:
        async with working(cluster, draw, recorder):
            await history.goes_on(ANSWERS, "GLOBAL")
            for settings in (ALL, QUORUM, OBSERVE, ALONE):
                await draw.choice((cluster.kill, cluster.stop))(DISK)
                await cluster.launch(DISK, **settings)
                await goes_on(cluster, is_followed=settings is not ALONE)
            await lose_the_log(cluster)
            await forget_the_copies(cluster)
            for settings in (OBSERVE, QUORUM, ALL):
                await draw.choice((cluster.kill, cluster.stop))(DISK)
                await cluster.launch(DISK, **settings)
                await goes_on(cluster, is_followed=True)
        for disk in (DISK, OTHER):
            await returned(cluster, disk)
            await cluster.stop(disk)
        history.close()
        recorder.close()
        assert not violations(load(recorder.path)), recorder.path
        says_enough(history.lines)
        broken = judge(history.lines, await entries(cluster))
        assert not broken, "\n".join(violation.detail for violation in broken)


async def lose_the_log(cluster: Cluster) -> None:
    """It stands on one disk alone, since the copies of it end before: a start is refused until the loss is accepted."""
    await cluster.kill(DISK)
    await asyncio.to_thread(shutil.rmtree, cluster.folder / DISK / "wal" / "node-a")
    cluster.history.note(Wiped(at_s=now_s(), disk=DISK))
    refused = await cluster.launch(DISK, **ALONE)
    assert await refused.ended() == 1
    assert "--accept-lost-wal" in refused.last_words()
    await cluster.launch(DISK, "--accept-lost-wal", **ALONE)
    await goes_on(cluster, is_followed=False)


async def forget_the_copies(cluster: Cluster) -> None:
    """They are of the log that was given up: the one that was begun in its place is another."""
    for member in cluster.members:
        await member.stop()
        await asyncio.to_thread(shutil.rmtree, member.folder / "node-a")
        await member.start()
        await cluster.history.goes_on(ANSWERS, "GLOBAL")
