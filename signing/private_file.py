"""Files that hold a secret: made whole and for one user, read only where no other user can.

Such a file appears whole or not at all, mode 0600: written and fsynced under another name, linked into place (which
never overwrites), folder fsynced. A file that group or others can reach is refused, and no rights are ever changed.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote, urlsplit

from ledger.errors import ConfigurationError

FILE_BYTES_MAX = 16 * 2**10
FILE_MODE = 0o600

Key = TypeVar("Key")

_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*):")


def path_of(uri: str) -> Path:
    """The file that a key URI names.

    Raises:
        ConfigurationError: the URI is of a kind that is not supported, or names what no file can be called.
    """
    if "\0" in unquote(uri):
        raise ConfigurationError(f"key URI {uri!r} holds a NUL, which no path can")
    scheme = _SCHEME.match(uri)
    if scheme is None:
        return Path(uri)
    parts = urlsplit(uri)
    if scheme[1].lower() != "file" or parts.netloc not in ("", "localhost") or not parts.path:
        raise ConfigurationError(f"key URI {uri!r} is not supported; give a path or file:/path/to/key.pem")
    return Path(unquote(parts.path))


def read(path: Path) -> bytes:
    """The content of ``path``.

    Raises:
        ConfigurationError: it cannot be read, is not a regular file, others can reach it, or it is too long for a key.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode):
                raise ConfigurationError(f"key file {path} is not a regular file")
            if mode & 0o077:
                raise ConfigurationError(
                    f"key file {path} has mode {stat.S_IMODE(mode):04o}, so others can use this key; "
                    f"if it may have been read, make a new one, else run: chmod 600 {path}"
                )
            content = os.read(descriptor, FILE_BYTES_MAX + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ConfigurationError(f"key file {path} cannot be read: {error.strerror}") from error
    if len(content) > FILE_BYTES_MAX:
        raise ConfigurationError(f"key file {path} is over {FILE_BYTES_MAX} bytes, too much for a key")
    return content


def make(path: Path, content: bytes) -> None:
    """Make ``path`` with ``content``, and the folders that are missing, for this user alone.

    When it returns, the file survives a power loss.

    Raises:
        ConfigurationError: there is such a file, which was left as it is, or it cannot be made; nothing is left behind.
    """
    try:
        make_folder(path.parent)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.new")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            with os.fdopen(os.open(temporary, flags, FILE_MODE), "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.link(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(path.parent)
    except FileExistsError as error:
        raise ConfigurationError(f"key file {path} exists already; it was left as it is") from error
    except OSError as error:
        raise ConfigurationError(f"key file {path} cannot be made: {error.strerror}") from error


def load_or_make(path: Path, load: Callable[[], Key], make: Callable[[], Key]) -> Key:
    """What is in ``path``, made if there is no file yet; of several callers at once one makes it, and all use it."""
    if not os.path.exists(path):
        try:
            return make()
        except ConfigurationError:
            if not os.path.exists(path):
                raise
    return load()


def make_folder(folder: Path) -> None:
    """Make ``folder`` and those above it that are missing, for this user alone; they survive a power loss."""
    if folder.exists():
        return
    make_folder(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Have the names in ``folder`` survive a power loss."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
