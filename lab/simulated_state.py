"""State of the commitment machine in a file, so that a simulation that is killed goes on where it stored it last."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, MutableMapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from ledger.errors import InvalidInputError
from ledger.machines.commitment_state import LiveState, Neighbours, NodeState
from ledger.machines.promises import RULES, Commitment

_VALUES: Final[tuple[Any, ...]] = (Commitment, int, NodeState, int, Neighbours, int)
"""Of the tables of ``LiveState``, in their order."""
_FORM: Final = 1
"""``user_version`` of the file. A file of form 0 was written before rules had versions."""
_ENCODE: Final = msgspec.msgpack.Encoder().encode


class Taken(NamedTuple):
    """The first ``entries`` of a log, what tells them from those of another, and what was said of them."""

    entries: int
    digest: bytes
    summary: bytes


NOTHING: Final = Taken(0, b"", b"")


class StoredTable(MutableMapping[Any, Any]):
    """One table of a file; changes count once the file's transaction is committed."""

    def __init__(self, file: sqlite3.Connection, name: str, value: Any) -> None:
        self._file = file
        self._decode = msgspec.msgpack.Decoder(value).decode
        file.execute(f"CREATE TABLE IF NOT EXISTS {name} (key BLOB PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID")
        self._get = f"SELECT value FROM {name} WHERE key = ?"  # noqa: S608 (names of our own)
        self._put = f"INSERT OR REPLACE INTO {name} VALUES (?, ?)"  # noqa: S608
        self._drop = f"DELETE FROM {name} WHERE key = ?"  # noqa: S608
        self._keys = f"SELECT key FROM {name} ORDER BY key"  # noqa: S608
        self._count = f"SELECT count(*) FROM {name}"  # noqa: S608

    def __getitem__(self, key: Any) -> Any:
        row = self._file.execute(self._get, (_ENCODE(key),)).fetchone()
        if row is None:
            raise KeyError(key)
        return self._decode(row[0])

    def __setitem__(self, key: Any, value: Any) -> None:
        self._file.execute(self._put, (_ENCODE(key), _ENCODE(value)))

    def __delitem__(self, key: Any) -> None:
        if not self._file.execute(self._drop, (_ENCODE(key),)).rowcount:
            raise KeyError(key)

    def __iter__(self) -> Iterator[Any]:
        for (key,) in self._file.execute(self._keys):
            found = msgspec.msgpack.decode(key)
            yield tuple(found) if isinstance(found, list) else found

    def __len__(self) -> int:
        count: int = self._file.execute(self._count).fetchone()[0]
        return count


class StoredState:
    """The state, and how far the log was taken."""

    def __init__(self, file: sqlite3.Connection) -> None:
        self._file = file
        names = LiveState._fields
        self.live = LiveState(*(StoredTable(file, name, value) for name, value in zip(names, _VALUES, strict=True)))
        file.execute("CREATE TABLE IF NOT EXISTS taken (entries INTEGER, digest BLOB, summary BLOB)")
        (form,) = file.execute("PRAGMA user_version").fetchone()
        if form < _FORM and self.taken().entries:
            self.live.rules[RULES] = 1
        file.execute(f"PRAGMA user_version = {_FORM}")

    def taken(self) -> Taken:
        """How far the log was taken."""
        row = self._file.execute("SELECT entries, digest, summary FROM taken").fetchone()
        return NOTHING if row is None else Taken(*row)

    def commit(self, taken: Taken) -> None:
        """All up to there is taken."""
        self._file.execute("DELETE FROM taken")
        self._file.execute("INSERT INTO taken VALUES (?, ?, ?)", taken)
        self._file.commit()


@contextmanager
def stored_state(path: Path) -> Iterator[StoredState]:
    """The state that ``path`` holds, a new one where there is none.

    Raises:
        InvalidInputError: the file is something else.
    """
    try:
        with closing(sqlite3.connect(path, isolation_level="IMMEDIATE")) as file:
            file.execute("PRAGMA journal_mode = WAL")
            yield StoredState(file)
    except sqlite3.DatabaseError as error:
        raise InvalidInputError(f"--state {path}: {error}") from None
