"""Logs whose facts about jobs are recorded and do not count.

An operator excludes a log by an entry LOG_EXCLUDED in the tenant's chain, and includes it again by LOG_INCLUDED. All
these statements are entries about ``SUBJECT``, so the log's index by job finds them. The payload is canonical JSON::

    {"actor"?, "log", "reason", "type"}        log: as in an origin, with the tenant

The log of an entry is the log that first chained it: that of its origin, else the log of the chain itself. Rules::

    the newest statement about a log, by (HLC, payload digest), decides      of those that it did not make itself
    a log that is excluded counts nowhere in the tenant's chain              neither before nor after the statement

So what is excluded follows from the set of entries, like the state of a job: ledgers that hold the same entries agree,
whatever order they chained them in. A state as of a time uses the statements up to that time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import orjson

from ledger.chain.conflict import held_event
from ledger.facts.events import ACTOR, SystemAction

SUBJECT: Final = "excluded logs"
"""Job id of all statements; no job can have it."""
ACTIONS: Final = frozenset((SystemAction.LOG_EXCLUDED.value, SystemAction.LOG_INCLUDED.value))
UNCOUNTED: Final = "UNCOUNTED"
"""Stands for the action of an entry whose fact about its job does not count."""


class Statement(NamedTuple):
    """A statement about ``log``. Of two statements the one of higher ``rank`` decides."""

    rank: tuple[int, int, str, str]
    """``(*HLC, payload digest)``."""
    log: str
    is_excluded: bool
    seq: int
    by_log: str | None
    """The log that made the statement; None for the chain's own."""
    reason: str | None
    actor: Any


class Statements(NamedTuple):
    """The deciding statement about each log, by log, from the entries up to ``seq``."""

    seq: int
    by_log: Mapping[str, Statement]

    def exclusions(self, own_log: str | None) -> Exclusions:
        """What is excluded in the chain of ``own_log``, None if its name is not known."""
        excluded = frozenset(log for log, statement in self.by_log.items() if statement.is_excluded)
        newest = max((statement.seq for statement in self.by_log.values()), default=0)
        return Exclusions(excluded, own_log, newest) if newest else COUNT_ALL


class Exclusions(NamedTuple):
    """The logs whose facts do not count in one chain."""

    logs: frozenset[str] = frozenset()
    own_log: str | None = None
    seq: int = 0
    """Seq of the newest statement that decides, 0 without one."""

    def counts(self, origin: Any) -> bool:
        """Whether the facts of an entry count; ``origin`` is that of its row."""
        if not self.logs:
            return True
        return (self.own_log if origin is None else log_of(origin)) not in self.logs


COUNT_ALL: Final = Exclusions()
NO_STATEMENTS: Final = Statements(0, {})


def log_of(origin: Any) -> str | None:
    """The log in the origin of a row; None if an edit made it no origin."""
    try:
        log = orjson.loads(origin)["log"]
    except (ValueError, TypeError, KeyError):
        return None
    return log if isinstance(log, str) else None


def statements_of(
    known: Statements, rows: Iterable[Sequence[Any]], own_log: str | None, as_of: tuple[int, int, str] | None = None
) -> Statements:
    """``known`` and the statements in these rows of ``FOLD_COLUMNS``; with ``as_of`` those up to this HLC."""
    by_log, last_seq = dict(known.by_log), known.seq
    for row in rows:
        if (statement := _statement(row)) is None or (as_of is not None and statement.rank[:3] > as_of):
            continue
        last_seq = max(last_seq, statement.seq)
        if (own_log if row[-1] is None else statement.by_log) == statement.log:
            continue
        if (held := by_log.get(statement.log)) is None or statement.rank > held.rank:
            by_log[statement.log] = statement
    return Statements(last_seq, by_log)


def _statement(row: Sequence[Any]) -> Statement | None:
    """The statement of a row of ``FOLD_COLUMNS``, or of the event that a CONFLICT entry holds; None without one."""
    job_id, seq, physical_ms, logical, node, action, digest, text, origin = row
    if job_id != SUBJECT or type(seq) is not int or not isinstance(node, str) or not isinstance(digest, str):
        return None
    if type(physical_ms) is not int or type(logical) is not int:
        return None
    facts, rank = _object_in(text), (physical_ms, logical, node, digest)
    if action == SystemAction.CONFLICT and (held := held_event(facts, SUBJECT)) is not None:
        action, facts, rank = held.event.action, _object_in(held.payload), (*held.hlc, held.event.payload_digest)
    log, reason = facts.get("log"), facts.get("reason")
    if action not in ACTIONS or not isinstance(log, str):
        return None
    return Statement(
        rank,
        log,
        action == SystemAction.LOG_EXCLUDED,
        seq,
        None if origin is None else log_of(origin),
        reason if isinstance(reason, str) else None,
        facts.get(ACTOR),
    )


def _object_in(text: Any) -> dict[str, Any]:
    try:
        value = orjson.loads(text)
    except (ValueError, TypeError):
        return {}
    return value if isinstance(value, dict) else {}
