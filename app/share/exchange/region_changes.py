"""Retiring a region, and admitting and revoking keys of peers, by entries of ``_system``, and following these entries.

The chain is the authority (``signing.region_statement``): each node reads it at its start and once a second, also
without peers in its settings, since a revoked key must stay revoked. While the chain is damaged, what was known last
stays.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from app.runtime.logs import log
from app.runtime.principals import Principal
from app.runtime.tasks import repeat
from app.share.exchange import Regions
from app.share.exchange.peer import Peer
from app.trust.key_changes import FOLLOW_INTERVAL_S, KeyChanges
from ledger import rfc3339
from ledger.errors import KeyConflictError, LedgerError, NotFoundError, ProblemError
from ledger.facts import problems
from ledger.facts.events import SystemAction
from ledger.hlc import Hlc
from signing.keys import Keyring, PublicKey
from signing.region_statement import REGION_PREFIX, AdmittedKey, RetiredRegion, RevokedKey

KEYS_WAIT_S_MAX = 2.0
"""Longest wait for the keys of a peer before a revocation, which must not depend on peers that are away."""
_NOT_CHAINED = Hlc(0, 0, "new")


@dataclass(kw_only=True, eq=False)
class RegionChanges:
    """Follows and changes the regions of one node's ledger. Belongs to one event loop."""

    regions: Regions
    keys: KeyChanges
    trusted_keys: Callable[[], Keyring]
    """Reads the keys that imports trust."""

    async def refresh(self) -> None:
        """Take over what the chain now says.

        Raises:
            DatabaseUnavailableError: PostgreSQL cannot be reached.
        """
        history = await self.keys.history()
        if self.keys.chain.fault is None:
            self.regions.know(history.regions, history.authorities)

    async def run(self) -> None:
        """Follow the chain until cancelled."""
        await repeat(self.refresh, FOLLOW_INTERVAL_S, "regions_not_followed")

    async def retire(self, region: str, reason: str, by: Principal, *, is_forced: bool) -> RetiredRegion:
        """Retire a region: no majority counts it, and nothing is imported from it, from now on at this node.

        Raises:
            NotFoundError: no peer is of this region.
            ProblemError: it is retired already, or its ledger answers and ``is_forced`` is not set.
            KeyConflictError, NotReadyError, DatabaseUnavailableError, DurabilityTimeoutError, ChainDamagedError: as
                ``_enter``.
        """
        peer = self._peer_of(region)
        await self.refresh()
        if (known := self.regions.known.retired.get(region)) is not None:
            raise ProblemError(
                problems.REGION_CONFLICT,
                f"region {region} is retired since {rfc3339.text_of(known.hlc.physical_ms)}, because: {known.reason}",
            )
        if peer.is_heard and not is_forced:
            raise ProblemError(
                problems.REGION_CONFLICT,
                f"the ledger of region {region} at {peer.settings.url} answers, so it is not lost: stop it first, or "
                "retire it all the same with --force",
            )
        log_origin, lag_entries = peer.following.log_origin, peer.following.lag_entries
        retired = RetiredRegion(_new_id(), region, reason, _NOT_CHAINED, log_origin, lag_entries, by.id)
        await self._enter(SystemAction.REGION_RETIRED, region, retired.facts())
        log.warning("region_retired", region=region, reason=reason, lag_entries=retired.lag_entries, by=by.id)
        return self.regions.known.retired.get(region, retired)

    async def admit(self, region: str, key_id: str, by: Principal) -> AdmittedKey:
        """Trust a key that the ledger of a peer's region publishes. A retired region counts again.

        Raises:
            NotFoundError: no peer is of this region, or its ledger does not sign with this key.
            NoAnswerError: that ledger does not answer.
            KeyConflictError, NotReadyError, DatabaseUnavailableError, DurabilityTimeoutError, ChainDamagedError: as
                ``_enter``.
        """
        peer = self._peer_of(region)
        keys = await peer.signing_keys()
        if (key := next((each for each in keys if each.key_id == key_id), None)) is None:
            signing = ", ".join(each.key_id for each in keys) or "no key"
            raise NotFoundError(
                f"the ledger of region {region} at {peer.settings.url} signs with {signing}, not {key_id}"
            )
        admitted = AdmittedKey(_new_id(), region, key, by.id)
        await self._enter(SystemAction.REGION_ADMITTED, region, admitted.facts())
        log.info("region_admitted", region=region, key_id=key_id, by=by.id)
        return admitted

    async def revoke(self, region: str, key_id: str, reason: str, by: Principal) -> RevokedKey:
        """Trust a key of a region no longer: no import of what it signed begins after this, at this node. The region
        need not be a peer any more.

        Raises:
            NotFoundError: the key is not trusted, or it is known to be of other regions.
            KeyConflictError: this ledger signs with it; and as ``_enter``.
            NotReadyError, DatabaseUnavailableError, DurabilityTimeoutError, ChainDamagedError: as ``_enter``.
        """
        await self.refresh()
        if (earlier := self.regions.known.revoked.get(key_id)) is not None:
            raise NotFoundError(f"key {key_id} is revoked already, because: {earlier.reason}")
        if key_id in (await self.keys.history()).admitted:
            raise KeyConflictError(f"this ledger signs with key {key_id}: tally keys revoke {key_id} revokes it")
        if (await asyncio.to_thread(self.trusted_keys)).get(key_id) is None:
            raise NotFoundError(f"key {key_id} is not trusted here")
        if (owners := await self._regions_of(key_id)) and region not in owners:
            raise NotFoundError(
                f"key {key_id} is not of region {region} but of {' and '.join(owners)}: run tally peer revoke "
                f"{owners[0]} {key_id}"
            )
        revoked = RevokedKey(_new_id(), region, key_id, reason, by.id)
        await self._enter(SystemAction.REGION_KEY_REVOKED, region, revoked.facts())
        log.warning("region_key_revoked", region=region, key_id=key_id, reason=reason, by=by.id)
        return revoked

    def _peer_of(self, region: str) -> Peer:
        peers = {peer.settings.region: peer for peer in self.regions.peers}
        if region not in peers:
            raise NotFoundError(f"exchange.peers has no region {region}; it has {', '.join(sorted(peers)) or 'none'}")
        return peers[region]

    async def _regions_of(self, key_id: str) -> list[str]:
        """The regions that a trusted key is known to be of: the one that it was admitted for, else those whose ledgers
        publish it now. None is known if a file names the key, and no peer that answers publishes it."""
        if admitted := [each.region for each in self.regions.known.keys if each.key.key_id == key_id]:
            return admitted
        peers = self.regions.counted()
        published = await asyncio.gather(*map(_keys_in_time, peers))
        return sorted(
            peer.settings.region
            for peer, keys in zip(peers, published, strict=True)
            if key_id in {each.key_id for each in keys}
        )

    async def _enter(self, action: SystemAction, region: str, facts: dict[str, object]) -> None:
        """Write an entry, as ``KeyChanges.enter_vouched``, and follow it."""
        await self.keys.enter_vouched(action, f"{REGION_PREFIX}{region}", facts)
        await self.refresh()


def _new_id() -> str:
    return secrets.token_hex(8)


async def _keys_in_time(peer: Peer) -> list[PublicKey]:
    """The keys that the peer publishes; none if it does not answer in time."""
    try:
        async with asyncio.timeout(KEYS_WAIT_S_MAX):
            return await peer.signing_keys()
    except (LedgerError, OSError) as error:
        log.info("keys_not_read", peer=peer.settings.url, error=f"{type(error).__name__}: {error}")
        return []
