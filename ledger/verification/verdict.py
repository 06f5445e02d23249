"""The findings of a verification: eight verdicts, the first break, and the number of breaks of each kind.

Each kind of break belongs to one aspect of the ledger, and each aspect has one verdict::

    ok           every existing part was checked and is right
    broken       at least one break
    unknown_key  signatures only: made by a key that is not known, had expired or was revoked
    not_checked  at least one part could not be checked, and the rest has no break

The first break is the one of lowest seq, then of the first kind in the order of ``KINDS``. Whatever the length
of the chain, one break of each kind is kept, and a count. Findings do not depend on the order of the checks, nor on
their distribution::

    merge(a, b) == merge(b, a)      merge(a, merge(b, c)) == merge(merge(a, b), c)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from ledger.errors import ChainDamagedError
from ledger.machines.retention import Floor

ASPECT_OF_KIND: Final[Mapping[str, str]] = {
    "gap": "links",
    "duplicate-seq": "links",
    "payload-digest": "payloads",
    "hlc-columns": "links",
    "prev-link": "links",
    "link": "links",
    "malformed": "payloads",
    "head": "head",
    "tail-truncated": "head",
    "snapshot-root": "snapshots",
    "snapshot-signature": "signatures",
    "snapshot-chain": "snapshots",
    "caller-signature": "signatures",
    "tree": "tree",
    "projection": "projection",
    "rollback": "checkpoint",
}
"""Kinds of break, in the order that decides between breaks of one seq, and the aspect each belongs to."""

KINDS: Final = tuple(ASPECT_OF_KIND)
ASPECTS: Final = ("links", "payloads", "head", "snapshots", "signatures", "tree", "projection", "checkpoint")

_CHAIN_KINDS: Final = ("gap", "prev-link", "link")
"""Kinds that break the chain at their seq. Of a duplicated seq the first row is used, so the chain breaks after it."""
_TEXT_MAX: Final = 400
"""Characters kept of an expected or actual value: an edited row can hold a megabyte."""


class Break(NamedTuple):
    """One place where the ledger is not what it must be."""

    seq: int
    kind: str
    detail: str
    expected: str | int | None = None
    actual: str | int | None = None


def damaged(tenant_id: str, kind: str, seq: int, detail: str) -> ChainDamagedError:
    """The error of a reader that met this break."""
    return ChainDamagedError(tenant_id, detail, Break(seq, kind, detail, None, detail))


@dataclass(slots=True)
class Found:
    """The content of findings, as plain values."""

    first: dict[str, Break] = field(default_factory=dict)
    """By kind."""
    counts: dict[str, int] = field(default_factory=dict)
    begun: set[str] = field(default_factory=set)
    undecided: set[str] = field(default_factory=set)
    has_broken_signature: bool = False


class Findings:
    """Collects what the checks find, in bounded memory, in any order."""

    def __init__(self, on_break: Callable[[Break], object] | None = None) -> None:
        """``on_break`` is called with each break as it is added."""
        self.found = Found()
        """The content so far; it grows with these findings."""
        self.on_break = on_break

    def begin(self, *aspects: str) -> None:
        """Mark these aspects as checked."""
        self.found.begun.update(aspects)

    def leave_undecided(self, aspect: str) -> None:
        """Record that part of this aspect cannot be checked, so that it is not ``ok``."""
        self.found.undecided.add(aspect)

    def add(
        self,
        kind: str,
        seq: int,
        detail: str,
        expected: str | int | None = None,
        actual: str | int | None = None,
        *,
        is_key_unknown: bool = False,
    ) -> None:
        """Add a break; ``is_key_unknown`` marks a signature that cannot be judged without its key."""
        self.found.counts[kind] = self.found.counts.get(kind, 0) + 1
        if ASPECT_OF_KIND[kind] == "signatures" and not is_key_unknown:
            self.found.has_broken_signature = True
        held = self.found.first.get(kind)
        if self.on_break is None and held is not None and seq > held.seq:
            return
        found = Break(seq, kind, detail, _shortened(expected), _shortened(actual))
        self._keep(found)
        if self.on_break is not None:
            self.on_break(found)

    def _keep(self, found: Break) -> None:
        if (held := self.found.first.get(found.kind)) is None or _order(found) < _order(held):
            self.found.first[found.kind] = found

    def merge(self, found: Found) -> None:
        """Add findings from elsewhere; ``on_break`` is not called for these."""
        mine = self.found
        for each in found.first.values():
            self._keep(each)
        for kind, count in found.counts.items():
            mine.counts[kind] = mine.counts.get(kind, 0) + count
        mine.begun |= found.begun
        mine.undecided |= found.undecided
        mine.has_broken_signature |= found.has_broken_signature

    def has(self, *aspects: str) -> bool:
        """Whether any of these aspects has a break."""
        return any(ASPECT_OF_KIND[kind] in aspects for kind in self.found.first)

    def chain_broken_by(self, seq: int) -> bool:
        """Whether the chain itself breaks at or below ``seq``, which explains other differences there."""
        first, twice = self.found.first, self.found.first.get("duplicate-seq")
        if twice is not None and twice.seq < seq:
            return True
        return any(kind in first and first[kind].seq <= seq for kind in _CHAIN_KINDS)

    def first_break(self) -> Break | None:
        """The break of lowest seq, then of the first kind."""
        return min(self.found.first.values(), key=lambda found: (found.seq, KINDS.index(found.kind)), default=None)

    def counts(self) -> dict[str, int]:
        """Number of breaks by kind, those with any."""
        return {kind: self.found.counts[kind] for kind in KINDS if kind in self.found.counts}

    def verdicts(self) -> dict[str, str]:
        """The verdict on each aspect."""
        return {aspect: self._verdict(aspect) for aspect in ASPECTS}

    def _verdict(self, aspect: str) -> str:
        if self.has(aspect):
            return "broken" if aspect != "signatures" or self.found.has_broken_signature else "unknown_key"
        return "ok" if aspect in self.found.begun and aspect not in self.found.undecided else "not_checked"


def begin_aspects(findings: Findings, *, is_from_start: bool) -> None:
    """Mark the aspects of entries and snapshots as checked, from the first entry on or from a later one. Signatures are
    checked once there is one of the ledger's to judge."""
    findings.begin("links", "payloads", "snapshots")
    if is_from_start:
        findings.begin("tree")


def is_number(value: object) -> bool:
    """Whether a stored value is an integer; an edited column may hold another type."""
    return isinstance(value, int)


def _order(found: Break) -> tuple[int, str, str, str]:
    """Lowest seq first; breaks of one kind and seq by their texts, so that the order of discovery does not matter."""
    return found.seq, found.detail, repr(found.expected), repr(found.actual)


def _shortened(value: object) -> str | int | None:
    if value is not None and not isinstance(value, str | int):
        value = str(value)
    if isinstance(value, str) and len(value) > _TEXT_MAX:
        return f"{value[:_TEXT_MAX]}… ({len(value)} characters)"
    return value


class Anchor(NamedTuple):
    """An external witness's statement about the first ``size`` entries, kept with the ledger.

    An attacker who can cut the chain can remove the statement too. So it can prove the chain broken but not complete,
    and ``compared_with`` does not name it. The caller has judged the statement: only status ``ok`` is compared.

    ``status`` is ``ok``; ``broken``: it holds and the entries are others; ``invalid``: it does not hold itself, so it
    says nothing; ``not_checked``: one of both could not be checked. ``detail`` says why it is not ``ok``.
    """

    kind: str
    """``witness`` or ``rfc3161``."""
    by: str
    """Name of the witness, or address of the authority."""
    time: str
    """RFC 3339."""
    size: int
    root: bytes
    status: str = "ok"
    detail: str | None = None
    key: str = ""
    """Verifier key of the witness, by which a policy counts it; empty if it does not count."""

    def to_json(self) -> dict[str, Any]:
        """As verdict objects have it."""
        return {
            "kind": self.kind,
            "by": self.by,
            "time": self.time,
            "to_seq": self.size,
            "status": self.status,
            "detail": self.detail,
        }


class Head(NamedTuple):
    """The end of a chain: its row in ``chain_heads``, or its last entry. Empty at seq 0."""

    seq: int
    chain_link: str | None
    hlc: str | None


@dataclass(frozen=True)
class Verdict:
    """The outcome of one verification. Entries ``from_seq..to_seq`` were read; none if ``to_seq < from_seq``."""

    tenant_id: str
    entries_checked: int
    from_seq: int
    to_seq: int
    head: Head
    """The last entry of the chain, even if ``to_seq`` is lower."""
    verdicts: Mapping[str, str]
    first_break: Break | None
    breaks: Mapping[str, int]
    compared_with: str | None
    """Sources of the checkpoints that the chain was compared with, None if there were none."""
    signed_to: Head
    """The last entry that an unbroken signed snapshot covers; seq ``from_seq - 1`` if there was none."""
    covered_to: Head
    """As ``signed_to``, by a snapshot that may be unsigned."""
    anchors: tuple[Anchor, ...] = ()
    """Statements of external witnesses about the first entries of the chain."""
    covered_digest: str | None = None
    """Digest of the snapshot that ends at ``covered_to``, which the next one names."""
    commitments: int = 0
    """Entries read that are proposals or capacities, and not imported."""
    floor: Floor | None = None
    """What left the chain before its first entry, None if nothing did."""
    to_link: Any = field(default=None, compare=False)
    """Stored chain link of entry ``to_seq``; the expected link if no entry was read."""
    frontiers: Mapping[int, Sequence[bytes]] = field(default_factory=dict, compare=False)
    """By size, right edges of the tree over the first entries: at ``covered_to`` and ``to_seq``, as far as no entry is
    missing and the tree before the first was given."""

    @property
    def first_seq(self) -> int:
        """The first entry that has not left with a prune."""
        return 1 if self.floor is None else self.floor.to_seq + 1

    @property
    def is_from_start(self) -> bool:
        """Whether the first of these entries was read."""
        return self.from_seq == self.first_seq

    @property
    def is_valid(self) -> bool:
        """Whether nothing is broken and no key is unknown; unchecked aspects are ignored."""
        return not {"broken", "unknown_key"} & set(self.verdicts.values())

    def to_json(self, duration_ms: float) -> dict[str, Any]:
        """The verdict object of the interfaces, and ``breaks``, the number of breaks by kind."""
        return {
            "tenant_id": self.tenant_id,
            "valid": self.is_valid,
            "entries_checked": self.entries_checked,
            "from_seq": self.from_seq,
            "to_seq": self.to_seq,
            "verified_from_seq": self.first_seq,
            "pruned": None if self.floor is None else self.floor.shown(),
            "head": self.head._asdict(),
            "verdicts": dict(self.verdicts),
            "first_break": self.first_break._asdict() if self.first_break is not None else None,
            "breaks": dict(self.breaks),
            "compared_with": self.compared_with,
            "anchors": [anchor.to_json() for anchor in self.anchors],
            "signed_to_seq": self.signed_to.seq,
            "unsigned_entries": max(0, self.to_seq - self.signed_to.seq),
            "commitments": self.commitments,
            "duration_ms": round(duration_ms, 1),
        }


_GRAVER: Final = ("ok", "not_checked", "unknown_key", "broken")
"""Verdicts on one aspect of several parts, in ascending precedence."""
_GRAVER_LAST: Final = ("not_checked", "ok", "unknown_key", "broken")
"""Verdicts on checkpoints in ascending precedence, for several comparisons."""


def graver(one: str, other: str) -> str:
    """The verdict on an aspect of two parts."""
    return max(one, other, key=_GRAVER.index)


def rollback(size: int, detail: str, expected: str, actual: str | None) -> dict[str, Any]:
    """The break that the first ``size`` entries are not those of a checkpoint; roots are hex."""
    return {"seq": size, "kind": "rollback", "detail": detail, "expected": expected, "actual": actual}


def with_checkpoint(
    verdict: Mapping[str, Any], outcome: str, source: str, found_break: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """``verdict`` with the outcome of comparing a checkpoint that ``source`` holds, and its break ``found_break``. An
    aspect that was broken before stays broken.
    """
    found = dict(verdict)
    verdicts = found["verdicts"] = dict(verdict["verdicts"])
    verdicts["checkpoint"] = max(verdicts["checkpoint"], outcome, key=_GRAVER_LAST.index)
    found["valid"] = not {"broken", "unknown_key"} & set(verdicts.values())
    if outcome != "unknown_key":
        found["compared_with"] = ", ".join(filter(None, (verdict["compared_with"], source)))
    return found if found_break is None else with_break(found, found_break)


_NOT_OF_A_COPY: Final = ("projection", "checkpoint")
"""Aspects that a copy by itself leaves unchecked."""


def quorum_lines(verdict: Mapping[str, Any]) -> list[str]:
    """How far the quorum of a policy covers what a verdict is on, and who is missing; empty without a policy."""
    if (policy := verdict.get("policy")) is None:
        return []
    reach = f"quorum {policy['quorum']} covers entries up to seq {policy['quorum_to_seq']}"
    return [reach if policy["met"] else f"below quorum: {reach}; {', '.join(policy['missing'])}"]


def with_archive(
    verdict: Mapping[str, Any], archived: Mapping[str, Any] | None, refusal: Mapping[str, Any] | None
) -> dict[str, Any]:
    """``verdict`` on a chain, and ``archived`` on the archive of its first entries, as one from seq 1.

    ``archived`` is None if there is no such archive. ``refusal`` is the break that it is not that of the chain, or
    lacks some of what left; then the verdict begins where that of the chain does.
    """
    archived = archived or {"verdicts": {"archive": "not_checked"}, "breaks": {}, "first_break": None}
    found, counts = {**verdict}, dict(verdict["breaks"])
    breaks = [each for each in (verdict["first_break"], archived["first_break"], refusal) if each is not None]
    verdicts = {"archive": "ok", **verdict["verdicts"]}
    is_unread = archived["verdicts"]["archive"] == "broken"
    for aspect, said in archived["verdicts"].items():
        if said != "not_checked" or not (is_unread or aspect in _NOT_OF_A_COPY):
            verdicts[aspect] = graver(verdicts[aspect], said)
    for kind, count in archived["breaks"].items():
        counts[kind] = counts.get(kind, 0) + count
    if refusal is not None:
        verdicts["archive"] = "broken"
        counts[refusal["kind"]] = counts.get(refusal["kind"], 0) + 1
    left_to = 0 if (pruned := verdict.get("pruned")) is None else pruned["to_seq"]
    is_joined = verdicts["archive"] in ("ok", "not_checked") and verdict["from_seq"] == left_to + 1
    if left_to and is_joined:
        found |= {"from_seq": 1, "entries_checked": verdict["entries_checked"] + left_to}
        found["verified_from_seq"] = 1
    found |= {"verdicts": verdicts, "breaks": counts, "first_break": min(breaks, key=_break_order, default=None)}
    found["duration_ms"] = round(verdict["duration_ms"] + archived.get("duration_ms", 0), 1)
    return {**found, "valid": not {"broken", "unknown_key"} & set(verdicts.values())}


def with_break(verdict: Mapping[str, Any], found_break: Mapping[str, Any]) -> dict[str, Any]:
    """``verdict`` with one more break, of the aspect ``checkpoint``."""
    first = min([item for item in (verdict["first_break"], found_break) if item is not None], key=_break_order)
    verdicts = {**verdict["verdicts"], "checkpoint": "broken"}
    kind, counts = found_break["kind"], verdict.get("breaks", {})
    counts = {**counts, kind: counts.get(kind, 0) + 1}
    return {**verdict, "verdicts": verdicts, "valid": False, "first_break": first, "breaks": counts}


def _break_order(found_break: Mapping[str, Any]) -> tuple[int, int]:
    """Lowest seq first; faults of the file or archive, whose kinds are not in ``KINDS``, before those of entries."""
    kind = found_break["kind"]
    return found_break["seq"], KINDS.index(kind) if kind in KINDS else -1
