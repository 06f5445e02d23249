"""A verifier's memory: the newest checkpoint that it verified of each log, for later comparison.

As in Go's checksum database client (golang.org/x/mod/sumdb), a newer checkpoint replaces the older one only if the log
still begins with the older tree. So a verifier detects a log that was cut or rewritten since its first verification. A
log is one origin under one root key: a ledger set up again under an old name has another key and is not a rollback.

``<state folder>/checkpoints.json``, mode 0600 in a folder of mode 0700, replaced whole under a lock::

    {"logs":[{"checkpoint":NOTE,"root_key":"16 hex digits","seen_at":"2026-11-22T02:40:00Z"}, ...],
     "sha256":"of the canonical JSON of logs","version":1}

NOTE is the signed note as the log made it, so it is evidence for others too. Losing a log's checkpoint would disable
the comparison, so a damaged file is an error and never read as empty.

Invariants::

    one checkpoint a log, and its size never becomes less        logs <= LOGS_MAX

A checkpoint is remembered only if a key that the user trusts signed it and everything that it covers was verified.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from ledger import canonical, rfc3339
from ledger.decoding import decode
from ledger.errors import ConfigurationError, LedgerError, SignatureError
from ledger.verification.tree_check import TreeHead
from ledger.verification.verdict import rollback, with_checkpoint
from signing import note as notes
from signing.checkpoint import Checkpoint, judge_kept, open_checkpoint, signed_by, signer_of
from signing.checkpoint import read as read_checkpoint
from signing.files import FILE_MODE, make_folder, open_regular, whole_file
from signing.keys import Keyring

MEMORY: Final = "memory"
"""Name in ``compared_with`` of a remembered checkpoint."""
LOGS_MAX: Final = 1_000_000
"""More tenants than any ledger has. 100,000 are 28 MB of file and 200 MB of memory, read in 4 s and written in 2."""
NOTE_CHARACTERS_MAX: Final = 64 << 10
"""A checkpoint whose note is longer, through many cosignatures, is not remembered."""
FILE_BYTES_MAX: Final = 1 << 30

_FILE: Final = "checkpoints.json"
_LOCK: Final = "lock"
_VERSION: Final = 1
_WAY_OUT: Final = "name another folder with --state DIR, or do without memory with --no-state"


class Seen(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """A verified checkpoint of the log with that root key; ``note`` is its signed note."""

    note: str = msgspec.field(name="checkpoint")
    root_key: str
    seen_at: str
    """RFC 3339."""

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint in the note.

        Raises:
            SignatureError: there is none.
        """
        return read_checkpoint(self.note)

    @property
    def key_hashes(self) -> frozenset[bytes]:
        """Hashes of the keys that signed in the log's name."""
        signatures = notes.parse(self.note).signatures
        return frozenset(each.key_hash for each in signatures if each.name == self.checkpoint.origin)

    def __str__(self) -> str:
        return f"{self.checkpoint.size} entries of log {self.checkpoint.origin}, verified {self.seen_at}"

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {"size": self.checkpoint.size, "root": self.checkpoint.root.hex(), "seen_at": self.seen_at}


def user_folder(environment: Mapping[str, str]) -> Path:
    """This program's state folder in the user's home (XDG Base Directory Specification).

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
    """The memory that the options ``--state`` and ``--no-state`` name, None if nothing is to be remembered.

    Raises:
        ConfigurationError: both are given, or as ``Memory.open``.
    """
    if is_off and state is not None:
        raise ConfigurationError("--state and --no-state cannot both be given")
    return None if is_off else Memory.open(user_folder(os.environ) if state is None else state)


@dataclass(frozen=True)
class Memory:
    """The memory in ``folder`` as of its opening. Can be sent to other processes."""

    folder: Path
    logs: Mapping[tuple[str, str], Seen]
    """By origin and root key."""

    @cached_property
    def by_tenant(self) -> Mapping[str, Sequence[Seen]]:
        """Remembered checkpoints by the tenant that their origin ends with, in the order of origins and root keys."""
        found: dict[str, list[Seen]] = {}
        for (origin, _), seen in sorted(self.logs.items()):
            found.setdefault(origin.rpartition("/")[2], []).append(seen)
        return found

    @classmethod
    def open(cls, folder: Path) -> Memory:
        """Read the memory; a missing folder is created.

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
        """The newest verified checkpoint of the log of ``own``, None before the first.

        A checkpoint is of that log if it has its root key, or if the same key signed it under the same origin: claiming
        another root key does not discard the remembered checkpoint.
        """
        origin = own.checkpoint.origin
        same = [
            seen
            for seen in self.by_tenant.get(origin.rpartition("/")[2], ())
            if seen.checkpoint.origin == origin and (seen.root_key == own.root_key or seen.key_hashes & own.key_hashes)
        ]
        return max(same, key=lambda seen: seen.checkpoint.size, default=None)

    def seen_of_tenant(self, tenant_id: str, keyring: Keyring) -> list[Seen]:
        """Checkpoints of every log of that tenant that a key of ``keyring`` signed, for a ledger that names no log."""
        return [
            seen
            for seen in self.by_tenant.get(tenant_id, ())
            if seen.checkpoint.origin.endswith(f"/{tenant_id}") and judge_kept(seen.note, keyring).unknown is None
        ]

    def remember(self, verified: Iterable[Seen]) -> None:
        """Store each verified checkpoint that is newer than the stored one. On return it survives a power loss.

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


class _Content(msgspec.Struct, forbid_unknown_fields=True):
    logs: list[Seen]
    sha256: str
    version: int


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of the memory file. Concurrent verifications wait for each other here."""
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
        content = decode(data, _Content)
        if content.version != _VERSION:
            raise ConfigurationError(f"{path} is of version {content.version}, this program reads {_VERSION}")
        if content.sha256 != _digest(content.logs):
            raise ValueError("its digest is another")
        return {_name(each): each for each in content.logs}
    except ConfigurationError:
        raise
    except (msgspec.MsgspecError, ValueError, LedgerError) as error:
        raise ConfigurationError(
            f"{path}, which holds the checkpoints verified so far, is damaged ({error}): bring it back from a backup; "
            "without it every log is looked at for the first time again. To accept that, remove it"
        ) from error


def _write(path: Path, logs: Mapping[tuple[str, str], Seen]) -> None:
    items = [each for _, each in sorted(logs.items())]
    data = canonical.encode(msgspec.to_builtins(_Content(items, _digest(items), _VERSION)))
    if len(data) > FILE_BYTES_MAX:
        raise ConfigurationError(f"{path} would have more than {FILE_BYTES_MAX} bytes: {_WAY_OUT}")
    with whole_file(path, FILE_MODE) as file:
        file.write(data)


def _digest(items: list[Seen]) -> str:
    return sha256(canonical.encode(msgspec.to_builtins(items))).hexdigest()


_MUST_HOLD: Final = ("links", "payloads", "head", "snapshots", "tree")


class Observation(NamedTuple):
    """The remembered and the current checkpoint of a log, before the entries are verified."""

    memory: Memory
    before: Sequence[Seen]
    """Remembered checkpoints that this ledger must still contain: none for a new log, usually one."""
    now: Seen | None
    """The ledger's own checkpoint, None if a trusted key signed none."""
    to_seq: int | None = None
    """Last seq of the verified range, None for a whole ledger."""
    itself: Seen | None = None
    """The remembered checkpoint if it equals that of this file, so that comparing the two checks nothing."""

    @classmethod
    def at(
        cls,
        memory: Memory,
        tenant_id: str,
        note: str | None,
        keyring: Keyring,
        now: datetime,
        *,
        to_seq: int | None = None,
        is_file: bool = False,
    ) -> Observation:
        """The observation of a ledger whose checkpoint is ``note``, or of a range of it whose note may be of a later
        tree. With ``is_file`` the note never changes, and the remembered checkpoint may come from this same file.

        An attacker who edits a ledger can remove its checkpoint. Without one, all remembered logs of the tenant that a
        trusted key signed are compared.
        """
        if (own := _opened(tenant_id, note, keyring, now)) is None:
            return cls(memory, () if to_seq is not None else memory.seen_of_tenant(tenant_id, keyring), None, to_seq)
        before = memory.seen(own)
        if is_file and before is not None and before.checkpoint == own.checkpoint:
            return cls(memory, (), own, to_seq, before)
        return cls(memory, () if before is None else (before,), own, to_seq)

    @property
    def why_not(self) -> str | None:
        """Why the remembered checkpoint cannot be compared, None if it can. A range that ends before it is older, which
        alone is no rollback."""
        if self.now is None or self.to_seq is None:
            return None
        last, newest = self.now.checkpoint.size, max(map(_size, self.before), default=0)
        if newest > last:
            return f"what is here is older, and ends at {last} entries: that is no rollback by itself"
        return f"only the entries up to seq {self.to_seq} are here" if self.to_seq < newest < last else None

    def compared_with_own(self, verdict: dict[str, Any]) -> dict[str, Any]:
        """``verdict`` with the remembered checkpoint compared with the range's own, if both have the same size."""
        for seen in self.before:
            if self.why_not is None and self.now is not None and seen.checkpoint.size == self.now.checkpoint.size:
                return compared(verdict, seen.checkpoint, self.now.checkpoint, MEMORY)
        return verdict

    def with_verdict(self, verdict: Mapping[str, Any]) -> dict[str, Any]:
        """``verdict``, whose entries were compared with ``heads``, with the result of that under ``memory``."""
        found = self.compared_with_own({**verdict})
        return {**found, "memory": self.report(found)}

    @property
    def heads(self) -> list[TreeHead]:
        """Tree heads that the entries must agree with; for a range, the remembered ones within it."""
        heads = [TreeHead(seen.checkpoint.size, seen.checkpoint.root, MEMORY) for seen in self.before]
        if self.to_seq is None and self.now is not None:
            heads.append(TreeHead(self.now.checkpoint.size, self.now.checkpoint.root, "", is_own=True))
        return [head for head in heads if self.to_seq is None or head.size <= self.to_seq]

    def verified(self, verdict: Mapping[str, Any]) -> Seen | None:
        """The checkpoint to remember after this verdict: None unless everything was verified and is valid."""
        return self.now if self.now is not None and _is_whole(verdict) else None

    def report(self, verdict: Mapping[str, Any], never_whole: str | None = None) -> dict[str, Any]:
        """The observation in plain values and in words. The words mention a new checkpoint only after
        ``remember_observed`` has stored it. ``never_whole`` is why a file of this kind is never a whole ledger."""
        kept, is_compared = self.verified(verdict), is_compared_with(verdict, MEMORY)
        newest = max(filter(None, (*self.before, self.itself, kept)), key=_size, default=None)
        return {
            "state": str(self.memory.folder),
            "log": newest.checkpoint.origin if newest is not None else None,
            "root_key": newest.root_key if newest is not None else None,
            "first_look": not self.before and self.itself is None,
            "compared": [seen.to_json() for seen in self.before] if is_compared else [],
            "remembered": {**newest.to_json(), "checkpoint": newest.note} if newest is not None else None,
            "is_new": kept is not None and newest is kept,
            "says": "; ".join(self._sentences(is_compared, kept, never_whole)),
        }

    def _sentences(self, is_compared: bool, kept: Seen | None, never_whole: str | None) -> list[str]:
        compared = "compared with" if is_compared else "not compared with"
        itself = f"what is remembered, {self.itself}, is the checkpoint that came along"
        is_first = self.itself is None and not self.before
        sentences = (
            *((True, f"{compared} {seen}") for seen in self.before),
            (self.why_not is not None, f"{self.why_not}"),
            (self.itself is not None, f"{itself}: comparing the two would check nothing"),
            (is_first, "this is the first look at this log: there was nothing to compare with"),
            (kept is None, _NOTHING_NEW + (never_whole or (_NOT_WHOLE if self.now else _NO_CHECKPOINT))),
        )
        return [sentence for applies, sentence in sentences if applies]


def remember_observed(memory: Memory, observations: Iterable[dict[str, Any] | None]) -> None:
    """Store the new checkpoints of these observations, as ``Observation.report`` returned them, and add that to them.

    Raises:
        ConfigurationError, SignatureError: as ``Memory.remember``. Then the observations report nothing as stored.
    """
    told = [observation for observation in observations if observation is not None]
    kept = [(observation["root_key"], observation["remembered"]) for observation in told]
    new = [observation for observation in told if observation["is_new"]]
    try:
        memory.remember(
            Seen(seen["checkpoint"], root_key, seen["seen_at"]) for root_key, seen in kept if seen is not None
        )
    except LedgerError:
        for observation in new:
            observation["remembered"], observation["is_new"] = None, False
            observation["says"] += f"; {_NOTHING_NEW}it could not be stored"
        raise
    for observation in new:
        size = observation["remembered"]["size"]
        observation["says"] += f"; {size} {'entry is' if size == 1 else 'entries are'} remembered now"


@contextmanager
def remembering(memory: Memory | None, observations: Iterable[dict[str, Any] | None]) -> Iterator[None]:
    """Store the new checkpoints of these observations before the body prints them; without ``memory`` nothing. An error
    of storing is raised after the body, so that the verdicts are still printed.

    Raises:
        ConfigurationError, SignatureError: as ``remember_observed``.
    """
    failed: LedgerError | None = None
    if memory is not None:
        try:
            remember_observed(memory, observations)
        except LedgerError as error:
            failed = error
    yield
    if failed is not None:
        raise failed


def is_compared_with(verdict: Mapping[str, Any], source: str) -> bool:
    """Whether the entries were compared with the checkpoint of ``source``."""
    return source in (verdict["compared_with"] or "").split(", ")


def compared(verdict: dict[str, Any], kept: Checkpoint, own: Checkpoint, source: str) -> dict[str, Any]:
    """``verdict`` with the checkpoint of ``source`` compared with the entries' own one of the same size, unless the
    entries themselves were compared with it."""
    if is_compared_with(verdict, source):
        return verdict
    if kept.root == own.root:
        return with_checkpoint(verdict, "ok", source)
    detail = f"the checkpoint that came along is not that of {source}, of the same {kept.size} entries"
    return with_checkpoint(verdict, "broken", source, rollback(kept.size, detail, kept.root.hex(), own.root.hex()))


_NOTHING_NEW: Final = "nothing new is remembered: "
_NOT_WHOLE: Final = "not everything from the first entry on was verified and holds"
_NO_CHECKPOINT: Final = "it has no checkpoint that a trusted key signed"


def _opened(tenant_id: str, note: str | None, keyring: Keyring, now: datetime) -> Seen | None:
    if note is None:
        return None
    try:
        if not open_checkpoint(note, keyring).origin.endswith(f"/{tenant_id}"):
            return None
        # Signature lines that no held key made are dropped: they neither name the log nor make the note too long.
        return Seen(
            signed_by(note, keyring),
            keyring.root_key_id or signer_of(note, keyring).key_id,
            rfc3339.written(now, "seconds"),
        )
    except SignatureError:
        return None


def _is_whole(verdict: Mapping[str, Any]) -> bool:
    """Whether by the verdict object everything from the first entry on was verified and is valid."""
    holds = all(verdict["verdicts"].get(aspect) == "ok" for aspect in _MUST_HOLD)
    return bool(holds and verdict["valid"] and verdict["from_seq"] == 1)


def _size(seen: Seen) -> int:
    return seen.checkpoint.size
