"""One peer: its newest signed checkpoints, proved to go on from those seen before, and the ranges that are lacking,
imported as bundles.

A round asks for each tenant in turn; a range at a time, in the order of the peer's chain. So what comes is causal: an
entry comes after those that its node had seen. After a crash the next round goes on behind the last range that was
stored, and a range imported twice adds nothing.

A peer that went back, or shows another tree of the same size, is not imported from any more until an operator decides.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import asyncpg
import httpx
import structlog

from app.access.principals import covers
from app.asking import NoAnswerError, read_answer
from app.exchange_settings import PeerSettings
from app.store import exchange
from app.store.exchange import Seen
from app.store.faults import DATABASE_FAULTS
from ledger.errors import LedgerError, ProofError, SignatureError
from ledger.machines.events import SYSTEM_TENANT
from ledger.merkle import verify_consistency
from signing.checkpoint import Checkpoint, open_checkpoint, read
from signing.keys import Keyring

TIMEOUT_S = 30.0
ANSWER_BYTES_MAX = 4 << 20
PAGE = 1000
PAUSE_MAX_S = 60.0
"""Longest between attempts to ask a peer that fails."""

log = structlog.get_logger()


class PeerWentBackError(LedgerError):
    """A peer shows a tree that does not go on from the one it showed before."""


@dataclass
class Peer:
    """What is asked of one peer, and what came of it. ``take`` imports a range, given in pieces under a name."""

    settings: PeerSettings
    own_origin: str
    pool: asyncpg.Pool[asyncpg.Record]
    keys: Callable[[], Keyring]
    take: Callable[[str, AsyncIterator[bytes]], Awaitable[None]]
    range_entries: int
    interval_s: float
    fault: str | None = None
    lag_entries: int = 0
    """How many entries it has chained that are not imported."""
    imported_entries: int = 0
    held: dict[str, int] = field(default_factory=dict)
    """By tenant, up to which seq of this ledger the peer has imported."""
    on_held: Callable[[], None] = lambda: None

    async def run(self) -> None:
        """Ask for ever; ever less often while the peer fails."""
        pause_s = self.interval_s
        while True:
            try:
                async with self.pool.acquire() as connection, exchange.turn(connection, self.settings.url) as is_ours:
                    if is_ours:
                        await self._round()
                await self._learn_held()
                if self.fault is not None:
                    log.info("exchange_resumed", peer=self.settings.url)
                self.fault, pause_s = None, self.interval_s
            except (LedgerError, TimeoutError, *DATABASE_FAULTS) as error:
                if self.fault is None:
                    log.warning("exchange_interrupted", peer=self.settings.url, error=str(error))
                self.fault = f"{type(error).__name__}: {error}"
                pause_s = min(2 * pause_s, max(PAUSE_MAX_S, self.interval_s))
            await asyncio.sleep(pause_s)

    async def _round(self) -> None:
        async with self._client() as client:
            keyring = await asyncio.to_thread(self.keys)
            lag = 0
            for tenant_id in await self._tenants(client):
                lag += await self._tenant(client, keyring, tenant_id)
            self.lag_entries = lag

    def _client(self) -> httpx.AsyncClient:
        settings = self.settings
        context = ssl.create_default_context(cafile=str(settings.ca) if settings.ca else None)
        token = settings.token_file.read_text().strip() if settings.token_file else None
        return httpx.AsyncClient(
            base_url=settings.url,
            verify=context,
            timeout=TIMEOUT_S,
            trust_env=False,
            headers={"Authorization": f"Bearer {token}"} if token else {},
        )

    async def _tenants(self, client: httpx.AsyncClient) -> list[str]:
        found: list[str] = []
        cursor = None
        while True:
            said = await self._get(client, "/v1/tenants", limit=PAGE, **({"cursor": cursor} if cursor else {}))
            found += [item["tenant_id"] for item in said["items"]]
            cursor = said["next_cursor"]
            if cursor is None:
                break
        wanted = self.settings.tenants
        return [each for each in found if each != SYSTEM_TENANT and any(covers(pattern, each) for pattern in wanted)]

    async def _tenant(self, client: httpx.AsyncClient, keyring: Keyring, tenant_id: str) -> int:
        """Import what the peer's newest checkpoint covers of a tenant; how much is lacking then."""
        note = (await self._ask(client, f"/v1/log/{tenant_id}/checkpoint")).decode()
        checkpoint = open_checkpoint(note, keyring)
        origin = checkpoint.origin
        if not origin.endswith(f"/{tenant_id}") or origin == f"{self.own_origin}/{tenant_id}":
            raise SignatureError(f"the peer shows a checkpoint of {origin} for tenant {tenant_id}")
        async with self.pool.acquire() as connection:
            seen = await exchange.position(connection, tenant_id, origin)
        await self._prove(client, tenant_id, seen, checkpoint)
        async with self.pool.acquire() as connection:
            await exchange.saw(connection, tenant_id, origin, note, checkpoint.size)
        from_seq = (seen.imported_seq if seen else 0) + 1
        while from_seq <= checkpoint.size:
            to_seq = min(from_seq + self.range_entries - 1, checkpoint.size)
            await self._fetch(client, tenant_id, from_seq, to_seq)
            async with self.pool.acquire() as connection:
                await exchange.imported(connection, tenant_id, origin, to_seq)
            self.imported_entries += to_seq - from_seq + 1
            from_seq = to_seq + 1
        return 0

    async def _prove(
        self, client: httpx.AsyncClient, tenant_id: str, seen: Seen | None, checkpoint: Checkpoint
    ) -> None:
        """Refuse a tree that does not go on from the one that was seen before."""
        if seen is None:
            return
        before = read(seen.note)
        if checkpoint.size < before.size or (checkpoint.size == before.size and checkpoint.root != before.root):
            raise PeerWentBackError(
                f"tenant {tenant_id} of {self.settings.url} had {before.size} entries under another root, and now has "
                f"{checkpoint.size}: it was restored from before or changed. Compare with tally pipeline diff"
            )
        if checkpoint.size == before.size or not before.size:
            return
        asked = {"tenant_id": tenant_id, "first": before.size, "second": checkpoint.size}
        said = await self._get(client, "/v1/chain/proof/consistency", **asked)
        try:
            hashes = [bytes.fromhex(each) for each in said["hashes"]]
            verify_consistency(before.size, checkpoint.size, before.root, checkpoint.root, hashes)
        except (ProofError, ValueError) as error:
            raise PeerWentBackError(
                f"tenant {tenant_id} of {self.settings.url}: nothing proves that its tree of {checkpoint.size} entries "
                f"goes on from that of {before.size} seen before: {error}"
            ) from error

    async def _fetch(self, client: httpx.AsyncClient, tenant_id: str, from_seq: int, to_seq: int) -> None:
        """Import one range."""
        asked = {"tenant_id": tenant_id, "from_seq": from_seq, "to_seq": to_seq}

        async def pieces() -> AsyncIterator[bytes]:
            try:
                async with client.stream("POST", "/v1/bundles/export", json=asked) as answer:
                    if answer.status_code != httpx.codes.OK:
                        raise NoAnswerError(f"{answer.url} answers {answer.status_code}")
                    async for piece in answer.aiter_raw():
                        yield piece
            except httpx.HTTPError as error:
                raise NoAnswerError(f"{self.settings.url} does not answer: {error!r}") from error

        await self.take(f"{tenant_id} {from_seq}-{to_seq} of {self.settings.url}", pieces())

    async def _learn_held(self) -> None:
        """What the peer has imported of this ledger."""
        async with self._client() as client:
            after = ""
            while True:
                said = await self._get(client, "/v1/exchange/held", origin=self.own_origin, after=after, limit=PAGE)
                self.held.update((item["tenant_id"], item["seq"]) for item in said["items"])
                if len(said["items"]) < PAGE:
                    break
                after = said["items"][-1]["tenant_id"]
        self.on_held()

    async def _get(self, client: httpx.AsyncClient, path: str, **asked: Any) -> Mapping[str, Any]:
        body = await self._ask(client, path, params=asked)
        try:
            said: Mapping[str, Any] = json.loads(body)
        except ValueError as error:
            raise NoAnswerError(f"{self.settings.url}{path} does not answer JSON") from error
        return said

    async def _ask(self, client: httpx.AsyncClient, path: str, **asked: Any) -> bytes:
        return await read_answer(client, "GET", path, bytes_max=ANSWER_BYTES_MAX, **asked)
