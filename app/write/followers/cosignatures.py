"""Taking in what a witness says of a checkpoint: only what this log signed, by a registered witness, and news.

A note is taken when, in this order::

    1. its text is a checkpoint of this tenant's log, and this log's signature under it holds
    2. its size is covered by the newest checkpoint, and its root is that of the tree at that size
    3. at least one registered witness has cosigned it, and every cosignature of a registered one holds
    4. no cosignature lies in the future
    5. at least one is new: its witness has not cosigned a larger tree yet, nor this one then or later

Each new cosignature is stored as a row of its own. Anything else stores nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from app.store import Connection, anchors, chain_reads
from app.store import notary as store
from app.store.reading import Pool, reading
from ledger.errors import (
    ClockSkewError,
    CosignatureRefusedError,
    ProofError,
    SignatureError,
)
from ledger.merkle import tiles
from signing import checkpoint as checkpoints
from signing import note as notes
from signing.checkpoint import Checkpoint
from signing.keys import Keyring
from signing.note import Cosignature, Note, WitnessKey, cosignatures_of


@dataclass(kw_only=True, eq=False)
class CosignatureInbox:
    """Takes cosignatures in for all tenants of one ledger."""

    pool: Pool
    origin: Callable[[str], str]
    keyring: Callable[[], Awaitable[Keyring]]
    witnesses: Sequence[WitnessKey]
    max_skew_ms: int

    async def take(self, tenant_id: str, text: bytes, now: datetime) -> tuple[Checkpoint, list[Cosignature]]:
        """Store the new cosignatures in a note; the checkpoint and those that were stored, at least one.

        Raises:
            TenantNotFoundError: no such tenant.
            CosignatureRefusedError: the note is not as the module says; nothing was stored.
            ClockSkewError: a cosignature lies further ahead than ``hlc.max_clock_skew``; nothing was stored.
            DatabaseUnavailableError: Postgres cannot be reached.
        """
        keyring, origin = await self.keyring(), self.origin(tenant_id)
        async with reading(self.pool) as connection:
            head = await chain_reads.head(connection, tenant_id)
            try:
                # 1. ours
                checkpoint = checkpoints.open_checkpoint(text, keyring, origin=origin)
                signed = notes.parse(checkpoints.signed_by(text, keyring))
                # 2. of our tree
                await _require_same_tree(connection, tenant_id, head.checkpoint, checkpoint)
                # 3. cosigned by someone registered
                found = cosignatures_of(notes.parse(text), self.witnesses)
            except SignatureError as error:
                raise CosignatureRefusedError(str(error)) from error
            if not found:
                raise CosignatureRefusedError(
                    "no witness that log.witnesses names has cosigned this note; register its verifier key first"
                )
            # 4. by now
            for each in found:
                if each.time > now + timedelta(milliseconds=self.max_skew_ms):
                    raise ClockSkewError(f"the cosignature by {each.witness.name} is of {each.time}, which is to come")
            # 5. news
            async with connection.transaction():
                added = [each for each in found if await _insert(connection, tenant_id, checkpoint, signed, each)]
        if not added:
            raise CosignatureRefusedError(
                "nothing new: each witness has cosigned a larger tree already, or this one at that time or later"
            )
        return checkpoint, added


async def _require_same_tree(
    connection: Connection, tenant_id: str, newest_note: str | None, checkpoint: Checkpoint
) -> None:
    newest = checkpoints.read(newest_note).size if newest_note is not None else 0
    if not 1 <= checkpoint.size <= newest:
        raise CosignatureRefusedError(f"the checkpoint is of size {checkpoint.size}, the log of {newest}")
    stored = await store.read_tiles(connection, tenant_id, tiles.root_tiles(checkpoint.size))
    try:
        root = tiles.root_at(checkpoint.size, lambda level, index: stored.get((level, index), b""))
    except ProofError as error:
        raise CosignatureRefusedError(f"the root at size {checkpoint.size} is not known: {error}") from error
    if root != checkpoint.root:
        raise CosignatureRefusedError(
            f"the checkpoint of size {checkpoint.size} has root {checkpoint.root.hex()}, the tree {root.hex()}"
        )


async def _insert(
    connection: Connection, tenant_id: str, checkpoint: Checkpoint, signed: Note, cosignature: Cosignature
) -> bool:
    alone = signed._replace(signatures=(*signed.signatures, cosignature.line)).encode()
    return await anchors.insert_cosignature(
        connection, tenant_id, cosignature.witness.text(), checkpoint.size, cosignature.time, alone
    )
