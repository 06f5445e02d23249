"""What a bundle says of itself, judged by the keys of whoever verifies it: the manifest and the checkpoints.

``judged`` is the whole verification of an open bundle, whose container and digests ``signing.bundle.reader`` checked::

    1. the manifest's signature
    2. the checkpoints, and what external witnesses said of the log
    3. what this verifier verified before
    4. entries, snapshots, tree       ``ledger.verification``
    5. all of it together

The verdict object is that of a chain with one aspect more, ``bundle``: container, digests and manifest. Where that
is broken nothing else is looked at. Keys come from the caller alone; those inside a bundle are never used.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from ledger.errors import (
    BundleInvalidError,
    BundleRefusedError,
    BundleSignatureError,
    ProofError,
    SignatureError,
    UntrustedKeyError,
)
from ledger.verification.snapshot_check import OpenedSnapshot
from ledger.verification.tree_check import TreeHead
from ledger.verification.verdict import ASPECTS, Break, Head, Verdict
from signing.anchors import NOBODY, ExternalWitnesses, with_anchors
from signing.bundle.manifest import Manifest
from signing.bundle.reader import BundleReader
from signing.checkpoint import JudgedCheckpoint
from signing.envelope import Signed
from signing.keys import Keyring
from signing.manifest import judge_own_checkpoint
from signing.memory import FileVerdict, Memory, Observation, compared
from signing.snapshot import open_snapshot

BUNDLE: Final = "bundle"
"""The aspect that bundles have besides those of a chain, and the kind of a break in it."""
BUNDLE_SIGNATURE: Final = "bundle-signature"
"""The kind of a break in the manifest's signature."""
OWN, KEPT = "bundle", "file"
"""What ``compared_with`` calls the bundle's own checkpoint and one kept elsewhere."""


@dataclass(kw_only=True)
class BundleVerdict(FileVerdict):
    """What verifying one bundle came to."""

    manifest: Manifest | None = None
    """None when it could not be read."""
    manifest_keys: tuple[str, ...] = ()
    """Ids of the held keys whose signature of the manifest holds."""
    snapshot_keys: Counter[str] = field(default_factory=Counter)
    """Snapshots by the id of the key that each says signed it."""

    def to_json(self) -> dict[str, Any]:
        """The verdict object, and beside it what was verified."""
        about: dict[str, Any] = {"sha256": self.digest, "bytes": self.size_bytes}
        if self.manifest is not None:
            told = msgspec.structs.asdict(self.manifest)
            about |= {name: value for name, value in told.items() if name not in _UNTOLD}
        if self.checkpoint is not None:
            about["checkpoint"] = self.checkpoint.to_json()
        about["manifest_key_ids"] = list(self.manifest_keys)
        about["snapshot_key_ids"] = sorted(self.snapshot_keys)
        return {**self.combined(), "bundle": about}


_UNTOLD: Final = ("to_chain_link", "consistency", "format_version", "parts")
"""What of a manifest only its reader needs."""


async def judged(
    reader: BundleReader,
    keyring: Keyring | None,
    kept: JudgedCheckpoint | None,
    verify_rows: Callable[..., Awaitable[Verdict]],
    memory: Memory | None = None,
    outsiders: ExternalWitnesses = NOBODY,
) -> BundleVerdict:
    """The verdict on an open bundle, against the keys of ``keyring``, a checkpoint kept elsewhere, what was verified
    before and what ``outsiders`` said. Nothing is remembered here: the outcome says what is to be.

    Without ``keyring`` no signature is judged, and nothing vouches for what else is found. ``verify_rows`` is
    ``ledger.verification.verify`` over the bundle's rows.
    """
    began_s = time.perf_counter()
    manifest = reader.manifest
    result = BundleVerdict(digest=reader.digest, size_bytes=reader.size_bytes, manifest=manifest)

    def opened(text: str) -> OpenedSnapshot:
        snapshot = open_snapshot(text, keyring)
        result.snapshot_keys[snapshot.claim.key_id] += 1
        return snapshot

    try:
        # 1. Who signed the manifest.
        signed = Manifest.judge(reader.envelope, keyring)
        result.manifest_keys = signed.key_ids
        # 2. The checkpoints: the bundle's own, then the one kept elsewhere.
        own = _own_checkpoint(reader, keyring)
        result.checkpoint = own.checkpoint
        heads, undecided = _heads(manifest, own, kept)
        anchors = reader.anchors()
        # 3. What this verifier verified before.
        observation = _observed(reader, keyring, memory)
        heads += [] if observation is None else observation.heads
        # 4. The rows.
        found = await verify_rows(
            tenant_id=manifest.tenant_id,
            from_seq=manifest.from_seq if manifest.from_seq > 1 else None,
            open_snapshot=opened,
            checkpoints=heads,
            projection=False,
        )
    except BundleInvalidError as error:
        return _broken(result, error, time.perf_counter() - began_s)
    # 5. All of it together.
    verdict = found.to_json((time.perf_counter() - began_s) * 1000)
    if kept is not None and kept.unknown is None and kept.checkpoint[:2] == own.checkpoint[:2]:
        verdict = compared(verdict, kept.checkpoint, own.checkpoint, KEPT)
    verdict = verdict if observation is None else observation.compared_with_own(verdict)
    result.verdict = with_anchors(verdict, anchors, own.checkpoint, keyring, outsiders)
    _add_manifest(result.verdict, signed)
    _add_checkpoints(result.verdict, own, kept, keyring, undecided)
    if observation is not None:
        result.memory = observation.report(result.verdict)
    result.not_checked = _left_out(found, result, keyring, _unjudged(own, kept, undecided, observation))
    return result


def _observed(reader: BundleReader, keyring: Keyring | None, memory: Memory | None) -> Observation | None:
    if memory is None or keyring is None:
        return None
    tenant_id, note, last = reader.manifest.tenant_id, reader.checkpoint(), reader.manifest.to_seq
    return Observation.at(memory, tenant_id, note, keyring, datetime.now(UTC), to_seq=last, is_file=True)


def refused(error: BundleInvalidError, digest: str, size_bytes: int, seconds: float = 0) -> BundleVerdict:
    """The verdict on a file of this SHA-256 and size that cannot be opened as a bundle, for the reason given."""
    return _broken(BundleVerdict(digest=digest, size_bytes=size_bytes), error, seconds)


def refuse_unless_trusted(name: str, found: BundleVerdict, trusted_by: str = "bundle.trusted_keys") -> None:
    """Refuse what is broken, and what no trusted key signed. A range that begins later, or ends behind its last
    snapshot, may come in: the manifest, which a trusted key signed, covers every byte of it.

    Raises:
        BundleRefusedError, UntrustedKeyError: with the verdict; ``name`` is the file's, and ``trusted_by`` names the
            trusted keys.
    """
    verdicts, first = found.verdict["verdicts"], found.verdict["first_break"]
    if "broken" in verdicts.values():
        raise BundleRefusedError(f"{name} does not hold: {first['kind']}: {first['detail']}", found.to_json(), name)
    if "unknown_key" in verdicts.values() or verdicts["bundle"] != "ok":
        why = first["detail"] if first is not None else "a signature could not be checked"
        raise UntrustedKeyError(f"{name}: {why}; {trusted_by} names who is trusted", found.to_json(), name)


def _own_checkpoint(reader: BundleReader, keyring: Keyring | None) -> JudgedCheckpoint:
    """The bundle's own checkpoint.

    Raises:
        BundleInvalidError: it is none of this log that covers the range.
    """
    try:
        return judge_own_checkpoint(reader.manifest, reader.checkpoint(), keyring)
    except SignatureError as error:
        raise BundleInvalidError(f"the bundle's checkpoint does not hold: {error}") from error
    except ProofError as error:
        raise BundleInvalidError(
            f"the bundle's checkpoint is not of a log that begins with its entries: {error}"
        ) from error


def _heads(
    manifest: Manifest, own: JudgedCheckpoint, kept: JudgedCheckpoint | None
) -> tuple[list[TreeHead], str | None]:
    """The tree heads that the entries can be compared with, and why the kept one cannot."""
    heads = []
    if own.unknown is None:
        heads.append(TreeHead(manifest.tree_size, bytes.fromhex(manifest.tree_root), OWN, is_own=True))
    if kept is None or kept.unknown is not None:
        return heads, None
    head = kept.checkpoint
    if head.origin != manifest.origin:
        return heads, f"the checkpoint given is of log {head.origin!r}, the bundle of {manifest.origin!r}"
    if head.size == own.checkpoint.size > manifest.to_seq:
        return heads, None
    if manifest.to_seq < head.size < own.checkpoint.size:
        return heads, f"the checkpoint given covers {head.size} entries, the bundle ends at seq {manifest.to_seq}"
    heads.append(TreeHead(head.size, head.root, KEPT))
    return heads, None


# --- the verdict ------------------------------------------------------------------------------------------


def _add_manifest(verdict: dict[str, Any], signed: Signed) -> None:
    verdict["verdicts"] = {BUNDLE: signed.verdict, **verdict["verdicts"]}
    if signed.verdict == "unknown_key":
        verdict["valid"] = False
        why = Break(0, BUNDLE_SIGNATURE, f"the manifest's signature: {signed.detail}")._asdict()
        verdict["first_break"] = verdict["first_break"] or why


def _add_checkpoints(
    verdict: dict[str, Any],
    own: JudgedCheckpoint,
    kept: JudgedCheckpoint | None,
    keyring: Keyring | None,
    undecided: str | None,
) -> None:
    """The verdict on checkpoints, where more than the comparison of roots decides it. What is broken stays so."""
    verdict["not_compared"] = [] if undecided is None else [KEPT]
    verdicts = verdict["verdicts"]
    if verdicts["checkpoint"] == "broken":
        return
    if own.unknown is not None or (kept is not None and kept.unknown is not None):
        verdicts["checkpoint"] = "unknown_key"
        verdict["valid"] = False
    elif keyring is None or undecided is not None:
        verdicts["checkpoint"] = "not_checked"


def _unjudged(
    own: JudgedCheckpoint, kept: JudgedCheckpoint | None, undecided: str | None, observation: Observation | None
) -> list[str]:
    """Which checkpoints say nothing here, and why."""
    left = []
    if own.unknown is not None:
        left.append(f"the checkpoint inside: {own.unknown}")
    if observation is not None and observation.why_not is not None:
        left.append(f"what is remembered of this log: {observation.why_not}")
    if kept is None and (observation is None or not observation.before):
        left.append("no checkpoint kept elsewhere was given: that the log was longer once would not be seen")
    elif kept is not None and kept.unknown is not None:
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
    if found.from_seq > 1 and found.commitments:
        left.append("verdicts on proposals: each hangs on all entries before it, and not all are here")
    left.append("job states: bundles hold none, they follow from the entries")
    return left


def _broken(result: BundleVerdict, error: BundleInvalidError, seconds: float) -> BundleVerdict:
    """The verdict when the bundle itself does not hold."""
    manifest = result.manifest
    kind = BUNDLE_SIGNATURE if isinstance(error, BundleSignatureError) else BUNDLE
    result.verdict = {
        "tenant_id": manifest.tenant_id if manifest is not None else None,
        "valid": False,
        "entries_checked": 0,
        "from_seq": manifest.from_seq if manifest is not None else 0,
        "to_seq": manifest.to_seq if manifest is not None else 0,
        "head": Head(0, None, None)._asdict(),
        "verdicts": {BUNDLE: "broken"} | dict.fromkeys(ASPECTS, "not_checked"),
        "first_break": Break(0, kind, str(error))._asdict(),
        "breaks": {kind: 1},
        "compared_with": None,
        "not_compared": [],
        "anchors": [],
        "signed_to_seq": 0,
        "unsigned_entries": 0,
        "duration_ms": round(seconds * 1000, 1),
    }
    result.not_checked = ["the rows: the bundle itself does not hold, so nothing in it says anything"]
    return result
