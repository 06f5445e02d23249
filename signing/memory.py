"""What a verifier remembers: the newest checkpoint that it verified of each log, compared with ever after.

As Go's checksum database client does (golang.org/x/mod/sumdb): a newer checkpoint is taken only when the log still
begins with the older one, so whoever looked once sees a log that was cut or rewritten since. A log is one origin under
one root key: ledgers that were set up again under an old name have another key, and are never taken for a rollback.

``<state folder>/checkpoints.json``, mode 0600 in a folder of mode 0700, replaced whole under a lock::

    {"logs":[{"checkpoint":NOTE,"root_key":"16 hex digits","seen_at":"2026-11-22T02:40:00Z"}, ...],
     "sha256":"of the canonical JSON of logs","version":1}

NOTE is the signed note as the log made it, so it also convinces others. A log whose checkpoint is forgotten would be
looked at for the first time again; so a file that is damaged is an error, never taken for an empty one.

Invariants::

    one checkpoint a log, and its size never becomes less        logs <= LOGS_MAX
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from ledger import canonical
from ledger.errors import ConfigurationError, LedgerError, SignatureError
from signing import note as notes
from signing.checkpoint import Checkpoint, judge_checkpoint
from signing.checkpoint import read as read_checkpoint
from signing.files import FILE_MODE, make_folder, open_regular, whole_file
from signing.keys import Keyring

MEMORY: Final = "memory"
"""What ``compared_with`` calls a checkpoint that was remembered."""
LOGS_MAX: Final = 1_000_000
"""More tenants than any ledger has. 100,000 are 28 MB of file and 200 MB of memory, read in 4 s and written in 2."""
NOTE_CHARACTERS_MAX: Final = 64 << 10
"""A checkpoint whose note is longer, with that many cosignatures, is not remembered."""
FILE_BYTES_MAX: Final = 1 << 30

_FILE: Final = "checkpoints.json"
_LOCK: Final = "lock"
_VERSION: Final = 1
_WAY_OUT: Final = "name another folder with --state DIR, or do without memory with --no-state"


class Seen(NamedTuple):
    """A checkpoint that was verified, of the log with that root key; ``note`` is it as signed."""

    root_key: str
    checkpoint: Checkpoint
    note: str
    seen_at: str
    """RFC 3339."""

    @classmethod
    def of(cls, note: str, root_key: str, seen_at: datetime | str) -> Seen:
        """What is to be remembered of a verified ``note``.

        Raises:
            SignatureError: it holds no checkpoint.
        """
        if isinstance(seen_at, datetime):
            seen_at = seen_at.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        return cls(root_key, read_checkpoint(note), note, seen_at)

    @property
    def key_hashes(self) -> frozenset[bytes]:
        """Those of the keys that signed in the log's name."""
        signatures = notes.parse(self.note).signatures
        return frozenset(each.key_hash for each in signatures if each.name == self.checkpoint.origin)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {"size": self.checkpoint.size, "root": self.checkpoint.root.hex(), "seen_at": self.seen_at}


def user_folder(environment: Mapping[str, str]) -> Path:
    """Where a user's programs keep state (XDG Base Directory Specification), for this one.

    Raises:
        ConfigurationError: the user has no home.
    """
    given = environment.get("XDG_STATE_HOME", "")
    if os.path.isabs(given):
        return Path(given) / "tallystick"
    try:
        return Path.home() / ".local" / "state" / "tallystick"
    except RuntimeError as error:
        raise ConfigurationError(f"there is no home folder to remember checkpoints in: {_WAY_OUT}") from error


def memory_of(state: Path | None, *, is_off: bool) -> Memory | None:
    """What the options ``--state`` and ``--no-state`` name, None where nothing is to be remembered.

    Raises:
        ConfigurationError: both are given, or as ``Memory.open``.
    """
    if is_off and state is not None:
        raise ConfigurationError("--state and --no-state cannot both be given")
    return None if is_off else Memory.open(user_folder(os.environ) if state is None else state)


@dataclass(frozen=True)
class Memory:
    """What is remembered in ``folder``, as it was when it was opened. Travels to other processes."""

    folder: Path
    logs: Mapping[tuple[str, str], Seen]
    """By origin and root key."""

    @cached_property
    def by_tenant(self) -> Mapping[str, Sequence[Seen]]:
        """The same by the tenant that an origin ends with, in the order of origins and root keys."""
        found: dict[str, list[Seen]] = {}
        for (origin, _), seen in sorted(self.logs.items()):
            found.setdefault(origin.rpartition("/")[2], []).append(seen)
        return found

    @classmethod
    def open(cls, folder: Path) -> Memory:
        """Read what is remembered; the folder is made where it is missing.

        Raises:
            ConfigurationError: the file is damaged, others can write to it, or the folder cannot be written to.
        """
        try:
            with _locked(folder):
                return cls(folder, _read(folder / _FILE))
        except OSError as error:
            raise ConfigurationError(
                f"{folder} cannot hold what is remembered: {error.strerror}; {_WAY_OUT}"
            ) from error

    def seen(self, own: Seen) -> Seen | None:
        """The newest checkpoint verified of the log that ``own`` is of, None before the first.

        Of that log is what has its root key, or what the same key signed under the same origin: who only says that the
        root is another does not get rid of what was seen.
        """
        origin = own.checkpoint.origin
        same = [
            seen
            for seen in self.by_tenant.get(origin.rpartition("/")[2], ())
            if seen.checkpoint.origin == origin and (seen.root_key == own.root_key or seen.key_hashes & own.key_hashes)
        ]
        return max(same, key=lambda seen: seen.checkpoint.size, default=None)

    def seen_of_tenant(self, tenant_id: str, keyring: Keyring) -> list[Seen]:
        """Those of every log of that tenant that a key of ``keyring`` signed: for a ledger that names no log itself."""
        return [
            seen
            for seen in self.by_tenant.get(tenant_id, ())
            if seen.checkpoint.origin.endswith(f"/{tenant_id}") and judge_checkpoint(seen.note, keyring).unknown is None
        ]

    def remember(self, verified: Iterable[Seen]) -> None:
        """Keep what was verified, each where it is newer than what is there. On return it survives a power loss.

        Raises:
            ConfigurationError: the file is damaged or full, or cannot be written.
            SignatureError: another checkpoint of the same size was verified meanwhile.
        """
        try:
            with _locked(self.folder):
                logs = _read(self.folder / _FILE)
                changed = [each for each in verified if _is_newer(each, logs.get(_name(each)))]
                if not changed:
                    return
                logs.update((_name(each), each) for each in changed)
                if len(logs) > LOGS_MAX:
                    raise ConfigurationError(f"{self.folder} holds {LOGS_MAX} logs, and no more: {_WAY_OUT}")
                _write(self.folder / _FILE, logs)
        except OSError as error:
            raise ConfigurationError(f"{self.folder} cannot be written to: {error.strerror}; {_WAY_OUT}") from error


def _name(seen: Seen) -> tuple[str, str]:
    return seen.checkpoint.origin, seen.root_key


def _is_newer(seen: Seen, held: Seen | None) -> bool:
    if len(seen.note) > NOTE_CHARACTERS_MAX:
        return False
    if held is not None and held.checkpoint.size == seen.checkpoint.size and held.checkpoint != seen.checkpoint:
        raise SignatureError(
            f"log {seen.checkpoint.origin} signed two histories of {seen.checkpoint.size} entries: "
            f"root {held.checkpoint.root.hex()}, verified {held.seen_at}, and {seen.checkpoint.root.hex()}"
        )
    return held is None or seen.checkpoint.size > held.checkpoint.size


# --- the file -----------------------------------------------------------------------------------------


class _Item(msgspec.Struct, forbid_unknown_fields=True):
    checkpoint: str
    root_key: str
    seen_at: str


class _Content(msgspec.Struct, forbid_unknown_fields=True):
    logs: list[_Item]
    sha256: str
    version: int


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Nobody else reads or writes meanwhile; processes that verify side by side wait for each other here."""
    make_folder(folder)
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _read(path: Path) -> dict[tuple[str, str], Seen]:
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return {}
    with file:
        mode = os.fstat(file.fileno()).st_mode
        if mode & 0o022:
            raise ConfigurationError(
                f"{path} has mode {stat.S_IMODE(mode):04o}: others may have changed it; {_WAY_OUT}"
            )
        data = file.read(FILE_BYTES_MAX + 1)
    try:
        content = msgspec.json.decode(data, type=_Content)
        if content.version != _VERSION:
            raise ConfigurationError(f"{path} is of version {content.version}, this program reads {_VERSION}")
        if content.sha256 != _digest(content.logs):
            raise ValueError("its digest is another")
        logs = [Seen.of(each.checkpoint, each.root_key, each.seen_at) for each in content.logs]
    except ConfigurationError:
        raise
    except (msgspec.MsgspecError, ValueError, LedgerError) as error:
        raise ConfigurationError(
            f"{path}, which holds the checkpoints verified so far, is damaged ({error}): bring it back from a backup; "
            "without it every log is looked at for the first time again. To accept that, remove it"
        ) from error
    return {_name(each): each for each in logs}


def _write(path: Path, logs: Mapping[tuple[str, str], Seen]) -> None:
    items = [_Item(each.note, each.root_key, each.seen_at) for _, each in sorted(logs.items())]
    data = canonical.encode({"logs": _plain(items), "sha256": _digest(items), "version": _VERSION})
    if len(data) > FILE_BYTES_MAX:
        raise ConfigurationError(f"{path} would have more than {FILE_BYTES_MAX} bytes: {_WAY_OUT}")
    with whole_file(path, FILE_MODE) as file:
        file.write(data)


def _digest(items: list[_Item]) -> str:
    return sha256(canonical.encode(_plain(items))).hexdigest()


def _plain(items: list[_Item]) -> list[Any]:
    plain: list[Any] = msgspec.to_builtins(items)
    return plain
