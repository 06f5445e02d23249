"""Jobs that are kept in a folder while the ledger is away, by ``tally run`` or a client: docs/formats/spool.md.

One file holds the requests of one part of a job, with the Idempotency-Keys and the job id that were chosen before the
first of them was tried, so that sending them again adds nothing. A file is durable before it has its name, and is never
changed; only whoever holds the lock sends files and removes them.

    files of a spool <= FILES_MAX       bytes of a file <= FILE_BYTES_MAX       bytes of a spool <= BYTES_MAX

The bounds hold for all but ends: the end of a job always has room.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, NotRequired, TypedDict

import msgspec
import orjson

from ledger.errors import LedgerError
from wal.segment import store_file

FORMAT: Final = "tallystick.spool.v1"
FILES_MAX = 10_000
BYTES_MAX = 256 << 20
FILE_BYTES_MAX = 4 << 20
LOCK_WAIT_S = 60.0
"""How long a second one that sends waits for the first."""
LOCK_POLL_S = 0.1
REFUSED: Final = "refused"
"""Folder in the spool with what the ledger refused."""
_LOCK: Final = ".lock"
_NAME: Final = re.compile(r"(run-[0-9]{13}-[0-9a-f]{16})-([12])\.json")
_STEPS: Final = {"begin": "1", "event": "1", "end": "2"}

Part = Literal["begin", "event", "end"]


class SpoolError(LedgerError):
    """The spool cannot take or give a job; the text says why."""


class Request(TypedDict):
    """One request; a ``body`` that is text is sent as it is, byte for byte."""

    path: Annotated[str, msgspec.Meta(pattern=r"^/v1/jobs(/(?!\.\.?/)[A-Za-z0-9._:-]{1,128}/events)?$")]
    key: Annotated[str, msgspec.Meta(pattern="^[!-~]{1,255}$")]
    body: dict[str, Any] | str


class Kept(TypedDict):
    """What a file holds. ``name`` is how its name begins, where that is not the job id."""

    format: Literal["tallystick.spool.v1"]
    made_ms: int
    tenant_id: str
    job_id: Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9._:-]{1,128}$")]
    part: Part
    session: str | None
    requests: list[Request]
    name: NotRequired[str]


class Waiting(NamedTuple):
    """A file that waits to be sent: how its name begins, and where it is."""

    name: str
    path: Path


class Spool:
    """The spool in ``folder``, which is made when the first job is kept."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def prepare(self) -> None:
        """Make the folder if there is none.

        Raises:
            SpoolError: it cannot be one, or others could put files into it.
        """
        with self._failures():
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._check_owner()
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise SpoolError(f"spool {self.folder}: not writable")

    def keep(self, kept: Kept) -> None:
        """Keep one part of a job; durable when this returns.

        Raises:
            SpoolError: there is no room, or it cannot be written.
        """
        self.prepare()
        content = orjson.dumps(kept)
        if len(content) > FILE_BYTES_MAX:
            raise SpoolError(f"spool {self.folder}: job {kept['job_id']} has {len(content):,} bytes; too many")
        if kept["part"] != "end":
            self._check_room(len(content))
        self._write(self.folder / f"{kept['job_id']}-{_STEPS[kept['part']]}.json", content)

    def waiting(self) -> list[Waiting]:
        """What waits, in the order in which it is to be sent: of each job the beginning before the end.

        Raises:
            SpoolError: the folder cannot be read.
        """
        with self._failures():
            names = sorted(os.listdir(self.folder))
        found = ((_NAME.fullmatch(name), name) for name in names)
        return [Waiting(match[1], self.folder / name) for match, name in found if match is not None]

    def load(self, waiting: Waiting) -> Kept:
        """What a file holds.

        Raises:
            SpoolError: it is none of ours; the text says what is wrong.
            OSError: it cannot be read.
        """
        if waiting.path.is_symlink():
            raise SpoolError("not a regular file")
        with os.fdopen(os.open(waiting.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise SpoolError("not a regular file")
            if found.st_uid != os.geteuid():
                raise SpoolError(f"a file of another user, {found.st_uid}")
            content = file.read(FILE_BYTES_MAX + 1)
        try:
            kept: Kept = msgspec.json.decode(content[:FILE_BYTES_MAX], type=Kept)
        except (msgspec.DecodeError, RecursionError) as error:
            raise SpoolError(f"not a file of a spool: {error}") from None
        if waiting.path.name != f"{kept.get('name', kept['job_id'])}-{_STEPS[kept['part']]}.json":
            raise SpoolError(f"holds the {kept['part']} of job {kept['job_id']}, under another name")
        return kept

    def refuse(self, waiting: Waiting, why: str) -> Path:
        """Set a file aside, with the reason, where nobody tries to send it again; returns where it is."""
        folder = self.folder / REFUSED
        folder.mkdir(mode=0o700, exist_ok=True)
        path = folder / waiting.path.name
        try:
            held: object = self.load(waiting)
        except SpoolError:
            waiting.path.replace(path)
            self._write(path.with_suffix(".reason.txt"), why.encode())
            return path
        self._write(path, orjson.dumps({"refused": why, "file": held}, option=orjson.OPT_INDENT_2))
        waiting.path.unlink()
        return path

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of those who send.

        Raises:
            SpoolError: another one holds it for longer than LOCK_WAIT_S, there is no such folder, or others could put
                files into it.
        """
        self._check_owner()
        with self._failures():
            lock = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            give_up_at = time.monotonic() + LOCK_WAIT_S
            while not _lock(lock):
                if time.monotonic() > give_up_at:
                    raise SpoolError(f"spool {self.folder}: another tally run --flush is sending it")
                time.sleep(LOCK_POLL_S)
            yield
        finally:
            os.close(lock)

    def _check_owner(self) -> None:
        """Refuse a folder into which others could put files: they would be sent with the caller's token."""
        with self._failures():
            found = self.folder.stat()
        if found.st_uid != os.geteuid():
            raise SpoolError(f"spool {self.folder}: it belongs to another user, {found.st_uid}")
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise SpoolError(f"spool {self.folder}: others may write to it; chmod go-w {self.folder}")

    def _check_room(self, size_bytes: int) -> None:
        with self._failures(), os.scandir(self.folder) as entries:
            sizes = [entry.stat(follow_symlinks=False).st_size for entry in entries if _NAME.fullmatch(entry.name)]
        if len(sizes) >= FILES_MAX or sum(sizes) + size_bytes > BYTES_MAX:
            raise SpoolError(f"spool {self.folder} is full: {len(sizes):,} files, {sum(sizes):,} bytes; send them")

    def _write(self, path: Path, content: bytes) -> None:
        """A file that has its name once it is durable, and is readable by its owner alone."""
        with self._failures():
            store_file(path, content)

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """What the file system refuses, in our words."""
        try:
            yield
        except OSError as error:
            raise SpoolError(f"spool {self.folder}: {error.strerror}") from error


def _lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
