"""Compares two ledgers: finds the events that each side lacks, and writes bundles that supply them.

::

    chains    the driver    are both one history? stored links are compared, a few of each     pipeline.diff.events
    links     Spark         the same by links that are computed from every row                 pipeline.diff.events
    events    Spark         sets of events, joined by their ids                                pipeline.diff.events
    cover     the driver    ranges of seqs that hold what the other lacks                      pipeline.diff.repair
    endings   the driver    where such a range may end, so that a checkpoint covers it         pipeline.diff.repair
    repair    the driver    those ranges as signed bundles                                     pipeline.diff.repair

Two chains with an equal link share one history up to it, whatever their rows contain; ``tally pipeline verify``
checks rows against links. Chains of different logs never share a link, but may hold the same events, so these are
compared as sets.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ledger.errors import InvalidInputError, NotFoundError, TenantNotFoundError
from ledger.exit_code import ExitCode
from ledger.facts.events import SYSTEM_TENANT
from pipeline.diff.events import (
    Chain,
    Meeting,
    chains_of,
    conflicts,
    differences,
    events,
    first_differences,
    forked_log,
    meet,
    overlap,
    parting,
    without_left,
)
from pipeline.diff.repair import GAP_MAX, SeqRange, WrittenBundle, cover, write_bundles
from pipeline.places import OpenPlace, Piece
from pipeline.places.ledgers import folder_of
from pipeline.places.protocol import ChainName
from signing.keys import Signer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


SIDES: Final = ("a", "b")
CONFLICTS_LISTED_MAX: Final = 1000
"""Most conflicts listed, over all tenants; all are counted."""

Stage = Callable[[str], AbstractContextManager[None]]
"""Context that shows one stage of the work."""


@dataclass
class TenantDiff:
    """The difference of the two ledgers in one tenant."""

    name: ChainName
    compared: str
    """``merkle`` if links were sufficient, ``hlc-ranges`` if sets of events were compared."""
    only_in: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SIDES, 0))
    """Events that only this side has."""
    first_difference: dict[str, Any] | None = None
    """The first seq at which the chains hold different entries, with their links; None if there is none."""
    conflict_count: int = 0
    conflicts: list[dict[str, Any]] = field(default_factory=list)
    """Events that claim one HLC, one on each side; the first ``CONFLICTS_LISTED_MAX`` of all tenants."""
    missing: dict[str, list[SeqRange]] = field(default_factory=lambda: {side: [] for side in SIDES})
    """Ranges of this side's chain that contain all events only it has, and few others."""
    forked_log: str | None = None
    """The log of both chains if they fork: one was rewritten, or continued from a copy."""
    pruned_to: dict[str, int] = field(default_factory=dict)
    """Seq up to which entries left a side with a prune; what the other has of them is no difference."""
    left: int = 0
    """Entries of one side alone that are in no written bundle, because no checkpoint covers them yet."""

    @property
    def is_equal(self) -> bool:
        """Whether both sides have the same events."""
        return not any(self.only_in.values())

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return self.name.named(
            {
                "tenant_id": self.name.tenant_id,
                "equal": self.is_equal,
                "compared": self.compared,
                **{f"only_in_{side}": count for side, count in self.only_in.items()},
                "conflict_count": self.conflict_count,
                "conflicts": self.conflicts,
                "first_difference": self.first_difference,
                "forked_log": self.forked_log,
                "unsigned": self.left,
                **{f"pruned_to_{side}": seq for side, seq in self.pruned_to.items()},
            }
        )


@dataclass(frozen=True)
class Diff:
    """The result of a comparison."""

    tenants: Sequence[TenantDiff]
    written: Sequence[WrittenBundle] = ()

    @property
    def is_equal(self) -> bool:
        """Whether both ledgers have the same events of every tenant."""
        return all(tenant.is_equal for tenant in self.tenants)

    @property
    def exit_code(self) -> ExitCode:
        """TAMPERED if one log has two histories, INCOMPLETE if a side lacks events."""
        if any(tenant.forked_log is not None for tenant in self.tenants):
            return ExitCode.TAMPERED
        return ExitCode.FINE if self.is_equal else ExitCode.INCOMPLETE

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "equal": self.is_equal,
            "tenants": [tenant.to_json() for tenant in self.tenants],
            "bundles": [each.to_json() for each in self.written],
        }


def diff(
    spark: SparkSession,
    a: OpenPlace,
    b: OpenPlace,
    *,
    tenants: Collection[str] = (),
    by_rows: bool = False,
    output: Path | None = None,
    signer: Signer | None = None,
    stage: Stage = lambda what: nullcontext(),
) -> Diff:
    """Compare two ledgers, or several pairs of ledgers that have the same name on both sides. With ``output``, write
    the entries that each side lacks as bundles.

    Args:
        spark: the session.
        a: the first ledger, open until this returns.
        b: the second ledger, likewise.
        tenants: tenants to compare, in every pair that has them; if empty, all tenants of either ledger.
        by_rows: compute links and digests from the rows instead of trusting stored ones.
        output: a folder; ``to-a`` and ``to-b`` are created in it, and must be empty if they exist.
        signer: signs the bundles; required with ``output``.
        stage: shows the work.

    Raises:
        NotFoundError: one ledger is an empty archive.
        TenantNotFoundError: neither has a tenant that was named.
        InvalidInputError: ``to-a`` or ``to-b`` holds something already, or there is no ``signer``.
        ChainDamagedError: rows for a bundle are invalid.
        SigningUnavailableError: the signer cannot be reached.
        OSError: a file cannot be written.
    """
    for place in (a, b):
        # A folder mistaken for an archive would seem to lack everything.
        for each in place.ledgers().values():
            if each.is_copy and not each.tenants():
                raise NotFoundError(f"there is no archive in {each}")
    if output is not None:
        _refuse_used(output)
        if signer is None:
            raise InvalidInputError("bundles need a key to be signed with")
    names = _names(a, b, tenants)
    chains = {"a": chains_of(a, names), "b": chains_of(b, names)}
    with stage("comparing chains"):
        found, apart = _by_links(chains, _met(spark, a, b, chains, by_rows=by_rows), names)
    if apart:
        with stage("comparing events"):
            _by_events(spark, a, b, apart, chains, by_rows=by_rows)
    tenants_found = sorted([*found, *(each for each, _ in apart.values())], key=lambda each: str(each.name))
    written: list[WrittenBundle] = []
    if output is not None and signer is not None:
        with stage("writing bundles"):
            written = _write(tenants_found, chains, output, signer)
    return Diff(tenants_found, written)


def _refuse_used(output: Path) -> None:
    """Reject a used folder: its bundles would be imported along with the new ones."""
    for side in SIDES:
        folder = output / f"to-{side}"
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise InvalidInputError(
                f"{folder} is there already and not an empty folder: name another --out, or empty it"
            )


Apart = dict[str, tuple[TenantDiff, int]]
"""Tenants whose events must be compared, by the name of the chain, with the last seq common to their chains."""
Chains = Mapping[str, Mapping[str, Chain]]
"""By side and name of the chain."""


def _names(a: OpenPlace, b: OpenPlace, wanted: Collection[str]) -> list[str]:
    held = {*a.tenants(), *b.tenants()}
    if not wanted:
        return sorted(held)
    for name in sorted(set(wanted) - {ChainName.parse(chain).tenant_id for chain in held}):
        raise TenantNotFoundError(f"neither of them has a tenant {name!r}")
    return sorted({*a.chains_of(wanted), *b.chains_of(wanted)})


def _met(spark: SparkSession, a: OpenPlace, b: OpenPlace, chains: Chains, *, by_rows: bool) -> dict[str, Meeting]:
    """The meeting of the two chains of each tenant that both ledgers have."""
    pairs = {name: (chain, chains["b"][name]) for name, chain in chains["a"].items() if name in chains["b"]}
    whole = {
        name: last
        for name, pair in pairs.items()
        if by_rows and all(chain.has_beginning for chain in pair) and (last := overlap(*pair)) is not None
    }
    differ = first_differences(spark, a, b, whole) if whole else {}
    return {
        name: parting(whole[name], differ.get(name)) if name in whole else meet(*pair) for name, pair in pairs.items()
    }


def _by_links(chains: Chains, met: Mapping[str, Meeting], names: Sequence[str]) -> tuple[list[TenantDiff], Apart]:
    found: list[TenantDiff] = []
    apart: Apart = {}
    for name in names:
        sides = {side: chains[side][name] for side in SIDES if name in chains[side]}
        tenant = TenantDiff(ChainName.parse(name), "merkle")
        tenant.pruned_to = {side: each.floor.to_seq for side, each in sides.items() if each.floor is not None}
        is_system = tenant.name.tenant_id == SYSTEM_TENANT
        held: dict[str, SeqRange] = {}
        if (meeting := met.get(name)) is not None and (seq := meeting.first_difference) is not None:
            tenant.first_difference = {"seq": seq, **{side: chain.link_at(seq) for side, chain in sides.items()}}
        if meeting is None:  # Each ledger has its own ``_system`` chain.
            held = dict.fromkeys(() if is_system else sides, SeqRange(0, 0))
        elif meeting.is_one:  # Each side holds a range of the one history.
            # A side that was pruned held what left.
            first_seqs = {side: 1 if side in tenant.pruned_to else sides[side].first_seq for side in SIDES}
            a, b = (SeqRange(first_seqs[side], sides[side].last_seq) for side in SIDES)
            held = {"a": b, "b": a}
        elif is_system:  # They agree up to the fork.
            held = dict.fromkeys(sides if meeting.common else (), SeqRange(1, meeting.common))
        else:
            tenant.compared, tenant.forked_log = "hlc-ranges", forked_log(sides["a"], sides["b"], meeting)
            apart[name] = tenant, meeting.common
        for side, of_other in held.items():
            _note_rest(tenant, side, sides[side], of_other)
        if held:
            found.append(tenant)
    return found, apart


def _note_rest(tenant: TenantDiff, side: str, chain: Chain, held: SeqRange) -> None:
    """Record the entries of ``chain`` outside ``held``, the other side's range, as entries of ``side`` alone."""
    before = SeqRange(chain.first_seq, min(chain.last_seq, held.from_seq - 1))
    after = SeqRange(max(chain.first_seq, held.to_seq + 1), chain.last_seq)
    rests = [rest for rest in (before, after) if 1 <= rest.from_seq <= rest.to_seq]
    tenant.only_in[side] = sum(rest.to_seq - rest.from_seq + 1 for rest in rests)
    tenant.missing[side] = cover(rests)


def _by_events(spark: SparkSession, a: OpenPlace, b: OpenPlace, apart: Apart, chains: Chains, *, by_rows: bool) -> None:
    from pyspark import StorageLevel
    from pyspark.sql import functions

    of_a, of_b = (events(spark, _pieces(place, apart), by_rows=by_rows) for place in (a, b))
    left_to = {
        (name, other): floor.highest_hlc
        for side, other in (("a", "b"), ("b", "a"))
        for name in apart
        if (floor := chains[side][name].floor) is not None
    }
    found = without_left(differences(of_a, of_b), left_to).persist(StorageLevel.DISK_ONLY)
    summary = found.groupBy("tenant_id", "side", functions.floor(found.seq / GAP_MAX).alias("stretch")).agg(
        functions.min("seq"), functions.max("seq"), functions.count("seq")
    )
    ranges: dict[tuple[str, str], list[SeqRange]] = {}
    for tenant_id, side, _, first, last, count in summary.collect():
        apart[tenant_id][0].only_in[side] += count
        ranges.setdefault((tenant_id, side), []).append(SeqRange(first, last))
    for (tenant_id, side), missing in ranges.items():
        apart[tenant_id][0].missing[side] = cover(missing)
    if any(all(tenant.missing.values()) for tenant, _ in apart.values()):
        _note_conflicts(conflicts(found), apart)
    found.unpersist()


def _note_conflicts(found: DataFrame, apart: Apart) -> None:
    for tenant_id, count in found.groupBy("tenant_id").count().collect():
        apart[tenant_id][0].conflict_count = count
    for row in found.orderBy("tenant_id", "seq_a", "seq_b").limit(CONFLICTS_LISTED_MAX).collect():
        apart[row.tenant_id][0].conflicts.append({"hlc": row.hlc, "seq_a": row.seq_a, "seq_b": row.seq_b})


def _pieces(place: OpenPlace, apart: Apart) -> list[Piece]:
    """The pieces of these tenants after their common prefix."""
    names: dict[int, list[str]] = {}
    for name, (_, common) in apart.items():
        names.setdefault(common, []).append(name)
    return [piece for common, some in names.items() for piece in place.pieces(some, from_seq=common + 1)]


def _write(tenants: Sequence[TenantDiff], chains: Chains, output: Path, signer: Signer) -> list[WrittenBundle]:
    written: list[WrittenBundle] = []
    for tenant in tenants:
        if tenant.name.tenant_id == SYSTEM_TENANT or tenant.forked_log is not None:
            continue
        for side, lacking in (("a", "b"), ("b", "a")):
            if tenant.missing[side]:
                chain, folder = chains[side][str(tenant.name)], output / f"to-{lacking}"
                if tenant.name.ledger is not None:
                    folder /= folder_of(tenant.name.ledger)
                made, left = write_bundles(chain, tenant.missing[side], lacking, folder, signer)
                written += [each._replace(ledger=tenant.name.ledger) for each in made]
                tenant.left += left
    return written
