"""Verifying a receipt against what the verifier holds: keys, a checkpoint kept elsewhere, witnesses, authorities.

``judged`` is the whole verification of a file, the steps of docs/formats/receipt.md::

    1. form, encoding, bounds; the job of the entries       signing.receipt
    2. the statement that covers every byte, and its signature
    3. each entry, and what its caller signed
    4. the checkpoint
    5. the proof that it covers each entry
    6. the statements of external witnesses about the log
    7. the checkpoint kept elsewhere, and the verifier's memory
    8. that there are no other entries, by the index of jobs

If 1 or 2 is broken, nothing else is checked. Keys come from the caller alone; keys inside the file are never used.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import UnsetType

from ledger.errors import (
    InvalidInputError,
    ProofError,
    ReceiptInvalidError,
    ReceiptSignatureError,
    SignatureError,
    refuse,
)
from ledger.job_index.proof import verify_job
from ledger.merkle import leaf_hash, verify_consistency, verify_inclusion
from ledger.positions import Seq, leaf_index_of
from ledger.verification.caller_check import CallerChecker, Repetitions
from ledger.verification.entry_check import check_apart
from ledger.verification.snapshot_check import LACKS_ONE
from ledger.verification.verdict import Break, Findings, graver, rollback, with_checkpoint
from signing import manifest as manifests
from signing import receipt as receipts
from signing.anchors import NOBODY, ExternalWitnesses, with_anchors
from signing.callers import judge_of
from signing.checkpoint import Checkpoint, JudgedCheckpoint, judge_checkpoint
from signing.checkpoint import read as read_checkpoint
from signing.envelope import Signed
from signing.judging import (
    KEPT,
    NO_KEY,
    NONE_KEPT,
    FileVerdict,
    applying,
    is_compared_elsewhere,
    is_valid,
    observed,
    refused_verdict,
)
from signing.keys import Keyring
from signing.memory import MEMORY, Memory, Observation, is_compared_with
from signing.receipt import Receipt
from signing.snapshot import open_snapshot

RECEIPT: Final = "receipt"
"""The aspect of receipts besides those of a chain, and the kind of a break in it."""
RECEIPT_SIGNATURE: Final = "receipt-signature"
COMPLETENESS: Final = "completeness"
"""The aspect, and the kind of a break in it, of receipts that prove that there are no other entries."""
CHECKPOINT_SIGNATURE: Final = "checkpoint-signature"
"""Kinds of a break in the signature of the statement, and of the checkpoint."""
ASPECTS: Final = (RECEIPT, "links", "payloads", "tree", "signatures", "checkpoint")

_SOME: Final = "what came after the checkpoint, and that there are no other entries: a receipt shows those in it"
_SAYS: Final = "what the entries say: the ledger records who said what, and when by its clocks"
_NO_PROOF: Final = "the receipt says nothing of the log at that size; tally prove --checkpoint makes one that does"


@dataclass(kw_only=True)
class ReceiptVerdict(FileVerdict):
    """The outcome of verifying one receipt."""

    receipt: Receipt | None = None
    """None if it could not be read."""
    signed_by: tuple[str, ...] = ()
    """Ids of the held keys whose signature of the statement is valid."""
    complete_from_seq: int | None = None
    complete_to_seq: int | None = None
    """Between which entries the job is proved to have no others, None if it is not."""

    @property
    def limits(self) -> list[str]:
        """What the receipt does not prove, in words."""
        first, last = self.complete_from_seq, self.complete_to_seq
        some = _SOME if last is None else f"what came after seq {last}: of later entries a receipt shows those in it"
        before = [f"what came before seq {first}, where the index of jobs begins"] if first not in (None, 1) else []
        return [some, *before, _SAYS]

    def to_json(self) -> dict[str, Any]:
        """The verdict object, with the receipt's fields beside it."""
        said: dict[str, Any] = {}
        if self.receipt is not None:
            rows = [entry.row for entry in self.receipt.entries]
            said = {name: getattr(self.receipt, name) for name in receipts.STATED}
            said["complete_from_seq"] = self.complete_from_seq
            said["complete_to_seq"] = self.complete_to_seq
            said["entries"] = [{"seq": row.seq, "hlc": row.t_hlc, "action": row.action} for row in rows]
        return self.combined(RECEIPT, said, {"key_ids": list(self.signed_by)}, limits=self.limits)


def judged(
    file: bytes,
    keyring: Keyring | None,
    kept: JudgedCheckpoint | None = None,
    memory: Memory | None = None,
    external: ExternalWitnesses = NOBODY,
) -> ReceiptVerdict:
    """The verdict on a file. Its content never makes this raise.

    Without ``keyring`` no signature is verified, and no key vouches for the rest of the verdict.
    """
    began_s = time.perf_counter()
    result = ReceiptVerdict(digest=sha256(file).hexdigest(), size_bytes=len(file))
    try:
        # 1. The file, and the statement that covers every byte of it.
        receipt, opened = receipts.read(file)
        result.receipt, result.checkpoint = receipt, receipt.tree_head
        # 2. The signature of the statement.
        signed = manifests.judge(opened, keyring, "the receipt", ReceiptSignatureError)
        result.signed_by = signed.key_ids
        _judge_content(result, receipt, signed, keyring, kept, memory, external)
    except ReceiptInvalidError as error:
        kind = RECEIPT_SIGNATURE if isinstance(error, ReceiptSignatureError) else RECEIPT
        result.verdict = refused_verdict(
            None if result.receipt is None else result.receipt.tenant_id, ASPECTS, kind, error
        )
        result.not_checked = ["the entries: the receipt itself does not hold, so nothing in it says anything"]
    result.verdict["duration_ms"] = round((time.perf_counter() - began_s) * 1000, 1)
    return result


def _judge_content(
    result: ReceiptVerdict,
    receipt: Receipt,
    signed: Signed,
    keyring: Keyring | None,
    kept: JudgedCheckpoint | None,
    memory: Memory | None,
    external: ExternalWitnesses,
) -> None:
    """Put into ``result`` the verdict on a receipt whose form and statement are valid."""
    own, findings = receipt.tree_head, Findings()
    findings.begin("links", "payloads", "tree", "signatures")
    # 3. The entries. A link of version 1 does not identify its entry.
    if check_apart(receipt.tenant_id, [entry.row.row() for entry in receipt.entries], findings):
        findings.leave_undecided("links")
    # What callers signed, and that none of it is there twice.
    callers, repetitions = CallerChecker(receipt.tenant_id, findings, judge_of(keyring)), Repetitions()
    callers.check_rows([entry.row.row() for entry in receipt.entries])
    repetitions.add(bytes(callers.signed))
    repetitions.report(findings)
    # 4. The checkpoint's signature, and 5. that the checkpoint covers the entries.
    log_signed = _judge_log(receipt, keyring)
    _check_inclusion(receipt, own, findings)
    verdict = _verdict(receipt, findings, signed, log_signed)
    # 6. The statements of external witnesses. The quorum is to cover all that the receipt is about.
    whole = _judge_completeness(receipt, own, keyring)
    reach = max(receipt.last_seq, whole.to_seq or 0) if whole is not None else receipt.last_seq
    verdict = with_anchors(verdict, receipt.anchors, own, keyring, external, reach)
    # 7. The checkpoint kept elsewhere, and the memory.
    last_seq = receipt.last_seq or own.size
    observation = observed(memory, keyring, receipt.tenant_id, receipt.checkpoint, last_seq)
    for seen in () if observation is None else observation.before:
        verdict = _compared(verdict, receipt, own, seen.checkpoint, MEMORY)
    verdict = _with_kept(verdict, receipt, own, kept)
    # 8. That there are no other entries.
    if whole is not None:
        result.complete_from_seq, result.complete_to_seq = whole.from_seq, whole.to_seq
        verdict = {**verdict, "verdicts": verdict["verdicts"] | {COMPLETENESS: whole.verdict}}
        verdict["valid"] = is_valid(verdict["verdicts"])
    # Why signatures are not valid, unless a graver break is reported already.
    outcomes = [(CHECKPOINT_SIGNATURE, *log_signed[:2]), (RECEIPT_SIGNATURE, *signed[:2])]
    for kind, outcome, detail in (*outcomes, *([] if whole is None else [(COMPLETENESS, *whole[:2])])):
        if outcome in ("broken", "unknown_key"):
            verdict["breaks"] = verdict["breaks"] | {kind: 1}
            verdict["first_break"] = verdict["first_break"] or Break(0, kind, detail or "")._asdict()
    result.verdict = verdict
    if observation is not None:
        result.memory = observation.report(verdict, "a receipt shows some entries, not all from the first on")
    result.not_checked = _not_in_receipt(verdict, own, keyring, kept, observation)


def _judge_log(receipt: Receipt, keyring: Keyring | None) -> Signed:
    """The log's signature of the checkpoint, verified."""
    if keyring is None:
        return Signed("not_checked", None, ())
    try:
        unknown = judge_checkpoint(receipt.checkpoint, keyring).unknown
    except SignatureError as error:
        return Signed("broken", f"the signature of the checkpoint does not hold: {error}", ())
    return Signed("ok", None, ()) if unknown is None else Signed("unknown_key", f"the checkpoint: {unknown}", ())


def _check_inclusion(receipt: Receipt, own: Checkpoint, findings: Findings) -> None:
    for entry in receipt.entries:
        seq, hashes = entry.row.seq, [bytes.fromhex(each) for each in entry.inclusion]
        try:
            verify_inclusion(
                leaf_index_of(Seq(seq)), own.size, leaf_hash(bytes.fromhex(entry.row.chain_link)), hashes, own.root
            )
        except (ProofError, ValueError) as error:
            findings.add("tree", seq, f"the checkpoint does not cover seq {seq} as it is here: {error}")


class _Whole(NamedTuple):
    """Whether a receipt proves that there are no other entries, and up to which one."""

    verdict: str
    detail: str | None
    from_seq: int | None = None
    to_seq: int | None = None


def _judge_completeness(receipt: Receipt, own: Checkpoint, keyring: Keyring | None) -> _Whole | None:
    """Judge the proof that there are no other entries; None if the receipt has none."""
    if isinstance(said := receipt.completeness, UnsetType):
        return None
    try:
        opened = open_snapshot(msgspec.json.encode(said.snapshot).decode(), keyring)
        claim, roots = opened.claim, [*opened.claim.index_roots.values()]
        refuse(
            ProofError,
            (claim.tenant_id != receipt.tenant_id, f"the snapshot is of tenant {claim.tenant_id}"),
            (not roots, "the snapshot has no index of jobs"),
            (claim.to_seq > own.size, f"the snapshot covers {claim.to_seq} entries, the checkpoint {own.size}"),
        )
        tree_root, hashes = bytes.fromhex(claim.tree_root), [*map(bytes.fromhex, said.consistency)]
        verify_consistency(claim.tree_size, own.size, tree_root, own.root, hashes)
        rows = [entry.row for entry in receipt.entries if claim.index_begin < entry.row.seq <= claim.to_seq]
        entries = [(leaf_index_of(Seq(row.seq)), leaf_hash(bytes.fromhex(row.chain_link))) for row in rows]
        verify_job(receipt.job_id, claim.to_seq, roots, entries, said.runs, claim.index_begin)
    except (ProofError, SignatureError, InvalidInputError, ValueError) as error:
        return _Whole("broken", f"that there are no other entries: {error}")
    if opened.verdict == LACKS_ONE:
        return _Whole("not_checked", f"the snapshot with the index of jobs carries {opened.detail}")
    if opened.verdict in ("broken", "unknown_key"):
        return _Whole(opened.verdict, f"the snapshot with the index of jobs: {opened.detail}")
    return _Whole(opened.verdict, opened.detail, claim.index_begin + 1, claim.to_seq)


def _verdict(receipt: Receipt, findings: Findings, signed: Signed, log_signed: Signed) -> dict[str, Any]:
    """The verdict object on the receipt's own content."""
    found, first = findings.verdicts(), findings.first_break()
    verdicts = {
        RECEIPT: signed.verdict,
        **{aspect: found[aspect] for aspect in ("links", "payloads", "tree")},
        "signatures": graver(log_signed.verdict, found["signatures"]),
        "checkpoint": "not_checked",
    }
    return {
        "tenant_id": receipt.tenant_id,
        "valid": is_valid(verdicts),
        "entries_checked": len(receipt.entries),
        "from_seq": min(receipt.seqs, default=0),
        "to_seq": receipt.last_seq,
        "verdicts": verdicts,
        "first_break": None if first is None else first._asdict(),
        "breaks": findings.counts(),
        "compared_with": None,
        "not_compared": [],
        "anchors": [],
    }


def _with_kept(
    verdict: dict[str, Any], receipt: Receipt, own: Checkpoint, kept: JudgedCheckpoint | None
) -> dict[str, Any]:
    """``verdict`` with the kept checkpoint compared, or reported as one that could not be."""
    if kept is None:
        return verdict
    if kept.unknown is not None:
        return with_checkpoint(verdict, "unknown_key", KEPT)
    if kept.checkpoint.origin == own.origin:
        verdict = _compared(verdict, receipt, own, kept.checkpoint, KEPT)
    return verdict if is_compared_with(verdict, KEPT) else {**verdict, "not_compared": [KEPT]}


def _compared(
    verdict: dict[str, Any], receipt: Receipt, own: Checkpoint, kept: Checkpoint, source: str
) -> dict[str, Any]:
    """``verdict`` with ``kept``, a checkpoint of this log held by ``source``, compared, if the receipt proves the log's
    root at that size."""
    if (agrees := _agrees(receipt, own, kept)) is None:
        return verdict
    detail = f"the log of the receipt does not begin with the checkpoint of {source}, of {kept.size} entries"
    root = own.root.hex() if own.size == kept.size else None
    found = None if agrees else rollback(kept.size, detail, kept.root.hex(), root)
    return with_checkpoint(verdict, "ok" if agrees else "broken", source, found)


def _agrees(receipt: Receipt, own: Checkpoint, kept: Checkpoint) -> bool | None:
    """Whether the log had the root of ``kept`` at its size, None if the receipt does not show it."""
    if kept.size == own.size:
        return kept.root == own.root
    if receipt.extends is not None and receipt.extends.size == kept.size:
        return _leads(kept, receipt.extends.consistency, own)
    for anchor in receipt.anchors:
        with suppress(SignatureError):
            said = read_checkpoint(anchor.checkpoint)
            if said.size == kept.size and _leads(said, anchor.consistency, own):
                return kept.root == said.root
    return None


def _leads(first: Checkpoint, consistency: Sequence[str], own: Checkpoint) -> bool:
    """Whether a proof leads from the tree of ``first`` to that of ``own``."""
    try:
        verify_consistency(first.size, own.size, first.root, own.root, [*map(bytes.fromhex, consistency)])
    except ProofError:
        return False
    return True


def _not_in_receipt(
    verdict: Mapping[str, Any],
    own: Checkpoint,
    keyring: Keyring | None,
    kept: JudgedCheckpoint | None,
    observation: Observation | None,
) -> list[str]:
    """The checks that could not be made, and why."""
    v1 = "which entry a link of version 1 is of: it binds neither tenant nor seq, and other entries have the same"
    reasons = [
        (keyring is None, NO_KEY),
        (verdict["verdicts"]["links"] == "not_checked", v1),
        (not is_compared_elsewhere(kept, observation), NONE_KEPT),
    ]
    if kept is not None:
        given, is_left = kept.checkpoint, bool(verdict["not_compared"])
        of_log = f"it is of log {given.origin!r}, the receipt of {own.origin!r}"
        why = of_log if given.origin != own.origin else f"it covers {given.size} entries, and {_NO_PROOF}"
        is_unknown = kept.unknown is not None and not is_left
        reasons += [(is_left, f"the checkpoint given: {why}"), (is_unknown, f"the checkpoint given: {kept.unknown}")]
    if observation is not None:
        is_left = not is_compared_with(verdict, MEMORY)
        remembered = [f"{seen.checkpoint.size} entries, and {_NO_PROOF}" for seen in observation.before]
        reasons += [(is_left, f"what is remembered of this log: {each}") for each in remembered]
    return applying(reasons)
