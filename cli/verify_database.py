"""Verification of a chain read from PostgreSQL, in this process: no service is called or trusted.

Only signatures by keys that the caller gives are valid. Without keys, the keys in the chain of ``_system`` are used
only to find signatures by unadmitted keys; no signature is reported as ok.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from functools import partial
from typing import Any

from app.read.checking import verified
from app.read.proofs import newest_anchors
from app.runtime.postgres import DATABASE_FAULTS
from app.store import Connection, node, sessions
from app.store import keys as key_store
from app.store.chain_reader import PostgresChainReader, consistent_reader
from app.store.exclusions import own_log
from cli.verify import Request
from ledger.errors import DatabaseUnavailableError, SignatureError, TenantNotFoundError
from ledger.verification import Anchor, TreeHead, Verdict, verify
from signing import checkpoint as tree_checkpoint
from signing import retention_statement
from signing.anchors import as_of
from signing.callers import judge_of
from signing.key_history import named_keys, without_trust
from signing.keys import Keyring
from signing.memory import Observation
from signing.snapshot import open_snapshot

CONNECT_TIMEOUT_S = 10.0


async def verify_database(dsn: str, request: Request, heads: list[TreeHead], anchors: list[Anchor]) -> dict[str, Any]:
    """The verdict object on ``request``, in the database at ``dsn``.

    ``heads`` are kept tree heads to compare with. Without a keyring they are unverified, so a comparison without a
    fault is reported as ``not_checked``. ``anchors`` are verified already; statements of external witnesses in the
    database are added to them, if a key of the keyring signed the checkpoints.

    Raises:
        TenantNotFoundError: there is no such tenant.
        DatabaseUnavailableError: the database cannot be reached or read.
    """
    began_s = time.perf_counter()
    try:
        found, look, log = await _verify(dsn, request, [*heads, *request.archived_heads], anchors)
    except DATABASE_FAULTS as error:
        text = str(error) or type(error).__name__
        raise DatabaseUnavailableError(f"the ledger cannot be read from PostgreSQL: {text}") from error
    verdict = found.to_json((time.perf_counter() - began_s) * 1000)
    verdict = request.external.with_quorum(verdict, found.anchors)
    if request.keyring is None:
        without_trust(verdict["verdicts"])
        if verdict["verdicts"]["checkpoint"] == "ok":
            verdict["verdicts"]["checkpoint"] = "not_checked"
    verdict = verdict if request.archived is None else request.archived.joined(verdict, log)
    return verdict if look is None else look.with_verdict(verdict)


def _open_note(tenant: str, keyring: Keyring, text: str) -> tree_checkpoint.Checkpoint:
    found = tree_checkpoint.open_checkpoint(text, keyring)
    if not found.origin.endswith(f"/{tenant}"):
        raise SignatureError(f"the checkpoint is of log {found.origin!r}, not of tenant {tenant}")
    return found


async def _log_of(connection: Connection, tenant: str) -> str:
    """The log of the tenant's chain, as the database names it."""
    return own_log(await node.log_origin(connection), tenant) or ""


async def _look(reader: PostgresChainReader, request: Request) -> Observation | None:
    """The observation of this ledger to compare and remember; None for a range, or without keys."""
    if request.memory is None or request.keyring is None or (request.from_seq, request.to_seq) != (None, None):
        return None
    return Observation.at(request.memory, request.tenant, await reader.checkpoint(), request.keyring, datetime.now(UTC))


async def _verify(
    dsn: str, request: Request, heads: list[TreeHead], anchors: list[Anchor]
) -> tuple[Verdict, Observation | None, str]:
    tenant, keyring, external = request.tenant, request.keyring, request.external
    connection = await sessions.connect_alone(dsn, timeout_s=CONNECT_TIMEOUT_S)
    try:
        async with consistent_reader(connection, tenant) as reader:
            look = await _look(reader, request)
            log = await _log_of(connection, tenant)
            is_new = look is None or not look.before
            if is_new and await reader.head() is None and await reader.last_entry() is None:
                raise TenantNotFoundError(f"there is no tenant {tenant}")
            if keyring is not None and external.are_any:
                trusted = keyring
                judge = await newest_anchors(
                    connection,
                    tenant,
                    external.pinned(lambda text, time: _open_note(tenant, as_of(trusted, time), text)),
                    external.witnesses,
                    lambda _authority: external.roots,
                )
                anchors = anchors + judge()
            ring = keyring if keyring is not None else named_keys(await key_store.list_entries(connection))
            verify_rows = partial(
                verify,
                reader,
                tenant_id=tenant,
                from_seq=request.from_seq,
                to_seq=request.to_seq,
                open_snapshot=partial(open_snapshot, keyring=ring),
                checkpoints=[*heads, *(() if look is None else look.heads)],
                anchors=anchors,
                judge_statement=partial(retention_statement.judge, log, keyring),
                archived_index=request.archived,
            )
            is_whole = (request.from_seq, request.to_seq) == (None, None)
            callers = judge_of(ring)
            found = verified(dsn, reader, verify_rows, callers) if is_whole else verify_rows(callers=callers)
            return await found, look, log
    finally:
        await connection.close()
