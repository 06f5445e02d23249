"""Reading an untrusted bundle: bounded memory, no member parsed before its digest is verified.

Two passes over one open file::

    1. ``BundleReader.open``: the container byte by byte, digests of every member and of the whole file; the
       manifest, parsed only after its signatures by known keys were verified. Its list of parts must equal the
       members. No other member is parsed.
    2. the rows, as a verification or an import asks for them: each part is read and hashed again before its bytes are
       decompressed, up to the size the manifest names, and its rows parsed. A thread reads the next part while the
       rows of one are checked.

``signing.judging`` verifies the manifest's signature. Until then, and until the rows are verified, the content is
untrusted.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from hashlib import file_digest, sha256
from itertools import accumulate, islice, pairwise, zip_longest
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, Self

import msgspec

from ledger.bundle.format import (
    ANCHORS,
    BLOCK_BYTES,
    CHECKPOINT,
    END,
    ENTRY_PARTS_MAX,
    EVIDENCE,
    JOB_INDEX,
    MANIFEST,
    SNAPSHOT_ROW_BYTES_MAX,
    SNAPSHOTS,
    TAIL,
    Part,
    entries_name,
    names_after,
    padding_of,
    parse_tar_header,
    size_max,
)
from ledger.bundle.merge import BundleSource
from ledger.bundle.rows import CHAIN_LINK, PAYLOAD, PREV_CHAIN_LINK, SEQ, T_HLC, Row, entry_lines
from ledger.canonical import INTEGER_MAX, encode
from ledger.decoding import decode
from ledger.errors import BundleInvalidError, NotABundleError, refuse, reported_as
from ledger.machines.retention import SUBJECT, can_loosen, states_floor
from ledger.verification.left_index import IndexAtFloor
from ledger.verification.reader import ChainReader
from ledger.verification.tree_check import StoredTree
from ledger.verification.verdict import Head
from signing.anchors import BundledAnchor, decode_anchors
from signing.bundle.manifest import Manifest, evidence_refusal
from signing.files import HEAD_BYTES, is_like_bundle, looks_like, open_regular
from signing.keys import Keyring
from signing.snapshot import FROM_SEQ, TO_SEQ, decode_snapshot

READ_BYTES: Final = 1 << 20
_GZIP: Final = 31
"""zlib's window bits that accept only a gzip member."""
_NOT_HASHED: Final = ""


class Member(NamedTuple):
    """One member of the container; ``offset`` is that of its first content byte."""

    name: str
    offset: int
    size: int
    sha256: str


class Scanned(NamedTuple):
    """The result of hashing a whole bundle: with it the same bundle is reopened without hashing."""

    digest: str
    size_bytes: int
    manifest_sha256: str


class BundleReader(AbstractContextManager["BundleReader"]):
    """One open bundle. Use as a context. One thread at a time, except for ``read_part``."""

    def __init__(self, file: BinaryIO, keyring: Keyring | None, scanned: Scanned | None = None) -> None:
        """Takes over the file, which MUST be a regular one; prefer ``open``."""
        self._file = file
        members, self.scanned = _scan(file.fileno()) if scanned is None else (_walk(file.fileno(), scanned), scanned)
        self.digest, self.size_bytes, _ = self.scanned
        self.envelope = Manifest.open_envelope(self._read(members.pop()))
        Manifest.judge(self.envelope, keyring)
        self.manifest: Manifest = Manifest.read(self.envelope.payload)
        _check_members(members, self.manifest)
        self._members = {
            member.name: member._replace(sha256=part.sha256)
            for member, part in zip(members, self.manifest.parts, strict=True)
        }
        self._first_seqs = [
            *accumulate((part.rows for part in self.manifest.entry_parts), initial=self.manifest.from_seq)
        ]
        """First seq of each entry part by the manifest, then the seq after the last part."""

    @classmethod
    def open(cls, path: str | Path, keyring: Keyring | None = None, scanned: Scanned | None = None) -> Self:
        """Open the bundle in a file and check its container, digests and manifest. If a key of ``keyring`` is named as
        the manifest's signer and did not sign it, the manifest is rejected unparsed. With ``scanned``, an earlier
        result, only the headers are walked, and each member is hashed when it is read.

        ``digest`` is SHA-256 of the whole file in hex, ``size_bytes`` its size.

        Raises:
            NotABundleError: the file is not a bundle.
            BundleInvalidError: it is not whole, or not the one that was scanned.
            BundleSignatureError: its signature is invalid.
            OSError: it cannot be read, or is not a regular file.
        """
        return cls.of(open_regular(path), keyring, scanned)

    @classmethod
    def of(cls, file: BinaryIO, keyring: Keyring | None = None, scanned: Scanned | None = None) -> Self:
        """As ``open``, of an open file, which MUST be a regular one and is closed with the reader."""
        try:
            head = os.pread(file.fileno(), HEAD_BYTES, 0)
            if not is_like_bundle(head):
                raise NotABundleError(f"it is no bundle; it looks like {looks_like(head)}")
            return cls(file, keyring, scanned)
        except BaseException:
            file.close()
            raise

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def source(self) -> BundleSource:
        """The source that entries of this bundle are reported to come from."""
        manifest = self.manifest
        return BundleSource(self.digest, manifest.tenant_id, manifest.origin, manifest.node_id)

    # --- small members ----------------------------------------------------------------------------

    def checkpoint(self) -> str:
        """The signed note as stored, not verified.

        Raises:
            BundleInvalidError: it is not text.
        """
        try:
            return self._read(self._members[CHECKPOINT]).decode()
        except UnicodeDecodeError as error:
            raise BundleInvalidError("the checkpoint is not UTF-8") from error

    def anchors(self) -> list[BundledAnchor]:
        """The statements of external witnesses about the log, not verified; empty if the bundle has no such member.

        Raises:
            BundleInvalidError: it is malformed.
        """
        return decode_anchors(self._read(self._members[ANCHORS])) if self.manifest.lists(ANCHORS) else []

    def job_index(self) -> IndexAtFloor | None:
        """What is kept of the index of jobs of all entries before the first one, not verified; None if there is no such
        member.

        Raises:
            BundleInvalidError: it is malformed.
        """
        if not self.manifest.lists(JOB_INDEX):
            return None
        data = self._read(self._members[JOB_INDEX])
        with reported_as(BundleInvalidError, f"{JOB_INDEX} is malformed", msgspec.MsgspecError, UnicodeError):
            found = decode(data, IndexAtFloor)
        if msgspec.json.encode(found) != data:
            raise BundleInvalidError(f"{JOB_INDEX} is not in canonical form")
        return found

    def _read(self, member: Member) -> bytes:
        data = os.pread(self._file.fileno(), member.size, member.offset)
        if sha256(data).hexdigest() != member.sha256:
            raise BundleInvalidError(f"{member.name} changed while it was read")
        return data

    # --- rows -----------------------------------------------------------------------------------------

    def entry_batches(self, from_seq: int | None = None, to_seq: int | None = None) -> Iterator[Sequence[Row]]:
        """Batches of ``ENTRY_COLUMNS`` as stored, of all parts that overlap the range.

        Raises:
            BundleInvalidError: a part is not what the manifest says.
        """
        numbers = self.parts_of(from_seq, to_seq)
        if len(numbers) == 1:
            yield from self.part_batches(numbers[0], self.read_part(numbers[0]), from_seq, to_seq)
            return
        with ThreadPoolExecutor(max_workers=1) as thread:
            ahead = [thread.submit(self.read_part, number) for number in numbers[:1]]
            for number, following in zip_longest(numbers, numbers[1:]):
                raw = ahead.pop().result()
                ahead += [] if following is None else [thread.submit(self.read_part, following)]
                yield from self.part_batches(number, raw, from_seq, to_seq)

    def snapshot_rows(self) -> Iterator[Row]:
        """``SNAPSHOT_COLUMNS`` of every snapshot, by ``from_seq``; envelopes are text.

        Raises:
            BundleInvalidError: a row is malformed or out of order, or there are more or fewer than listed.
        """
        after_seq, count = self.manifest.from_seq - 1, 0
        for line in self._lines(self._members[SNAPSHOTS]):
            row = decode_snapshot(line, self.manifest.tenant_id)
            first_seq, last_seq = row[FROM_SEQ], row[TO_SEQ]
            if not after_seq < first_seq <= last_seq <= self.manifest.to_seq:
                raise BundleInvalidError(
                    f"the snapshot of {first_seq}..{last_seq} is out of order or outside the range"
                )
            after_seq, count = first_seq, count + 1
            yield row
        if count != self.manifest.snapshot_count:
            raise BundleInvalidError(f"there are {count} snapshots, and {self.manifest.snapshot_count} are listed")

    def rows_about(self, job_id: str) -> Iterator[Row]:
        """``ENTRY_COLUMNS`` of the entries of this job id, in order. Other rows are not parsed.

        Raises:
            BundleInvalidError: a part is not what the manifest says, or a row is malformed.
        """
        member = b'"job_id":%b,' % encode(job_id)
        for number in range(len(self.manifest.entry_parts)):
            if member in (raw := self.read_part(number)):
                lines = [line for line in raw.splitlines(keepends=True) if member in line]
                for rows in entry_lines(b"".join(lines), self.manifest.tenant_id, len(lines)):
                    yield from rows

    def last_entry(self) -> Head:
        """The entry of highest seq.

        Raises:
            BundleInvalidError: the last part is not what the manifest says.
        """
        number = len(self.manifest.entry_parts) - 1
        rows = (row for batch in self.part_batches(number, self.read_part(number)) for row in batch)
        last = max(rows, key=lambda row: row[SEQ])
        return Head(last[SEQ], last[CHAIN_LINK], last[T_HLC])

    # --- one part -----------------------------------------------------------------------------------

    def parts_of(self, from_seq: int | None, to_seq: int | None) -> list[int]:
        """Numbers, from 0, of the parts that hold entries of this range by the manifest; None is unbounded."""
        return [
            number
            for number, (first_seq, next_seq) in enumerate(pairwise(self._first_seqs))
            if (from_seq is None or next_seq > from_seq) and (to_seq is None or first_seq <= to_seq)
        ]

    def read_part(self, number: int) -> bytes:
        """The decompressed lines of a part whose digest was verified. Safe to call from several threads at once.

        Raises:
            BundleInvalidError: it is not what the manifest says.
        """
        part = self.manifest.entry_parts[number]
        return _decompressed(part, self._read(self._members[part.name]))

    def part_batches(
        self, number: int, raw: bytes, from_seq: int | None = None, to_seq: int | None = None
    ) -> Iterator[Sequence[Row]]:
        """The rows of part ``number`` that are in the range; ``raw`` is the result of ``read_part``.

        Raises:
            BundleInvalidError: they are not what the manifest says.
        """
        for at, rows in enumerate(entry_lines(raw, self.manifest.tenant_id, self.manifest.entry_parts[number].rows)):
            if number == at == 0:
                first, first_hlc = rows[0], self.manifest.first_hlc
                is_cut = first[SEQ] > 1 and first[PREV_CHAIN_LINK] is None
                refuse(
                    BundleInvalidError,
                    (first[T_HLC] != first_hlc, "the first entry does not have the HLC that the manifest names"),
                    (is_cut, "the first entry names none before it, and is not that of a chain"),
                )
            if from_seq is None and to_seq is None:
                yield rows
                continue
            low, high = from_seq or 0, INTEGER_MAX if to_seq is None else to_seq
            wanted = [row for row in rows if low <= row[SEQ] <= high]
            if wanted:
                yield wanted

    def _lines(self, member: Member) -> Iterator[bytes]:
        hashed, rest = sha256(), b""
        for at in range(0, member.size, READ_BYTES):
            data = os.pread(self._file.fileno(), min(READ_BYTES, member.size - at), member.offset + at)
            hashed.update(data)
            *lines, rest = (rest + data).split(b"\n")
            if max(map(len, (rest, *lines))) > SNAPSHOT_ROW_BYTES_MAX:
                raise BundleInvalidError(f"a row of {member.name} is longer than {SNAPSHOT_ROW_BYTES_MAX} bytes")
            yield from lines
        refuse(
            BundleInvalidError,
            (hashed.hexdigest() != member.sha256, f"{member.name} changed while it was read"),
            (bool(rest), f"the last row of {member.name} has no end"),
        )


def digest_of(path: Path) -> tuple[str, int]:
    """SHA-256, in hex, and size of any file.

    Raises:
        OSError: it cannot be read.
    """
    with open_regular(path) as file:
        return file_digest(file, sha256).hexdigest(), os.fstat(file.fileno()).st_size


def _scan(descriptor: int) -> tuple[list[Member], Scanned]:
    """The members of the container, and digest and size of the file. Every byte of the file is hashed and checked."""
    whole = sha256()
    members: list[Member] = []
    expected = {entries_name(1)}
    at = 0
    while (block := _read(descriptor, at, BLOCK_BYTES, whole)) != END[:BLOCK_BYTES]:
        name, size = parse_tar_header(block)
        if name == EVIDENCE:
            raise evidence_refusal(os.pread(descriptor, min(size, size_max(name, len(members))), at + BLOCK_BYTES))
        wanted = " or ".join(sorted(expected)) or "the end"
        refuse(
            BundleInvalidError,
            (name not in expected, f"member {name!r} stands where {wanted} must"),
            (size > size_max(name, len(members)), f"member {name} is larger than a bundle allows"),
        )
        offset = at + BLOCK_BYTES
        members.append(Member(name, offset, size, _hash(descriptor, offset, size, whole)))
        at = offset + size
        padding = padding_of(size)
        if _read(descriptor, at, padding, whole) != bytes(padding):
            raise BundleInvalidError(f"there are bytes between {name} and the next member")
        at += padding
        expected = _names_after(name, len(members))
    refuse(BundleInvalidError, (bool(expected), f"{' or '.join(sorted(expected))} is missing: the bundle is not whole"))
    if _read(descriptor, at + BLOCK_BYTES, BLOCK_BYTES, whole) != END[BLOCK_BYTES:]:
        raise BundleInvalidError("the bundle does not end in two blocks of zeros")
    at += len(END)
    if os.pread(descriptor, 1, at):
        raise BundleInvalidError("there are bytes behind the end of the bundle")
    return members, Scanned(whole.hexdigest(), at, members[-1].sha256)


def _walk(descriptor: int, scanned: Scanned) -> list[Member]:
    """The members of a container that was scanned before; only the manifest has its digest so far."""
    members: list[Member] = []
    at, end = 0, scanned.size_bytes - len(END)
    while at < end:
        name, size = parse_tar_header(os.pread(descriptor, BLOCK_BYTES, at))
        members.append(Member(name, at + BLOCK_BYTES, size, _NOT_HASHED))
        at += BLOCK_BYTES + size + padding_of(size)
    if at != end or not members:
        raise BundleInvalidError("the bundle changed while it was read")
    return [*members[:-1], members[-1]._replace(sha256=scanned.manifest_sha256)]


def _names_after(name: str, members: int) -> set[str]:
    """Names that may follow member ``name``, the ``members``-th; none after the last."""
    if name in TAIL:
        return names_after(name)
    return {SNAPSHOTS} if members == ENTRY_PARTS_MAX else {entries_name(members + 1), SNAPSHOTS}


def _read(descriptor: int, at: int, count: int, whole: Any) -> bytes:
    """Exactly ``count`` bytes, added to the digest of the whole."""
    data = os.pread(descriptor, count, at)
    if len(data) != count:
        raise BundleInvalidError(f"the bundle is cut short at byte {at + len(data)}")
    whole.update(data)
    return data


def _hash(descriptor: int, offset: int, size: int, whole: Any) -> str:
    digest = sha256()
    for at in range(offset, offset + size, READ_BYTES):
        digest.update(_read(descriptor, at, min(READ_BYTES, offset + size - at), whole))
    return digest.hexdigest()


def _check_members(members: Sequence[Member], manifest: Manifest) -> None:
    if len(members) != len(manifest.parts):
        raise BundleInvalidError(f"the manifest lists {len(manifest.parts)} parts, there are {len(members)}")
    for member, part in zip(members, manifest.parts, strict=True):
        is_this = (member.name, member.size) == (part.name, part.bytes)
        other = f"part {part.name} is not the one that the manifest names: its digest is another"
        refuse(
            BundleInvalidError,
            (not is_this, f"part {part.name[:100]!r} is not of the size that the manifest names"),
            (member.sha256 not in (part.sha256, _NOT_HASHED), other),
        )


def _decompressed(part: Part, data: bytes) -> bytes:
    stream = zlib.decompressobj(_GZIP)
    with reported_as(BundleInvalidError, f"part {part.name} is not gzip", zlib.error):
        raw = stream.decompress(data, part.raw_bytes + 1)
    if len(raw) != part.raw_bytes or not stream.eof or stream.unused_data:
        raise BundleInvalidError(f"part {part.name} is not one gzip member of {part.raw_bytes} bytes")
    return raw


assert TAIL[-1] == MANIFEST


SNAPSHOTS_A_BATCH: Final = 50
RETENTION_BYTES_MAX: Final = 64 << 20
"""Payload bytes of the entries that can let entries leave, which are held at once; one has about a kilobyte."""


class BundleChainReader(ChainReader):
    """An open bundle as a ``ledger.verification.ChainReader``; belongs to one task at a time."""

    def __init__(self, bundle: BundleReader) -> None:
        self.bundle = bundle

    async def head(self) -> Head | None:
        """The end of the chain as the manifest names it."""
        manifest = self.bundle.manifest
        return Head(manifest.to_seq, manifest.to_chain_link, manifest.last_hlc)

    async def last_entry(self) -> Head | None:
        """The last entry of the bundle."""
        return self.bundle.last_entry()

    async def tree(self) -> StoredTree | None:
        """The tree as the manifest names it."""
        return StoredTree(self.bundle.manifest.tree_size, self.bundle.manifest.tree_root)

    async def retention_entries(self) -> Sequence[Row]:
        """The entries about retention, if one of them says that all before the first one here left; else none."""
        before = self.bundle.manifest.from_seq - 1
        rows: list[Row] = []
        size = 0
        for row in self.bundle.rows_about(SUBJECT) if before else ():
            # What a hold says does not matter to a floor, and it may name thousands of jobs.
            kept = row if can_loosen(row) else (*row[:PAYLOAD], "{}", *row[PAYLOAD + 1 :])
            size += len(kept[PAYLOAD])
            if size > RETENTION_BYTES_MAX:
                raise BundleInvalidError(f"entries about retention have more than {RETENTION_BYTES_MAX} bytes")
            rows.append(kept)
        return rows if any(states_floor(row, before) for row in rows) else ()

    async def index_at(self, to_seq: int) -> IndexAtFloor | None:
        """The member about the index of jobs of entries that left."""
        return self.bundle.job_index()

    async def entries(self, from_seq: int | None, to_seq: int | None) -> AsyncIterator[Sequence[Row]]:
        """Batches of ``ENTRY_COLUMNS`` as stored, of all parts that overlap the range."""
        for batch in self.bundle.entry_batches(from_seq, to_seq):
            yield batch

    async def snapshots(self, from_seq: int, to_seq: int | None) -> AsyncIterator[Sequence[Row]]:
        """Batches of ``SNAPSHOT_COLUMNS`` of the snapshots wholly in the range."""
        rows = self.bundle.snapshot_rows()
        wanted = (row for row in rows if row[FROM_SEQ] >= from_seq and (to_seq is None or row[TO_SEQ] <= to_seq))
        while batch := list(islice(wanted, SNAPSHOTS_A_BATCH)):
            yield batch
