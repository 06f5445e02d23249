"""The folder a report is written to, and how tables get in and out of it.

Layout::

    report.html     report.json     csv/NAME.csv     parquet/NAME/part-*.parquet

Everything is written to a temporary folder beside it and renamed at the end, so a killed run leaves no partial
report. ``jobs`` can be as long as the ledger, so it is only Parquet; CSV holds the lists made from it.
"""

from __future__ import annotations

import csv
import os
import re
import shutil
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow.dataset as ds

from ledger.errors import ConfigurationError
from pipeline.places.protocol import CHAIN_SEPARATOR, ChainName

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

PARQUET_ONLY: Final = frozenset(("jobs",))
ROWS_AT_ONCE: Final = 4096
_URL: Final = re.compile(r"[a-z][a-z0-9+.-]*:/", re.IGNORECASE)
_FORMULA_BEGINS: Final = ("=", "+", "-", "@", "\t", "\r", "\n")

Row = dict[str, Any]


@contextmanager
def replaced(folder: Path) -> Iterator[Path]:
    """A new folder beside ``folder`` to write into, renamed to ``folder`` on success.

    An older report is replaced; a folder that holds anything else is not touched.

    Raises:
        ConfigurationError: ``folder`` holds something else, or cannot be written.
    """
    refuse_unfit(folder)
    folder = Path(os.path.realpath(folder))  # The target of a link is replaced, not the link.
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    fresh.mkdir()
    try:
        yield fresh
        old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
        if folder.exists():
            folder.rename(old)
        fresh.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def refuse_unfit(folder: Path) -> None:
    """Return if a report can be written to ``folder``: it is missing, empty, or a report.

    Raises:
        ConfigurationError: it cannot.
    """
    if _URL.match(str(folder)):
        raise ConfigurationError(f"--dest {folder}: a report goes to a folder of this machine")
    folder = Path(os.path.realpath(folder))
    if os.path.ismount(folder):
        raise ConfigurationError(f"--dest {folder} is where a file system begins: name a folder in it")
    above = next(parent for parent in folder.parents if os.path.lexists(parent))
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise ConfigurationError(f"--dest {folder}: {above} is no folder that can be written to")
    is_report = all((folder / name).is_file() for name in ("report.json", "report.html"))
    if folder.exists() and not (folder.is_dir() and (is_report or not any(folder.iterdir()))):
        raise ConfigurationError(f"--dest {folder} holds something that is no report: name another folder")


def in_order(rows: DataFrame, *keys: Column | str) -> DataFrame:
    """``rows`` sorted by one task, in one partition. Sorting by several tasks would compute them twice, once to find
    the bounds."""
    return rows.repartition(1).sortWithinPartitions(*keys)


def write_table(rows: DataFrame, folder: Path, name: str) -> None:
    """Write ``rows`` as Parquet; all tables but the jobs are one sorted partition, so they are stored in order.

    A table with ``tenant_id``, which names chains, has ``ledger`` as its last column, null if one ledger was read.
    """
    if "tenant_id" in rows.columns:
        rows = by_ledger(rows)
    target = folder / "parquet" / name  # Hadoop takes a path literally, without escapes.
    parts = rows if name in PARQUET_ONLY else rows.coalesce(1)
    parts.write.option("mapreduce.fileoutputcommitter.marksuccessfuljobs", "false").parquet(f"file://{target}")
    for checksum in target.glob(".*.crc"):
        checksum.unlink()


def by_ledger(rows: DataFrame) -> DataFrame:
    """``rows`` with the names of chains in ``tenant_id`` as ``tenant_id`` and ``ledger``."""
    from pyspark.sql import functions as F  # noqa: N812

    parts = F.split("tenant_id", CHAIN_SEPARATOR, 2)
    is_named = F.size(parts) > 1
    tenant = F.when(is_named, F.nullif(parts[1], F.lit(""))).otherwise(F.col("tenant_id"))
    return rows.withColumns({"tenant_id": tenant, "ledger": F.when(is_named, parts[0])})


def table(folder: Path, name: str) -> ds.Dataset:
    """The table ``name`` of the report in ``folder``."""
    return ds.dataset(folder / "parquet" / name, format="parquet")


def rows_of(folder: Path, name: str, limit: int | None = None) -> list[Row]:
    """The first ``limit`` rows of a table, or all."""
    data = table(folder, name)
    found: list[Row] = (data.to_table() if limit is None else data.head(limit)).to_pylist()
    return found


def named_rows_of(folder: Path, name: str, limit: int | None = None) -> list[Row]:
    """As ``rows_of``, with the name of the chain, as it is shown, in ``tenant_id``."""
    return [with_chain(row) for row in rows_of(folder, name, limit)]


def with_chain(row: Row) -> Row:
    """``row`` with the name of the chain, as it is shown, in ``tenant_id``."""
    if row.get("ledger") is None:
        return row
    return {**row, "tenant_id": ChainName.of(row).shown}


def write_csv(folder: Path, name: str) -> None:
    """Write the table ``name`` as CSV (RFC 4180, UTF-8), row by row."""
    data = table(folder, name)
    (folder / "csv").mkdir(exist_ok=True)
    with (folder / "csv" / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\r\n")
        writer.writerow(data.schema.names)
        for batch in data.to_batches(batch_size=ROWS_AT_ONCE):
            writer.writerows([_cell(value) for value in row.values()] for row in batch.to_pylist())


def _cell(value: object) -> str:
    """A value that is safe in a spreadsheet: text that looks like a formula gets a leading apostrophe."""
    if value is None:
        return ""
    if isinstance(value, datetime):
        return rfc3339(value)
    if not isinstance(value, str):
        return str(value)
    text = visible(value)
    begins = unicodedata.normalize("NFKC", text.lstrip()[:1])
    return f"'{text}" if begins.startswith(_FORMULA_BEGINS) or text.startswith(_FORMULA_BEGINS) else text


def visible(text: str) -> str:
    """``text`` with invisible characters, such as controls and direction changes, as escapes."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else f"\\u{{{ord(each):x}}}" for each in text)


def cut(text: str, characters_max: int) -> str:
    """``text`` for display: cut, without characters that could reverse or hide its surroundings."""
    shown = visible(text)
    return shown if len(shown) <= characters_max else f"{shown[: characters_max - 1]}…"


def rfc3339(moment: datetime) -> str:
    """A moment of the ledger's clock in RFC 3339."""
    moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
