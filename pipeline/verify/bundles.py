"""Verification of many bundles on Spark: a task verifies a whole file, from its container to its last row.

Files MUST be found under the same path wherever tasks run.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pyarrow as pa

from ledger.errors import BundleInvalidError, NotABundleError
from ledger.exit_code import ExitCode
from ledger.verification import verify
from ledger.verification.verdict import Break
from pipeline.keys import keyring_of, sent
from pipeline.source import over_numbers
from pipeline.verify.job import Verified
from pipeline.verify.task_rows import BREAK, DDL, VERDICT, TaskRow, batched, encode
from signing.bundle.judging import BundleVerdict, judged, refused
from signing.bundle.reader import BundleChainReader, BundleReader, digest_of
from signing.checkpoint import JudgedCheckpoint, judge_checkpoint
from signing.keys import Keyring
from signing.memory import Memory

if TYPE_CHECKING:
    from pyspark import Accumulator
    from pyspark.sql import SparkSession


def verify_bundles(
    spark: SparkSession,
    files: Sequence[Path],
    *,
    keyring: Keyring | None = None,
    kept: str | None = None,
    memory: Memory | None = None,
    passed: Accumulator[int] | None = None,
) -> Verified:
    """Verify bundle files; the objects have the aspect ``bundle`` and name their ``file``, in the order given.

    A file that cannot be read has an object too, with ``error`` and ``exit_code`` and no aspect.
    ``kept`` is the text of a checkpoint kept elsewhere, for the bundles of its log; ``memory`` is what was verified
    before.

    Raises:
        SignatureError: ``kept`` does not hold.
    """
    if kept is not None:
        judge_checkpoint(kept, keyring)
    keys = sent(keyring)
    names = [str(file.absolute()) for file in files]

    def check(number: int) -> Iterator[pa.RecordBatch]:
        return batched(_rows(names[number], number, keyring_of(keys), kept, memory, passed))

    found = over_numbers(spark, len(files), check, DDL).persist()
    verdicts = found.filter(found.kind == VERDICT).orderBy("number").collect()
    return Verified(spark, [orjson.loads(bytes(row.data)) for row in verdicts], [found])


def _rows(
    file: str,
    number: int,
    keyring: Keyring | None,
    kept: str | None,
    memory: Memory | None,
    passed: Accumulator[int] | None,
) -> Iterator[TaskRow]:
    breaks: list[Break] = []
    try:
        verdict = _verified(Path(file), keyring, kept, memory, breaks).to_json()
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
    """Instead of a verdict: nothing was checked, and nothing is said of the file but why."""
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
    """The text of a file's name; bytes of it that are no UTF-8 are escaped."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _verified(
    file: Path, keyring: Keyring | None, kept: str | None, memory: Memory | None, breaks: list[Break]
) -> BundleVerdict:
    began_s = time.perf_counter()
    try:
        with BundleReader.open(file, keyring) as reader:
            verify_rows = partial(verify, BundleChainReader(reader), on_break=breaks.append)
            return asyncio.run(judged(reader, keyring, _kept_of_log(reader, kept, keyring), verify_rows, memory))
    except NotABundleError:
        raise
    except BundleInvalidError as error:
        return refused(error, *digest_of(file), time.perf_counter() - began_s)


def _kept_of_log(reader: BundleReader, kept: str | None, keyring: Keyring | None) -> JudgedCheckpoint | None:
    """The checkpoint kept elsewhere, where it is of the bundle's log."""
    if kept is None:
        return None
    found = judge_checkpoint(kept, keyring)
    return found if found.checkpoint.origin == reader.manifest.origin else None
