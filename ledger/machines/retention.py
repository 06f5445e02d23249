"""How long the entries of a tenant are kept, what is held, and what has left: the fold of entries about it.

All of them are entries of the tenant's own chain about ``SUBJECT``, so the log's index by job finds them
(docs/formats/retention.md)::

    RETENTION_SET   period_s or none, minimum_s or none; actor; after; statement
    HOLD_PLACED     hold_id, reason; tenant, or job_ids and perhaps where; actor
    HOLD_RELEASED   hold_id, reason; actor; after; statement
    PRUNED          the members of ``Floor``; period_s, minimum_s, holds, never_ended, decided_ms; after; statement

An entry that loosens counts only if it is this chain's own, an admitted key signed it (``statement``), and ``after`` is
the entry about ``SUBJECT`` that is chained directly before it. An entry that tightens counts whatever its origin::

    period     that of the newest RETENTION_SET that counts                  loosens
    minimum    the highest of all RETENTION_SET, so none shortens it         tightens
    holds      every HOLD_PLACED                                             tightens
               without those that a HOLD_RELEASED that counts releases       loosens
    floor      that of the newest PRUNED that counts                         loosens

So a hold that is chained after a prune was planned makes the PRUNED entry count for nothing, and of two prunes that
were planned together the first one counts: the order of the chain decides, which is made under the lock of its head.

A PRUNED entry that counts has the policy of that moment, so entries about it that left are not needed. It also carries
the state of commitments and private fields at its ``to_seq`` (:mod:`ledger.machines.carried`). No prefix leaves
that has the HOLD_PLACED of an open hold, so holds need not be repeated. Rows up to the floor do not count: they may be
there or not while they are removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import orjson
from msgspec import Meta

from ledger.chain.conflict import held_event
from ledger.chain.form import Count, Hash, HlcText, Seq
from ledger.decoding import convert
from ledger.errors import ArchivedError
from ledger.facts.events import ACTOR, SystemAction
from ledger.machines.carried import digest_of_carried
from ledger.merkle import Frontier
from ledger.rfc3339 import time_of

SUBJECT: Final = "retention policy"
"""Job id of all these entries; no job can have it."""
ACTIONS: Final = frozenset(
    (SystemAction.RETENTION_SET, SystemAction.HOLD_PLACED, SystemAction.HOLD_RELEASED, SystemAction.PRUNED)
)
KEPT_S_MAX: Final = 100 * 366 * 86_400
"""Longest period and minimum."""
JOBS_A_HOLD_MAX: Final = 5000
"""Most jobs of one hold; a hold of more is a hold of the tenant."""
HOLDS_MAX: Final = 1000
"""Most holds of one tenant that are open."""

Judge = Callable[[str, Mapping[str, Any], str], str]
"""Judges the statement in the facts of an action, at this HLC: ``ok``, an admitted key signed them; ``unknown_key``,
one that is not known, expired or revoked; ``not_checked``, there are no keys to judge it by; ``broken``, none did."""
KEPT_PATTERN: Final = "^[1-9][0-9]{0,9}[smhd]$"
"""How long entries are kept, as people write it."""
HoldId = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
_Kept = Annotated[int, Meta(ge=1, le=KEPT_S_MAX)]


class Place(msgspec.Struct, frozen=True):
    """An entry about ``SUBJECT``; seq 0 and an empty link before the first."""

    seq: int
    chain_link: str


NO_ENTRY: Final = Place(0, "")


class Hold(NamedTuple):
    """Entries that stay whatever their age."""

    hold_id: str
    seq: int
    """Of the entry that placed it."""
    hlc: str
    reason: str
    job_ids: tuple[str, ...] | None
    """The jobs whose entries it holds, None for all entries of the tenant."""
    where: str | None
    """The search that found the jobs when the hold was placed."""
    actor: str | None
    log: str | None
    """The log that placed it, None for this chain's own."""


class Floor(msgspec.Struct, frozen=True):
    """What a PRUNED entry says of the prefix that leaves.

    Invariants::

        entry_count == to_seq - from_seq + 1 >= 1       size of the tree == to_seq
    """

    from_seq: Seq
    to_seq: Seq
    entry_count: Seq
    chain_link: Hash
    """Link of entry ``to_seq``."""
    tree_root: Hash
    """Root of the tree over entries 1 to ``to_seq``."""
    compact_range: list[Hash]
    """Right edge of that tree: the roots of its perfect subtrees, the largest first."""
    snapshot: Hash
    """Digest of the snapshot that ends at ``to_seq``."""
    highest_hlc: HlcText
    """The highest HLC of all entries that ever left."""
    archive: str
    """Address of the archive that has them."""
    manifests: list[Hash]
    """The digest of the archive's manifest that covers ``to_seq``, which commits to those before it; a list of one."""
    decided_ms: Count
    """Time of the decision, ms since 1970; the entries were older than the policy requires."""
    never_ended: Count
    """Jobs of these entries that had not ended."""
    actor: str | None = None
    """Who asked for the prune; None where nobody authenticated."""
    commitments: dict[str, Any] | None = None
    """The state of the commitments at ``to_seq``, None if no entry about them ever left
    (:mod:`ledger.machines.carried`)."""
    private_fields: dict[str, Any] | None = None
    """What the entries that ever left said about private fields; None if nothing."""
    seq: int = 0
    """Seq of the PRUNED entry."""
    hlc: str = ""

    @property
    def manifest(self) -> str | None:
        """Digest of that manifest; None if the list is empty."""
        return self.manifests[-1] if self.manifests else None

    def shown(self) -> dict[str, Any]:
        """As verdicts have it."""
        return {
            "to_seq": self.to_seq,
            "manifest": self.manifest,
            "at": time_of(self.hlc),
            "seq": self.seq,
            "commitments": digest_of_carried(self.commitments),
        }


class Retention(NamedTuple):
    """What the entries about retention add up to."""

    period_s: int | None = None
    minimum_s: int | None = None
    holds: Mapping[str, Hold] = {}
    """Open holds by id."""
    floor: Floor | None = None
    newest: Place = NO_ENTRY
    """The newest entry about ``SUBJECT``, counting or not."""
    doubted: tuple[tuple[int, str, str], ...] = ()
    """Seq, action and verdict of the chain's own entries that would loosen and whose statement is not ``ok``."""
    floors: tuple[Floor, ...] = ()
    """Of all PRUNED entries that count and are here, in seq order; the last is ``floor``."""

    @property
    def kept_s(self) -> int | None:
        """Age from which on entries may leave; None: never."""
        return None if self.period_s is None else max(self.period_s, self.minimum_s or 0)

    @property
    def floor_seq(self) -> int:
        """The last entry that left, 0 if none did."""
        return 0 if self.floor is None else self.floor.to_seq


NOTHING: Final = Retention()


class _Policy(msgspec.Struct):
    period_s: _Kept | None = None
    minimum_s: _Kept | None = None


class _Placed(msgspec.Struct):
    hold_id: HoldId
    reason: str
    job_ids: list[str] | None = None
    where: str | None = None


class _Pruned(Floor, frozen=True, kw_only=True):
    after: Place
    period_s: _Kept
    minimum_s: _Kept | None = None


class _Entry(NamedTuple):
    place: Place
    hlc: str
    action: Any
    facts: Mapping[str, Any]
    is_own: bool
    """Whether it is this chain's own, and not held by a CONFLICT entry."""
    log: str | None

    @property
    def statement(self) -> tuple[str, Mapping[str, Any], str]:
        """What a key must have signed."""
        return self.action, self.facts, self.hlc


def retention_of(rows: Iterable[Sequence[Any]], judge: Judge, *, is_strict: bool = True) -> Retention:
    """What these entries about ``SUBJECT``, rows of ``ENTRY_COLUMNS`` in seq order, add up to.

    ``is_strict``: only what is ``ok`` loosens; else all that is not ``broken``, for a verifier that reports the rest.
    """
    entries = [entry for entry in map(_entry, rows) if entry is not None]
    verdicts = {each.place.seq: judge(*each.statement) for each in entries if _loosens(each)}
    counting = {"ok"} if is_strict else {"ok", "unknown_key", "not_checked"}
    may_loosen = [verdicts.get(each.place.seq) in counting for each in entries]
    counting_prunes = _prunes(entries, may_loosen)
    found = counting_prunes[-1] if counting_prunes else NOTHING
    for entry, loosens in zip(entries, may_loosen, strict=True):
        if entry.place.seq > found.floor_seq:
            found = _after(found, entry, may_loosen=loosens)._replace(newest=entry.place)
    doubted = ((each.place.seq, each.action, verdicts.get(each.place.seq, "ok")) for each in entries)
    floors = tuple(each.floor for each in _prunes(entries, may_loosen, found.floor_seq) if each.floor is not None)
    return found._replace(floors=floors, doubted=tuple(each for each in doubted if each[2] != "ok"))


def states_floor(row: Sequence[Any], to_seq: int) -> bool:
    """Whether a row of ``ENTRY_COLUMNS`` is this chain's own PRUNED entry about the entries up to ``to_seq``, counting
    or not."""
    entry = _entry(row)
    if entry is None or not _loosens(entry):
        return False
    return (entry.action, entry.facts.get("to_seq")) == (SystemAction.PRUNED, to_seq)


def can_loosen(row: Sequence[Any]) -> bool:
    """Whether the statement of this row of ``ENTRY_COLUMNS`` is judged: the chain's own, and of an action that can let
    entries leave."""
    entry = _entry(row)
    return entry is not None and _loosens(entry)


def _loosens(entry: _Entry) -> bool:
    return entry.is_own and entry.action in ACTIONS and entry.action != SystemAction.HOLD_PLACED


def _prunes(entries: Sequence[_Entry], may_loosen: Sequence[bool], left_to: int = 0) -> list[Retention]:
    """Floor and policy of each PRUNED entry that counts, where entries up to ``left_to`` are known to have left."""
    befores = [None, *entries][: len(entries)]
    found = (
        _pruned(entry, before, left_to)
        for entry, before, loosens in zip(entries, befores, may_loosen, strict=True)
        if loosens
    )
    return [each for each in found if each is not None]


def _pruned(entry: _Entry, before: _Entry | None, left_to: int) -> Retention | None:
    """Floor and policy of a PRUNED entry that counts, chained directly after the entry ``before``; else None."""
    if entry.action != SystemAction.PRUNED:
        return None
    try:
        facts = convert(entry.facts, _Pruned)
    except (msgspec.ValidationError, OverflowError):
        return None
    is_whole = facts.entry_count == facts.to_seq - facts.from_seq + 1 and facts.to_seq < entry.place.seq
    is_next = facts.after == before.place if before is not None else facts.after.seq <= max(facts.to_seq, left_to)
    if not (is_whole and is_next and _has_root(facts)):
        return None
    said = {name: getattr(facts, name) for name in Floor.__struct_fields__}
    floor = Floor(**{**said, "seq": entry.place.seq, "hlc": entry.hlc})
    return Retention(facts.period_s, facts.minimum_s, {}, floor)


def _has_root(facts: Floor) -> bool:
    """Whether the compact range is one of a tree of this size and root."""
    hashes = [bytes.fromhex(each) for each in facts.compact_range]
    is_one = facts.to_seq.bit_count() == len(hashes)
    return is_one and Frontier.restore(facts.to_seq, hashes).root().hex() == facts.tree_root


def _after(found: Retention, entry: _Entry, *, may_loosen: bool) -> Retention:
    """``found`` with one more entry, above the floor."""
    facts = entry.facts
    # The entry before the first one above a floor has left.
    is_first = found.newest == NO_ENTRY and found.floor is not None
    may_loosen = may_loosen and (is_first or facts.get("after") == msgspec.to_builtins(found.newest))
    if entry.action == SystemAction.RETENTION_SET:
        try:
            said = convert(facts, _Policy)
        except (msgspec.ValidationError, OverflowError):
            return found
        # The PRUNED entry has the period of its moment.
        sets_period = may_loosen and (found.floor is None or entry.place.seq > found.floor.seq)
        return found._replace(
            minimum_s=max(found.minimum_s or 0, said.minimum_s or 0) or None,
            period_s=said.period_s if sets_period else found.period_s,
        )
    if entry.action == SystemAction.HOLD_PLACED and (hold := _hold(entry)) is not None:
        known = found.holds.get(hold.hold_id)
        return found._replace(holds={**found.holds, hold.hold_id: hold if known is None else _widened(known, hold)})
    if entry.action == SystemAction.HOLD_RELEASED and may_loosen:
        return found._replace(holds={key: each for key, each in found.holds.items() if key != facts.get("hold_id")})
    return found


def _hold(entry: _Entry) -> Hold | None:
    try:
        said = convert(entry.facts, _Placed)
    except (msgspec.ValidationError, OverflowError):
        return None
    actor = entry.facts.get(ACTOR)
    job_ids = None if said.job_ids is None else tuple(said.job_ids)
    seq, by = entry.place.seq, actor if isinstance(actor, str) else None
    return Hold(said.hold_id, seq, entry.hlc, said.reason, job_ids, said.where, by, entry.log)


def _widened(known: Hold, other: Hold) -> Hold:
    """A hold that two entries place holds what either does."""
    if known.job_ids is None or other.job_ids is None:
        return known._replace(job_ids=None)
    return known._replace(job_ids=tuple(dict.fromkeys((*known.job_ids, *other.job_ids))))


def _entry(row: Sequence[Any]) -> _Entry | None:
    """The entry of a row about ``SUBJECT``; None if an edit made it none."""
    seq, t_hlc, _, _, _, job_id, action, _, _, link, _, text, origin = row
    if job_id != SUBJECT or type(seq) is not int or not (isinstance(link, str) and isinstance(t_hlc, str)):
        return None
    facts, log = _object_in(text), None if origin is None else _object_in(origin).get("log")
    is_own = origin is None
    if action == SystemAction.CONFLICT and (held := held_event(facts, SUBJECT)) is not None:
        action, facts, t_hlc, is_own = held.event.action, _object_in(held.payload), held.event.t_hlc, False
    return _Entry(Place(seq, link), t_hlc, action, facts, is_own, log if isinstance(log, str) else None)


def _object_in(text: Any) -> dict[str, Any]:
    try:
        value = orjson.loads(text)
    except (ValueError, TypeError):
        return {}
    return value if isinstance(value, dict) else {}


# --- what may leave -------------------------------------------------------------------------------


class Why(StrEnum):
    """Why an entry stops a prefix, in the order that decides between reasons of one seq."""

    SYSTEM = "system"
    NO_PERIOD = "no-period"
    YOUNG = "young"
    HOLD = "hold"
    OPEN_JOB = "open-job"
    UNSIGNED = "unsigned"
    ARCHIVE = "archive"
    EXCLUSION = "exclusion"
    COMMITMENT = "commitment"
    PRIVACY = "privacy"
    KEYED = "keyed"
    WEBHOOK = "webhook"
    ASKED = "to-seq"


WHYS: Final = tuple(Why)


class Stop(NamedTuple):
    """An entry that must stay, with all after it."""

    seq: int
    why: Why
    detail: str = ""


class Plan(NamedTuple):
    """The prefix that may leave: up to ``to_seq``, which is the floor if nothing may."""

    to_seq: int
    stopped_by: Stop | None


def plan(floor_seq: int, signed_ends: Iterable[int], stops: Iterable[Stop]) -> Plan:
    """The prefix that may leave of a chain whose entries up to ``floor_seq`` have left: it ends where a signed snapshot
    ends, before every entry that stops it."""
    first = min(stops, key=lambda stop: (stop.seq, WHYS.index(stop.why)), default=None)
    ends = [end for end in signed_ends if end > floor_seq and (first is None or end < first.seq)]
    return Plan(max(ends, default=floor_seq), first)


class OpenJob(NamedTuple):
    """A job that has not ended."""

    job_id: str
    first_seq: int
    last_ms: int
    """Time of its newest entry, ms since 1970."""


def stopping_jobs(jobs: Iterable[OpenJob], now_ms: int, period_s: int) -> Stop | None:
    """The first of these jobs that stops a prefix: its newest entry is younger than twice the
    period. An older one stops nothing."""
    waits_ms = now_ms - 2 * period_s * 1000
    first = min((job for job in jobs if job.last_ms > waits_ms), key=lambda job: job.first_seq, default=None)
    return None if first is None else Stop(first.first_seq, Why.OPEN_JOB, f"job {first.job_id} has not ended")


def stopping_holds(holds: Iterable[Hold], floor_seq: int, first_seqs: Mapping[str, int]) -> Iterator[Stop]:
    """Where each hold stops a prefix; ``first_seqs`` has the first entry of each held job that has one. The entry that
    places the hold stays, too."""
    for hold in holds:
        held = [first_seqs[each] for each in hold.job_ids or () if each in first_seqs]
        seq = floor_seq + 1 if hold.job_ids is None else min([hold.seq, *held])
        yield Stop(seq, Why.HOLD, f"hold {hold.hold_id}: {hold.reason}")


def archived(what: str, floor: Floor | None) -> ArchivedError:
    """The error that ``what`` has left, of a chain with this floor."""
    if floor is None:
        return ArchivedError(
            f"{what} has left the database, and no PRUNED entry that counts says where to: run tally verify",
            archive="",
            manifest=None,
            verified_from_seq=1,
        )
    return ArchivedError(
        f"{what} has left: entries up to seq {floor.to_seq} are in the archive {floor.archive}",
        archive=floor.archive,
        manifest=floor.manifest,
        verified_from_seq=floor.to_seq + 1,
    )
