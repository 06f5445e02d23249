"""The regions of ledgers that exchange: which of them hold an entry, and which peers cannot be imported from."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import monotonic

import asyncpg

from app.runtime.metrics import Values
from app.runtime.settings.sections import ExchangeSettings
from app.share.exchange.news import News
from app.share.exchange.peer import Peer, Take
from app.share.exchange.turns import Turns
from ledger.errors import DurabilityTimeoutError
from signing.keys import Keyring


class Regions:
    """This ledger and its peers, each of which is a region."""

    def __init__(self, peers: Sequence[Peer], news: News, sign_soon: Callable[[Iterable[str]], None]) -> None:
        """``sign_soon`` has a checkpoint of tenants signed at once, so that peers fetch what a write waits for."""
        self.peers = tuple(peers)
        self.news = news
        self._sign_soon = sign_soon
        self._changed = asyncio.Event()
        for peer in self.peers:
            peer.on_held = self._learnt

    @classmethod
    def of(
        cls,
        settings: ExchangeSettings,
        own_origin: str,
        pool: asyncpg.Pool[asyncpg.Record],
        keys: Callable[[], Keyring],
        take: Take,
        sign_soon: Callable[[Iterable[str]], None],
    ) -> Regions:
        """The ledger of ``own_origin`` and the peers in the settings; no peer is asked yet."""
        news, turns, interval_s = News(), Turns(pool), settings.interval.total_seconds()
        return cls(
            [
                Peer(
                    each,
                    own_origin,
                    pool,
                    turns,
                    keys,
                    take,
                    lambda tenant_id: news.changed((tenant_id,)),
                    settings.range_entries,
                    interval_s,
                )
                for each in settings.peers
            ],
            news,
            sign_soon,
        )

    def asked_by(self, log_origin: str) -> None:
        """A ledger asks for news, so it answers too if it is a peer."""
        for peer in self.peers:
            peer.is_alive(log_origin)

    def _learnt(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def spread(self, seqs: Mapping[str, int], timeout_s: float) -> None:
        """Return once a majority of the regions, this ledger included, holds each tenant's chain up to its seq. Only
        what peers say after this call counts, since a peer may have lost entries that it reported before.

        Raises:
            DurabilityTimeoutError: no majority holds them in time.
        """
        since_s = monotonic()
        self._sign_soon(seqs)
        # A peer that had them before tells no news of them.
        asking = [
            asyncio.create_task(peer.ask_held(tenant_id))
            for peer in self.peers
            for tenant_id, seq in seqs.items()
            if tenant_id in peer.held and peer.held[tenant_id].seq >= seq
        ]
        try:
            async with asyncio.timeout(timeout_s):
                while not all(self._is_spread(tenant_id, seq, since_s) for tenant_id, seq in seqs.items()):
                    await self._changed.wait()
        except TimeoutError:
            away = [peer.settings.url for peer in self.peers if peer.heard_s < since_s]
            silent = f"; {', '.join(away)} did not say what they hold" if away else ""
            raise DurabilityTimeoutError(
                f"a majority of the regions is not known to have imported it after {timeout_s:.1f} s{silent}"
            ) from None
        finally:
            for each in asking:
                each.cancel()

    def _is_spread(self, tenant_id: str, seq: int, since_s: float) -> bool:
        held = [peer.held[tenant_id] for peer in self.peers if tenant_id in peer.held]
        return 1 + sum(each.at_s >= since_s and each.seq >= seq for each in held) > (1 + len(self.peers)) // 2

    def values(self) -> Values:
        """The metrics of each peer, by its address."""
        return {
            "exchange_imported_entries": {peer.settings.url: peer.imported_entries for peer in self.peers},
            "exchange_lag_entries": {peer.settings.url: peer.lag_entries for peer in self.peers},
            "exchange_failing": {peer.settings.url: peer.fault is not None for peer in self.peers},
        }

    def fault(self) -> str | None:
        """The peers that are not imported from, and why; None if all are."""
        return "; ".join(f"{peer.settings.url}: {peer.fault}" for peer in self.peers if peer.fault is not None) or None
