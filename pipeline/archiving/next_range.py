"""What a run archives next of a tenant: the plan that stands there without its manifest, else a new one."""

from __future__ import annotations

import io
from itertools import islice

from ledger.canonical import INTEGER_MAX
from ledger.errors import (
    ArchiveConflictError,
    ArchiveInvalidError,
    BrokenRangeError,
    InvalidInputError,
    SignatureError,
    UnknownKeyError,
)
from ledger.verification.verdict import Break, is_number
from pipeline.archive.layout import (
    FILES_MAX,
    PLAN_BYTES_MAX,
    RANGE_FILES,
    RANGE_ROWS_MAX,
    FileName,
    plan_path,
)
from pipeline.archive.manifest import SealedManifest
from pipeline.archive.parquet import SNAPSHOT_FILE_SCHEMA, batches, opened
from pipeline.archive.store import ArchiveStore
from pipeline.archiving.covered import Ground, UnjudgedBreak
from pipeline.archiving.plan import Plan, Stretch, cut, decode_plan, encode_plan
from pipeline.archiving.postgres import Ledger, SignedEnd
from pipeline.sent_keys import sent
from signing import checkpoint as checkpoints
from signing.checkpoint import Checkpoint
from signing.keys import Keyring
from signing.snapshot import open_snapshot


def next_plan(
    ledger: Ledger,
    store: ArchiveStore,
    log_origin: str,
    signed: SignedEnd,
    last: SealedManifest | None,
    keyring: Keyring,
) -> Plan | None:
    """The plan of the range behind ``last``, which stands in the archive on return; None when nothing is left.

    Raises:
        BrokenRangeError: the chain does not have what is archived, lacks entries, or its checkpoint does not hold.
        ArchiveConflictError: the archive, or the plan in it, is of another ledger.
    """
    if last is not None:
        _check_follows(ledger, log_origin, last)
    limit = _limit(log_origin, signed, keyring)
    archived = 0 if last is None else last.manifest.to_seq
    if archived > limit:
        # Another run may have found more signed, and archived it, than there was when this one began.
        limit = max((_limit(log_origin, each, keyring) for each in ledger.signed([signed.tenant_id])), default=0)
    if archived > limit:
        detail = f"the archive has entries up to seq {archived}, and what is signed of the chain ends at {limit}"
        raise BrokenRangeError(Break(archived, "rollback", detail))
    from_seq = archived + 1
    path = plan_path(signed.tenant_id, from_seq)
    standing = store.read(path, PLAN_BYTES_MAX)
    if standing is None:
        if from_seq > limit:
            return None
        plan = _new_plan(ledger, log_origin, signed.tenant_id, from_seq, limit, last)
        if plan is None or store.create(path, io.BytesIO(encode_plan(plan))):
            return plan
        standing = store.read(path, PLAN_BYTES_MAX) or b""
    plan = decode_plan(standing)
    if plan.to_seq > limit:
        # Another run may have found more signed than there was when this one began.
        limit = max((_limit(log_origin, each, keyring) for each in ledger.signed([signed.tenant_id])), default=limit)
    previous = None if last is None else last.digest
    expected = (log_origin, signed.tenant_id, from_seq, previous)
    if (plan.log_origin, plan.tenant_id, plan.from_seq, plan.previous_manifest) != expected or plan.to_seq > limit:
        raise ArchiveConflictError(
            f"{path} is the plan of a range that this ledger does not have ({plan.log_origin}, up to seq "
            f"{plan.to_seq}): archive to another place, or remove it if nothing was written for it"
        )
    return plan


def ground_of(store: ArchiveStore, last: SealedManifest | None, keyring: Keyring) -> Ground:
    """What the snapshots behind ``last`` stand on, as the archive has it.

    Raises:
        ArchiveInvalidError: the file of the snapshots before is not what its manifest says.
    """
    if last is None:
        return Ground((), None, sent(keyring))
    manifest = last.manifest
    with opened(store, manifest.snapshot_file, SNAPSHOT_FILE_SCHEMA) as found:
        *_, batch = batches(found, manifest.snapshot_file)
    try:
        digest = open_snapshot(batch.column("dsse_envelope")[-1].as_py(), None).payload_sha256
    except SignatureError as error:
        raise ArchiveInvalidError(f"{manifest.snapshot_file.name}: {error}", manifest.to_seq) from error
    return Ground(manifest.frontier, digest, sent(keyring))


def checkpoint_of(log_origin: str, tenant_id: str, text: str, keyring: Keyring) -> Checkpoint:
    """The checkpoint in a note of the tenant's log, which a key of ``keyring`` signed.

    Raises:
        BrokenRangeError: it is none, or no such key signed it.
    """
    try:
        return checkpoints.open_checkpoint(text, keyring, origin=f"{log_origin}/{tenant_id}")
    except UnknownKeyError as error:
        detail = f"the newest checkpoint: {error}; name the key that signed it with --keys"
        raise BrokenRangeError(UnjudgedBreak(1, "tree", detail, None, None)) from error
    except SignatureError as error:
        raise BrokenRangeError(Break(1, "tree", f"the newest checkpoint does not hold: {error}")) from error


def _limit(log_origin: str, signed: SignedEnd, keyring: Keyring) -> int:
    """The last entry that a snapshot and a checkpoint cover.

    Raises:
        BrokenRangeError: snapshots reach beyond the chain, there is no tree, or its checkpoint does not hold.
    """
    if signed.signed_seq > signed.last_seq:
        detail = f"a snapshot covers entries up to seq {signed.signed_seq}, and the chain ends at {signed.last_seq}"
        raise BrokenRangeError(Break(signed.last_seq + 1, "gap", detail))
    if not signed.has_tree:
        detail = f"entries up to seq {signed.signed_seq} are signed, and the stored tree of the tenant is gone"
        raise BrokenRangeError(Break(signed.signed_seq, "tree", detail))
    if signed.checkpoint is None:
        return 0
    return min(signed.signed_seq, checkpoint_of(log_origin, signed.tenant_id, signed.checkpoint, keyring).size)


def _check_follows(ledger: Ledger, log_origin: str, last: SealedManifest) -> None:
    """The chain has what is archived, as far as its last link tells."""
    manifest = last.manifest
    if manifest.log_origin != log_origin:
        raise ArchiveConflictError(
            f"what is archived of tenant {manifest.tenant_id} is of the log {manifest.log_origin}, and this "
            f"ledger's is {log_origin}: archive to another place"
        )
    link = ledger.entry_before(manifest.tenant_id, manifest.to_seq + 1).chain_link
    if link != manifest.to_chain_link:
        detail = f"the archive has the link {manifest.to_chain_link} at seq {manifest.to_seq}, the chain {link}"
        raise BrokenRangeError(Break(manifest.to_seq, "rollback", detail))


def _new_plan(
    ledger: Ledger, log_origin: str, tenant_id: str, from_seq: int, limit: int, last: SealedManifest | None
) -> Plan | None:
    with ledger.at_one_time():
        to_seq = _range_end(ledger, tenant_id, from_seq, min(limit, from_seq - 1 + RANGE_ROWS_MAX))
        if to_seq is None or to_seq > limit:
            return None
        files = _cut(ledger, tenant_id, from_seq, to_seq, last, RANGE_FILES)
        if len(files) == RANGE_FILES and files[-1].to_seq < to_seq:
            to_seq = _range_end(ledger, tenant_id, from_seq, files[-1].to_seq) or to_seq
            files = _cut(ledger, tenant_id, from_seq, to_seq, last, FILES_MAX - 1)
    if len(files) == FILES_MAX - 1 and files[-1].to_seq < to_seq:
        raise InvalidInputError(f"a snapshot of {tenant_id} up to seq {to_seq} needs over {FILES_MAX} files")
    if not files or files[0].from_seq != from_seq or files[-1].to_seq != to_seq:
        at = files[-1].to_seq + 1 if files and files[0].from_seq == from_seq else from_seq
        raise BrokenRangeError(Break(at, "gap", f"entries from seq {at} on are missing, and a snapshot covers them"))
    snapshots = FileName(tenant_id, from_seq, to_seq, None)
    previous = None if last is None else last.digest
    return Plan(log_origin, tenant_id, from_seq, to_seq, previous, (*files, snapshots))


def _range_end(ledger: Ledger, tenant_id: str, from_seq: int, to_seq: int) -> int | None:
    """Where a range ends that is to end at about ``to_seq``: with a snapshot, behind it if none ends before."""
    end = ledger.snapshot_end(tenant_id, from_seq, to_seq)
    return end if end is not None else ledger.next_snapshot_end(tenant_id, from_seq)


def _cut(
    ledger: Ledger, tenant_id: str, from_seq: int, to_seq: int, last: SealedManifest | None, files_max: int
) -> list[FileName]:
    def first_at_or_after(first_seq: int, last_seq: int, physical_ms: int) -> tuple[int, int]:
        found = ledger.first_at_or_after(tenant_id, first_seq, last_seq, physical_ms)
        assert found is not None
        return found

    stretches = map(_checked, ledger.stretches(tenant_id, from_seq, to_seq))
    highest = None if last is None else last.manifest.highest_physical_ms
    return list(islice(cut(tenant_id, stretches, highest, first_at_or_after), files_max))


def _checked(stretch: Stretch) -> Stretch:
    """Refuse entries without payload or time, and times of which no month is known.

    Raises:
        BrokenRangeError: there are some.
    """
    from_seq, to_seq, stored_bytes, highest = stretch
    if not is_number(stored_bytes):
        raise BrokenRangeError(Break(from_seq, "payload-digest", f"of seq {from_seq} to {to_seq} none has a payload"))
    if not is_number(highest) or not 0 <= highest <= INTEGER_MAX:
        detail = f"hlc_physical of seq {from_seq} to {to_seq} is up to {highest}, which is no time"
        raise BrokenRangeError(Break(from_seq, "hlc-columns", detail))
    return stretch
