"""Links computed from every row of two ledgers, for whoever believes no link that is stored: where they part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from ledger.chain import Linker, link_v1
from ledger.errors import LedgerError
from pipeline.arrow import batch_of, ddl_of, rows_of
from pipeline.places import OpenPlace, Piece, PieceReader
from pipeline.source import over_pieces

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COLUMNS: Final = (
    *("seq", "t_hlc", "job_id", "action", "link_version", "prev_chain_link", "payload", "origin"),
    *("hlc_physical", "hlc_logical", "hlc_node"),
)
"""What a link is computed from."""
NO_LINK: Final = b""
"""Of a row that none can be computed of."""
_LINKS: Final = pa.schema([("tenant_id", pa.string()), ("seq", pa.int64()), ("link", pa.binary())])


def first_differences(spark: SparkSession, a: OpenPlace, b: OpenPlace, last_seqs: Mapping[str, int]) -> dict[str, int]:
    """By tenant, the first seq up to ``last_seqs`` at which rows with different links stand, or one side has none;
    nothing of tenants that have no such seq."""
    of_a, of_b = (
        over_pieces(
            spark,
            [piece for name, last in last_seqs.items() for piece in place.pieces([name], from_seq=1, to_seq=last)],
            computed_links,
            ddl_of(_LINKS),
        )
        for place in (a, b)
    )
    both = of_a.alias("a").join(of_b.alias("b"), ["tenant_id", "seq"], "full_outer")
    return dict(both.where("NOT (a.link <=> b.link)").groupBy("tenant_id").agg({"seq": "min"}).collect())


def computed_links(piece: Piece, reader: PieceReader) -> Iterator[pa.RecordBatch]:
    """(tenant, seq, link) of each row of a piece."""
    linker = Linker(piece.tenant_id)
    for batch in reader.entries(COLUMNS):
        yield batch_of([(piece.tenant_id, row[0], _link_of(linker, row)) for row in rows_of(batch)], _LINKS)


def _link_of(linker: Linker, row: Sequence[Any]) -> bytes:
    seq, t_hlc, job_id, action, version, prev, payload, origin, physical, logical, node = row
    try:
        if t_hlc != f"{physical}:{logical}:{node}":
            return NO_LINK
        digest = sha256(payload.encode())
        if version == 1:
            return link_v1(t_hlc, job_id, action, prev, digest.hexdigest())
        before, source = b"" if prev is None else bytes.fromhex(prev), b"" if origin is None else origin.encode()
        return linker.link(seq, t_hlc, job_id, action, before, digest.digest(), source)
    except (AttributeError, TypeError, ValueError, LedgerError):
        return NO_LINK
