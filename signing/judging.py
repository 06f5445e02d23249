"""Verify a bundle against what the verifier holds: keys, a checkpoint kept elsewhere, its memory of earlier
verifications, external witnesses and authorities. Verdicts on receipts (``signing.receipt_judging``) share parts of it.

``judge_bundle`` is the whole verification of an open bundle, whose container and digests ``signing.bundle.reader``
checked (docs/formats/bundle.md)::

    1. the manifest's signature
    2. the checkpoints, and the statements of external witnesses
    3. the checkpoints that this verifier remembers
    4. entries, snapshots, tree       ``ledger.verification``
    5. the combined verdict

The verdict object is that of a chain with one more aspect, ``bundle``: container, digests and manifest. If that is
broken, nothing else is checked. Keys come from the caller alone; keys inside a file are never used. Nothing is stored
here: the outcome names the checkpoint to remember.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from ledger import verification
from ledger.errors import (
    BundleInvalidError,
    BundleRefusedError,
    BundleSignatureError,
    NotABundleError,
    ProofError,
    SignatureError,
    UntrustedKeyError,
    reported_as,
)
from ledger.verification.caller_check import CallerJudge
from ledger.verification.snapshot_check import OpenedSnapshot
from ledger.verification.tree_check import TreeHead
from ledger.verification.verdict import ASPECTS, Break, Head, Verdict
from signing import manifest as manifests
from signing import retention_statement
from signing.anchors import NOBODY, ExternalWitnesses, with_anchors
from signing.bundle.manifest import Manifest
from signing.bundle.reader import BundleChainReader, BundleReader, digest_of
from signing.callers import judge_of
from signing.checkpoint import Checkpoint, JudgedCheckpoint
from signing.envelope import Signed
from signing.keys import Keyring
from signing.memory import Memory, Observation, compared
from signing.snapshot import open_snapshot

BUNDLE: Final = "bundle"
"""The aspect of bundles besides those of a chain, and the kind of a break in it."""
BUNDLE_SIGNATURE: Final = "bundle-signature"
"""The kind of a break in the manifest's signature."""
OWN, KEPT = "bundle", "file"
"""Names in ``compared_with`` of the bundle's own checkpoint and of one kept elsewhere."""

NO_KEY: Final = "no key was given, so no signature was checked: the author of the file may have invented all of it"
NONE_KEPT: Final = "no checkpoint kept elsewhere was given: that the log was longer once would not be seen"
_UNTOLD: Final = ("to_chain_link", "consistency", "format_version", "parts")
"""Fields of a manifest that only its reader needs."""


@dataclass(kw_only=True)
class FileVerdict:
    """The outcome of verifying one file."""

    digest: str
    """SHA-256 of the file, hex."""
    size_bytes: int
    verdict: dict[str, Any] = field(default_factory=dict)
    """The verdict object of the interfaces, with an aspect for the file itself."""
    checkpoint: Checkpoint | None = None
    """The checkpoint in the file; None if the file cannot be read."""
    not_checked: Sequence[str] = ()
    """The checks that could not be made, and why, in words."""
    memory: dict[str, Any] | None = None
    """The result of comparing with the memory of the verifier, as ``Observation.report`` gives it."""

    def combined(self, aspect: str, said: dict[str, Any], keys: dict[str, Any], **more: Any) -> dict[str, Any]:
        """The verdict object with the unchecked items, ``more``, the memory, and under ``aspect`` the file's own fields
        ``said`` and the ids of the ``keys`` that signed."""
        checkpoint = {} if self.checkpoint is None else {"checkpoint": self.checkpoint.to_json()}
        memory = {} if self.memory is None else {"memory": self.memory}
        about = {"sha256": self.digest, "bytes": self.size_bytes, **said, **checkpoint, **keys}
        return {**self.verdict, "not_checked": [*self.not_checked], **more, **memory, aspect: about}


def refused_verdict(
    tenant_id: str | None, aspects: Sequence[str], kind: str, error: Exception, seqs: tuple[int, int] = (0, 0)
) -> dict[str, Any]:
    """The verdict object if the file itself, the first of ``aspects``, is broken."""
    return {
        "tenant_id": tenant_id,
        "valid": False,
        "entries_checked": 0,
        "from_seq": seqs[0],
        "to_seq": seqs[1],
        "verdicts": {aspects[0]: "broken"} | dict.fromkeys(aspects[1:], "not_checked"),
        "first_break": Break(0, kind, str(error))._asdict(),
        "breaks": {kind: 1},
        "compared_with": None,
        "not_compared": [],
        "anchors": [],
    }


def is_valid(verdicts: Mapping[str, str]) -> bool:
    """Whether nothing is broken and no key is unknown."""
    return not {"broken", "unknown_key"} & set(verdicts.values())


def observed(
    memory: Memory | None, keyring: Keyring | None, tenant_id: str, note: str, to_seq: int, *, is_file: bool = False
) -> Observation | None:
    """The memory's observation of the log before a file is verified; None without a memory or trusted keys."""
    if memory is None or keyring is None:
        return None
    return Observation.at(memory, tenant_id, note, keyring, datetime.now(UTC), to_seq=to_seq, is_file=is_file)


def is_compared_elsewhere(kept: JudgedCheckpoint | None, observation: Observation | None) -> bool:
    """Whether there is a checkpoint from outside the file."""
    return kept is not None or (observation is not None and bool(observation.before))


def applying(reasons: Sequence[tuple[bool, str]]) -> list[str]:
    """The reasons that apply, out of pairs of whether it applies and the reason."""
    return [reason for applies, reason in reasons if applies]


# --- bundles ----------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class BundleVerdict(FileVerdict):
    """The outcome of verifying one bundle."""

    manifest: Manifest | None = None
    """None if it could not be read."""
    manifest_keys: tuple[str, ...] = ()
    """Ids of the held keys whose signature of the manifest is valid."""
    snapshot_keys: Counter[str] = field(default_factory=Counter)
    """Number of snapshots by the key id that each names as its signer."""

    def to_json(self) -> dict[str, Any]:
        """The verdict object, with the manifest's fields beside it."""
        fields = {} if self.manifest is None else msgspec.structs.asdict(self.manifest)
        said = {name: value for name, value in fields.items() if name not in _UNTOLD}
        keys = {"manifest_key_ids": list(self.manifest_keys), "snapshot_key_ids": sorted(self.snapshot_keys)}
        return self.combined(BUNDLE, said, keys)


async def verify_file(
    path: Path,
    keyring: Keyring | None,
    kept: JudgedCheckpoint | None = None,
    memory: Memory | None = None,
    external: ExternalWitnesses = NOBODY,
    on_break: Callable[[Break], object] | None = None,
    *,
    is_kept_of_many: bool = False,
) -> BundleVerdict:
    """The verdict on a bundle, whole or damaged. With ``is_kept_of_many``, a checkpoint ``kept`` that is of another log
    is for another bundle, and ignored.

    Raises:
        NotABundleError: the file is not a bundle.
        OSError: the file cannot be read.
    """
    began_s = time.perf_counter()
    try:
        with BundleReader.open(path, keyring) as reader:
            if is_kept_of_many and kept is not None and kept.checkpoint.origin != reader.manifest.origin:
                kept = None
            return await judge_bundle(BundleChainReader(reader), keyring, kept, memory, external, on_break)
    except NotABundleError:
        raise
    except BundleInvalidError as error:
        return refused(error, *digest_of(path), time.perf_counter() - began_s)


async def judge_bundle(
    rows: BundleChainReader,
    keyring: Keyring | None,
    kept: JudgedCheckpoint | None = None,
    memory: Memory | None = None,
    external: ExternalWitnesses = NOBODY,
    on_break: Callable[[Break], object] | None = None,
    callers: CallerJudge | None = None,
) -> BundleVerdict:
    """The verdict on an open bundle, against the keys of ``keyring``, a checkpoint kept elsewhere, the verifier's
    memory and statements of ``external`` witnesses. ``on_break`` is called with each break of the rows. ``callers`` are
    by default those of ``keyring``.

    Without ``keyring`` no signature is verified, and no key vouches for the rest of the verdict.
    """
    began_s = time.perf_counter()
    reader, manifest = rows.bundle, rows.bundle.manifest
    result = BundleVerdict(digest=reader.digest, size_bytes=reader.size_bytes, manifest=manifest)
    try:
        # 1. The manifest's signature.
        signed = Manifest.judge(reader.envelope, keyring)
        result.manifest_keys = signed.key_ids
        # 2. The checkpoints: the bundle's own, then the one kept elsewhere.
        own = _own_checkpoint(reader, keyring)
        result.checkpoint = own.checkpoint
        heads, undecided = _heads(manifest, own, kept)
        anchors = reader.anchors()
        # 3. The checkpoints that this verifier remembers.
        observation = observed(memory, keyring, manifest.tenant_id, reader.checkpoint(), manifest.to_seq, is_file=True)
        heads += [] if observation is None else observation.heads
        # 4. The rows.
        found = await verification.verify(
            rows,
            tenant_id=manifest.tenant_id,
            from_seq=manifest.from_seq if manifest.from_seq > 1 else None,
            open_snapshot=partial(_opened, result, keyring),
            checkpoints=heads,
            projection=False,
            on_break=on_break,
            judge_statement=partial(retention_statement.judge, manifest.origin, keyring),
            is_all_read=True,
            callers=judge_of(keyring) if callers is None else callers,
        )
    except BundleInvalidError as error:
        return _broken(result, error, time.perf_counter() - began_s)
    # 5. The combined verdict.
    undecided = undecided or _below_floor(found, kept)
    verdict = found.to_json((time.perf_counter() - began_s) * 1000)
    if kept is not None and kept.unknown is None and kept.checkpoint[:2] == own.checkpoint[:2]:
        verdict = compared(verdict, kept.checkpoint, own.checkpoint, KEPT)
    verdict = verdict if observation is None else observation.compared_with_own(verdict)
    verdict = with_anchors(verdict, anchors, own.checkpoint, keyring, external)
    result.verdict = _with_signatures(verdict, signed, own, kept, keyring, undecided)
    if observation is not None:
        result.memory = observation.report(result.verdict)
    result.not_checked = _left_out(found, result.verdict, own, kept, keyring, undecided, observation)
    return result


def _opened(result: BundleVerdict, keyring: Keyring | None, text: str) -> OpenedSnapshot:
    """A snapshot of the bundle; its key is counted in ``result``."""
    snapshot = open_snapshot(text, keyring)
    result.snapshot_keys[snapshot.claim.key_id] += 1
    return snapshot


def refused(error: BundleInvalidError, digest: str, size_bytes: int, seconds: float = 0) -> BundleVerdict:
    """The verdict on a file of this SHA-256 and size that cannot be opened as a bundle, for the reason given."""
    return _broken(BundleVerdict(digest=digest, size_bytes=size_bytes), error, seconds)


def refuse_unless_trusted(name: str, found: BundleVerdict, trusted_by: str = "bundle.trusted_keys") -> None:
    """Reject a broken bundle, and one that no trusted key signed. A range that begins later, or ends after its last
    snapshot, is accepted: the manifest, which a trusted key signed, covers every byte of it.

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
        BundleInvalidError: it is of another log, or does not cover the range.
    """
    with (
        reported_as(BundleInvalidError, "the bundle's checkpoint does not hold", SignatureError),
        reported_as(
            BundleInvalidError, "the bundle's checkpoint is not of a log that begins with its entries", ProofError
        ),
    ):
        return manifests.judge_own_checkpoint(reader.manifest, reader.checkpoint(), keyring)


def _heads(
    manifest: Manifest, own: JudgedCheckpoint, kept: JudgedCheckpoint | None
) -> tuple[list[TreeHead], str | None]:
    """The tree heads to compare the entries with, and why the kept one cannot be compared."""
    tree_head = TreeHead(manifest.tree_size, bytes.fromhex(manifest.tree_root), OWN, is_own=True)
    heads = [tree_head] if own.unknown is None else []
    if kept is None or kept.unknown is not None:
        return heads, None
    head = kept.checkpoint
    if head.origin != manifest.origin:
        return heads, f"the checkpoint given is of log {head.origin!r}, the bundle of {manifest.origin!r}"
    if head.size == own.checkpoint.size > manifest.to_seq:
        return heads, None
    if manifest.to_seq < head.size < own.checkpoint.size:
        return heads, f"the checkpoint given covers {head.size} entries, the bundle ends at seq {manifest.to_seq}"
    return [*heads, TreeHead(head.size, head.root, KEPT)], None


def _below_floor(found: Verdict, kept: JudgedCheckpoint | None) -> str | None:
    """Why a kept checkpoint of entries that left cannot be compared."""
    if kept is None or kept.unknown is not None or found.floor is None or kept.checkpoint.size >= found.floor.to_seq:
        return None
    return f"the checkpoint given covers {kept.checkpoint.size} entries, and those up to {found.floor.to_seq} have left"


def _with_signatures(
    verdict: dict[str, Any],
    signed: Signed,
    own: JudgedCheckpoint,
    kept: JudgedCheckpoint | None,
    keyring: Keyring | None,
    undecided: str | None,
) -> dict[str, Any]:
    """``verdict`` with that on the manifest's signature, and on checkpoints if more than the comparison of roots
    decides it. A broken aspect stays broken."""
    verdicts = {BUNDLE: signed.verdict, **verdict["verdicts"]}
    if verdicts["checkpoint"] != "broken":
        if own.unknown is not None or (kept is not None and kept.unknown is not None):
            verdicts["checkpoint"] = "unknown_key"
        elif keyring is None or undecided is not None:
            verdicts["checkpoint"] = "not_checked"
    if (first := verdict["first_break"]) is None and signed.verdict == "unknown_key":
        first = Break(0, BUNDLE_SIGNATURE, f"the manifest's signature: {signed.detail}")._asdict()
    return {
        **verdict,
        "verdicts": verdicts,
        "valid": is_valid(verdicts),
        "first_break": first,
        "not_compared": [] if undecided is None else [KEPT],
    }


def _left_out(
    found: Verdict,
    verdict: Mapping[str, Any],
    own: JudgedCheckpoint,
    kept: JudgedCheckpoint | None,
    keyring: Keyring | None,
    undecided: str | None,
    observation: Observation | None,
) -> list[str]:
    """The checks that could not be made, and why."""
    unsigned, later = verdict["unsigned_entries"], f"the range begins at seq {found.from_seq}"
    older = None if observation is None else observation.why_not
    unknown = None if kept is None else kept.unknown
    return applying(
        (
            (keyring is None, NO_KEY),
            (not found.is_from_start, f"{later}: what came before, and the tree over all of it, is not here"),
            (
                unsigned > 0,
                f"no signed snapshot covers the last {unsigned} entries, from seq {found.signed_to.seq + 1} on",
            ),
            (own.unknown is not None, f"the checkpoint inside: {own.unknown}"),
            (older is not None, f"what is remembered of this log: {older}"),
            (not is_compared_elsewhere(kept, observation), NONE_KEPT),
            (unknown is not None, f"the checkpoint given: {unknown}"),
            (undecided is not None, f"{undecided}"),
            (
                not found.is_from_start and found.commitments > 0,
                "verdicts on proposals: each hangs on all entries before it, and not all are here",
            ),
            (True, "job states: bundles hold none, they follow from the entries"),
        )
    )


def _broken(result: BundleVerdict, error: BundleInvalidError, seconds: float) -> BundleVerdict:
    """The verdict if the bundle itself is broken."""
    manifest = result.manifest
    kind = BUNDLE_SIGNATURE if isinstance(error, BundleSignatureError) else BUNDLE
    tenant_id, seqs = (None, (0, 0)) if manifest is None else (manifest.tenant_id, (manifest.from_seq, manifest.to_seq))
    result.verdict = refused_verdict(tenant_id, (BUNDLE, *ASPECTS), kind, error, seqs) | {
        "head": Head(0, None, None)._asdict(),
        "signed_to_seq": 0,
        "unsigned_entries": 0,
        "duration_ms": round(seconds * 1000, 1),
    }
    result.not_checked = ["the rows: the bundle itself does not hold, so nothing in it says anything"]
    return result
