"""SQL that the pipeline reads a ledger with. Values are put in as literals: only so does PostgreSQL stream by COPY.

Columns are read as the type they have: integers of any width as such, texts as text. Where somebody has given one some
other type, its values come as bytes of their text, which no column may hold, so that verification names each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from ledger.facts.events import SYSTEM_TENANT
from ledger.verification import ENTRY_COLUMNS, JOB_COLUMNS, PROMISED_COLUMNS, SNAPSHOT_COLUMNS
from pipeline.arrow import INTEGERS
from pipeline.places.protocol import SEQ_MAX, SEQ_MIN, Piece, Times
from signing.key_history import AFTER_FORKS, AFTER_SUBJECTS, FORK_PREFIX, SUBJECT_PREFIX

LOG, SNAPSHOTS, JOBS = "scheduler.scheduler_log", "scheduler.batch_snapshot", "scheduler.jobs"
HEADS, TREES, TILES = "scheduler.chain_heads", "scheduler.merkle_head", "scheduler.merkle_tile"
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
"""What is read, table by table."""

_NUMBERS: Final = frozenset(("smallint", "integer", "bigint"))
_TEXTS: Final = frozenset(("text", "character varying", "character", "name"))
_SPELT: Final = frozenset(("json", "jsonb", "xml", "bigint[]"))
"""Types whose values are text to every reader, once cast."""
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
"""PostgreSQL's name of the type of (table, column); those that are left out are as declared."""

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
"""A domain counts as the type that it is over, as which its values are sent."""

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
"""A server that ends long statements or idle transactions must not end the one that holds the snapshot.

Rows of a piece come by the index, sorted only where seqs repeat, and not all at once on the server's disk.
"""
EXPORT_SNAPSHOT: Final = "SELECT pg_catalog.pg_export_snapshot()"


def literal(text: str) -> str:
    """``text`` as a literal, where ``standard_conforming_strings`` is on."""
    return "'" + text.replace("'", "''") + "'"


def import_snapshot(snapshot_id: str) -> str:
    """Read in the state that ``snapshot_id`` names."""
    return f"SET TRANSACTION SNAPSHOT {literal(snapshot_id)}"


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
    """Those of the types found that are not as declared."""
    return {
        (table, column): kind
        for (table, column), kind in found.items()
        if column in COLUMNS[table] and _given(kind, column) != _given(None, column)
    }


def unreadable(types: Types) -> str | None:
    """What is wrong with ``types``, those of all columns, so that no row can be found; None when nothing is."""
    for table, columns in COLUMNS.items():
        if not any(name == table for name, _ in types):
            return f"there is no table {table}, or this login does not see it"
        for column in columns:
            type_name = types.get((table, column))
            if type_name is None:
                return f"column {column} of {table} is missing"
            if (table, column) in _FOUND_BY and type_name not in (_NUMBERS if column in INTEGERS else _TEXTS):
                return f"column {column} of {table} is of type {type_name}: its rows cannot be found by it"
    return None


# --- what there is --------------------------------------------------------------------------------


def tenants_in(table: str) -> str:
    """Every tenant that ``table`` has rows of, by one step of an index each."""
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
    """Those of ``tenants`` that there is anything of."""
    tables = COLUMNS
    held = " OR ".join(f"EXISTS (SELECT FROM {table} t WHERE t.tenant_id = wanted.tenant_id)" for table in tables)
    return f'SELECT tenant_id FROM {wanted(tenants)} WHERE {held} ORDER BY tenant_id COLLATE "C"'


def occupied(tenants: Iterable[str], rows_a_piece: int, from_seq: int | None, to_seq: int | None) -> str:
    """(tenant, seq) of the lowest stored seq of every stretch that holds any, by one step of an index each."""
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
    """Head, tree and last entry of each of ``tenants``, each with whether there is one."""
    last_columns = ("seq", "chain_link", "t_hlc")
    parts = [
        f"(SELECT {select_list(types, HEADS, HEAD_COLUMNS)}, true AS is_there FROM {HEADS}"
        " WHERE tenant_id = wanted.tenant_id ORDER BY ctid LIMIT 1) AS h",
        f"(SELECT {select_list(types, LOG, last_columns)}, true AS is_there FROM {LOG}"
        f" WHERE tenant_id = wanted.tenant_id AND {LOG}.seq IS NOT NULL"
        f" ORDER BY {LOG}.seq DESC, {LOG}.ctid DESC LIMIT 1) AS l",
        f"(SELECT {select_list(types, TREES, TREE_COLUMNS)}, true AS is_there FROM {TREES}"
        " WHERE tenant_id = wanted.tenant_id ORDER BY ctid LIMIT 1) AS m",
    ]
    joins = " ".join(f"LEFT JOIN LATERAL {part} ON true" for part in parts)
    heads, last = ", ".join(f"h.{name}" for name in HEAD_COLUMNS), ", ".join(f"l.{name}" for name in last_columns)
    tree = ", ".join(f"m.{name}" for name in TREE_COLUMNS)
    return (
        f"SELECT wanted.tenant_id, h.is_there, {heads}, l.is_there, {last}, m.is_there, {tree}"
        f" FROM {wanted(tenants)} {joins}"
    )


LOG_ORIGIN: Final = "SELECT log_origin::text FROM scheduler.ledger_identity LIMIT 1"


def checkpoint(tenant_id: str) -> str:
    """The newest checkpoint of a tenant's log."""
    return f"SELECT checkpoint::text FROM {TREES} WHERE tenant_id = {literal(tenant_id)} ORDER BY ctid LIMIT 1"


def seqs_in(tenant_id: str, times: Times, rows_max: int) -> str:
    """Lowest and highest seq and number of the entries of ``times``; no more than ``rows_max`` are looked at."""
    return f"""
    SELECT min(seq), max(seq), count(*)
      FROM (SELECT seq FROM {LOG} WHERE tenant_id = {literal(tenant_id)} AND seq IS NOT NULL{_within(times)}
             LIMIT {rows_max}) AS found
    """


# --- rows -----------------------------------------------------------------------------------------


def entries(types: Types, piece: Piece, columns: Sequence[str]) -> str:
    """The piece's entries by seq, in order of storage where seqs repeat."""
    first, last = piece.bounds
    return (
        f"SELECT {select_list(types, LOG, columns)} FROM {LOG} WHERE tenant_id = {literal(piece.tenant_id)}"
        f" AND {LOG}.seq >= {first} AND {LOG}.seq <= {last}{_within(piece.times)} ORDER BY {LOG}.seq, {LOG}.ctid"
    )


def about_keys(types: Types) -> str:
    """The entries of ``_system`` about keys and forks, by seq."""
    job_id = f'{LOG}.job_id::text COLLATE "C"'
    return (
        f"SELECT {select_list(types, LOG, ENTRY_COLUMNS)} FROM {LOG} WHERE tenant_id = {literal(SYSTEM_TENANT)}"
        f" AND ({job_id} >= {literal(SUBJECT_PREFIX)} AND {job_id} < {literal(AFTER_SUBJECTS)}"
        f" OR {job_id} >= {literal(FORK_PREFIX)} AND {job_id} < {literal(AFTER_FORKS)}) ORDER BY {LOG}.seq, {LOG}.ctid"
    )


def snapshots(types: Types, piece: Piece) -> str:
    """The snapshots that touch the piece, and with the first one those that lack a bound."""
    first, last = piece.bounds
    lacking = " OR s.from_seq IS NULL OR s.to_seq IS NULL" if piece.is_first else ""
    return (
        f"SELECT {select_list(types, SNAPSHOTS, SNAPSHOT_COLUMNS)} FROM {SNAPSHOTS} s"
        f" WHERE tenant_id = {literal(piece.tenant_id)} AND (s.from_seq IS NOT NULL AND s.to_seq IS NOT NULL"
        f" AND least(s.from_seq, s.to_seq) <= {last} AND greatest(s.from_seq, s.to_seq) >= {first}{lacking})"
        " ORDER BY s.from_seq, s.to_seq, s.id"
    )


def followed_seq(types: Types, tenant_id: str) -> str:
    """How far the job table follows the chain of a tenant; no row where it has not begun."""
    return (
        f"SELECT {select_list(types, FOLLOWERS, ('seq',))} FROM {FOLLOWERS} p"
        f" WHERE tenant_id = {literal(tenant_id)} AND p.follower = 'jobs' ORDER BY p.ctid LIMIT 1"
    )


def jobs(types: Types, tenant_id: str) -> str:
    """All stored jobs of a tenant by job id; none where the table has not begun to follow."""
    return (
        f"SELECT {select_list(types, JOBS, JOB_COLUMNS)} FROM {JOBS} j WHERE tenant_id = {literal(tenant_id)}"
        f" AND EXISTS ({followed_seq(types, tenant_id)}) ORDER BY j.job_id, j.ctid"
    )


def promised(types: Types, tenant_id: str) -> str:
    """The table of commitments of a tenant by seq; nothing where it has not begun to follow."""
    return (
        f"SELECT {select_list(types, COMMITMENTS, PROMISED_COLUMNS)} FROM {COMMITMENTS} c"
        f" WHERE tenant_id = {literal(tenant_id)} AND EXISTS ({followed_seq(types, tenant_id)}) ORDER BY c.seq, c.ctid"
    )


def tiles(types: Types, tenant_id: str, level: int, first: int, last: int) -> str:
    """Stored tiles of a level."""
    return (
        f"SELECT {select_list(types, TILES, ('tile_index', 'hashes'))} FROM {TILES} t"
        f" WHERE tenant_id = {literal(tenant_id)} AND t.level = {level} AND t.tile_index BETWEEN {first} AND {last}"
        " ORDER BY t.ctid"
    )


def wanted(tenants: Iterable[str]) -> str:
    """``tenants`` as a table of that name."""
    listed = ", ".join(map(literal, tenants))
    return f"unnest(ARRAY[{listed}]::text[]) AS wanted(tenant_id)"


def _within(times: Times) -> str:
    lower = "" if times.from_ms is None else f" AND hlc_physical >= {times.from_ms}"
    return lower + ("" if times.to_ms is None else f" AND hlc_physical <= {times.to_ms}")
