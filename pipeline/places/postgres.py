"""A ledger in PostgreSQL, read over ADBC as Arrow batches, all of it in one exported snapshot.

The driver opens a REPEATABLE READ transaction, exports its snapshot and keeps it open; every task imports that
snapshot into a transaction of its own. So all pieces and the driver's own reads show one state.

A database is named by its URL, whose password is never shown. Database errors become errors of ``ledger.errors``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast
from urllib.parse import unquote

import adbc_driver_manager
import adbc_driver_postgresql
import pyarrow as pa
from adbc_driver_manager import AdbcConnection, AdbcDatabase
from adbc_driver_postgresql import StatementOptions

from ledger.errors import ConfigurationError, DatabaseUnavailableError, LedgerError
from ledger.facts.events import SYSTEM_TENANT
from ledger.job_index import keys_of
from ledger.machines.exclusions import COUNT_ALL, NO_STATEMENTS, SUBJECT, Exclusions, statements_of
from ledger.machines.retention import Floor
from ledger.merkle import HASH_BYTES, leaf_hashes
from ledger.merkle.tiles import TILE_WIDTH
from ledger.text import secret_text
from ledger.verification import (
    ENTRY_COLUMNS,
    FOLD_COLUMNS,
    JOB_COLUMNS,
    PROMISED_COLUMNS,
    SNAPSHOT_COLUMNS,
    Head,
    StoredTree,
)
from ledger.verification.entry_check import is_link
from ledger.verification.left_index import IndexSource, KeptIndex
from ledger.verification.range_fold import ChainBounds
from ledger.verification.verdict import Anchor
from pipeline.arrow import Row, rows_of
from pipeline.places import statements
from pipeline.places.floors import NOWHERE, FoundFloor, begun_at, floors_of
from pipeline.places.protocol import (
    BATCH_BYTES_HINT,
    BATCH_ROWS_MAX,
    EVER,
    ROWS_A_PIECE,
    Facts,
    Judged,
    Judgement,
    OpenPlace,
    Piece,
    PieceReader,
    Place,
    ReaderOf,
    Sealed,
    Times,
    cut,
)
from pipeline.places.statements import (
    COMMITMENTS,
    FOLLOWERS,
    JOBS,
    LEFT_INDEX,
    LOG,
    SNAPSHOTS,
    TILES,
    TREES,
    literal,
    select_list,
    within,
)
from signing.anchors import WITNESS, ExternalWitnesses, StoredAnchor, judge, opener
from signing.callers import AFTER_CALLERS, CALLER_PREFIX
from signing.key_history import AFTER_FORKS, AFTER_SUBJECTS, FORK_PREFIX, SUBJECT_PREFIX, named_keys, without_trust
from signing.keys import Keyring
from signing.snapshot import payload_of

if TYPE_CHECKING:
    from adbc_driver_manager import dbapi

TIMED_ROWS_MAX: Final = 4 * ROWS_A_PIECE
"""Most entries of a time range that are read to find its seqs; a longer range is read from all pieces."""
TENANTS_AT_ONCE: Final = 500
"""Most tenants in one statement."""
DATABASES_HELD: Final = 16
"""Databases whose types a process keeps, of those it used last."""


@dataclass(frozen=True, slots=True)
class PostgresState:
    """One state of a database for tasks, valid while the transaction that exported ``snapshot_id`` is open."""

    dsn: Dsn
    snapshot_id: str | None
    """None for the current state, if the rows read are append-only."""
    altered: tuple[tuple[tuple[str, str], str], ...] = ()
    """Altered column types, the items of ``statements.Types``."""

    @contextmanager
    def session(self) -> Iterator[ReaderOf]:
        """A transaction in this state."""
        with connected(self.dsn) as connection:
            connection.begin(self.snapshot_id)
            yield partial(PostgresPieceReader, connection, dict(self.altered))


class PostgresPieceReader(PieceReader):
    """Reads one piece. An iterator MUST be exhausted before the next one is started."""

    def __init__(self, connection: Connection, types: statements.Types, piece: Piece) -> None:
        self._connection, self._types, self.piece = connection, types, piece
        self._tenant = literal(piece.tenant_id)

    def entries(self, columns: Sequence[str] = ENTRY_COLUMNS) -> Iterator[pa.RecordBatch]:
        """The piece's entries by seq, then by storage order if seqs repeat."""
        first, last = self.piece.bounds
        return self._connection.batches(
            f"SELECT {select_list(self._types, LOG, columns)} FROM {LOG} WHERE tenant_id = {self._tenant}"
            f" AND {LOG}.seq >= {first} AND {LOG}.seq <= {last}{within(self.piece.times)}"
            f" ORDER BY {LOG}.seq, {LOG}.ctid"
        )

    def snapshots(self) -> Iterator[pa.RecordBatch]:
        """The snapshots that overlap the piece; the tenant's first piece includes those that lack a bound."""
        first, last = self.piece.bounds
        lacking = " OR s.from_seq IS NULL OR s.to_seq IS NULL" if self.piece.is_first else ""
        return self._connection.batches(
            f"SELECT {select_list(self._types, SNAPSHOTS, SNAPSHOT_COLUMNS)} FROM {SNAPSHOTS} s"
            f" WHERE tenant_id = {self._tenant} AND (s.from_seq IS NOT NULL AND s.to_seq IS NOT NULL"
            f" AND least(s.from_seq, s.to_seq) <= {last} AND greatest(s.from_seq, s.to_seq) >= {first}{lacking})"
            " ORDER BY s.from_seq, s.to_seq, s.id"
        )

    def tiles(self, level: int, first: int, last: int) -> Mapping[int, bytes]:
        """Stored tiles."""
        return dict(
            self._connection.rows(
                f"SELECT {select_list(self._types, TILES, ('tile_index', 'hashes'))} FROM {TILES} t"
                f" WHERE tenant_id = {self._tenant} AND t.level = {level} AND t.tile_index BETWEEN {first} AND {last}"
                " ORDER BY t.ctid"
            )
        )

    def followed_seq(self) -> int:
        """The last seq that the stored commitments of the tenant cover."""
        return self._seq_in(self._followed())

    def jobs_seq(self) -> int:
        """The last seq that the stored jobs of the tenant cover; 0 before the newest statement about excluded logs."""
        return self._seq_in(self._followed_jobs())

    def jobs(self) -> Iterator[pa.RecordBatch]:
        """Stored jobs of the tenant by job id; none if the table does not cover the chain yet, or if its rows may have
        been written with other exclusions."""
        return self._following(JOBS, JOB_COLUMNS, "job_id", self._followed_jobs())

    def exclusions(self) -> Exclusions:
        """What the statements in the tenant's chain exclude."""
        rows = self._connection.rows(
            f"SELECT {select_list(self._types, LOG, FOLD_COLUMNS)} FROM {LOG}"
            f" WHERE tenant_id = {self._tenant} AND {LOG}.job_id::text = {literal(SUBJECT)}"
            f" ORDER BY {LOG}.seq, {LOG}.ctid"
        )
        if not rows:
            return COUNT_ALL
        origin = self._log_origin()
        own_log = None if origin is None else f"{origin}/{self.piece.tenant_id}"
        return statements_of(NO_STATEMENTS, rows, own_log).exclusions(own_log)

    def promised(self) -> Iterator[pa.RecordBatch]:
        """The table of commitments of the tenant by seq; none if it does not cover the chain yet."""
        return self._following(COMMITMENTS, PROMISED_COLUMNS, "seq", self._followed())

    def floor(self) -> Floor | None:
        """The tenant's newest PRUNED entry, by whatever key."""
        rows = self._connection.rows(statements.about_retention(self._types, [self.piece.tenant_id]))
        return floors_of(rows, self._log_origin(), None).get(self.piece.tenant_id, NOWHERE).floor

    def _log_origin(self) -> str | None:
        return next((row[0] for row in self._connection.rows(statements.LOG_ORIGIN)), None)

    def _followed(self, condition: str = "") -> str:
        return (
            f"SELECT {select_list(self._types, FOLLOWERS, ('seq',))} FROM {FOLLOWERS} p"
            f" WHERE tenant_id = {self._tenant} AND p.follower = 'jobs'{condition} ORDER BY p.ctid LIMIT 1"
        )

    def _followed_jobs(self) -> str:
        stated = (
            f"SELECT max({LOG}.seq) FROM {LOG} WHERE {LOG}.tenant_id = {self._tenant}"
            f" AND {LOG}.job_id::text = {literal(SUBJECT)}"
        )
        return self._followed(f" AND p.seq >= coalesce(({stated}), 0)")

    def _seq_in(self, query: str) -> int:
        return next((seq for (seq,) in self._connection.rows(query) if isinstance(seq, int)), 0)

    def _following(self, table: str, columns: Sequence[str], order: str, followed: str) -> Iterator[pa.RecordBatch]:
        return self._connection.batches(
            f"SELECT {select_list(self._types, table, columns)} FROM {table} t WHERE tenant_id = {self._tenant}"
            f" AND EXISTS ({followed}) ORDER BY t.{order}, t.ctid"
        )


@dataclass(frozen=True, slots=True)
class PostgresPlace(Place):
    """A ledger in PostgreSQL."""

    kind: ClassVar[str] = "dsn"
    dsn: Dsn

    def __str__(self) -> str:
        return self.dsn.shown

    @contextmanager
    def open(self, keyring: Keyring | None = None, *, is_plan: bool = False) -> Iterator[OpenPostgres]:
        """Hold one state of the database in an open transaction.

        Raises:
            DatabaseUnavailableError: PostgreSQL does not answer.
            ConfigurationError: it refuses the login, or holds no ledger that this login may read.
        """
        with connected(self.dsn) as connection:
            connection.begin(None)
            snapshot_id = None if is_plan else connection.rows(statements.EXPORT_SNAPSHOT)[0][0]
            yield OpenPostgres(connection, state_of(connection, self.dsn, snapshot_id))


class OpenPostgres(OpenPlace):
    """A ledger in PostgreSQL, held in one state."""

    is_copy = False

    def __init__(self, connection: Connection, state: PostgresState) -> None:
        self.connection, self.state = connection, state
        self._types = dict(state.altered)
        self._facts: dict[str, Facts] = {}
        self._floors: dict[str, FoundFloor] = {}

    def __str__(self) -> str:
        return str(self.state.dsn)

    def tenants(self) -> list[str]:
        """Every tenant that any table names."""
        return [row[0] for row in self.connection.rows(statements.TENANTS)]

    def pieces_of(
        self, tenants: Sequence[str], rows_a_piece: int, from_seq: int | None, to_seq: int | None, times: Times
    ) -> list[Piece]:
        """Borders are multiples of ``rows_a_piece``. A chain that was pruned begins at its floor."""
        occupied: dict[str, list[int]] = {tenant: [] for tenant in tenants}
        for tenant, seq in self._rows(lambda some: statements.occupied(some, rows_a_piece, from_seq, to_seq), tenants):
            occupied[tenant].append(seq)
        self.read_facts(tenants)
        floors = self.floors(tenants)
        found: list[Piece] = []
        for tenant in tenants:
            whole = Piece(tenant, from_seq, to_seq, 0, True, self.state, times)
            seqs = occupied[tenant]
            if tenant in floors and (first := floors[tenant].to_seq + 1) > (from_seq or 0):
                whole = replace(whole, from_seq=first)
                seqs = [max(seq, first) for seq in seqs if -(-seq // rows_a_piece) * rows_a_piece >= first]
            found += self._cut(whole, seqs, rows_a_piece)
        return found

    def left_pieces(self, tenants: Collection[str], rows_a_piece: int = ROWS_A_PIECE) -> list[Piece]:
        """The entries below floors that are still stored."""
        found: list[Piece] = []
        for tenant, floor in self.floors(tenants).items():
            first = floor.to_seq + 1
            seqs = [
                seq for _, seq in self.connection.rows(statements.occupied([tenant], rows_a_piece, None, first - 1))
            ]
            whole = Piece(tenant, None, first - 1, 0, False, self.state)
            found += [replace(piece, is_first=False) for piece in cut(whole, seqs, first - 1, rows_a_piece) if seqs]
        return found

    def floors(self, tenants: Collection[str]) -> dict[str, Floor]:
        """Those of chains that were pruned; unless they were judged before, by statements of any key."""
        self._read_floors([tenant for tenant in tenants if tenant not in self._floors], None)
        found = ((tenant, self._floors[tenant].floor) for tenant in tenants)
        return {tenant: floor for tenant, floor in found if floor is not None}

    def begun(
        self, ends: Mapping[str, ChainBounds], keyring: Keyring | None, archived: Mapping[str, IndexSource]
    ) -> dict[str, ChainBounds]:
        """Floors are compared with the stored tiles."""
        self._read_floors([*ends], keyring)
        return {tenant: self._begun(each, archived.get(tenant)) for tenant, each in ends.items()}

    def _begun(self, ends: ChainBounds, archived: IndexSource | None) -> ChainBounds:
        reader = self.reader(Piece(ends.tenant_id, None, None, 0, True, self.state))
        sources = [_Index(self.connection, reader), *([] if archived is None else [archived])]
        return begun_at(ends, self._floors[ends.tenant_id], reader.tiles, sources)

    def _read_floors(self, tenants: Sequence[str], keyring: Keyring | None) -> None:
        rows = [*self._rows(partial(statements.about_retention, self._types), tenants)]
        found = floors_of(rows, self.log_origin(), keyring) if rows else {}
        self._floors |= {tenant: found.get(tenant, NOWHERE) for tenant in tenants}

    def reader(self, piece: Piece) -> PostgresPieceReader:
        """A reader on the connection that holds the state."""
        return PostgresPieceReader(self.connection, self._types, piece)

    def facts(self, tenant_id: str) -> Facts:
        """Head, last entry and stored tree."""
        self.read_facts([tenant_id])
        return self._facts[tenant_id]

    def log_origin(self, tenant_id: str | None = None) -> str | None:
        """The stored origin of all logs of this ledger; None if it has none."""
        return next((row[0] for row in self.connection.rows(statements.LOG_ORIGIN)), None)

    def sealed(self, tenant_id: str) -> list[Sealed]:
        """The newest checkpoint that was signed for the tenant's log, as stored; none before the first."""
        query = f"SELECT checkpoint::text FROM {TREES} WHERE tenant_id = {literal(tenant_id)} ORDER BY ctid LIMIT 1"
        return [Sealed(None, row[0], ()) for row in self.connection.rows(query) if row[0] is not None]

    def cosigned(self, tenant_id: str, keyring: Keyring | None, external: ExternalWitnesses) -> tuple[Anchor, ...]:
        """Those of the database."""
        if keyring is None or not external.witnesses:
            return ()
        open_note = external.pinned(opener(keyring, f"{self.log_origin(tenant_id)}/{tenant_id}"))
        query = statements.newest_cosignatures(tenant_id, [key.text() for key in external.witnesses])
        unknown = datetime.fromtimestamp(0, UTC)
        said = [StoredAnchor(WITNESS, key, note, 0, unknown) for key, note in self.connection.rows(query)]
        return tuple(judge(each, external.witnesses, (), open_note) for each in said)

    def named_keys(self) -> Keyring | None:
        """The keys that the ``_system`` chain names. No signature is valid by them. None without a root."""
        job_id = f'{LOG}.job_id::text COLLATE "C"'
        about = " OR ".join(
            f"{job_id} >= {literal(first)} AND {job_id} < {literal(after)}"
            for first, after in (
                (SUBJECT_PREFIX, AFTER_SUBJECTS),
                (FORK_PREFIX, AFTER_FORKS),
                (CALLER_PREFIX, AFTER_CALLERS),
            )
        )
        rows = self.connection.rows(
            f"SELECT {select_list(self._types, LOG, ENTRY_COLUMNS)} FROM {LOG}"
            f" WHERE tenant_id = {literal(SYSTEM_TENANT)} AND ({about}) ORDER BY {LOG}.seq, {LOG}.ctid"
        )
        return named_keys(rows)

    def judged(self, tenants: Collection[str], keyring: Keyring | None) -> Judgement:
        """Heads and trees. A tenant without head and entries that a table still names is left over. Without
        ``keyring`` no signature is valid."""
        self.existing(tenants)
        self.read_facts(tenants)
        judged = {}
        for tenant_id in tenants:
            _, head, last, tree = self._facts[tenant_id]
            ends = ChainBounds(tenant_id, head, tree, is_left_over=head is None and last is None)
            judged[tenant_id] = Judged(ends, dict if keyring is not None else _untrusted)
        return judged, {}

    def read_facts(self, tenants: Collection[str]) -> None:
        """Cache the facts of many tenants with few statements."""
        unread = [tenant for tenant in tenants if tenant not in self._facts]
        for tenant, *row in self._rows(partial(statements.facts, self._types), unread):
            parts = zip((Head, Head, StoredTree), (row[:4], row[4:8], row[8:]), strict=True)
            head, last, tree = (of(*values) if is_there else None for of, (is_there, *values) in parts)
            self._facts[tenant] = Facts(tenant, head, last, tree)

    def tenants_among(self, tenants: Sequence[str]) -> list[str]:
        """Those of ``tenants`` that any table names."""
        return [row[0] for row in self._rows(statements.tenants_among, tenants)]

    def _rows(self, statement: Callable[[Sequence[str]], str], tenants: Sequence[str]) -> Iterator[Row]:
        """The rows of ``statement``, with at most ``TENANTS_AT_ONCE`` of ``tenants`` each time."""
        for at in range(0, len(tenants), TENANTS_AT_ONCE):
            yield from self.connection.rows(statement(tenants[at : at + TENANTS_AT_ONCE]))

    def _cut(self, whole: Piece, occupied: Sequence[int], rows_a_piece: int) -> list[Piece]:
        last_seq = last.seq if (last := self._facts[whole.tenant_id].last) is not None else 0
        if self.state.snapshot_id is None and whole.to_seq is None:
            whole = replace(whole, to_seq=last_seq)
        pieces = cut(whole, occupied, last_seq if whole.to_seq is None else min(whole.to_seq, last_seq), rows_a_piece)
        if whole.times == EVER or not occupied:
            return pieces
        ((lowest, highest, count),) = self.connection.rows(f"""
            SELECT min(seq), max(seq), count(*)
              FROM (SELECT seq FROM {LOG} WHERE tenant_id = {literal(whole.tenant_id)} AND seq IS NOT NULL
                    {within(whole.times)} LIMIT {TIMED_ROWS_MAX + 1}) AS found
        """)
        if count > TIMED_ROWS_MAX:
            return pieces
        return [piece for piece in pieces if count and piece.bounds[0] <= highest and piece.bounds[1] >= lowest]


class _Index(IndexSource):
    """What the database has of the index of jobs of a tenant; nothing here waits."""

    def __init__(self, connection: Connection, reader: PostgresPieceReader) -> None:
        self._connection, self._reader = connection, reader
        self._tenant = literal(reader.piece.tenant_id)

    async def kept(self) -> KeptIndex | None:
        """What is kept of the newest entries that left."""
        rows = self._connection.rows(
            f"SELECT first_leaf, keys, runs FROM {LEFT_INDEX} WHERE tenant_id = {self._tenant}"
            " ORDER BY first_leaf DESC LIMIT 1"
        )
        return next((KeptIndex(*row) for row in rows), None)

    async def payload_at(self, to_seq: int) -> bytes:
        """The payload of the snapshot that ends there."""
        rows = self._connection.rows(
            f"SELECT dsse_envelope::text FROM {SNAPSHOTS} s WHERE tenant_id = {self._tenant} AND s.to_seq = {to_seq}"
        )
        return payload_of(next((envelope for (envelope,) in rows), None))

    async def left_hashes(self, begin: int, end: int) -> bytes:
        """Leaf hashes of entries that left, by the stored tree."""
        first, last = begin // TILE_WIDTH, max(begin, end - 1) // TILE_WIDTH
        tiles = self._reader.tiles(0, first, last)
        hashes = b"".join(tiles.get(index, b"") for index in range(first, last + 1))
        return hashes[(begin - first * TILE_WIDTH) * HASH_BYTES : (end - first * TILE_WIDTH) * HASH_BYTES]

    async def entries(self, begin: int, end: int) -> tuple[bytes, bytes]:
        """Keys and leaf hashes of entries that are there and whose link has its form."""
        rows = self._connection.rows(
            f"SELECT job_id::text, chain_link::text FROM {LOG} WHERE tenant_id = {self._tenant}"
            f" AND {LOG}.seq > {begin} AND {LOG}.seq <= {end} ORDER BY {LOG}.seq"
        )
        whole = [row for row in rows if is_link(row[1])]
        hashes = leaf_hashes([bytes.fromhex(link) for _, link in whole])
        return keys_of([job_id for job_id, _ in whole]), b"".join(hashes)


def _untrusted(verdict: dict[str, Any]) -> dict[str, Any]:
    without_trust(verdict["verdicts"])
    return verdict


def state_of(connection: Connection, dsn: Dsn, snapshot_id: str | None) -> PostgresState:
    """The state of ``connection`` for tasks.

    Raises:
        ConfigurationError: tables are missing, or altered so that their rows cannot be found.
    """
    found = {(table, column): kind for table, column, kind in connection.rows(statements.COLUMN_TYPES)}
    if (problem := statements.unreadable(found)) is not None:
        raise ConfigurationError(f"the ledger in {dsn} cannot be read: {problem}")
    return PostgresState(dsn, snapshot_id, tuple(statements.altered(found).items()))


# --- a connection ---------------------------------------------------------------------------------


SCHEMES: Final = ("postgresql", "postgres")
_PASSWORD_OPTION: Final = re.compile(r"[?&](?:ssl)?password=([^&]+)")
_AS_URLS_SPELL: Final = re.compile(r"(?:[^%/?#@\[\]:]|%[0-9A-Fa-f]{2})*")


@dataclass(frozen=True, slots=True, repr=False)
class Dsn:
    """The address of a database; only ``url`` contains the password and is never shown."""

    url: str

    @classmethod
    def parse(cls, text: str) -> Dsn:
        """The database that ``text`` names.

        Raises:
            ConfigurationError: it is no URL of PostgreSQL. The error does not quote it, for it may hold a password.
        """
        text = secret_text(text, "the URL of the database")
        scheme, separator, _ = text.partition("://")
        if not separator or scheme not in SCHEMES:
            raise ConfigurationError("a database is named as postgresql://USER:PASSWORD@HOST/NAME")
        return cls(text)

    @property
    def shown(self) -> str:
        """The URL without password and without options."""
        scheme, _, rest = self.url.partition("://")
        login, _, place = self._parts(rest)
        user = login.partition(":")[0]
        return f"{scheme}://{f'{user}@' if user else ''}{place}"

    @staticmethod
    def _parts(rest: str) -> tuple[str, str, str]:
        """Login, ``@`` and host part of the text after ``://``; the login ends at the last ``@``."""
        base, _, _ = rest.partition("?")
        login, at, place = (base if {"@", "/"} & set(base) else rest).rpartition("@")
        return login, at, place.partition("?")[0]

    def __repr__(self) -> str:
        return self.shown

    def hide(self, text: str) -> str:
        """The driver's ``text`` in one line, with the URL and all parts of the password removed.

        If the password is not URL-encoded, libpq quotes pieces of it, so all quoted text is removed.
        """
        rest = self.url.partition("://")[2]
        password = self._parts(rest)[0].partition(":")[2]
        secrets = [self.url, *_PASSWORD_OPTION.findall(rest), password]
        for secret in (*secrets, *map(unquote, secrets)):
            text = text.replace(secret, "…") if secret else text
        if not _AS_URLS_SPELL.fullmatch(password):
            text = re.sub(r'"[^"]*"', '"…"', text)
        return " ".join(text.split())


_SNAPSHOT_GONE: Final = ("42704", "22023")
_NOT_ALLOWED: Final = ("28", "42501", "3D", "3F", "42P01", "0LP01")
"""SQLSTATEs, or classes of them, that the operator must resolve."""
_REFUSED_LOGIN: Final = re.compile(r"authentication failed|does not exist|no pg_hba|invalid|permission denied")
_DATABASE_ERROR: Final = (adbc_driver_manager.Error, OSError)


class Connection:
    """One connection over ADBC. Every database error becomes a ``LedgerError`` of one line."""

    def __init__(self, dsn: Dsn, raw: dbapi.Connection) -> None:
        self._dsn, self._raw = dsn, raw

    def begin(self, snapshot_id: str | None) -> None:
        """Begin the transaction of all reads, in the state of ``snapshot_id`` or the current one."""
        self.run(statements.PREPARE_SESSION)
        self.run(statements.BEGIN)
        if snapshot_id is not None:
            self.run(f"SET TRANSACTION SNAPSHOT {statements.literal(snapshot_id)}", imports=True)

    def rows(self, query: str) -> list[Row]:
        """All rows of a query with a short result."""
        return [row for batch in self.batches(query) for row in rows_of(batch)]

    def batches(self, query: str) -> Iterator[pa.RecordBatch]:
        """Stream the result of ``query``; batches are bounded and not empty."""
        options = {StatementOptions.BATCH_SIZE_HINT_BYTES.value: str(BATCH_BYTES_HINT)}
        with self._raw.cursor(adbc_stmt_kwargs=options) as cursor:
            for batch in self._streamed(cursor, query):
                for at in range(0, batch.num_rows, BATCH_ROWS_MAX):
                    yield batch.slice(at, BATCH_ROWS_MAX)

    def _streamed(self, cursor: dbapi.Cursor, query: str) -> Iterator[pa.RecordBatch]:
        try:
            cursor.execute(query)
            yield from cursor.fetch_record_batch()
        except _DATABASE_ERROR as error:
            raise _told(error, self._dsn) from None

    def run(self, statement: str, *, imports: bool = False) -> None:
        """Run a statement without result; ``imports`` if it imports a snapshot, which may be gone."""
        with self._raw.cursor() as cursor:
            try:
                cursor.execute(statement)
            except _DATABASE_ERROR as error:
                raise _told(error, self._dsn, imports=imports) from None


@contextmanager
def connected(dsn: Dsn) -> Iterator[Connection]:
    """A connection that is closed at the end, its session not prepared yet.

    Raises:
        DatabaseUnavailableError: PostgreSQL does not answer.
        ConfigurationError: it refuses the login.
    """
    # Imported here: it loads pandas, which takes as long as all other imports of a task.
    from adbc_driver_manager import dbapi

    try:
        # A connection closes its database too; the shared one stays open.
        unshared = cast(AdbcDatabase, SimpleNamespace(close=lambda: None))
        raw = dbapi.Connection(unshared, AdbcConnection(_database(dsn.url)), autocommit=True)
    except _DATABASE_ERROR as error:
        raise _told(error, dsn) from None
    try:
        yield Connection(dsn, raw)
    finally:
        with suppress(*_DATABASE_ERROR):
            raw.close()


@lru_cache(maxsize=DATABASES_HELD)
def _database(url: str) -> AdbcDatabase:
    """The types of PostgreSQL, shared by connections to ``url``. The driver connects once and takes 50 ms to load
    them, a hundred times the cost of a connection. It holds no connection."""
    database: AdbcDatabase = adbc_driver_postgresql.connect(url)
    return database


def _told(error: Exception, dsn: Dsn, *, imports: bool = False) -> LedgerError:
    """The error to raise for a database error, with what to do."""
    state, text = getattr(error, "sqlstate", None) or "", dsn.hide(str(error))
    if imports and state in _SNAPSHOT_GONE:
        return DatabaseUnavailableError(
            f"the snapshot of {dsn} that is read in is gone: PostgreSQL was restarted or failed over, the connection"
            " that held it has ended, or it was not read from for long; run the job or load the DataFrame again"
        )
    if state.startswith(_NOT_ALLOWED) or (not state and _REFUSED_LOGIN.search(text)):
        return ConfigurationError(
            f"the ledger in {dsn} cannot be read: {text}; name a database that `tally migrate` has made a ledger of,"
            " and a login that may SELECT from schema scheduler"
        )
    return DatabaseUnavailableError(f"the database {dsn} does not answer: {text}")
