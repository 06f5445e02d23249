"""Time stamps of external authorities (RFC 3161) on checkpoints.

A task asks the authorities to stamp the newest checkpoints. It repeats for each::

    1. find the tenants whose tree grew since this authority's last stamp, if that is ``interval`` old or older
    2. for each, one at a time: read its newest checkpoint and verify this log's signature on it
    3. ask; the response must be for these bytes and this request and, if a CA file is given, chain to it
    4. store it

No other part waits for it. An authority that does not answer is asked again after a pause that doubles. Failures are in
the log and in ``log_timestamp_failures_total``; chaining, checkpoints and readiness do not depend on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple

import httpx
from cryptography import x509

from app.runtime.logs import log
from app.runtime.metrics import Metrics
from app.runtime.outgoing import client_of, read_answer
from app.runtime.postgres import DATABASE_FAULTS
from app.store import anchors
from app.store.reading import Pool
from ledger.errors import (
    LedgerError,
    SignatureError,
)
from ledger.verification.verdict import Break
from signing.anchors import RESPONSE_BYTES_MAX, make_request, open_timestamp
from signing.checkpoint import open_checkpoint
from signing.keys import Keyring

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
        async with self.pool.acquire() as connection:
            due = await anchors.due_for_timestamp(connection, authority.url, self.interval, NOTES_A_ROUND)
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
            async with self.pool.acquire() as connection:
                await anchors.insert_timestamp(
                    connection,
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
