"""Writes of one event or one proposal, the same on both paths of a request.

The routes of the framework call ``submit``. The fast path (``app.edge.fast_path``) calls ``enter`` and, once the entry
has reached its level, ``answer``. Both start with the same form and charge, end in the same ``Submitter``, and give the
same answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final, NamedTuple, TypeVar, cast

from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response

from app.edge.accepted import Accepted
from app.edge.answers import JSON_MEDIA_TYPE, Answer, path_outside
from app.edge.forms.body import read_body
from app.edge.forms.fields import IDEMPOTENCY_KEY_PATTERN, JOB_ID_PATTERN
from app.edge.forms.requests import (
    CANCEL_REQUEST,
    CAPACITY,
    EVENT_REQUEST,
    EVENT_TAGS,
    JOB_REQUEST,
    PROMISE_PATTERN,
    PROPOSAL,
    PROPOSAL_TAGS,
)
from app.edge.forms.validation import parse
from app.edge.problems import respond
from app.read.consistency import Consistency
from app.runtime.answers import json_bytes
from app.runtime.settings.words import WORDS
from app.runtime.state.node import Node
from app.runtime.state.session import SessionTokens, Token
from app.store.jobs.table import JobKey
from app.write.intake.answers import Awaited, Entered
from app.write.intake.caller_signatures import SIGNED_ROUTE, STATEMENT_ROUTE
from app.write.intake.job_checks import HomeRegions
from app.write.intake.private_fields import Sealing
from app.write.intake.proposals import Proposals, Recorded
from app.write.intake.submit import Submitter
from app.write.pending.linking import DuplicateLineError
from app.write.pending.requests import Draft, Receipt, RequestKey, draft_of
from ledger import rfc3339
from ledger.errors import CommitmentConflictError, InvalidInputError
from ledger.facts.events import JOB_EVENTS, TRACEPARENT, Durability, EventType
from ledger.machines.promises import RULES
from ledger.positions import Epoch, Lsn
from ledger.signed_events import MEMBER as SIGNATURE

JOBS_AT_ONCE: Final = 32
"""Jobs of one request whose reported events are recorded beside each other."""
JOB_WAIT_S: Final = 30.0
"""Longest that reports about an unknown job are to be sent again: the job's creation may be on its way."""
JOB_WAIT_FORGOTTEN_S: Final = 120.0
"""So long after it began, a wait that nothing was sent again for counts as none."""
UNKNOWN_JOBS_MAX: Final = 100_000
"""Unknown jobs with a wait; beyond, the one that was asked about least recently is forgotten."""
Report = TypeVar("Report")
Outcome = TypeVar("Outcome")
_KEY = re.compile(IDEMPOTENCY_KEY_PATTERN)
_JOB_ID = re.compile(JOB_ID_PATTERN)


class Route(IntEnum):
    """Routes that take an Idempotency-Key. The numbers are stored: never change or reuse one."""

    JOBS = 1
    JOB_EVENTS = 2
    CANCEL = 3
    EVENTS = 4
    COMMITMENTS = 5
    LINEAGE = 6
    LOGS = 9
    SIGNED = SIGNED_ROUTE
    """Of signed events, whichever route takes them."""
    STATEMENTS = STATEMENT_ROUTE


class Write(NamedTuple):
    """A kind of write of one event or proposal. ``event`` is None if the body names the event."""

    path: str
    form: TypeAdapter[Any]
    tags: frozenset[str]
    key_route: Route
    event: EventType | None = None

    def read(self, body: bytes) -> Any:
        """The parsed ``body``.

        Raises:
            InvalidInputError: it does not have the form.
        """
        return parse(self.form, body, self.tags)


CREATION: Final = Write("/v1/jobs", JOB_REQUEST, EVENT_TAGS, Route.JOBS, JOB_EVENTS["JobCreated"])
REPORT: Final = Write("/v1/jobs/{job_id}/events", EVENT_REQUEST, EVENT_TAGS, Route.JOB_EVENTS)
CANCELLATION: Final = Write(
    "/v1/jobs/{job_id}/cancel", CANCEL_REQUEST, EVENT_TAGS, Route.CANCEL, JOB_EVENTS["JobCancellationRequested"]
)
PROPOSING: Final = Write("/v1/commitments", PROPOSAL, PROPOSAL_TAGS, Route.COMMITMENTS)


@dataclass(kw_only=True, eq=False)
class EventWrites:
    """Takes single events."""

    node: Node
    submitter: Submitter
    sealing: Sealing
    consistency: Consistency
    sessions: SessionTokens
    homes: HomeRegions
    event_bytes_max: int
    root_path: str
    """As ``http.root_path``."""

    def enter(self, write: Write, accepted: Accepted, body: bytes, job_id: str | None) -> Entered[Receipt] | None:
        """Append the event to the WAL; None, and nothing appended, if only ``submit`` can: the event may need a seal,
        or its job a database lookup.

        Raises:
            LedgerError: as ``submit``; nothing was taken.
        """
        draft = self._draft(write, accepted, body, job_id)
        return None if self.sealing.may_have_private(draft) else self.submitter.enter_known(draft)

    def answer(self, entered: Entered[Receipt], accepted: Accepted) -> Answer:
        """The answer once ``entered.reached`` is done; errors as ``Awaited.answer``."""
        return self._answer(entered.answer(), accepted)

    async def submit(self, write: Write, request: Request, accepted: Accepted, job_id: str | None = None) -> Response:
        """Take the event of a request, and answer once it has reached its level.

        Raises:
            ProblemError: as ``read_body``.
            LedgerError: as ``Accepted``, ``Sealing.prepare``, ``Consistency`` and ``Submitter.submit``.
        """
        self.node.check_writable()
        if job_id is not None and _JOB_ID.fullmatch(job_id) is None:
            raise InvalidInputError(f"job_id: {WORDS[JOB_ID_PATTERN]}", ("job_id",))
        body = await read_body(request, JSON_MEDIA_TYPE, self.event_bytes_max)
        draft = await self.sealing.prepare(self._draft(write, accepted, body, job_id))
        key = request_key(accepted, write.key_route, body, job_id or "")
        key = self.sealing.key_of(key, draft.seal is not None)
        tokens = shown_session(accepted, self.sessions, self.consistency)
        if tokens and job_id is not None:
            await self.consistency.wait_for_session(tokens)
        return self._answer(await self.submitter.submit(draft, key=key), accepted).response()

    def _draft(self, write: Write, accepted: Accepted, body: bytes, job_id: str | None) -> Draft:
        """The event in the body, charged to the quota of its tenant."""
        given = write.read(body)
        if TRACEPARENT not in given and SIGNATURE not in given and (span := accepted.traceparent) is not None:
            given[TRACEPARENT] = span
        draft = draft_of(given, write.event, job_id, accepted.caller.id)
        accepted.charge_tenant(draft.tenant_id, len(body))
        return draft

    def _answer(self, receipt: Receipt, accepted: Accepted) -> Answer:
        """201 for one event. Equal receipts give equal bytes."""
        accepted.answers(receipt.lsn, receipt.lsn)
        session = token_of(self.sessions, receipt.hlc, receipt.epoch, receipt.lsn)
        chain = receipt.chain
        body = {
            "job_id": receipt.job_id,
            "home_region": self.homes.of(receipt.job_id),
            "tenant_id": receipt.tenant_id,
            "type": receipt.event.name,
            "action": receipt.event.action,
            "hlc": receipt.hlc,
            "at": rfc3339.time_of(receipt.hlc),
            "epoch": receipt.epoch,
            "lsn": receipt.lsn,
            "fence_token": receipt.fence_token,
            "durability": durability_answer(receipt.requested, receipt.achieved, receipt.survives),
            "chain": None
            if chain is None
            else {"seq": chain.seq, "chain_link": chain.chain_link, "prev_chain_link": chain.prev_chain_link},
            "session": session,
        }
        location = path_outside(accepted.scope, self.root_path, f"/v1/jobs/{receipt.job_id}")
        headers = {**write_headers(session, receipt.replayed), "location": location}
        return Answer.of(201, json_bytes(body), headers)


@dataclass(kw_only=True, eq=False)
class Reports:
    """Takes facts that other systems report in their own forms, each once, by a key that is made of it."""

    submitter: Submitter
    sealing: Sealing
    _waits_s: dict[JobKey, float] = field(default_factory=dict)
    """By unknown job, when a report was first about it."""

    def may_be_created(self, job: JobKey) -> bool:
        """Whether the creation of an unknown ``job`` may be on its way. Counted from the first report about it and not
        from the time of that report: after an outage all of them are old, and arrive in any order."""
        now_s, since_s = time.monotonic(), self._waits_s.pop(job, None)
        if since_s is None or now_s - since_s >= JOB_WAIT_FORGOTTEN_S:
            since_s = now_s
        elif now_s - since_s >= JOB_WAIT_S:
            return False
        self._waits_s[job] = since_s
        if len(self._waits_s) > UNKNOWN_JOBS_MAX:
            del self._waits_s[next(iter(self._waits_s))]
        return True

    async def record(self, given: dict[str, Any], key: RequestKey, accepted: Accepted) -> None:
        """Take the event ``given`` of a request, which has its type, tenant and job, and wait for its level. An event
        of this key that was taken before is not taken again.

        A cancellation is not taken before its job is known: the report of its creation may be lost, or on its way.

        Raises:
            LedgerError: as ``Sealing.prepare`` and ``Submitter.submit``.
        """
        draft = await self.sealing.prepare(draft_of(given, None, None, accepted.caller.id))
        own = self.sealing.key_of(key, draft.seal is not None)
        receipt = await self.submitter.submit(draft, key=own, takes_early=False)
        if not receipt.replayed:
            accepted.answers(receipt.lsn, receipt.lsn)


async def for_each_job(
    reports: Mapping[JobKey, Sequence[Report]], record: Callable[[JobKey, Sequence[Report]], Awaitable[Outcome]]
) -> list[Outcome]:
    """The results of ``record``, which is called for each job, ``JOBS_AT_ONCE`` beside each other. After an error no
    job is begun; the first error is raised once the jobs under way are done."""
    at_once, errors = asyncio.Semaphore(JOBS_AT_ONCE), list[Exception]()

    async def record_one(job: JobKey, told: Sequence[Report]) -> Outcome | None:
        async with at_once:
            try:
                return None if errors else await record(job, told)
            except Exception as error:
                errors.append(error)
                return None

    results = await asyncio.gather(*(record_one(job, told) for job, told in reports.items()))
    if errors:
        raise errors[0]
    return cast(list[Outcome], results)


@dataclass(kw_only=True, eq=False)
class ProposalWrites:
    """Takes proposals, each under its Idempotency-Key, and capacities of nodes."""

    node: Node
    proposals: Proposals
    sessions: SessionTokens
    event_bytes_max: int

    def enter(self, write: Write, accepted: Accepted, body: bytes, _job_id: str | None = None) -> Awaited[Recorded]:
        """Append the proposal to the WAL.

        Raises:
            LedgerError: as ``submit``; nothing was taken.
        """
        return self.proposals.enter(*self._wanted(write, accepted, body))

    def answer(self, entered: Awaited[Recorded], accepted: Accepted) -> Answer | None:
        """The verdict, once ``entered.reached`` is done; None if the key was chained before, so that only ``submit`` of
        the same request can answer.

        Raises:
            DurabilityTimeoutError: it was not chained in time.
            LedgerError: as ``Submitter.submit``.
        """
        try:
            return self._verdict(entered.answer(), accepted)
        except DuplicateLineError:
            return None
        except CommitmentConflictError as error:
            return Answer.by(respond(error))

    async def submit(self, write: Write, request: Request, accepted: Accepted) -> Response:
        """Propose the commitment of a request, and answer with the verdict.

        Raises:
            ProblemError: as ``read_body``.
            CommitmentConflictError: the proposal was rejected, and that is recorded.
            LedgerError: as ``Accepted`` and ``Proposals.propose``.
        """
        self.node.check_writable()
        body = await read_body(request, JSON_MEDIA_TYPE, self.event_bytes_max)
        recorded = await self.proposals.propose(*self._wanted(write, accepted, body))
        return self._verdict(recorded, accepted).response()

    async def set_capacity(self, node: str, request: Request, accepted: Accepted) -> Response:
        """Record the capacity of a node.

        Raises:
            ProblemError: as ``read_body``.
            LedgerError: as ``Accepted`` and ``Proposals.set_capacity``.
        """
        self.node.check_writable()
        if re.fullmatch(PROMISE_PATTERN, node) is None:
            raise InvalidInputError(f"node: {WORDS[PROMISE_PATTERN]}", ("node",))
        body = await read_body(request, JSON_MEDIA_TYPE, self.event_bytes_max)
        wanted = parse(CAPACITY, body)
        accepted.charge_tenant(wanted["tenant_id"], len(body))
        recorded = await self.proposals.set_capacity(node, wanted, accepted.caller.id)
        return self._answer(recorded, 200, {"node": node}).response()

    async def set_rules(self, tenant_id: str, version: int, accepted: Accepted) -> Response:
        """Put newer rules in force. A repeated request gets the first answer.

        Raises:
            CommitmentConflictError: rules that are not older are in force.
            LedgerError: as ``Proposals.propose``.
        """
        self.node.check_writable()
        # Any version is newer than 1, by which a tenant without proposals is judged here.
        wanted = {"tenant_id": tenant_id, "commitment": {"kind": "RulesVersion", "version": version}, RULES: 1}
        key = RequestKey(int(Route.COMMITMENTS), f"rules:{version}", hashlib.sha256(b"rules %d" % version).digest())
        recorded = await self.proposals.propose(wanted, accepted.caller.id, key)
        return self._answer(recorded, 200, {"version": version}).response()

    def _wanted(self, write: Write, accepted: Accepted, body: bytes) -> tuple[Any, str | None, RequestKey]:
        """The proposal in the body, charged to the quota of its tenant; the proposer; the key."""
        wanted = write.read(body)
        accepted.charge_tenant(wanted["tenant_id"], len(body))
        key = request_key(accepted, write.key_route, body, "")
        if key is None:
            raise InvalidInputError(
                "Idempotency-Key: a proposal needs one, so that it can be repeated", ("Idempotency-Key",)
            )
        return wanted, accepted.caller.id, key

    def _verdict(self, recorded: Recorded, accepted: Accepted) -> Answer:
        accepted.answers(recorded.lsn, recorded.lsn)
        return self._answer(recorded, 201, {"verdict": "accepted"})

    def _answer(self, recorded: Recorded, status: int, facts: Mapping[str, Any]) -> Answer:
        session = token_of(self.sessions, recorded.hlc, recorded.epoch, recorded.lsn)
        body = {"index": recorded.seq, "hlc": recorded.hlc, **facts}
        return Answer.of(status, json_bytes(body), write_headers(session, recorded.replayed))


def request_key(accepted: Accepted, route: Route, body: bytes, scope: str) -> RequestKey | None:
    """The request's Idempotency-Key; ``scope`` identifies the request together with its body.

    Raises:
        InvalidInputError: not 1 to 255 visible ASCII characters, or more than one.
    """
    given = accepted.header_values(b"idempotency-key")
    if not given:
        return None
    if len(given) > 1 or _KEY.fullmatch(given[0]) is None:
        raise InvalidInputError("Idempotency-Key: send one, of 1 to 255 visible ASCII characters", ("Idempotency-Key",))
    return RequestKey(int(route), given[0], hashlib.sha256(b"%b\n%b" % (scope.encode(), body)).digest())


def shown_session(accepted: Accepted, sessions: SessionTokens, consistency: Consistency) -> Sequence[Token]:
    """The session tokens that the request shows; the clock learns of their times.

    Raises:
        InvalidInputError: one is not of this ledger.
        ClockSkewError: the time of a token lies too far ahead.
    """
    tokens = sessions.decode_header(",".join(accepted.header_values(b"tally-session")))
    consistency.receive(tokens)
    return tokens


def token_of(sessions: SessionTokens, hlc: str, epoch: Epoch, lsn: Lsn) -> str:
    """The session token of a write of the node that ``hlc`` names."""
    return sessions.encode(Token(hlc.rpartition(":")[2], epoch, lsn, hlc))


def durability_answer(requested: Durability, achieved: Durability, survives: Sequence[str]) -> dict[str, object]:
    """The requested and the achieved level."""
    return {"requested": requested.name, "achieved": achieved.name, "survives": list(survives)}


def write_headers(session: str, replayed: bool) -> dict[str, str]:
    """Headers of every answer to a write."""
    replay = {"idempotent-replay": "true"} if replayed else {}
    return {"tally-session": session, **replay}
