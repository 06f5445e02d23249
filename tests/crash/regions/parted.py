"""Three ledgers as processes that ask each other over links of the test, and the life of a tenant on them.

A life is the steps of a seed, then a repair of everything, until each ledger has all that the others have. The same
ledgers run for the next tenant.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import aiohttp
import asyncpg

from tests.app.chains import until
from tests.conftest import Database
from tests.crash.conftest import Launch
from tests.crash.load import Fact, Sent, http_session, number_of
from tests.crash.quorum.links import Link
from tests.crash.regions.ledgers import REGIONS, Ledgers
from tests.crash.regions.steps import LEVELS, Jump, Kill, SetLinks, Start, Step, Wait, Way, Write
from tests.crash.skewed_clock import set_clock

PROGRAM = Path(__file__).parents[1] / "skewed_clock.py"
SETTINGS: Final = {
    "write__timeout": "1500ms",
    "exchange__interval": "500ms",
    "chain__checkpoint_interval": "100ms",
    "hlc__persistence_interval": "100ms",
    "exchange__range_entries": 5,
    "verify__on_start": "false",
}
"""GLOBAL is given up soon, and a few entries are several ranges."""
MAJORITY: Final = 2
EXCHANGED_WITHIN_S: Final = 60.0
"""The pause after which a ledger asks a peer again is as long as the peer was away, at most."""
REFUSALS: Final = frozenset(("job-not-found", "job-ended", "job-exists"))
PASSING: Final = frozenset(("durability-timeout", "not-ready"))
PLACES: Final = frozenset(("seq", "last_seq", "log", "consistency"))
"""Members of an answer about a job that are of one chain, or of one request."""
LAST_NUMBER: Final = 1000
"""Number of the first write after the steps."""


class Entry(NamedTuple):
    """One entry of a chain, and the log, seq and link of where it was first chained."""

    t_hlc: str
    job_id: str
    action: str
    payload_digest: str
    number: int
    log: str
    seq: int
    chain_link: str


class Parted(Ledgers):
    """The ledgers, the links over which each asks each other one, and their wall clocks."""

    def __init__(self, launch: Launch, databases: Mapping[str, Database], folder: Path) -> None:
        super().__init__(launch, databases, folder)
        self.links = {
            (asking, asked): Link(self.ports[asked]) for asking in REGIONS for asked in REGIONS if asking != asked
        }
        self.stores: dict[str, asyncpg.Pool[asyncpg.Record]] = {}

    def peer_url(self, asking: str, asked: str) -> str:
        return f"http://127.0.0.1:{self.links[asking, asked].port}"

    def set_clock(self, region: str, ahead_s: float) -> None:
        set_clock(self.folder / f"{region}.clock", ahead_s=ahead_s)

    async def power_on(self, region: str, ahead_s: float = 0.0) -> None:
        """Start a ledger whose wall clock is so far ahead."""
        self.set_clock(region, ahead_s)
        program = (PROGRAM, self.folder / f"{region}.clock")
        await self.start(region, program=program, log__origin=f"{region}.example", **SETTINGS)

    def set_links(self, ways: Sequence[Way], state: str) -> None:
        for way in ways:
            match state:
                case "cut":
                    self.links[way].cut()
                case "stalled":
                    self.links[way].stall()
                case _:
                    self.links[way].heal()

    async def make_whole(self) -> None:
        """Every ledger runs with the right time, and reaches the others."""
        self.set_links([*self.links], "whole")
        for region in REGIONS:
            self.set_clock(region, 0.0)
        down = [region for region, process in self.processes.items() if process.returncode is not None]
        await asyncio.gather(*map(self.power_on, down))

    async def entries(self, region: str, tenant_id: str) -> list[Entry]:
        """The entries of a tenant's chain, in order, from the database: its ledger may be down."""
        rows = await self.stores[region].fetch(
            "SELECT t_hlc, job_id, action, payload_digest, payload, origin, seq, chain_link"
            "  FROM scheduler.scheduler_log WHERE tenant_id = $1 ORDER BY seq",
            tenant_id,
        )
        found = []
        for t_hlc, job_id, action, digest, payload, origin, seq, chain_link in rows:
            born = {"log": f"{region}.example/{tenant_id}", "seq": seq, "chain_link": chain_link}
            born |= json.loads(origin or "{}")
            place = born["log"], born["seq"], born["chain_link"]
            found.append(Entry(t_hlc, job_id, action, digest, number_of(json.loads(payload)), *place))
        return found

    async def is_stored(self, region: str, tenant_id: str, t_hlc: str) -> bool:
        statement = "SELECT EXISTS (SELECT FROM scheduler.scheduler_log WHERE tenant_id = $1 AND t_hlc = $2)"
        return bool(await self.stores[region].fetchval(statement, tenant_id, t_hlc))


@asynccontextmanager
async def parted_ledgers(launch: Launch, databases: Mapping[str, Database], folder: Path) -> AsyncIterator[Parted]:
    """The three, running."""
    parted = Parted(launch, databases, folder)
    async with AsyncExitStack() as stack:
        for link in parted.links.values():
            stack.push_async_callback(link.close)
            await link.open()
        for region in REGIONS:
            pool = asyncpg.create_pool(databases[region].superuser_url, min_size=1)
            parted.stores[region] = await stack.enter_async_context(pool)
        await asyncio.gather(*map(parted.power_on, REGIONS))
        yield parted


class Life:
    """What happens to one tenant on the ledgers, and what was answered."""

    def __init__(self, parted: Parted, tenant_id: str, session: aiohttp.ClientSession) -> None:
        self.tenant_id = tenant_id
        self.sent: list[tuple[str, Sent]] = []
        """Region and request of each write."""
        self.counts: Counter[str] = Counter()
        self._parted, self._session = parted, session
        self._made: dict[str, str] = {}
        """By ``made-N``, the id that was made."""
        self._homes: dict[str, str | None] = {}
        self.writing: list[asyncio.Task[None]] = []
        """Writes at GLOBAL, each of which waits while other things happen."""

    async def live(self, steps: Sequence[Step]) -> None:
        """Take all steps, then make the ledgers whole and even. Prints each step before it is taken.

        Raises:
            AssertionError: an answer is not one that a client of such a ledger may get, or the ledgers do not become
                even in time.
        """
        for number, step in enumerate(steps, 1):
            print(number, step)
            await self._take(number, step)
        await self._parted.make_whole()
        await asyncio.gather(*self.writing)
        lost = [(region, sent) for region, sent in self.sent if sent.key is not None and not sent.is_acknowledged]
        await asyncio.gather(*(self._repeat(region, sent) for region, sent in lost))
        await self._chain_all()
        await self._exchange(*((to, of) for to in REGIONS for of in REGIONS if to != of))

    async def _take(self, number: int, step: Step) -> None:
        match step:
            case Write():
                await self._write(number, step)
            case Wait(to, of):
                await self._exchange((to, of))
            case SetLinks(ways, state):
                self._parted.set_links(ways, state)
            case Kill(region):
                await self._parted.processes[region].kill()
            case Start(region, ahead_s):
                await self._parted.power_on(region, ahead_s)
            case Jump(region, ahead_s):
                self._parted.set_clock(region, ahead_s)

    # --- writes -----------------------------------------------------------------------------------

    async def _write(self, number: int, step: Write) -> None:
        made = step.job.startswith("made-")
        job_id = self._made.get(step.job) if made else step.job
        if job_id is None and step.type != "JobCreated":
            return  # the answer that names the job has not come
        fact = Fact(number, self.tenant_id, job_id, step.type, step.fields)
        request = Sent.created if step.type == "JobCreated" else Sent.event
        sent = request(fact, step.level, f"key-{self.tenant_id}-{number}" if step.is_keyed else None)
        self.sent.append((step.region, sent))
        if step.level == "GLOBAL":
            self.writing.append(asyncio.create_task(self._send(step.region, sent)))
        else:
            await self._send(step.region, sent)

    async def _send(self, region: str, sent: Sent) -> None:
        """Send a write, and judge its answer if one comes."""
        [fact] = sent.facts
        try:
            sent.answer = await sent.send(self._session, self._parted.url(region))
        except aiohttp.ClientError as error:
            print(f"  {fact.number}: no answer, {error!r}")
            self.counts["lost"] += 1
            return
        print(f"  {fact.number}: {sent.answered.status} {sent.problem or sent.answered.told['hlc']}")
        self.counts[sent.problem or json.loads(sent.body)["durability"]] += 1
        if sent.is_acknowledged:
            await self._check_acknowledged(sent)
        else:
            assert sent.problem in REFUSALS | PASSING, f"{sent.path} {sent.body!r} was answered {sent.answer}"

    async def _check_acknowledged(self, sent: Sent) -> None:
        """What an answer says of a level is so at that moment; the home of a job is the same in every answer."""
        [fact], told, level = sent.facts, sent.answered.told, json.loads(sent.body)["durability"]
        assert [*LEVELS].index(told["durability"]["achieved"]) >= [*LEVELS].index(level), told
        if level == "GLOBAL":
            stored = [each for each in REGIONS if await self._parted.is_stored(each, self.tenant_id, told["hlc"])]
            assert len(stored) >= MAJORITY, f"{fact} {told['hlc']} was answered at GLOBAL and only {stored} had it"
        if fact.job_id is None:
            self._made[f"made-{fact.number}"] = told["job_id"]
        home = told["home_region"]
        assert self._homes.setdefault(told["job_id"], home) == home, f"{told['job_id']} has two homes"

    async def _repeat(self, region: str, sent: Sent) -> None:
        """Send a write again until it is acknowledged, or refused."""

        async def is_decided() -> bool:
            await self._send(region, sent)
            return sent.is_acknowledged or sent.problem in REFUSALS

        await until(is_decided, f"{sent.path} {sent.body!r} is decided in {region}", EXCHANGED_WITHIN_S)

    async def _chain_all(self) -> None:
        """An answer at GLOBAL says that all before it in the log of the ledger is chained as well."""
        for number, region in enumerate(REGIONS, LAST_NUMBER):
            fact = Fact(number, self.tenant_id, f"last-{region}", "JobCreated", {"spec": {"n": number}})
            self.sent.append((region, Sent.created(fact, "GLOBAL", f"key-{self.tenant_id}-{number}")))
        await asyncio.gather(*(self._repeat(region, sent) for region, sent in self.sent[-len(REGIONS) :]))

    # --- exchange ---------------------------------------------------------------------------------

    async def _exchange(self, *ways: Way) -> None:
        """Wait until the first ledger of each way has all that the second had."""
        wanted = {way: {each.t_hlc for each in await self._entries(way[1])} for way in ways}

        async def lacking() -> dict[Way, set[str]]:
            have = {to: {each.t_hlc for each in await self._entries(to)} for to, _ in ways}
            return {way: hlcs - have[way[0]] for way, hlcs in wanted.items() if hlcs - have[way[0]]}

        async def is_exchanged() -> bool:
            return not await lacking()

        try:
            await until(is_exchanged, "ledgers have what they reach", EXCHANGED_WITHIN_S)
        except AssertionError as error:
            faults = {to: (await self.get(to, "/v1/exchange"))["peers"] for to, _ in ways}
            raise AssertionError(f"{error}: (to, of) lacks {await lacking()}; {faults}") from None

    async def _entries(self, region: str) -> list[Entry]:
        return await self._parted.entries(region, self.tenant_id)

    # --- what the ledgers show --------------------------------------------------------------------

    async def entries(self) -> dict[str, list[Entry]]:
        """By region, the entries of its chain, sorted by HLC."""
        return {region: sorted(await self._entries(region)) for region in REGIONS}

    async def get(self, region: str, path: str, **params: str | int) -> dict[str, Any]:
        async with self._session.get(self._parted.url(region) + path, params=params) as answer:
            assert answer.status == 200, (region, path, params, await answer.text())
            found: dict[str, Any] = await answer.json()
            return found

    async def job(self, region: str, job_id: str) -> dict[str, Any]:
        """A job as a ledger shows it, without places in its chain."""
        about = {"tenant_id": self.tenant_id, "consistency": "strong"}
        found: dict[str, Any] = without_places(await self.get(region, f"/v1/jobs/{job_id}", **about))
        return found


@asynccontextmanager
async def life(parted: Parted, tenant_id: str) -> AsyncIterator[Life]:
    """The life of a tenant that no ledger knows; the ledgers are whole when it begins."""
    async with http_session() as session:
        await parted.make_whole()
        lived = Life(parted, tenant_id, session)
        try:
            yield lived
        finally:
            for each in lived.writing:
                each.cancel()


def without_places(shown: Any) -> Any:
    """What every ledger shows: without seqs, without the names of logs, and without how it was read."""
    if isinstance(shown, dict):
        return {name: without_places(each) for name, each in shown.items() if name not in PLACES}
    return [*map(without_places, shown)] if isinstance(shown, list) else shown
