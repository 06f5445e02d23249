"""SQL of the pipeline's reads of a ledger. Values are literals, as PostgreSQL streams by COPY only without
parameters.

Columns are read in their actual type: integers of any width as integers, texts as text. If a column was altered to
another type, its values are read as bytes of their text. No column may hold bytes, so verification reports each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from ledger.machines.retention import SUBJECT
from ledger.verification import ENTRY_COLUMNS, JOB_COLUMNS, PROMISED_COLUMNS, SNAPSHOT_COLUMNS
from pipeline.arrow import INTEGERS
from pipeline.places.protocol import SEQ_MAX, SEQ_MIN, Times
from signing.anchors import ANCHORS_MAX

LOG, SNAPSHOTS, JOBS = "scheduler.scheduler_log", "scheduler.batch_snapshot", "scheduler.jobs"
HEADS, TREES, TILES = "scheduler.chain_heads", "scheduler.merkle_head", "scheduler.merkle_tile"
COSIGNATURES: Final = "scheduler.checkpoint_cosignature"
LEFT_INDEX: Final = "scheduler.job_index_left"
FOLLOWERS: Final = "scheduler.follower_positions"
COMMITMENTS: Final = "scheduler.commitments"
HEAD_COLUMNS: Final = ("head_seq", "head_chain_link", "head_hlc")
TREE_COLUMNS: Final = ("tree_size", "root_hash")

COLUMNS: Final[Mapping[str, Sequence[str]]] = {
    LOG: ("tenant_id", *ENTRY_COLUMNS),
    SNAPSHOTS: ("tenant_id", *SNAPSHOT_COLUMNS),
    JOBS: ("tenant_id", *JOB_COLUMNS),
    HEADS: ("tenant_id", *HEAD_COLUMNS),
    TREES: ("tenant_id", *TREE_COLUMNS),
    TILES: ("tenant_id", "level", "tile_index", "hashes"),
    FOLLOWERS: ("tenant_id", "follower", "seq"),
    COMMITMENTS: ("tenant_id", *PROMISED_COLUMNS),
}
"""Columns read of each table."""

_NUMBERS: Final = frozenset(("smallint", "integer", "bigint"))
_TEXTS: Final = frozenset(("text", "character varying", "character", "name"))
_SPELT: Final = frozenset(("json", "jsonb", "xml", "bigint[]"))
"""Types whose values are read as text after a cast."""
_FOUND_BY: Final = {
    (LOG, "seq"),
    (SNAPSHOTS, "from_seq"),
    (SNAPSHOTS, "to_seq"),
    (TILES, "level"),
    (TILES, "tile_index"),
    *((table, "tenant_id") for table in COLUMNS),
}

_DECLARED: Final[Mapping[str, str]] = {
    **dict.fromkeys(INTEGERS, "bigint"),
    **dict.fromkeys(("payload", "origin", "dsse_envelope"), "json"),
    "seqs": "bigint[]",
    "hashes": "bytea",
}

Types = Mapping[tuple[str, str], str]
"""PostgreSQL's type name of (table, column); absent columns have their declared type."""

COLUMN_TYPES: Final = f"""
SELECT t.name, a.attname::text, format_type(base.type_id, NULL)
  FROM unnest(ARRAY[{", ".join(f"'{table}'" for table in COLUMNS)}]) AS t(name)
  JOIN pg_catalog.pg_attribute a ON a.attrelid = to_regclass(t.name) AND a.attnum > 0 AND NOT a.attisdropped
 CROSS JOIN LATERAL (
    WITH RECURSIVE over AS (
        SELECT a.atttypid AS type_id
        UNION ALL
        SELECT d.typbasetype FROM over JOIN pg_catalog.pg_type d ON d.oid = over.type_id AND d.typtype = 'd'
    ) SELECT over.type_id FROM over JOIN pg_catalog.pg_type y ON y.oid = over.type_id AND y.typtype <> 'd'
 ) AS base
"""
"""A domain is replaced by its base type, in which its values are sent."""

BEGIN: Final = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
PREPARE_SESSION: Final = """
SELECT set_config(name, setting, false)
  FROM (VALUES ('client_encoding', 'UTF8'), ('standard_conforming_strings', 'on'), ('jit', 'off'),
               ('enable_sort', 'off'), ('bytea_output', 'hex'), ('search_path', 'pg_catalog'), ('row_security', 'off'),
               ('DateStyle', 'ISO, MDY'), ('IntervalStyle', 'postgres'), ('TimeZone', 'UTC'),
               ('extra_float_digits', '1'), ('quote_all_identifiers', 'off'), ('array_nulls', 'on'),
               ('transform_null_equals', 'off'), ('lock_timeout', '0'),
               ('statement_timeout', '0'), ('transaction_timeout', '0'), ('idle_session_timeout', '0'),
               ('idle_in_transaction_session_timeout', '0')) AS wanted(name, setting)
 WHERE name IN (SELECT s.name FROM pg_catalog.pg_settings s)
"""
"""Server timeouts of statements or idle transactions must not end the transaction that holds the snapshot.

Rows of a piece are read by index and sorted only among equal seqs, not spooled on the server's disk.
"""
EXPORT_SNAPSHOT: Final = "SELECT pg_catalog.pg_export_snapshot()"


def literal(text: str) -> str:
    """``text`` as a literal; requires ``standard_conforming_strings`` on."""
    return "'" + text.replace("'", "''") + "'"


def newest_cosignatures(tenant_id: str, witnesses: Iterable[str]) -> str:
    """Verifier key and note of the newest cosignature of each of these witnesses on the tenant's checkpoints."""
    keys = ", ".join(f"({literal(key)})" for key in witnesses)
    return f"""
        SELECT said.witness::text, said.note::text FROM (VALUES {keys}) AS known(key)
         CROSS JOIN LATERAL (SELECT witness, note FROM {COSIGNATURES}
                              WHERE tenant_id = {literal(tenant_id)} AND witness = known.key
                              ORDER BY tree_size DESC, cosigned_at DESC LIMIT 1) AS said
    """


def cosignatures_between(tenant_id: str, least: int, most: int) -> str:
    """Verifier key and note of the newest cosignature of each witness on a checkpoint of ``least`` to ``most`` entries
    of the tenant."""
    return f"""
        SELECT DISTINCT ON (witness) witness::text, note::text FROM {COSIGNATURES}
         WHERE tenant_id = {literal(tenant_id)} AND tree_size BETWEEN {least:d} AND {most:d}
         ORDER BY witness, tree_size DESC, cosigned_at DESC LIMIT {ANCHORS_MAX}
    """


def select_list(types: Types, table: str, columns: Iterable[str]) -> str:
    """``columns`` of ``table``, each of the Arrow type that its declared type has, or binary."""
    return ", ".join(f"{_given(types.get((table, column)), column)} AS {column}" for column in columns)


def _given(altered: str | None, column: str) -> str:
    type_name = altered or _DECLARED.get(column, "text")
    if type_name in _NUMBERS:
        return f"{column}::bigint"
    if type_name in _SPELT:
        return f"{column}::text"
    if type_name in _TEXTS or (column == "hashes" and type_name == "bytea"):
        return column
    return f"convert_to({column}::text, 'UTF8')"


def altered(found: Types) -> Types:
    """The types that differ from the declared ones."""
    return {
        (table, column): kind
        for (table, column), kind in found.items()
        if column in COLUMNS[table] and _given(kind, column) != _given(None, column)
    }


def unreadable(types: Types) -> str | None:
    """The problem in ``types``, of all columns, by which rows cannot be found; None if there is none."""
    for table, columns in COLUMNS.items():
        if not any(name == table for name, _ in types):
            return f"there is no table {table}, or this login does not see it"
        for column in columns:
            if (type_name := types.get((table, column))) is None:
                return f"column {column} of {table} is missing"
            if (table, column) in _FOUND_BY and type_name not in (_NUMBERS if column in INTEGERS else _TEXTS):
                return f"column {column} of {table} is of type {type_name}: its rows cannot be found by it"
    return None


# --- what there is --------------------------------------------------------------------------------


def tenants_in(table: str) -> str:
    """Every tenant with rows in ``table``, by one index step each."""
    return f"""
    SELECT tenant_id FROM (
        WITH RECURSIVE found AS (
            SELECT (SELECT min(tenant_id) FROM {table}) AS tenant_id
            UNION ALL
            SELECT (SELECT min(t.tenant_id) FROM {table} t WHERE t.tenant_id > found.tenant_id)
              FROM found WHERE found.tenant_id IS NOT NULL
        ) SELECT tenant_id FROM found
    ) AS of_table
    """


TENANTS: Final = f"""
SELECT tenant_id FROM (
    SELECT tenant_id FROM {HEADS} UNION SELECT tenant_id FROM {TREES}
    UNION {tenants_in(LOG)} UNION {tenants_in(SNAPSHOTS)} UNION {tenants_in(JOBS)} UNION {tenants_in(TILES)}
    UNION {tenants_in(COMMITMENTS)}
) AS named WHERE tenant_id IS NOT NULL ORDER BY tenant_id COLLATE "C"
"""


def tenants_among(tenants: Iterable[str]) -> str:
    """The tenants of ``tenants`` with any data."""
    held = " OR ".join(f"EXISTS (SELECT FROM {table} t WHERE t.tenant_id = wanted.tenant_id)" for table in COLUMNS)
    return f'SELECT tenant_id FROM {wanted(tenants)} WHERE {held} ORDER BY tenant_id COLLATE "C"'


def occupied(tenants: Iterable[str], rows_a_piece: int, from_seq: int | None, to_seq: int | None) -> str:
    """(tenant, seq) of the lowest stored seq of every non-empty stretch, by one index step each."""
    lowest, highest = SEQ_MIN if from_seq is None else from_seq, SEQ_MAX if to_seq is None else to_seq
    next_start = f"((greatest(found.seq, 1) - 1) / {rows_a_piece} + 1) * {rows_a_piece} + 1"
    return f"""
    SELECT wanted.tenant_id, stretch.seq
      FROM {wanted(tenants)}
     CROSS JOIN LATERAL (
        WITH RECURSIVE found AS (
            SELECT (SELECT l.seq FROM {LOG} l WHERE l.tenant_id = wanted.tenant_id
                       AND l.seq >= {lowest} AND l.seq <= {highest} ORDER BY l.seq LIMIT 1) AS seq
            UNION ALL
            SELECT (SELECT l.seq FROM {LOG} l WHERE l.tenant_id = wanted.tenant_id
                       AND l.seq >= {next_start} AND l.seq <= {highest} ORDER BY l.seq LIMIT 1)
              FROM found WHERE found.seq <= {SEQ_MAX - rows_a_piece}
        ) SELECT seq FROM found WHERE seq IS NOT NULL
     ) AS stretch
     ORDER BY wanted.tenant_id COLLATE "C", stretch.seq
    """


def facts(types: Types, tenants: Iterable[str]) -> str:
    """Head, tree and last entry of each of ``tenants``, each with a flag whether it exists."""
    return f"""
    SELECT wanted.tenant_id, h.*, l.*, m.*
      FROM {wanted(tenants)}
      LEFT JOIN LATERAL (SELECT true, {select_list(types, HEADS, HEAD_COLUMNS)} FROM {HEADS}
                          WHERE tenant_id = wanted.tenant_id ORDER BY ctid LIMIT 1) AS h ON true
      LEFT JOIN LATERAL (SELECT true, {select_list(types, LOG, ("seq", "chain_link", "t_hlc"))} FROM {LOG}
                          WHERE tenant_id = wanted.tenant_id AND {LOG}.seq IS NOT NULL
                          ORDER BY {LOG}.seq DESC, {LOG}.ctid DESC LIMIT 1) AS l ON true
      LEFT JOIN LATERAL (SELECT true, {select_list(types, TREES, TREE_COLUMNS)} FROM {TREES}
                          WHERE tenant_id = wanted.tenant_id ORDER BY ctid LIMIT 1) AS m ON true
    """


def about_retention(types: Types, tenants: Iterable[str]) -> str:
    """The entries about retention of each of ``tenants``, after the tenant, by tenant and seq."""
    return f"""
    SELECT wanted.tenant_id, found.*
      FROM {wanted(tenants)}
     CROSS JOIN LATERAL (SELECT {select_list(types, LOG, ENTRY_COLUMNS)} FROM {LOG}
                          WHERE tenant_id = wanted.tenant_id AND {LOG}.job_id::text = {literal(SUBJECT)}
                          ORDER BY {LOG}.seq, {LOG}.ctid) AS found
     ORDER BY wanted.tenant_id COLLATE "C", found.seq
    """


LOG_ORIGIN: Final = "SELECT log_origin::text FROM scheduler.ledger_identity LIMIT 1"


def wanted(tenants: Iterable[str]) -> str:
    """``tenants`` as a table of that name."""
    return f"unnest(ARRAY[{', '.join(map(literal, tenants))}]::text[]) AS wanted(tenant_id)"


def within(times: Times) -> str:
    """The condition that entries are within ``times``, to follow other conditions."""
    lower = "" if times.from_ms is None else f" AND hlc_physical >= {times.from_ms}"
    return lower + ("" if times.to_ms is None else f" AND hlc_physical <= {times.to_ms}")
