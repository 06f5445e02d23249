"""One look at a ledger by a verifier with a memory: what to compare it with, what of it to remember, what to say.

A checkpoint is remembered only when a key that the user trusts signed it, and when all that it covers was verified.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Final, NamedTuple

from ledger.errors import LedgerError, SignatureError
from ledger.verification.tree_check import TreeHead
from ledger.verification.verdict import rollback, with_checkpoint
from signing.checkpoint import Checkpoint, open_checkpoint, signed_by, signer_of
from signing.keys import Keyring
from signing.memory import MEMORY, Memory, Seen

_MUST_HOLD: Final = ("links", "payloads", "head", "snapshots", "signatures", "tree")


class Look(NamedTuple):
    """What is known before the entries are verified."""

    memory: Memory
    before: Sequence[Seen]
    """What was verified before and this ledger must still hold; one checkpoint, or none at a first look."""
    now: Seen | None
    """The ledger's own checkpoint, None when there is none that a trusted key signed."""
    to_seq: int | None = None
    """Where the range ends that is looked at, None for the whole of a ledger."""
    itself: Seen | None = None
    """What was verified before where that is the checkpoint of this very file: comparing the two checks nothing."""

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
    ) -> Look:
        """The look at a ledger whose own checkpoint is ``note``, or at a range of it that carries one which may be a
        later one. ``is_file`` says that the note stays as it is, and that it was perhaps remembered from here.

        Whoever edits a ledger can take its checkpoint away. Then every log of the tenant counts that a key signed.
        """
        own = _opened(tenant_id, note, keyring, now)
        if own is None and to_seq is None:
            return cls(memory, memory.seen_of_tenant(tenant_id, keyring), None)
        before = None if own is None else memory.seen(own)
        if is_file and before is not None and own is not None and before.checkpoint == own.checkpoint:
            return cls(memory, (), own, to_seq, before)
        return cls(memory, () if before is None else (before,), own, to_seq)

    @property
    def why_not(self) -> str | None:
        """Why what was verified before cannot be compared, where it cannot: a range that ends before it is an older
        one, and no rollback by itself."""
        if self.now is None or self.to_seq is None:
            return None
        last = self.now.checkpoint.size
        for seen in self.before:
            if seen.checkpoint.size > last:
                return f"what is here is older, and ends at {last} entries: that is no rollback by itself"
            if self.to_seq < seen.checkpoint.size < last:
                return f"only the entries up to seq {self.to_seq} are here"
        return None

    def compared_with_own(self, verdict: dict[str, Any]) -> dict[str, Any]:
        """``verdict`` on such a range; what was verified is compared with its checkpoint, if they are of one size."""
        for seen in self.before:
            if self.why_not is None and self.now is not None and seen.checkpoint.size == self.now.checkpoint.size:
                return compared(verdict, seen.checkpoint, self.now.checkpoint, MEMORY)
        return verdict

    def with_verdict(self, verdict: Mapping[str, Any]) -> dict[str, Any]:
        """``verdict``, whose entries were compared with ``heads``, and under ``memory`` what the look came to."""
        found = self.compared_with_own({**verdict})
        return {**found, "memory": self.told(found)}

    @property
    def heads(self) -> list[TreeHead]:
        """Tree heads that the entries must agree with; of a range, those from before that it reaches."""
        heads = [TreeHead(seen.checkpoint.size, seen.checkpoint.root, MEMORY) for seen in self.before]
        if self.to_seq is not None:
            return [head for head in heads if head.size <= self.to_seq]
        own = () if self.now is None else (self.now.checkpoint,)
        return heads + [TreeHead(each.size, each.root, "", is_own=True) for each in own]

    def verified(self, verdict: Mapping[str, Any]) -> Seen | None:
        """What to remember now that the verdict is known: nothing unless all of it holds."""
        return self.now if self.now is not None and _is_whole(verdict) else None

    def told(self, verdict: Mapping[str, Any], never_whole: str | None = None) -> dict[str, Any]:
        """The look in plain values, and in words, which say what is new only once ``remember_told`` has stored it. What
        is looked at may be ``never_whole``, which says why not."""
        kept, is_compared = self.verified(verdict), MEMORY in (verdict["compared_with"] or "").split(", ")
        known = (*self.before, self.itself, kept)
        newest = max((each for each in known if each is not None), key=_size, default=None)
        origin = newest.checkpoint.origin if newest is not None else None
        return {
            "state": str(self.memory.folder),
            "log": origin,
            "root_key": newest.root_key if newest is not None else None,
            "first_look": not self.before and self.itself is None,
            "compared": [seen.to_json() for seen in self.before] if is_compared else [],
            "remembered": {**newest.to_json(), "checkpoint": newest.note} if newest is not None else None,
            "is_new": kept is not None and newest is kept,
            "says": "; ".join(self._sentences(is_compared, kept, never_whole)),
        }

    def _sentences(self, is_compared: bool, kept: Seen | None, never_whole: str | None) -> list[str]:
        said = []
        for seen in self.before:
            what = f"{seen.checkpoint.size} entries of log {seen.checkpoint.origin}, verified {seen.seen_at}"
            said.append(f"compared with {what}" if is_compared else f"not compared with {what}")
        if self.why_not is not None:
            said.append(self.why_not)
        if self.itself is not None:
            seen = self.itself
            said.append(
                f"what is remembered, {seen.checkpoint.size} entries of log {seen.checkpoint.origin}, verified "
                f"{seen.seen_at}, is the checkpoint that came along: comparing the two would check nothing"
            )
        elif not self.before:
            said.append("this is the first look at this log: there was nothing to compare with")
        if kept is None:
            said.append(_NOTHING_NEW + (never_whole or (_NOT_WHOLE if self.now else _NO_CHECKPOINT)))
        return said


def remember_told(memory: Memory, looks: Iterable[dict[str, Any] | None]) -> None:
    """Remember what these looks, as ``Look.told`` gave them, were told to; then they say so.

    Raises:
        ConfigurationError, SignatureError: as ``Memory.remember``. What is new is not remembered, and said not to be.
    """
    told = [look for look in looks if look is not None]
    kept = [(look["root_key"], look["remembered"]) for look in told]
    new = [look for look in told if look["is_new"]]
    try:
        memory.remember(
            Seen.of(seen["checkpoint"], root_key, seen["seen_at"]) for root_key, seen in kept if seen is not None
        )
    except LedgerError:
        for look in new:
            look["remembered"], look["is_new"] = None, False
            look["says"] += f"; {_NOTHING_NEW}it could not be stored"
        raise
    for look in new:
        size = look["remembered"]["size"]
        look["says"] += f"; {size} {'entry is' if size == 1 else 'entries are'} remembered now"


@contextmanager
def remembering(memory: Memory | None, looks: Iterable[dict[str, Any] | None]) -> Iterator[None]:
    """Remember what these looks were told to, so that what is printed of them within is true; without ``memory``
    nothing. What keeps it from being stored keeps no verdict from being printed: it is raised at the end.

    Raises:
        ConfigurationError, SignatureError: as ``remember_told``.
    """
    failed: LedgerError | None = None
    if memory is not None:
        try:
            remember_told(memory, looks)
        except LedgerError as error:
            failed = error
    yield
    if failed is not None:
        raise failed


def compared(verdict: dict[str, Any], kept: Checkpoint, own: Checkpoint, source: str) -> dict[str, Any]:
    """``verdict`` with a checkpoint that ``source`` holds compared with one of the same size that came with the
    entries, unless the entries themselves were."""
    if source in (verdict["compared_with"] or "").split(", "):
        return verdict
    found = None
    if kept.root != own.root:
        detail = f"the checkpoint that came along is not that of {source}, of the same {kept.size} entries"
        found = rollback(kept.size, detail, kept.root.hex(), own.root.hex())
    return with_checkpoint(verdict, "ok" if found is None else "broken", source, found)


_NOTHING_NEW: Final = "nothing new is remembered: "
_NOT_WHOLE: Final = "not everything from the first entry on was verified and holds"
_NO_CHECKPOINT: Final = "it has no checkpoint that a trusted key signed"


def _opened(tenant_id: str, note: str | None, keyring: Keyring, now: datetime) -> Seen | None:
    if note is None:
        return None
    try:
        checkpoint = open_checkpoint(note, keyring)
        if not checkpoint.origin.endswith(f"/{tenant_id}"):
            return None
        # What nobody vouches for is not remembered: neither names it the log, nor does it make the note too long.
        return Seen.of(signed_by(note, keyring), keyring.root_key_id or signer_of(note, keyring).key_id, now)
    except SignatureError:
        return None


def _is_whole(verdict: Mapping[str, Any]) -> bool:
    """Whether a verdict object says that everything from the first entry on was verified and holds."""
    verdicts = verdict["verdicts"]
    is_whole = verdict["valid"] and verdict["from_seq"] == 1
    return bool(is_whole and all(verdicts.get(aspect) == "ok" for aspect in _MUST_HOLD))


def _size(seen: Seen) -> int:
    return seen.checkpoint.size
