"""The keys of a ledger as a node trusts them: what the chain of ``_system`` says, no wider than the rows say it.

A row of ``signing_keys`` whose key no entry introduced counts for nothing: whoever administers the database can write
rows, but an entry stands in the chain for ever. A key the node signs with itself counts before its entry is chained.
Where chain and row differ in an end or a revocation, the earlier one counts, and the log says so; and what this node
has ever seen end stays ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import structlog

from app.store import keys as store
from app.store.keys import KeyRow
from ledger.errors import InvalidInputError
from ledger.hlc import Hlc
from signing.key_history import keys_of
from signing.public_key import PublicKey

if TYPE_CHECKING:
    from app.key_chain import KeyChain
    from app.store import Connection

log = structlog.get_logger()


class PublishedKey(NamedTuple):
    """A key and when it counts; on which node it signs or signed, None without a row; for what it signs now."""

    key: PublicKey
    node_id: str | None
    signs_snapshots: bool
    signs_checkpoints: bool
    revocation_reason: str | None


async def published_keys(connection: Connection, chain: KeyChain, own: Sequence[PublicKey]) -> list[PublishedKey]:
    """Every key that may be trusted, oldest first; ``own`` are those this node signs with."""
    rows = {row.key_id: row for row in await store.list_rows(connection) if row.key_id is not None}
    events = await chain.events(connection)
    reasons = {str(facts.get("key_id")): str(facts["reason"]) for _, facts in events if facts.get("reason")}
    chained = await chain.ended.narrowed({key.key_id: key for key in own} | keys_of(events))
    for row in rows.values():
        if row.key_id not in chained:
            log.error("published_key_not_trusted", key_id=row.key_id, reason="no entry of _system introduces it")
    found = [_published(chained[row.key_id], row, reasons) for row in rows.values() if row.key_id in chained]
    found += [_published(key, None, reasons) for key_id, key in chained.items() if key_id not in rows]
    return found


def _published(key: PublicKey, row: KeyRow | None, reasons: dict[str, str]) -> PublishedKey:
    if row is None:
        return PublishedKey(key, None, False, False, reasons.get(key.key_id))
    reason = reasons.get(key.key_id, row.revocation_reason)
    signs = (bool(row.signs_snapshots), bool(row.signs_checkpoints))
    try:
        stored = _stored(row)
        if stored.key_id != key.key_id:
            raise InvalidInputError(f"the row of key {key.key_id} holds key {stored.key_id}")
        narrowed = key.narrowed(stored)
    except InvalidInputError as error:
        log.error("published_key_malformed", key_id=row.key_id, error=str(error))
        return PublishedKey(key, row.node_id, *signs, reason)
    if (stored.not_after, stored.revoked_from_hlc) != (key.not_after, key.revoked_from_hlc):
        log.warning("published_key_differs", key_id=key.key_id, row=stored.to_json(), chain=key.to_json())
    return PublishedKey(narrowed, row.node_id, *signs, reason)


def _stored(row: KeyRow) -> PublicKey:
    """The key that a row holds.

    Raises:
        InvalidInputError: it holds none, or bounds that none can have.
    """
    if row.public_key_pem is None:
        raise InvalidInputError("public_key_pem is NULL")
    return PublicKey.of(
        row.public_key_pem,
        not_before=store.time_of(row.not_before),
        not_after=store.time_of(row.not_after),
        revoked_from_hlc=Hlc.parse(row.revoked_from_hlc) if row.revoked_from_hlc else None,
    )
