"""What external witnesses and time-stamping authorities stated about a tenant's checkpoints: judged for verification,
and served with the log's own note.

The database is not trusted with them. A cosignature that does not hold, or whose witness is not registered (any more),
is not served, since one bad line of a known key spoils the whole note for its reader.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from app.read.proofs import newest_checkpoint
from app.store import anchors as store
from app.store import chain_reads
from app.store.reading import reading
from ledger.errors import NotFoundError, SignatureError
from ledger.verification.verdict import damaged
from signing import checkpoint as checkpoints
from signing import note as notes
from signing.anchors import RFC_3161, WITNESS, OpenNote, StoredAnchor, as_of, judge
from signing.checkpoint import open_checkpoint
from signing.note import SIGNATURES_MAX, Cosignature, Note, NoteSignature, WitnessKey, cosignatures_of

if TYPE_CHECKING:
    import asyncpg
    from cryptography import x509

    from app.store import Connection
    from app.store.anchors import CosignatureRow
    from app.store.reading import Pool
    from ledger.verification.verdict import Anchor
    from signing.keys import Keyring

AUTHORITIES_MAX = 64
"""Authorities whose newest stamp is judged, those of former times among them."""


RootsOf: TypeAlias = Callable[[str], "Sequence[x509.Certificate]"]
"""Gives the certificates that an authority's stamps may be traced to, none when nobody said."""


async def judged_anchors(
    pool: Pool, tenant_id: str, keyring: Keyring, origin: str, witnesses: Sequence[WitnessKey], roots: RootsOf
) -> list[Anchor]:
    """The newest statement of each registered witness and of each authority, judged.

    Raises:
        DatabaseUnavailableError: Postgres cannot be reached.
    """
    async with reading(pool) as connection:
        judge_all = await newest_anchors(
            connection,
            tenant_id,
            lambda note, time: open_checkpoint(note, as_of(keyring, time), origin=origin),
            witnesses,
            roots,
        )
    return await asyncio.to_thread(judge_all)


async def newest_anchors(
    connection: Connection,
    tenant_id: str,
    open_note: OpenNote,
    witnesses: Sequence[WitnessKey],
    roots: RootsOf,
) -> Callable[[], list[Anchor]]:
    """What judges the newest statements, which have been read; it computes and reads nothing more."""
    names = [witness.text() for witness in witnesses]
    cosigned = await store.newest_cosignatures(connection, tenant_id, names)
    stamped = await store.newest_timestamps(connection, tenant_id, AUTHORITIES_MAX)

    def judge_all() -> list[Anchor]:
        by_witnesses = [
            judge(
                StoredAnchor(WITNESS, row.witness, row.note, row.tree_size, row.cosigned_at), witnesses, (), open_note
            )
            for row in cosigned
        ]
        stamps = [
            StoredAnchor(RFC_3161, row.authority, row.note, row.tree_size, row.generated_at, row.response)
            for row in stamped
        ]
        return by_witnesses + [judge(said, (), roots(said.by), open_note) for said in stamps]

    return judge_all


ROWS_A_SIZE_MAX = SIGNATURES_MAX - 10
"""Cosignatures of one checkpoint that are checked, the newest; with the log's own they fit into one note."""
SIZES_MAX = 16
"""Cosigned sizes that are checked for the newest of which a cosignature holds."""


async def served_checkpoint(pool: asyncpg.Pool[asyncpg.Record], tenant_id: str, witnesses: Sequence[WitnessKey]) -> str:
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
        rows = await store.cosignatures_of_size(connection, tenant_id, size, _names(witnesses), ROWS_A_SIZE_MAX)
    return _cosigned(note, rows, witnesses).encode()


async def cosigned_checkpoint(
    pool: asyncpg.Pool[asyncpg.Record], tenant_id: str, witnesses: Sequence[WitnessKey]
) -> str:
    """The newest checkpoint that a registered witness has cosigned.

    Raises:
        TenantNotFoundError: no such tenant.
        NotFoundError: none has been cosigned.
    """
    async with reading(pool) as connection:
        await chain_reads.require_tenant(connection, tenant_id)
        names = _names(witnesses)
        for size in await store.newest_cosigned_sizes(connection, tenant_id, names, SIZES_MAX):
            rows = await store.cosignatures_of_size(connection, tenant_id, size, names, ROWS_A_SIZE_MAX)
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
