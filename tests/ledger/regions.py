"""Three ledgers in memory that write on their own and exchange: partitions, a disk that is lost, clocks that jump.

The edge of a ledger takes what the service's takes: a creation, a cancellation of any job, and every other event about
a job that the ledger knows and that has not ended there. Imports follow the rules of a merge (``ledger.bundle.merge``).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Final, NamedTuple

from ledger import canonical
from ledger.bundle.merge import Incoming, MergeKey, chained_as, decide, event_of
from ledger.chain import LINK_VERSION
from ledger.chain.conflict import Event, find_event
from ledger.facts.events import JOB_EVENTS
from ledger.facts.statuses import ENDED
from ledger.hlc import Clock, Hlc
from ledger.machines.jobs import JobFold, JobState, said_of_row, status

TENANT: Final = "acme"
REGIONS: Final = ("use1", "eu1", "ap1")
BEGIN_MS: Final = 1_795_000_000_000
MAJORITY: Final = 2
ROUNDS_MAX: Final = 10
"""Rounds of imports within which three ledgers are even."""
DCS: Final = ("a", "b")
FIELDS: Final[dict[str, dict[str, Any]]] = {
    "JobCreated": {"assigned_dcs": [*DCS]},
    "JobAccepted": {"worker_count": 1},
    "JobProgressReported": {"failed": 0},
    "JobCancellationRequested": {"reason": "r", "requestor": "q"},
    "JobCancellationAcked": {"workflows_cancelled": 0},
    "JobCompleted": {"final_status": "ok"},
    "JobFailed": {"error": "disk"},
    "JobTimedOut": {"timeout_type": "STUCK"},
    "WorkflowDispatched": {"workflow_id": "w"},
    "WorkflowCompleted": {"workflow_id": "w"},
}
NEEDS_NO_JOB: Final = frozenset(("JobCreated", "JobCancellationRequested"))


class Entry(NamedTuple):
    """An entry of a chain, and the ledger and seq by which a merge orders it."""

    hlc: Hlc
    job_id: str
    action: str
    payload: str
    born: tuple[str, int]

    @property
    def digest(self) -> str:
        """SHA-256 of the payload."""
        return sha256(self.payload.encode()).hexdigest()

    def incoming(self) -> Incoming:
        """The entry as a bundle brings it."""
        key = MergeKey(1, *self.hlc, *self.born, "")
        texts = (TENANT, self.hlc.text(), self.job_id, self.action, self.digest, self.payload)
        return Incoming(key, *texts, None, LINK_VERSION, 0, "", None)


@dataclass
class Region:
    """One ledger; ``name`` is of its region, ``log`` of this life of it."""

    name: str
    log: str
    clock: Clock
    chain: list[Entry] = field(default_factory=list)
    seen: dict[str, int] = field(default_factory=dict)
    """By log, how far its chain was imported."""
    existing: dict[str, Event] = field(default_factory=dict)
    folds: dict[str, JobFold] = field(default_factory=dict)

    def write(self, name: str, job_id: str, fence: int | None, wall_ms: int, **fields: Any) -> Entry | None:
        """Chain an event that a caller sends; None if the edge refuses it."""
        known = self.folds.get(job_id)
        if known is None and name not in NEEDS_NO_JOB:
            return None
        if known is not None and status(known.state()) in ENDED:
            return None
        fence = fence if fence is not None else 1 if known is None else known.state().fence
        payload = canonical.encode({"type": name, "fence_token": fence, **FIELDS[name], **fields}).decode()
        entry = Entry(self.clock.tick(wall_ms), job_id, JOB_EVENTS[name].action, payload, (self.log, len(self.chain)))
        if entry.hlc.text() in self.existing:
            return None
        self._append(entry)
        self.existing[entry.hlc.text()] = event_of(entry.incoming())
        return entry

    def take(self, other: Region, count: int) -> int:
        """Import at most ``count`` entries of another ledger; returns how many were new here."""
        begin = self.seen.get(other.log, 0)
        given = other.chain[begin : begin + count]
        self.seen[other.log] = begin + len(given)
        decided = decide(sorted(each.incoming() for each in given), {TENANT: self.existing})
        for each, kept_digest in decided.placed:
            hlc, action, payload = chained_as(each, kept_digest)
            self._append(Entry(hlc, each.job_id, action, payload.decode(), (each.key.log, each.key.seq)))
        return len(decided.placed)

    def holds(self, event: Event) -> bool:
        """Whether the event is in this chain, as itself or in a CONFLICT entry."""
        return find_event(event, self.existing)[0] is not None

    def _append(self, entry: Entry) -> None:
        self.chain.append(entry)
        row = (entry.job_id, len(self.chain), *entry.hlc, entry.action, entry.digest, entry.payload)
        if (said := said_of_row(*row)) is not None:
            self.folds.setdefault(entry.job_id, JobFold(entry.job_id)).add(*said, len(self.chain))

    def states(self) -> dict[str, JobState]:
        """By job, its state by this chain."""
        return {job_id: fold.state() for job_id, fold in self.folds.items()}

    def rows(self, job_id: str) -> Iterator[tuple[Any, ...]]:
        """The entries of a job, by ``FOLD_COLUMNS``."""
        for seq, each in enumerate(self.chain, 1):
            if each.job_id == job_id:
                yield (job_id, seq, *each.hlc, each.action, each.digest, each.payload)


@dataclass
class World:
    """Three ledgers, the links between them, and everything that was answered."""

    dice: random.Random
    regions: dict[str, Region] = field(default_factory=dict)
    cut: set[frozenset[str]] = field(default_factory=set)
    """Pairs of regions that do not reach each other."""
    down: set[str] = field(default_factory=set)
    waiting: list[Event] = field(default_factory=list)
    """Events that were taken, and that no majority of the ledgers has had yet."""
    answered: list[Event] = field(default_factory=list)
    """Events that a majority had at one time: answered at GLOBAL."""
    may_lose: bool = True
    """Whether every ledger has been even with the others since the last disk was lost."""
    wall_ms: int = BEGIN_MS
    lives: int = 0

    def __post_init__(self) -> None:
        for name in REGIONS:
            self.start_empty(name)

    def start_empty(self, name: str, node: str | None = None) -> None:
        """A ledger of this region that knows nothing yet; ``node`` is the id that its HLCs end with."""
        self.lives += 1
        self.regions[name] = Region(name, f"{name}.{self.lives}", Clock(node or f"{name}-{self.lives}", 5000))
        self.down.discard(name)

    def step(self) -> None:
        """One thing that happens."""
        dice = self.dice
        self.wall_ms += dice.choice((0, 0, 1, 3))
        what = dice.choices(("write", "take", "link", "power", "jump", "lose", "heal"), (24, 12, 4, 2, 2, 1, 1))[0]
        name = dice.choice(REGIONS)
        if what == "link":
            self.cut ^= {frozenset(dice.sample(REGIONS, 2))}
        elif what == "power":
            self.down ^= {name}
        elif what == "jump":
            self.regions[name].clock.tick(BEGIN_MS + dice.choice((1000, 2000)))
        elif what == "lose":
            self.lose(name)
        elif what == "heal":
            self.heal()
        elif what == "take":
            self.take(dice.choice((1, 2, 100)))
        elif name not in self.down:
            self.write(self.regions[name])
        self.answer()

    def write(self, region: Region) -> None:
        """An event of a caller of this region, about any job."""
        name, job_id, fence, fields = drawn_event(self.dice)
        if (written := region.write(name, job_id, fence, self.wall_ms, **fields)) is not None:
            self.waiting.append(event_of(written.incoming()))

    def take(self, count: int) -> None:
        """One ledger imports from another that it reaches."""
        to, of = self.dice.sample(REGIONS, 2)
        if not {to, of} & self.down and frozenset((to, of)) not in self.cut:
            self.regions[to].take(self.regions[of], count)

    def lose(self, name: str) -> None:
        """The region's disk is lost, and it returns as a new ledger, sometimes under its old node id: its clock is
        behind, and may issue an HLC again. No second disk is lost before all ledgers are even."""
        if self.may_lose:
            self.may_lose = False
            self.start_empty(name, self.dice.choice((None, self.regions[name].clock.node_id)))

    def answer(self) -> None:
        """Answer the events that a majority has now."""
        still = []
        for event in self.waiting:
            held = sum(each.holds(event) for each in self.regions.values())
            (self.answered if held >= MAJORITY else still).append(event)
        self.waiting = still

    def heal(self) -> None:
        """Every ledger runs, and imports until it has all that the others have."""
        self.down.clear()
        self.cut.clear()
        pairs = [(to, of) for to in self.regions.values() for of in self.regions.values() if to is not of]
        # What one import adds to a chain is for the other ledgers to import; what they hold already adds nothing.
        for _ in range(ROUNDS_MAX):
            if not sum(to.take(of, len(of.chain)) for to, of in pairs):
                self.may_lose = True
                return
        raise AssertionError("the ledgers keep importing from each other, though nothing is written")


def drawn_event(dice: random.Random) -> tuple[str, str, int | None, dict[str, Any]]:
    """Type, job, fence token and fields of an event about one of a few jobs, made in any region or by a caller."""
    name = dice.choice([*FIELDS, "JobCreated", "JobAccepted"])
    made = f"{dice.choice(REGIONS)}-{BEGIN_MS}-gate-{dice.randrange(3):05}"
    job_id = dice.choice((made, f"nightly-{dice.randrange(2)}"))
    fields: dict[str, Any] = {}
    if name == "JobCreated":
        fields["spec"] = {"n": dice.randrange(2)}
    elif name not in ("JobCancellationRequested", "JobCompleted", "JobFailed", "JobTimedOut"):
        fields["dc_id"] = dice.choice(DCS)
    if name == "JobProgressReported":
        fields["completed"] = dice.randrange(9)
    return name, job_id, dice.choice((None, None, 1, 2, 3)), fields


def lived(seed: int, steps: int) -> World:
    """Three ledgers after so many steps, not even with each other."""
    world = World(random.Random(seed))
    for _ in range(steps):
        world.step()
    return world
