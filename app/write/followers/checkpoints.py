"""The newest checkpoint of each tenant, stored beside the WAL where a database administrator cannot reach it.

All tenants share one journal, so that storing the checkpoints of hundreds costs one write and one fsync::

    <wal folder>/checkpoints.journal        lines of  <CRC-32 of the JSON, 8 hex digits> <JSON>

    {"version": 1, "tenants": n}            first line: the next n lines were written with it, one for each tenant
    {tenant: signed note, ...}              notes stored together; the last note of a tenant is valid

Lines are appended. The journal is rewritten and renamed once it has doubled since the last rewrite, and before the
first append of a process: then no line follows one that a crash tore. A chain that is shorter than its checkpoint or
differs from it is never extended.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from itertools import chain, count
from pathlib import Path
from threading import Lock
from typing import Any, Final, NamedTuple
from zlib import crc32

import orjson

from ledger.errors import InvalidInputError, SignatureError, StartRefusedError, reported_as
from ledger.names import is_readable_tenant
from objects import sync_folder
from signing import checkpoint
from signing.checkpoint import Checkpoint
from signing.files import read_regular
from wal.segment import store_file, write_fully

NAME: Final = "checkpoints.journal"
VERSION: Final = 1
SLACK_BYTES: Final = 1 << 20
"""Bytes that may be appended beyond the doubled size before the journal is rewritten."""


class CheckpointJournal:
    """The checkpoints of one node. ``store`` may be called from any thread."""

    def __init__(self, wal_folder: Path) -> None:
        """Read the stored notes; nothing is written yet.

        Raises:
            StartRefusedError: it cannot be read, or is damaged elsewhere than at its end.
        """
        self._path = wal_folder / NAME
        self._storing = Lock()
        self._notes = _read(self._path) if self._path.exists() else {}
        self._left: _Left | None = None
        """The journal as last written by this process; None if its end is not known."""
        self._bytes_anew = 0
        """Size of the journal after the last rewrite."""

    def load(self, tenant_id: str) -> str | None:
        """The tenant's newest note, None before the first."""
        return self._notes.get(tenant_id)

    def size(self, tenant_id: str) -> int:
        """Tree size in the second line of the tenant's newest note, 0 before the first.

        Raises:
            SignatureError: the note is not a checkpoint.
        """
        with reported_as(
            SignatureError, f"what {self._path} has of tenant {tenant_id} is no checkpoint", IndexError, ValueError
        ):
            return 0 if (text := self.load(tenant_id)) is None else int(text.split("\n")[1])

    def newest(self, tenant_id: str) -> Checkpoint | None:
        """The checkpoint of the tenant's newest note, None before the first. It is trusted because of its place.

        Raises:
            SignatureError: the note is not a checkpoint.
        """
        text = self.load(tenant_id)
        return None if text is None else checkpoint.read(text)

    def load_all(self) -> dict[str, str]:
        """Newest notes by tenant."""
        return dict(sorted(self._notes.copy().items()))

    def store(self, notes: Mapping[str, str]) -> None:
        """Replace the notes of these tenants, durable on return. A crash before leaves all old or all new.

        Raises:
            InvalidInputError: a name, which comes from the database, cannot be a tenant's.
            OSError: the write failed; nothing is replaced.
        """
        if wrong := [tenant_id for tenant_id in notes if not is_readable_tenant(tenant_id)]:
            raise InvalidInputError(f"no tenant can be named {wrong[0]!r}; that row was not written by this service")
        with self._storing:
            left, self._left = self._left, None
            if left is None or left.size > 2 * self._bytes_anew + SLACK_BYTES or not self._append(left, _line(notes)):
                self._write_anew({**self._notes, **notes})
            self._notes.update(notes)

    def set_aside(self) -> None:
        """Quarantine all notes in a separate file and start with none; nothing is deleted."""
        names = (self._path.with_name(f"checkpoints-{number}.journal") for number in count(1))
        aside = next(path for path in names if not path.exists())
        self.store({})
        self._path.rename(aside)
        sync_folder(self._path.parent)
        self._notes, self._left = {}, None

    def _append(self, left: _Left, line: bytes) -> bool:
        """Append the line; False if the journal is not as it was ``left``: it was moved or changed."""
        with suppress(FileNotFoundError), self._path.open("r+b", buffering=0) as file:
            if _Left.of(os.fstat(file.fileno())) != left:
                return False
            write_fully(file.fileno(), (line,), left.size)
            os.fdatasync(file.fileno())
            self._left = left._replace(size=left.size + len(line))
            return True
        return False

    def _write_anew(self, notes: Mapping[str, str]) -> None:
        lines = [
            _line({"version": VERSION, "tenants": len(notes)}),
            *(_line({tenant_id: text}) for tenant_id, text in notes.items()),
        ]
        store_file(self._path, b"".join(lines))
        self._left = _Left.of(self._path.stat())
        self._bytes_anew = self._left.size


class _Left(NamedTuple):
    """Identity and size of the file."""

    device: int
    inode: int
    size: int

    @classmethod
    def of(cls, found: os.stat_result) -> _Left:
        return cls(found.st_dev, found.st_ino, found.st_size)


def _line(value: Mapping[str, object]) -> bytes:
    text = orjson.dumps(value)
    return b"%08x %b\n" % (crc32(text), text)


def _read(path: Path) -> dict[str, str]:
    try:
        lines = read_regular(path).split(b"\n")
    except OSError as error:
        raise StartRefusedError(f"{path} cannot be read: {error}; {_WHAT_TO_DO}") from error
    values = [_value(line) for line in lines if line]
    head = values[0] if values else None
    if head is None or head.get("version") != VERSION or type(head.get("tenants")) is not int:
        raise StartRefusedError(f"{path} is no journal of checkpoints of version {VERSION}; {_WHAT_TO_DO}")
    whole = [value for value in values if value is not None]
    # A crash tears only the last line, and none of the lines written with the first.
    if len(whole) < head["tenants"] + 1 or values[: len(whole)] != whole or len(values) > len(whole) + 1:
        at = next((number for number, value in enumerate(values, 1) if value is None), len(values))
        raise StartRefusedError(f"{path} is damaged at line {at}; {_WHAT_TO_DO}")
    notes = chain.from_iterable(value.items() for value in whole[1:])
    return {name: text for name, text in notes if is_readable_tenant(name) and isinstance(text, str)}


def _value(line: bytes) -> dict[str, Any] | None:
    """The value of the line, None if it is torn."""
    try:
        value = orjson.loads(line[9:]) if line[:9] == b"%08x " % crc32(line[9:]) else None
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


_WHAT_TO_DO: Final = "restore it, or move it away once tally verify has found every chain whole"
