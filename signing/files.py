"""Opening files, writing files that appear only once they are whole, and files with a secret.

Keys, tokens, certificates, bundles, receipts and files in a folder of the node are opened by ``open_regular``, because
reading a FIFO or a device in their place would block for ever. Output may go to either (``whole_file``).

A file is written and fsynced under another name, then renamed, and its folder is fsynced. A file with a secret has mode
0600 and is linked into place, which never overwrites. If group or others can access it, it is rejected; its mode is
never changed.

The first bytes of a file decide whether it is meant to be a bundle or a receipt, and what it looks like otherwise.

A damaged bundle is judged and reported as damaged; a picture given instead of a bundle is not judged. The test asks for
so little that damage to a few bytes does not change the kind of a file::

    bundle     begins with the name of the first member, except at most 4 of its 24 bytes; or is a tar archive whose
               first 4096 bytes name a member of a bundle
    receipt    has "receipt" or "anchors" among its first bytes, as JSON names them
"""

from __future__ import annotations

import codecs
import errno
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import IO, BinaryIO, Final, TypeVar
from urllib.parse import unquote, urlsplit

from ledger.bundle.format import EVIDENCE, TAIL, entries_name
from ledger.errors import ConfigurationError, refuse, reported_as
from objects import sync_folder

FILE_BYTES_MAX = 16 * 2**10
FILE_MODE = 0o600
_UNFINISHED = ".new"

Key = TypeVar("Key")

_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*):")


def close_for_good(file: IO[bytes]) -> None:
    """Close a temporary file. Errors are ignored: data that a full disk did not take is not needed any more."""
    with suppress(OSError):
        file.close()


def path_of(uri: str) -> Path:
    """The file that a key URI names.

    Raises:
        ConfigurationError: the scheme of the URI is not supported, or its path is not a valid file name.
    """
    if "\0" in unquote(uri):
        raise ConfigurationError(f"key URI {uri!r} holds a NUL, which no path can")
    if (scheme := _SCHEME.match(uri)) is None:
        return Path(uri)
    parts = urlsplit(uri)
    if scheme[1].lower() != "file" or parts.netloc not in ("", "localhost") or not parts.path:
        raise ConfigurationError(f"key URI {uri!r} is not supported; give a path or file:/path/to/key.pem")
    return Path(unquote(parts.path))


def open_regular(path: str | Path) -> BufferedReader:
    """The file ``path``, open for reading; anything but a regular file is rejected without blocking.

    Raises:
        OSError: it cannot be opened, or is a folder, FIFO, socket or device; ``strerror`` says which.
    """
    if not stat.S_ISREG(mode := os.stat(path).st_mode):
        found = next((name for is_kind, name in _KINDS if is_kind(mode)), "a file of another kind")
        raise OSError(errno.EINVAL, f"it is not a regular file, but {found}", str(path))
    # Without blocking, even if another file was put there since.
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY), "rb")


def read_regular(path: str | Path) -> bytes:
    """The content of the file ``path``, as ``open_regular`` opens it."""
    with open_regular(path) as file:
        return file.read()


def read_bounded(path: Path, bytes_max: int, what: str, too_long: Callable[[str], Exception]) -> bytes:
    """The content of the file ``path``, as ``open_regular`` opens it; raises ``too_long`` if it is too long for what it
    should hold."""
    with open_regular(path) as file:
        content = file.read(bytes_max + 1)
    refuse(too_long, (len(content) > bytes_max, f"{path} is over {bytes_max} bytes, too much for {what}"))
    return content


_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def read(path: Path) -> bytes:
    """The content of ``path``.

    Raises:
        ConfigurationError: it cannot be read, is not a regular file, others can access it, or it is too long for a key.
    """
    with reported_as(ConfigurationError, f"key file {path} cannot be read", OSError), open_regular(path) as file:
        mode = os.fstat(file.fileno()).st_mode
        if mode & 0o077:
            raise ConfigurationError(
                f"key file {path} has mode {stat.S_IMODE(mode):04o}, so others can use this key; "
                f"if it may have been read, make a new one, else run: chmod 600 {path}"
            )
        content = file.read(FILE_BYTES_MAX + 1)
    if len(content) > FILE_BYTES_MAX:
        raise ConfigurationError(f"key file {path} is over {FILE_BYTES_MAX} bytes, too much for a key")
    return content


def folder_of_others(path: Path) -> Path | None:
    """The nearest folder above ``path`` in which every user may replace files; None if there is none. In a sticky
    folder, such as /tmp, only owners may."""
    for folder in path.absolute().parents:
        with suppress(OSError):
            mode = folder.stat().st_mode
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                return folder
    return None


def make(path: Path, content: bytes) -> None:
    """Create ``path`` with ``content``, and missing folders, for this user alone.

    When it returns, the file survives a power loss.

    Raises:
        ConfigurationError: the file exists, and is left unchanged, or it cannot be created; no partial file remains.
    """
    try:
        make_folder(path.parent)
        with _unfinished(path, FILE_MODE) as (temporary, file):
            file.write(content)
            _sync(file)
            os.link(temporary, path)
        sync_folder(path.parent)
    except FileExistsError as error:
        raise ConfigurationError(f"key file {path} exists already; it was left as it is") from error
    except OSError as error:
        raise ConfigurationError(f"key file {path} cannot be made: {error.strerror}") from error


@contextmanager
def whole_file(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A file that is durable under the name ``path`` when the context ends without an error, and removed otherwise; its
    mode is ``mode`` less the umask. If ``path`` is a link, its target is replaced. A device, pipe or socket is written
    to directly and never replaced."""
    target = Path(os.path.realpath(path))
    try:
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder; name a file")
        if path.exists() and not path.is_file():
            with path.open("wb") as device:
                yield device
            return
        with _unfinished(target, mode) as (temporary, file):
            yield file
            _sync(file)
            temporary.replace(target)
        sync_folder(target.parent)
    except OSError as error:
        # An error of a write or fsync names no file, and one about the temporary file names that instead of ``path``.
        if error.errno is not None and (error.filename is None or str(error.filename).endswith(_UNFINISHED)):
            raise OSError(error.errno, f"{error.strerror}; nothing of it is kept", str(path)) from error
        raise


@contextmanager
def _unfinished(path: Path, mode: int) -> Iterator[tuple[Path, BinaryIO]]:
    """A new temporary file beside ``path``; its name is removed when the context ends."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}{_UNFINISHED}")
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield temporary, file
    finally:
        temporary.unlink(missing_ok=True)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def load_or_make(path: Path, load: Callable[[], Key], make: Callable[[], Key]) -> Key:
    """The key in ``path``, made if the file is missing. Of several concurrent callers one makes it, and all use it."""
    if not os.path.exists(path):
        try:
            return make()
        except ConfigurationError:
            if not os.path.exists(path):
                raise
    return load()


def make_folder(folder: Path) -> None:
    """Create ``folder`` and its missing parents, for this user alone; they survive a power loss."""
    if folder.exists():
        return
    make_folder(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)
    sync_folder(folder.parent)


HEAD_BYTES: Final = 4096
"""Bytes read from the beginning of a file."""

_FIRST_MEMBER: Final = entries_name(1).encode()
_MAGIC: Final = slice(257, 262)
_DAMAGED_MAX: Final = 4
"""Bytes of the first name that may differ."""
_MEMBERS: Final = (_FIRST_MEMBER, *(name.encode() for name in (*TAIL, EVIDENCE)))
_TAR: Final = b"ustar"
_RECEIPT_NAMES: Final = (b'{"receipt"', b'"receipt":', b'{"anchors":')
_RECEIPT_HEAD: Final = 64

_MAGIC_BYTES: Final = (
    (b"\x89PNG", "a picture"),
    (b"\xff\xd8\xff", "a picture"),
    (b"GIF8", "a picture"),
    (b"%PDF-", "a PDF document"),
    (b"PK\x03\x04", "a ZIP archive"),
    (b"\x1f\x8b", "a file compressed with gzip; decompress it first"),
    (b"\x28\xb5\x2f\xfd", "a file compressed with zstd; decompress it first"),
    (b"PAR1", "a Parquet file, such as an archive has: tally pipeline verify --archive verifies that"),
    (b"\x7fELF", "a program"),
    (b"c2sp.org/tlog-proof@v1\n", "a tlog-proof: a program that reads C2SP tlog-proofs verifies that (docs/proofs.md)"),
    (b"\xd2\x84", "a COSE_Sign1: if it is a COSE receipt, a library for RFC 9942 verifies that (docs/proofs.md)"),
)
_TEXTS: Final = (
    (re.compile(rb"-----BEGIN "), "a PEM file, such as a key"),
    (re.compile(rb"<!doctype html|<html", re.IGNORECASE), "a page (HTML), such as a report of a verification"),
    (re.compile(rb"# "), "a text in Markdown, such as a report of a verification"),
    (re.compile(rb"[^\n]+\n[0-9]+\n[A-Za-z0-9+/]+=*\n"), "a checkpoint: give it with --checkpoint"),
    (re.compile(rb'\{\s*"payload(Type)?"'), "a signature in a DSSE envelope, such as that of a report"),
    (re.compile(rb'\{\s*"keys"'), "a list of keys: give it with --keys"),
    (re.compile(rb"[\[{]"), "JSON, such as a report of a verification"),
)


def is_like_bundle(head: bytes) -> bool:
    """Whether a file that begins with ``head`` is a bundle, whole or damaged."""
    same = sum(found == wanted for found, wanted in zip(head, _FIRST_MEMBER, strict=False))
    begins_so = same >= len(_FIRST_MEMBER) - _DAMAGED_MAX or (head and _FIRST_MEMBER.startswith(head))
    return bool(begins_so) or (head[_MAGIC] == _TAR and any(name in head for name in _MEMBERS))


def is_like_receipt(head: bytes) -> bool:
    """Whether a file that begins with ``head`` is a receipt, whole or damaged."""
    return any(name in head[:_RECEIPT_HEAD] for name in _RECEIPT_NAMES)


def looks_like(head: bytes) -> str:
    """A description of a file that begins with ``head``."""
    kinds = (
        (not head, "an empty file"),
        (is_like_bundle(head), "a bundle: tally verify-bundle verifies that"),
        (is_like_receipt(head), "a receipt: tally verify-proof verifies that"),
        *((head.startswith(magic), name) for magic, name in _MAGIC_BYTES),
        (head[_MAGIC] == _TAR, "a tar archive of something else"),
        *((form.match(head.lstrip()) is not None, name) for form, name in _TEXTS),
        (_is_text(head), "text"),
    )
    return next((name for is_of_kind, name in kinds if is_of_kind), "binary data")


def _is_text(head: bytes) -> bool:
    with suppress(UnicodeDecodeError):
        # The last character may be cut.
        codecs.getincrementaldecoder("utf-8")().decode(head)
        return b"\0" not in head
    return False
