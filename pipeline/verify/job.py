"""Verification of ledgers on Spark: ranges checked where they are read, jobs compared, all folded tenant by tenant.

    1. the driver plans: pieces of every tenant, and what is said of each chain as a whole
    2. a task a piece: checks its rows in one pass; hands on a summary, breaks, and the jobs as far as it folded them
    3. by job: states merged and compared with the stored ones
    4. by tenant: summaries folded into the verdict
    5. ranges that were checked on an assumption that was wrong are checked again; only tampering makes that happen

Rows of a ledger never leave the task that reads them. The verdict is the service's own, since both feed the same
checks in ``ledger``.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
import orjson
import pyarrow as pa

from ledger.projection_check import CHAIN_ASPECTS
from ledger.range_fold import Ends, tasks
from ledger.range_summary import RangeTask
from ledger.tree_check import TreeHead
from pipeline.source import OpenPlace, Piece, over_pieces
from pipeline.source.pieces import ROWS_A_PIECE
from pipeline.verify import folding
from pipeline.verify import jobs as comparing
from pipeline.verify.folding import Chain, FoldChains
from pipeline.verify.ranges import CheckRanges, read_jobs
from pipeline.verify.rows import AGAIN, BREAK, CANDIDATE, DDL, JOBS, SUMMARY, VERDICT, decode_break, rows_of
from signing.keys import Keyring

if TYPE_CHECKING:
    from pyspark import Accumulator
    from pyspark.sql import DataFrame, SparkSession

ROUNDS_MAX: Final = 5
"""Times that ranges may have to be checked again: each round knows what the one before was missing."""

BREAKS_DDL: Final = "tenant_id string, seq bigint, kind string, detail string, expected string, actual string"
_BREAKS_SCHEMA: Final = pa.schema(
    [("tenant_id", pa.string()), ("seq", pa.int64())]
    + [(name, pa.string()) for name in ("kind", "detail", "expected", "actual")]
)
VERDICTS_DDL: Final = "tenant_id string, valid boolean, entries_checked bigint, verdict string"
_TASK_DECODER: Final = msgspec.msgpack.Decoder(RangeTask)


class Verified:
    """What a verification came to; ``close`` it once the breaks were read."""

    def __init__(self, spark: SparkSession, objects: list[dict[str, Any]], found: DataFrame, folded: DataFrame) -> None:
        self.objects = objects
        """The verdict object of each tenant, in the order of tenants."""
        self._spark = spark
        self._found = found
        self._folded = folded

    def verdicts(self) -> DataFrame:
        """One row a tenant; ``verdict`` is the verdict object as JSON."""
        rows = [
            (each["tenant_id"], each["valid"], each["entries_checked"], orjson.dumps(each).decode())
            for each in self.objects
        ]
        return self._spark.createDataFrame(rows, VERDICTS_DDL)

    def breaks(self) -> DataFrame:
        """Every break there is, in no order."""
        told = _BreaksTold(frozenset(each["tenant_id"] for each in self.objects if _is_chain_whole(each)))
        both = self._found.union(self._folded)
        return both.filter(both.kind.isin(BREAK, CANDIDATE)).mapInArrow(told, BREAKS_DDL)

    def close(self) -> None:
        """Let go of what is kept."""
        self._found.unpersist()
        self._folded.unpersist()


@dataclass(frozen=True)
class _BreaksTold:
    """Decodes breaks; those of job states count where the chain itself is whole."""

    whole: frozenset[str]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            rows = [
                (row.tenant_id, *decode_break(row.data))
                for row in rows_of([batch])
                if row.kind == BREAK or row.tenant_id in self.whole
            ]
            if rows:
                tenants, seqs, kinds, details, expected, actual = zip(*rows, strict=True)
                texts = ([None if value is None else str(value) for value in column] for column in (expected, actual))
                columns = (tenants, seqs, kinds, details, *texts)
                arrays = [pa.array(values, field.type) for values, field in zip(columns, _BREAKS_SCHEMA, strict=True)]
                yield pa.RecordBatch.from_arrays(arrays, schema=_BREAKS_SCHEMA)


def verify(
    spark: SparkSession,
    place: OpenPlace,
    *,
    tenants: Collection[str] | None = None,
    keyring: Keyring | None = None,
    checkpoints: Mapping[str, Sequence[TreeHead]] | None = None,
    with_jobs: bool = True,
    rows_a_piece: int = ROWS_A_PIECE,
    passed: Accumulator[int] | None = None,
) -> Verified:
    """Verify the ledgers of ``place``, which MUST stay open until the breaks were read.

    Args:
        spark: the session.
        place: where they are.
        tenants: whose, by default all.
        keyring: keys to judge signatures with; without it none is judged.
        checkpoints: by tenant, tree heads kept elsewhere, which the chain must extend.
        with_jobs: whether to compare job states, where they are stored.
        rows_a_piece: entries that a task checks.
        passed: counts entries that were checked.

    Raises:
        TenantNotFoundError: there is nothing of a tenant that was named.
    """
    began_s = time.perf_counter()
    # 1. The plan.
    pieces = place.pieces(tenants, rows_a_piece=rows_a_piece)
    chains = _planned(place, pieces, checkpoints or {})
    keys = None if keyring is None else orjson.dumps(keyring.to_json()).decode()
    # 2. The ranges. 3. The jobs.
    found = over_pieces(spark, pieces, CheckRanges(_by_piece(pieces, chains), keys, with_jobs, passed), DDL)
    if with_jobs:
        stored = over_pieces(spark, [piece for piece in pieces if piece.is_first], read_jobs, DDL)
        by_job = found.union(stored).repartition("tenant_id", "job_id").sortWithinPartitions(*comparing.SORTED_BY)
        found = by_job.mapInArrow(comparing.compare_jobs, DDL)
    found = found.persist()
    # 4. The verdicts.
    folded, objects, changed = _fold(found, chains)
    # 5. What must be done again.
    rounds = 1
    while changed:
        if rounds == ROUNDS_MAX:
            raise AssertionError(f"ranges are to be checked again without end: {sorted(changed)[:3]}")
        for (tenant, number), task in changed.items():
            chains[tenant].tasks[number] = task
        kept = spark.createDataFrame([*changed], "tenant_id string, number bigint")
        kept = found.join(kept, ["tenant_id", "number"], "left_anti").select(found.columns)
        tasks_of_pieces = _by_piece(pieces, chains)
        concerned = [
            piece
            for piece in pieces
            if (piece.tenant_id, tasks_of_pieces[piece.tenant_id, piece.from_seq].number) in changed
        ]
        again = over_pieces(spark, concerned, CheckRanges(tasks_of_pieces, keys, False), DDL)
        found = kept.union(again).persist()
        folded, objects, changed = _fold(found, chains)
        rounds += 1
    duration_ms = round((time.perf_counter() - began_s) * 1000, 1)
    return Verified(spark, [{**each, "duration_ms": duration_ms} for each in objects], found, folded)


def _planned(
    place: OpenPlace, pieces: Sequence[Piece], checkpoints: Mapping[str, Sequence[TreeHead]]
) -> dict[str, Chain]:
    borders: dict[str, list[int]] = {}
    for piece in pieces:
        of_tenant = borders.setdefault(piece.tenant_id, [])
        if not piece.is_first and piece.from_seq is not None:
            of_tenant.append(piece.from_seq)
    chains = {}
    for tenant, of_tenant in borders.items():
        facts = place.facts(tenant)
        ends = Ends(tenant, facts.head, facts.tree, checkpoints.get(tenant, ()))
        chains[tenant] = Chain(ends, tasks(ends, of_tenant))
    return chains


def _by_piece(pieces: Sequence[Piece], chains: Mapping[str, Chain]) -> dict[tuple[str, int | None], RangeTask]:
    left = {tenant: iter(chain.tasks) for tenant, chain in chains.items()}
    return {(piece.tenant_id, piece.from_seq): next(left[piece.tenant_id]) for piece in pieces}


def _fold(
    found: DataFrame, chains: Mapping[str, Chain]
) -> tuple[DataFrame, list[dict[str, Any]], dict[tuple[str, int], RangeTask]]:
    """What folding gave, the verdict objects in it, and the tasks to be done again."""
    of_chains = found.filter(found.kind.isin(SUMMARY, JOBS)).repartition("tenant_id")
    folded = of_chains.sortWithinPartitions(*folding.SORTED_BY).mapInArrow(FoldChains(chains), DDL).persist()
    objects: list[dict[str, Any]] = []
    changed: dict[tuple[str, int], RangeTask] = {}
    for row in folded.filter(folded.kind.isin(VERDICT, AGAIN)).collect():
        if row.kind == VERDICT:
            objects.append(orjson.loads(bytes(row.data)))
        else:
            changed[row.tenant_id, row.number] = _TASK_DECODER.decode(bytes(row.data))
    return folded, sorted(objects, key=lambda each: str(each["tenant_id"])), changed


def _is_chain_whole(verdict: Mapping[str, Any]) -> bool:
    """Whether nothing explains that job states are not those of the entries."""
    return "broken" not in {verdict["verdicts"][aspect] for aspect in CHAIN_ASPECTS}
