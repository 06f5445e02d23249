"""One peer, in two loops: one hears its news, the other follows its chains.

One hears: it asks the peer for news with a request that the peer answers once there are some, so a new checkpoint, and
what the peer has imported, are known within a round trip. The other follows (``following``): it proves the checkpoints
that were heard of and then imports.

``PeerKeys`` are the keys that a peer signs with, which of them this ledger does not trust yet, and which of its own the
peer does not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import partial
from time import monotonic

from app.runtime.logs import log
from app.runtime.outgoing import NoAnswerError
from app.runtime.postgres import DATABASE_FAULTS
from app.runtime.settings.sections import PeerSettings
from app.runtime.tasks import is_set_within
from app.share.exchange.following import Following
from app.share.exchange.holdings import Holdings
from app.share.exchange.peer_client import NEWS_WAIT_S_MAX, TENANTS_MAX, Asker, PeerAddress, PeerClient, TenantNews
from ledger.errors import LedgerError
from signing.keys import Keyring, PublicKey
from signing.region_statement import KnownRegions, RetiredRegion, RevokedKey

PAUSE_MAX_S = 60.0
"""Longest pause between attempts to ask a failing peer."""
SIGNS_OF_LIFE_S = 1.0
"""A sign of life ends a pause, but not more often than this."""
LISTED_EVERY_S = 60.0
"""How often a peer lists all its tenants again: it may hide one, or its token may have got another."""
BUSY_S = 0.25
"""How long news waits while a round imports. What the peer holds is still heard while a long import runs."""
NEWS_EVERY_S = 0.05
"""Shortest time from one request for news to the next, unless the first one brought entries, or more is held."""
NEWS_TENANT_S = 0.0002
"""How much longer it is for each tenant in the answer: more than ten times what reading it takes the event loop."""
CLAIMS_NAMED_MAX = 5
"""Tenants that are named with an impossible claim."""


@dataclass
class Peer:
    """The exchange with one peer, and its state."""

    settings: PeerSettings
    own: Asker
    """This ledger."""
    address: PeerAddress
    keys: PeerKeys
    holdings: Holdings
    following: Following
    interval_s: float
    retired: RetiredRegion | None = None
    """Why it is neither heard nor followed, once its region is retired."""
    _faults: dict[str, str] = field(default_factory=dict, init=False)
    """Why it is not heard or followed, by loop."""
    _cursor: str = field(default="", init=False)
    """The cursor of its last answer, opaque to this ledger."""
    _alive: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _counts: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """Set while its region is not retired."""

    def __post_init__(self) -> None:
        self._counts.set()

    @property
    def is_heard(self) -> bool:
        """Whether it answered when it was asked last."""
        return self.holdings.heard_s > 0 and "hear" not in self._faults

    @property
    def fault(self) -> str | None:
        """Why it, or some of its tenants, are not imported from; None if all are, or if its region is retired."""
        if self.retired is not None:
            return None
        named = [*self.keys.waits_for, *dict.fromkeys(self._faults.values())]
        return "; ".join([*named, *self.holdings.faults[:CLAIMS_NAMED_MAX], *self.following.faults]) or None

    def why_not_held(self, tenant_id: str, seq: int) -> str:
        """Why it is not known to hold a tenant's chain of this ledger up to ``seq``."""
        url = self.settings.url
        if self.keys.untrusted_there:
            return f"{url} imports nothing yet: " + "; ".join(self.keys.admissions_there)
        if not self.is_heard:
            return f"{url} does not say what it holds: {self._faults.get('hear', 'it was not asked yet')}"
        return f"{url} has imported {self.holdings.seq(tenant_id)} of {seq} entries of tenant {tenant_id}"

    def know(self, known: KnownRegions) -> None:
        """Neither hear nor follow it, from now on, if its region is retired; once that ends, whatever answers is a new
        peer. Trust no key that is revoked."""
        self.keys.know(known.revoked)
        retired = known.retired.get(self.settings.region)
        if retired == self.retired:
            return
        self.retired = retired
        self.following.is_retired = retired is not None
        self._faults, self._cursor = {}, ""
        self.keys.forget()
        self.holdings.forget()
        self.following.forget()
        if retired is None:
            self._counts.set()
        else:
            self._counts.clear()
        self._alive.set()
        self.holdings.on_heard()

    async def signing_keys(self) -> list[PublicKey]:
        """Ask now which keys its ledger signs with.

        Raises:
            NoAnswerError: it does not answer.
            ConfigurationError, OSError: as ``PeerAddress.open``.
        """
        async with await self.address.open() as http:
            return await PeerClient(self.settings.url, http).signing_keys()

    async def run(self) -> None:
        """Hear and follow for ever."""
        async with asyncio.TaskGroup() as both:
            both.create_task(self._repeated("hear", self._hear))
            follow = partial(self.following.run, on_round=partial(self._went_well, "follow"))
            both.create_task(self._repeated("follow", follow))

    async def _repeated(self, name: str, loop: Callable[[PeerClient], Awaitable[None]]) -> None:
        """Run ``loop`` again each time that it fails, less and less often; a sign of life of the peer ends a pause."""
        pause_s = self.interval_s
        while True:
            await self._counts.wait()
            try:
                async with await self.address.open() as http:
                    await loop(PeerClient(self.settings.url, http))
            except (LedgerError, TimeoutError, *DATABASE_FAULTS) as error:
                if name in self._faults:
                    pause_s = min(2 * pause_s, max(PAUSE_MAX_S, self.interval_s))
                else:
                    log.warning("exchange_interrupted", peer=self.settings.url, error=str(error))
                    pause_s = self.interval_s
                self._faults[name] = f"{type(error).__name__}: {error}"
                self.address.read_again()
            self._alive.clear()
            await asyncio.sleep(min(pause_s, SIGNS_OF_LIFE_S))
            await is_set_within(self._alive, pause_s - SIGNS_OF_LIFE_S)

    def _went_well(self, name: str) -> None:
        if self._faults.pop(name, None) is not None and not self._faults:
            log.info("exchange_resumed", peer=self.settings.url)

    def is_alive(self, log_origin: str) -> None:
        """A ledger of this origin asks for news. If it is this peer, it answers again: it is asked now."""
        if self._faults and self.following.log_origin in ("", log_origin):
            self._alive.set()

    # --- hearing ----------------------------------------------------------------------------------

    async def _hear(self, client: PeerClient) -> None:
        """Ask for the list of tenants, then for news, and for the list again from time to time."""
        wait_s = min(self.interval_s, NEWS_WAIT_S_MAX)
        while self.retired is None:
            listed_s = monotonic()
            await self._fetch_keys(client)
            await self._list(client)
            self._went_well("hear")
            is_list = False
            while not is_list and monotonic() < listed_s + LISTED_EVERY_S and not self._must_list():
                await self.address.authorize(client.http)
                await self._compare_keys()
                asked_s = monotonic()
                news = await client.news(self.own, self._cursor, wait_s, await self.following.progress())
                # Another node of the peer answers, or it was started again: its list begins.
                is_list, self._cursor = news.is_list, news.cursor
                self.keys.untrusted_there = tuple(news.untrusted)
                imported_entries = self.following.imported_entries
                is_more_held = await self._heard(news.items)
                _check_count(self.following.listed, self.settings.url)
                await asyncio.sleep(NEWS_TENANT_S * len(news.items))
                # A newer checkpoint is of use once the ones before are imported.
                await is_set_within(self.following.idle, BUSY_S)
                if not is_more_held and self.following.imported_entries == imported_entries:
                    # It may answer without news, as it stops. It may also send the same news without end.
                    next_s = asked_s + (NEWS_EVERY_S if news.items else wait_s)
                    await asyncio.sleep(next_s - monotonic())
            await asyncio.sleep(listed_s + wait_s - monotonic())

    async def _fetch_keys(self, client: PeerClient) -> None:
        """Learn which keys the peer signs with, and which of them are not trusted."""
        try:
            await self.keys.fetch(client)
        except NoAnswerError as error:
            # What it holds can be heard all the same.
            self._faults["keys"] = str(error)
            return
        self._faults.pop("keys", None)
        await self._compare_keys()

    async def _compare_keys(self) -> None:
        if await self.keys.compare():
            self.following.try_again()

    async def _list(self, client: PeerClient) -> None:
        """Hear of all tenants."""
        self.following.list_begins()
        listed: set[str] = set()
        self._cursor, after, has_more = "", "", True
        while has_more:
            page = await client.listed(self.own, self._cursor, after)
            self.keys.untrusted_there = tuple(page.untrusted)
            listed |= {each.tenant_id for each in page.items}
            _check_count(listed, self.settings.url)
            await self._heard(page.items)
            self._cursor, has_more = page.cursor, page.has_more
            after = page.items[-1].tenant_id if page.items else after
        self.holdings.keep_only(listed)
        self.following.list_ends(listed)

    async def _heard(self, items: Sequence[TenantNews]) -> bool:
        is_more_held = await self.holdings.hear({each.tenant_id: each.held for each in items})
        self.following.heard(items)
        return is_more_held

    def _must_list(self) -> bool:
        return self.retired is not None or self.following.has_gone_back


def _check_count(tenant_ids: Sized, url: str) -> None:
    if len(tenant_ids) > TENANTS_MAX:
        raise NoAnswerError(f"{url} tells of more than {TENANTS_MAX} tenants")


READ_EVERY_S = 1.0
"""How often the trusted keys are read while a key of the peer is not among them."""


@dataclass
class PeerKeys:
    """The keys of one peer."""

    region: str
    """The peer's."""
    own: Asker
    """This ledger."""
    trusted: Callable[[], Keyring]
    """Reads the keys that this ledger trusts; there may be none."""
    untrusted: tuple[PublicKey, ...] = ()
    """Keys that the peer signs with and that this ledger does not trust yet."""
    untrusted_there: tuple[str, ...] = ()
    """Ids of the keys that this ledger signs with and that the peer does not trust yet."""
    _revoked: Mapping[str, RevokedKey] = field(default_factory=dict, init=False)
    _signing: tuple[PublicKey, ...] = field(default=(), init=False)
    _is_compared: bool = field(default=False, init=False)
    """Whether the keys were compared with the trusted ones since either changed."""
    _read_s: float = field(default=0.0, init=False)

    @property
    def waits_for(self) -> list[str]:
        """The admissions of keys that the exchange waits for, with the command of each."""
        here = [
            f"this ledger does not trust key {key.key_id}, which the ledger of region {self.region} signs with: "
            + (
                f"it was revoked here, because: {self._revoked[key.key_id].reason}"
                if key.key_id in self._revoked
                else f"compare it with tally keys list there, then run tally peer admit {self.region} {key.key_id} here"
            )
            for key in self.untrusted
        ]
        return here + self.admissions_there

    @property
    def admissions_there(self) -> list[str]:
        """Those of keys of this ledger, at the peer."""
        return [
            f"the ledger of region {self.region} does not trust key {key_id} of this one: run tally peer admit "
            f"{self.own.region} {key_id} there"
            for key_id in self.untrusted_there
        ]

    async def fetch(self, client: PeerClient) -> None:
        """Ask which keys the peer signs with.

        Raises:
            NoAnswerError: it does not say.
        """
        self._signing = tuple(await client.signing_keys())
        self._is_compared = False

    def know(self, revoked: Mapping[str, RevokedKey]) -> None:
        """These keys are trusted no longer. Which others are trusted is read before the next request for news."""
        self._revoked = revoked
        self._is_compared = False

    async def compare(self) -> bool:
        """Read which of the peer's keys are trusted by now. Returns whether that changed."""
        if self._is_compared and (not self.untrusted or monotonic() < self._read_s + READ_EVERY_S):
            return False
        self._read_s, self._is_compared = monotonic(), True
        ring, before = await asyncio.to_thread(self.trusted), self.untrusted
        self.untrusted = tuple(key for key in self._signing if ring.get(key.key_id) is None)
        return self.untrusted != before

    def forget(self) -> None:
        """Whatever answers next is another ledger."""
        self.untrusted, self.untrusted_there, self._signing = (), (), ()
