"""Takes bundles: one task a bundle verifies it wholly with the trusted keys, then yields its entries.

After the entries of a bundle comes one more row: its verdict, and the reason for a rejection, if any. A task holds
two parts of its bundle at a time: a thread reads the next part ahead.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa

from ledger.bundle.merge import Incoming, encode_incoming, incoming_entries
from ledger.errors import (
    BundleInvalidError,
    InvalidInputError,
    LedgerError,
    NotABundleError,
)
from ledger.exit_code import ExitCode, exit_code_of_bundle, exit_code_of_error
from ledger.facts.events import SYSTEM_TENANT
from ledger.hlc import Hlc
from pipeline.arrow import batch_of_columns, bounded, ddl_of
from pipeline.source import over_numbers
from signing.bundle.reader import BundleChainReader, BundleReader, digest_of
from signing.judging import judge_bundle, refuse_unless_trusted, refused
from signing.keys import Keyring

if TYPE_CHECKING:
    from pyspark import Accumulator
    from pyspark.sql import DataFrame, SparkSession

BATCH_ENTRIES_MAX: Final = 2000

_ARROW: Final = pa.schema(
    [
        ("tenant_id", pa.string()),
        ("physical_ms", pa.int64()),
        ("logical", pa.int64()),
        ("rank", pa.int32()),
        ("key_node", pa.string()),
        ("log", pa.string()),
        ("seq", pa.int64()),
        ("bundle_digest", pa.string()),
        ("entry", pa.binary()),
        ("file", pa.int32()),
        ("about", pa.string()),
    ]
)
SCHEMA: Final = ddl_of(_ARROW)
"""An entry, ``entry``, after its sort key; or ``about``, the result of a bundle; with the number of the file. HLCs
are those of the entries, even for ``rank`` 0, where the merge order ignores them."""


class TakenBundle(NamedTuple):
    """The result of taking one bundle."""

    file: str
    """Its path as printable text."""
    number: int
    """Its index among the given files."""
    digest: str
    """SHA-256 of the file, hex; empty if it could not be read."""
    exit_code: int
    """Exit code of its verdict, or of its rejection."""
    refusal: str | None
    """Why it may not be merged; None if it may."""
    told: dict[str, Any]
    """The verdict object as in ``tally verify-bundle --json``; empty if the file could not be read."""
    tenant_id: str = ""
    entries: int = 0
    raw_bytes: int = 0
    """Bytes of its entries, uncompressed."""
    beginning: str | None = None
    """First link of its leading chain of an older link version."""

    def to_json(self) -> dict[str, Any]:
        """The verdict object with the file's name, and the refusal."""
        refusal = {} if self.refusal is None else {"error": self.refusal}
        return {**self.told, "file": self.file, "exit_code": self.exit_code, **refusal}


def take(
    spark: SparkSession, files: Sequence[str], keyring: Keyring, counter: Accumulator[int] | None = None
) -> DataFrame:
    """The entries of the bundles in ``files``, and the result of each bundle, as ``SCHEMA``.

    Args:
        spark: the session; its workers must reach the files under the same names.
        files: paths; each is one task.
        keyring: the keys that are trusted.
        counter: incremented by the entries that finished tasks have read.
    """
    names = [os.path.abspath(file) for file in files]
    return over_numbers(spark, len(names), lambda number: _taken(names[number], number, keyring, counter), SCHEMA)


def bundles_of(taken: DataFrame) -> list[TakenBundle]:
    """The result of each bundle, in the order of the given files."""
    rows = taken.where("about IS NOT NULL").select("about").collect()
    return sorted((TakenBundle(**json.loads(row[0])) for row in rows), key=lambda bundle: bundle.number)


def _taken(file: str, number: int, keyring: Keyring, counter: Accumulator[int] | None) -> Iterator[pa.RecordBatch]:
    """The entries of one bundle, then its result. The file stays open, and parts are hashed again when read, so the
    taken entries are the verified ones."""
    name = os.fsencode(file).decode("utf-8", "backslashreplace")
    taken = TakenBundle(name, number, "", ExitCode.FINE, None, {})
    began_s = time.perf_counter()
    try:
        with BundleReader.open(file, keyring) as reader:
            found = asyncio.run(judge_bundle(BundleChainReader(reader), keyring))
            taken = taken._replace(
                digest=reader.digest,
                exit_code=exit_code_of_bundle(found.verdict),
                told=found.to_json(),
                tenant_id=reader.manifest.tenant_id,
                entries=reader.manifest.entry_count,
                raw_bytes=sum(part.raw_bytes for part in reader.manifest.entry_parts),
            )
            refuse_unless_trusted(name, found, "--keys")
            if taken.tenant_id == SYSTEM_TENANT:
                raise InvalidInputError(
                    f"{name} is of {SYSTEM_TENANT}: each ledger has that chain of its own, it is never merged"
                )
            for entries in _batches(incoming_entries(reader.source, reader.entry_batches())):
                if entries[0].key.rank == 0 and taken.beginning is None:
                    if entries[0].seq != 1:
                        raise InvalidInputError(f"{name} does not begin with the first entry of its older link version")
                    taken = taken._replace(beginning=entries[0].chain_link)
                if counter is not None:
                    counter.add(len(entries))
                yield _arrow(entries, number)
    except (LedgerError, OSError) as error:
        if isinstance(error, BundleInvalidError) and not (taken.told or isinstance(error, NotABundleError)):
            verdict = refused(error, *digest_of(Path(file)), time.perf_counter() - began_s)
            taken = taken._replace(digest=verdict.digest, told=verdict.to_json())
        why = str(error) if isinstance(error, LedgerError) else str(error.strerror or error)
        code = ExitCode.COULD_NOT_RUN if isinstance(error, NotABundleError | OSError) else exit_code_of_error(error)
        taken = taken._replace(exit_code=code, refusal=why if name in why else f"{name}: {why}")
    yield pa.RecordBatch.from_pylist([{"file": number, "about": json.dumps(taken._asdict())}], _ARROW)


def _batches(entries: Iterable[Incoming]) -> Iterator[list[Incoming]]:
    """Entries, bounded in number and bytes, those of one rank together."""
    for _, of_rank in groupby(entries, key=lambda entry: entry.key.rank):
        yield from bounded(of_rank, BATCH_ENTRIES_MAX, lambda entry: len(entry.payload))


def _arrow(entries: Sequence[Incoming], number: int) -> pa.RecordBatch:
    hlcs = [Hlc.parse(entry.t_hlc) for entry in entries]
    ranks, _, _, nodes, logs, seqs, digests = zip(*(entry.key for entry in entries), strict=True)
    columns: list[Sequence[Any]] = [
        [entry.tenant_id for entry in entries],
        [hlc.physical_ms for hlc in hlcs],
        [hlc.logical for hlc in hlcs],
        *(ranks, nodes, logs, seqs, digests),
        [encode_incoming(entry) for entry in entries],
        [number] * len(entries),
        [None] * len(entries),
    ]
    return batch_of_columns(columns, _ARROW)
