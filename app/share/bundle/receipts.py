"""Making receipts: the entries of one job, or one entry, proved by a checkpoint.

In order::

    1. wait until a checkpoint covers the newest requested entry; then, for as long as the caller wants to wait, until
       the quorum of the node's policy covers it
    2. one REPEATABLE READ, read-only transaction shows one state of entries, tiles, checkpoint, statements of witnesses
    3. every entry is compared with its link and its leaf, every proof with the signed root; a mismatch stops the
       receipt unsigned
    4. the statement is signed with the key of the node's checkpoints, which is in a file, so a receipt waits for no
       key service

A receipt holds chained entries only, none that still waits to be chained.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

from app.runtime.tasks import Slots
from app.store import Connection, anchors, chain_reads
from app.store.jobs import index as job_index
from app.store.notary import read_tiles
from app.store.reading import Pool, reading, run_in
from app.trust.key_chain import open_stored
from app.trust.key_in_use import KeyInUse
from app.trust.retention import RetentionReader
from ledger.bundle.rows import JOB_ID, SEQ, Row
from ledger.errors import (
    BrokenRangeError,
    ChainDamagedError,
    InvalidInputError,
    JobNotFoundError,
    KeyConflictError,
    KnownDamageError,
    ProofError,
    ReceiptInvalidError,
    ReceiptTooLargeError,
    SeqOutOfRangeError,
    SessionNotCaughtUpError,
    SigningUnavailableError,
    reported_as,
)
from ledger.job_index.proof import verify_job
from ledger.machines.jobs import refused_job_id
from ledger.verification.verdict import damaged
from signing.entry_proof import cose_receipt
from signing.keys import Keyring
from signing.receipt import ABSENT, ENTRIES_MAX, ENTRY, JOB, Covers, IndexProof, Material, draft_of, make, read
from signing.snapshot import open_snapshot

RECEIPTS_AT_ONCE_MAX: Final = 4
"""Each may briefly hold some hundred megabytes; further receipts wait."""


class Made(NamedTuple):
    """A receipt, and its number of entries."""

    file: bytes
    entries: int


class _Wanted(NamedTuple):
    """The request of a receipt: entries of a job up to ``to_seq``, the one entry of that seq, or that it has none."""

    covers: Covers
    job_id: str
    to_seq: int


@dataclass(kw_only=True, eq=False)
class ReceiptMaker:
    """Makes receipts of one ledger for one node."""

    pool: Pool
    retention: RetentionReader
    node_id: str
    log_origin: str
    keys: KeyInUse
    published: Callable[[str], Awaitable[Keyring]]
    """The published keys of a tenant's log."""
    known_break: Callable[[str], str | None]
    """The known break of a tenant's chain that is neither repaired nor acknowledged; None if there is none."""
    attempts: Callable[[], AsyncIterator[None]]
    """Paces repeated checks; raises SessionNotCaughtUpError once a reader has waited long enough."""
    quorum_to: Callable[[str, int, float], Awaitable[int | None]]
    """How far the quorum of the node's policy covers a tenant's log, once that is this entry or so many seconds have
    passed; None if no policy is about that log."""

    def __post_init__(self) -> None:
        self._slots = Slots(RECEIPTS_AT_ONCE_MAX, "receipts")

    async def of_job(self, tenant_id: str, job_id: str, extends: int | None, wait_s: float = 0.0) -> Made:
        """The receipt of a job, or of the substitute entries for its events that PostgreSQL rejected. With ``extends``
        it also proves that the log extends the tree of that size. It is made once the quorum of the node's policy
        covers its entries, or ``wait_s`` seconds have passed.

        Raises:
            TenantNotFoundError, JobNotFoundError: there is none.
            ArchivedError: an entry of the job has left with a prune.
            ChainDamagedError: a break is known, so an entry of the job may have been removed.
            ReceiptTooLargeError: the job is too large for one receipt.
            Others as ``of_entry``.
        """
        async with reading(self.pool) as connection:
            for name in (job_id, refused_job_id(job_id)):
                if (last := await chain_reads.last_seq_of_job(connection, tenant_id, name)) is not None:
                    break
            else:
                await chain_reads.require_tenant(connection, tenant_id)
                await self.retention.refuse_departed(
                    connection, [(tenant_id, each) for each in (job_id, refused_job_id(job_id))]
                )
                raise JobNotFoundError(f"tenant {tenant_id} has no job {job_id}")
        if (broken := self.known_break(tenant_id)) is not None:
            raise KnownDamageError(tenant_id, f"{broken}, so nobody can sign that these are all entries of job {name}")
        return await self._made(tenant_id, _Wanted(JOB, name, last), extends, wait_s)

    async def of_no_entry(self, tenant_id: str, job_id: str, extends: int | None, wait_s: float = 0.0) -> Made:
        """The receipt for a job without entries, up to the newest snapshot with an index of jobs; with ``wait_s`` up to
        the newest one that the quorum covers, if there is one.

        Raises:
            TenantNotFoundError: there is none.
            InvalidInputError: the job has entries.
            ArchivedError: an entry of the job has left with a prune.
            Others as ``of_entry``.
        """
        async with reading(self.pool) as connection:
            await chain_reads.require_tenant(connection, tenant_id)
            for name in (job_id, refused_job_id(job_id)):
                if (last := await chain_reads.last_seq_of_job(connection, tenant_id, name)) is not None:
                    raise InvalidInputError(f"job {job_id} has entries, the last is seq {last}", ("job_id",))
        if (broken := self.known_break(tenant_id)) is not None:
            raise KnownDamageError(tenant_id, f"{broken}, so nobody can sign that job {job_id} has no entries")
        return await self._made(tenant_id, _Wanted(ABSENT, job_id, 1), extends, wait_s)

    async def of_entry(self, tenant_id: str, seq: int, extends: int | None, wait_s: float = 0.0) -> Made:
        """The receipt of one entry, made once the quorum covers it or ``wait_s`` seconds have passed.

        Raises:
            TenantNotFoundError: there is none.
            ArchivedError: it has left with a prune.
            SeqOutOfRangeError: the chain, or for ``extends`` the checkpoint, does not reach that far.
            SigningUnavailableError: no checkpoint covers it yet, or this node's key may not sign.
            KeyConflictError: no valid key signed the checkpoint.
            ChainDamagedError: the stored rows are inconsistent.
            NotReadyError: too many receipts are being made.
            DatabaseUnavailableError: Postgres does not answer.
        """
        async with reading(self.pool) as connection:
            head = await chain_reads.head(connection, tenant_id)
            rows = await chain_reads.entries_at(connection, tenant_id, seq)
            if not rows:
                await self.retention.refuse_left(connection, tenant_id, seq)
        if not rows:
            if seq <= head.head_seq:
                raise damaged(tenant_id, "gap", seq, f"no entry stands at seq {seq}")
            raise SeqOutOfRangeError(f"seq {seq} lies beyond the chain, which ends at {head.head_seq}", ("seq",))
        return await self._made(tenant_id, _Wanted(ENTRY, rows[0][JOB_ID], seq), extends, wait_s)

    async def in_cose(self, made: Made) -> bytes:
        """The COSE receipt of the entry that ``made`` is for.

        Raises:
            SigningUnavailableError: the signer cannot be reached.
        """
        return await asyncio.to_thread(lambda: cose_receipt(read(made.file)[0], self.keys.log_signer))

    async def _made(self, tenant_id: str, wanted: _Wanted, extends: int | None, wait_s: float) -> Made:
        if self.keys.not_admitted is not None:
            raise SigningUnavailableError(f"this node signs no receipt: {self.keys.not_admitted}")
        keys = await self.published(tenant_id)
        await self._covered(tenant_id, wanted.to_seq)
        quorum_to = await self.quorum_to(tenant_id, wanted.to_seq, wait_s) if wait_s else None
        async with self._slots.taken():
            try:
                material, stored = await self._read(tenant_id, wanted, extends, keys, quorum_to)
            except KeyConflictError:
                # The key may have been admitted since.
                keys = await self.published(tenant_id)
                material, stored = await self._read(tenant_id, wanted, extends, keys, quorum_to)
            file = await asyncio.to_thread(self._sign, material, stored)
        return Made(file, len(material.rows))

    async def _covered(self, tenant_id: str, seq: int) -> None:
        """Return once a checkpoint covers ``seq``."""
        try:
            async for _ in self.attempts():
                head = await run_in(reading(self.pool), chain_reads.head, tenant_id)
                signed = chain_reads.checkpoint_in(tenant_id, head.checkpoint)
                if signed is not None and signed.size >= seq:
                    return
        except SessionNotCaughtUpError:
            raise SigningUnavailableError(
                f"no checkpoint of tenant {tenant_id} covers seq {seq} yet; ask again in a moment"
            ) from None

    async def _read(
        self, tenant_id: str, wanted: _Wanted, extends: int | None, keys: Keyring, quorum_to: int | None
    ) -> tuple[Material, dict[tuple[int, int], bytes]]:
        """The input of the receipt, from one state of the database."""
        async with reading(self.pool, snapshot=True) as connection:
            note = (await chain_reads.head(connection, tenant_id)).checkpoint or ""
            signed = open_stored(tenant_id, note, keys, f"{self.log_origin}/{tenant_id}")
            if extends is not None and extends > signed.size:
                raise SeqOutOfRangeError(
                    f"extends {extends} lies beyond the checkpoint, which covers {signed.size} entries", ("extends",)
                )
            if wanted.covers != ENTRY:
                # In the state of the rows: nobody may sign that a part of a job is all of it.
                await self.retention.refuse_departed(connection, [(tenant_id, wanted.job_id)])
            indexed = None
            if wanted.covers != ENTRY:
                sizes = (min(quorum_to or 0, signed.size), signed.size)
                indexed = await _indexed(connection, tenant_id, wanted, sizes, keys)
            rows: Sequence[Row] = ()
            if wanted.covers != ABSENT:
                async with self.retention.leaving(connection, tenant_id, wanted.to_seq):
                    rows = await _rows(connection, tenant_id, wanted, signed.size)
            elif indexed is None:
                raise SigningUnavailableError(f"no snapshot of tenant {tenant_id} has an index of jobs yet")
            reach = (rows[0][SEQ], rows[-1][SEQ]) if rows else (signed.size, signed.size)
            said = await anchors.covering(connection, tenant_id, reach, signed.size)
            draft = draft_of(
                tenant_id=tenant_id,
                log_origin=self.log_origin,
                node_id=self.node_id,
                covers=wanted.covers,
                job_id=wanted.job_id,
                checkpoint=note,
                keys=keys,
            )
            material = Material(draft, rows, said, extends, indexed)
            return material, await read_tiles(connection, tenant_id, material.tiles)

    def _sign(self, material: Material, stored: dict[tuple[int, int], bytes]) -> bytes:
        tenant_id = material.draft.tenant_id
        try:
            return make(material, lambda level, index: stored.get((level, index), b""), self.keys.log_signer)
        except BrokenRangeError as error:
            raise ChainDamagedError(tenant_id, f"no receipt is made, {error}", error.found) from error
        except (ProofError, ReceiptInvalidError, InvalidInputError, TypeError, ValueError) as error:
            raise damaged(tenant_id, "tree", 0, f"the stored tree is not the one that was signed: {error}") from error


async def _indexed(
    connection: Connection, tenant_id: str, wanted: _Wanted, sizes: Sequence[int], keys: Keyring
) -> IndexProof | None:
    """The proof of the job by the newest index of jobs up to the first of ``sizes`` that has one; None if there is none
    that counts."""
    snapshot = None
    for size in sizes:
        snapshot = snapshot or await job_index.indexed_snapshot(connection, tenant_id, size)
    if snapshot is None or open_snapshot(snapshot.envelope, keys).verdict != "ok":
        return None
    problem = partial(damaged, tenant_id, "tree", 0)
    with reported_as(problem, "the stored index of jobs is not the one that was signed", ProofError):
        runs = await job_index.prove_runs(connection, tenant_id, wanted.job_id, snapshot)
        entries = await job_index.indexed_entries(connection, tenant_id, wanted.job_id, snapshot)
        verify_job(wanted.job_id, snapshot.size, snapshot.roots, entries, runs, snapshot.begin)
    return IndexProof(snapshot.size, snapshot.envelope, runs)


async def _rows(connection: Connection, tenant_id: str, wanted: _Wanted, size: int) -> Sequence[Row]:
    if wanted.covers == ENTRY:
        rows: Sequence[Any] | None = await chain_reads.entries_at(connection, tenant_id, wanted.to_seq)
    else:
        rows = await chain_reads.job_entries(connection, tenant_id, wanted.job_id, size, ENTRIES_MAX)
    if rows is None:
        raise ReceiptTooLargeError(f"job {wanted.job_id} has more entries, or longer ones, than one receipt holds")
    if not rows or rows[-1][0] < wanted.to_seq:
        raise damaged(tenant_id, "gap", wanted.to_seq, f"the entry at seq {wanted.to_seq} is there no more")
    return rows
