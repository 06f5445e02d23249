"""The keys that a peer signs with, which of them this ledger does not trust yet, and which of its own the peer does
not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import monotonic

from app.share.exchange.peer_client import Asker, PeerClient
from signing.keys import Keyring, PublicKey
from signing.region_statement import RevokedKey

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
