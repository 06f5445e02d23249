"""Pushes checkpoints to the witnesses of ``log.policy`` (c2sp.org/tlog-witness) and stores their cosignatures.

For each witness that has an address, a task of its own repeats::

    1. take the tenant that waits longest, of those whose newest checkpoint this witness has not cosigned
    2. read that checkpoint, and prove from the stored tree that it extends the tree that the witness has seen
    3. POST URL/add-checkpoint:  "old" and that size, the hashes of the proof, an empty line, the checkpoint
    4. store the cosignature of the answer

Only the newest checkpoint is pushed; earlier ones are skipped. Meaning of the answer::

    200               a cosignature by this witness on this text, of about now: it is stored
    409 and a size    the witness has seen the tree of that size: it is proved from there, and pushed again. A size
                      above that of the log is a dispute
    422               a dispute: the witness has seen other entries of this log. ``/readyz`` names its tenant
    429               nothing is pushed before ``Retry-After``
    other 400 to 499  this log is refused: it is pushed again after a pause that doubles
    anything else     the witness fails, also by a cosignature that is invalid: all its logs wait for a pause that
                      doubles, then one is pushed at a time until it answers

Bounds, for each witness::

    pushes under way <= PUSHES_AT_ONCE_MAX        pushes started in a second <= PUSHES_PER_SECOND_MAX
    pushes of one tenant started in PUSH_INTERVAL_S <= 1, repeats after 409 <= CONFLICTS_MAX

Nothing waits for a witness. Each node pushes the checkpoints that it signed, and every ``SWEEP_INTERVAL_S`` those that
another node left.
"""

from __future__ import annotations

import asyncio
import base64
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from heapq import heappop, heappush
from typing import Final, NamedTuple

import httpx

from app.runtime.logs import log
from app.runtime.metrics import Metrics
from app.runtime.outgoing import NoAnswerError, Reply, client_of, read_reply, retry_after_s
from app.runtime.postgres import DATABASE_FAULTS
from app.runtime.tasks import is_set_within, repeat
from app.store import anchors
from app.store import notary as store
from app.store.reading import Pool, reading
from app.write.followers.anchors import insert
from ledger import merkle
from ledger.errors import (
    ChainDamagedError,
    DatabaseUnavailableError,
    LedgerError,
    ProofError,
    SignatureError,
    reported_as,
)
from ledger.merkle import tiles
from ledger.names import is_readable_tenant
from ledger.text import first_of, printable
from ledger.verification.verdict import damaged
from signing import checkpoint as checkpoints
from signing import note as notes
from signing.note import Cosignature, Note, cosignatures_of
from signing.policy import Policy, PolicyWitness

REQUEST_TIMEOUT_S: Final = 10.0
ANSWER_BYTES_MAX: Final = 16 * 1024
PUSHES_AT_ONCE_MAX: Final = 8
PUSHES_PER_SECOND_MAX: Final = 50
"""Bounds the processor time that pushes take from requests: one takes some milliseconds."""
PUSH_INTERVAL_S: Final = 1.0
CONFLICTS_MAX: Final = 2
CONNECTIONS_MAX: Final = 2
"""Connections that all pushes use at once; requests need the others."""
SWEEP_INTERVAL_S: Final = 30.0
SWEEP_TENANTS: Final = 1000
"""Tenants read by one statement of a sweep."""
FAULT_PAUSE_FIRST_S, FAULT_PAUSE_MAX_S = 1.0, 60.0
REFUSED_PAUSE_FIRST_S, REFUSED_PAUSE_MAX_S = 30.0, 3600.0
RETRY_AFTER_DEFAULT_S, RETRY_AFTER_MAX_S = 1.0, 3600.0
BEHIND_MAX: Final = timedelta(seconds=60)
"""A cosignature that is older than its request by more is none of now: its witness signed it for another."""
REASON_CHARACTERS_MAX: Final = 200
NAMED_MAX: Final = 10
"""Tenants that ``/readyz`` names."""
_SIZE = re.compile(rb"(0|[1-9][0-9]{0,18})\n?")


class RefusedError(LedgerError):
    """A witness does not cosign this log; others it may."""


class DisputedError(RefusedError):
    """A witness has seen more entries of a log than there are, or others."""


class BusyError(LedgerError):
    """A witness asks to be left alone for ``pause_s`` seconds."""

    def __init__(self, pause_s: float) -> None:
        super().__init__(f"it asks to wait for {pause_s:g} s")
        self.pause_s = pause_s


class _Push(NamedTuple):
    """A checkpoint, and the proof that it extends the tree of ``old_size``."""

    note: Note
    size: int
    old_size: int
    proof: list[bytes]

    def body(self) -> bytes:
        lines = [f"old {self.old_size}", *(base64.b64encode(each).decode() for each in self.proof)]
        return ("\n".join(lines) + "\n\n" + self.note.encode()).encode()


@dataclass(eq=False)
class WitnessLine:
    """The tenants that wait for one witness, and the state of that witness. Belongs to one event loop."""

    witness: PolicyWitness
    fault: str | None = None
    """Why the last push failed, None after a success."""
    refused: dict[str, str] = field(default_factory=dict)
    """By tenant, why the witness does not cosign its log."""
    disputed: set[str] = field(default_factory=set)
    """Tenants of whose logs the witness has seen more entries than there are, or others."""
    known: dict[str, int] = field(default_factory=dict)
    """By tenant, the largest tree that the witness has seen, as far as this node knows."""
    _ready: dict[str, None] = field(default_factory=dict)
    """Tenants to push now, the longest waiting first."""
    _again: set[str] = field(default_factory=set)
    """Tenants to push once they have rested."""
    _resting: dict[str, float] = field(default_factory=dict)
    """Tenants that are pushed, or were lately; the time at which each may be pushed again."""
    _rests: list[tuple[float, str]] = field(default_factory=list)
    """A heap of the same."""
    _under_way: int = 0
    _pauses: dict[str, float] = field(default_factory=dict)
    """By tenant whose last push failed, the length of its pause."""
    _pause_s: float = 0.0
    _resumes_s: float = 0.0
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def waiting(self) -> int:
        """The tenants whose newest checkpoint this witness has not cosigned."""
        return len(self._ready) + len(self._again)

    def add(self, tenant_id: str, size: int) -> None:
        """There is a checkpoint of ``size``."""
        if size <= self.known.get(tenant_id, 0):
            return
        if tenant_id in self._resting:
            self._again.add(tenant_id)
        else:
            self._ready[tenant_id] = None
            self._wake.set()

    async def next(self) -> str:
        """The next tenant to push, when it may be; the caller MUST call ``done`` with it."""
        while True:
            now_s = time.monotonic()
            while self._rests and self._rests[0][0] <= now_s:
                self._end_rest(*heappop(self._rests))
            is_free = self._under_way < (PUSHES_AT_ONCE_MAX if self.fault is None else 1)
            if self._ready and is_free and now_s >= self._resumes_s:
                tenant_id = next(iter(self._ready))
                del self._ready[tenant_id]
                self._resting[tenant_id] = float("inf")
                self._under_way += 1
                self._resumes_s = now_s + 1 / PUSHES_PER_SECOND_MAX
                return tenant_id
            times_s = [self._resumes_s] if self._ready and is_free else []
            times_s += [at_s for at_s, _ in self._rests[:1]]
            self._wake.clear()
            await is_set_within(self._wake, min(times_s) - now_s if times_s else None)

    def done(self, tenant_id: str, pause_s: float, *, is_due: bool = False) -> None:
        """The push has ended; the tenant is pushed again after ``pause_s`` at the earliest, if it ``is_due`` or once it
        has a newer checkpoint."""
        self._under_way -= 1
        at_s = time.monotonic() + pause_s
        self._resting[tenant_id] = at_s
        heappush(self._rests, (at_s, tenant_id))
        if is_due:
            self._again.add(tenant_id)
        self._wake.set()

    def _end_rest(self, at_s: float, tenant_id: str) -> None:
        if self._resting.get(tenant_id) == at_s:
            del self._resting[tenant_id]
            if tenant_id in self._again:
                self._again.discard(tenant_id)
                self._ready[tenant_id] = None

    def cosigned(self, tenant_id: str, size: int) -> None:
        """The witness works, and has cosigned this tree."""
        self.known[tenant_id] = size
        self.fault, self._pause_s = None, 0.0
        self.refused.pop(tenant_id, None)
        self.disputed.discard(tenant_id)
        self._pauses.pop(tenant_id, None)

    def refuses(self, tenant_id: str, reason: RefusedError) -> float:
        """The witness works, and refuses this log. Returns the pause before the next push."""
        self.fault, self._pause_s = None, 0.0
        self.refused[tenant_id] = str(reason)
        if isinstance(reason, DisputedError):
            self.disputed.add(tenant_id)
        return self._longer(tenant_id, REFUSED_PAUSE_FIRST_S, REFUSED_PAUSE_MAX_S)

    def fails(self, tenant_id: str, fault: str) -> float:
        """The witness does not do its work, or not for this log. Returns the pause before the next push of it."""
        self.fault = fault
        self._pause_s = min(max(self._pause_s * 2, FAULT_PAUSE_FIRST_S), FAULT_PAUSE_MAX_S)
        self.rest(self._pause_s)
        return self._longer(tenant_id, FAULT_PAUSE_FIRST_S, FAULT_PAUSE_MAX_S)

    def _longer(self, tenant_id: str, first_s: float, most_s: float) -> float:
        pause_s = min(max(self._pauses.get(tenant_id, 0.0) * 2, first_s), most_s)
        self._pauses[tenant_id] = pause_s
        return pause_s

    def rest(self, pause_s: float) -> None:
        """Nothing is pushed for so long."""
        self._resumes_s = max(self._resumes_s, time.monotonic() + pause_s)


@dataclass(kw_only=True, eq=False)
class Witnesses:
    """The witnesses of one policy, each with its line of tenants."""

    pool: Pool
    policy: Policy
    origin: Callable[[str], str]
    max_skew_ms: int
    metrics: Metrics
    report: Callable[[BaseException, str], object]
    """Records the break that an error is about, and the part of the node that met it."""

    def __post_init__(self) -> None:
        self.lines: Sequence[WitnessLine] = [
            WitnessLine(each) for each in self.policy.witnesses.values() if each.url is not None
        ]
        self._connections = asyncio.Semaphore(CONNECTIONS_MAX)

    @property
    def fault(self) -> str | None:
        """Which witnesses fail, or have seen more than there is, or others, and whether the quorum needs them; None if
        none does."""
        faults = [f"{line.witness.name}: {line.fault}" for line in self.lines if line.fault is not None]
        faults += [
            f"{line.witness.name} has seen more or other entries of {first_of(sorted(line.disputed), NAMED_MAX)}"
            for line in self.lines
            if line.disputed
        ]
        if (behind := self._below_quorum()) is not None:
            faults.append(f"new entries of {behind} are below quorum {self.policy.quorum}")
        return "; ".join(faults) or None

    def _below_quorum(self) -> str | None:
        """The logs whose quorum needs a witness that fails or disputes them."""

        def is_met(tenant_id: str | None) -> bool:
            failing = {line.witness.key for line in self.lines if line.fault is not None or tenant_id in line.disputed}
            return self.policy.judge({key.text(): 1 for key in self.policy.keys if key not in failing}, 1).is_met

        if not is_met(None):
            return "all logs"
        disputed = sorted({tenant_id for line in self.lines for tenant_id in line.disputed if not is_met(tenant_id)})
        return first_of(disputed, NAMED_MAX) if disputed else None

    def faults_of(self, tenant_id: str) -> dict[str, str]:
        """By verifier key, why the last push of this tenant's checkpoint failed."""
        faults = {line.witness.key.text(): line.fault or line.refused.get(tenant_id) for line in self.lines}
        return {key: fault for key, fault in faults.items() if fault is not None}

    def values(self) -> Mapping[str, Mapping[str, float]]:
        """Metrics by witness."""
        return {"log_witness_waiting": {line.witness.name: line.waiting for line in self.lines}}

    def signed(self, sizes: Mapping[str, int]) -> None:
        """This node has signed checkpoints of these sizes."""
        for tenant_id, size in sizes.items():
            if self.policy.covers(self.origin(tenant_id)):
                for line in self.lines:
                    line.add(tenant_id, size)

    async def run(self) -> None:
        """Push checkpoints until cancelled."""
        context = await asyncio.to_thread(httpx.create_ssl_context)
        client = client_of(context, timeout_s=REQUEST_TIMEOUT_S, has_proxies=True)
        async with client, asyncio.TaskGroup() as group:
            for line in self.lines:
                group.create_task(repeat(partial(self._sweep, line), SWEEP_INTERVAL_S, "witness_sweep_failed"))
                group.create_task(self._keep_pushing(client, line))

    async def _sweep(self, line: WitnessLine) -> None:
        """Find the tenants that this witness is behind with."""
        after: str | None = ""
        while after is not None:
            async with self._connections, reading(self.pool) as connection:
                page = await anchors.cosigned_trees(connection, line.witness.key.text(), after, SWEEP_TENANTS)
            for tenant_id, size, cosigned_size in page:
                if is_readable_tenant(tenant_id) and self.policy.covers(self.origin(tenant_id)):
                    if cosigned_size > line.known.get(tenant_id, 0):
                        line.known[tenant_id] = cosigned_size
                    line.add(tenant_id, size)
            after = page[-1].tenant_id if len(page) == SWEEP_TENANTS else None

    async def _keep_pushing(self, client: httpx.AsyncClient, line: WitnessLine) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                tenant_id = await line.next()
                group.create_task(self._push(client, line, tenant_id))

    async def _push(self, client: httpx.AsyncClient, line: WitnessLine, tenant_id: str) -> None:
        """Push one checkpoint, and note the outcome."""
        name, pause_s, is_due = line.witness.name, PUSH_INTERVAL_S, False
        try:
            await self._cosign(client, line, tenant_id)
        except BusyError as error:
            line.rest(error.pause_s)
            pause_s, is_due = 0.0, True
        except RefusedError as error:
            pause_s, is_due = line.refuses(tenant_id, error), True
            self.metrics.count("log_cosignature_failures", 1, name)
            log.info("checkpoint_refused", witness=name, tenant_id=tenant_id, error=str(error), retry_in_s=pause_s)
        except ChainDamagedError as error:
            self.report(error, "witnesses")
        except (NoAnswerError, SignatureError) as error:
            pause_s, is_due = line.fails(tenant_id, str(error)), True
            self.metrics.count("log_cosignature_failures", 1, name)
            log.warning("witness_failed", witness=name, tenant_id=tenant_id, error=str(error))
        except (DatabaseUnavailableError, *DATABASE_FAULTS) as error:
            is_due = True
            log.debug("cosignature_delayed", witness=name, tenant_id=tenant_id, error=str(error))
        finally:
            line.done(tenant_id, pause_s, is_due=is_due)

    async def _cosign(self, client: httpx.AsyncClient, line: WitnessLine, tenant_id: str) -> None:
        """Have the newest checkpoint cosigned, unless that is done.

        Raises:
            BusyError, RefusedError: the witness does not want it now, or not at all.
            NoAnswerError, SignatureError: the witness fails.
            ChainDamagedError: the stored tree is not that of the stored checkpoint.
            DatabaseUnavailableError, DATABASE_FAULTS: nothing was stored.
        """
        known: int | None = None
        for _ in range(CONFLICTS_MAX + 1):
            push = await self._prepared(line, tenant_id, known)
            if push is None:
                return
            began = datetime.now(UTC)
            reply = await self._ask(client, line.witness, push.body())
            if reply.status == httpx.codes.OK:
                found = cosigned(push.note, reply.body, line.witness)
                self._require_now(found, began)
                async with self._connections, self.pool.acquire() as connection:
                    await insert(connection, tenant_id, push.size, push.note, found)
                line.cosigned(tenant_id, push.size)
                self.metrics.count("log_cosignatures", 1, line.witness.name)
                return
            known = _known_size(reply, push)
        raise RefusedError(f"it names another size of the tree each time, now {known}")

    async def _prepared(self, line: WitnessLine, tenant_id: str, known: int | None) -> _Push | None:
        """What is pushed next, None if there is nothing new. ``known`` is the size that the witness named."""
        async with self._connections, reading(self.pool) as connection:
            row = await anchors.to_cosign(connection, tenant_id, line.witness.key.text())
            if row is None or row.checkpoint is None:
                return None
            with reported_as(partial(damaged, tenant_id, "tree", 0), "the stored checkpoint is none", SignatureError):
                note = notes.parse(row.checkpoint)
                checkpoint = checkpoints.parse(note.text)
            if checkpoint.origin != self.origin(tenant_id):
                raise damaged(tenant_id, "tree", 0, "the stored checkpoint is of another log")
            if known is None:
                known = max(row.cosigned_size, line.known.get(tenant_id, 0))
                if known >= checkpoint.size:
                    return None
            if known > checkpoint.size:
                raise DisputedError(f"it has seen a tree of {known} entries of this log, which has {checkpoint.size}")
            if not known:
                return _Push(note, checkpoint.size, 0, [])
            wanted = tiles.consistency_tiles(known, checkpoint.size) | tiles.root_tiles(known)
            stored = await store.read_tiles(connection, tenant_id, wanted)
        return _Push(note, checkpoint.size, known, _proof(tenant_id, known, checkpoint, stored))

    async def _ask(self, client: httpx.AsyncClient, witness: PolicyWitness, body: bytes) -> Reply:
        """The answer of the witness, 200 or 409."""
        assert witness.url is not None
        reply = await read_reply(
            client,
            "POST",
            f"{witness.url.rstrip('/')}/add-checkpoint",
            bytes_max=ANSWER_BYTES_MAX,
            within_s=REQUEST_TIMEOUT_S,
            content=body,
            headers={"Content-Type": "text/plain; charset=utf-8"},
        )
        if reply.status in (httpx.codes.OK, httpx.codes.CONFLICT):
            return reply
        if reply.status == httpx.codes.TOO_MANY_REQUESTS:
            asked_s = retry_after_s(reply.headers.get("Retry-After"), time.time())
            raise BusyError(min(asked_s or RETRY_AFTER_DEFAULT_S, RETRY_AFTER_MAX_S))
        said = printable(reply.body.decode("utf-8", "replace").strip())[:REASON_CHARACTERS_MAX]
        reason = f"it answers {reply.status}{f': {said}' if said else ''}"
        if reply.status == httpx.codes.UNPROCESSABLE_ENTITY:
            # The proof was verified before it was sent.
            raise DisputedError(f"it has seen a tree that this log does not extend: {reason}")
        raise RefusedError(reason) if 400 <= reply.status < 500 else NoAnswerError(reason, status=reply.status)

    def _require_now(self, found: Cosignature, began: datetime) -> None:
        latest = datetime.now(UTC) + timedelta(milliseconds=self.max_skew_ms)
        if not began - BEHIND_MAX <= found.time <= latest:
            raise SignatureError(f"it states the time {found.time.isoformat()}, which is not now")


def cosigned(note: Note, answer: bytes, witness: PolicyWitness) -> Cosignature:
    """The cosignature of ``witness`` on ``note`` in its answer to add-checkpoint, signature lines alone; lines of other
    keys are ignored.

    Raises:
        SignatureError: there is not exactly one, or it is invalid.
    """
    parsed = notes.parse(note.text.encode() + b"\n" + answer)
    if parsed.text != note.text:
        raise SignatureError("it answers more than signature lines")
    found = cosignatures_of(parsed, [witness.key])
    if len(found) != 1:
        raise SignatureError(f"it answers {len(found)} cosignatures by {witness.key.name}, not 1")
    return found[0]


def _known_size(reply: Reply, push: _Push) -> int:
    """The size that an answer 409 names."""
    match = _SIZE.fullmatch(reply.body)
    if match is None:
        raise NoAnswerError("it answers 409 without the size of the tree that it has seen")
    known = int(match[1])
    if known == push.old_size == push.size:
        raise DisputedError(f"it has seen other entries than these {known}")
    if known == push.old_size:
        raise NoAnswerError(f"it answers 409, though it has seen the tree of {known} entries that was named")
    return known


def _proof(
    tenant_id: str, known: int, checkpoint: checkpoints.Checkpoint, stored: Mapping[tiles.TileCoordinates, bytes]
) -> list[bytes]:
    """The proof from the tree of ``known`` entries, at least one, to that of the checkpoint, verified."""
    get_tile = tiles.getter(stored)
    problem = partial(damaged, tenant_id, "tree", 0)
    with reported_as(problem, "the stored tree is not the one that was signed", ProofError, TypeError, ValueError):
        hashes = tiles.consistency_proof(known, checkpoint.size, get_tile)
        root = tiles.root_at(known, get_tile)
        merkle.verify_consistency(known, checkpoint.size, root, checkpoint.root, hashes)
    return hashes
