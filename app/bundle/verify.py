"""Verifying a bundle: its container and manifest, then its rows by the one algorithm that verifies chains.

Steps, those of docs/formats/bundle.md::

    1. container and digests          app.bundle.reader
    2. the manifest's signature       here
    3. the checkpoints                here
    4. entries, snapshots, tree       ledger.verification, over the reader

The verdict object is that of a chain with one aspect more, ``bundle``: container, digests and manifest. Where that
is broken nothing else is looked at. Keys come from the caller alone; those inside a bundle are never used.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, NamedTuple

from app.bundle.manifest import Manifest, judge
from app.bundle.reader import READ_BYTES, BundleReader
from ledger.errors import (
    BundleInvalidError,
    BundleRefusedError,
    BundleSignatureError,
    ProofError,
    SignatureError,
    UnknownKeyError,
    UntrustedKeyError,
)
from ledger.merkle import verify_consistency
from ledger.verdict import ASPECTS, Head
from ledger.verification import TreeHead, Verdict, verify
from signing import checkpoint as checkpoints
from signing import note
from signing.checkpoint import Checkpoint
from signing.keys import Keyring
from signing.snapshot import OpenedSnapshot, open_snapshot

BUNDLE: Final = "bundle"
"""The aspect that bundles have besides those of a chain, and the kind of a break in it."""
BUNDLE_SIGNATURE: Final = "bundle-signature"
"""The kind of a break in the manifest's signature."""
OWN, KEPT = "bundle", "file"
"""What ``compared_with`` calls the bundle's own checkpoint and one kept elsewhere."""


class KeptCheckpoint(NamedTuple):
    """A checkpoint kept outside the bundle; ``unknown`` says why no held key vouches for it, None when one does.

    Without keys nobody vouches, and ``unknown`` is None as well.
    """

    checkpoint: Checkpoint
    unknown: str | None


@dataclass
class BundleVerdict:
    """What verifying one bundle came to."""

    verdict: dict[str, Any]
    """The verdict object of the interfaces, with the aspect ``bundle``."""
    digest: str
    """SHA-256 of the file, hex; what a bundle is named by."""
    size_bytes: int
    manifest: Manifest | None = None
    """None when it could not be read."""
    checkpoint: Checkpoint | None = None
    """The bundle's own."""
    manifest_keys: tuple[str, ...] = ()
    """Ids of the held keys whose signature of the manifest holds."""
    snapshot_keys: Counter[str] = field(default_factory=Counter)
    """Snapshots by the id of the key that each says signed it."""
    not_checked: list[str] = field(default_factory=list)
    """What could not be checked, and why, in words."""

    def to_json(self) -> dict[str, Any]:
        """The verdict object, and beside it what was verified."""
        about: dict[str, Any] = {"sha256": self.digest, "bytes": self.size_bytes}
        if self.manifest is not None:
            about |= {name: value for name, value in self.manifest._asdict().items() if name in _TOLD}
        if self.checkpoint is not None:
            about["checkpoint"] = tree_head_json(self.checkpoint)
        about["manifest_key_ids"] = list(self.manifest_keys)
        about["snapshot_key_ids"] = sorted(self.snapshot_keys)
        return {**self.verdict, "not_checked": self.not_checked, "bundle": about}


_TOLD: Final = (
    "node_id",
    "log_origin",
    "tenant_id",
    "from_seq",
    "to_seq",
    "first_hlc",
    "last_hlc",
    "entry_count",
    "snapshot_count",
    "tree_size",
    "tree_root",
)


def tree_head_json(checkpoint: Checkpoint) -> dict[str, Any]:
    """A checkpoint as plain values."""
    return {"origin": checkpoint.origin, "size": checkpoint.size, "root": checkpoint.root.hex()}


def open_kept(text: str, keyring: Keyring | None) -> KeptCheckpoint:
    """A checkpoint that was kept elsewhere.

    Raises:
        SignatureError: malformed, or a held key is named that did not sign it.
    """
    parsed = checkpoints.parse(note.parse(text).text)
    if keyring is None:
        return KeptCheckpoint(parsed, None)
    try:
        return KeptCheckpoint(checkpoints.open_checkpoint(text, keyring), None)
    except UnknownKeyError as error:
        return KeptCheckpoint(parsed, str(error))


async def verify_file(path: Path, keyring: Keyring | None, kept: KeptCheckpoint | None = None) -> BundleVerdict:
    """The verdict on the file; whatever it holds, nothing but this is the outcome.

    Raises:
        OSError: the file cannot be read.
    """
    began_s = time.perf_counter()
    try:
        with BundleReader.open(path, keyring) as reader:
            return await verify_bundle(reader, keyring, kept)
    except BundleInvalidError as error:
        return refused(error, *_digest(path), time.perf_counter() - began_s)


async def verify_bundle(
    reader: BundleReader, keyring: Keyring | None, kept: KeptCheckpoint | None = None
) -> BundleVerdict:
    """The verdict on an open bundle, against the keys of ``keyring`` and a checkpoint kept elsewhere.

    Without ``keyring`` no signature is judged, and nothing vouches for what else is found.
    """
    began_s = time.perf_counter()
    result = BundleVerdict({}, reader.digest, reader.size_bytes, reader.manifest)
    try:
        # 1. Who signed the manifest.
        signed, why, result.manifest_keys = judge(reader.envelope, keyring)
        # 2. The checkpoints: the bundle's own, then the one kept elsewhere.
        own = _Own.of(reader, keyring)
        result.checkpoint = own.checkpoint
        heads, undecided = _heads(reader.manifest, own, kept)
        # 3. The rows.
        opener = partial(_open_snapshot, keyring=keyring, seen=result.snapshot_keys)
        manifest = reader.manifest
        found = await verify(
            reader,
            tenant_id=manifest.tenant_id,
            from_seq=manifest.from_seq if manifest.from_seq > 1 else None,
            open_snapshot=opener,
            checkpoints=heads,
            projection=False,
        )
    except _BrokenError as error:
        return _broken(result, error.kind, str(error), began_s)
    except BundleInvalidError as error:
        return _broken(result, _kind_of(error), str(error), began_s)
    # 4. All of it together.
    result.verdict = found.to_json((time.perf_counter() - began_s) * 1000)
    _add_manifest(result.verdict, signed, why)
    _add_checkpoints(result.verdict, own, kept, keyring, undecided)
    result.not_checked = _left_out(found, result, keyring, _unjudged(own, kept, undecided))
    return result


def refused(error: BundleInvalidError, digest: str, size_bytes: int, seconds: float = 0) -> BundleVerdict:
    """The verdict on a file of this SHA-256 and size that cannot be opened as a bundle, for the reason given."""
    began_s = time.perf_counter() - seconds
    return _broken(BundleVerdict({}, digest, size_bytes), _kind_of(error), str(error), began_s)


def _kind_of(error: BundleInvalidError) -> str:
    return BUNDLE_SIGNATURE if isinstance(error, BundleSignatureError) else BUNDLE


def refuse_unless_trusted(name: str, found: BundleVerdict) -> None:
    """Refuse what is broken, and what no trusted key signed. A range that begins later, or ends behind its last
    snapshot, may come in: the manifest, which a trusted key signed, covers every byte of it.

    Raises:
        BundleRefusedError, UntrustedKeyError: with the verdict; ``name`` is the file's.
    """
    verdicts, first = found.verdict["verdicts"], found.verdict["first_break"]
    if "broken" in verdicts.values():
        raise BundleRefusedError(f"{name} does not hold: {first['kind']}: {first['detail']}", found.to_json(), name)
    if "unknown_key" in verdicts.values() or verdicts["bundle"] != "ok":
        why = first["detail"] if first is not None else "a signature could not be checked"
        raise UntrustedKeyError(f"{name}: {why}; bundle.trusted_keys names who is trusted", found.to_json(), name)


class _BrokenError(Exception):
    """A break outside the rows; ``kind`` is its kind."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


class _Own(NamedTuple):
    """The bundle's own checkpoint; ``unknown`` says why no held key vouches for it."""

    checkpoint: Checkpoint
    unknown: str | None

    @classmethod
    def of(cls, reader: BundleReader, keyring: Keyring | None) -> _Own:
        """The checkpoint, once it is one of this log that covers the range.

        Raises:
            _BrokenError: it is not, or the manifest's proof does not lead to it.
            BundleInvalidError: it is not text.
        """
        manifest, text, unknown = reader.manifest, reader.checkpoint(), None
        try:
            checkpoint = checkpoints.parse(note.parse(text).text)
            if checkpoint.origin != manifest.origin:
                raise SignatureError(f"it is of log {checkpoint.origin[:200]!r}, not of {manifest.origin!r}")
            if keyring is not None:
                checkpoints.open_checkpoint(text, keyring, origin=manifest.origin)
        except UnknownKeyError as error:
            unknown = str(error)
        except SignatureError as error:
            raise _BrokenError(BUNDLE, f"the bundle's checkpoint does not hold: {error}") from error
        root = bytes.fromhex(manifest.tree_root)
        hashes = [bytes.fromhex(text) for text in manifest.consistency]
        try:
            verify_consistency(manifest.tree_size, checkpoint.size, root, checkpoint.root, hashes)
        except ProofError as error:
            detail = f"the bundle's checkpoint is not of a log that begins with its entries: {error}"
            raise _BrokenError(BUNDLE, detail) from error
        return cls(checkpoint, unknown)


def _heads(manifest: Manifest, own: _Own, kept: KeptCheckpoint | None) -> tuple[list[TreeHead], str | None]:
    """The tree heads that the entries can be compared with, and why the kept one cannot."""
    heads = []
    if own.unknown is None:
        heads.append(TreeHead(manifest.tree_size, bytes.fromhex(manifest.tree_root), OWN))
    if kept is None or kept.unknown is not None:
        return heads, None
    head = kept.checkpoint
    if head.origin != manifest.origin:
        return heads, f"the checkpoint given is of log {head.origin!r}, the bundle of {manifest.origin!r}"
    if manifest.to_seq < head.size <= own.checkpoint.size:
        return heads, f"the checkpoint given covers {head.size} entries, the bundle ends at seq {manifest.to_seq}"
    heads.append(TreeHead(head.size, head.root, KEPT))
    return heads, None


def _open_snapshot(text: str, *, keyring: Keyring | None, seen: Counter[str]) -> OpenedSnapshot:
    opened = open_snapshot(text, keyring)
    seen[opened.claim.key_id] += 1
    return opened


# --- the verdict ------------------------------------------------------------------------------------------


def _add_manifest(verdict: dict[str, Any], signed: str, why: str | None) -> None:
    verdict["verdicts"] = {BUNDLE: signed, **verdict["verdicts"]}
    if signed == "unknown_key":
        verdict["valid"] = False
        verdict["first_break"] = verdict["first_break"] or _break(BUNDLE_SIGNATURE, f"the manifest's signature: {why}")


def _add_checkpoints(
    verdict: dict[str, Any], own: _Own, kept: KeptCheckpoint | None, keyring: Keyring | None, undecided: str | None
) -> None:
    """The verdict on checkpoints, where more than the comparison of roots decides it. What is broken stays so."""
    verdicts = verdict["verdicts"]
    if verdicts["checkpoint"] == "broken":
        return
    if own.unknown is not None or (kept is not None and kept.unknown is not None):
        verdicts["checkpoint"] = "unknown_key"
        verdict["valid"] = False
    elif keyring is None or undecided is not None:
        verdicts["checkpoint"] = "not_checked"


def _unjudged(own: _Own, kept: KeptCheckpoint | None, undecided: str | None) -> list[str]:
    """Which checkpoints say nothing here, and why."""
    left = []
    if own.unknown is not None:
        left.append(f"the checkpoint inside: {own.unknown}")
    if kept is None:
        left.append("no checkpoint kept elsewhere was given: that the log was longer once would not be seen")
    elif kept.unknown is not None:
        left.append(f"the checkpoint given: {kept.unknown}")
    return left if undecided is None else [*left, undecided]


def _left_out(found: Verdict, result: BundleVerdict, keyring: Keyring | None, unjudged: Sequence[str]) -> list[str]:
    left = []
    if keyring is None:
        left.append("no key was given, so no signature was checked: whoever made the file may have made it all up")
    if found.from_seq > 1:
        left.append(
            f"the range begins at seq {found.from_seq}: what came before, and the tree over all of it, is not here"
        )
    unsigned = result.verdict["unsigned_entries"]
    if unsigned > 0:
        left.append(f"no snapshot covers the last {unsigned} entries, from seq {found.signed_to.seq + 1} on")
    left += unjudged
    left.append("job states: bundles hold none, they follow from the entries")
    return left


def _broken(result: BundleVerdict, kind: str, detail: str, began_s: float) -> BundleVerdict:
    manifest = result.manifest
    result.verdict = {
        "tenant_id": manifest.tenant_id if manifest is not None else None,
        "valid": False,
        "entries_checked": 0,
        "from_seq": manifest.from_seq if manifest is not None else 0,
        "to_seq": manifest.to_seq if manifest is not None else 0,
        "head": Head(0, None, None)._asdict(),
        "verdicts": {BUNDLE: "broken"} | dict.fromkeys(ASPECTS, "not_checked"),
        "first_break": _break(kind, detail),
        "breaks": {kind: 1},
        "compared_with": None,
        "signed_to_seq": 0,
        "unsigned_entries": 0,
        "duration_ms": round((time.perf_counter() - began_s) * 1000, 1),
    }
    result.not_checked = ["the rows: the bundle itself does not hold, so nothing in it says anything"]
    return result


def _break(kind: str, detail: str) -> dict[str, Any]:
    return {"seq": 0, "kind": kind, "detail": detail, "expected": None, "actual": None}


def _digest(path: Path) -> tuple[str, int]:
    """SHA-256 and size of a file."""
    digest, size = sha256(), 0
    with path.open("rb") as file:
        while data := file.read(READ_BYTES):
            digest.update(data)
            size += len(data)
    return digest.hexdigest(), size
