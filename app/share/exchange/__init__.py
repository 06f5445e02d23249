"""The regions of ledgers that exchange: which of them hold an entry, which peers cannot be imported from, and which
regions are retired."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from time import monotonic

import asyncpg

from app.runtime.metrics import Values
from app.runtime.settings.sections import ExchangeSettings, PeerSettings
from app.runtime.tasks import Broadcast
from app.share.exchange.following import Following, Importing, TakeFetched, TakeOffered
from app.share.exchange.holdings import Holdings
from app.share.exchange.news import News
from app.share.exchange.peer import Peer, PeerKeys
from app.share.exchange.peer_client import Asker, PeerAddress
from app.share.exchange.turns import Turns
from ledger import rfc3339
from ledger.errors import DurabilityTimeoutError, ProblemError
from ledger.facts import problems
from signing.keys import Keyring
from signing.manifest import RangeManifest
from signing.region_statement import KnownRegions, RetiredRegion

UNSIGNED_S = 0.25
"""Longest time that a write waits for a checkpoint of its tenant to be signed, if no peer asks for news."""
SIGNING_S = 0.05
"""Longest time that a peer waits for such a checkpoint: with what was signed before, the write would wait longer."""


class Regions:
    """This ledger and its peers, each of which is a region."""

    def __init__(
        self,
        own: Asker,
        peers: Sequence[Peer],
        news: News,
        heard: Broadcast,
        sign_soon: Callable[[Iterable[str]], None],
    ) -> None:
        """``heard`` is sent when a peer has said what it holds. ``sign_soon`` has a checkpoint of tenants signed at
        once, so that peers fetch what a write waits for."""
        self.own = own
        self.peers = tuple(peers)
        self.news = news
        self.known = KnownRegions()
        """Retired regions and admitted keys, as the chain of ``_system`` has them."""
        self._own_key_ids: Set[str] = frozenset()
        """The keys that this ledger signs with, as that chain has them; empty until it was read."""
        self._heard = heard
        self._sign_soon = sign_soon
        self._unsigned: dict[str, int] = {}
        """Tenants of writes that wait, and their seqs, which no signed checkpoint was seen to cover."""
        self._signing: asyncio.TimerHandle | None = None
        """Has it signed, if no peer asks for news before."""

    @classmethod
    def of(
        cls,
        settings: ExchangeSettings,
        own: Asker,
        pool: asyncpg.Pool[asyncpg.Record],
        *,
        keys: Callable[[], Keyring],
        take_fetched: TakeFetched,
        take_offered: TakeOffered,
        head_seq: Callable[[str], int],
        sign_soon: Callable[[Iterable[str]], None],
    ) -> Regions:
        """The ledger ``own`` and the peers in the settings; no peer is asked yet. ``head_seq`` is a seq that
        the head of a tenant's chain has reached."""
        news, heard = News(), Broadcast()
        interval_s = settings.interval.total_seconds()
        importing = Importing(
            own=own,
            pool=pool,
            turns=Turns(pool),
            keys=keys,
            take_fetched=take_fetched,
            take_offered=take_offered,
            on_imported=lambda tenant_id, log_origin: news.changed((tenant_id,), log_origin),
            range_entries=settings.range_entries,
            interval_s=interval_s,
        )

        def peer_of(peer: PeerSettings) -> Peer:
            address = PeerAddress(peer)
            return Peer(
                peer,
                own,
                address,
                PeerKeys(peer.region, own, keys),
                Holdings(peer.url, own.origin, address, pool, head_seq, heard.send, interval_s),
                Following(peer, address, importing),
                interval_s,
            )

        return cls(own, [peer_of(each) for each in settings.peers], news, heard, sign_soon)

    def know(self, known: KnownRegions, own_key_ids: Set[str]) -> None:
        """These regions are retired, and no others; these keys of peers are trusted; this ledger signs with those."""
        self._own_key_ids = own_key_ids
        if known == self.known:
            return
        self.known = known
        for peer in self.peers:
            peer.know(known)

    def trusted(self, ring: Keyring) -> Keyring:
        """The keys of ``ring``, and those of peers that entries admit, without those that entries revoke."""
        admitted = [each.key for each in self.known.keys]
        return Keyring(key for key in (*ring, *admitted) if key.key_id not in self.known.revoked)

    def was_brought(self, bundle: RangeManifest) -> None:
        """An operator imported this bundle."""
        for peer in self.peers:
            peer.following.was_brought(bundle)

    def counted(self) -> list[Peer]:
        """The peers whose regions count in a majority."""
        return [peer for peer in self.peers if peer.retired is None]

    @property
    def majority(self) -> int:
        """How many regions, this ledger's included, must hold an entry at GLOBAL."""
        return (1 + len(self.counted())) // 2 + 1

    async def asked_by(self, asker: Asker) -> None:
        """A ledger asks for news, so it answers too if it is a peer. Returns once there is a checkpoint of what writes
        wait for, or ``SIGNING_S`` later.

        Raises:
            ProblemError: its region is retired here.
        """
        if (retired := self._retirement_of(asker)) is not None:
            raise ProblemError(
                problems.REGION_RETIRED,
                f"this ledger retired region {retired.region} at {rfc3339.text_of(retired.hlc.physical_ms)}, because: "
                f"{retired.reason}. It imports nothing from the ledger {asker.origin} and counts it in no majority. "
                "What that ledger chained since comes here by tally bundle export there and tally bundle import here",
            )
        for peer in self.counted():
            peer.is_alive(asker.origin)
        self._sign_unsigned()
        # Not for the writes that come meanwhile.
        await self.news.wait_signed(self._unsigned.copy(), SIGNING_S)

    def untrusted(self, region: str) -> list[str]:
        """Ids of the keys of a region's ledger that are not trusted."""
        asking = [peer for peer in self.peers if peer.settings.region == region]
        return [key.key_id for peer in asking for key in peer.keys.untrusted]

    def _retirement_of(self, asker: Asker) -> RetiredRegion | None:
        """Why a ledger gets no news: its region is retired, or its log was, and no peer shows that log again."""
        if asker.region in self.known.retired:
            return self.known.retired[asker.region]
        if any(peer.following.log_origin == asker.origin for peer in self.counted()):
            return None
        return self.known.logs.get(asker.origin)

    def _sign_for_peers(self, seqs: Mapping[str, int]) -> None:
        """Have a checkpoint up to these seqs signed as soon as a peer can take it: at once if one waits for news, else
        when the next one asks, which it may ask another node."""
        for tenant_id, seq in seqs.items():
            self._unsigned[tenant_id] = max(seq, self._unsigned.get(tenant_id, 0))
        if self._signing is None:
            after_s = 0.0 if self.news.waiting else UNSIGNED_S
            self._signing = asyncio.get_running_loop().call_later(after_s, self._sign_unsigned)

    def _sign_unsigned(self) -> None:
        if self._signing is not None:
            self._signing.cancel()
            self._signing = None
        self._unsigned = self.news.unsigned(self._unsigned)
        if self._unsigned:
            self._sign_soon(self._unsigned)

    async def spread(self, seqs: Mapping[str, int], timeout_s: float) -> None:
        """Return once a majority of the regions, this ledger included, holds each tenant's chain up to its seq. Only
        what peers say after this call counts, since a peer may have lost entries that it reported before.

        Raises:
            DurabilityTimeoutError: no majority holds them in time, or too many peers trust no key of this ledger: that
                is raised at once.
        """
        self._check_trusted(seqs)
        since_s = monotonic()
        self._sign_for_peers(seqs)
        # A peer that had them before reports no news of them, nor does one whose import added nothing to its chain.
        asking = [
            asyncio.create_task(peer.holdings.ask(tenant_id, seq))
            for peer in self.counted()
            for tenant_id, seq in seqs.items()
        ]
        try:
            async with asyncio.timeout(timeout_s):
                while not all(self._is_spread(tenant_id, seq, since_s) for tenant_id, seq in seqs.items()):
                    await self._heard.wait()
        except TimeoutError:
            missing = next((each for each in seqs.items() if not self._is_spread(*each, since_s)), None)
            if missing is None:  # the last peer said so in the turn of the event loop in which the time ended
                return
            lacking = [peer for peer in self.counted() if not peer.holdings.holds(*missing, since_s)]
            why = "; ".join(peer.why_not_held(*missing) for peer in lacking)
            raise DurabilityTimeoutError(
                f"a majority of the regions is not known to have imported it after {timeout_s:.1f} s; {why}"
            ) from None
        finally:
            for each in asking:
                each.cancel()

    def _check_trusted(self, seqs: Mapping[str, int]) -> None:
        """Fail at once if so many peers trust none of this ledger's keys that no majority is left."""
        own = self._own_key_ids
        distrusting = [peer for peer in self.counted() if own and own <= {*peer.keys.untrusted_there}]
        if 1 + len(self.counted()) - len(distrusting) < self.majority:
            missing = next(iter(seqs.items()))
            raise DurabilityTimeoutError(
                "no majority of the regions imports from this ledger; "
                + "; ".join(peer.why_not_held(*missing) for peer in distrusting)
            )

    def _is_spread(self, tenant_id: str, seq: int, since_s: float) -> bool:
        return 1 + sum(peer.holdings.holds(tenant_id, seq, since_s) for peer in self.counted()) >= self.majority

    def values(self) -> Values:
        """The metrics of each peer, by its address."""
        counted = self.counted()
        return {
            "exchange_imported_entries": {peer.settings.url: peer.following.imported_entries for peer in self.peers},
            "exchange_lag_entries": {peer.settings.url: peer.following.lag_entries for peer in counted},
            "exchange_failing": {peer.settings.url: peer.fault is not None for peer in counted},
            "exchange_keys_waited_for": {peer.settings.url: len(peer.keys.waits_for) for peer in counted},
        }

    def fault(self) -> str | None:
        """The peers that are not imported from, and why; None if all are."""
        return "; ".join(f"{peer.settings.url}: {peer.fault}" for peer in self.peers if peer.fault is not None) or None
