"""The folder that nodes write to: which files are in it, and their lines, whatever somebody has put there.

A folder below the source that holds files is that of one node, known by its path. Nothing is followed that leads
elsewhere, nothing is read that is no plain file, and of a line no more is held than ``LINE_BYTES_MAX``.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from typing import Final, NamedTuple

from ledger.errors import ConfigurationError
from pipeline.stats.taken import parsed

SUFFIX: Final = ".ndjson"
LINE_BYTES_MAX: Final = 64 << 10
"""A node writes a few bytes more than 8 KiB at most."""
READ_BYTES: Final = 1 << 20

_NO_NAME: Final = "no name that a node gives to a file that is closed"
_NO_FILE: Final = "no plain file"
_LINK: Final = "a link, and none is followed"
_NO_TEXT: Final = "lies in a folder whose name is no UTF-8"


class Listing(NamedTuple):
    """What lies in the source."""

    nodes: dict[str, dict[tuple[int, int], str]]
    """Folder, relative to the source, to the names of its files by epoch and number."""
    strange: dict[str, str]
    """Path of what looks like a file of stats and is none, to the reason."""


class OpenedLine(NamedTuple):
    """One line without its end."""

    text: bytes
    is_whole: bool
    """False when it is longer than ``LINE_BYTES_MAX``, of which this is the beginning."""


def listed(source: str) -> Listing:
    """All that lies in ``source`` and in its folders; names that begin with a dot are still being written.

    Raises:
        ConfigurationError: one of them cannot be looked into.
    """
    listing = Listing({}, {})
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        try:
            with os.scandir(os.path.join(source, folder)) as found:
                entries = sorted(found, key=lambda entry: entry.name)
        except FileNotFoundError:
            if not folder:
                raise ConfigurationError(f"{source} is gone: name the folder that stats.dir names") from None
            continue
        except OSError as error:
            raise ConfigurationError(f"{os.path.join(source, folder)} cannot be looked into: {error}") from None
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                waiting.append(os.path.join(folder, entry.name))
            elif SUFFIX in entry.name or entry.is_symlink():
                _note(listing, folder, entry)
    return listing


def _note(listing: Listing, folder: str, entry: os.DirEntry[str]) -> None:
    path, name = os.path.join(folder, entry.name), parsed(entry.name)
    if entry.is_symlink():
        listing.strange[path] = _LINK
    elif not entry.is_file(follow_symlinks=False):
        listing.strange[path] = _NO_FILE
    elif name is None:
        listing.strange[path] = _NO_NAME
    elif not _is_text(folder):
        listing.strange[path] = _NO_TEXT
    else:
        names = listing.nodes.setdefault(folder, {})
        first = names.setdefault((name.epoch, name.number), entry.name)
        if first != entry.name:
            listing.strange[path] = f"{first} is the same file of the node"


def _is_text(folder: str) -> bool:
    try:
        folder.encode()
    except UnicodeEncodeError:
        return False
    return True


def lines_in(source: str, path: str) -> Iterator[OpenedLine]:
    """The lines of the file at ``path``, relative to ``source``; no part of the way there may be a link.

    Raises:
        FileNotFoundError: it is gone, or its folder is none any more.
        ConfigurationError: it cannot be read, or is no plain file any more.
    """
    try:
        with open(_opened(source, path), "rb", buffering=READ_BYTES) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigurationError(f"{os.path.join(source, path)} is no plain file any more")
            while line := file.readline(LINE_BYTES_MAX + 1):
                is_whole = len(line) <= LINE_BYTES_MAX or line.endswith(b"\n")
                yield OpenedLine(line.removesuffix(b"\n").removesuffix(b"\r"), is_whole)
                while not is_whole and (rest := file.readline(READ_BYTES)):
                    is_whole = rest.endswith(b"\n")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigurationError(f"{os.path.join(source, path)} cannot be read: {error.strerror}") from None


def _opened(source: str, path: str) -> int:
    *folders, name = path.split("/")
    at = os.open(source, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for folder in folders:
            try:
                below = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            except NotADirectoryError:
                raise FileNotFoundError(errno.ENOENT, "its folder is none any more", folder) from None
            os.close(at)
            at = below
        return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
    finally:
        os.close(at)
