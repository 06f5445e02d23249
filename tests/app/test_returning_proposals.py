"""Proposals and capacities whose HLC the chain has already, by an import: history, neither judged nor added."""

from __future__ import annotations

import hashlib

import pytest

from app.store.chain_reads import ChainedEntry
from app.store.chaining import LOG_COLUMNS, ChainHead
from app.write.pending.backlog import Pending
from app.write.pending.linking import ChainView, LinkedBatch, link
from ledger import canonical
from ledger.chain.conflict import Event
from ledger.chain.record import IdempotencyKey
from ledger.errors import CommitmentConflictError
from ledger.facts.events import CAPACITY_RECORD_TYPE, PROPOSED_RECORD_TYPE
from ledger.hlc import Hlc
from ledger.machines.commitments import Commitments
from ledger.machines.promises import NO_BET
from ledger.positions import Epoch, Lsn

HEAD = ChainHead(7, "ab" * 32, "9:0:m")
BOUND = {"kind": "IdentityBind", "capsule": "a", "identity": "x"}
PROPOSED = canonical.encode({"type": "CommitmentProposed", "commitment": BOUND, "precondition": NO_BET})
CAPACITY = canonical.encode({"type": "CapacitySet", "node": "n1", "capacity": {"cpu_millis": 4}})
KEY = IdempotencyKey(1, "k", 0, b"a" * 32)


def returned(kind: int, job_id: str, payload: bytes, key: IdempotencyKey | None, event: Event) -> LinkedBatch:
    """``payload``, linked where the chain has ``event`` at its HLC, as seq 5; judging changes nothing."""
    pending = Pending(Lsn(1), Epoch(1), Hlc(2, 0, "n"), kind, "acme", job_id, payload, key, None)
    machine = Commitments()
    view = ChainView(
        heads={"acme": HEAD},
        entries={"acme": {event.t_hlc: ChainedEntry(5, "cd" * 32, None, event)}},
        commitments={"acme": machine},
    )
    linked = link([pending], view, {})
    assert not any(machine.state)
    assert not linked.keyed_rows
    assert linked.has_existing
    return linked


def existing(action: str, job_id: str, payload: bytes) -> Event:
    return Event("2:0:n", job_id, action, hashlib.sha256(payload).hexdigest())


@pytest.mark.parametrize("action", ["PROPOSE_ACCEPTED", "PROPOSE_REJECTED", "PROPOSED"])
def test_a_proposal_whose_entry_stands_is_not_judged_again(action: str) -> None:
    linked = returned(PROPOSED_RECORD_TYPE, "capsule:a", PROPOSED, KEY, existing(action, "capsule:a", PROPOSED))
    assert not linked.log_rows
    (outcome,) = linked.outcomes
    assert isinstance(outcome, CommitmentConflictError)
    assert (outcome.reason, outcome.index) == ("imported", 5)


def test_a_proposal_whose_hlc_is_another_events_is_kept_as_a_conflict() -> None:
    linked = returned(PROPOSED_RECORD_TYPE, "capsule:a", PROPOSED, KEY, existing("ENQUEUE", "j1", b"{}"))
    (row,) = linked.log_rows
    assert row[LOG_COLUMNS.index("action")] == "CONFLICT"
    (outcome,) = linked.outcomes
    assert isinstance(outcome, CommitmentConflictError)
    assert (outcome.reason, outcome.index) == ("imported", 8)


def test_a_capacity_that_stands_changes_nothing() -> None:
    event = existing("CAPACITY_SET", "node:n1", CAPACITY)
    linked = returned(CAPACITY_RECORD_TYPE, "node:n1", CAPACITY, None, event)
    assert not linked.log_rows
