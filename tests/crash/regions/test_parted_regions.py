"""Three ledgers as processes, parted, killed and with clocks that jump: one state, and nothing answered is lost."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

import pytest

from app.dev.embedded import EmbeddedPostgres
from tests.conftest import Database
from tests.crash.conftest import launching
from tests.crash.regions.ledgers import REGIONS, databases_of
from tests.crash.regions.parted import REFUSALS, Entry, Life, Parted, life, parted_ledgers
from tests.crash.regions.steps import JUMPS_S, Jump, Kill, SetLinks, Start, Write, drawn_steps

ROUNDS = 2
"""Seeds in ``make test``; ``make torture`` lives more of them, or the one of ``SEED``."""
SEEDS = [int(os.environ["SEED"])] if os.environ.get("SEED") else range(int(os.environ.get("TORTURE_ROUNDS") or ROUNDS))
LINES_SHOWN = 20


@pytest.fixture(scope="module")
def databases(postgres: EmbeddedPostgres) -> Iterator[dict[str, Database]]:
    with databases_of(postgres, *REGIONS) as databases:
        yield databases


@pytest.fixture(scope="module")
async def shared(databases: dict[str, Database], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Parted]:
    """The ledgers, which live through one seed after the other."""
    async with launching() as launch, parted_ledgers(launch, databases, tmp_path_factory.mktemp("parted")) as parted:
        yield parted


@pytest.fixture
def parted(shared: Parted) -> Iterator[Parted]:
    """The ledgers; what each of them said last is shown of a seed that fails."""
    yield shared
    for region, process in shared.processes.items():
        print(f"--- {region} said last:", *process.lines[-LINES_SHOWN:], sep="\n")


@pytest.mark.torture
@pytest.mark.parametrize("seed", SEEDS)
async def test_three_ledgers_come_to_one_state_and_lose_nothing_that_was_answered(parted: Parted, seed: int) -> None:
    print(f"SEED={seed}")
    async with life(parted, f"seed-{seed}") as lived:
        await lived.live(drawn_steps(seed))
        entries = await lived.entries()
        print(lived.counts)
        await all_have_the_same(lived, entries)
        each_answered_write_is_there_once(lived, entries["use1"])
        for region in REGIONS:
            verdict = await lived.get(region, "/v1/chain/verify", tenant_id=lived.tenant_id)
            assert (verdict["valid"], verdict["verdicts"]["projection"]) == (True, "ok"), (region, verdict)


async def all_have_the_same(lived: Life, entries: Mapping[str, Sequence[Entry]]) -> None:
    """Entries with their origins, and jobs with their conflicts; a cancellation wins, wherever it was taken."""
    use1, eu1, ap1 = entries.values()
    assert use1 == eu1
    assert eu1 == ap1
    actions: dict[str, set[str]] = {}
    for entry in use1:
        actions.setdefault(entry.job_id, set()).add(entry.action)
    for job_id, of_job in actions.items():
        job, *others = [await lived.job(region, job_id) for region in REGIONS]
        for other in others:
            assert other.keys() == job.keys()
            assert {name: (job[name], other[name]) for name in job if job[name] != other[name]} == {}, job_id
        assert ("CANCEL" in of_job) == (job["status"] in ("CANCELLED", "CANCELLING")), (job, of_job)


def each_answered_write_is_there_once(lived: Life, entries: Sequence[Entry]) -> None:
    """Also one that was answered 503 and is durable in its ledger. None is there twice, and none that was refused."""
    by_number = Counter(entry.number for entry in entries)
    assert max(by_number.values()) == 1, by_number
    by_hlc = {entry.t_hlc: entry for entry in entries}
    for region, sent in lived.sent:
        [fact] = sent.facts
        if sent.is_promised:
            told = sent.answered.told
            assert told["hlc"] in by_hlc, f"{fact} {told['hlc']} was answered in {region} and is lost"
            entry = by_hlc[told["hlc"]]
            assert (entry.number, entry.job_id) == (fact.number, told["job_id"])
            assert entry.log == f"{region}.example/{lived.tenant_id}"
        elif sent.problem in REFUSALS:
            assert fact.number not in by_number, f"{fact} was refused in {region} and is there"


def test_the_steps_of_many_seeds_meet_what_the_ledgers_are_tested_for() -> None:
    """Each way breaks in both manners, each ledger dies and returns, clocks leap, a job is created in two regions, and
    one is cancelled before its creation."""
    met = Counter[object]()
    for seed in range(50):
        created: dict[str, str] = {}
        for step in drawn_steps(seed):
            match step:
                case SetLinks(ways, state):
                    met.update((way, state) for way in ways)
                case Write(region, "JobCreated", job):
                    met["created twice"] += created.setdefault(job, region) != region
                case Write(_, "JobCancellationRequested", job):
                    met["cancelled first"] += job not in created
                case Kill(region) | Start(region):
                    met[type(step), region] += 1
                case Jump(_, ahead_s):
                    met["leap", ahead_s] += 1
    every_way = {(asking, asked) for asking in REGIONS for asked in REGIONS if asking != asked}
    expected: set[object] = {(way, state) for way in every_way for state in ("cut", "stalled", "whole")}
    expected |= {(kind, region) for kind in (Kill, Start) for region in REGIONS}
    expected |= {("leap", ahead_s) for ahead_s in JUMPS_S}
    assert expected | {"created twice", "cancelled first"} <= {each for each, times in met.items() if times > 1}
