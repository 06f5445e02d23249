"""Entries of a bundle as lines: one object of canonical JSON (RFC 8785) and a newline each.

A line has one spelling. The reader encodes each line again and compares, so it rejects duplicate or unknown names,
spaces, other forms of numbers, and anything else that two readers could read differently. The rows' integers are in
0 to 2^53 - 1, so msgspec prints them, and all strings, as RFC 8785 requires.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter, itemgetter
from typing import Annotated, Any, Final, Self

import msgspec
from msgspec import Meta

from ledger import native
from ledger.canonical import INTEGER_MAX
from ledger.decoding import decoder_of
from ledger.errors import BundleInvalidError, InvalidInputError, refuse, reported_as
from ledger.verification.entry_check import ENTRY_COLUMNS, PackedEntries, Passed

BATCH_BYTES: Final = 256 << 10
"""Least raw bytes decoded at once: a few hundred rows, a millisecond or two."""

Row = tuple[Any, ...]
"""A row of a bundle, by ``ENTRY_COLUMNS`` or ``SNAPSHOT_COLUMNS``."""

_Integer = Annotated[int, Meta(ge=0, le=INTEGER_MAX)]


class EntryObject(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """One entry of a bundle or receipt; the fields are in the order of canonical JSON."""

    action: str
    chain_link: str
    hlc_logical: _Integer
    hlc_node: str
    hlc_physical: _Integer
    job_id: str
    link_version: _Integer
    origin: str | None
    payload: str
    payload_digest: str
    prev_chain_link: str | None
    seq: Annotated[int, Meta(ge=1, le=INTEGER_MAX)]
    t_hlc: str
    tenant_id: str

    @classmethod
    def of(cls, tenant_id: str, row: Sequence[Any]) -> Self:
        """The object of a row in the order of ``ENTRY_COLUMNS``.

        Raises:
            InvalidInputError: a number is beyond what JSON holds exactly.
        """
        columns: tuple[Any, ...] = (*_in_line_order(row), tenant_id)
        entry = cls(*columns)
        if max(entry.seq, entry.hlc_physical) > INTEGER_MAX:
            raise InvalidInputError(f"a number of seq {entry.seq} is beyond 2^53 - 1")
        return entry

    def row(self) -> Row:
        """Its columns, in the order of ``ENTRY_COLUMNS``."""
        columns: Row = _in_column_order(self)
        return columns


assert list(EntryObject.__struct_fields__) == sorted((*ENTRY_COLUMNS, "tenant_id"))

_encoder: Final = msgspec.json.Encoder()
_decoder: Final = decoder_of(EntryObject)
_in_line_order = itemgetter(*(ENTRY_COLUMNS.index(name) for name in EntryObject.__struct_fields__[:-1]))
_in_column_order = attrgetter(*ENTRY_COLUMNS)

SEQ, T_HLC, JOB_ID, PREV_CHAIN_LINK, CHAIN_LINK, PAYLOAD = map(
    ENTRY_COLUMNS.index, ("seq", "t_hlc", "job_id", "prev_chain_link", "chain_link", "payload")
)
"""Indexes of these columns in ``ENTRY_COLUMNS``."""


def encode_entry(tenant_id: str, row: Sequence[Any]) -> bytes:
    """The line of one entry, in the order of ``ENTRY_COLUMNS``.

    Raises:
        InvalidInputError: a number is beyond what JSON holds exactly.
    """
    return _encoder.encode(EntryObject.of(tenant_id, row)) + b"\n"


def encode_as_stored(tenant_id: str, row: Sequence[Any]) -> bytes:
    """The line of one row of a broken chain, whatever its columns hold; a value that JSON cannot hold becomes text."""
    try:
        return encode_entry(tenant_id, row)
    except (InvalidInputError, TypeError, ValueError, OverflowError):
        plain = [value if value is None or isinstance(value, int | str) else str(value) for value in row]
        held = [str(value) if isinstance(value, int) and abs(value) > INTEGER_MAX else value for value in plain]
        return _encoder.encode({"tenant_id": tenant_id, **dict(zip(ENTRY_COLUMNS, held, strict=True))}) + b"\n"


class EntryLines(PackedEntries):
    """Some unchecked lines of one part; rows are made in the order of ``ENTRY_COLUMNS``."""

    def __init__(self, lines: bytes, tenant: bytes, at: int = 0) -> None:
        """``tenant`` is the tenant of every line, as JSON; ``at`` is the offset of the first line."""
        self._lines = lines
        self._tenant = tenant
        self._at = at

    def passed(self, *known: Any) -> Passed | None:
        """The result for the requested entries if they are in order and canonical, else None."""
        if not self._lines.isascii():
            try:
                self._lines.decode()
            except UnicodeDecodeError:
                return None
        found = native.entries_in_lines(*known, self._lines, self._at, self._tenant)
        return None if found is None else Passed(*found)

    def behind(self, at: int) -> EntryLines | None:
        """The lines from byte ``at`` on."""
        return EntryLines(self._lines, self._tenant, at) if at < len(self._lines) else None

    def unpacked(self) -> list[Row]:
        """The rows.

        Raises:
            BundleInvalidError: the lines are not canonical rows of the tenant.
        """
        lines = self._lines[self._at :]
        with reported_as(
            BundleInvalidError, "a row is not one of an entry", msgspec.MsgspecError, ValueError, RecursionError
        ):
            entries = _decoder.decode_lines(lines)
        # The tenant is last in a canonical line, and no text in it has a newline: this counts the rows.
        of_tenant = lines.count(b'"tenant_id":%b}\n' % self._tenant)
        refuse(
            BundleInvalidError,
            (_encoder.encode_lines(entries) != lines, "the rows are not canonical JSON, one a line"),
            (of_tenant != len(entries), "a row belongs to another tenant"),
        )
        return list(map(_in_column_order, entries))


def entry_lines(raw: bytes, tenant_id: str, count: int) -> Iterator[EntryLines]:
    """The lines of one part, in batches; each line that is read must be a row of the tenant.

    Raises:
        BundleInvalidError: there are not ``count`` lines; possibly raised after some batches.
    """
    tenant = _encoder.encode(tenant_id)
    at = found = 0
    while at < len(raw):
        end = raw.find(b"\n", at + BATCH_BYTES) + 1 or len(raw)
        lines = raw[at:end]
        found += lines.count(b"\n")
        if found > count or not lines.endswith(b"\n"):
            break
        yield EntryLines(lines, tenant)
        at = end
    if found != count or at != len(raw):
        raise BundleInvalidError(f"a part does not have the {count} rows that are listed")
