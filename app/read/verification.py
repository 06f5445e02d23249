"""Verification in the service: on request, at start, and periodically.

On request the service verifies a whole chain. At start and at every interval it verifies only the entries after the
last verified snapshot, and that the entry there is unchanged. The files that this node keeps beside its WAL are read
before the database, so that they are never newer than the rows they are compared with.

How far each chain was verified is kept beside the WAL, where a database administrator cannot reach it, in ``<wal
folder>/verified.json``, replaced by temp file, fsync, rename and directory fsync::

    {"version": 1, "tenants": {"acme": {"seq": 23000, "chain_link": "64 hex digits"}}}

A position is the end of a snapshot, or seq 0, so that verification from there covers whole snapshots. The entry at a
position must still have that link the next time. If the file is missing or damaged, verification starts at seq 1 again,
which is safe.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import asyncpg
import msgspec

from app.read.checking import KeptProcesses, verified
from app.runtime.logs import log
from app.runtime.metrics import Metrics
from app.runtime.postgres import DATABASE_FAULTS
from app.runtime.state.found_breaks import DAMAGED, VERIFICATION, FoundBreaks
from app.runtime.state.kept_files import (
    NO_TENANTS,
    NODE,
    ByTenant,
    KeptByTenant,
    KeptFile,
    LastVerified,
    Verified,
)
from app.runtime.tasks import Slots, end_if_cancelled
from app.store.chain_reader import consistent_reader
from app.store.chain_reads import list_tenants
from app.store.idempotency import KEY_ROW, NamedEntry, named_entries
from app.store.reading import reading, run_in
from ledger.errors import LedgerError, TenantNotFoundError
from ledger.job_index.builder import IndexBuilder
from ledger.machines.retention import retention_of
from ledger.verification import Anchor, TreeHead, Verdict, verify
from ledger.verification.commitment_check import judge_commitments
from ledger.verification.snapshot_check import OpenedSnapshot
from ledger.verification.verdict import ASPECT_OF_KIND, KINDS, Break
from signing import retention_statement
from signing.callers import KeyedJudge
from signing.keys import Keyring
from signing.snapshot import open_snapshot

POSITIONS_FILE_NAME = "verified.json"


class Position(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The last entry verified and its link."""

    seq: Annotated[int, msgspec.Meta(ge=1)]
    chain_link: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


_POSITIONS_FILE: Final = KeptFile[ByTenant[Position]](
    POSITIONS_FILE_NAME, ByTenant[Position], NO_TENANTS, "the next verification writes it again"
)


def forget_positions(wal_folder: Path) -> None:
    """Verify every chain from its beginning the next time."""
    (wal_folder / POSITIONS_FILE_NAME).unlink(missing_ok=True)


class VerifiedPositions(KeptByTenant[Position]):
    """The positions of one node."""

    def __init__(self, wal_folder: Path) -> None:
        super().__init__(wal_folder, _POSITIONS_FILE, "verified_positions")

    def advance(self, tenant_id: str, position: Position) -> bool:
        """Record that the tenant is verified up to ``position``; a lower position changes nothing.

        Returns:
            Whether the position changed, so that the caller must call ``store``.
        """
        if (held := self.by_tenant.get(tenant_id)) is not None and held.seq >= position.seq:
            return False
        self.by_tenant[tenant_id] = position
        return True


VERIFICATIONS_AT_ONCE_MAX = 2
"""Most requested verifications at a time; each holds a connection and a database snapshot while it runs."""
READ_WHOLE: Final = frozenset({*KINDS, DAMAGED})
"""Kinds of break that a whole verification with a valid verdict rules out."""
VERIFICATION_TIMEOUT_S = 6 * 3600.0
"""Longest that one verification may take."""

KeyringProvider = Callable[[], Awaitable[Keyring]]
"""Gives the keys for judging signatures; the provider knows afterwards whether they are faulty."""
AnchorProvider = Callable[[str, Keyring], Awaitable[Sequence[Anchor]]]
"""Gives the judged statements of external witnesses about a tenant's tree."""
CheckpointProvider = Callable[[str, Keyring], Sequence[TreeHead]]
"""Gives the tree heads of a tenant that are kept outside the database, each with its source."""


class Verification(NamedTuple):
    """A verdict and how long it took."""

    verdict: Verdict
    duration_ms: float

    def to_json(self) -> dict[str, Any]:
        """The verdict object of the interfaces."""
        return self.verdict.to_json(self.duration_ms)


KeyRowsCheck = Callable[[str, Sequence[NamedEntry], int], bool]
"""Whether a tenant's key rows are proved by the entries that they name, at a time in ms."""


class ChainVerifier:
    """Verifies the chains of one database for one node."""

    def __init__(
        self,
        *,
        pool: asyncpg.Pool,
        database_url: str,
        keyring: KeyringProvider,
        keyring_fault: Callable[[], str | None],
        checkpoints: CheckpointProvider,
        anchors: AnchorProvider,
        positions: VerifiedPositions,
        breaks: FoundBreaks,
        last_verified: LastVerified,
        metrics: Metrics,
        are_key_rows_whole: KeyRowsCheck,
        origin: Callable[[str], str],
    ) -> None:
        """``origin`` returns the name of a tenant's log."""
        self._origin = origin
        self._are_key_rows_whole = are_key_rows_whole
        self._pool = pool
        self._database_url = database_url
        self._keyring = keyring
        self._keyring_fault = keyring_fault
        self._checkpoints = checkpoints
        self._anchors = anchors
        self._positions = positions
        self._breaks = breaks
        self._last_verified = last_verified
        self._metrics = metrics
        self._slots = Slots(VERIFICATIONS_AT_ONCE_MAX, "verifications")
        self._kept = KeptProcesses()

    async def close(self) -> None:
        """End the worker processes that check long chains."""
        await self._kept.close()

    async def full(
        self, tenant_id: str, from_seq: int | None = None, to_seq: int | None = None, *, by: str = NODE
    ) -> Verification:
        """Verify a tenant's chain, or a range of it; ``by`` is the principal that requested it.

        Raises:
            TenantNotFoundError: there is no such tenant.
            ArchivedError: all of the range has left.
            DatabaseUnavailableError: Postgres cannot be reached.
            NotReadyError: too many requested verifications are running.
        """
        async with self._slots.taken():
            return await self.again(tenant_id, from_seq, to_seq, by=by)

    async def leaving(self, tenant_id: str, to_seq: int, whole_within_s: float) -> Verification:
        """Verify the entries up to ``to_seq``, which a prune is to take, and the jobs that have one of them. The whole
        chain instead, if it has a known break, or was not verified whole within so many seconds.

        Raises: as ``again``.
        """
        last = self._last_verified.by_tenant.get(tenant_id)
        if last is None or last.at_s < time.time() - whole_within_s or self._breaks.of_tenant(tenant_id):
            return await self.again(tenant_id)
        return await self.again(tenant_id, to_seq=to_seq, is_leaving=True)

    async def incremental(self, tenant_id: str) -> Verification:
        """Verify the entries after the last verified snapshot, and that the entry at its end is unchanged.

        Raises: as ``full``.
        """
        if (position := self._positions.by_tenant.get(tenant_id)) is None:
            return await self.again(tenant_id)
        return await self.again(tenant_id, position.seq + 1, expected_prev=position.chain_link)

    async def incremental_all(self) -> list[Verification]:
        """Verify every tenant incrementally; a failure for one tenant does not stop the others.

        Raises:
            DatabaseUnavailableError: the tenants cannot be listed.
        """
        async with reading(self._pool) as connection:
            tenants = {*await list_tenants(connection), *self._positions.by_tenant}
        done: list[Verification] = []
        for tenant_id in sorted(tenants):
            try:
                done.append(await self.incremental(tenant_id))
            except Exception as error:
                # Edited rows may hold anything and raise any error; the node must go on.
                self.failed(tenant_id, error)
                end_if_cancelled()
        return done

    def failed(self, tenant_id: str, error: Exception) -> None:
        """Record that one of the node's own verifications failed. If no outage explains the error, the stored rows are
        damaged in an unforeseen way, which is reported as a break."""
        log.error("chain_verification_failed", tenant_id=tenant_id, error=repr(error))
        if isinstance(error, (LedgerError, OSError, MemoryError, *DATABASE_FAULTS)):
            self._breaks.report_error(error, VERIFICATION)
            return
        detail = f"it cannot be verified: {error!r}"
        self._breaks.report(tenant_id, Break(0, DAMAGED, detail, None, detail), VERIFICATION)

    async def run(self, interval_s: float, *, on_start: bool) -> None:
        """Verify all tenants incrementally every ``interval_s`` seconds until cancelled.

        Raises:
            DatabaseUnavailableError: the tenants cannot be listed.
        """
        if not on_start:
            await asyncio.sleep(interval_s)
        while True:
            await self.incremental_all()
            await asyncio.sleep(interval_s)

    async def again(
        self,
        tenant_id: str,
        from_seq: int | None = None,
        to_seq: int | None = None,
        expected_prev: str | None = None,
        expected_snapshot: str | None = None,
        expected_frontier: Sequence[bytes] = (),
        by: str = NODE,
        *,
        is_leaving: bool = False,
        job_index: IndexBuilder | None = None,
        take_index: Callable[[IndexBuilder], object] | None = None,
    ) -> Verification:
        """Verify a chain or a range of it, without the bound on concurrent verifications. The ``expected`` arguments,
        ``is_leaving``, ``job_index`` and ``take_index`` are those of ``ledger.verification.verify``; ``by`` is the
        principal that requested it.

        Raises: as ``full``, except for too many verifications.
        """
        began_s, began_at_s = time.perf_counter(), time.time()
        is_whole = from_seq is None and to_seq is None
        verify_rows = partial(
            verify,
            tenant_id=tenant_id,
            from_seq=from_seq,
            to_seq=to_seq,
            expected_prev=expected_prev,
            expected_snapshot=expected_snapshot,
            expected_frontier=expected_frontier,
            is_leaving=is_leaving,
            job_index=job_index,
            take_index=take_index,
        )
        keyring = await self._keyring()
        verdict, found = await self._judged(keyring, tenant_id, verify_rows)
        if not verdict.is_valid and _has_more(newer := await self._keyring(), keyring):
            # A key may have been admitted and used between reading the keys and reading the chain.
            verdict, found = await self._judged(newer, tenant_id, verify_rows)
        verification = Verification(verdict, (time.perf_counter() - began_s) * 1000)
        self._count(verdict)
        broken = {aspect for aspect, said in verdict.verdicts.items() if said == "broken"}
        found = [each for each in found if ASPECT_OF_KIND[each.kind] in broken]
        await asyncio.to_thread(self._breaks.found, tenant_id, found)
        if verdict.is_valid and (verdict.is_from_start or expected_prev is not None):
            await self._remember(verdict)
        if is_whole:
            await self.verified_whole(tenant_id, Verified(began_at_s, by), is_valid=verdict.is_valid)
        return verification

    async def _judged(
        self, keyring: Keyring, tenant_id: str, verify_rows: partial[Coroutine[Any, Any, Verdict]]
    ) -> tuple[Verdict, Sequence[Break]]:
        """The verdict by the keys of ``keyring``, and the first unacknowledged break of each kind.

        Raises: as ``again``.
        """
        found: dict[str, Break] = {}

        def note(each: Break) -> None:
            # An acknowledged break that is not repaired must not hide later ones.
            if self._breaks.is_acknowledged(tenant_id, each):
                return
            if each.kind not in found or each.seq < found[each.kind].seq:
                found[each.kind] = each

        wanted = verify_rows.keywords
        is_whole = wanted["from_seq"] is None and wanted["to_seq"] is None
        leaving_to = wanted["to_seq"] if wanted["is_leaving"] else None
        # 1. Read checkpoints and anchors before the ledger.
        checkpoints = self._checkpoints(tenant_id, keyring)
        opener = partial(_open_snapshot, keyring=keyring, keyring_fault=self._keyring_fault())
        anchors = await self._anchors(tenant_id, keyring) if wanted["from_seq"] in (None, 1) else ()
        # 2. Read the ledger in one consistent state.
        async with (
            reading(self._pool, timeout_s=VERIFICATION_TIMEOUT_S) as connection,
            consistent_reader(connection, tenant_id, leaving_to=leaving_to) as reader,
        ):
            is_known = await reader.head() is not None or await reader.last_entry() is not None
            if not is_known and wanted["expected_prev"] is None and not checkpoints:
                if is_whole:
                    # Forged rows under a name that is no tenant were removed, so their breaks are repaired.
                    self._breaks.mended(tenant_id)
                raise TenantNotFoundError(f"there is no tenant {tenant_id}")
            verify_rows = partial(
                verify_rows,
                reader,
                open_snapshot=opener,
                checkpoints=checkpoints,
                anchors=anchors,
                on_break=note,
                judge_statement=partial(
                    _judge_statement, self._origin(tenant_id), keyring, keyring_fault=self._keyring_fault()
                ),
            )
            callers = KeyedJudge(keyring.callers, self._keyring_fault())
            verdict = await (
                verified(self._database_url, reader, verify_rows, callers, self._kept)
                if is_whole
                else verify_rows(callers=callers)
            )
        if verdict.first_break is not None:
            note(verdict.first_break)
        return verdict, [*found.values()]

    async def verified_whole(
        self, tenant_id: str, verified: Verified, *, is_valid: bool, kinds: Collection[str] = READ_WHOLE
    ) -> None:
        """Record when and by whom a chain was verified from first entry to end, whole or in ranges. A valid chain has
        no break of ``kinds``, so known ones are cleared. Key rows that were found broken are checked again."""
        self._last_verified.note(tenant_id, verified)
        if is_valid:
            self._breaks.mended(tenant_id, kinds=kinds)
        await self._look_at_keys(tenant_id)
        await self._last_verified.store()

    async def _look_at_keys(self, tenant_id: str) -> None:
        seqs = [each.seq for each in self._breaks.of_tenant(tenant_id) if each.kind == KEY_ROW]
        if not seqs:
            return
        named = await run_in(reading(self._pool, timeout_s=VERIFICATION_TIMEOUT_S), named_entries, tenant_id, seqs)
        if self._are_key_rows_whole(tenant_id, named, int(time.time() * 1000)):
            self._breaks.mended(tenant_id, kinds=(KEY_ROW,))

    async def judge_commitments(self, tenant_id: str) -> None:
        """Judge the verdicts of a chain that was verified in ranges, and the table of commitments. If the tenant has
        an unacknowledged break, nothing is judged, since verdicts may depend on it.

        Raises: as ``again``.
        """
        first: Break | None = None

        def note(each: Break) -> None:
            nonlocal first
            if (first is None or each.seq < first.seq) and not self._breaks.is_acknowledged(tenant_id, each):
                first = each

        if self._breaks.unacknowledged(tenant_id):
            return
        async with (
            reading(self._pool, timeout_s=VERIFICATION_TIMEOUT_S) as connection,
            consistent_reader(connection, tenant_id) as reader,
        ):
            found = retention_of(await reader.retention_entries(), lambda *_: "not_checked", is_strict=False)
            await judge_commitments(reader, note, found.floor)
        if first is not None:
            log.error("chain_break_found", tenant_id=tenant_id, first_break=first._asdict(), found_by="walk")
            await asyncio.to_thread(self._breaks.found, tenant_id, [first])

    def _count(self, verdict: Verdict) -> None:
        self._metrics.count("scheduler_chain_verifications")
        if verdict.is_valid:
            return
        self._metrics.count("scheduler_chain_verification_failures")
        first = verdict.first_break
        log.error(
            "chain_break_found",
            tenant_id=verdict.tenant_id,
            first_break=first._asdict() if first is not None else None,
            breaks=dict(verdict.breaks),
            verdicts=dict(verdict.verdicts),
        )

    async def _remember(self, verdict: Verdict) -> None:
        seq, chain_link, _ = verdict.covered_to
        if chain_link is not None and self._positions.advance(verdict.tenant_id, Position(seq, chain_link)):
            await self._positions.store()


def _has_more(newer: Keyring, older: Keyring) -> bool:
    """Whether ``newer`` has keys that ``older`` does not have."""
    return newer.callers != older.callers or not {key.key_id for key in newer} <= {key.key_id for key in older}


def _open_snapshot(text: str, keyring: Keyring, keyring_fault: str | None) -> OpenedSnapshot:
    """As ``open_snapshot``, but while the keyring has a fault, every valid signature is ``unknown_key``."""
    opened = open_snapshot(text, keyring)
    if keyring_fault is None or opened.verdict != "ok":
        return opened
    return opened._replace(
        verdict="unknown_key", detail=f"it is not known whether key {opened.claim.key_id} still counts: {keyring_fault}"
    )


def _judge_statement(
    log_name: str, keyring: Keyring, action: str, facts: Mapping[str, Any], hlc: str, *, keyring_fault: str | None
) -> str:
    """As ``retention_statement.judge``, but while the keyring has a fault, every valid statement is ``unknown_key``."""
    verdict = retention_statement.judge(log_name, keyring, action, facts, hlc)
    return "unknown_key" if verdict == "ok" and keyring_fault is not None else verdict
