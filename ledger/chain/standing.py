"""Where an event stands in a chain: as itself, or in a CONFLICT entry because another event has its HLC.

Asked before events are chained that may have come into the chain by another way: imported entries, and records of a
node whose log was imported before it came back.
"""

from __future__ import annotations

from collections.abc import Mapping

from ledger.chain.conflict import Event, conflict_hlc
from ledger.facts.events import VERDICTS, CommitmentAction

Standing = Mapping[str, Event]
"""The events of one chain by HLC, those that matter; a CONFLICT entry is an event like any other."""


def place_of(event: Event, standing: Standing) -> tuple[str | None, str | None]:
    """The HLC that ``event`` stands at, as itself or in a CONFLICT entry; when it does not, but another event has its
    HLC, the payload digest of that one, beside which it is to be kept."""
    first = standing.get(event.t_hlc)
    if first is None:
        return None, None
    if first == event or _is_verdict_on(event, first):
        return event.t_hlc, None
    beside = conflict_hlc(event).text()
    return (beside, None) if beside in standing else (None, first.payload_digest)


def _is_verdict_on(event: Event, first: Event) -> bool:
    """Whether ``event`` is a proposal, as a WAL has it, that is judged in ``first``, which says all of it."""
    if event.action != CommitmentAction.PROPOSED or first.action not in VERDICTS or first.job_id != event.job_id:
        return False
    return first.action == CommitmentAction.PROPOSE_REJECTED or first.payload_digest == event.payload_digest
