"""The keys that a running node signs with, and the faults that keep it from signing.

Signing and storing the signed object are one step. A change of keys waits for all such steps, and no step starts before
the change is done. So every snapshot is signed by the key that is in use when it is stored.

A signer outside of files is called in a thread, one signature at a time, for at most ``SIGN_TIMEOUT_S``. After a
failure the node pauses before it calls the signer again, and each further failure doubles the pause. Meanwhile nothing
is signed with it, and everything else continues.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from app.runtime.logs import log
from app.runtime.metrics import Metrics
from app.runtime.tasks import in_own_thread
from app.store import Connection
from app.store import keys as store
from app.trust.key_chain import KeyChain
from app.trust.node_keys import NodeKeys
from ledger.errors import LedgerError, SignerAwayError, SigningUnavailableError
from ledger.hlc import Hlc
from signing.checkpoint import Checkpoint, sign_checkpoint
from signing.key_history import time_of
from signing.keys import Keyring, PublicKey, Signer
from signing.private_keys import FileSigner

SIGN_TIMEOUT_S = 10.0
"""Longest that one signature may take."""
PAUSE_MIN_S, PAUSE_MAX_S = 0.5, 10.0
"""First and longest pause after a signer failed."""

Value = TypeVar("Value")


class KeyInUse:
    """Lends the node's keys for signing. Belongs to one event loop."""

    def __init__(self, chain: KeyChain, metrics: Metrics, not_admitted: str | None = None) -> None:
        self.node_keys = chain.keys
        self.fault: str | None = None
        """Why nothing is signed now, None while nothing is wrong."""
        self._is_of_window = False
        """Whether the fault is that the key is not trusted. An answer of the signer does not clear such a fault, and
        storing an earlier signature does not clear a fault of the signer."""
        self.not_admitted = not_admitted
        """Why no signature of the node would be valid, so that it signs nothing; None while its keys are admitted."""
        self.highest_signed_ms = 0
        """Highest HLC time that this process signed."""
        self._chain = chain
        self._metrics = metrics
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._in_use = 0
        self._one_at_a_time = asyncio.Lock()
        self._hanging: asyncio.Future[Any] | None = None
        """A call to the signer that no caller waits for any more."""
        self._try_again_s = 0.0
        self._pause_s = PAUSE_MIN_S

    @property
    def signer(self) -> Signer:
        """The signer of snapshots and bundles."""
        return self.node_keys.signer

    @property
    def log_signer(self) -> FileSigner:
        """The first signer of checkpoints."""
        return self.node_keys.log_signer

    def own(self) -> list[PublicKey]:
        """The public keys this node signs with."""
        return [signer.public_key for signer in self.node_keys.signers()]

    async def counting(self, connection: Connection) -> Keyring:
        """Every trusted key."""
        return Keyring([*(await self._chain.counting(connection)).values()])

    def may_try(self) -> bool:
        """Whether to call the signer: its signature would be valid, and it has not just failed."""
        return self.not_admitted is None and time.monotonic() >= self._try_again_s

    @asynccontextmanager
    async def signing(self) -> AsyncIterator[Sequence[Signer]]:
        """The keys that sign snapshots, the first one first; they do not change until the context ends.

        Raises:
            SignerAwayError: the signer has just failed.
        """
        while not self._open.is_set():
            await self._open.wait()
        self._refuse_early()
        self._in_use += 1
        self._idle.clear()
        try:
            yield self.node_keys.snapshot_signers
        finally:
            self._in_use -= 1
            if self._in_use == 0:
                self._idle.set()

    @asynccontextmanager
    async def changing(self) -> AsyncIterator[NodeKeys]:
        """The keys, while nothing is signed with them. A caller that changes them MUST store them before the context
        ends."""
        self._open.clear()
        try:
            await self._idle.wait()
            yield self.node_keys
            self._clear_fault()
        finally:
            self._open.set()

    async def sign(self, work: Callable[[], Value]) -> Value:
        """The result of ``work``, which signs with the keys of snapshots that ``signing`` lent.

        Raises:
            SignerAwayError: the signer failed, or did not answer in ``SIGN_TIMEOUT_S``.
        """
        if isinstance(self.signer, FileSigner):
            return await self._beside_second(work)
        async with self._one_at_a_time:
            self._refuse_early()
            try:
                signed = await self._in_thread(work)
            except SigningUnavailableError as error:
                raise self._failed(str(error)) from error
        if not self._is_of_window:
            self._clear_fault()
        return signed

    async def sign_checkpoints(self, heads: Sequence[Checkpoint]) -> list[str]:
        """The notes of these checkpoints."""
        signers = self.node_keys.checkpoint_signers
        with self._metrics.signing("checkpoints", len(heads)):
            return await self._beside_second(lambda: [sign_checkpoint(head, *signers) for head in heads])

    async def _beside_second(self, work: Callable[[], Value]) -> Value:
        """The result of ``work``, which signs with keys in files. A second key takes 25 times as long, and a thread."""
        return work() if self.node_keys.second is None else await asyncio.to_thread(work)

    async def sign_with(self, signer: Signer, work: Callable[[], Value]) -> Value:
        """The result of ``work``, which signs with ``signer``, in use or not.

        Raises:
            SigningUnavailableError: the signer failed, or did not answer in ``SIGN_TIMEOUT_S``.
        """
        if isinstance(signer, FileSigner):
            return work()
        async with self._one_at_a_time:
            return await self._in_thread(work)

    async def check_window(self, connection: Connection, signers: Sequence[Signer], hlcs: Sequence[Hlc]) -> None:
        """Reject keys of which one is not valid at one of ``hlcs``, by the chain of ``_system`` and by the bounds that
        this node has seen. Runs in the transaction that stores the signed object.

        A node that was away may chain entries older than the key; the published window then begins with them.

        Raises:
            SignerAwayError: the key is not admitted, has ended or was revoked.
        """
        counting, signed_ms = await self._chain.counting(connection), [hlc.physical_ms for hlc in hlcs]
        for signer in signers:
            key = counting.get(signer.key_id)
            if key is None and (self._chain.fault is None or self._chain.is_of_another_root):
                raise self._failed(
                    f"key {signer.key_id} is not admitted to the ledger; see tally keys list", is_of_window=True
                )
            second = " --second" if signer.public_key.is_second else ""
            for refusal in filter(None, map((key or self.node_keys.bounded(signer.public_key)).refusal, hlcs)):
                raise self._failed(f"{refusal}; take another with: tally keys rotate{second}", is_of_window=True)
            await store.widen(connection, signer.key_id, time_of(min(signed_ms)))
        self.highest_signed_ms = max(self.highest_signed_ms, *signed_ms)
        if self._is_of_window:
            self._clear_fault()

    def _refuse_early(self) -> None:
        if not self.may_try():
            raise SignerAwayError(self.not_admitted or self.fault or "the signer has just failed")
        if self._hanging is not None and not self._hanging.done():
            raise self._failed("the signer still owes the answer to an earlier question")
        self._hanging = None

    def _failed(self, reason: str, *, is_of_window: bool = False) -> SignerAwayError:
        self.fault, self._is_of_window = reason, is_of_window
        self._try_again_s = time.monotonic() + self._pause_s
        self._metrics.count("scheduler_signing_failures")
        log.warning("signing_delayed", error=reason, again_in_s=self._pause_s)
        self._pause_s = min(self._pause_s * 2, PAUSE_MAX_S)
        return SignerAwayError(reason)

    def _clear_fault(self) -> None:
        if self.fault is not None:
            log.info("signing_restored", key_id=self.signer.key_id)
        self.fault, self._is_of_window, self._try_again_s, self._pause_s = None, False, 0.0, PAUSE_MIN_S

    async def _in_thread(self, work: Callable[[], Value]) -> Value:
        """Run ``work`` in its own thread, which the process need not join: a signer may hang for ever.

        Raises:
            SigningUnavailableError: the signer failed, or did not answer in ``SIGN_TIMEOUT_S``.
        """
        asking = in_own_thread(work, "signer")
        try:
            async with asyncio.timeout(SIGN_TIMEOUT_S):
                return await asyncio.shield(asking)
        except LedgerError:
            raise
        except TimeoutError as error:
            raise SigningUnavailableError(f"the signer gave no answer in {SIGN_TIMEOUT_S:g} s") from error
        except Exception as error:
            raise SigningUnavailableError(repr(error)[:300]) from error
        finally:
            if not asking.done():
                self._hanging = asking
