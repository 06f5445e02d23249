"""Decides each entry of many bundles: entries are sorted into merge order, then decided range by range.

The decision on an entry depends only on entries of its tenant with its physical and logical time
(``ledger.bundle.merge``), which are never split between tasks. Entries arrive sorted, so a task holds the events of
one such time and one Arrow batch.

Invariants::

    events of one tenant, physical and logical time <= EVENTS_OF_ONE_TIME_MAX
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import pyarrow as pa

from ledger.bundle.merge import Decided, Incoming, chained_as, check_beginnings, decide, decode_incoming
from ledger.chain.conflict import Event
from ledger.errors import InvalidInputError
from ledger.hlc import Hlc
from pipeline.arrow import ddl_of, rows_of, schema_of
from signing.bundle.reader import BundleReader
from signing.bundle.writer import OwnChainBundle, OwnEntry
from signing.files import whole_file
from signing.keys import Keyring, Signer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row


PARTITION_BYTES: Final = 32 << 20
"""Approximate bytes of entries that one task sorts and decides; the driver holds as much when it links them."""
PARTITIONS_MAX: Final = 10_000
"""Most ranges, each one task; with more entries, ranges exceed ``PARTITION_BYTES``."""
EVENTS_OF_ONE_TIME_MAX: Final = 100_000
"""A node issues each time once, so this bounds nodes plus conflicts."""

_ORDER: Final = ("tenant_id", "physical_ms", "logical", "rank", "key_node", "log", "seq", "bundle_digest", "entry")
_CONFLICT: Final = schema_of(("tenant_id", "hlc", "job_id", "action", "digest", "kept_digest", "conflict_hlc"))
_ARROW: Final = pa.schema(
    [
        ("tenant_id", pa.string()),
        ("rank", pa.int32()),
        ("log", pa.string()),
        ("seq", pa.int64()),
        ("bundle_digest", pa.string()),
        ("placed", pa.binary()),
        ("placed_count", pa.int64()),
        ("duplicates", pa.int64()),
        ("conflicts", pa.list_(pa.struct(list(_CONFLICT)))),
    ]
)
SCHEMA: Final = ddl_of(_ARROW)
"""The decision on consecutive entries: the placed entries, as ``decode_placed`` reads them, the number of
duplicates, and the conflicts. Each placed entry of rank 0 has its own row with its sort key."""

Placed = tuple[Incoming, str | None]
"""An entry to be chained; with the payload digest of the entry that it conflicts with, if that has its HLC."""

_encode = msgspec.msgpack.Encoder().encode
decode_placed = msgspec.msgpack.Decoder(list[Placed]).decode
"""The entries in ``placed``."""


def partitions_of(raw_bytes: int, least: int) -> int:
    """The number of ranges for this many bytes of entries."""
    return min(max(-(-raw_bytes // PARTITION_BYTES), least, 1), PARTITIONS_MAX)


def decided(taken: DataFrame, partitions: int) -> DataFrame:
    """The decisions on the entries in ``taken``, as ``SCHEMA``, sorted and decided in this many ranges. Partitions
    and rows are in merge order, except entries of rank 0, which precede all others of their tenant."""
    return (
        taken.where("entry IS NOT NULL")
        .select(*_ORDER)
        .repartitionByRange(partitions, "tenant_id", "physical_ms", "logical")
        .sortWithinPartitions(*_ORDER)
        .select("tenant_id", "physical_ms", "logical", "entry")
        .mapInArrow(_decide, SCHEMA)
    )


def _decide(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    time, standing = None, dict[str, Event]()
    for batch in batches:
        for tenant_id, of_tenant in groupby(rows_of(batch), key=lambda row: row[0]):
            found = list(of_tenant)
            if time != found[0][:3]:
                standing = {}
            outcome = decide([decode_incoming(row[3]) for row in found], {tenant_id: standing})
            yield pa.RecordBatch.from_pylist(list(_rows(tenant_id, outcome)), _ARROW)
            time = found[-1][:3]
            standing = _of_time(standing, *time[1:])


def _of_time(standing: dict[str, Event], physical_ms: int, logical: int) -> dict[str, Event]:
    """The events of one physical and logical time; later decisions depend on no others."""
    begin = f"{physical_ms}:{logical}:"
    kept = {t_hlc: event for t_hlc, event in standing.items() if t_hlc.startswith(begin)}
    if len(kept) > EVENTS_OF_ONE_TIME_MAX:
        raise InvalidInputError(f"more than {EVENTS_OF_ONE_TIME_MAX} events have the time {begin[:-1]}")
    return kept


def _rows(tenant_id: str, outcome: Decided) -> Iterator[dict[str, Any]]:
    row = {"tenant_id": tenant_id, "duplicates": 0, "conflicts": []}
    for entry, kept_digest in outcome.placed:
        if entry.key.rank == 0:
            rank, _, _, _, *order = entry.key
            key = dict(zip(("log", "seq", "bundle_digest"), order, strict=True))
            yield {**row, **key, "rank": rank, "placed": _encode([(entry, kept_digest)]), "placed_count": 1}
    rest = [placed for placed in outcome.placed if placed[0].key.rank]
    found = {"duplicates": outcome.duplicates, "conflicts": outcome.conflicts}
    yield {**row, **found, "rank": 1, "placed": _encode(rest), "placed_count": len(rest)}


# --- linking --------------------------------------------------------------------------------------


NODE_ID: Final = "merge"
"""The exporting node named in merged bundles; no real node exports them."""
CONFLICTS_LISTED_MAX: Final = 1000
"""Most conflicts listed; all are counted and kept."""


class Signers(NamedTuple):
    """``signer`` signs statements; ``log_signer``, an Ed25519 signer, signs checkpoints."""

    signer: Signer
    log_signer: Signer


class MergedBundle(NamedTuple):
    """One merged bundle."""

    file: Path
    tenant_id: str
    sha256: str
    """Digest of the file, hex."""
    bytes: int
    log_origin: str
    entry_count: int
    snapshot_count: int
    to_chain_link: str
    tree_root: str


@dataclass
class MergeCounts:
    """Counts of a merge. ``placed + duplicates`` is the number of entries of all bundles."""

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
    """Write a bundle for each tenant of ``decided`` to its ``path_of``; on return all are whole and durable.

    ``on_linked`` receives the number of linked entries.

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
    """The rows of ``decided`` in chain order: for each tenant rank 0 first."""
    kept = decided.where("rank = 0").orderBy("tenant_id", "log", "seq", "bundle_digest", "placed")
    each = (frame.toLocalIterator(prefetchPartitions=True) for frame in (kept, decided.where("rank = 1")))
    return heapq.merge(*each, key=lambda row: (row.tenant_id, row.rank))


def _told(rows: Iterable[Row], found: MergeCounts) -> Iterator[list[Placed]]:
    """The placed entries of ``rows``; duplicates and conflicts are added to ``found``."""
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
        return bundle.append(
            [
                OwnEntry(hlc, entry.job_id, action, payload, entry.origin)
                for entry, kept_digest in placed
                for hlc, action, payload in (chained_as(entry, kept_digest),)
            ]
        )
    check_beginnings(placed, {tenant_id: bundle.end})
    return bundle.keep([_kept_row(entry) for entry, _ in placed])


def _kept_row(entry: Incoming) -> tuple[Any, ...]:
    """An unchanged row of ``ENTRY_COLUMNS``."""
    return (
        *(entry.seq, entry.t_hlc, *Hlc.parse(entry.t_hlc), entry.job_id, entry.action),
        *(entry.link_version, entry.prev_chain_link, entry.chain_link),
        *(entry.payload_digest, entry.payload, entry.origin),
    )


def _arrived(tenant_id: str, path: Path, signers: Signers) -> MergedBundle:
    """The merged bundle at ``path``, verified to be whole and signed by us."""
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
