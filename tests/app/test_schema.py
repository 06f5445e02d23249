"""The migrated schema: that it is the one written down, and that nobody but a superuser can change what is chained."""

from __future__ import annotations

import asyncio
import fnmatch
import hashlib
import itertools
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final

import asyncpg
import orjson
import pytest

from app.dev.cluster import OWNER, SERVICE, SERVICE_GROUP
from app.store.migrate import migrate
from app.store.schema import MIGRATIONS, SCHEMA, catalog, check_schema
from tests.app.old_schemas import began, ran, stamped
from tests.conftest import Database, connected_to

LOG_COLUMNS = (
    *("tenant_id", "seq", "t_hlc", "hlc_physical", "hlc_logical", "hlc_node", "job_id", "action"),
    *("link_version", "prev_chain_link", "chain_link", "payload_digest", "payload"),
)
LOG_PARTITIONS = 8
LOG_TABLES = ("scheduler_log", *(f"scheduler_log_p{number}" for number in range(LOG_PARTITIONS)))
APPEND_ONLY = (
    *(*LOG_TABLES, "batch_snapshot"),
    *("checkpoint_cosignature", "checkpoint_timestamp"),
)
COSIGNATURES = "checkpoint_cosignature"
CHANGES = ("UPDATE scheduler.{} SET tenant_id = tenant_id", "DELETE FROM scheduler.{}", "TRUNCATE scheduler.{}")
PAGE = MIGRATIONS.parent / "docs" / "formats" / "database.md"
TENANTS = [f"tenant-{number}" for number in range(64)]
"""Enough for every partition of the log to have a row."""


@pytest.fixture
async def owner(database: Database) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(database.owner_url)
    yield connection
    await connection.close()


@pytest.fixture
async def service(database: Database) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(database.service_url)
    yield connection
    await connection.close()


def link(seq: int) -> str:
    return hashlib.sha256(str(seq).encode()).hexdigest()


def entry(tenant_id: str, seq: int, /, **changed: object) -> dict[str, object]:
    """Columns of a row that fits behind the entry of ``seq - 1``."""
    row: dict[str, object] = {
        "tenant_id": tenant_id,
        "seq": seq,
        "t_hlc": f"1700000000000:{seq}:node",
        "hlc_physical": 1700000000000,
        "hlc_logical": seq,
        "hlc_node": "node",
        "job_id": "job",
        "action": "ENQUEUE",
        "link_version": 2,
        "prev_chain_link": None if seq == 1 else link(seq - 1),
        "chain_link": link(seq),
        "payload_digest": link(-seq),
        "payload": "{}",
    }
    return row | changed


async def insert(connection: asyncpg.Connection, *entries: dict[str, object]) -> None:
    columns = (*LOG_COLUMNS, *(("origin",) if any("origin" in row for row in entries) else ()))
    await connection.copy_records_to_table(
        "scheduler_log",
        schema_name=SCHEMA,
        columns=columns,
        records=[tuple(row.get(column) for column in columns) for row in entries],
    )


async def insert_snapshot(connection: asyncpg.Connection, from_seq: int = 1, to_seq: int = 1) -> None:
    await connection.execute(
        """
        INSERT INTO scheduler.batch_snapshot (tenant_id, from_seq, to_seq, snapshot_hlc, from_chain_link,
               to_chain_link, entry_count, merkle_root, dsse_envelope)
        VALUES ('acme', $1, $2, '1:0:node', 'aa', 'bb', 1, 'cc', '{}')
        """,
        from_seq,
        to_seq,
    )


async def insert_anchors(connection: asyncpg.Connection) -> None:
    for table, whose, when, more in (
        ("checkpoint_cosignature", "witness", "cosigned_at", ""),
        ("checkpoint_timestamp", "authority", "generated_at", ", response"),
    ):
        await connection.execute(
            f"INSERT INTO scheduler.{table} (tenant_id, tree_size, note, {whose}, {when}{more})"
            f" VALUES ('acme', 1, 'a note', 'somebody', now(){more and ', decode($$00$$, $$hex$$)'})"
        )


# The schema


async def test_the_schema_that_is_written_down_is_the_one_that_the_migrations_make(
    superuser: asyncpg.Connection, tmp_path: Path
) -> None:
    made = tmp_path / "schema.txt"
    made.write_text("".join(f"{fact}\n" for fact in await catalog(superuser)))
    written = MIGRATIONS / "schema.txt"
    assert made.read_text() == written.read_text(), f"another migration? cp {made} {written}"


def first_cells(page: str, heading: str) -> Iterator[str]:
    """The first cell of each row of the table below a heading."""
    _, _, rest = page.partition(f"\n## {heading}\n")
    section, _, _ = rest.partition("\n## ")
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return (row.split("|")[1] for row in rows[2:])


def test_the_page_names_every_table_and_every_index_and_no_others() -> None:
    page = PAGE.read_text()
    facts = [line.split(maxsplit=3) for line in (MIGRATIONS / "schema.txt").read_text().splitlines()]
    tables = {relation for relation, kind, *_ in facts if kind == "column"}
    primary = {name for _, kind, name, what in facts if kind == "constraint" and what.startswith("PRIMARY KEY")}
    unique = {name for _, kind, name, what in facts if kind == "constraint" and what.startswith("UNIQUE")}
    indexes = unique | {name for _, kind, name, _ in facts if kind in ("index", "unique")}

    assert {name for cell in first_cells(page, "Tables") for name in re.findall(r"`(\w+)`", cell)} == tables
    without_columns = (re.sub(r"\(.*?\)", "", cell) for cell in first_cells(page, "Indexes"))
    patterns = {name for cell in without_columns for name in re.findall(r"`([\w*]+)`", cell)}
    named = {pattern: {*fnmatch.filter(indexes | primary, pattern)} for pattern in patterns}
    assert not [pattern for pattern, found in named.items() if not found]
    assert not indexes.difference(*named.values())


async def test_the_catalog_is_told_alike_whoever_asks_and_wherever_he_looks_for_names(
    service: asyncpg.Connection, owner: asyncpg.Connection
) -> None:
    told = await catalog(service)
    await owner.execute("SET search_path = scheduler, public")
    assert await catalog(owner) == told


async def test_the_catalog_is_told_while_others_keep_every_table_locked(
    service: asyncpg.Connection, owner: asyncpg.Connection
) -> None:
    told = await catalog(service)
    tables = {fact.split()[0] for fact in told if fact.split()[1] == "column"}
    async with owner.transaction():
        for table in sorted(tables):
            await owner.execute(f"LOCK TABLE scheduler.{table} IN ACCESS EXCLUSIVE MODE")
        await service.execute("SET lock_timeout = '1s'")
        assert await catalog(service) == told


async def test_the_log_has_all_its_hash_partitions(superuser: asyncpg.Connection) -> None:
    partitions = await superuser.fetch(
        "SELECT inhrelid::regclass::text, pg_get_expr(relpartbound, inhrelid) FROM pg_inherits"
        " JOIN pg_class ON oid = inhrelid WHERE inhparent = 'scheduler.scheduler_log'::regclass ORDER BY 1"
    )
    assert [tuple(partition) for partition in partitions] == [
        (f"scheduler.scheduler_log_p{number}", f"FOR VALUES WITH (modulus {LOG_PARTITIONS}, remainder {number})")
        for number in range(LOG_PARTITIONS)
    ]


async def test_text_that_is_compared_or_hashed_sorts_bytewise(superuser: asyncpg.Connection) -> None:
    others = await superuser.fetchval(
        """
        SELECT array_agg(c.relname || '.' || a.attname ORDER BY 1)
          FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
         WHERE c.relnamespace = 'scheduler'::regnamespace AND c.relkind IN ('r', 'p', 'v')
           AND a.atttypid = 'text'::regtype AND a.attcollation <> '"C"'::regcollation
        """
    )
    assert set(others) == {
        "ledger_identity.log_origin",
        "merkle_head.checkpoint",
        "signing_keys.algorithm",
        "signing_keys.public_key_pem",
        "signing_keys.revocation_reason",
    }


async def test_tiles_are_stored_without_trying_to_compress_them(superuser: asyncpg.Connection) -> None:
    storage = await superuser.fetchval(
        "SELECT attstorage FROM pg_attribute WHERE attrelid = 'scheduler.merkle_tile'::regclass AND attname = 'hashes'"
    )
    assert storage == b"e"


FORK_GUARD = "scheduler_log_prev_chain_link"
HASHES = "hashtextextended(prev_chain_link, '0'), hashtextextended(prev_chain_link, '-1')"
OTHER_GUARDS = (
    ("INDEX", f"tenant_id, {HASHES}", ""),
    ("UNIQUE INDEX", f"tenant_id, {HASHES}", ""),
    *(
        ("UNIQUE INDEX", f"tenant_id, {columns}", "NULLS NOT DISTINCT")
        for columns in (
            "prev_chain_link",
            "left(prev_chain_link, 8)",
            "(prev_chain_link::name)",
            "(left(prev_chain_link, 32)::uuid)",
            "(prev_chain_link || 'x'), (prev_chain_link = chain_link)",
            f"{HASHES}, seq",
            HASHES.replace("-1", "0"),
            HASHES.replace("-1", "1"),
            HASHES.replace("prev_chain_link", "chain_link"),
            HASHES.replace("prev_chain_link", "left(prev_chain_link, 4)"),
            HASHES.replace("prev_chain_link", "left(prev_chain_link, 5)"),
            HASHES.replace("hashtextextended", "hashbpcharextended"),
        )
    ),
)


async def test_the_guard_against_forks_is_told_from_every_other_index_of_its_name(owner: asyncpg.Connection) -> None:
    async def told() -> str:
        return next(fact for fact in await catalog(owner) if f" {FORK_GUARD} " in fact)

    facts = {await told()}
    for kind, columns, nulls in OTHER_GUARDS:
        await owner.execute(f"DROP INDEX scheduler.{FORK_GUARD}")
        await owner.execute(f"CREATE {kind} {FORK_GUARD} ON scheduler.scheduler_log ({columns}) {nulls}")
        facts.add(await told())
    assert len(facts) == 1 + len(OTHER_GUARDS)


# Rows


async def test_a_tenant_has_one_first_entry(service: asyncpg.Connection) -> None:
    await insert(service, entry("acme", 1), entry("other", 1))
    with pytest.raises(asyncpg.UniqueViolationError, match="prev_chain_link"):
        await insert(service, entry("acme", 2, prev_chain_link=None))


@pytest.mark.parametrize(
    "changed",
    [
        {"seq": 1},
        {"prev_chain_link": link(1)},
        {"hlc_physical": 1_700_000_000_000, "hlc_logical": 1, "hlc_node": "node"},
    ],
    ids=["seq", "previous link", "HLC"],
)
async def test_what_must_be_unique_in_a_chain_is(service: asyncpg.Connection, changed: dict[str, object]) -> None:
    await insert(service, entry("acme", 1), entry("acme", 2))
    await insert(service, entry("other", 3, **changed))
    with pytest.raises(asyncpg.UniqueViolationError):
        await insert(service, entry("acme", 3, **changed))


async def test_a_previous_link_of_no_form_is_stored_once_too(service: asyncpg.Connection) -> None:
    texts = ["", "0", "short", "\\", "\\x0", "é" * 64, link(1).upper(), link(1)[:32], link(1) + "0"]
    await insert(service, *(entry("acme", seq, prev_chain_link=text) for seq, text in enumerate(texts, start=2)))
    for text in texts:
        with pytest.raises(asyncpg.UniqueViolationError, match="prev_chain_link"):
            await insert(service, entry("acme", 100, prev_chain_link=text))


async def test_a_ledger_of_before_is_migrated_with_what_somebody_edited_in_it(empty_database: Database) -> None:
    await began(empty_database)
    await ran(empty_database, 1, 8)
    async with connected_to(empty_database.service_url) as connection:
        edited = entry("acme", 3, prev_chain_link="edited", chain_link="too")
        await insert(connection, *(entry(tenant_id, 1) for tenant_id in TENANTS), entry("acme", 1), edited)
        before = await connection.fetch("SELECT * FROM scheduler.scheduler_log ORDER BY tenant_id, seq")
        await ran(empty_database, 9, 10)
        async with connected_to(empty_database.owner_url) as owner:
            await stamped(owner, "0010")
        await asyncio.to_thread(migrate, empty_database.owner_url)
        await check_schema(connection)
        assert await connection.fetch("SELECT * FROM scheduler.scheduler_log ORDER BY tenant_id, seq") == before
        for forked in (entry("acme", 2, prev_chain_link=None), entry("acme", 2, prev_chain_link="edited")):
            with pytest.raises(asyncpg.UniqueViolationError, match="prev_chain_link"):
                await insert(connection, forked)
        await insert(connection, entry("acme", 2))


async def test_chains_that_say_who_created_jobs_are_followed_again_where_jobs_get_a_creator(
    empty_database: Database,
) -> None:
    await began(empty_database)
    await ran(empty_database, 1, 9)
    async with connected_to(empty_database.service_url) as connection:
        payloads = {"said": '{"actor":"ci"}', "sealed": '{"actor":{"$private":{}}}', "unsaid": '{"spec":"actor"}'}
        await insert(connection, *(entry(tenant_id, 1, payload=text) for tenant_id, text in payloads.items()))
        await connection.executemany(
            "INSERT INTO scheduler.follower_positions VALUES ('jobs', $1, 1)", [(each,) for each in payloads]
        )
        await ran(empty_database, 10, 10)
        left = await connection.fetch("SELECT tenant_id FROM scheduler.follower_positions")
        assert [row["tenant_id"] for row in left] == ["unsaid"]


async def test_a_snapshot_begins_where_no_other_does(service: asyncpg.Connection) -> None:
    await insert_snapshot(service)
    with pytest.raises(asyncpg.UniqueViolationError):
        await insert_snapshot(service, to_seq=2)
    with pytest.raises(asyncpg.CheckViolationError):
        await insert_snapshot(service, from_seq=3, to_seq=2)


async def test_a_head_has_a_link_exactly_when_it_has_entries(service: asyncpg.Connection) -> None:
    add = "INSERT INTO scheduler.chain_heads (tenant_id, head_seq, head_chain_link, head_hlc) VALUES ($1, $2, $3, $4)"
    await service.execute(add, "acme", 0, None, None)
    await service.execute(add, "other", 1, "aa", "1:0:node")
    with pytest.raises(asyncpg.CheckViolationError):
        await service.execute(add, "third", 0, "aa", "1:0:node")
    with pytest.raises(asyncpg.CheckViolationError):
        await service.execute(add, "third", 1, None, None)


async def test_the_log_keeps_the_bytes_of_a_payload_and_the_view_reads_them(
    service: asyncpg.Connection,
) -> None:
    payload = '{"b": 1,  "a":{"deep":"yes"}, "a2":1e5}'
    await insert(service, entry("acme", 1, payload=payload))
    assert await service.fetchval("SELECT payload::text FROM scheduler.scheduler_log") == payload
    assert await service.fetchval("SELECT payload -> 'a' ->> 'deep' FROM scheduler.log_entries") == "yes"
    assert await service.fetchval("SELECT pg_typeof(payload)::text FROM scheduler.log_entries") == "jsonb"


async def test_the_view_has_every_column_of_the_log(superuser: asyncpg.Connection) -> None:
    columns = """
        SELECT array_agg(attname::text ORDER BY attnum) FROM pg_attribute
         WHERE attrelid = $1::text::regclass AND attnum > 0
    """
    assert await superuser.fetchval(columns, "scheduler.log_entries") == await superuser.fetchval(
        columns, "scheduler.scheduler_log"
    )


# Append only


async def test_the_service_may_not_change_what_is_chained(service: asyncpg.Connection) -> None:
    for table, change in itertools.product(APPEND_ONLY, CHANGES):
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await service.execute(change.format(table))


@pytest.mark.parametrize("change", CHANGES)
async def test_triggers_keep_even_the_owner_from_changing_what_is_chained(
    owner: asyncpg.Connection, service: asyncpg.Connection, change: str
) -> None:
    await insert(service, *(entry(tenant_id, 1) for tenant_id in TENANTS))
    await insert_snapshot(service)
    await insert_anchors(service)
    for table in APPEND_ONLY:
        assert await owner.fetchval(f"SELECT count(*) FROM scheduler.{table}") > 0
        with pytest.raises(asyncpg.RestrictViolationError, match="append only"):
            await owner.execute(change.format(table))
    assert await owner.fetchval("SELECT count(*) FROM scheduler.scheduler_log") == len(TENANTS)


ADD_COSIGNATURE = (
    "INSERT INTO scheduler.checkpoint_cosignature (tenant_id, witness, tree_size, cosigned_at, note, created_at)"
    " VALUES ('acme', $1, $2, now(), 'a note', now() - $3 * interval '1 second')"
)


async def test_of_the_cosignatures_of_a_witness_in_one_minute_the_last_is_kept(
    service: asyncpg.Connection, owner: asyncpg.Connection
) -> None:
    async with service.transaction():
        await service.executemany(ADD_COSIGNATURE, [("one", size, 0) for size in (1, 2, 5)] + [("two", 3, 0)])
        kept = await service.fetch("SELECT witness, tree_size FROM scheduler.checkpoint_cosignature ORDER BY 1")
        assert [tuple(row) for row in kept] == [("one", 5), ("two", 3)]
        # A smaller tree, handed in late, removes nothing.
        await service.execute(ADD_COSIGNATURE, "one", 4, 0)
        assert await service.fetchval("SELECT count(*) FROM scheduler.checkpoint_cosignature") == 3
    for whose in (service, owner):
        with pytest.raises((asyncpg.RestrictViolationError, asyncpg.InsufficientPrivilegeError)):
            await whose.execute("DELETE FROM scheduler.checkpoint_cosignature WHERE tree_size = 5")


async def test_a_cosignature_of_an_earlier_minute_is_removed_by_nobody_and_nothing(
    service: asyncpg.Connection, owner: asyncpg.Connection
) -> None:
    for size, ago_s in ((1, 3600), (2, 61), (2**62, 0)):
        await service.execute(ADD_COSIGNATURE, "one", size, ago_s)
    assert await service.fetchval("SELECT count(*) FROM scheduler.checkpoint_cosignature") == 3
    with pytest.raises(asyncpg.RestrictViolationError, match="append only"):
        await owner.execute("DELETE FROM scheduler.checkpoint_cosignature WHERE tree_size = 2")
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await service.execute("DELETE FROM scheduler.checkpoint_cosignature WHERE tree_size = 2")


async def test_every_append_only_table_has_both_triggers_and_they_are_on(superuser: asyncpg.Connection) -> None:
    triggers = await superuser.fetch(
        """
        SELECT c.relname, t.tgname, t.tgenabled, pg_get_triggerdef(t.oid)
          FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid
         WHERE c.relnamespace = 'scheduler'::regnamespace
        """
    )
    assert {tuple(trigger) for trigger in triggers} == {
        (table, name, b"O", f"CREATE TRIGGER {name} BEFORE {changes} ON scheduler.{table} FOR EACH {what} "
         "EXECUTE FUNCTION scheduler.refuse_change()")
        for table in APPEND_ONLY
        for name, changes, what in (
            ("append_only_rows", "UPDATE" if table in (*LOG_TABLES, COSIGNATURES) else "DELETE OR UPDATE", "ROW"),
            ("append_only_table", "TRUNCATE", "STATEMENT"),
        )
    } | {
        (table, "append_only_prefix", b"O", f"CREATE TRIGGER append_only_prefix AFTER DELETE ON scheduler.{table} "
         "REFERENCING OLD TABLE AS removed FOR EACH STATEMENT EXECUTE FUNCTION scheduler.refuse_uncovered()")
        for table in LOG_TABLES
    } | {
        (COSIGNATURES, "superseded_rows", b"O", f"CREATE TRIGGER superseded_rows BEFORE DELETE ON "
         f"scheduler.{COSIGNATURES} FOR EACH ROW EXECUTE FUNCTION scheduler.refuse_kept_cosignature()"),
        (COSIGNATURES, "supersede", b"O", f"CREATE TRIGGER supersede AFTER INSERT ON scheduler.{COSIGNATURES} "
         "FOR EACH ROW EXECUTE FUNCTION scheduler.supersede_cosignature()"),
    } | {
        ("subject_keys", "erased_for_good", b"O", "CREATE TRIGGER erased_for_good BEFORE UPDATE ON "
         "scheduler.subject_keys FOR EACH ROW WHEN ((old.wrapped_key IS NULL)) "
         "EXECUTE FUNCTION scheduler.refuse_revival()"),
    } | {
        (name, "followed_again", b"O", f"CREATE TRIGGER followed_again AFTER TRUNCATE ON scheduler.{name} "
         "FOR EACH STATEMENT EXECUTE FUNCTION scheduler.follow_again()")
        for name in ("jobs", "job_terms", "job_figures", "commitments")
    } | {
        ("follower_positions", f"behind_{name}", b"O", f"CREATE TRIGGER behind_{name} BEFORE UPDATE ON "
         "scheduler.follower_positions FOR EACH ROW WHEN (((new.seq > old.seq) AND "
         f"(current_setting('tallystick.follows_{name}'::text, true) IS DISTINCT FROM 'yes'::text))) "
         f"EXECUTE FUNCTION scheduler.keep_behind_{name}()")
        for name in ("commitments", "terms", "run_times")
    }  # fmt: skip


SIGNED: Final = {"signatures": [{"keyid": "k", "sig": "s"}]}


def prune_entry(seq: int, to_seq: Any, after_seq: Any, /, **changed: object) -> dict[str, object]:
    """A PRUNED entry of tenant acme that covers up to ``to_seq``."""
    facts = {"to_seq": to_seq, "after": {"seq": after_seq}, "statement": changed.pop("statement", SIGNED)}
    return entry(
        "acme", seq, job_id="retention policy", action="PRUNED", payload=orjson.dumps(facts).decode(), **changed
    )


async def removed(
    connection: asyncpg.Connection, from_seq: int, upto_seq: int, entries_max: int, tenant: str = "acme"
) -> dict[str, tuple[int, int]]:
    """By job, how many entries were removed, and the last of them."""
    query = "SELECT * FROM scheduler.remove_covered($1, $2, $3, $4)"
    rows = await connection.fetch(query, tenant, from_seq, upto_seq, entries_max)
    return {job: (count, to) for job, count, to in rows}


async def test_the_service_removes_what_a_prune_covers_job_by_job(service: asyncpg.Connection) -> None:
    await insert(service, *(entry("acme", seq, job_id=job) for seq, job in enumerate("abbacbd", 1)), entry("other", 1))
    assert await removed(service, 1, 100, 100) == {}
    await insert(service, prune_entry(8, 6, 0))
    # Of the jobs of so many seqs all that is covered, but no more entries than were asked for.
    assert await removed(service, 1, 100, 2) == {"a": (2, 4)}
    assert await removed(service, 2, 100, 2) == {"b": (2, 3)}
    assert await removed(service, 2, 5, 100) == {"c": (1, 5)}
    assert await removed(service, 2, 100, 100) == {"b": (1, 6)}
    assert await removed(service, 1, 100, 100) == {}
    left = await service.fetch("SELECT tenant_id, seq FROM scheduler.scheduler_log ORDER BY 1, 2")
    assert [tuple(row) for row in left] == [("acme", 7), ("acme", 8), ("other", 1)]


@pytest.mark.parametrize("table", ["scheduler_log", "scheduler_log_p{}"])
async def test_the_owner_cannot_remove_more_than_a_prune_covers(
    owner: asyncpg.Connection, service: asyncpg.Connection, table: str
) -> None:
    await insert(service, *(entry("acme", seq) for seq in range(1, 8)), prune_entry(8, 5, 0))
    number = await owner.fetchval("SELECT right(tableoid::regclass::text, 1) FROM scheduler.scheduler_log LIMIT 1")
    with pytest.raises(asyncpg.RestrictViolationError, match="no PRUNED entry covers"):
        await owner.execute(f"DELETE FROM scheduler.{table.format(number)} WHERE seq <= 6")
    await owner.execute(f"DELETE FROM scheduler.{table.format(number)} WHERE seq <= 5")
    assert await owner.fetchval("SELECT count(*) FROM scheduler.scheduler_log") == 3


@pytest.mark.parametrize(
    "uncovering",
    [
        prune_entry(9, 5, 2, statement={"signatures": []}),
        prune_entry(9, 5, 2, statement=None),
        prune_entry(9, "5", 2),
        prune_entry(9, 9, 2),
        prune_entry(9, 5, None),
        prune_entry(9, 5, 1),
        prune_entry(9, 5, 2, origin="{}"),
        prune_entry(9, 5, 2) | {"job_id": "job"},
        prune_entry(9, 5, 2) | {"action": "HOLD_PLACED"},
    ],
    ids=["no signature", "no statement", "text", "itself", "no place", "a hold between", "imported", "job", "action"],
)
async def test_what_is_no_prune_of_this_chain_covers_nothing(
    service: asyncpg.Connection, uncovering: dict[str, object]
) -> None:
    hold = entry("acme", 2, job_id="retention policy", action="HOLD_PLACED")
    others = [entry("acme", seq) for seq in (1, *range(3, 9))]
    await insert(service, hold, *others, {"origin": None, **uncovering})
    assert await removed(service, 1, 100, 100) == {}


async def test_the_chain_of_the_ledger_itself_keeps_everything(service: asyncpg.Connection) -> None:
    await insert(service, entry("_system", 1), {**prune_entry(2, 1, 0), "tenant_id": "_system"})
    assert await removed(service, 1, 10, 10, "_system") == {}


WAYS_ROUND = [
    "ALTER TABLE scheduler.scheduler_log DISABLE TRIGGER ALL",
    "ALTER TABLE scheduler.scheduler_log_p0 DISABLE TRIGGER append_only_rows",
    "ALTER TABLE scheduler.scheduler_log DETACH PARTITION scheduler.scheduler_log_p0",
    "ALTER TABLE scheduler.scheduler_log ADD COLUMN more text",
    "ALTER TABLE scheduler.scheduler_log OWNER TO tallystick",
    "DROP TRIGGER append_only_rows ON scheduler.scheduler_log",
    "DROP TABLE scheduler.scheduler_log",
    "DROP SCHEMA scheduler CASCADE",
    "CREATE TABLE scheduler.more (id int)",
    "CREATE TABLE public.more (id int)",
    "CREATE OR REPLACE FUNCTION scheduler.refuse_change() RETURNS trigger LANGUAGE sql RETURN NULL",
    "CREATE RULE quiet AS ON INSERT TO scheduler.scheduler_log DO INSTEAD NOTHING",
    "UPDATE scheduler.log_entries SET tenant_id = 'other'",
    "UPDATE scheduler.alembic_version SET version_num = 'other'",
    "INSERT INTO scheduler.scheduler_log_p0 (tenant_id, seq) VALUES ('acme', 1)",
    "SET session_replication_role = replica",
    "SET ROLE tallystick_owner",
]


async def test_the_service_may_not_get_round_it(service: asyncpg.Connection) -> None:
    for attempt in WAYS_ROUND:
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await service.execute(attempt)


async def test_the_service_has_these_rights_and_no_others(superuser: asyncpg.Connection) -> None:
    rows = await superuser.fetch(
        """
        SELECT c.relname, array_agg(a.privilege_type ORDER BY 1) AS rights
          FROM pg_class c CROSS JOIN aclexplode(coalesce(c.relacl, acldefault('r', c.relowner))) a
         WHERE c.relnamespace = 'scheduler'::regnamespace AND c.relkind <> 'i' AND a.grantee <> c.relowner
         GROUP BY 1
        """
    )
    tables = {fact.split()[0] for fact in await catalog(superuser) if fact.split()[1] == "column"}
    append_only = tables & {*APPEND_ONLY}
    writable = tables - append_only
    expected = {name: ["INSERT", "SELECT", "UPDATE"] for name in writable}
    expected |= {name: ["INSERT", "SELECT"] for name in append_only}
    expected |= {name: ["SELECT"] for name in ("alembic_version", "log_entries")}
    expected["session_secret"] = expected["departed_jobs"] = ["INSERT", "SELECT"]
    expected["wal_leases"] = ["DELETE", "INSERT", "SELECT", "UPDATE"]
    removable = ("idempotency", "jobs", "job_terms", "job_figures", "commitments", "webhooks", "webhook_dead_letters")
    expected |= {name: ["DELETE", "INSERT", "SELECT", "UPDATE"] for name in removable}
    if superuser.get_server_version().major >= 17:
        for name in (*LOG_TABLES[1:], "jobs", "job_terms", "job_figures"):
            expected[name] = sorted([*expected.get(name, ()), "MAINTAIN"])
    expected |= {name: ["DELETE", "INSERT", "SELECT"] for name in ("job_index_left", "job_index_piece")}
    assert {row["relname"]: sorted(row["rights"]) for row in rows} == expected
    said = re.search(r"DELETE on (.*?);", PAGE.read_text())
    assert said is not None
    assert {*re.findall(r"`(\w+)`", said[1])} == {name for name, rights in expected.items() if "DELETE" in rights}


async def test_the_owner_owns_everything_and_the_service_nothing(superuser: asyncpg.Connection) -> None:
    owners = await superuser.fetch(
        """
        SELECT DISTINCT relowner::regrole::text FROM pg_class WHERE relnamespace = 'scheduler'::regnamespace
         UNION SELECT proowner::regrole::text FROM pg_proc WHERE pronamespace = 'scheduler'::regnamespace
         UNION SELECT nspowner::regrole::text FROM pg_namespace WHERE nspname = 'scheduler'
        """
    )
    assert [row[0] for row in owners] == [OWNER]
    memberships = await superuser.fetch(
        "SELECT roleid::regrole::text FROM pg_auth_members WHERE member = $1::text::regrole", SERVICE
    )
    assert [row[0] for row in memberships] == [SERVICE_GROUP]
