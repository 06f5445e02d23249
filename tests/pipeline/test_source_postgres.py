"""Entries read from PostgreSQL in pieces are those that the service reads row by row, whatever somebody did to them."""

from __future__ import annotations

import pickle
import random
import re
from typing import Any

import pytest
from pyspark.sql import SparkSession

from app.store.chain_reader import consistent_reader
from ledger import canonical
from ledger.errors import ConfigurationError, DatabaseUnavailableError, LedgerError, TenantNotFoundError
from ledger.machines.exclusions import SUBJECT, Exclusions
from ledger.verification import ENTRY_COLUMNS
from pipeline.archiving.filing import Ledger
from pipeline.places import OpenPlace, Piece, Times, parse_place
from pipeline.places.postgres import Dsn
from pipeline.places.protocol import SEQ_MAX, SEQ_MIN
from pipeline.source import ROW_COLUMNS, entries, in_tasks, open_pieces
from tests.app.chain_builder import insert
from tests.app.test_tamper import CASES, LEDGER, OTHER, ZEROS, Connection, copy_row, drop_guards, update
from tests.conftest import Database
from tests.ledger.ledger_in_memory import build, origin_of

TABLES = ("scheduler_log", "batch_snapshot", "chain_heads", "merkle_head", "merkle_tile", "jobs")
ROWS_A_PIECE = 16
TENANTS = ("acme", "other")
TAMPERINGS = {
    "the first entry removed",
    "an entry doubled",
    "white space put into a payload",
    "an entry inserted",
    "entries swapped between tenants",
    "head removed",
    "everything cut but the head",
    "a snapshot's range edited",
    "a snapshot removed",
    "a tile removed",
    "a job invented",
}
"""Those of the cases of tampering that change which rows there are, or the text of one."""


@pytest.fixture
async def connection(superuser: Connection) -> Connection:
    """A superuser's connection to a database that holds two ledgers, triggers switched off."""
    await superuser.execute("SET session_replication_role = replica")
    await insert(superuser, LEDGER)
    await insert(superuser, OTHER)
    return superuser


async def restore(connection: Connection) -> None:
    for table in TABLES:
        await connection.execute(f"TRUNCATE scheduler.{table}")
    await insert(connection, LEDGER)
    await insert(connection, OTHER)


def plain(value: Any) -> Any:
    """What no column may hold is alike, however a driver gives it."""
    return value if value is None or type(value) in (int, str) else "a value of another type"


def rows_of(batches: Any) -> list[tuple[Any, ...]]:
    return [tuple(map(plain, row)) for batch in batches for row in zip(*batch.to_pydict().values(), strict=True)]


def in_pieces(opened: OpenPlace, tenant_id: str, rows_a_piece: int = ROWS_A_PIECE) -> dict[str, Any]:
    pieces = opened.pieces([tenant_id], rows_a_piece=rows_a_piece)
    facts = opened.facts(tenant_id)
    found: dict[str, Any] = {"head": facts.head, "last": facts.last, "tree": facts.tree, "entries": [], "snapshots": []}
    for piece, reader in open_pieces(pickle.loads(pickle.dumps(pieces))):
        found["entries"] += rows_of(reader.entries())
        found["snapshots"] += [row for row in rows_of(reader.snapshots()) if row not in found["snapshots"]]
        if piece.is_first:
            found["jobs"], found["tiles"] = rows_of(reader.jobs()), reader.tiles(0, 0, 9)
    return found


async def row_by_row(connection: Connection, tenant_id: str) -> dict[str, Any]:
    async def rows(batches: Any) -> list[tuple[Any, ...]]:
        return [tuple(map(plain, row)) async for batch in batches for row in batch]

    async with consistent_reader(connection, tenant_id) as reader:
        return {
            "head": await reader.head(),
            "last": await reader.last_entry(),
            "tree": await reader.tree(),
            "entries": await rows(reader.entries(None, None)),
            "snapshots": await rows(reader.snapshots(-(2**63), None)),
            # What searches are indexed by is for the service to verify: the last two columns.
            "jobs": [row[:-2] for row in await rows(reader.jobs())],
            "tiles": await reader.tiles(0, 0, 9),
        }


async def assert_read_alike(connection: Connection, database: Database, said: str) -> None:
    with parse_place(database.service_url).open() as opened:
        for tenant in TENANTS:
            read = in_pieces(opened, tenant)
            expected = await row_by_row(connection, tenant)
            seqs = [row[0] for row in read["entries"]]
            assert seqs == sorted(seqs), (said, tenant)
            # Each snapshot comes with the first piece that it touches.
            read["snapshots"].sort(key=repr)
            expected["snapshots"].sort(key=repr)
            for part in expected:
                assert read[part] == expected[part], (said, tenant, part)


async def test_rows_removed_doubled_and_moved_are_read_as_the_service_reads_them(
    connection: Connection, database: Database
) -> None:
    chosen = [case for case in CASES if case.name in TAMPERINGS]
    assert len(chosen) == len(TAMPERINGS)
    # The case that drops constraints comes last.
    for case in sorted(chosen, key=lambda case: case.name == "an entry doubled"):
        await case.edit(connection)
        await assert_read_alike(connection, database, case.name)
        await restore(connection)


async def test_rows_that_hold_what_no_constraint_allows_are_read_as_the_service_reads_them(
    connection: Connection, database: Database
) -> None:
    for table in ("scheduler_log", "batch_snapshot", "jobs"):
        await drop_guards(connection, table)
    draw = random.Random(4)
    odd = ["NULL", "''", "'é\n\t\\'''", "'{}'", "'null'", "'1:1:n'", f"'{ZEROS}'"]
    for _ in range(25):
        column = draw.choice([name for name in ENTRY_COLUMNS if name not in ("seq", "payload", "origin")])
        is_number = column in ("hlc_physical", "hlc_logical", "link_version")
        value = draw.choice(["NULL", "-1", "0", "32767"] if is_number else odd)
        seq = draw.choice([1, 16, 17, 32, 33, 60])
        await update("scheduler_log", f"{column} = {value}", f"seq = {seq}")(connection)
    for forged in ("NULL", "0", "-7", "61", str(SEQ_MAX), str(SEQ_MIN), "17", "17", "48", str(2**40)):
        await copy_row(connection, 30, {"seq": forged, "payload": "NULL"})
    for bounds in ("from_seq = NULL", "to_seq = NULL", "from_seq = 40, to_seq = 3", "from_seq = -5, to_seq = -5"):
        columns = "tenant_id, snapshot_hlc, from_chain_link, to_chain_link, entry_count, merkle_root, dsse_envelope"
        await connection.execute(
            f"INSERT INTO scheduler.batch_snapshot ({columns}, from_seq, to_seq) SELECT {columns}, from_seq, to_seq"
            " FROM scheduler.batch_snapshot WHERE tenant_id = 'other' AND from_seq = 21"
        )
        await update("batch_snapshot", bounds, "from_seq = 21 AND id > 4")(connection)
        await connection.execute(
            f"UPDATE scheduler.batch_snapshot SET {bounds} WHERE tenant_id = 'other' AND from_seq = 21 AND id > 4"
        )
    await assert_read_alike(connection, database, "odd rows")


ALTERED = {
    "hlc_logical text": "ALTER hlc_logical TYPE text",
    "hlc_physical numeric": "ALTER hlc_physical TYPE numeric",
    "link_version wider": "ALTER link_version TYPE bigint",
    "action shorter": "ALTER action TYPE varchar(40)",
    "payload reordered": "ALTER payload TYPE jsonb USING payload::jsonb",
    "payload bytes": "ALTER payload TYPE bytea USING convert_to(payload::text, 'UTF8')",
    "digest bytes": "ALTER payload_digest TYPE bytea USING decode(payload_digest, 'hex')",
    "action a domain": "ALTER action TYPE word",
    "hlc_logical a domain": "ALTER hlc_logical TYPE count",
    "links numbers": "ALTER chain_link TYPE bigint USING 7",
    "jobs arrays": "ALTER job_id TYPE text[] USING ARRAY[job_id]",
}


@pytest.mark.parametrize("change", ALTERED)
async def test_a_column_of_another_type_hides_no_row(connection: Connection, database: Database, change: str) -> None:
    await connection.execute("DROP VIEW scheduler.log_entries")
    await connection.execute(
        "CREATE DOMAIN letters AS text; CREATE DOMAIN word AS letters; CREATE DOMAIN count AS integer"
    )
    await connection.execute(f"ALTER TABLE scheduler.scheduler_log {ALTERED[change]}")
    await assert_read_alike(connection, database, change)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("ALTER TABLE scheduler.scheduler_log ALTER seq TYPE numeric", "column seq .* is of type numeric"),
        ("ALTER TABLE scheduler.jobs DROP COLUMN seqs", "column seqs of scheduler.jobs is missing"),
        ("DROP TABLE scheduler.merkle_tile", "no table scheduler.merkle_tile"),
        ("REVOKE SELECT ON scheduler.scheduler_log FROM tallystick_service", "permission denied.* may SELECT"),
    ],
)
async def test_tables_that_cannot_be_read_are_said_with_what_to_do(
    connection: Connection, database: Database, change: str, said: str
) -> None:
    await connection.execute("DROP VIEW scheduler.log_entries")
    await connection.execute(change)
    with pytest.raises(ConfigurationError, match=said), parse_place(database.service_url).open() as opened:
        opened.pieces()


async def test_borders_are_multiples_open_at_both_ends_and_a_forged_seq_costs_one_piece(
    connection: Connection, database: Database
) -> None:
    await connection.execute("ALTER TABLE scheduler.scheduler_log DROP CONSTRAINT scheduler_log_seq")
    for seq in (-30, 2**62):
        fields = {"t_hlc": f"'{seq}:0:n'", "hlc_physical": str(abs(seq)), "prev_chain_link": f"'{seq}'"}
        await copy_row(connection, 30, {"seq": str(seq), **fields})
    with parse_place(database.service_url).open() as opened:
        pieces = opened.pieces(["acme"], rows_a_piece=25)
        assert [(piece.from_seq, piece.to_seq, piece.is_first) for piece in pieces] == [
            (None, 25, True),
            (26, 50, False),
            (51, 2**62 // 25 * 25, False),
            (2**62 // 25 * 25 + 1, None, False),
        ]
        assert sum(piece.rows for piece in opened.pieces(["other"], rows_a_piece=25)) == 60
        bounded = opened.pieces(["other"], rows_a_piece=25, from_seq=30, to_seq=55)
        assert [(piece.from_seq, piece.to_seq) for piece in bounded] == [(30, 50), (51, 55)]
        read = [row[0] for _, reader in open_pieces(bounded) for row in rows_of(reader.entries(("seq",)))]
        assert read == list(range(30, 56))


async def test_every_tenant_is_found_that_has_a_head_or_only_rows_of_any_table(
    connection: Connection, database: Database
) -> None:
    await connection.execute("DELETE FROM scheduler.chain_heads WHERE tenant_id = 'acme'")
    await connection.execute("DELETE FROM scheduler.merkle_head")
    await connection.execute("INSERT INTO scheduler.chain_heads (tenant_id, head_seq) VALUES ('empty', 0)")
    await connection.execute("UPDATE scheduler.batch_snapshot SET tenant_id = 'Zoë''s' WHERE tenant_id = 'other'")
    for table in ("jobs", "merkle_tile"):
        await connection.execute(f"UPDATE scheduler.{table} SET tenant_id = '{table}' WHERE tenant_id = 'other'")
    with parse_place(database.service_url).open() as opened:
        assert opened.tenants() == ["Zoë's", "acme", "empty", "jobs", "merkle_tile", "other"]
        pieces = opened.pieces(rows_a_piece=1000)
        assert [(piece.tenant_id, piece.rows) for piece in pieces] == [
            ("Zoë's", 0),
            ("acme", 60),
            ("empty", 0),
            ("jobs", 0),
            ("merkle_tile", 0),
            ("other", 60),
        ]
        assert [len(rows_of(reader.snapshots())) for _, reader in open_pieces(pieces)] == [2, 2, 0, 0, 0, 0]
        with pytest.raises(TenantNotFoundError, match="no tenant 'nobody' in postgresql://tallystick@"):
            opened.pieces(["acme", "nobody"])


async def test_a_time_range_is_read_from_the_pieces_it_lies_in(connection: Connection, database: Database) -> None:
    times = Times(LEDGER.entry(21)["hlc_physical"], LEDGER.entry(30)["hlc_physical"])
    expected = [row["seq"] for row in LEDGER.entries if times.from_ms <= row["hlc_physical"] <= times.to_ms]
    with parse_place(database.service_url).open() as opened:
        pieces = opened.pieces(["acme"], rows_a_piece=ROWS_A_PIECE, times=times)
        read = [row[0] for _, reader in open_pieces(pieces) for row in rows_of(reader.entries(("seq",)))]
        assert read == expected
        assert [piece.from_seq for piece in pieces] == [17]
        assert opened.pieces(["acme"], times=Times(1, 2)) == []


async def test_all_pieces_show_one_state_while_the_ledger_goes_on(connection: Connection, database: Database) -> None:
    longer = build(80, snapshots_to=(20, 40))
    with parse_place(database.service_url).open() as opened:
        pieces = opened.pieces(["acme"], rows_a_piece=ROWS_A_PIECE)
        for table in TABLES:
            await connection.execute(f"DELETE FROM scheduler.{table} WHERE tenant_id = 'acme'")
        await insert(connection, longer)
        read = [row for _, reader in open_pieces(pieces) for row in rows_of(reader.entries())]
        assert read == [tuple(row[name] for name in ENTRY_COLUMNS) for row in LEDGER.entries]
        assert opened.facts("acme").head == LEDGER.head
    with parse_place(database.service_url).open() as opened:
        assert opened.facts("acme").head == longer.head


async def test_a_snapshot_that_is_gone_is_said_with_what_to_do(connection: Connection, database: Database) -> None:
    with parse_place(database.service_url).open() as opened:
        pieces = opened.pieces(["acme"])
    with pytest.raises(
        DatabaseUnavailableError, match=r"snapshot of postgresql://tallystick@\S+ .* load the DataFrame again"
    ):
        list(open_pieces(pieces))


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        (("/test_", "/nothing_"), ConfigurationError, "does not exist.*name a database"),
        (("postgresql://tallystick:", "postgresql://tallystick:wrong"), ConfigurationError, "authentication failed"),
        (("127.0.0.1:", "127.0.0.2:"), DatabaseUnavailableError, "does not answer"),
    ],
)
def test_a_database_that_cannot_be_opened_is_said_without_its_password(
    database: Database, change: tuple[str, str], kind: type[Exception], said: str
) -> None:
    url = database.service_url.replace(*change)
    for opened in (parse_place(url).open(), Ledger.connected(url)):
        with pytest.raises(kind, match=said) as raised, opened:  # type: ignore[attr-defined]
            pass
        assert url.split(":")[2].split("@")[0] not in str(raised.value)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:s3cr%ZZpw@127.0.0.1:1/x",
        "postgresql://u:s3cr/etpw@127.0.0.1:1/x",
        "postgresql://u:s3cr?etpw@127.0.0.1:1/x",
        "postgresql://u:s3cr[etpw@127.0.0.1:1/x",
        "postgresql://u@127.0.0.1:1/x?password=s3cr%ZZetpw",
        "mysql://u:s3cretpw@h/x",
        "u:s3cr%ZZpw@h",
        "host=h password=s3cretpw",
    ],
)
def test_no_url_that_is_not_understood_is_said_with_its_password(url: str) -> None:
    with pytest.raises((ConfigurationError, DatabaseUnavailableError)) as raised, parse_place(url).open():
        pass
    assert "s3cr" not in str(raised.value)
    assert "etpw" not in str(raised.value)
    with pytest.raises((ConfigurationError, DatabaseUnavailableError)) as raised, Ledger.connected(url):
        pass
    assert "s3cr" not in str(raised.value)
    assert "etpw" not in str(raised.value)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql+asyncpg://reader:SECRETpw@127.0.0.1:1/ledger",
        "postgresql://reader:SEC/RETpw@127.0.0.1:1/ledger",
        "postgresql://reader:SEC#RETpw@127.0.0.1:1/ledger",
        "postgresql://reader:SEC?RETpw@127.0.0.1:1/ledger",
        "postgresql://reader:SEC@RETpw@127.0.0.1:1/ledger",
        "postgresql://reader:SEC%zzRETpw@127.0.0.1:1/ledger",
        "postgresql://reader:SEC[RETpw@127.0.0.1:1/ledger",
        "postgresql://127.0.0.1:1/ledger?user=reader&password=SECRETpw",
    ],
)
def test_however_a_password_is_written_none_of_it_is_shown(url: str) -> None:
    with pytest.raises(LedgerError) as raised, parse_place(url).open():
        pass
    assert ("127.0.0.1" in str(raised.value)) == url.startswith("postgresql://"), "another scheme is not looked into"
    assert "SEC" not in str(raised.value)
    assert "RET" not in str(raised.value)
    assert not re.search("SEC|RET", repr(Dsn(url)))


async def test_no_password_is_in_what_pieces_and_places_print(connection: Connection, database: Database) -> None:
    place = parse_place(database.service_url)
    password = database.service_url.split(":")[2].split("@")[0]
    with place.open() as opened:
        printed = repr((place, str(place), opened.pieces()))
    assert password not in printed
    assert "postgresql://tallystick@127.0.0.1" in printed


async def test_all_entries_are_a_data_frame(spark: SparkSession, connection: Connection, database: Database) -> None:
    await drop_guards(connection, "scheduler_log")
    await update("scheduler_log", "hlc_logical = NULL, payload = NULL", "seq = 30")(connection)
    await connection.execute("DROP VIEW scheduler.log_entries")
    await connection.execute("ALTER TABLE scheduler.scheduler_log ALTER hlc_physical TYPE text")
    with parse_place(database.service_url).open() as opened:
        frame = entries(spark, opened, rows_a_piece=ROWS_A_PIECE)
        assert frame.columns == list(ROW_COLUMNS)
        read = [row for part in frame.rdd.glom().collect() for row in part]
        assert entries(spark, opened, tenants=[]).count() == 0
    expected = [row async for row in expected_rows(connection)]
    assert [tuple(row) for row in read] == expected


async def expected_rows(connection: Connection) -> Any:
    for tenant in TENANTS:
        for row in (await row_by_row(connection, tenant))["entries"]:
            values = dict(zip(ENTRY_COLUMNS, row, strict=True))
            yield (tenant, *({**values, "hlc_physical": None}.values()))


async def test_what_a_tenant_excludes_is_read_as_the_service_reads_it(
    connection: Connection, database: Database
) -> None:
    """A row of the job table counts from the newest statement on."""
    excluding = build(8, tenant_id="excluding")
    for seq, by in ((9, None), (10, origin_of(7).replace("log.example/acme", "good.example/excluding"))):
        log = "bad.example/excluding" if by is None else "other.example/excluding"
        payload = canonical.encode({"type": "LOG_EXCLUDED", "log": log, "reason": "it lies"}).decode()
        moment = {"t_hlc": f"{seq}:0:node-1", "hlc_physical": seq, "hlc_logical": 0, "hlc_node": "node-1"}
        about = {"job_id": SUBJECT, "action": "LOG_EXCLUDED", "payload": payload, "origin": by}
        excluding.entries.append({**excluding.entries[0], "seq": seq, **moment, **about})
    excluding.relink()
    excluding.store_head()
    await insert(connection, excluding)
    await connection.execute("INSERT INTO scheduler.ledger_identity (log_origin) VALUES ('ours.example')")

    def read() -> tuple[Exclusions, int, int]:
        with parse_place(database.service_url).open() as opened:
            (piece,) = opened.pieces(["excluding"])
            reader = opened.reader(piece)
            return reader.exclusions(), reader.jobs_seq(), len(rows_of(reader.jobs()))

    async with consistent_reader(connection, "excluding") as of_service:
        expected = await of_service.exclusions()
    assert expected.logs == {"bad.example/excluding", "other.example/excluding"}
    assert (expected.own_log, expected.seq) == ("ours.example/excluding", 10)
    assert read() == (expected, 10, len(excluding.jobs))
    await connection.execute("UPDATE scheduler.follower_positions SET seq = 9 WHERE tenant_id = 'excluding'")
    assert read() == (expected, 0, 0)
    assert (await row_by_row(connection, "excluding"))["jobs"] == []


def numbered(rows: int) -> Piece:
    return Piece("acme", None, None, rows, True, None)


def test_small_pieces_share_a_task() -> None:
    groups = in_tasks([numbered(rows) for rows in (100, 10, 80, 30, 200, 0, 0)], rows_a_task=100)
    assert [[piece.rows for piece in group] for group in groups] == [[100], [10, 80], [30], [200], [0, 0]]
    assert max(map(len, in_tasks(numbered(0) for _ in range(1000)))) == 256
