"""No answer claims more than the files of the safekeepers and the chains of the peers show, whoever dies and returns.

Each machine drives real nodes in one event loop, which runs while a rule does; safekeepers have threads of their own.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
import uvloop
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from app.dev.embedded import EmbeddedPostgres
from app.edge.accepted import Services
from app.edge.listener import listening
from app.edge.writes import ProposalWrites, Route
from app.node.service import Service
from app.node.wiring import running
from app.runtime.settings.config import Settings, load_settings
from app.write.pending.requests import EventLines, RequestKey
from ledger.errors import DurabilityTimeoutError, NotFoundError, StartRefusedError
from ledger.facts.events import Durability
from tests.app.chains import until
from tests.app.drafts import created
from tests.app.test_exchange import both_of
from tests.app.test_replication import NODE, Keepers
from tests.conftest import EXAMPLES, EXAMPLES_USUAL, Database, connected_to, fresh_database
from wal.inspect import dump

STEPS = 14 if EXAMPLES > EXAMPLES_USUAL else 9
HOME, REMOTE = (0, 1, 2), (3, 4)
"""Safekeepers of the node's own region, and one in each of two others."""
LEVELS = (Durability.LOCAL, Durability.REGIONAL, Durability.GLOBAL)
KINDS = ("job", "lines", "proposal")

Value = TypeVar("Value")


class Claim(NamedTuple):
    """What an answer says: the event at this HLC has reached this level. ``body`` is what a repetition must equal."""

    level: Durability
    hlc: str | None
    body: object | None


class Request(NamedTuple):
    """A keyed request; the same again is a repetition."""

    kind: str
    level: Durability
    number: int

    @property
    def key(self) -> RequestKey:
        route = {"job": Route.JOBS, "lines": Route.EVENTS, "proposal": Route.COMMITMENTS}[self.kind]
        name = f"{self.kind}-{self.level.name}-{self.number}"
        return RequestKey(int(route), name, hashlib.sha256(name.encode()).digest())

    async def answered(self, service: Service, services: Services) -> Claim:
        """Send it, once or again."""
        draft = created("acme", self.number, durability=self.level)
        try:
            if self.kind == "job":
                receipt = await service.submitter.submit(draft, key=self.key)
                return Claim(receipt.achieved, receipt.hlc, receipt._replace(replayed=False))
            if self.kind == "lines":
                lines = EventLines.of([draft, draft])
                batch = await service.submitter.submit_lines(lines, durability=self.level, key=self.key)
                return Claim(batch.achieved, batch.last_hlc, batch._replace(replayed=False))
            lease = {"kind": "Lease", "resource": f"r-{self.number}", "holder": "h"}
            recorded = await services[ProposalWrites].proposals.propose(
                {"tenant_id": "acme", "commitment": lease}, None, self.key
            )
            return Claim(Durability.GLOBAL, recorded.hlc, recorded._replace(replayed=False))
        except DurabilityTimeoutError as late:
            return Claim(late.achieved or Durability.NONE, late.hlc, None)


REQUESTS = st.builds(Request, st.sampled_from(KINDS), st.sampled_from(LEVELS), st.integers(0, 1)).map(
    lambda request: request._replace(level=Durability.GLOBAL) if request.kind == "proposal" else request
)


class Claims(RuleBasedStateMachine):
    """One node that writes, and what was answered."""

    def __init__(self, postgres: EmbeddedPostgres) -> None:
        super().__init__()
        self.postgres = postgres
        self.held = ExitStack()
        self.folder = Path(self.held.enter_context(tempfile.TemporaryDirectory(prefix="claims-")))
        self.runner = self.held.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        self.answers: dict[Request, object] = {}
        """Bodies of the first answers that reached their level."""
        self.sent: set[Request] = set()
        self.node = AsyncExitStack()

    @abstractmethod
    async def start_node(self) -> None:
        """Start the node whose answers are checked."""

    @abstractmethod
    async def heal(self) -> None:
        """Bring back what is away."""

    @abstractmethod
    async def check_elsewhere(self, claim: Claim, hlc: str) -> None:
        """Whether others hold what is claimed above LOCAL."""

    def run(self, work: Coroutine[Any, Any, Value]) -> Value:
        return self.runner.run(work)

    def settings(self, folder: str, **given: Any) -> Settings:
        defaults = {"port": 0, "shutdown_grace": "2s", "verify": {"on_start": False}}
        return load_settings(**{**defaults, "data_dir": self.folder / folder, **given})

    async def stop_node(self) -> None:
        await self.node.aclose()
        self.node = AsyncExitStack()

    async def send(self, request: Request) -> bool:
        """Send it, once or again; whether it was answered with its level."""
        self.sent.add(request)
        claim = await request.answered(self.service, self.services)
        assert claim.body is None or claim.level >= request.level
        if claim.hlc is not None:
            await self.check(claim, claim.hlc)
        if claim.body is not None:
            assert self.answers.setdefault(request, claim.body) == claim.body, "a repeated answer is the first one"
        return claim.body is not None

    async def check(self, claim: Claim, hlc: str) -> None:
        is_chained = await has_chained(self.database, hlc)
        if claim.level >= Durability.LOCAL:
            assert is_chained or hlc in hlcs_in(self.folder / "disk" / "wal" / NODE), claim
        assert is_chained or claim.level < Durability.GLOBAL, claim
        if claim.level >= Durability.REGIONAL:
            await self.check_elsewhere(claim, hlc)

    @rule(request=REQUESTS)
    def write(self, request: Request) -> None:
        self.run(self.send(request))

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        self.run(self.send(data.draw(st.sampled_from(sorted(self.sent)))))

    def teardown(self) -> None:
        with self.held:
            self.run(self._end())

    async def _end(self) -> None:
        """All that was asked for reaches its level once everything is there."""
        try:
            await self.heal()
            await self.be_patient()
            for request in sorted(self.sent):
                await until(lambda request=request: self.send(request), f"{request} reaches its level")
        finally:
            await self.stop()

    async def be_patient(self) -> None:
        """Wait for a level for longer than a busy machine takes, where writes gave up soon."""

    async def stop(self) -> None:
        await self.stop_node()


class ClaimsOfMembers(Claims):
    """A node with safekeepers in three regions: three at home, one in each of the others."""

    timeout = "400ms"
    """Of a write: short while members are away, long once all are there and each write must reach its level."""

    def __init__(self, postgres: EmbeddedPostgres) -> None:
        super().__init__(postgres)
        self.database = self.held.enter_context(fresh_database(postgres))
        self.keepers = Keepers(self.folder, 5, {3: "eu1", 4: "ap1"})
        self.held.callback(lambda: self.keepers.stop(*self.keepers.running))
        self.run(self.start_node())

    async def start_node(self) -> None:
        settings = self.settings(
            "disk",
            node_id=NODE,
            wal={"ack_mode": "REPLICATED_QUORUM"},
            replication={"members": self.keepers.addresses, "timeout": "1s"},
            lease={"ttl": "60s"},
            write={"timeout": self.timeout},
        )
        self.service, self.services = await self.node.enter_async_context(running(settings, self.database.service_url))

    async def heal(self) -> None:
        self.keepers.start(*({*HOME, *REMOTE} - self.keepers.running.keys()))

    async def be_patient(self) -> None:
        self.timeout = "20s"
        await self.stop_node()
        await self.start_node()

    async def check_elsewhere(self, claim: Claim, hlc: str) -> None:
        holds = {number: hlc in hlcs_in(self.folder / f"keeper-{number}" / NODE) for number in (*HOME, *REMOTE)}
        at_home = sum(holds[number] for number in HOME) >= 2
        assert at_home, (claim, holds)
        if claim.level is Durability.GLOBAL:
            assert at_home + sum(holds[number] for number in REMOTE) >= 2, (claim, holds)

    @precondition(lambda self: self.keepers.running)
    @rule(data=st.data())
    def a_member_dies(self, data: st.DataObject) -> None:
        self.keepers.stop(data.draw(st.sampled_from(sorted(self.keepers.running))))

    @precondition(lambda self: len(self.keepers.running) < 5)
    @rule(data=st.data(), is_wiped=st.booleans())
    def a_member_returns(self, data: st.DataObject, is_wiped: bool) -> None:
        """One of the home region at most loses its disk: with more, what only they held is lost."""
        number = data.draw(st.sampled_from(sorted({*HOME, *REMOTE} - self.keepers.running.keys())))
        if is_wiped and number in (HOME[0], *REMOTE):
            shutil.rmtree(self.folder / f"keeper-{number}")
        self.keepers.start(number)

    @rule()
    def the_other_regions_die(self) -> None:
        self.keepers.stop(*(set(REMOTE) & self.keepers.running.keys()))

    @rule()
    def the_node_restarts(self) -> None:
        async def restart() -> None:
            await self.stop_node()
            try:
                await self.start_node()
            except StartRefusedError:
                await self.heal()
                await self.start_node()

        self.run(restart())


class ClaimsOfPeers(Claims):
    """A ledger whose GLOBAL asks that its one peer has imported the entry."""

    def __init__(self, postgres: EmbeddedPostgres) -> None:
        super().__init__(postgres)
        trusted = self.folder / "trusted"
        self.ledgers = self.held.enter_context(contextmanager(both_of)(postgres, trusted, self.settings))
        self.database = self.ledgers[0].database
        self.trusted, self.peer = trusted, AsyncExitStack()
        self.is_peer_there = False
        self.run(self.start_node())
        self.run(self.start_peer())

    async def start_node(self) -> None:
        here, there = self.ledgers
        settings = self.settings(
            here.region,
            region=here.region,
            port=here.port,
            write={"timeout": "1500ms"},
            **here.peers(there, self.trusted, is_global=True),
        )
        self.service, self.services = await self.node.enter_async_context(running(settings, self.database.service_url))
        await self.node.enter_async_context(listening(self.services))

    async def start_peer(self) -> None:
        here, there = self.ledgers
        await self.peer.enter_async_context(there.running(**there.peers(here, self.trusted)))
        self.is_peer_there = True

    async def stop_peer(self) -> None:
        await self.peer.aclose()
        self.peer, self.is_peer_there = AsyncExitStack(), False

    async def stop(self) -> None:
        await self.stop_node()
        await self.stop_peer()

    async def heal(self) -> None:
        if not self.is_peer_there:
            await self.start_peer()

    async def check(self, claim: Claim, hlc: str) -> None:
        is_chained = await has_chained(self.database, hlc)
        assert is_chained or claim.level < Durability.REGIONAL, claim
        if claim.level is Durability.GLOBAL:
            assert await has_chained(self.ledgers[1].database, hlc), claim

    @precondition(lambda self: self.is_peer_there)
    @rule()
    def the_peer_dies(self) -> None:
        self.run(self.stop_peer())

    @precondition(lambda self: not self.is_peer_there)
    @rule(is_emptied=st.booleans())
    def the_peer_returns(self, is_emptied: bool) -> None:
        """Perhaps as a ledger that has nothing, under the same key."""
        there = self.ledgers[1]
        if is_emptied:
            there.database = self.held.enter_context(fresh_database(self.postgres))
            shutil.rmtree(self.folder / there.region / "wal")
        self.run(self.start_peer())

    @rule()
    def the_node_restarts(self) -> None:
        async def restart() -> None:
            await self.stop_node()
            await self.start_node()

        self.run(restart())


def hlcs_in(folder: Path) -> set[str]:
    """The HLCs of all records in the files of one log, none where it has none."""
    with suppress(NotFoundError):
        return {item["hlc"] for item in dump(folder) if item["action"] != "BATCH"}
    return set()


async def has_chained(database: Database, hlc: str) -> bool:
    async with connected_to(database.superuser_url) as superuser:
        return bool(await superuser.fetchval("SELECT count(*) FROM scheduler.scheduler_log WHERE t_hlc = $1", hlc))


@pytest.mark.exhaustive
@pytest.mark.parametrize("machine", [ClaimsOfMembers, ClaimsOfPeers])
def test_no_answer_claims_more_than_is_held(
    machine: Callable[[EmbeddedPostgres], Claims], postgres: EmbeddedPostgres
) -> None:
    """An example starts nodes, so that it takes seconds."""
    drawn = settings(
        max_examples=max(1, EXAMPLES // 50),
        stateful_step_count=STEPS,
        phases=[Phase.explicit, Phase.reuse, Phase.generate],
    )
    run_state_machine_as_test(lambda: machine(postgres), settings=drawn)
