"""The staging folder of uploaded bundles until they are verified: beside the WAL, emptied at every start.

::

    <wal folder>/staging/<random>/NNN.tar        one folder an upload, removed when its import ends

A small bundle that came with the news of a peer is a file in memory.

Invariants::

    bytes of one upload <= bytes_max        files of one upload <= FILES_MAX
    a file that does not begin like a bundle is rejected before its first byte is written
    free space before anything is written >= reserve_bytes: a full disk would stop the WAL beside it for good
    bytes of a file from another ledger   <= the space that it and the reserve leave free, so that others fit too
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import shutil
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from app.runtime.tasks import Slots
from ledger.bundle.format import BLOCK_BYTES, entries_name, parse_tar_header
from ledger.errors import (
    BundleInvalidError,
    BundleRefusedError,
    InvalidInputError,
    NotABundleError,
    NotReadyError,
    UploadTooLargeError,
)
from signing.files import close_for_good, is_like_bundle, looks_like, open_regular
from signing.judging import refused

FILES_MAX: Final = 100
UPLOADS_AT_ONCE_MAX: Final = 2
"""Each may use ``bundle.import_bytes_max`` of disk, and as much again for sorting. Further uploads wait."""


def check_disk_room(folder: Path, reserve_bytes: int) -> int:
    """The free bytes on the disk of ``folder`` beyond ``reserve_bytes``.

    Raises:
        NotReadyError: fewer than ``reserve_bytes`` are free; the import must stop writing there.
    """
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < reserve_bytes:
        raise NotReadyError(
            f"the disk of the WAL has {free_bytes >> 20} MiB left, and bundle.disk_reserve_bytes keeps "
            f"{reserve_bytes >> 20} MiB of it for the WAL: make room there, then import again"
        )
    return free_bytes - reserve_bytes


class StagedFile(NamedTuple):
    """One file to import; ``name`` is the sender's name for it, ``digest`` its SHA-256 in hex."""

    name: str
    digest: str
    size_bytes: int
    open: Callable[[], BinaryIO]
    """Opens it, a regular file, for reading."""

    @classmethod
    def at(cls, path: Path, name: str, digest: str) -> StagedFile:
        """A file on the disk."""
        return cls(name, digest, path.stat().st_size, partial(open_regular, path))

    @classmethod
    def held(cls, name: str, data: bytes) -> StagedFile:
        """A small file in memory."""
        return cls(name, hashlib.sha256(data).hexdigest(), len(data), partial(_in_memory, data))


def _in_memory(data: bytes) -> BinaryIO:
    if not hasattr(os, "memfd_create"):
        file: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115
    else:
        file = os.fdopen(os.memfd_create("bundle"), "w+b")
    file.write(data)
    file.flush()
    return file


class Upload:
    """The files of one upload, written one after the other."""

    def __init__(self, folder: Path, bytes_max: int, reserve_bytes: int, *, is_fetched: bool = False) -> None:
        self.files: list[StagedFile] = []
        self.bytes = 0
        """Bytes of all files so far."""
        self._folder = folder
        self._bytes_max = bytes_max
        self._reserve_bytes = reserve_bytes
        self._is_fetched = is_fetched
        self._name = ""
        self._file: BinaryIO | None = None
        self._begins = bytearray()
        """The first block of the file, until it is whole."""
        self._hash = hashlib.sha256()

    def begin_file(self, name: str) -> None:
        """Begin a file; the previous one MUST have ended.

        Raises:
            InvalidInputError: the upload has too many files.
        """
        if len(self.files) == FILES_MAX:
            raise InvalidInputError(f"one import takes at most {FILES_MAX} files")
        assert self._file is None
        self._name, self._hash = name, hashlib.sha256()
        self._begins.clear()

    def write(self, data: bytes) -> None:
        """Append the next bytes of the file.

        Raises:
            UploadTooLargeError: the upload is over its bound.
            NotReadyError: the disk has reached its reserve.
            BundleRefusedError: the file is no bundle.
        """
        self._hash.update(data)
        if self._file is None:
            self._begins += data
            if len(self._begins) >= BLOCK_BYTES:
                self._check_first_block()
        self.bytes += len(data)
        if self.bytes > self._bytes_max:
            raise UploadTooLargeError(
                f"the files have more than {self._bytes_max} bytes, the bound of bundle.import_bytes_max; import fewer "
                "at a time, or raise it"
            )
        spare_bytes = check_disk_room(self._folder, self._reserve_bytes)
        if self._is_fetched and self.bytes > spare_bytes:
            raise UploadTooLargeError(
                f"{self._name} takes more than half of what bundle.disk_reserve_bytes leaves free on the disk of the "
                "WAL, the bound for a file from another ledger: make room there"
            )
        if self._file is not None:
            self._file.write(data)
        elif len(self._begins) >= BLOCK_BYTES:
            self._open()

    def end_file(self) -> None:
        """End the file. A file too short to be a bundle is judged later, with the others."""
        file = self._file or self._open()
        file.close()
        self.files.append(StagedFile.at(Path(file.name), self._name, self._hash.hexdigest()))
        self._file = None

    def _open(self) -> BinaryIO:
        self._file = (self._folder / f"{len(self.files):03d}.tar").open("xb")
        self._file.write(self._begins)
        return self._file

    def _check_first_block(self) -> None:
        try:
            if not is_like_bundle(bytes(self._begins)):
                raise NotABundleError(f"it looks like {looks_like(bytes(self._begins))}")
            name, _ = parse_tar_header(bytes(self._begins[:BLOCK_BYTES]))
            if name != entries_name(1):
                raise BundleInvalidError(f"its first member is {name!r}, not {entries_name(1)}")
        except BundleInvalidError as error:
            raise BundleRefusedError(
                f"{self._name} is no bundle, {error}",
                refused(error, self._hash.hexdigest(), len(self._begins)).to_json(),
                self._name,
            ) from error

    def close(self) -> None:
        """Close a file that has not ended."""
        if self._file is not None:
            close_for_good(self._file)


class Staging:
    """The staging folder of one node."""

    def __init__(self, wal_folder: Path, bytes_max: int, reserve_bytes: int) -> None:
        """Empties the folder: files of an earlier process were not imported, or repeating the call imports them."""
        self._folder = wal_folder / "staging"
        self._bytes_max = bytes_max
        self._reserve_bytes = reserve_bytes
        self._turns = Slots(UPLOADS_AT_ONCE_MAX, "uploads of bundles")
        shutil.rmtree(self._folder, ignore_errors=True)

    @asynccontextmanager
    async def upload(self) -> AsyncIterator[Upload]:
        """A slot for one upload, once one is free; leaving the context removes all its files.

        Raises:
            NotReadyError: the disk is too full to start an upload, or too many are under way.
        """
        async with self._turns.taken(), self._writing() as upload:
            yield upload

    @asynccontextmanager
    async def fetched(self, name: str, pieces: AsyncGenerator[bytes, None]) -> AsyncIterator[list[StagedFile]]:
        """One file, called ``name``, that another ledger sends in pieces; it uses no slot of the uploads.

        Raises:
            BundleRefusedError, InvalidInputError, NotReadyError, UploadTooLargeError: as for any upload.
        """
        async with self._writing(is_fetched=True) as upload, aclosing(pieces):
            upload.begin_file(name)
            async for piece in pieces:
                await asyncio.to_thread(upload.write, piece)
            upload.end_file()
            yield upload.files

    @asynccontextmanager
    async def _writing(self, *, is_fetched: bool = False) -> AsyncIterator[Upload]:
        folder = self._folder / secrets.token_hex(8)
        check_disk_room(self._folder.parent, self._reserve_bytes)
        folder.mkdir(mode=0o700, parents=True)
        upload = Upload(folder, self._bytes_max, self._reserve_bytes, is_fetched=is_fetched)
        try:
            yield upload
        finally:
            upload.close()
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
