"""What outsiders said of a tenant's checkpoints, read back and judged for verification."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from app.store import anchors as store
from app.store.reading import reading
from signing.anchors import RFC_3161, WITNESS, OpenNote, Said, as_of, judge
from signing.checkpoint import open_checkpoint

if TYPE_CHECKING:
    from cryptography import x509

    from app.store import Connection
    from app.store.reading import Pool
    from ledger.verification.tree_check import Anchor
    from signing.keys import Keyring
    from signing.note import WitnessKey

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
            judge(Said(WITNESS, row.witness, row.note, row.tree_size, row.cosigned_at), witnesses, (), open_note)
            for row in cosigned
        ]
        stamps = [
            Said(RFC_3161, row.authority, row.note, row.tree_size, row.generated_at, row.response) for row in stamped
        ]
        return by_witnesses + [judge(said, (), roots(said.by), open_note) for said in stamps]

    return judge_all
