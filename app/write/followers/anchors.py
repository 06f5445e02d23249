"""What others sign on checkpoints: time stamps of authorities, and cosignatures that witnesses hand in.

*Time stamps* (RFC 3161). A task asks the authorities to stamp the newest checkpoints. It repeats for each::

    1. find the tenants whose tree grew since this authority's last stamp, if that is ``interval`` old or older
    2. for each, one at a time: read its newest checkpoint and verify this log's signature on it
    3. ask; the response must be for these bytes and this request and, if a CA file is given, chain to it
    4. store it

No other part waits for it. An authority that does not answer is asked again after a pause that doubles. Failures are in
the log and in ``log_timestamp_failures_total``; chaining, checkpoints and readiness do not depend on it.

*Cosignatures.* A witness sends a note. It is accepted after these checks, in this order::

    1. its text is a checkpoint of this tenant's log, and this log's signature on it is valid
    2. its size is covered by the newest checkpoint, and its root is that of the tree at that size
    3. at least one registered witness has cosigned it, and every cosignature of a registered witness is valid
    4. no cosignature lies in the future
    5. at least one is new: its witness has not cosigned a larger tree yet, nor this one then or later

Each new cosignature is stored as its own row. A note that fails a check stores nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import NamedTuple

import httpx
from cryptography import x509

from app.runtime.logs import log
from app.runtime.metrics import Metrics
from app.runtime.outgoing import client_of, read_answer
from app.runtime.postgres import DATABASE_FAULTS
from app.store import Connection, anchors, chain_reads
from app.store import notary as store
from app.store.reading import Pool, reading, run_in
from ledger.errors import (
    ClockSkewError,
    LedgerError,
    ProblemError,
    ProofError,
    SignatureError,
    reported_as,
)
from ledger.facts.problems import COSIGNATURE_REFUSED
from ledger.merkle import tiles
from ledger.verification.verdict import Break
from signing import checkpoint as checkpoints
from signing import note as notes
from signing.anchors import RESPONSE_BYTES_MAX, make_request, open_timestamp
from signing.checkpoint import Checkpoint, open_checkpoint
from signing.keys import Keyring
from signing.note import Cosignature, Note, WitnessKey, cosignatures_of

REQUEST_TIMEOUT_S = 30.0
NOTES_A_ROUND = 1000
"""Checkpoints stamped before the due tenants are read again."""
LOOK_INTERVAL_S = 60.0
"""Longest time between two reads of the due tenants."""
BACKOFF_MIN_S, BACKOFF_MAX_S = 1.0, 600.0
"""First and longest pause after an authority failed."""


class Authority(NamedTuple):
    """A time-stamping authority; ``roots`` are the certificates that it must chain to, empty if none are configured."""

    url: str
    roots: Sequence[x509.Certificate]


@dataclass(kw_only=True, eq=False)
class Timestamper:
    """Gets time stamps of all configured authorities for the checkpoints of one ledger."""

    pool: Pool
    authorities: Sequence[Authority]
    interval: timedelta
    origin: Callable[[str], str]
    keyring: Callable[[], Awaitable[Keyring]]
    metrics: Metrics
    report: Callable[[str, Break, str], object]
    """Records a break of a tenant, and the part of the node that found it."""

    async def run(self) -> None:
        """Stamp checkpoints until cancelled."""
        client = client_of(
            await asyncio.to_thread(httpx.create_ssl_context), timeout_s=REQUEST_TIMEOUT_S, has_proxies=True
        )
        async with client, asyncio.TaskGroup() as group:
            for authority in self.authorities:
                group.create_task(self._keep_stamping(client, authority))

    async def _keep_stamping(self, client: httpx.AsyncClient, authority: Authority) -> None:
        pause_s = BACKOFF_MIN_S
        while True:
            try:
                while await self._stamp_due(client, authority) == NOTES_A_ROUND:
                    pass
            except (LedgerError, *DATABASE_FAULTS) as error:
                self.metrics.count("log_timestamp_failures")
                log.warning("timestamp_failed", authority=authority.url, error=str(error), retry_in_s=pause_s)
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, BACKOFF_MAX_S)
            else:
                pause_s = BACKOFF_MIN_S
                await asyncio.sleep(min(self.interval.total_seconds(), LOOK_INTERVAL_S))

    async def _stamp_due(self, client: httpx.AsyncClient, authority: Authority) -> int:
        """Stamp one round of checkpoints; returns how many were due."""
        due = await run_in(self.pool.acquire(), anchors.due_for_timestamp, authority.url, self.interval, NOTES_A_ROUND)
        keyring = await self.keyring() if due else None
        for tenant_id, note in due:
            assert keyring is not None
            try:
                size = open_checkpoint(note, keyring, origin=self.origin(tenant_id)).size
            except SignatureError as error:
                detail = f"the stored checkpoint is not one of this log: {error}"
                self.report(tenant_id, Break(0, "tree", detail, None, detail), "timestamper")
                continue
            response, time = await _ask(client, authority, note.encode())
            await run_in(
                self.pool.acquire(),
                anchors.insert_timestamp,
                tenant_id=tenant_id,
                authority=authority.url,
                tree_size=size,
                generated_at=time,
                note=note,
                response=response,
            )
            self.metrics.count("log_timestamps")
        return len(due)


async def _ask(client: httpx.AsyncClient, authority: Authority, note: bytes) -> tuple[bytes, datetime]:
    """The authority's response on ``note`` and the time it states.

    Raises:
        NoAnswerError: it does not answer, or not with 200 and a bounded body.
        SignatureError: its response is not a valid stamp of ``note``.
    """
    body, nonce = make_request(note)
    response = await read_answer(
        client,
        "POST",
        authority.url,
        bytes_max=RESPONSE_BYTES_MAX,
        within_s=REQUEST_TIMEOUT_S,
        content=body,
        headers={"Content-Type": "application/timestamp-query", "Accept": "application/timestamp-reply"},
    )
    return response, await asyncio.to_thread(open_timestamp, response, note, authority.roots or None, nonce)


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
