"""``spark.read.format("tallystick")`` as a notebook has it: batches, and a stream."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import asyncpg
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import LongType, StringType, StructField, StructType

from ledger.errors import DatabaseWentBackError, LedgerError
from ledger.verification import ENTRY_COLUMNS, Head
from pipeline.java import error_line
from pipeline.places.protocol import Facts
from pipeline.source.data_source import LedgerReader, end_of, next_offset, register
from tests.app.bundles import bundle_of
from tests.app.chain_builder import insert
from tests.app.chains import until
from tests.app.test_tamper import copy_row
from tests.conftest import Database
from tests.ledger.ledger_in_memory import build

ACME = build(60)
BETA = build(40, tenant_id="beta", begin_ms=1_800_000_000_000)
ROWS_A_PIECE = "16"
WORKER_LATE = "Python worker failed to connect back"
KEYS = StructType([StructField("tenant_id", StringType()), StructField("seq", LongType())])


@pytest.fixture
def notebook(spark: SparkSession) -> SparkSession:
    """A session that knows the Data Source."""
    register(spark)
    return spark


@pytest.fixture
async def connection(superuser: asyncpg.Connection) -> asyncpg.Connection:
    """A connection to a database that holds two ledgers."""
    await superuser.execute("SET session_replication_role = replica")
    for ledger in (ACME, BETA):
        await insert(superuser, ledger)
    return superuser


def load(notebook: SparkSession, database: Database, columns: str | None = None, **options: str) -> DataFrame:
    reader = notebook.read.format("tallystick").option("dsn", database.service_url)
    for name, value in {"rows_a_piece": ROWS_A_PIECE, **options}.items():
        reader = reader.option(name, value)
    return reader.schema(columns).load() if columns else reader.load()


def keys(rows: list[Row]) -> list[tuple[str, int]]:
    return [(row["tenant_id"], row["seq"]) for row in rows]


def between(tenant_id: str, first: int, last: int) -> list[tuple[str, int]]:
    return [(tenant_id, seq) for seq in range(first, last + 1)]


async def backends(connection: asyncpg.Connection) -> int:
    """Connections of the service's login."""
    query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND usename = 'tallystick'"
    return await connection.fetchval(query)


# --- batches --------------------------------------------------------------------------------------


async def test_a_notebook_reads_a_ledger_in_three_lines(
    notebook: SparkSession,
    connection: asyncpg.Connection,
    database: Database,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ledger = load(notebook, database)
    assert ledger.columns == ["tenant_id", *ENTRY_COLUMNS]
    assert [tuple(row) for row in ledger.where("tenant_id = 'acme'").collect()] == [
        ("acme", *(row[name] for name in ENTRY_COLUMNS)) for row in ACME.entries
    ]
    assert ledger.rdd.getNumPartitions() == 7, "16 seqs a piece: 4 of acme and 3 of beta"
    password = database.service_url.split(":")[2].split("@")[0]
    ledger.explain("extended")
    shown = capsys.readouterr().out
    assert "tallystick" in shown
    assert password not in shown


async def test_one_load_used_with_a_filter_and_without_gives_all_its_rows_each_time(
    notebook: SparkSession, connection: asyncpg.Connection, database: Database
) -> None:
    """With pushFilters, Spark 4.3 reads in the second query what the first one wanted."""
    ledger = load(notebook, database, "tenant_id string, seq bigint")
    few = ledger.where("seq <= 5")
    assert few.count() == 10
    assert ledger.count() == 100
    assert few.union(ledger.where("seq <= 2")).count() == 14


@pytest.mark.parametrize(
    ("options", "expected", "partitions"),
    [
        ({"tenant": "beta"}, between("beta", 1, 40), 3),
        ({"tenant": "acme, beta", "from_seq": "38"}, [*between("acme", 38, 60), *between("beta", 38, 40)], 2),
        ({"tenant": "acme", "from_seq": "17", "to_seq": "18"}, [("acme", 17), ("acme", 18)], 1),
        ({"from_time": "2027-01-01T00:00:00Z"}, between("beta", 1, 40), 3),
        ({"to_time": "2024-01-11T00:00:00.001Z"}, [("acme", 1), ("acme", 2)], 1),
        ({"from_time": "2030-01-01T00:00:00+01:00"}, [], 0),
    ],
)
async def test_what_an_option_leaves_out_is_not_read(
    connection: asyncpg.Connection,
    database: Database,
    options: dict[str, str],
    expected: list[tuple[str, int]],
    partitions: int,
) -> None:
    options = {"dsn": database.service_url, "rows_a_piece": ROWS_A_PIECE, **options}
    reader = LedgerReader(options, KEYS)
    planned = reader.partitions()
    assert len(planned) == partitions
    assert read_by(reader, planned) == expected


def read_by(reader: LedgerReader, partitions: list[InputPartition]) -> list[tuple[str, int]]:
    batches = [batch for partition in pickle.loads(pickle.dumps(partitions)) for batch in reader.read(partition)]
    return [row for batch in batches for row in zip(*batch.to_pydict().values(), strict=True)]


async def test_a_load_stays_in_its_state_and_the_next_one_sees_what_came_since(
    notebook: SparkSession, connection: asyncpg.Connection, database: Database
) -> None:
    await connection.execute("INSERT INTO scheduler.chain_heads (tenant_id, head_seq) VALUES ('empty', 0)")
    ledger = load(notebook, database, "tenant_id string, seq bigint")
    assert ledger.count() == 100
    await until(lambda: no_backends(connection), "no connection is held")
    for seq in (61, 62):
        await copy_row(connection, 30, {"seq": str(seq), "hlc_node": f"'{seq}'", "prev_chain_link": f"'{seq}'"})
    await connection.execute("UPDATE scheduler.scheduler_log SET tenant_id = 'empty', seq = 1 WHERE seq = 62")
    await insert(connection, build(5, tenant_id="gamma"))
    assert ledger.count() == 100
    assert load(notebook, database, "tenant_id string, seq bigint").count() == 107


async def no_backends(connection: asyncpg.Connection) -> bool:
    return await backends(connection) == 0


def test_a_bundle_is_read_too_and_several_at_once(tmp_path: Path) -> None:
    paths = []
    for ledger in (ACME, BETA):
        paths.append(tmp_path / f"{ledger.tenant_id}.tar")
        paths[-1].write_bytes(bundle_of(ledger))
    options = {"bundle": ",".join(map(str, paths)), "tenant": "acme,beta", "from_seq": "39"}
    reader = LedgerReader(options, KEYS)
    assert read_by(reader, reader.partitions()) == [*between("acme", 39, 60), *between("beta", 39, 40)]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "by one of the options dsn, archive, bundle"),
        (
            {"dsn": "postgresql://tallystick:hidden@127.0.0.1:1/none"},
            "database postgresql://tallystick@127.0.0.1:1/none",
        ),
        ({"bundle": "/none.tar"}, "'/none.tar' is none"),
        ({"bundle": __file__}, "it is no bundle"),
        ({"bundle": __file__, "from_seq": "0"}, "option from_seq must be a number, at least 1"),
        ({"bundle": __file__, "from_seq": "٣"}, "option from_seq must be a number, at least 1"),
        ({"bundle": __file__, "from_sequence": "7"}, "no option 'from_sequence'; there are .* from_seq,"),
        ({"bundle": __file__, "to_time": "2026-01-01"}, "option to_time must be a time such as"),
    ],
)
def test_options_that_name_nothing_are_refused(options: dict[str, str], said: str) -> None:
    with pytest.raises(LedgerError, match=said) as raised:
        LedgerReader(options, KEYS).partitions()
    assert "hidden" not in str(raised.value)


def test_a_column_that_entries_lack_is_refused_in_one_line_by_spark_too(notebook: SparkSession) -> None:
    with pytest.raises(Exception, match="no column tenant") as raised:
        notebook.read.format("tallystick").option("bundle", __file__).schema("tenant string").load().count()
    assert error_line(raised.value)[0].startswith("an entry has no column tenant string: tenant_id string, seq bigint,")


# --- a stream -------------------------------------------------------------------------------------


def stream(
    notebook: SparkSession, database: Database, folder: Path, fail_at: int | None = None, **options: str
) -> list[list[tuple[str, int]]]:
    """Run the stream until nothing is left, keeping what it has done in ``folder``; the entries of each batch."""
    batches: list[list[tuple[str, int]]] = []
    reader = notebook.readStream.format("tallystick").option("dsn", database.service_url)
    source = reader.options(rows_a_piece=ROWS_A_PIECE, **options).schema("tenant_id string, seq bigint").load()
    writer = source.writeStream.option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True)

    def keep(frame: DataFrame, number: int) -> None:
        batches.append(keys(frame.collect()))
        if number == fail_at:
            raise RuntimeError("no room for the batch")

    while True:
        query = writer.foreachBatch(keep).start()
        try:
            query.awaitTermination()
        except StreamingQueryException as error:
            # Spark gives the process that plans batches ten seconds to start, which are few on a busy machine.
            if batches or WORKER_LATE not in str(error):
                raise
        else:
            return batches


async def test_a_stream_gives_each_entry_once_in_bounded_batches_across_restarts_and_new_tenants(
    notebook: SparkSession, connection: asyncpg.Connection, database: Database, tmp_path: Path
) -> None:
    with pytest.raises(Exception, match="no room for the batch"):
        stream(notebook, database, tmp_path, rows_a_batch="45", fail_at=1)
    # Batch 0 is done, batch 1 is not: it comes again, the same as it was planned.
    read = stream(notebook, database, tmp_path, rows_a_batch="45")
    assert [sorted(batch) for batch in read] == [
        [*between("acme", 23, 50), *between("beta", 24, 40)],
        between("acme", 51, 60),
    ]
    assert stream(notebook, database, tmp_path) == []
    await insert(connection, build(3, tenant_id="gamma"))
    assert stream(notebook, database, tmp_path) == [between("gamma", 1, 3)]
    await until(lambda: no_backends(connection), "no connection is held")


def test_a_stream_ends_where_nothing_more_will_come_between() -> None:
    assert end_of(Facts("acme", Head(60, "l", "h"), Head(60, "l", "h"), None)) == 60
    assert end_of(Facts("acme", Head(60, "l", "h"), Head(900, "l", "h"), None)) == 60, "a forged row"
    assert end_of(Facts("acme", Head(900, "l", "h"), Head(60, "l", "h"), None)) == 60, "a forged head"
    assert end_of(Facts("acme", Head("x", None, None), Head(60, "l", "h"), None)) == 60
    assert end_of(Facts("acme", Head(0, None, None), None, None)) == 0
    assert end_of(Facts("acme", None, None, None)) == 0


def test_tenants_share_a_batch_and_none_waits_for_anothers_backlog() -> None:
    ends = {"large": 1_000_000, "small": 5, "middle": 400}
    assert next_offset({}, ends, None) == ends
    assert next_offset({}, ends, 300) == {"small": 5, "large": 147, "middle": 148}
    assert next_offset({"small": 5}, ends, 10) == {"small": 5, "large": 5, "middle": 5}
    assert next_offset({}, ends, 1) == {"small": 1}
    assert next_offset(ends, ends, 10) == ends
    offset: dict[str, int] = {}
    while offset != ends:
        after = next_offset(offset, ends, 70_000)
        assert 0 < sum(after.values()) - sum(offset.values()) <= 70_000
        offset = json.loads(json.dumps(after))


def test_a_ledger_that_went_back_stops_the_stream() -> None:
    with pytest.raises(DatabaseWentBackError, match="tenant 'acme' ends at seq 50, and was read up to 60"):
        next_offset({"acme": 60}, {"acme": 50}, 10)
    with pytest.raises(DatabaseWentBackError, match="ends at seq 0"):
        next_offset({"acme": 60}, {}, None)
