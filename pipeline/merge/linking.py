"""Linking what was placed: one pass over the entries in order, tenant after tenant, straight into signed files.

Links bind each entry to the one before it, so this cannot be cut up; it is hashing and packing alone. Memory holds one
row of ``deciding.SCHEMA`` and one part of a file, and Spark's driver one range.

A merged bundle is a chain of its own. By default its log is named ``merge/{set digest}``, after the bundles that went
in: the same bundles make the same chain of the same log, and other bundles another log, so no two heads are ever signed
for one log that do not extend one another, which is what witnesses and monitors take for tampering.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ledger.bundle.merge import Incoming, chained_as, check_beginnings
from ledger.hlc import Hlc
from pipeline.keys import Signers
from pipeline.merge.deciding import Placed, decode_placed
from signing.bundle.reader import BundleReader
from signing.bundle.writer import OwnChainBundle, OwnEntry
from signing.files import whole_file
from signing.keys import Keyring

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row

NODE_ID: Final = "merge"
"""What merged bundles name as the node that exported them: none did."""
CONFLICTS_LISTED_MAX: Final = 1000
"""Conflicts that are listed; all are counted and kept."""


class MergedBundle(NamedTuple):
    """One bundle that came out."""

    file: Path
    tenant_id: str
    sha256: str
    """Of the file, hex."""
    bytes: int
    log_origin: str
    entry_count: int
    snapshot_count: int
    to_chain_link: str
    tree_root: str

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {**self._asdict(), "file": str(self.file)}


@dataclass
class MergeCounts:
    """What was found on the way. ``placed + duplicates`` is the number of entries of all bundles."""

    placed: int = 0
    duplicates: int = 0
    conflict_count: int = 0
    conflicts: list[dict[str, Any]] = field(default_factory=list)
    """The first ``CONFLICTS_LISTED_MAX``."""


def link(
    decided: DataFrame,
    path_of: Callable[[str], Path],
    log_origins: Mapping[str, str],
    signers: Signers,
    on_linked: Callable[[int], None] = lambda count: None,
) -> tuple[list[MergedBundle], MergeCounts]:
    """Write a bundle for each tenant of ``decided``, to ``path_of`` it; on return all are whole and durable.

    ``on_linked`` is told how many entries were linked.

    Raises:
        InvalidInputError: the beginning of an older chain cannot be kept as it is.
        SigningUnavailableError: the signer cannot be reached.
        OSError: a file cannot be written.
    """
    found, merged = MergeCounts(), []
    for tenant_id, rows in groupby(_in_order(decided), key=lambda row: row.tenant_id):
        bundle = OwnChainBundle(
            tenant_id=tenant_id, node_id=NODE_ID, log_origin=log_origins[tenant_id], **signers._asdict()
        )
        path = path_of(tenant_id)
        with closing(bundle), whole_file(path) as file:
            for placed in _told(rows, found):
                on_linked(len(placed))
                file.write(_append(bundle, placed, tenant_id))
            for piece in bundle.finish():
                file.write(piece)
        merged.append(_arrived(tenant_id, path, signers))
    return merged, found


def _in_order(decided: DataFrame) -> Iterator[Row]:
    """The rows of ``decided`` as they are chained: of each tenant those of rank 0 first."""
    kept = decided.where("rank = 0").orderBy("tenant_id", "log", "seq", "bundle_digest", "placed")
    each = (frame.toLocalIterator(prefetchPartitions=True) for frame in (kept, decided.where("rank = 1")))
    return heapq.merge(*each, key=lambda row: (row.tenant_id, row.rank))


def _told(rows: Iterable[Row], found: MergeCounts) -> Iterator[list[Placed]]:
    """What is placed, while the rest is noted."""
    for row in rows:
        found.placed += row.placed_count
        found.duplicates += row.duplicates
        found.conflict_count += len(row.conflicts)
        room = CONFLICTS_LISTED_MAX - len(found.conflicts)
        found.conflicts += [conflict.asDict() for conflict in row.conflicts[:room]]
        if row.placed_count:
            yield decode_placed(row.placed)


def _append(bundle: OwnChainBundle, placed: Sequence[Placed], tenant_id: str) -> bytes:
    if placed[0][0].key.rank:
        return bundle.append([_own_entry(*each) for each in placed])
    check_beginnings(placed, {tenant_id: bundle.end})
    return bundle.keep([_row(entry) for entry, _ in placed])


def _own_entry(entry: Incoming, kept_digest: str | None) -> OwnEntry:
    hlc, action, payload = chained_as(entry, kept_digest)
    return OwnEntry(hlc, entry.job_id, action, payload, entry.origin)


def _row(entry: Incoming) -> tuple[Any, ...]:
    """A row of ``ENTRY_COLUMNS`` as it stood."""
    event = (entry.t_hlc, *Hlc.parse(entry.t_hlc), entry.job_id, entry.action)
    links = (entry.link_version, entry.prev_chain_link, entry.chain_link)
    return (entry.seq, *event, *links, entry.payload_digest, entry.payload, entry.origin)


def _arrived(tenant_id: str, path: Path, signers: Signers) -> MergedBundle:
    """What arrived, once it is found to be a whole bundle of ours."""
    with BundleReader.open(path, Keyring([signers.signer.public_key])) as reader:
        manifest = reader.manifest
        return MergedBundle(
            path,
            tenant_id,
            reader.digest,
            reader.size_bytes,
            manifest.log_origin,
            manifest.entry_count,
            manifest.snapshot_count,
            manifest.to_chain_link,
            manifest.tree_root,
        )
