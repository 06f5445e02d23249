"""What becomes of each entry of many bundles: sorted into the order of a merge, then decided range by range.

What becomes of an entry depends on entries of its tenant and of its physical and logical time alone
(``ledger.bundle.merge``), and those are never split between tasks. Entries arrive sorted, so a task keeps the events
of one such time, and what Arrow brings at once.

Invariants::

    events of one tenant, physical and logical time <= EVENTS_OF_ONE_TIME_MAX
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa

from ledger.bundle.merge import Decided, Incoming, decide, decode_incoming
from ledger.chain.conflict import Event
from ledger.errors import InvalidInputError
from pipeline.arrow import ddl_of, rows_of, schema_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PARTITION_BYTES: Final = 32 << 20
"""Bytes of entries that one task sorts and decides, about; the driver holds as much when it links them."""
PARTITIONS_MAX: Final = 10_000
"""Ranges, each a task, that entries are cut into at most; above it ranges get longer than ``PARTITION_BYTES``."""
EVENTS_OF_ONE_TIME_MAX: Final = 100_000
"""A node issues each time once, so these are as many nodes, or conflicts."""

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
"""What became of some entries that follow one another: those that are placed, as ``decode_placed`` reads them, how many
were there already, and the conflicts among them. Each placed entry of rank 0 has a row of its own, with what it is
sorted by."""

Placed = tuple[Incoming, str | None]
"""An entry to be chained; with the payload digest of the one beside which it is kept, when that has its HLC."""

_encode = msgspec.msgpack.Encoder().encode
decode_placed = msgspec.msgpack.Decoder(list[Placed]).decode
"""The entries in ``placed``."""


def partitions_of(raw_bytes: int, least: int) -> int:
    """How many ranges so many bytes of entries are cut into."""
    return min(max(-(-raw_bytes // PARTITION_BYTES), least, 1), PARTITIONS_MAX)


def decided(taken: DataFrame, partitions: int) -> DataFrame:
    """What becomes of the entries in ``taken``, as ``SCHEMA``, sorted and decided in so many ranges. Partitions and
    rows are in the order of the merge, but for entries of rank 0, which come before all others of their tenant."""
    entries = taken.where("entry IS NOT NULL").select(*_ORDER)
    ranges = entries.repartitionByRange(partitions, "tenant_id", "physical_ms", "logical")
    in_order = ranges.sortWithinPartitions(*_ORDER)
    return in_order.select("tenant_id", "physical_ms", "logical", "entry").mapInArrow(_decide, SCHEMA)


def _decide(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    time, standing = None, dict[str, Event]()
    for batch in batches:
        for tenant_id, of_tenant in groupby(rows_of(batch), key=lambda row: row[0]):
            found = list(of_tenant)
            if time != found[0][:3]:
                standing = {}
            entries = [decode_incoming(row[3]) for row in found]
            outcome = decide(entries, {tenant_id: standing})
            yield pa.RecordBatch.from_pylist(list(_rows(tenant_id, outcome)), _ARROW)
            time = found[-1][:3]
            standing = _of_time(standing, *time[1:])


def _of_time(standing: dict[str, Event], physical_ms: int, logical: int) -> dict[str, Event]:
    """The events of one physical and logical time, all that can matter to what follows."""
    begin = f"{physical_ms}:{logical}:"
    kept = {t_hlc: event for t_hlc, event in standing.items() if t_hlc.startswith(begin)}
    if len(kept) > EVENTS_OF_ONE_TIME_MAX:
        raise InvalidInputError(f"more than {EVENTS_OF_ONE_TIME_MAX} events have the time {begin[:-1]}")
    return kept


def _rows(tenant_id: str, outcome: Decided) -> Iterator[dict[str, Any]]:
    for entry, kept_digest in outcome.placed:
        if entry.key.rank == 0:
            yield {
                **_row(tenant_id, 0, [(entry, kept_digest)]),
                "log": entry.key.log,
                "seq": entry.key.seq,
                "bundle_digest": entry.key.bundle_digest,
            }
    rest = _row(tenant_id, 1, [placed for placed in outcome.placed if placed[0].key.rank])
    yield {**rest, "duplicates": outcome.duplicates, "conflicts": outcome.conflicts}


def _row(tenant_id: str, rank: int, placed: Sequence[Placed]) -> dict[str, Any]:
    row = {"tenant_id": tenant_id, "rank": rank, "placed": _encode(placed), "placed_count": len(placed)}
    return {**row, "duplicates": 0, "conflicts": []}
