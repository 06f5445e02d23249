"""The storage of an archive: a folder, or a bucket of S3, Google Cloud or Azure, by its URL; objects are written once.

The first writer of a name takes it, and its object is whole from then on. In a bucket this is the store's conditional
put. In a folder a file is written under ``.writing``, synced, and linked to its name; folders are synced too. A killed
writer leaves an unlocked file under ``.writing``, which the next run removes. Credentials come from the usual places of
the environment, such as ``AWS_ACCESS_KEY_ID``.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import LocalStore, from_url

from ledger.errors import ArchiveInvalidError, ArchiveUnavailableError, ConfigurationError, reported_as
from objects import sync_folder
from objects.locked import LockedBucket, ObjectLock

if TYPE_CHECKING:
    from obstore.store import ObjectStore

BUCKET_SCHEMES: Final = ("s3", "gs", "az")
READ_BYTES: Final = 1 << 20
WRITING: Final = ".writing"

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


class ArchiveStore:
    """Objects below one URL. Cheap to construct, so each task has its own; safe for threads."""

    def __init__(self, url: str, lock: ObjectLock | None = None) -> None:
        """``url`` is a path, or begins with ``file://``, ``s3://``, ``gs://`` or ``az://``. With ``lock``, for S3
        alone, each object that ``create`` writes is locked.

        Raises:
            ConfigurationError: it is none of these, or its settings in the environment are wrong.
        """
        self._folder = _folder_of(url)
        self.url = url if _SCHEME.match(url) else str(self._folder)
        """The given URL; a path is made absolute, because tasks run in other folders."""
        self._opened: ObjectStore | None = None
        if self._folder is None and not url.startswith(tuple(f"{scheme}://" for scheme in BUCKET_SCHEMES)):
            raise ConfigurationError(
                f"{url} is no place for an archive: give a folder, or s3://, gs:// or az:// and more"
            )

        self._synced: set[Path] = set()
        """Folders whose own names were made durable since ``prepare``."""
        self.lock = lock
        self._locked = None if lock is None else LockedBucket(url, lock)

    def prepare(self) -> None:
        """Create the folder, and remove files of killed writers; does nothing for a bucket.

        Raises:
            ArchiveUnavailableError: the folder cannot be made.
        """
        if self._folder is None:
            self._store()
            return
        self._synced.clear()  # Another disk may be there by now.
        with reported_as(ArchiveUnavailableError, f"{self.url} cannot be written to", OSError):
            (self._folder / WRITING).mkdir(parents=True, exist_ok=True)
            for left in (self._folder / WRITING).iterdir():
                _remove_if_left(left)

    # --- writing --------------------------------------------------------------------------------------

    def create(self, name: str, source: IO[bytes]) -> bool:
        """Write all of ``source``, from its beginning, under ``name``; whether it was free. It is durable on return.

        If the name was taken, nothing is written, and the caller MUST compare the existing object.

        Raises:
            ArchiveInvalidError: the name is that of a folder, or of anything else but a file.
            ArchiveUnavailableError: it cannot be written.
        """
        source.seek(0)
        with self._object(name):
            if self._folder is not None:
                return self._link_new(self._folder, name, source)
            if self._locked is not None:
                return self._locked.create(name, source.read())
            try:
                obstore.put(self._store(), name, source.read(), mode="create")
            except AlreadyExistsError:
                return False
        return True

    def replace(self, name: str, data: bytes) -> None:
        """Write ``data`` under ``name``, whether or not it is taken: for what readers may believe or not.

        Raises:
            ArchiveInvalidError: the name is that of a folder, or of anything else but a file.
            ArchiveUnavailableError: it cannot be written.
        """
        with self._object(name):
            obstore.put(self._store(), name, data)

    # --- reading --------------------------------------------------------------------------------------

    def read(self, name: str, bytes_max: int) -> bytes | None:
        """The object, None if there is none.

        Raises:
            ArchiveInvalidError: it is larger than ``bytes_max``, or no regular file.
            ArchiveUnavailableError: it cannot be read.
        """
        with self._object(name):
            try:
                with self._content(name) as (size, chunks):
                    if size > bytes_max:
                        raise ArchiveInvalidError(f"{name} has {size} bytes, and at most {bytes_max} are allowed")
                    return b"".join(chunks)
            except FileNotFoundError:
                return None

    def chunks(self, name: str) -> Iterator[bytes]:
        """The object, about ``READ_BYTES`` at a time.

        Raises:
            ArchiveInvalidError: there is none, or no regular file.
            ArchiveUnavailableError: it cannot be read.
        """
        with self._object(name):
            try:
                with self._content(name) as (_, chunks):
                    yield from chunks
            except FileNotFoundError:
                raise ArchiveInvalidError(f"{name} is missing from the archive") from None

    def digest(self, name: str) -> tuple[str, int]:
        """SHA-256, in hex, and size of the object; raises what ``chunks`` raises."""
        digest, size = sha256(), 0
        for chunk in self.chunks(name):
            digest.update(chunk)
            size += len(chunk)
        return digest.hexdigest(), size

    def folders(self, name: str) -> list[str]:
        """Names of the folders directly below ``name``, sorted.

        Raises:
            ArchiveUnavailableError: they cannot be listed.
        """
        with self._named(name):
            found = obstore.list_with_delimiter(self._store(), name)["common_prefixes"]
            return sorted(each.removeprefix(f"{name}/") for each in found)

    def objects(self, name: str) -> list[str]:
        """The names of all objects below ``name``, sorted.

        Raises:
            ArchiveUnavailableError: it cannot be listed.
        """
        with self._named(name):
            found = [each for page in obstore.list(self._store(), name) for each in page]
        return sorted(each["path"].removeprefix(f"{name}/") for each in found)

    # --- the store ------------------------------------------------------------------------------------

    def _link_new(self, folder: Path, name: str, source: IO[bytes]) -> bool:
        """Create a file of ``source`` that gets its name once it is whole and synced; whether the name was free."""
        final = folder / name
        is_new = not final.exists()
        if is_new:
            with _locked_file(folder / WRITING) as file:
                shutil.copyfileobj(source, file, READ_BYTES)
                file.flush()
                os.fsync(file.fileno())
                final.parent.mkdir(parents=True, exist_ok=True)
                try:
                    os.link(file.name, final)
                except FileExistsError:
                    is_new = False
        # The process that linked it may have been killed before syncing.
        self._sync(final.parent, folder)
        return is_new

    def _sync(self, lowest: Path, highest: Path) -> None:
        """Make the names in ``lowest`` durable, and its own below ``highest`` and in the folder of that."""
        sync_folder(lowest)
        for folder in (lowest, *lowest.parents):
            if folder in self._synced or folder == highest.parent:
                return
            sync_folder(folder.parent)
            self._synced.add(folder)

    @contextlib.contextmanager
    def _content(self, name: str) -> Iterator[tuple[int, Iterator[bytes]]]:
        """Size and content of the object; raises FileNotFoundError if there is none."""
        if self._folder is None:
            found = obstore.get(self._store(), name)
            yield found.meta["size"], (bytes(chunk) for chunk in found.stream(min_chunk_size=READ_BYTES))
            return
        # Directly: the client of buckets has a thread for each read of a file.
        with (self._folder / name).open("rb", buffering=0) as file:
            yield os.fstat(file.fileno()).st_size, iter(partial(file.read, READ_BYTES), b"")

    def _store(self) -> ObjectStore:
        if self._opened is None:
            try:
                self._opened = LocalStore(self._folder) if self._folder is not None else from_url(self.url)
            except BaseError as error:
                raise ConfigurationError(f"{self.url} cannot be used: {_first_line(error)}") from error
        return self._opened

    @contextlib.contextmanager
    def _object(self, name: str) -> Iterator[None]:
        """As ``_named``; rejects anything but a regular file, because reading a FIFO would block for ever."""
        with self._named(name):
            path = self._folder / name if self._folder is not None else None
            if path is not None and path.exists() and not path.is_file():
                what = "a folder" if path.is_dir() else "not a regular file"
                raise ArchiveInvalidError(f"{name} of the archive is {what}")
            yield

    @contextlib.contextmanager
    def _named(self, name: str) -> Iterator[None]:
        try:
            yield
        except (BaseError, OSError) as error:
            raise ArchiveUnavailableError(f"{name} of the archive {self.url}: {_first_line(error)}") from error


def _folder_of(url: str) -> Path | None:
    """The folder that ``url`` names, None if it names something else."""
    scheme = _SCHEME.match(url)
    if scheme is None:
        return Path(url).absolute()
    if scheme[1].lower() != "file":
        return None
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise ConfigurationError(f"{url} names no folder of this machine: write file:///folder")
    return Path(unquote(parts.path))


@contextlib.contextmanager
def _locked_file(writing: Path) -> Iterator[IO[bytes]]:
    """A new locked file in ``writing`` that no other run removes; its name is removed afterwards."""
    writing.mkdir(parents=True, exist_ok=True)
    while True:
        path = writing / f"{os.getpid()}-{secrets.token_hex(8)}"
        with path.open("xb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                if os.fstat(file.fileno()).st_nlink:
                    yield file
                    return
                # A starting run took it for a dead writer's file, before it was locked.
            finally:
                path.unlink(missing_ok=True)


def _remove_if_left(temporary: Path) -> None:
    """Remove a file whose writer is gone, that is, whose lock is free."""
    if not temporary.is_file():
        return
    with contextlib.suppress(FileNotFoundError, BlockingIOError), temporary.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        temporary.unlink()


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
