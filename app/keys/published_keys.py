"""The keys of a ledger as a node trusts them: what the chain of ``_system`` says of those that were admitted.

The rows of ``signing_keys`` are an index, which whoever administers the database can write: of them count where a key
signs, and from when on it does as long as that is no later than its entry. Ends and revocations are the chain's, and
what this node has ever seen end stays ended. A row whose key no entry introduces counts for nothing.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

import structlog

from app.keys.admission import counting_keys
from app.store import keys as store
from app.store.keys import KeyRow
from ledger.errors import InvalidInputError
from signing.key_history import AdmittedKey, KeyHistory, WaitingKey, time_of
from signing.key_statement import Anchor
from signing.public_key import PublicKey

if TYPE_CHECKING:
    from app.keys.key_chain import KeyChain
    from app.keys.node_keys import NodeKeys
    from app.store import Connection

log = structlog.get_logger()


class PublishedKey(NamedTuple):
    """A key and when it counts; on which node it signs or signed, None where nothing says; for what it signs now; who
    admitted it, None for the root; the entry that introduced it. A key that is about to be admitted has neither yet."""

    key: PublicKey
    node_id: str | None
    signs_snapshots: bool
    signs_checkpoints: bool
    revocation_reason: str | None
    admitted_by: str | None
    introduced_by: Anchor | None


class PublishedKeys(NamedTuple):
    """Keys that may be trusted, oldest first; those that wait to be admitted; the key that the ledger began with."""

    admitted: list[PublishedKey]
    waiting: list[WaitingKey]
    root_key_id: str | None


async def published_keys(connection: Connection, chain: KeyChain, keys: NodeKeys) -> PublishedKeys:
    """The keys of the ledger; ``keys`` are those that this node signs with."""
    rows = {row.key_id: row for row in await store.list_rows(connection) if row.key_id is not None}
    history = await chain.history(connection)
    counting = await chain.ended.narrowed(counting_keys(history, chain.root, keys))
    order = [key_id for key_id in rows if key_id in counting]
    order += [key_id for key_id in counting if key_id not in rows]
    admitted = [_published(counting[key_id], rows.get(key_id), history) for key_id in order]
    return PublishedKeys(admitted, list(history.waiting.values()), chain.root.key_id or history.root_key_id)


def _published(key: PublicKey, row: KeyRow | None, history: KeyHistory) -> PublishedKey:
    known = history.admitted.get(key.key_id)
    entered = (None, None) if known is None else (known.admitted_by, known.introduced.at)
    reason = history.reasons.get(key.key_id)
    if row is None:
        return PublishedKey(key, known.node_id if known is not None else None, False, False, reason, *entered)
    signs = (bool(row.signs_snapshots), bool(row.signs_checkpoints))
    return PublishedKey(_begins(row, key, known), row.node_id, *signs, reason, *entered)


def _begins(row: KeyRow, key: PublicKey, known: AdmittedKey | None) -> PublicKey:
    """The key with the beginning of its row, which is never later than the entry that introduced it."""
    try:
        not_before = store.time_of(row.not_before)
    except InvalidInputError as error:
        log.warning("published_key_malformed", key_id=row.key_id, error=str(error))
        return key
    latest = [time for time in (key.not_after, _introduced(known)) if time is not None]
    begins = min((time for time in (not_before, *latest) if time is not None), default=None)
    return replace(key, not_before=begins)


def _introduced(known: AdmittedKey | None) -> datetime | None:
    return None if known is None else time_of(known.introduced.hlc.physical_ms)
