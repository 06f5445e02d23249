"""What a run is going to write: a range of a tenant and the files it is cut into, decided once and kept in the archive.

The plan of a range is written before its files, under a name that only the first of several runs gets. Whoever finds a
plan without a manifest carries it out, so a range is never cut in two ways. A plan is signed by nobody and believed
nothing: what it says is checked against the ledger, and a file that does not have the rows it must is not written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from ledger import canonical
from ledger.canonical import INTEGER_MAX
from ledger.errors import ArchiveInvalidError
from pipeline.archive.layout import (
    FILE_ROWS_MAX,
    FILE_STORED_BYTES,
    FILES_MAX,
    FORMAT_VERSION,
    PLAN_BYTES_MAX,
    FileName,
    month_after,
    month_of,
)


class Stretch(NamedTuple):
    """Entries ``from_seq..to_seq``, what their payloads take in the database, and their highest hlc_physical."""

    from_seq: int
    to_seq: int
    stored_bytes: int
    highest_physical_ms: int


class Plan(NamedTuple):
    """A range of a tenant and the names of the files it is cut into; the last is of snapshots."""

    log_origin: str
    tenant_id: str
    from_seq: int
    to_seq: int
    previous_manifest: str | None
    """Digest of the manifest that the range follows on."""
    files: tuple[FileName, ...]

    @property
    def entry_files(self) -> tuple[FileName, ...]:
        """The files of entries."""
        return self.files[:-1]


FirstAtOrAfter = Callable[[int, int, int], tuple[int, int]]
"""Of entries from a first to a last seq, the first whose hlc_physical is at least so much: its seq and hlc_physical."""


def cut(
    tenant_id: str,
    stretches: Iterable[Stretch],
    highest_physical_ms: int | None,
    first_at_or_after: FirstAtOrAfter,
) -> Iterator[FileName]:
    """The entry files of the entries in ``stretches``, which follow one another without gap.

    ``highest_physical_ms`` is that of all entries before, None where there are none.
    """
    start_seq, next_seq, stored_bytes = 0, 0, 0
    month, limit = "", -1
    if highest_physical_ms is not None:
        month, limit = month_of(highest_physical_ms), month_after(highest_physical_ms)
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
    return canonical.encode(
        {
            **plan._asdict(),
            "format_version": FORMAT_VERSION,
            "files": [name.path() for name in plan.files],
        }
    )


class _Plan(msgspec.Struct, forbid_unknown_fields=True):
    files: Annotated[list[Annotated[str, Meta(max_length=200)]], Meta(min_length=2, max_length=FILES_MAX)]
    format_version: Literal[1]
    from_seq: Annotated[int, Meta(ge=1, le=INTEGER_MAX)]
    log_origin: Annotated[str, Meta(max_length=300)]
    previous_manifest: str | None
    tenant_id: str
    to_seq: Annotated[int, Meta(ge=1, le=INTEGER_MAX)]


_decode = msgspec.json.Decoder(_Plan).decode


def decode_plan(data: bytes) -> Plan:
    """The plan in an object.

    Raises:
        ArchiveInvalidError: it is none, or its files are not those of its range.
    """
    if len(data) > PLAN_BYTES_MAX:
        raise ArchiveInvalidError(f"a plan is over {PLAN_BYTES_MAX} bytes")
    try:
        said = _decode(data)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise ArchiveInvalidError(f"a plan is malformed, or not of version {FORMAT_VERSION}: {error}") from error
    values = {name: getattr(said, name) for name in Plan._fields}
    plan = Plan(**values | {"files": tuple(map(FileName.parse, said.files))})
    expected_seq = plan.from_seq
    for name in plan.entry_files:
        if (name.tenant_id, name.from_seq) != (plan.tenant_id, expected_seq) or not name.month or name.is_over():
            raise ArchiveInvalidError(f"the plan of {plan.tenant_id} from seq {plan.from_seq} on lists {name.path()}")
        expected_seq = name.to_seq + 1
    is_whole = plan.files[-1] == FileName(plan.tenant_id, plan.from_seq, plan.to_seq, None)
    if expected_seq != plan.to_seq + 1 or not is_whole or encode_plan(plan) != data:
        raise ArchiveInvalidError(f"the plan of {plan.tenant_id} from seq {plan.from_seq} on is not one of its range")
    return plan
