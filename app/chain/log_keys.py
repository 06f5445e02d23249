"""The keys that count for a node's ledger and its logs, and the checkpoint beside the WAL read with them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from datetime import UTC, datetime

import structlog

from app.chain.checkpoints import CheckpointFolder
from app.keys.in_use import KeyInUse
from app.keys.published_keys import PublishedKeys
from ledger.errors import SignatureError
from ledger.verification.tree_check import TreeHead
from signing.checkpoint import open_checkpoint
from signing.keys import ED25519, Keyring, PublicKey
from signing.note import VerifierKey, verifier_key

LOG_KEYS_MAX = 16
"""Most verifier keys named for one log; older ones still count, by the list of keys."""

log = structlog.get_logger()


class LogKeys:
    """Keys as they are at the time of each question; ``origin`` gives the name of a tenant's log."""

    def __init__(
        self,
        *,
        keys: KeyInUse,
        published: Callable[[], Awaitable[PublishedKeys]],
        origin: Callable[[str], str],
        checkpoints: CheckpointFolder,
    ) -> None:
        self._keys = keys
        self._published = published
        self._origin = origin
        self._checkpoints = checkpoints

    async def keyring(self) -> Keyring:
        """The keys that count in the ledger: those that the chain of ``_system`` admits."""
        published = await self._published()
        return Keyring([item.key for item in published.admitted], root_key_id=published.root_key_id)

    async def signing_now(self) -> Keyring:
        """The keys that may sign checkpoints now: those that have neither ended nor been revoked."""
        now = datetime.now(UTC)
        ring = await self.keyring()
        return Keyring(
            key for key in ring if key.revoked_from_hlc is None and (key.not_after is None or key.not_after > now)
        )

    async def keys_of(self, tenant_id: str) -> Keyring:
        """The published keys, and the verifier keys of the tenant's log."""
        ring = await self.keyring()
        return Keyring(ring, self.log_verifier_keys(tenant_id, ring))

    def log_verifier_keys(self, tenant_id: str, ring: Iterable[PublicKey]) -> list[str]:
        """Verifier keys of the tenant's log, of all nodes, this node's first, then the newest."""
        own_id = self._keys.log_signer.key_id
        counting = [key for key in ring if key.algorithm == ED25519 and key.revoked_from_hlc is None]
        counting.sort(key=lambda key: key.key_id == own_id)
        return [verifier_key(self._origin(tenant_id), key) for key in reversed(counting[-LOG_KEYS_MAX:])]

    async def log_keys(self, tenant_id: str) -> list[VerifierKey]:
        """All keys that may have signed a checkpoint of the tenant's log."""
        return _of_log(self._origin(tenant_id), await self.keyring())

    def checkpoints(self, tenant_id: str, ring: Keyring) -> list[TreeHead]:
        """The newest checkpoint beside the WAL; one that does not open says so."""
        try:
            note = self._checkpoints.load(tenant_id)
            if note is None:
                return []
            origin = self._origin(tenant_id)
            # The folder is the node's: what it signed itself it may compare with, admitted or not.
            checkpoint = open_checkpoint(note, _of_log(origin, (*self._keys.own(), *ring)), origin=origin)
        except SignatureError as error:
            log.error("checkpoint_unreadable", tenant_id=tenant_id, error=str(error))
            return [TreeHead(0, b"", "node", str(error))]
        return [TreeHead(checkpoint.size, checkpoint.root, "node")]


def _of_log(origin: str, keys: Iterable[PublicKey]) -> list[VerifierKey]:
    """The verifier keys that ``keys`` are for a log, those of revoked keys too: a checkpoint has no time."""
    return [VerifierKey.of(origin, key) for key in keys if key.algorithm == ED25519]
