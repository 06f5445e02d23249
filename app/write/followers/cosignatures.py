"""Cosignatures of witnesses on checkpoints, as they are handed in.

A witness sends a note. It is accepted after these checks, in this order::

    1. its text is a checkpoint of this tenant's log, and this log's signature on it is valid
    2. its size is covered by the newest checkpoint, and its root is that of the tree at that size
    3. at least one registered witness has cosigned it, and every cosignature of a registered witness is valid
    4. no cosignature lies in the future
    5. at least one is new: its witness has not cosigned a larger tree yet, nor this one then or later

Each new cosignature is stored as its own row. A note that fails a check stores nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial

from app.store import Connection, anchors, chain_reads
from app.store import notary as store
from app.store.reading import Pool, reading
from ledger.errors import ClockSkewError, ProblemError, ProofError, SignatureError, reported_as
from ledger.facts.problems import COSIGNATURE_REFUSED
from ledger.merkle import tiles
from signing import checkpoint as checkpoints
from signing import note as notes
from signing.checkpoint import Checkpoint
from signing.keys import Keyring
from signing.note import Cosignature, Note, WitnessKey, cosignatures_of


@dataclass(kw_only=True, eq=False)
class CosignatureInbox:
    """Takes cosignatures for all tenants of one ledger."""

    pool: Pool
    origin: Callable[[str], str]
    keyring: Callable[[], Awaitable[Keyring]]
    witnesses: Sequence[WitnessKey]
    max_skew_ms: int

    async def take(self, tenant_id: str, text: bytes, now: datetime) -> tuple[Checkpoint, list[Cosignature]]:
        """Store the new cosignatures of a note; returns its checkpoint and the stored cosignatures, at least one.

        Raises:
            TenantNotFoundError: no such tenant.
            ProblemError: the note fails a check of the module; nothing was stored.
            ClockSkewError: a cosignature lies further ahead than ``hlc.max_clock_skew``; nothing was stored.
            DatabaseUnavailableError: Postgres cannot be reached.
        """
        keyring, origin = await self.keyring(), self.origin(tenant_id)
        async with reading(self.pool) as connection:
            head = await chain_reads.head(connection, tenant_id)
            try:
                # 1. checkpoint of this log
                checkpoint = checkpoints.open_checkpoint(text, keyring, origin=origin)
                signed = notes.parse(checkpoints.signed_by(text, keyring))
                # 2. same tree
                await _require_same_tree(connection, tenant_id, head.checkpoint, checkpoint)
                # 3. cosigned by a registered witness
                found = cosignatures_of(notes.parse(text), self.witnesses)
            except SignatureError as error:
                raise ProblemError(COSIGNATURE_REFUSED, str(error)) from error
            if not found:
                raise ProblemError(
                    COSIGNATURE_REFUSED,
                    "no witness that log.witnesses or log.policy names has cosigned this note",
                )
            # 4. not in the future
            latest = max(found, key=lambda each: each.time)
            if latest.time > now + timedelta(milliseconds=self.max_skew_ms):
                raise ClockSkewError(f"the cosignature by {latest.witness.name} is of {latest.time}, which is to come")
            # 5. new
            async with connection.transaction():
                added = [each for each in found if await insert(connection, tenant_id, checkpoint.size, signed, each)]
        if not added:
            raise ProblemError(
                COSIGNATURE_REFUSED,
                "nothing new: each witness has cosigned a larger tree already, or this one at that time or later",
            )
        return checkpoint, added


async def _require_same_tree(
    connection: Connection, tenant_id: str, newest_note: str | None, checkpoint: Checkpoint
) -> None:
    newest = checkpoints.read(newest_note).size if newest_note is not None else 0
    if not 1 <= checkpoint.size <= newest:
        raise ProblemError(COSIGNATURE_REFUSED, f"the checkpoint is of size {checkpoint.size}, the log of {newest}")
    stored = await store.read_tiles(connection, tenant_id, tiles.root_tiles(checkpoint.size))
    with reported_as(
        partial(ProblemError, COSIGNATURE_REFUSED), f"the root at size {checkpoint.size} is not known", ProofError
    ):
        root = tiles.root_at(checkpoint.size, tiles.getter(stored))
    if root != checkpoint.root:
        raise ProblemError(
            COSIGNATURE_REFUSED,
            f"the checkpoint of size {checkpoint.size} has root {checkpoint.root.hex()}, the tree {root.hex()}",
        )


async def insert(connection: Connection, tenant_id: str, size: int, signed: Note, cosignature: Cosignature) -> bool:
    """Store a verified cosignature on the checkpoint of ``size`` that the log ``signed``; False if it is not new."""
    alone = signed._replace(signatures=(*signed.signatures, cosignature.line)).encode()
    return await anchors.insert_cosignature(
        connection, tenant_id, cosignature.witness.text(), size, cosignature.time, alone
    )
