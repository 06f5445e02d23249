"""Judging a receipt by what its verifier brings: keys, a checkpoint kept elsewhere, witnesses, authorities.

``judged`` is the whole verification of a file, the steps of docs/formats/receipt.md::

    1. form, spelling, bounds; whose entries they are       signing.receipt
    2. the statement that covers every byte, and its signature
    3. each entry
    4. the checkpoint
    5. the proof that it covers each entry
    6. what external witnesses said of the log
    7. what was kept, and what this verifier remembers

Where 1 or 2 is broken nothing else is looked at. Keys come from the caller alone; those inside are never used.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any, Final

from ledger.errors import ProofError, ReceiptInvalidError, ReceiptSignatureError, SignatureError
from ledger.merkle import leaf_hash, verify_consistency, verify_inclusion
from ledger.positions import Seq, leaf_index_of
from ledger.verification.entry_check import check_apart
from ledger.verification.verdict import Break, Findings, rollback, with_checkpoint
from signing import receipt as form
from signing.anchors import NOBODY, ExternalWitnesses, with_anchors
from signing.checkpoint import Checkpoint, JudgedCheckpoint, judge_checkpoint
from signing.checkpoint import read as read_checkpoint
from signing.envelope import Signed
from signing.keys import Keyring
from signing.manifest import judge
from signing.memory import MEMORY, FileVerdict, Memory, Observation
from signing.receipt import Receipt

RECEIPT: Final = "receipt"
"""The aspect that receipts have besides those of a chain, and the kind of a break in it."""
RECEIPT_SIGNATURE: Final = "receipt-signature"
CHECKPOINT_SIGNATURE: Final = "checkpoint-signature"
"""Kinds of a break in the signature of the statement, and of the checkpoint."""
ASPECTS: Final = (RECEIPT, "links", "payloads", "tree", "signatures", "checkpoint")
KEPT: Final = "file"
"""What ``compared_with`` calls a checkpoint kept elsewhere."""

LIMITS: Final = (
    "what came after the checkpoint, and that there are no other entries: a receipt shows those in it",
    "what the entries say: the ledger records who said what, and when by its clocks",
)
"""What no receipt shows, in words."""


@dataclass(kw_only=True)
class ReceiptVerdict(FileVerdict):
    """What verifying one receipt came to."""

    receipt: Receipt | None = None
    """None when it could not be read."""
    signed_by: tuple[str, ...] = ()
    """Ids of the held keys whose signature of the statement holds."""

    def to_json(self) -> dict[str, Any]:
        """The verdict object, and beside it what was verified."""
        about: dict[str, Any] = {"sha256": self.digest, "bytes": self.size_bytes}
        if self.receipt is not None:
            about |= {name: getattr(self.receipt, name) for name in form.STATED}
            about["entries"] = [
                {"seq": each.row.seq, "hlc": each.row.t_hlc, "action": each.row.action} for each in self.receipt.entries
            ]
        if self.checkpoint is not None:
            about["checkpoint"] = self.checkpoint.to_json()
        about["key_ids"] = list(self.signed_by)
        return {**self.combined(limits=list(LIMITS)), "receipt": about}


def judged(
    file: bytes,
    keyring: Keyring | None,
    kept: JudgedCheckpoint | None = None,
    memory: Memory | None = None,
    outsiders: ExternalWitnesses = NOBODY,
) -> ReceiptVerdict:
    """The verdict on a file; whatever it holds, nothing but this is the outcome. Nothing is remembered.

    Without ``keyring`` no signature is judged, and nothing vouches for what else is found.
    """
    began_s = time.perf_counter()
    result = ReceiptVerdict(digest=sha256(file).hexdigest(), size_bytes=len(file))
    try:
        # 1. The file, and the statement that covers every byte of it.
        opened = form.read(file)
        receipt = result.receipt = opened.receipt
        own = result.checkpoint = receipt.tree_head
        # 2. Who signed that.
        signed = judge(opened.envelope, keyring, "the receipt", ReceiptSignatureError)
    except ReceiptInvalidError as error:
        result.verdict = {**_broken(result.receipt, error), "duration_ms": _elapsed_ms(began_s)}
        result.not_checked.append("the entries: the receipt itself does not hold, so nothing in it says anything")
        return result
    # 3. The entries.
    findings = Findings()
    links = _check_entries(receipt, findings)
    # 4. The checkpoint's signature, and 5. that the checkpoint covers the entries.
    log_signed = _judge_own(receipt, keyring)
    _check_inclusion(receipt, own, findings)
    verdict = _verdict(receipt, findings, links, signed, log_signed)
    # 6. What external witnesses said.
    verdict = with_anchors(verdict, receipt.anchors, own, keyring, outsiders)
    # 7. What was kept, and what is remembered.
    observation = None
    if memory is not None and keyring is not None:
        now, last = datetime.now(UTC), receipt.seqs[-1]
        observation = Observation.at(memory, receipt.tenant_id, receipt.checkpoint, keyring, now, to_seq=last)
        for seen in observation.before:
            verdict = _compared(verdict, receipt, own, seen.checkpoint, MEMORY)
    verdict = _with_signatures(_with_kept(verdict, receipt, own, kept), signed, log_signed)
    result.verdict = {**verdict, "duration_ms": _elapsed_ms(began_s)}
    result.signed_by = signed.key_ids
    if observation is not None:
        result.memory = observation.report(
            result.verdict, never_whole="a receipt shows some entries, not all from the first on"
        )
    result.not_checked = [*_left_out(result.verdict, own, keyring, kept, observation)]
    return result


def _elapsed_ms(began_s: float) -> float:
    return round((time.perf_counter() - began_s) * 1000, 1)


# --- the steps --------------------------------------------------------------------------------------------


def _check_entries(receipt: Receipt, findings: Findings) -> str:
    """Judge each entry; ``not_checked`` where a link cannot say which entry it is of, else ``ok``."""
    for aspect in ("links", "payloads"):
        findings.begin(aspect)
    relied_on_v1 = check_apart(receipt.tenant_id, [entry.row.row() for entry in receipt.entries], findings)
    return "not_checked" if relied_on_v1 else "ok"


def _judge_own(receipt: Receipt, keyring: Keyring | None) -> Signed:
    if keyring is None:
        return Signed("not_checked", None, ())
    try:
        unknown = judge_checkpoint(receipt.checkpoint, keyring).unknown
    except SignatureError as error:
        return Signed("broken", f"the signature of the checkpoint does not hold: {error}", ())
    return Signed("ok", None, ()) if unknown is None else Signed("unknown_key", f"the checkpoint: {unknown}", ())


def _check_inclusion(receipt: Receipt, own: Checkpoint, findings: Findings) -> None:
    findings.begin("tree")
    for entry in receipt.entries:
        seq, hashes = entry.row.seq, [bytes.fromhex(each) for each in entry.inclusion]
        try:
            leaf = leaf_hash(bytes.fromhex(entry.row.chain_link))
            verify_inclusion(leaf_index_of(Seq(seq)), own.size, leaf, hashes, own.root)
        except (ProofError, ValueError) as error:
            findings.add("tree", seq, f"the checkpoint does not cover seq {seq} as it is here: {error}")


def _with_kept(
    verdict: dict[str, Any], receipt: Receipt, own: Checkpoint, kept: JudgedCheckpoint | None
) -> dict[str, Any]:
    """``verdict`` with the checkpoint that was given compared, or named as one that could not be."""
    if kept is None:
        return verdict
    if kept.unknown is not None:
        return with_checkpoint(verdict, "unknown_key", KEPT)
    if kept.checkpoint.origin == own.origin:
        verdict = _compared(verdict, receipt, own, kept.checkpoint, KEPT)
    if KEPT in (verdict["compared_with"] or "").split(", "):
        return verdict
    return {**verdict, "not_compared": [KEPT]}


def _compared(
    verdict: dict[str, Any], receipt: Receipt, own: Checkpoint, kept: Checkpoint, source: str
) -> dict[str, Any]:
    """``verdict`` with ``kept``, of this log and held by ``source``, compared, if the receipt says what the log had at
    that size."""
    agrees = _agrees(receipt, own, kept)
    if agrees is None:
        return verdict
    if agrees:
        return with_checkpoint(verdict, "ok", source)
    detail = f"the log of the receipt does not begin with the checkpoint of {source}, of {kept.size} entries"
    root = own.root.hex() if own.size == kept.size else None
    return with_checkpoint(verdict, "broken", source, rollback(kept.size, detail, kept.root.hex(), root))


def _agrees(receipt: Receipt, own: Checkpoint, kept: Checkpoint) -> bool | None:
    """Whether the log had the root of ``kept`` at its size, None where the receipt does not say."""
    if kept.size == own.size:
        return kept.root == own.root
    if receipt.extends is not None and receipt.extends.size == kept.size:
        return _leads(kept, receipt.extends.consistency, own)
    for anchor in receipt.anchors:
        try:
            said = read_checkpoint(anchor.checkpoint)
        except SignatureError:
            continue
        if said.size == kept.size and _leads(said, anchor.consistency, own):
            return kept.root == said.root
    return None


def _leads(first: Checkpoint, consistency: Sequence[str], own: Checkpoint) -> bool:
    """Whether a proof leads from the tree of ``first`` to that of ``own``."""
    hashes = [bytes.fromhex(each) for each in consistency]
    try:
        verify_consistency(first.size, own.size, first.root, own.root, hashes)
    except ProofError:
        return False
    return True


# --- the verdict ------------------------------------------------------------------------------------------


def _verdict(receipt: Receipt, findings: Findings, links: str, signed: Signed, log_signed: Signed) -> dict[str, Any]:
    """The verdict object on what the receipt itself says."""
    found, first = findings.verdicts(), findings.first_break()
    verdicts = {
        RECEIPT: signed.verdict,
        "links": found["links"] if found["links"] != "ok" else links,
        "payloads": found["payloads"],
        "tree": found["tree"],
        "signatures": log_signed.verdict,
        "checkpoint": "not_checked",
    }
    return {
        "tenant_id": receipt.tenant_id,
        "valid": not {"broken", "unknown_key"} & set(verdicts.values()),
        "entries_checked": len(receipt.entries),
        "from_seq": receipt.seqs[0],
        "to_seq": receipt.seqs[-1],
        "verdicts": verdicts,
        "first_break": None if first is None else first._asdict(),
        "breaks": findings.counts(),
        "compared_with": None,
        "not_compared": [],
        "anchors": [],
    }


def _with_signatures(verdict: dict[str, Any], signed: Signed, log_signed: Signed) -> dict[str, Any]:
    """``verdict`` with why signatures do not count, where nothing graver is told already."""
    first, breaks = verdict["first_break"], {**verdict["breaks"]}
    for kind, outcome in ((CHECKPOINT_SIGNATURE, log_signed), (RECEIPT_SIGNATURE, signed)):
        if outcome.verdict in ("broken", "unknown_key"):
            breaks[kind] = 1
            first = first or Break(0, kind, outcome.detail or "")._asdict()
    return {**verdict, "first_break": first, "breaks": breaks}


def _broken(receipt: Receipt | None, error: ReceiptInvalidError) -> dict[str, Any]:
    """The verdict when the receipt itself does not hold."""
    kind = RECEIPT_SIGNATURE if isinstance(error, ReceiptSignatureError) else RECEIPT
    return {
        "tenant_id": None if receipt is None else receipt.tenant_id,
        "valid": False,
        "entries_checked": 0,
        "from_seq": 0,
        "to_seq": 0,
        "verdicts": {RECEIPT: "broken"} | dict.fromkeys(ASPECTS[1:], "not_checked"),
        "first_break": Break(0, kind, str(error))._asdict(),
        "breaks": {kind: 1},
        "compared_with": None,
        "not_compared": [],
        "anchors": [],
    }


def _left_out(
    verdict: Mapping[str, Any],
    own: Checkpoint,
    keyring: Keyring | None,
    kept: JudgedCheckpoint | None,
    observation: Observation | None,
) -> Iterator[str]:
    """What could not be checked, and why."""
    if keyring is None:
        yield "no key was given, so no signature was checked: whoever made the file may have made it all up"
    if verdict["verdicts"]["links"] == "not_checked":
        yield "which entry a link of version 1 is of: it binds neither tenant nor seq, and other entries have the same"
    if verdict["not_compared"] and kept is not None:
        if kept.checkpoint.origin != own.origin:
            yield f"the checkpoint given: it is of log {kept.checkpoint.origin!r}, the receipt of {own.origin!r}"
        else:
            yield f"the checkpoint given: it covers {kept.checkpoint.size} entries, and {_NO_PROOF}"
    elif kept is not None and kept.unknown is not None:
        yield f"the checkpoint given: {kept.unknown}"
    elif kept is None and (observation is None or not observation.before):
        yield "no checkpoint kept elsewhere was given: that the log was longer once would not be seen"
    for seen in () if observation is None or MEMORY in (verdict["compared_with"] or "") else observation.before:
        yield f"what is remembered of this log: {seen.checkpoint.size} entries, and {_NO_PROOF}"


_NO_PROOF: Final = "the receipt says nothing of the log at that size; tally prove --checkpoint makes one that does"
