"""From a checked proposal to its verdict, which is known once the proposal is chained.

A proposal always has an Idempotency-Key. The chain decides which of two proposals of one key came first. So keys are
not looked up before, and a repeated proposal is a WAL record that adds no entry to the chain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import orjson

from app.store.appended import ChainPosition
from app.store.idempotency import ChainedLine, key_row_error
from app.write.intake.answers import Answers, Awaited, refused
from app.write.intake.keyed import KeyedRequests
from app.write.intake.system_entries import SystemEntries, facts_of
from app.write.pending.backlog import Pending
from app.write.pending.keyed_entries import gone
from app.write.pending.linking import DuplicateLineError, conflict_of
from app.write.pending.requests import RequestKey
from ledger import canonical, keyed
from ledger.chain.record import IdempotencyKey
from ledger.errors import InvalidInputError
from ledger.facts.events import (
    ACTOR,
    CAPACITY_RECORD_TYPE,
    CAPACITY_TYPE,
    PROPOSAL_TYPE,
    PROPOSED_RECORD_TYPE,
    CommitmentAction,
    Durability,
    SystemAction,
)
from ledger.machines.promises import NO_BET, RULES, RULES_NEWEST, node_subject, read_proposal
from ledger.positions import Epoch, Lsn


class Recorded(NamedTuple):
    """The entry that an accepted proposal, or a capacity, became."""

    seq: int
    hlc: str
    epoch: Epoch
    lsn: Lsn
    replayed: bool = False


def _recorded(pending: Pending, place: ChainPosition | None) -> Recorded:
    """The answer about a proposal, or a capacity, that is chained."""
    assert place is not None
    return Recorded(place.seq, pending.hlc.text(), pending.epoch, pending.lsn)


@dataclass(kw_only=True, eq=False)
class Proposals:
    """Takes proposals, and capacities of nodes."""

    system: SystemEntries
    keyed: KeyedRequests
    answers: Answers

    def enter(self, wanted: Mapping[str, Any], actor: str | None, key: RequestKey) -> Awaited[Recorded]:
        """Queue the proposal of a checked body; its answer is a DuplicateLineError if its key was chained before.

        Raises:
            LedgerError: as ``Submitter.submit``; nothing was taken.
        """
        tenant_id: str = wanted["tenant_id"]
        named = IdempotencyKey(key.route, key.key, 0, key.body_digest)
        said = {
            "type": PROPOSAL_TYPE,
            "commitment": wanted["commitment"],
            "precondition": wanted.get("precondition", NO_BET),
            RULES: wanted.get(RULES, RULES_NEWEST),
            keyed.MEMBER: keyed.key_digest(tenant_id, named),
        }
        payload = canonical.encode({**said, **facts_of(**{ACTOR: actor})})
        proposal = read_proposal(payload)
        pending = self.system.enter_about(
            PROPOSED_RECORD_TYPE, proposal.commitment.subject, payload, tenant_id, named, actor
        )
        pending.proposal = proposal
        return self._awaited(pending)

    async def propose(self, wanted: Mapping[str, Any], actor: str | None, key: RequestKey) -> Recorded:
        """Propose, and wait for the verdict.

        Raises:
            CommitmentConflictError: it was rejected, and that is recorded.
            IdempotencyReusedError: the key was used with another body.
            DurabilityTimeoutError: it is not GLOBAL in time or, if it was recorded before, not shown to be GLOBAL.
            LedgerError: as ``Submitter.submit``.
        """
        entered = self.enter(wanted, actor, key)
        try:
            return await entered.settled()
        except DuplicateLineError:
            pending = entered.pending
            chained = await self.keyed.find((pending.tenant_id,), key)
            first = _first_answer(chained, pending, key)
            await self.answers.shown(chained, Durability.GLOBAL)
            return first

    async def set_capacity(self, node: str, wanted: Mapping[str, Any], actor: str | None) -> Recorded:
        """Record the capacity of a node, as a checked body has it, and wait until it takes effect.

        Raises:
            LedgerError: as ``Submitter.submit``.
        """
        facts = {name: wanted[name] for name in ("capacity", "overcommit") if name in wanted}
        said = {"type": CAPACITY_TYPE, "node": node, RULES: RULES_NEWEST, **facts, **facts_of(**{ACTOR: actor})}
        payload = canonical.encode(said)
        tenant_id: str = wanted["tenant_id"]
        pending = self.system.enter_about(CAPACITY_RECORD_TYPE, node_subject(node), payload, tenant_id, None, actor)
        return await self._awaited(pending).settled()

    def _awaited(self, pending: Pending) -> Awaited[Recorded]:
        return Awaited(self.answers, pending, Durability.GLOBAL, partial(_recorded, pending))


def _first_answer(chained: list[ChainedLine], pending: Pending, key: RequestKey) -> Recorded:
    """The first answer to the request, from its entry in the chain.

    Raises:
        CommitmentConflictError: it was rejected.
        EventRefusedError: a REFUSED entry was chained in its place.
        ChainDamagedError: the entry is not the proposal of this request, or is gone.
    """
    if not chained:
        raise gone(pending.tenant_id, key)
    line = chained[0]
    if line.action == SystemAction.REFUSED:
        raise refused(line)
    try:
        event = keyed.kept_event(line.job_id, line.action, line.payload)
        is_ours = event is not None and (
            (event.job_id, event.action) == (pending.job_id, CommitmentAction.PROPOSED)
            and _as_requested(event.payload) == _as_requested(pending.payload)
        )
        if is_ours and line.action == CommitmentAction.PROPOSE_ACCEPTED:
            return Recorded(line.seq, line.t_hlc, line.epoch, line.lsn, replayed=True)
        rejection = read_proposal(line.payload).rejection if is_ours else None
    except (InvalidInputError, ValueError, TypeError, KeyError):
        rejection = None
    if rejection is None:
        raise key_row_error(
            pending.tenant_id,
            key.key,
            line.seq,
            f"names seq {line.seq}, whose entry is not the proposal of this request",
        )
    conflict = conflict_of(rejection, line.seq, line.t_hlc)
    conflict.replayed = True
    raise conflict


def _as_requested(payload: bytes | str) -> dict[str, object]:
    """The proposal without what the node added: any client that may write for the tenant may repeat a request, and a
    newer node."""
    facts: dict[str, object] = orjson.loads(payload)
    facts.pop(ACTOR, None)
    facts.pop(RULES, None)
    return facts
