"""Verifies whole ledgers, archives and many bundles on Spark, with the verdicts of the service.

``verify``, for a database or an archive, and ``verify_bundles`` return ``Verified``: verdict objects, and verdicts
and breaks as DataFrames. Rows of a ledger never leave the task that reads them::

    1. the driver plans: pieces of every tenant, and the stored bounds of each chain
    2. a task a piece: checks its rows in one pass; returns a summary, breaks, and partially folded jobs
    3. by job: states merged and compared with the stored ones
    4. by tenant: summaries folded into the verdict

The verdict is the service's own, since both feed the same checks in ``ledger``.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import orjson
import pyarrow as pa
from msgspec.msgpack import decode, encode

from ledger.errors import ArchiveInvalidError, ArchiveSignatureError, NotABundleError
from ledger.exit_code import ExitCode
from ledger.verification.left_index import IndexSource
from ledger.verification.projection_check import CHAIN_ASPECTS
from ledger.verification.range_check import RangeTask
from ledger.verification.range_fold import ChainBounds
from ledger.verification.range_fold import tasks as tasks_of
from ledger.verification.tree_check import TreeHead
from ledger.verification.verdict import KINDS, Break, Verdict, rollback, with_break
from pipeline import arrow
from pipeline.archive.joined import NO_MANIFESTS, ArchivedPart
from pipeline.archive.reader import broken
from pipeline.arrow import Row, ddl_of, rows_of
from pipeline.places import OpenPlace, Piece
from pipeline.places.protocol import ROWS_A_PIECE, ChainName
from pipeline.source import open_pieces, over_numbers, over_pieces, rows_a_task
from pipeline.spark import SHUFFLE_PARTITIONS_A_CORE
from pipeline.verify.tasks import (
    BREAK,
    CANDIDATE,
    CHAINS_SORTED_BY,
    DDL,
    JOBS_SORTED_BY,
    REFUSED,
    ROWS_FOLDED,
    VERDICT,
    CheckRanges,
    PlannedChain,
    Refusal,
    TaskRow,
    batched,
    compare_jobs,
    fold_chains,
    read_jobs,
    rows_in,
)
from signing.anchors import NOBODY, ExternalWitnesses
from signing.checkpoint import JudgedCheckpoint, judge_kept
from signing.judging import verify_file
from signing.keys import Keyring
from signing.memory import Memory
from signing.snapshot import ENVELOPE, TO_SEQ

if TYPE_CHECKING:
    from pyspark import Accumulator
    from pyspark.sql import DataFrame, SparkSession


__all__ = ["BREAKS_DDL", "VERDICTS_DDL", "Verified", "verify", "verify_bundles"]


_BREAKS_SCHEMA: Final = pa.schema(
    [("tenant_id", pa.string()), ("seq", pa.int64())]
    + [(name, pa.string()) for name in ("kind", "detail", "expected", "actual", "ledger")]
)
"""``ledger`` is null if one ledger was read."""
BREAKS_DDL: Final = ddl_of(_BREAKS_SCHEMA)
VERDICTS_DDL: Final = "tenant_id string, valid boolean, entries_checked bigint, verdict string, ledger string"


@dataclass(frozen=True)
class Verified:
    """The result of a verification; ``close`` it after the breaks were read."""

    spark: SparkSession
    objects: list[dict[str, Any]]
    """The verdict object of each tenant or file, in order; that of an unreadable file has ``error``."""
    found: Sequence[DataFrame]
    """Cached rows of ``pipeline.verify.tasks``, among them every break."""

    def verdicts(self) -> DataFrame:
        """One row a tenant or file; ``verdict`` is the verdict object as JSON."""
        rows = [
            (*(each[name] for name in ("tenant_id", "valid", "entries_checked")), orjson.dumps(each).decode(), ledger)
            for each, (ledger, _) in zip(self.objects, map(ChainName.of, self.objects), strict=True)
        ]
        return self.spark.createDataFrame(rows, VERDICTS_DDL).coalesce(1)

    def breaks(self) -> DataFrame:
        """Every break, unordered."""
        outside = [
            (ChainName.of(each), [_text(value) for value in each["first_break"].values()], not each["entries_checked"])
            for each in self.objects
            if each["first_break"] is not None and each["first_break"]["kind"] not in KINDS
        ]
        told = self.spark.createDataFrame(
            [(chain.tenant_id or None, int(seq or 0), *rest, chain.ledger) for chain, (seq, *rest), _ in outside],
            BREAKS_DDL,
        )
        # An invalid place has no other breaks; breaks of job states count only if the chain is whole.
        refused = {str(chain) for chain, _, is_unread in outside if is_unread}
        whole = {
            str(ChainName.of(each))
            for each in self.objects
            if "broken" not in {each["verdicts"].get(aspect) for aspect in CHAIN_ASPECTS}
        }

        def tell(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            found = (
                (ChainName.parse(row.chain), decode(row.data, type=Break))
                for row in rows_in(batches)
                if row.chain not in refused and (row.kind == BREAK or row.chain in whole)
            )
            rows = (
                (chain.tenant_id, *each[:3], _text(each.expected), _text(each.actual), chain.ledger)
                for chain, each in found
            )
            return arrow.batched(rows, _BREAKS_SCHEMA)

        for rows_found in self.found:
            told = told.union(rows_found.filter(rows_found.kind.isin(BREAK, CANDIDATE)).mapInArrow(tell, BREAKS_DDL))
        # A shuffle of 200 partitions leaves most of them empty, and each is a task.
        return told.coalesce(self.spark.sparkContext.defaultParallelism)

    def close(self) -> None:
        """Release the cached rows."""
        for each in self.found:
            each.unpersist()


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def verify(
    spark: SparkSession,
    place: OpenPlace,
    *,
    tenants: Collection[str] | None = None,
    keyring: Keyring | None = None,
    checkpoints: Mapping[str, Sequence[TreeHead]] | None = None,
    external: ExternalWitnesses = NOBODY,
    rows_a_piece: int = ROWS_A_PIECE,
    passed: Accumulator[int] | None = None,
    archived: Mapping[str, IndexSource] | None = None,
) -> Verified:
    """Verify the ledgers of ``place``, which MUST stay open until the breaks were read.

    A tenant without head and entries that a table still names is one whose chain was removed. The verdict objects of
    an archive have the aspect ``archive`` and no job states; those of several ledgers name their ``ledger``.

    Args:
        spark: the session.
        place: a database, an archive, or several of one kind. For bundles see ``verify_bundles``.
        tenants: tenants, or chains of several ledgers, to verify; by default all.
        keyring: trusted keys; without it the keys that the ledger names, by which no signature is valid.
        checkpoints: by tenant, externally kept tree heads, which the chain must extend.
        external: witnesses whose cosignatures count, and the policy over them.
        rows_a_piece: entries that a task checks.
        passed: counts checked entries.
        archived: have the entries that left chains, for their index of jobs.

    Raises:
        InvalidInputError: ``place`` is a bundle.
        TenantNotFoundError: a named tenant has no data.
    """
    began_s = time.perf_counter()
    wanted = place.tenants() if tenants is None else sorted(set(tenants))
    judged, refused = place.judged(wanted, keyring)
    ends = {
        tenant: each.ends._replace(
            checkpoints=(*each.ends.checkpoints, *(checkpoints or {}).get(tenant, ())),
            anchors=place.cosigned(tenant, keyring, external),
        )
        for tenant, each in judged.items()
    }
    ends = place.begun(ends, keyring, archived or {})
    rings = {name: each.named_keys() if keyring is None else keyring for name, each in place.ledgers().items()}
    pieces = place.pieces([*ends], rows_a_piece=rows_a_piece)
    left = [] if place.is_copy else place.left_pieces([*ends], rows_a_piece)
    verdicts, refusals, found = check_chains(
        spark, pieces, ends, keyrings=rings, with_jobs=not place.is_copy, left=left, passed=passed
    )
    for tenant, (is_signature, message, seq) in refusals.items():
        refused[tenant] = (ArchiveSignatureError if is_signature else ArchiveInvalidError)(message, seq)
    seconds = time.perf_counter() - began_s
    objects = {chain: broken(ChainName.parse(chain).tenant_id, error, seconds) for chain, error in refused.items()}
    for chain, verdict in verdicts.items():
        told = judged[chain].told(verdict.to_json(seconds * 1000))
        objects[chain] = external.with_quorum(told, verdict.anchors)
    return Verified(spark, [ChainName.parse(chain).named(objects[chain]) for chain in wanted], found)


def check_chains(
    spark: SparkSession,
    pieces: Sequence[Piece],
    ends: Mapping[str, ChainBounds],
    *,
    keyrings: Mapping[str | None, Keyring | None],
    with_jobs: bool,
    left: Sequence[Piece] = (),
    passed: Accumulator[int] | None,
) -> tuple[dict[str, Verdict], dict[str, Refusal], tuple[DataFrame, ...]]:
    """Check the chains in ``pieces``; ``ends`` has the stored bounds of each, ``keyrings`` the keys of each ledger.

    Returns verdicts and refusals by chain, and the cached rows, including every break.

    With ``with_jobs``, stored job states are compared. ``left`` are pieces of entries that left and are still stored,
    of which only the jobs are folded.
    """
    chains = _planned(pieces, ends)
    # 1. The ranges. 2. The jobs.
    check = CheckRanges(_by_piece(pieces, chains), keyrings, with_jobs, passed=passed)
    read = [*left, *pieces]
    found = over_pieces(spark, read, check, DDL, rows_a_task(read, spark.sparkContext.defaultParallelism))
    if with_jobs:
        stored = over_pieces(spark, [piece for piece in pieces if piece.is_first], read_jobs, DDL)
        tasks_min = SHUFFLE_PARTITIONS_A_CORE * spark.sparkContext.defaultParallelism
        by_job = found.union(stored).repartition(_partitions(found, max(tasks_min, len(pieces))), "chain", "job_id")
        found = by_job.sortWithinPartitions(*JOBS_SORTED_BY).mapInArrow(compare_jobs, DDL)
    found = found.persist()
    # 3. The verdicts.
    folded, verdicts, refused = _fold(found, chains)
    return verdicts, refused, (found, folded)


def _planned(pieces: Sequence[Piece], ends: Mapping[str, ChainBounds]) -> dict[str, PlannedChain]:
    borders: dict[str, list[int]] = {chain: [] for chain in ends}
    for piece in pieces:
        if not piece.is_first and piece.from_seq is not None:
            borders[piece.chain].append(piece.from_seq)
    return {chain: PlannedChain(ends[chain], tasks_of(ends[chain], of_chain)) for chain, of_chain in borders.items()}


def _by_piece(pieces: Sequence[Piece], chains: Mapping[str, PlannedChain]) -> dict[tuple[str, int | None], RangeTask]:
    left = {name: iter(chain.tasks) for name, chain in chains.items()}
    return {(piece.chain, piece.from_seq): next(left[piece.chain]) for piece in pieces}


def _fold(
    found: DataFrame, chains: Mapping[str, PlannedChain]
) -> tuple[DataFrame, dict[str, Verdict], dict[str, Refusal]]:
    """The folded rows, and their verdicts and refusals."""
    of_chains = found.filter(found.kind.isin(*ROWS_FOLDED)).repartition(_partitions(found, len(chains)), "chain")
    folded = of_chains.sortWithinPartitions(*CHAINS_SORTED_BY).mapInArrow(partial(fold_chains, chains), DDL).persist()
    verdicts: dict[str, Verdict] = {}
    refused: dict[str, Refusal] = {}
    for row in folded.filter(folded.kind.isin(VERDICT, REFUSED)).collect():
        data = bytes(row.data)
        if row.kind == VERDICT:
            verdicts[row.chain] = decode(data, type=Verdict)
        else:
            refused[row.chain] = decode(data, type=Refusal)
    return folded, verdicts, refused


def _partitions(found: DataFrame, useful: int) -> int:
    """Partitions to shuffle ``found`` into: as many as the session has, and no more than are ``useful``."""
    return max(1, min(int(found.sparkSession.conf.get("spark.sql.shuffle.partitions") or 1), useful))


# --- bundles --------------------------------------------------------------------------------------


def verify_bundles(
    spark: SparkSession,
    files: Sequence[Path],
    *,
    keyring: Keyring | None = None,
    kept: str | None = None,
    memory: Memory | None = None,
    external: ExternalWitnesses = NOBODY,
    passed: Accumulator[int] | None = None,
) -> Verified:
    """Verify bundle files; the objects have the aspect ``bundle`` and name their ``file``, in the order given.

    An unreadable file has an object too, with ``error`` and ``exit_code`` and no aspect. ``kept`` is the text of an
    externally kept checkpoint; of several bundles it is for those of its log. ``memory`` holds earlier verified
    checkpoints; ``external`` are the witnesses whose cosignatures count.

    Raises:
        SignatureError: ``kept`` is invalid.
    """
    judged = None if kept is None else judge_kept(kept, keyring)
    names = [str(file.absolute()) for file in files]

    def check(number: int) -> Iterator[pa.RecordBatch]:
        against = keyring, judged, memory, external
        return batched(verdict_rows(names[number], number, against, passed, is_kept_of_many=len(names) > 1))

    found = over_numbers(spark, len(files), check, DDL).persist()
    verdicts = found.filter(found.kind == VERDICT).orderBy("number").collect()
    return Verified(spark, [orjson.loads(bytes(row.data)) for row in verdicts], [found])


def verdict_rows(
    file: str,
    number: int,
    against: tuple[Keyring | None, JudgedCheckpoint | None, Memory | None, ExternalWitnesses],
    passed: Accumulator[int] | None = None,
    *,
    is_kept_of_many: bool = False,
) -> Iterator[TaskRow]:
    """The breaks and the verdict of one bundle file, with its ``number`` among all."""
    breaks: list[Break] = []
    judging = verify_file(Path(file), *against, on_break=breaks.append, is_kept_of_many=is_kept_of_many)
    try:
        verdict = asyncio.run(judging).to_json()
    except NotABundleError as error:
        breaks, verdict = [], _unread(str(error))
    except OSError as error:
        breaks, verdict = [], _unread(error.strerror or _readable(str(error)))
    if passed is not None:
        passed.add(verdict["entries_checked"])
    tenant_id = verdict["tenant_id"] or ""
    for each in breaks:
        yield TaskRow(tenant_id, BREAK, number, 0, None, encode(each))
    yield TaskRow(tenant_id, VERDICT, number, 0, None, orjson.dumps({"file": _readable(file), **verdict}))


def _unread(why: str) -> dict[str, Any]:
    """The object in place of a verdict on an unreadable file; it holds only the reason."""
    return {
        "tenant_id": None,
        "valid": False,
        "verdicts": {},
        "entries_checked": 0,
        "breaks": {},
        "first_break": None,
        "exit_code": int(ExitCode.COULD_NOT_RUN),
        "error": why,
    }


def _readable(name: str) -> str:
    """The text of a file's name; bytes that are not UTF-8 are escaped."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


# --- databases with their archives, as chains from seq 1 (pipeline.archive.joined) ------------------


def verify_joined(
    spark: SparkSession,
    place: OpenPlace,
    archives: OpenPlace,
    *,
    tenants: Collection[str],
    keyring: Keyring | None,
    checkpoints: Mapping[str, Sequence[TreeHead]],
    external: ExternalWitnesses = NOBODY,
    passed: Accumulator[int] | None = None,
) -> Verified:
    """Verify ``tenants`` of ``place``, and what ``archives`` have of them, as one; arguments as of ``verify``.

    A tenant that only its archive has was removed from the database, which is a break.
    """
    archived = sorted({*tenants} & {*archives.tenants()})
    parts = {chain: _part(archives, chain, None) for chain in tenants}
    there = {*place.tenants()}
    # 1. The archives.
    of_archives = verify(spark, archives, tenants=archived, keyring=keyring, passed=passed)
    verdicts = {str(ChainName.of(each)): each for each in of_archives.objects}
    # 2. The databases, which must begin with the trees of the archives.
    heads = {chain: [*checkpoints.get(chain, ()), *part.heads] for chain, part in parts.items()}
    chains = [chain for chain in tenants if chain in there]
    of_databases = verify(
        spark,
        place,
        tenants=chains,
        keyring=keyring,
        checkpoints=heads,
        external=external,
        passed=passed,
        archived={chain: part for chain, part in parts.items() if part.sealed},
    )
    found = {str(ChainName.of(each)): each for each in of_databases.objects}
    # 3. Both as one.
    objects = [
        _joined(place, archives, chain, found.get(chain), verdicts.get(chain)) for chain in sorted({*found, *verdicts})
    ]
    return Verified(spark, objects, [*of_databases.found, *of_archives.found])


def _joined(
    place: OpenPlace,
    archives: OpenPlace,
    chain: str,
    found: Mapping[str, Any] | None,
    archived: Mapping[str, Any] | None,
) -> dict[str, Any]:
    if found is None:
        assert archived is not None
        root = archived["archive"]["tree_root"] if archived.get("archive") else ""
        detail = "the archive has entries of this tenant, and the database has none"
        return with_break({**archived}, rollback(archived["to_seq"], detail, root, None))
    origin = place.log_origin(chain)
    log = None if origin is None else f"{origin}/{ChainName.parse(chain).tenant_id}"
    return _part(archives, chain, archived).joined(found, log)


def _part(archives: OpenPlace, chain: str, verdict: Mapping[str, Any] | None) -> ArchivedPart:
    """What the archives have of a chain; its verdict says so if its manifests cannot be read."""
    try:
        sealed = archives.manifests(chain) if chain in archives.tenants() else NO_MANIFESTS
    except ArchiveInvalidError:
        sealed = NO_MANIFESTS

    def rows(from_seq: int, to_seq: int) -> Iterator[Sequence[Row]]:
        for _, reader in open_pieces(archives.pieces([chain], from_seq=from_seq, to_seq=to_seq)):
            yield from ([*rows_of(batch)] for batch in reader.entries())

    def snapshot_at(to_seq: int) -> str | None:
        for _, reader in open_pieces(archives.pieces([chain], from_seq=to_seq, to_seq=to_seq)):
            found = (row for batch in reader.snapshots() for row in rows_of(batch))
            return next((row[ENVELOPE] for row in found if row[TO_SEQ] == to_seq), None)
        return None

    return ArchivedPart(ChainName.parse(chain).tenant_id, str(archives), sealed, verdict, rows, snapshot_at)
