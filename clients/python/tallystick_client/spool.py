"""The spool: a folder of requests that are durable before they are sent (docs/formats/spool.md).

A file holds the requests of one part of a job, with their Idempotency-Keys, so that sending them again adds nothing. It
gets its name once it is durable, and never changes. The holder of the lock sends files in the order of their names, and
removes each once the ledger accepted it.

    files of a spool <= FILES_MAX       bytes of a file <= FILE_BYTES_MAX       bytes of a spool <= BYTES_MAX

The bounds hold for all but ends: the end of a job always has room.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, NotRequired, TypedDict, cast

from tallystick_client.errors import SpoolError

FORMAT: Final = "tallystick.spool.v1"
FILES_MAX = 10_000
BYTES_MAX = 256 << 20
FILE_BYTES_MAX = 4 << 20
KEYS_REMEMBERED_MS = 6 * 24 * 3600 * 1000
"""The ledger recognises a repeated request for seven days; one day is left for clock differences."""
REFUSED: Final = "refused"
_NAME: Final = re.compile(r"run-([0-9]{13})-[0-9a-f]{16}-[12]\.json")
KEY: Final = re.compile("[!-~]{1,255}")
"""An Idempotency-Key."""
_PATH: Final = re.compile(r"/v1/jobs(/(?!\.\.?/)[A-Za-z0-9._:-]{1,128}/events)?")

Part = Literal["begin", "event", "end"]


class Request(TypedDict):
    """One POST; ``body`` is the exact text sent, by whose bytes the ledger recognises a repetition."""

    path: str
    key: str
    body: str
    traceparent: NotRequired[str]
    """The span that it is of, sent in the header: a repetition in another span is the same request."""


class Kept(TypedDict):
    """The content of a file."""

    format: str
    made_ms: int
    tenant_id: str
    job_id: str
    part: Part
    session: str | None
    requests: list[Request]
    name: NotRequired[str]


@dataclass(eq=False)
class Spool:
    """The spool in ``folder``, which is created with the first file. All methods raise ``SpoolError``."""

    folder: Path

    def keep(self, kept: Kept) -> Path:
        """Store one part of a job; it is durable when this returns its path."""
        with self._failures():
            self._make_own()
            waiting = self.waiting()
            # After all waiting files, even if the clock went back.
            newest_ms = max((int(path.name[4:17]) for path in waiting), default=0)
            name = f"run-{max(time.time_ns() // 1_000_000, newest_ms + 1):013d}-{secrets.token_hex(8)}"
            content = json.dumps({**kept, "name": name}).encode()
            if len(content) > FILE_BYTES_MAX:
                raise SpoolError(f"spool {self.folder}: job {kept['job_id']} has {len(content):,} bytes; too many")
            if kept["part"] != "end":
                self._check_room(waiting, len(content))
            path = self.folder / f"{name}-{2 if kept['part'] == 'end' else 1}.json"
            self._store(path, content)
            return path

    def waiting(self) -> list[Path]:
        """The waiting files, in the order of sending."""
        with self._failures():
            names = sorted(os.listdir(self.folder)) if self.folder.exists() else []
        return [self.folder / name for name in names if _NAME.fullmatch(name)]

    def load(self, path: Path) -> Kept | None:
        """The content of a file, None when it is gone; a ``SpoolError`` if it is no file of a spool.

        Raises:
            OSError: it cannot be read now: another user owns it, or the process has no descriptor left.
        """
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENXIO):
                raise
            raise SpoolError("not a regular file") from error
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if found.st_uid != os.geteuid():
                raise SpoolError(f"a file of another user, {found.st_uid}")
            content = file.read(FILE_BYTES_MAX + 1) if stat.S_ISREG(found.st_mode) else b""
        try:
            kept: Any = json.loads(content[:FILE_BYTES_MAX])
            name = kept.get("name", kept["job_id"])
            is_ours = (
                kept["format"] == FORMAT
                and path.name == f"{name}-{2 if kept['part'] == 'end' else 1}.json"
                and kept["part"] in ("begin", "event", "end")
                and all(isinstance(kept[field], str) for field in ("tenant_id", "job_id"))
                and all(
                    _PATH.fullmatch(each["path"])
                    and KEY.fullmatch(each["key"])
                    and each["body"]
                    and KEY.fullmatch(each.get("traceparent", "-"))
                    for each in kept["requests"]
                )
            )
            kept["made_ms"] + 0
            for each in kept["requests"]:
                if not isinstance(each["body"], str):
                    # From a sender that writes objects, which it sends without spaces, in UTF-8.
                    each["body"] = json.dumps(each["body"], ensure_ascii=False, separators=(",", ":"))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise SpoolError(f"not a file of a spool: {error}") from None
        if not is_ours:
            raise SpoolError("not a file of a spool, or under another's name")
        return cast(Kept, kept)

    def has_end_of(self, tenant_id: str, job_id: str) -> bool:
        """Whether the end of this job waits."""
        for path in self.waiting():
            if path.name.endswith("-2.json"):
                with suppress(SpoolError, OSError):
                    kept = self.load(path)
                    if kept is not None and (kept["tenant_id"], kept["job_id"]) == (tenant_id, job_id):
                        return True
        return False

    def remove(self, path: Path) -> None:
        """Remove a file that the ledger accepted."""
        with self._failures():
            path.unlink(missing_ok=True)

    def refuse(self, path: Path, why: str) -> Path:
        """Quarantine a file, with the reason, so that it is not sent again; returns its new path."""
        with self._failures():
            refused = self.folder / REFUSED
            refused.mkdir(mode=0o700, exist_ok=True)
            target = refused / path.name
            try:
                held: object = self.load(path)
            except SpoolError:
                path.replace(target)
                self._store(target.with_suffix(".reason.txt"), why.encode())
                return target
            self._store(target, json.dumps({"refused": why, "file": held}, indent=2).encode())
            path.unlink()
            return target

    def why_refused(self, path: Path) -> str | None:
        """Why the file that waited as ``path`` was quarantined, None if it was not."""
        with self._failures():
            try:
                aside = json.loads((self.folder / REFUSED / path.name).read_bytes())
            except (FileNotFoundError, ValueError):
                return None
        return str(aside["refused"]) if isinstance(aside, dict) and "refused" in aside else None

    def lock(self) -> BinaryIO | None:
        """Take the senders' lock: a file to close, None while another sender has it.

        It is a file, not a descriptor, so that the lock of a cancelled caller is released with it.
        """
        with self._failures():
            self._make_own()
            descriptor = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        lock = os.fdopen(descriptor, "r+b", buffering=0)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            return None
        return lock

    def _make_own(self) -> None:
        """Make the folder if there is none. Reject one that other users can write to: their files would be sent with
        the caller's token."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = self.folder.stat()
        if found.st_uid != os.geteuid():
            raise SpoolError(f"spool {self.folder}: it belongs to another user, {found.st_uid}")
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise SpoolError(f"spool {self.folder}: others may write to it; chmod go-w {self.folder}")

    def _check_room(self, waiting: list[Path], more_bytes: int) -> None:
        size_bytes = 0
        for path in waiting:
            with suppress(FileNotFoundError):
                size_bytes += path.lstat().st_size
        if len(waiting) >= FILES_MAX or size_bytes + more_bytes > BYTES_MAX:
            raise SpoolError(f"spool {self.folder} is full: {len(waiting):,} files, {size_bytes:,} bytes; send them")

    def _store(self, path: Path, content: bytes) -> None:
        """Write a file that gets its name once it is durable, readable only by its owner."""
        unnamed = path.with_name(f".{path.name}.new")
        descriptor = os.open(unnamed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(descriptor)
            unnamed.rename(path)
        except OSError:
            # A partial file would take the last space of a full disk from later files.
            with suppress(OSError):
                unnamed.unlink()
            raise
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Turn errors of the file system into ``SpoolError``."""
        try:
            yield
        except OSError as error:
            raise SpoolError(f"spool {self.folder}: {error.strerror}") from error


def is_in_memory_of_keys(kept: Kept) -> bool:
    """Whether the ledger still recognises its requests by their keys."""
    return 0 <= time.time_ns() // 1_000_000 - kept["made_ms"] < KEYS_REMEMBERED_MS
