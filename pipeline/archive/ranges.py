"""What is archived of one tenant, for a caller that acts on it: only manifests that a held key signed count.

``archived_end`` reads manifests alone. ``verified_range`` reads every file of a range back and verifies it as
``verify_tenant`` verifies a whole archive, beginning at the tree of the manifest before. All functions block.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from ledger.errors import ArchiveInvalidError, UnknownKeyError
from ledger.verification import verify
from objects.store import ArchiveStore
from pipeline.archive import Manifest, SealedManifest, manifest_path
from pipeline.archive.reader import (
    ArchiveChainReader,
    ArchiveJudge,
    TenantArchive,
    check_follows,
    last_snapshot,
    ranges_of,
    read_signed,
)
from pipeline.arrow import Row
from signing.callers import judge_of
from signing.keys import Keyring
from signing.snapshot import open_snapshot


class ArchivedEnd(NamedTuple):
    """The end of an archived range: entries 1 to ``to_seq`` of a tenant are archived, as a signed manifest states it.
    Digests are hex."""

    tenant_id: str
    log_origin: str
    from_seq: int
    """First entry of the manifest's range."""
    to_seq: int
    chain_link: str
    """Of entry ``to_seq``."""
    hlc: str
    tree_root: str
    """Root of the tree of size ``to_seq``."""
    frontier: tuple[str, ...]
    """Compact range of that tree: roots of its perfect subtrees, the largest first."""
    manifest: str
    """SHA-256 of the manifest's payload. It covers all manifests before."""
    path: str
    """Name of the manifest in the archive."""
    url: str

    @classmethod
    def of(cls, store: ArchiveStore, sealed: SealedManifest) -> ArchivedEnd:
        """The end that this manifest states."""
        said = sealed.manifest
        return cls(
            tenant_id=said.tenant_id,
            log_origin=said.log_origin,
            from_seq=said.from_seq,
            to_seq=said.to_seq,
            chain_link=said.to_chain_link,
            hlc=said.last_hlc,
            tree_root=said.tree_root,
            frontier=said.frontier,
            manifest=sealed.digest,
            path=manifest_path(said.tenant_id, said.from_seq, said.to_seq),
            url=store.url,
        )


def archived_end(store: ArchiveStore, tenant_id: str, keyring: Keyring, seq: int | None = None) -> ArchivedEnd | None:
    """The end of the range that holds ``seq``, by default of the newest; None if there is none. No file is read.

    Raises:
        ArchiveInvalidError: the manifest is missing or malformed, or a gap is before it.
        ArchiveSignatureError, UnknownKeyError: no key of ``keyring`` signed it.
        ArchiveUnavailableError: the archive cannot be read.
    """
    ranges = [each for each in ranges_of(store, tenant_id) if seq is None or each[0] <= seq <= each[1]]
    return ArchivedEnd.of(store, read_signed(store, tenant_id, ranges[-1], keyring)) if ranges else None


def verified_range(
    store: ArchiveStore, tenant_id: str, keyring: Keyring, from_seq: int, to_seq: int
) -> list[ArchivedEnd]:
    """Read back and verify the ranges that hold ``from_seq..to_seq``; returns the end of each, by seq.

    Every file is compared with its manifest and decoded; digests, links, tree, snapshots and checkpoints are
    recomputed and judged by ``keyring``. The range before the first is believed as its signed manifest states it.

    Raises:
        ArchiveInvalidError: something is missing, or does not hold.
        ArchiveSignatureError, UnknownKeyError: no key of ``keyring`` signed a manifest, a snapshot or a checkpoint.
        ArchiveUnavailableError: the archive cannot be read.
    """
    archive, before = _held(store, tenant_id, keyring, from_seq, to_seq)
    judge = ArchiveJudge(archive, keyring)
    checkpoints = judge.judge()
    first = archive.sealed[0 if before is None else 1].manifest.from_seq
    with_state = {}
    if before is not None:
        with_state = {
            "expected_prev": before.to_chain_link,
            "expected_snapshot": last_snapshot(store, before),
            "expected_frontier": [bytes.fromhex(each) for each in before.frontier],
        }
    found = asyncio.run(
        verify(
            ArchiveChainReader(archive),
            tenant_id=tenant_id,
            from_seq=first,
            open_snapshot=partial(open_snapshot, keyring=keyring),
            checkpoints=[head for head in checkpoints if head.size >= first],
            projection=False,
            callers=judge_of(keyring),
            **with_state,  # type: ignore[arg-type]
        )
    )
    verdict = judge.verdict(found.to_json(0.0))
    if (broken := verdict["first_break"]) is not None and "broken" in verdict["verdicts"].values():
        raise ArchiveInvalidError(
            f"tenant {tenant_id} of the archive: {broken['kind']} at seq {broken['seq']}: {broken['detail']}",
            broken["seq"],
        )
    if unknown := [name for name, each in verdict["verdicts"].items() if each == "unknown_key"]:
        raise UnknownKeyError(f"tenant {tenant_id} of the archive: an unknown key signed ({', '.join(unknown)})")
    return [ArchivedEnd.of(store, each) for each in archive.sealed if each.manifest.from_seq >= first]


def entries_between(
    store: ArchiveStore, tenant_id: str, keyring: Keyring, from_seq: int, to_seq: int
) -> Iterator[list[Row]]:
    """Batches of ``ENTRY_COLUMNS`` of these entries, from files that signed manifests name; raises as
    ``verified_range``, but recomputes no link."""
    archive, _ = _held(store, tenant_id, keyring, from_seq, to_seq)
    return archive.entry_batches(from_seq, to_seq)


def _held(
    store: ArchiveStore, tenant_id: str, keyring: Keyring, from_seq: int, to_seq: int
) -> tuple[TenantArchive, Manifest | None]:
    """The archive from the manifest before the range on, which is returned too, to the end of the range."""
    ranges = ranges_of(store, tenant_id)
    wanted = [at for at, (first, last) in enumerate(ranges) if first <= to_seq and last >= from_seq]
    if not wanted or not ranges[wanted[0]][0] <= from_seq <= to_seq <= ranges[wanted[-1]][1]:
        end = ranges[-1][1] if ranges else 0
        raise ArchiveInvalidError(
            f"seq {from_seq} to {to_seq} of tenant {tenant_id} are not all in the archive, which ends at seq {end}",
            end + 1,
        )
    begin = max(wanted[0] - 1, 0)
    sealed: Sequence[SealedManifest] = [
        read_signed(store, tenant_id, each, keyring) for each in ranges[begin : wanted[-1] + 1]
    ]
    for before, each in pairwise(sealed):
        check_follows(before, each)
    return TenantArchive(store, tenant_id, sealed), sealed[0].manifest if wanted[0] else None
