"""One tenant's chain at a peer: what is known of it, and the proofs that it goes on from what was seen before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from app.share.exchange.peer_client import Lacking
from app.store import Connection
from app.store.chaining import read_heads
from app.store.exchange import Seen
from ledger.errors import LedgerError, ProofError, reported_as
from ledger.merkle import verify_consistency
from signing.checkpoint import Checkpoint, read
from signing.manifest import RangeManifest


class PeerWentBackError(LedgerError):
    """A peer's log of a tenant no longer equals or extends the log seen before."""


class PeerForkedError(PeerWentBackError):
    """A peer signed two trees of one size."""


class BroughtRange(NamedTuple):
    """A range of a peer's chain in a bundle that an operator imported."""

    origin: str
    from_seq: int
    to_seq: int
    tree_root: str


@dataclass(slots=True)
class PeerChain:
    """One tenant's chain at the peer, up to its newest proved checkpoint."""

    tenant_id: str
    note: bytes = b""
    """A checkpoint of the peer's news that is to be proved. Not a text: with one rare character that takes four
    times the memory."""
    proved_note_hash: int = 0
    """Hash of the note that was proved last."""
    origin: str = ""
    size: int = 0
    root: bytes = b""
    imported_seq: int = 0
    fault: str | None = None
    went_back: bool = False
    """No other fault replaces this one until a checkpoint is proved to extend the one seen before."""
    is_forked: bool = False
    """Nothing that the peer shows later ends this one, until an operator removes what was seen of it."""
    failed_at_s: float = 0.0
    pause_s: float = 0.0
    """Time after ``failed_at_s`` in which nothing is fetched, because a failing range is costly to fetch."""
    due_at_s: float = 0.0
    """When its checkpoint is next proved after a failure."""
    lacking: Lacking | None = None
    """What was lacking after ``imported_seq`` when the newest checkpoint was proved."""
    brought: BroughtRange | None = None
    """What an operator imported last, until it is proved to lie under a checkpoint."""

    @property
    def is_lacking(self) -> bool:
        """Whether something of it is to be imported, as far as is known."""
        return self.fault is not None or self.imported_seq < self.size


def grown_from(url: str, tenant_id: str, seen: Seen | None, checkpoint: Checkpoint) -> Checkpoint | None:
    """The checkpoint seen before, which that of now must be proved to extend; None if there is nothing to prove.

    Raises:
        PeerForkedError, PeerWentBackError: it does not extend it.
    """
    if seen is None:
        return None
    before = read(seen.note)
    other = checkpoint if seen.fork is None else read(seen.fork)
    if other.size == before.size and other.root != before.root:
        raise PeerForkedError(
            f"tenant {tenant_id} of {url} has two signed trees of {before.size} entries, {before.root.hex()} and "
            f"{other.root.hex()}: it was changed. Compare with tally pipeline diff"
        )
    if checkpoint.size < before.size:
        raise PeerWentBackError(
            f"tenant {tenant_id} of {url} had {before.size} entries under another root, and now has "
            f"{checkpoint.size}: it was restored from before or changed. Compare with tally pipeline diff"
        )
    return None if before.size in (0, checkpoint.size) else before


def check_growth(
    url: str, tenant_id: str, before: Checkpoint, checkpoint: Checkpoint, consistency: Sequence[bytes]
) -> None:
    """Return if ``consistency`` proves that the tree of ``checkpoint`` extends that of ``before``.

    Raises:
        PeerWentBackError: it does not.
    """
    with reported_as(
        PeerWentBackError,
        f"tenant {tenant_id} of {url}: nothing proves that its tree of {checkpoint.size} entries goes on from that of "
        f"{before.size} seen before",
        ProofError,
    ):
        verify_consistency(before.size, checkpoint.size, before.root, checkpoint.root, consistency)


async def check_held(connection: Connection, url: str, chain: PeerChain, to_seq: int) -> None:
    """Reject the peer's word that this ledger lacks no entry up to ``to_seq`` of its chain if there are fewer here.

    A signed checkpoint may be of any size, and there would be no end of ranges to ask about.

    Raises:
        ProofError: this ledger has fewer entries than that.
    """
    heads = await read_heads(connection, [chain.tenant_id])
    if to_seq > (held := heads[chain.tenant_id].seq if heads else 0):
        raise ProofError(
            f"{url} says that no entry up to {to_seq} of {chain.origin} is lacking, and the tenant has {held} entries"
        )


def check_range(
    chain: PeerChain, from_seq: int, to_seq: int, proof: Sequence[bytes], bundle: RangeManifest | BroughtRange
) -> None:
    """Reject a bundle that is not of this range, or not of the tree of the newest checkpoint.

    Raises:
        ProofError: it is not.
    """
    if (bundle.origin, bundle.from_seq, bundle.to_seq) != (chain.origin, from_seq, to_seq):
        raise ProofError(
            f"entries {from_seq} to {to_seq} of {chain.origin} were asked for, and the bundle is of {bundle.from_seq} "
            f"to {bundle.to_seq} of {bundle.origin}"
        )
    with reported_as(
        ProofError,
        f"nothing proves that the entries {from_seq} to {to_seq} in the bundle are those of the checkpoint of "
        f"{chain.size}",
        ProofError,
    ):
        verify_consistency(to_seq, chain.size, bytes.fromhex(bundle.tree_root), chain.root, proof)
