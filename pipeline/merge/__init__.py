"""Merges many bundles into one a tenant: verified, deduplicated, in HLC order, every conflict kept and reported.

::

    take      a task a bundle      verified wholly, then yields its entries         pipeline.merge.taking
    decide    a task a range       sorted by HLC; what becomes of each entry         pipeline.merge.deciding
    link      the driver           one chain a tenant, streamed into a signed file   pipeline.merge.deciding

The functions of an import (``ledger.bundle.merge``) decide each entry, in the same order. So importing the merged
bundle into an empty ledger has the same result as importing all bundles together.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ledger.bundle.merge import set_digest
from ledger.errors import InvalidInputError, MergeRefusedError
from pipeline.merge.deciding import MergeCounts, MergedBundle, Signers, decided, link, partitions_of
from pipeline.merge.taking import TakenBundle, bundles_of, take
from pipeline.spark import own_folder
from signing.keys import Keyring
from signing.manifest import LOG_ORIGIN

if TYPE_CHECKING:
    from pyspark import Accumulator
    from pyspark.sql import SparkSession


SUFFIX: Final = ".bundle.tar"
"""File name of a bundle in a folder, after its tenant."""
SETTINGS: Final[Mapping[str, str]] = {"spark.sql.execution.arrow.maxBytesPerBatch": str(8 << 20)}
"""Settings of Spark for a merge: entries have any length, so batches are bounded in bytes too."""

Stage = Callable[[str, "Accumulator[int] | None"], AbstractContextManager[None]]
"""Context that shows one stage of the work."""
PREFIX: Final = ".merge-"
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of writing an open file, which name no file."""


@dataclass(frozen=True)
class Merged:
    """The result of a merge."""

    bundles: Sequence[TakenBundle]
    merged: Sequence[MergedBundle]
    found: MergeCounts

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "entries": sum(bundle.entries for bundle in self.bundles),
            "merged": self.found.placed,
            "duplicates": self.found.duplicates,
            "conflict_count": self.found.conflict_count,
            "conflicts": self.found.conflicts,
            "bundles": [bundle._asdict() for bundle in self.merged],
            "inputs": [bundle.to_json() for bundle in self.bundles],
        }


def merge(
    spark: SparkSession,
    files: Sequence[str],
    keyring: Keyring,
    output: Path,
    signers: Signers,
    *,
    is_folder: bool = False,
    log_origin: str | None = None,
    stage: Stage = lambda what, counter: nullcontext(),
) -> Merged:
    """Merge the bundles in ``files`` into one a tenant.

    ``output`` is the merged file, or a folder if there are several, if it is one already, or with ``is_folder``.
    Nothing is written unless every bundle may be merged. A file under its final name is whole. ``spark`` is a
    session with ``SETTINGS``, whose workers reach ``files`` under the same paths. ``log_origin`` is the origin of
    the merged logs without ``/`` and the tenant, by default derived from the inputs.

    Raises:
        MergeRefusedError: a bundle may not be merged.
        InvalidInputError: chains of an older link version collide, several tenants would go into one file, or the
            path of a file or folder is taken.
        SigningUnavailableError: the signer cannot be reached.
        OSError: a file cannot be written.
    """
    from pyspark import StorageLevel

    if log_origin is not None and not re.fullmatch(LOG_ORIGIN, log_origin):
        raise InvalidInputError(
            f"{log_origin!r} is no origin of a log: 1 to 300 visible characters, none of them a plus"
        )
    refuse_unless_a_folder_can_be(output)
    counter = spark.sparkContext.accumulator(0)
    # 1. Every bundle is verified wholly; its entries wait on the workers' disks.
    taken = take(spark, files, keyring, counter).persist(StorageLevel.DISK_ONLY)
    with stage("verifying", counter):
        bundles = _each_once(bundles_of(taken))
    if refused := [bundle.to_json() for bundle in bundles if bundle.refusal is not None]:
        raise MergeRefusedError(refused)
    tenants = _tenants(bundles)
    paths = _paths(output, sorted(tenants), files, is_folder=is_folder)
    refuse_unless_files_can_be(paths.values())
    with workplace(next(iter(paths.values())).parent) as work:
        # 2. The decision on each entry.
        partitions = partitions_of(
            sum(bundle.raw_bytes for bundle in bundles), int(spark.conf.get("spark.sql.shuffle.partitions") or 1)
        )
        once = taken.where(taken.file.isin([bundle.number for bundle in bundles]))
        placed = decided(once, partitions).persist(StorageLevel.DISK_ONLY)
        with stage("sorting", None):
            placed.count()
        # 3. One chain a tenant.
        origins = {tenant: log_origin or f"merge/{set_digest(digests)}" for tenant, digests in tenants.items()}
        linked = spark.sparkContext.accumulator(0)
        with stage("linking", linked):
            merged, found = link(placed, lambda tenant: work / (tenant + SUFFIX), origins, signers, linked.add)
        merged = _named(merged, paths)
    for frame in (placed, taken):
        frame.unpersist()
    return Merged(bundles, merged, found)


def _named(merged: Sequence[MergedBundle], paths: Mapping[str, Path]) -> list[MergedBundle]:
    """Rename the bundles to their final names, checked again for names taken since the first check."""
    refuse_unless_files_can_be(paths.values())
    for bundle in merged:
        bundle.file.replace(paths[bundle.tenant_id])
    return [bundle._replace(file=paths[bundle.tenant_id]) for bundle in merged]


def _each_once(bundles: Sequence[TakenBundle]) -> list[TakenBundle]:
    """Drop repeated names of the same file; keep all unreadable files."""
    known: dict[str, TakenBundle] = {}
    for bundle in bundles:
        known.setdefault(bundle.digest or bundle.file, bundle)
    return list(known.values())


def _tenants(bundles: Sequence[TakenBundle]) -> dict[str, list[str]]:
    """Digests of the bundles of each tenant."""
    tenants: dict[str, list[str]] = {}
    beginnings: dict[str, str] = {}
    for bundle in bundles:
        tenants.setdefault(bundle.tenant_id, []).append(bundle.digest)
        if (link := bundle.beginning) is not None and beginnings.setdefault(bundle.tenant_id, link) != link:
            raise InvalidInputError(
                f"{bundle.file} begins another chain of an older link version than the others of tenant "
                f"{bundle.tenant_id}, and a chain can only begin with one"
            )
    return tenants


def _paths(output: Path, tenants: Sequence[str], files: Sequence[str], *, is_folder: bool) -> dict[str, Path]:
    """The file of each tenant's bundle."""
    if is_folder and output.exists() and not output.is_dir():
        raise InvalidInputError(f"{output} is a file: name a folder")
    if len(tenants) > 1 and output.exists() and not output.is_dir():
        raise InvalidInputError(f"the bundles are of {len(tenants)} tenants, and {output} is a file: name a folder")
    is_folder = is_folder or len(tenants) > 1 or output.is_dir()
    paths = {tenant: output / (tenant + SUFFIX) if is_folder else output for tenant in tenants}
    inputs = {Path(file).resolve() for file in files}
    for path in paths.values():
        if path.resolve() in inputs:
            raise InvalidInputError(f"{path} is one of the bundles that are merged; let the merged one go elsewhere")
    return paths


def refuse_unless_a_folder_can_be(output: Path) -> None:
    """Check that no parent folder of ``output`` is a file.

    Raises:
        InvalidInputError: a parent is a file.
    """
    there = next(parent for parent in output.absolute().parents if os.path.lexists(parent))
    if not there.is_dir():
        raise InvalidInputError(f"{there} is no folder, so {output} cannot be made")


def refuse_unless_files_can_be(paths: Iterable[Path]) -> None:
    """Check that each path can be replaced by a file.

    Raises:
        InvalidInputError: a path cannot.
    """
    for path in paths:
        if path.exists() and not path.is_file():
            raise InvalidInputError(f"{path} is there already and no file: a bundle cannot take its name")


@contextmanager
def workplace(folder: Path) -> Iterator[Path]:
    """A folder for this run in ``folder``, which is created if missing; folders of dead runs are removed.

    Raises:
        OSError: ``folder`` cannot be written; the error names ``folder``, whatever file failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with own_folder(folder, PREFIX) as work:
            yield work
    except OSError as error:
        begin = str(folder / PREFIX)
        if str(error.filename or "").startswith(begin) or (error.filename is None and error.errno in _FULL):
            raise OSError(error.errno, error.strerror, str(folder)) from error
        raise
