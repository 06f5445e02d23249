"""The sets of events of two ledgers, compared by digests of HLC ranges first, then by rows of the ranges that differ.

An event is the same wherever it is chained: its id is the first 40 hex digits of SHA-256 over its HLC, job, action and
payload digest in canonical JSON, behind its physical and logical time. Those digits are in the HLC of a CONFLICT entry
(``ledger.chain.conflict``), which so has the id of the event it holds, and no payload is read.

::

    of each place     (tenant, range, id)  ->  Merkle root over the sorted ids of each range      tasks, one shuffle
    of both           ranges whose roots differ, or that one of them lacks                        a join of digests
    of those ranges   ids that only one of them has, with the seqs they stand at                  a join of rows

A range is some time of a tenant, as long as ``ROWS_A_RANGE`` entries of the longer chain take on average. Ranges are
folded as they arrive, sorted, so a task holds 32 bytes of each level of a tree, however many entries have one time.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from ledger import canonical, merkle
from ledger.chain.conflict import NODE_DIGITS, NODE_PREFIX, Event
from ledger.errors import LedgerError
from ledger.hlc import LOGICAL_MAX, PHYSICAL_MS_MAX
from ledger.machines.events import SystemAction
from pipeline.arrow import batch_of, ddl_of, lists_of, rows_of
from pipeline.places import Piece, PieceReader
from pipeline.source import over_pieces

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROWS_A_RANGE: Final = 2048
"""Entries of one HLC range, about: what is compared by rows when one of them differs."""
COLUMNS: Final = ("seq", "t_hlc", "hlc_physical", "hlc_logical", "hlc_node", "job_id", "action", "payload_digest")
COLUMNS_BY_ROWS: Final = (*COLUMNS[:-1], "payload")
"""What is read where stored digests are not believed."""

_EVENTS: Final = pa.schema(
    [
        ("tenant_id", pa.string()),
        ("hlc_range", pa.int64()),
        ("id", pa.binary()),
        ("seq", pa.int64()),
        ("t_hlc", pa.string()),
    ]
)
_DIGESTS: Final = pa.schema(
    [("tenant_id", pa.string()), ("hlc_range", pa.int64()), ("entries", pa.int64()), ("root", pa.binary())]
)
EVENTS_SCHEMA: Final = ddl_of(_EVENTS)
DIGESTS_SCHEMA: Final = ddl_of(_DIGESTS)

_TIME: Final = struct.Struct(">QQ")
_DIGITS: Final = frozenset("0123456789abcdef")


def range_ms(first_ms: int, last_ms: int, entries: int) -> int:
    """How long a range is of a chain with so many entries between two times, in milliseconds."""
    return max(1, (last_ms - first_ms) * ROWS_A_RANGE // max(entries, 1))


def event_id(row: Sequence[Any]) -> bytes:
    """The id of the event in a row of ``COLUMNS``, the same wherever it is chained.

    A row that no event can be made of has an id of its own, so that it is found.
    """
    _seq, t_hlc, physical, logical, node, job_id, action, digest = row
    is_time = (
        type(physical) is type(logical) is int and 0 <= physical <= PHYSICAL_MS_MAX and 0 <= logical <= LOGICAL_MAX
    )
    time = _TIME.pack(physical, logical) if is_time else _TIME.pack(0, 0)
    held = _held(node) if action == SystemAction.CONFLICT else None
    if held is not None:
        return time + held
    event = Event(t_hlc, job_id, action, digest)
    try:
        text = canonical.encode(list(event))
    except LedgerError:
        text = repr(event).encode()
    return time + sha256(text).digest()[: NODE_DIGITS // 2]


def events(
    spark: SparkSession,
    pieces: Sequence[Piece],
    ranges_ms: Mapping[str, int],
    after_seq: Mapping[str, int],
    *,
    by_rows: bool = False,
) -> DataFrame:
    """The events in ``pieces`` as ``EVENTS_SCHEMA``.

    Args:
        spark: the session.
        pieces: of the tenants to be compared.
        ranges_ms: how long a range is, by tenant; the same for both places.
        after_seq: by tenant, the seq up to which both chains are known to have the same entries.
        by_rows: digests are those of the payloads, whatever is stored as such.
    """
    lengths, beginnings = dict(ranges_ms), dict(after_seq)
    columns = COLUMNS_BY_ROWS if by_rows else COLUMNS

    def read(piece: Piece, reader: PieceReader) -> Iterator[pa.RecordBatch]:
        length_ms, after = lengths[piece.tenant_id], beginnings.get(piece.tenant_id, 0)
        for batch in reader.entries(columns):
            listed = lists_of(batch)
            if by_rows:
                listed[-1] = [sha256(str(payload).encode()).hexdigest() for payload in listed[-1]]
            rows = [
                (piece.tenant_id, _range_of(row[2], length_ms), event_id(row), row[0], row[1])
                for row in zip(*listed, strict=True)
                if row[0] > after
            ]
            if rows:
                yield batch_of(rows, _EVENTS)

    return over_pieces(spark, pieces, read, EVENTS_SCHEMA)


def range_digests(found: DataFrame) -> DataFrame:
    """Number and Merkle root of the ids of each range, as ``DIGESTS_SCHEMA``; an id that is there twice counts once."""
    keys = found.select("tenant_id", "hlc_range", "id").repartition("tenant_id", "hlc_range")
    return keys.sortWithinPartitions("tenant_id", "hlc_range", "id").mapInArrow(_fold, DIGESTS_SCHEMA)


def differences(of_a: DataFrame, of_b: DataFrame) -> DataFrame:
    """Every event that only one of two sets has, as ``EVENTS_SCHEMA`` and ``side``, ``a`` or ``b``, which has it.

    ``of_a`` and ``of_b`` are ``EVENTS_SCHEMA``, each read twice.
    """
    from pyspark.sql import functions

    a, b = (range_digests(each).withColumnRenamed("root", f"root_{name}") for name, each in (("a", of_a), ("b", of_b)))
    both = a.select("tenant_id", "hlc_range", "root_a").join(
        b.select("tenant_id", "hlc_range", "root_b"), ["tenant_id", "hlc_range"], "full_outer"
    )
    differing = both.where("NOT (root_a <=> root_b)").select("tenant_id", "hlc_range")
    key = ["tenant_id", "hlc_range", "id"]
    rows = {
        name: each.join(differing, ["tenant_id", "hlc_range"], "left_semi") for name, each in (("a", of_a), ("b", of_b))
    }
    only = [
        rows[name].join(rows[other], key, "left_anti").withColumn("side", functions.lit(name))
        for name, other in (("a", "b"), ("b", "a"))
    ]
    return only[0].unionByName(only[1])


def conflicts(found: DataFrame) -> DataFrame:
    """The events of ``differences`` that claim one HLC, one on each side: ``tenant_id, hlc, seq_a, seq_b``."""
    a, b = (
        found.where(found.side == name).select("tenant_id", found.t_hlc.alias("hlc"), found.seq.alias(f"seq_{name}"))
        for name in ("a", "b")
    )
    return a.join(b, ["tenant_id", "hlc"])


def _held(node: Any) -> bytes | None:
    """The digits of the event that a CONFLICT entry with this HLC node holds."""
    digits = node.removeprefix(NODE_PREFIX) if isinstance(node, str) and node.startswith(NODE_PREFIX) else ""
    return bytes.fromhex(digits) if len(digits) == NODE_DIGITS and _DIGITS.issuperset(digits) else None


def _range_of(physical_ms: Any, length_ms: int) -> int:
    return physical_ms // length_ms if type(physical_ms) is int else -1


def _fold(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Digests of ranges whose ids arrive sorted, range by range."""
    key: tuple[str, int] | None = None
    tree, last = merkle.Frontier(), b""
    for batch in batches:
        done: list[tuple[Any, ...]] = []
        rows = rows_of(batch)
        for found, of_range in groupby(rows, key=lambda row: row[:2]):
            if found != key:
                if key is not None:
                    done.append((*key, tree.size, tree.root()))
                key, tree, last = found, merkle.Frontier(), b""
            ids = [each for each, _ in groupby(row[2] for row in of_range)]
            if ids[0] == last:
                del ids[0]
            tree.extend(map(merkle.leaf_hash, ids))
            last = ids[-1] if ids else last
        if done:
            yield batch_of(done, _DIGESTS)
    if key is not None:
        yield batch_of([(*key, tree.size, tree.root())], _DIGESTS)
