"""The plan of a run: a range of a tenant and the files it is cut into, decided once and kept in the archive.

The plan of a range is written before its files, under a name that only one of several runs can create. A run that
finds a plan without a manifest completes it, so a range is never cut in two ways. A plan is not signed and not
trusted: it is checked against the ledger, and a file without the right rows is not written.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from ledger import canonical
from ledger.canonical import INTEGER_MAX
from ledger.decoding import decode
from ledger.errors import (
    ArchiveConflictError,
    ArchiveInvalidError,
    BrokenRangeError,
    InvalidInputError,
    SignatureError,
    UnknownKeyError,
    reported_as,
)
from ledger.verification.verdict import is_number
from objects.store import ArchiveStore
from pipeline.archive import (
    FILE_ROWS_MAX,
    FILE_STORED_BYTES,
    FILES_MAX,
    PLAN_BYTES_MAX,
    RANGE_FILES,
    RANGE_ROWS_MAX,
    FileName,
    SealedManifest,
    end_of_files,
    month_after,
    month_of,
    plan_path,
)
from pipeline.archiving.filing import Ledger, SignedEnd, Stretch, UnjudgedBreak, broken_at
from signing import checkpoint as checkpoints
from signing.checkpoint import Checkpoint
from signing.keys import Keyring

PLAN_VERSION: Final = 1


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A range of a tenant and the names of the files it is cut into; the last is of snapshots."""

    log_origin: Annotated[str, Meta(max_length=300)]
    tenant_id: str
    from_seq: Annotated[int, Meta(ge=1, le=INTEGER_MAX)]
    to_seq: Annotated[int, Meta(ge=1, le=INTEGER_MAX)]
    previous_manifest: str | None
    """Digest of the manifest that the range follows on."""
    files: Annotated[tuple[Annotated[str, Meta(max_length=200)], ...], Meta(min_length=2, max_length=FILES_MAX)]
    format_version: Literal[1] = PLAN_VERSION

    @property
    def entry_files(self) -> list[FileName]:
        """The files of entries."""
        return [FileName.parse(path) for path in self.files[:-1]]

    @property
    def snapshot_file(self) -> FileName:
        """The file of snapshots."""
        return FileName(self.tenant_id, self.from_seq, self.to_seq, None)


def cut(
    tenant_id: str,
    stretches: Iterable[Stretch],
    highest_physical_ms: int | None,
    first_at_or_after: Callable[[int, int, int], tuple[int, int]],
) -> Iterator[FileName]:
    """The entry files of the entries in ``stretches``, which follow one another without gap.

    ``highest_physical_ms`` is that of all earlier entries, None if there are none. ``first_at_or_after`` takes
    from_seq, to_seq and hlc_physical, and returns those of the first entry in the range that reaches it.
    """
    start_seq, next_seq, stored_bytes = 0, 0, 0
    month, limit = (
        ("", -1) if highest_physical_ms is None else (month_of(highest_physical_ms), month_after(highest_physical_ms))
    )
    for from_seq, to_seq, weight, highest in stretches:
        is_full = (from_seq - 1) % FILE_ROWS_MAX == 0 or stored_bytes + weight > FILE_STORED_BYTES
        if start_seq and is_full:
            yield FileName(tenant_id, start_seq, from_seq - 1, month)
        if not start_seq or is_full:
            start_seq, stored_bytes = from_seq, 0
        at = from_seq
        while highest >= limit:
            at, physical = first_at_or_after(at, to_seq, limit)
            if start_seq < at:
                yield FileName(tenant_id, start_seq, at - 1, month)
                start_seq, stored_bytes = at, 0
            month, limit = month_of(physical), month_after(physical)
        stored_bytes += weight
        next_seq = to_seq + 1
    if start_seq:
        yield FileName(tenant_id, start_seq, next_seq - 1, month)


def encode_plan(plan: Plan) -> bytes:
    """The bytes of the object that holds ``plan``: canonical JSON."""
    return canonical.encode(msgspec.to_builtins(plan))


def decode_plan(data: bytes) -> Plan:
    """The plan in an object.

    Raises:
        ArchiveInvalidError: the object holds no plan, or the files do not cover the plan's range.
    """
    if len(data) > PLAN_BYTES_MAX:
        raise ArchiveInvalidError(f"a plan is over {PLAN_BYTES_MAX} bytes")
    with reported_as(
        ArchiveInvalidError,
        f"a plan is malformed, or not of version {PLAN_VERSION}",
        *(msgspec.MsgspecError, UnicodeError),
    ):
        plan = decode(data, Plan)
    end_seq = end_of_files(plan.tenant_id, plan.from_seq, plan.entry_files)
    if end_seq != plan.to_seq or plan.files[-1] != plan.snapshot_file.path() or encode_plan(plan) != data:
        raise ArchiveInvalidError(f"the plan of {plan.tenant_id} from seq {plan.from_seq} on is not one of its range")
    return plan


def next_plan(
    ledger: Ledger,
    store: ArchiveStore,
    log_origin: str,
    signed: SignedEnd,
    last: SealedManifest | None,
    keyring: Keyring,
) -> Plan | None:
    """The plan of the range after ``last``, stored in the archive on return; None if nothing is left.

    Raises:
        BrokenRangeError: the chain lacks archived or other entries, or its checkpoint is invalid.
        ArchiveConflictError: the archive, or the plan in it, is of another ledger.
    """
    if last is not None:
        _check_follows(ledger, log_origin, last)
    limit = _limit(log_origin, signed, keyring)
    archived = 0 if last is None else last.manifest.to_seq
    if archived > limit:
        limit = _limit_now(ledger, log_origin, signed.tenant_id, keyring)
    if archived > limit:
        raise broken_at(
            archived,
            "rollback",
            f"the archive has entries up to seq {archived}, and what is signed of the chain ends at {limit}",
        )
    from_seq = archived + 1
    path = plan_path(signed.tenant_id, from_seq)
    if (standing := store.read(path, PLAN_BYTES_MAX)) is None:
        if from_seq > limit:
            return None
        plan = _new_plan(ledger, log_origin, signed.tenant_id, from_seq, limit, last)
        if plan is None or store.create(path, io.BytesIO(encode_plan(plan))):
            return plan
        standing = store.read(path, PLAN_BYTES_MAX) or b""
    plan = decode_plan(standing)
    if plan.to_seq > limit:
        limit = _limit_now(ledger, log_origin, signed.tenant_id, keyring)
    expected = (log_origin, signed.tenant_id, from_seq, None if last is None else last.digest)
    if (plan.log_origin, plan.tenant_id, plan.from_seq, plan.previous_manifest) != expected or plan.to_seq > limit:
        raise ArchiveConflictError(
            f"{path} is the plan of a range that this ledger does not have ({plan.log_origin}, up to seq "
            f"{plan.to_seq}): archive to another place, or remove it if nothing was written for it"
        )
    return plan


def checkpoint_of(log_origin: str, tenant_id: str, text: str, keyring: Keyring) -> Checkpoint:
    """The checkpoint in a note of the tenant's log, which a key of ``keyring`` signed.

    Raises:
        BrokenRangeError: the note is no checkpoint, or no such key signed it.
    """
    try:
        return checkpoints.open_checkpoint(text, keyring, origin=f"{log_origin}/{tenant_id}")
    except UnknownKeyError as error:
        detail = f"the newest checkpoint: {error}; name the key that signed it with --keys"
        raise BrokenRangeError(UnjudgedBreak(1, "tree", detail, None, None)) from error
    except SignatureError as error:
        raise broken_at(1, "tree", f"the newest checkpoint does not hold: {error}") from error


def _limit(log_origin: str, signed: SignedEnd, keyring: Keyring) -> int:
    """The last entry that a snapshot and a checkpoint cover.

    Raises:
        BrokenRangeError: snapshots reach beyond the chain, there is no tree, or its checkpoint is invalid.
    """
    if signed.signed_seq > signed.last_seq:
        raise broken_at(
            signed.last_seq + 1,
            "gap",
            f"a snapshot covers entries up to seq {signed.signed_seq}, and the chain ends at {signed.last_seq}",
        )
    if not signed.has_tree:
        raise broken_at(
            signed.signed_seq,
            "tree",
            f"entries up to seq {signed.signed_seq} are signed, and the stored tree of the tenant is gone",
        )
    if signed.checkpoint is None:
        return 0
    return min(signed.signed_seq, checkpoint_of(log_origin, signed.tenant_id, signed.checkpoint, keyring).size)


def _limit_now(ledger: Ledger, log_origin: str, tenant_id: str, keyring: Keyring) -> int:
    """``_limit``, read again: since this run started, another run may have archived newly signed entries."""
    return max((_limit(log_origin, each, keyring) for each in ledger.signed([tenant_id])), default=0)


def _check_follows(ledger: Ledger, log_origin: str, last: SealedManifest) -> None:
    """Check by the last archived link that the chain contains the archive."""
    manifest = last.manifest
    if manifest.log_origin != log_origin:
        raise ArchiveConflictError(
            f"what is archived of tenant {manifest.tenant_id} is of the log {manifest.log_origin}, and this "
            f"ledger's is {log_origin}: archive to another place"
        )
    link, _ = ledger.entry_before(manifest.tenant_id, manifest.to_seq + 1)
    if link != manifest.to_chain_link:
        raise broken_at(
            manifest.to_seq,
            "rollback",
            f"the archive has the link {manifest.to_chain_link} at seq {manifest.to_seq}, the chain {link}",
        )


def _new_plan(
    ledger: Ledger, log_origin: str, tenant_id: str, from_seq: int, limit: int, last: SealedManifest | None
) -> Plan | None:
    with ledger.at_one_time():
        to_seq = ledger.range_end(tenant_id, from_seq, min(limit, from_seq - 1 + RANGE_ROWS_MAX))
        if to_seq is None or to_seq > limit:
            return None
        files = _cut(ledger, tenant_id, from_seq, to_seq, last, RANGE_FILES)
        if len(files) == RANGE_FILES and files[-1].to_seq < to_seq:
            to_seq = ledger.range_end(tenant_id, from_seq, files[-1].to_seq) or to_seq
            files = _cut(ledger, tenant_id, from_seq, to_seq, last, FILES_MAX - 1)
    if len(files) == FILES_MAX - 1 and files[-1].to_seq < to_seq:
        raise InvalidInputError(f"a snapshot of {tenant_id} up to seq {to_seq} needs over {FILES_MAX} files")
    if not files or files[0].from_seq != from_seq or files[-1].to_seq != to_seq:
        at = files[-1].to_seq + 1 if files and files[0].from_seq == from_seq else from_seq
        raise broken_at(at, "gap", f"entries from seq {at} on are missing, and a snapshot covers them")
    return Plan(
        log_origin=log_origin,
        tenant_id=tenant_id,
        from_seq=from_seq,
        to_seq=to_seq,
        previous_manifest=None if last is None else last.digest,
        files=tuple(name.path() for name in (*files, FileName(tenant_id, from_seq, to_seq, None))),
    )


def _cut(
    ledger: Ledger, tenant_id: str, from_seq: int, to_seq: int, last: SealedManifest | None, files_max: int
) -> list[FileName]:
    stretches = map(_checked, ledger.stretches(tenant_id, from_seq, to_seq))
    highest = None if last is None else last.manifest.highest_physical_ms
    return list(islice(cut(tenant_id, stretches, highest, partial(ledger.first_at_or_after, tenant_id)), files_max))


def _checked(stretch: Stretch) -> Stretch:
    """Reject entries without payload or time, and times that have no month.

    Raises:
        BrokenRangeError: there are some.
    """
    from_seq, to_seq, stored_bytes, highest = stretch
    if not is_number(stored_bytes):
        raise broken_at(from_seq, "payload-digest", f"of seq {from_seq} to {to_seq} none has a payload")
    if not is_number(highest) or not 0 <= highest <= INTEGER_MAX:
        raise broken_at(
            from_seq, "hlc-columns", f"hlc_physical of seq {from_seq} to {to_seq} is up to {highest}, which is no time"
        )
    return stretch
