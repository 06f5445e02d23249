"""Checkpoints as they are served: the log's note, and under it the cosignatures of registered witnesses that hold.

What is stored is not believed: a cosignature that does not hold, or whose witness is not registered (any more), is not
served, since one bad line of a known key spoils the whole note for its reader.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from app.read.proofs import newest_checkpoint
from app.store import anchors, chain_reads
from app.store.reading import reading
from ledger.errors import NotFoundError, SignatureError
from ledger.verification.verdict import damaged
from signing import checkpoint as checkpoints
from signing import note as notes
from signing.note import SIGNATURES_MAX, Cosignature, Note, NoteSignature, WitnessKey, cosignatures_of

if TYPE_CHECKING:
    import asyncpg

    from app.store.anchors import CosignatureRow

ROWS_A_SIZE_MAX = SIGNATURES_MAX - 10
"""Cosignatures of one checkpoint that are looked at, the newest; with the log's own they fit into one note."""
SIZES_MAX = 16
"""Cosigned sizes that are looked at for the newest of which a cosignature holds."""


async def newest(pool: asyncpg.Pool[asyncpg.Record], tenant_id: str, witnesses: Sequence[WitnessKey]) -> str:
    """The newest checkpoint, with the cosignatures there are on it.

    Raises:
        TenantNotFoundError: no such tenant.
        NotFoundError: nothing was signed yet.
        ChainDamagedError: what is stored is no checkpoint, or not that of the stored tree.
    """
    async with reading(pool) as connection:
        head = await chain_reads.head(connection, tenant_id)
        if head.checkpoint is None:
            raise NotFoundError(f"no checkpoint of {tenant_id} has been signed yet; try again soon")
        signed = newest_checkpoint(tenant_id, head.checkpoint)
        assert signed is not None
        if (signed.size, signed.root.hex()) != (head.tree_size, head.root_hash):
            raise damaged(tenant_id, "tree", 0, "the stored checkpoint is not that of the stored tree")
        note, size = notes.parse(head.checkpoint), signed.size
        rows = await anchors.cosignatures_of_size(connection, tenant_id, size, _names(witnesses), ROWS_A_SIZE_MAX)
    return _cosigned(note, rows, witnesses).encode()


async def newest_cosigned(pool: asyncpg.Pool[asyncpg.Record], tenant_id: str, witnesses: Sequence[WitnessKey]) -> str:
    """The newest checkpoint that a registered witness has cosigned.

    Raises:
        TenantNotFoundError: no such tenant.
        NotFoundError: none has been cosigned.
    """
    async with reading(pool) as connection:
        await chain_reads.require_tenant(connection, tenant_id)
        names = _names(witnesses)
        for size in await anchors.newest_cosigned_sizes(connection, tenant_id, names, SIZES_MAX):
            rows = await anchors.cosignatures_of_size(connection, tenant_id, size, names, ROWS_A_SIZE_MAX)
            for row in rows:
                if held(row, witnesses) is not None:
                    return _cosigned(_by_log_alone(row), rows, witnesses).encode()
    raise NotFoundError(f"no checkpoint of {tenant_id} has been cosigned by a registered witness")


def held(row: CosignatureRow, witnesses: Iterable[WitnessKey]) -> Cosignature | None:
    """The cosignature in ``row``, if it is of the witness, the size and the time that the row says, and holds."""
    try:
        note = notes.parse(row.note)
        (found,) = cosignatures_of(note, [each for each in witnesses if each.text() == row.witness])
        size = checkpoints.parse(note.text).size
    except (SignatureError, ValueError):
        return None
    return found if (size, found.time) == (row.tree_size, row.cosigned_at) else None


def status_of(row: CosignatureRow, witnesses: Iterable[WitnessKey]) -> str:
    """Whether the cosignature holds: ``ok``, ``broken``, or ``unknown_key`` when nobody registered its witness."""
    if row.witness not in _names(witnesses):
        return "unknown_key"
    return "broken" if held(row, witnesses) is None else "ok"


def _names(witnesses: Iterable[WitnessKey]) -> list[str]:
    return [witness.text() for witness in witnesses]


def _by_log_alone(row: CosignatureRow) -> Note:
    note = notes.parse(row.note)
    origin = checkpoints.parse(note.text).origin
    return note._replace(signatures=tuple(line for line in note.signatures if line.name == origin))


def _cosigned(note: Note, rows: Iterable[CosignatureRow], witnesses: Sequence[WitnessKey]) -> Note:
    """``note`` with the cosignatures in ``rows`` that hold on its text, the newest of each witness."""
    lines: dict[str, NoteSignature] = {}
    for row in rows:
        found = held(row, witnesses)
        if found is not None and notes.parse(row.note).text == note.text:
            lines.setdefault(found.witness.text(), found.line)
    return note._replace(signatures=(*note.signatures, *(lines[name] for name in sorted(lines))))
