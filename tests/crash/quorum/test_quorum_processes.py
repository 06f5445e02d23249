"""A replicated ledger under load, modes and faults: what its clients were told holds, whatever happened."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from app.dev.embedded import EmbeddedPostgres
from tests.app.chains import until
from tests.app.standby import Standby
from tests.crash.linearizability import violations
from tests.crash.operations import Recorder, load
from tests.crash.proof import Ledger, prove_chains
from tests.crash.quorum.checker import COMMITTED, Entry, judge
from tests.crash.quorum.clients import CONSISTENCIES, working
from tests.crash.quorum.cluster import Cluster, running_cluster
from tests.crash.quorum.faults import ALL, Faults
from tests.crash.quorum.history import History, Line, Read, Wrote
from tests.crash.quorum.modes import DISK, OTHER, change_modes

Pair = tuple[EmbeddedPostgres, Standby]
SHORT = ("member_disk_is_full", "writer_hangs_without_a_quorum", "postgres_fails_over")
"""The faults of a run of `make test`; `make torture` draws as many as it has rounds, with five members."""
ENOUGH = 5


async def entries(cluster: Cluster) -> dict[int, list[Entry]]:
    """By number, what the chain holds."""
    ledger = await Ledger.read(cluster.database.superuser_url)
    prove_chains(ledger)
    return {number: [Entry(row.t_hlc, row.job_id) for row in rows] for number, rows in ledger.by_number.items()}


async def drained(cluster: Cluster) -> None:
    """Let each disk of node-a write once more, so that what stands there alone is appended again and chained."""
    await cluster.settled()
    first, second = cluster.writer(), cluster.standby()
    await returned(cluster, first)
    await cluster.stop(first)
    await cluster.answers(second)
    await returned(cluster, second)
    for disk in (second, "b-1"):
        await cluster.stop(disk)


async def returned(cluster: Cluster, disk: str) -> None:
    """Nothing that lost is left in the WAL folder of a disk."""
    folder = cluster.folder / disk / "wal" / "node-a"
    await until(lambda: not list(folder.glob("cut-*")), f"what lost on {disk} is appended again")


async def run(folder: Path, pair: Pair, seed: int, members: int, faults: list[str], *, every_mode: bool) -> None:
    draw = random.Random(seed)
    history = History(folder / "history.jsonl")
    recorder = Recorder(folder / "operations.jsonl")
    print(f"faults {faults}, history {history.path}, operations {recorder.path}")
    async with running_cluster(folder, pair, history, members, (DISK, OTHER)) as cluster:
        async with working(cluster, draw, recorder):
            await history.goes_on(10, "GLOBAL")
            await change_modes(cluster, draw, every=every_mode)
            await cluster.begin_standby()
            for fault in faults:
                await Faults(cluster, draw).strike(fault)
        await drained(cluster)
        history.close()
        recorder.close()
        says_enough(history.lines)
        broken = judge(history.lines, await entries(cluster))
        about = {violation.number for violation in broken}
        told = [line for line in history.lines if not isinstance(line, Wrote | Read) or line.number in about]
        operations = load(recorder.path)
        print(Counter((each.op, each.output is not None) for each in operations))
        assert sum(each.op == "adjust" and each.output is not None for each in operations) >= ENOUGH
        assert not violations(operations), recorder.path
        assert not broken, "\n".join([*(violation.detail for violation in broken), *map(str, told)])


def says_enough(lines: list[Line]) -> None:
    """A history in which nothing was answered at some level, or read, would be sound whatever was lost."""
    seen = Counter(line.holds if isinstance(line, Wrote) else line.consistency for line in _answered(lines))
    print(seen, Counter(line.status for line in lines if isinstance(line, Wrote | Read)))
    assert all(seen[each] >= ENOUGH for each in (*COMMITTED, "LOCAL", *CONSISTENCIES)), seen


def _answered(lines: list[Line]) -> list[Wrote | Read]:
    return [line for line in lines if isinstance(line, Wrote | Read) and line.status in (200, 201)]


@pytest.mark.torture
@pytest.mark.timeout(0)
async def test_what_clients_were_told_holds_whatever_happens(
    open_folder: Path, pair: Pair, seed: int, torture_rounds: Callable[[int], int]
) -> None:
    draw = random.Random(seed)
    faults = [draw.choice(ALL) for _ in range(torture_rounds(0))]
    await run(open_folder, pair, seed, 5 if faults else 3, faults or list(SHORT), every_mode=bool(faults))
