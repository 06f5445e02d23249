"""Prunes a prefix of a chain: everything is proved first, then the entry PRUNED is chained, and rows leave later
(``removal``).

    1. plan             what may leave, by the entries and tables                      (planning)
    2. verify           the prefix and its jobs; the whole chain, if it was not verified for long
    3. read back        the archive: every file of the prefix, up to a link that is that of the chain
    4. compare          a hold may have been placed meanwhile: then plan again
    5. chain the entry  signed; it counts only if no other entry about retention came between

A crash before step 5 leaves nothing. After it any node removes the rows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from app.runtime.logs import log
from app.share.retention.planning import PLAN_TIMEOUT_S, Planned, Planner, StoredArchive
from app.store import Connection, retention
from app.store.appended import ChainPosition
from app.store.notary import read_link, read_tiles, snapshot_ending_at
from app.store.reading import Pool, reading
from ledger.errors import (
    ArchiveInvalidError,
    ChainDamagedError,
    InvalidInputError,
    ProblemError,
    ProofError,
    reported_as,
)
from ledger.facts import problems
from ledger.facts.events import SYSTEM_TENANT, SystemAction
from ledger.hlc import Hlc
from ledger.machines.retention import Place, Retention
from ledger.merkle import Frontier, tiles
from ledger.verification.verdict import Verdict, damaged
from signing.snapshot import open_snapshot

if TYPE_CHECKING:
    from pipeline.archive.ranges import ArchivedEnd

PRUNES_AT_ONCE_MAX: Final = 1
"""Each verifies what leaves, and reads it back from the archive; others wait."""

Enter = Callable[[SystemAction, str, Mapping[str, object], Place, str | None], Awaitable[ChainPosition | None]]
"""Writes an entry that loosens behind the newest entry about retention; None if another came between."""


class Pruned(NamedTuple):
    """The outcome of a prune."""

    planned: Planned
    """What may leave, or may have left."""
    seq: int | None
    """Of the PRUNED entry, None if nothing leaves or it was a dry run."""


@dataclass(kw_only=True, eq=False)
class Prunes:
    """Prunes the chains of one ledger for one node."""

    planner: Planner
    pool: Pool
    archive: StoredArchive | None
    verify: Callable[[str, int], Awaitable[Verdict]]
    """Verifies the entries of a tenant up to a seq, and the jobs that have one of them, or the whole chain."""
    enter: Enter
    wake_removal: Callable[[], None]

    def __post_init__(self) -> None:
        self._turns = asyncio.Semaphore(PRUNES_AT_ONCE_MAX)

    async def prune(self, tenant_id: str, to_seq: int | None, actor: str | None, *, dry_run: bool = False) -> Pruned:
        """Let the prefix leave that may, at most up to ``to_seq``. With ``dry_run`` nothing is written.

        Raises:
            TenantNotFoundError: there is no such tenant.
            InvalidInputError: ``_system`` keeps everything.
            ChainDamagedError: the chain does not verify.
            ArchiveInvalidError: the archive lacks what its manifests say, or holds other entries.
            ProblemError: another change of retention was chained meanwhile; nothing leaves.
            LedgerError: the archive or PostgreSQL cannot be read, or the entry cannot be signed or chained.
        """
        if tenant_id == SYSTEM_TENANT:
            raise InvalidInputError("tenant_id: _system keeps everything", ("tenant_id",))
        async with self._turns:
            # 1. Plan.
            planned = await self.planner.plan(tenant_id, to_seq)
            if dry_run or planned.plan.to_seq <= planned.retention.floor_seq:
                return Pruned(planned, None)
            # 2. Verify what leaves.
            verdict = await self._verify(tenant_id, planned.plan.to_seq)
            # 3. Read the archive back.
            archived = await self._read_back(tenant_id, planned.retention.floor_seq + 1, planned.plan.to_seq)
            # 4. What may stop it since; 5. chain the entry.
            if not await self.planner.is_as_planned(tenant_id, planned):
                before, planned = planned, await self.planner.plan(tenant_id, planned.plan.to_seq)
                if planned.plan.to_seq <= planned.retention.floor_seq:
                    return Pruned(planned, None)
                if planned.plan.to_seq == before.plan.to_seq:
                    # Not the bound of the second plan stopped it, but what stopped the first.
                    planned = planned._replace(plan=before.plan)
                else:
                    verdict = await self._verify(tenant_id, planned.plan.to_seq)
            async with reading(self.pool, timeout_s=PLAN_TIMEOUT_S, snapshot=True) as connection:
                facts = await self._facts(connection, tenant_id, planned, archived, verdict)
            place = await self.enter(SystemAction.PRUNED, tenant_id, facts, planned.retention.newest, actor)
            if place is None:
                raise ProblemError(
                    problems.RETENTION_CONFLICT,
                    f"a hold, a policy or another prune of tenant {tenant_id} was chained before this one, so nothing "
                    "leaves by it: ask again",
                )
            log.info("chain_pruned", tenant_id=tenant_id, to_seq=planned.plan.to_seq, seq=place.seq, by=actor)
            self.wake_removal()
            return Pruned(planned, place.seq)

    async def _verify(self, tenant_id: str, to_seq: int) -> Verdict:
        if not (verdict := await self.verify(tenant_id, to_seq)).is_valid:
            raise ChainDamagedError(tenant_id, "nothing leaves a chain that does not verify", verdict.first_break)
        async with reading(self.pool, timeout_s=PLAN_TIMEOUT_S, snapshot=True) as connection:
            await retention.check_later_entries(connection, self.planner.folds.check, tenant_id, to_seq)
        return verdict

    async def _read_back(self, tenant_id: str, from_seq: int, to_seq: int) -> Sequence[ArchivedEnd]:
        """The manifests that cover these entries, once their files are read back and end in the chain's own link."""
        assert self.archive is not None
        keyring = await self.planner.keys_of(tenant_id)
        archived = await asyncio.to_thread(self.archive.read_back, tenant_id, keyring, from_seq, to_seq)
        if not archived or archived[-1].to_seq < to_seq:
            raise ArchiveInvalidError(f"the archive of tenant {tenant_id} ends before seq {to_seq}", to_seq)
        async with reading(self.pool) as connection:
            for each in archived:
                if await read_link(connection, tenant_id, each.to_seq) != each.chain_link:
                    raise ArchiveInvalidError(
                        f"the archive of tenant {tenant_id} has another entry at seq {each.to_seq} than the chain",
                        each.to_seq,
                    )
        return archived

    async def _facts(
        self,
        connection: Connection,
        tenant_id: str,
        planned: Planned,
        archived: Sequence[ArchivedEnd],
        verdict: Verdict,
    ) -> dict[str, object]:
        """The facts of the PRUNED entry but ``after``, actor and statement."""
        known, to_seq = planned.retention, planned.plan.to_seq
        from_seq = known.floor_seq + 1
        chain_link = await read_link(connection, tenant_id, to_seq)
        stored = await read_tiles(connection, tenant_id, tiles.root_tiles(to_seq))
        with reported_as(partial(damaged, tenant_id, "tree", to_seq), "the stored tree is incomplete", ProofError):
            compact_range = tiles.compact_range(to_seq, tiles.getter(stored))
        # A tile that ends behind the prefix is compared here.
        if [*verdict.frontiers.get(to_seq, compact_range)] != [*compact_range]:
            raise damaged(tenant_id, "tree", to_seq, "the stored tree is not that of the entries")
        envelope = await snapshot_ending_at(connection, tenant_id, to_seq)
        assert envelope is not None
        covering = next(each for each in archived if each.to_seq >= to_seq)
        return {
            "from_seq": from_seq,
            "to_seq": to_seq,
            "entry_count": to_seq - from_seq + 1,
            "chain_link": chain_link,
            "tree_root": Frontier.restore(to_seq, compact_range).root().hex(),
            "compact_range": [each.hex() for each in compact_range],
            "snapshot": open_snapshot(envelope, None).payload_sha256,
            "highest_hlc": await self._highest_hlc(connection, tenant_id, known, from_seq, to_seq),
            "archive": "" if self.archive is None else self.archive.url,
            "manifests": [covering.manifest],
            "period_s": known.period_s,
            **({} if known.minimum_s is None else {"minimum_s": known.minimum_s}),
            "holds": sorted(known.holds),
            "decided_ms": planned.now_ms,
            "never_ended": planned.never_ended,
            **planned.carried.facts(),
        }

    async def _highest_hlc(
        self, connection: Connection, tenant_id: str, known: Retention, from_seq: int, to_seq: int
    ) -> str:
        found = [await retention.highest_hlc(connection, tenant_id, from_seq, to_seq)]
        if known.floor is not None:
            found.append(Hlc.parse(known.floor.highest_hlc))
        return max(each for each in found if each is not None).text()


def shown_stop(planned: Planned) -> dict[str, Any] | None:
    """What stops the prefix, as answers have it."""
    stop = planned.plan.stopped_by
    return None if stop is None else {"seq": stop.seq, "why": str(stop.why), "detail": stop.detail}
