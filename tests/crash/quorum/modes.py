"""One node goes from a quorum to all, to its log alone, and back, and loses its log, while clients write and read."""

from __future__ import annotations

import asyncio
import random
import shutil
from typing import Any

from tests.crash.quorum.cluster import Cluster
from tests.crash.quorum.history import Wiped, now_s

DISK, OTHER = "a-1", "b-1"
"""What runs while the mode becomes another: no process may stand by for one that writes to its own log alone."""
ANSWERS = 10
ALONE: dict[str, Any] = {"wal__ack_mode": "LOCAL_GROUP_SYNC", "replication__members": None}
OBSERVE = {"wal__ack_mode": "LOCAL_GROUP_SYNC"}
QUORUM = {"wal__ack_mode": "REPLICATED_QUORUM"}
ALL = {"wal__ack_mode": "REPLICATED_ALL"}


async def change_modes(cluster: Cluster, draw: random.Random, *, every: bool) -> None:
    """Down to its log alone, without that, and back up to a quorum; each mode once, or ``every`` step both ways."""
    for settings in (ALL, QUORUM, OBSERVE, ALONE) if every else (ALL, ALONE):
        await _become(cluster, draw, settings)
    await _lose_the_log(cluster)
    await _forget_the_copies(cluster)
    for settings in (OBSERVE, QUORUM, ALL, QUORUM) if every else (OBSERVE, QUORUM):
        await _become(cluster, draw, settings)


async def _become(cluster: Cluster, draw: random.Random, settings: dict[str, Any]) -> None:
    await draw.choice((cluster.kill, cluster.stop))(DISK)
    await cluster.launch(DISK, **settings)
    await _goes_on(cluster, is_followed=settings is not ALONE)


async def _goes_on(cluster: Cluster, *, is_followed: bool) -> None:
    await cluster.answers(DISK)
    if is_followed:
        await cluster.settled()
    await cluster.history.goes_on(ANSWERS, "REGIONAL", "GLOBAL")


async def _lose_the_log(cluster: Cluster) -> None:
    """It stands on one disk alone, since the copies of it end before: a start is refused until the loss is accepted."""
    await cluster.kill(DISK)
    await asyncio.to_thread(shutil.rmtree, cluster.folder / DISK / "wal" / "node-a")
    cluster.history.note(Wiped(at_s=now_s(), disk=DISK))
    refused = await cluster.launch(DISK, **ALONE)
    assert await refused.ended() == 1
    assert "--accept-lost-wal" in refused.last_words()
    await cluster.launch(DISK, "--accept-lost-wal", **ALONE)
    await _goes_on(cluster, is_followed=False)


async def _forget_the_copies(cluster: Cluster) -> None:
    """They are of the log that was given up: the one that was begun in its place is another."""
    for member in cluster.members:
        await member.stop()
        await asyncio.to_thread(shutil.rmtree, member.folder / "node-a")
        await member.start()
        await cluster.history.goes_on(ANSWERS, "GLOBAL")
