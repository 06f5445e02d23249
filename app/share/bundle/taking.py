"""Collecting the entries of bundles during their verification: one pass over each file.

Every entry is checked. An entry with an origin in this ledger is compared with the entry of that place. All entries
then go to the sorter. Invariants::

    entries are collected             only from a bundle whose manifest a trusted key signed
    entries collected from a bundle   exactly those that its verification read, each once
    a fault of an entry               is kept, and raised only after every bundle of the set is verified

An entry names its origin, the place where it was first chained, and the signer of a bundle may write anything there. An
origin in another ledger cannot be checked here. An origin in this ledger is compared with the entry in this log.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import orjson

from app.share.bundle.merging import Sorter
from app.share.bundle.staging import StagedFile
from app.store.chain_reads import ChainedEntry
from ledger.bundle.merge import ClockBounds, EntryTaker, Incoming, event_of, held_by
from ledger.bundle.rows import SEQ, Row
from ledger.chain import LINK_VERSION
from ledger.chain.conflict import Event, find_event
from ledger.errors import BundleInvalidError, BundleRefusedError, InvalidInputError, UntrustedKeyError
from ledger.facts.events import SYSTEM_TENANT
from ledger.merkle import leaf_hash
from signing.bundle.manifest import Manifest
from signing.bundle.reader import BundleChainReader, BundleReader
from signing.callers import KeyedJudge
from signing.judging import judge_bundle, refuse_unless_trusted, refused
from signing.keys import Keyring
from signing.manifest import RangeManifest

Expect = Callable[[RangeManifest], None]
"""Raises if a bundle is not the one that was asked for."""
Born = Mapping[int, Sequence[Incoming]]
"""Entries whose origin is in one log, by their seq there."""


def born_in(log: str, entries: Sequence[Incoming]) -> Born:
    """The entries whose origin is in ``log``, by their seq there."""
    born: dict[int, list[Incoming]] = defaultdict(list)
    for entry in entries:
        if entry.key.log == log:
            born[entry.key.seq].append(entry)
    return born


def check_births(born: Born, chained: Mapping[int, ChainedEntry], left: Mapping[int, bytes]) -> None:
    """Reject entries that differ from the chained entry at their origin. ``left`` has the leaf hashes of entries that
    are no longer there. If there is neither, the origin is accepted, because the chain may have been longer once.

    Raises:
        BundleInvalidError: names the first such entry.
    """
    for seq, entries in born.items():
        stands, leaf = chained.get(seq), left.get(seq)
        for entry in entries:
            link = entry.chain_link if entry.origin is None else orjson.loads(entry.origin)["chain_link"]
            is_other = stands is not None and (
                link != stands.chain_link or stands.event not in (event_of(entry), held_by(entry))
            )
            if is_other or (leaf is not None and leaf_hash(bytes.fromhex(link)) != leaf):
                raise BundleInvalidError(
                    f"the entry with HLC {entry.t_hlc} says that it was chained first as seq {seq} of {entry.key.log}, "
                    "a log of this ledger, and another entry stands there"
                )


def check_relayed(source_log: str, relayed: Sequence[Incoming], chained: Mapping[str, Event]) -> None:
    """Reject entries of other logs that the excluded log ``source_log`` brings, unless they are ``chained`` already:
    nothing shows that they are of the log that they name.

    Raises:
        BundleInvalidError: names the first such entry.
    """
    for entry in relayed:
        held = held_by(entry)
        if find_event(event_of(entry), chained)[0] is None and (held is None or find_event(held, chained)[0] is None):
            raise BundleInvalidError(
                f"the entry with HLC {entry.t_hlc} is said to be of {entry.key.log}, and the bundle is of "
                f"{source_log}, which the tenant excluded: import the entry from its own log, or include that log first"
            )


class Terms(NamedTuple):
    """The checks for the entries of all bundles of a set, and their sorter."""

    bounds: ClockBounds
    log_origin: str | None
    """Log origin of the importing ledger."""
    check_born: Callable[[str, Born], None]
    """Rejects entries of a tenant with a false origin in its log of this ledger; waits for PostgreSQL."""
    check_relayed: Callable[[str, str, Sequence[Incoming]], None]
    """Rejects entries of other logs in a bundle of a tenant's excluded log, which is the second argument; waits for
    PostgreSQL."""
    sorter: Sorter


@dataclass(slots=True)
class TakenBundle:
    """A wholly verified, valid bundle, and the result of collecting its entries."""

    file: StagedFile
    manifest: Manifest
    count: int = 0
    """Entries collected."""
    beginning: Incoming | None = None
    """The first entry, if it is of an older link version."""
    problem: Exception | None = None
    """The fault of an entry, after which no more were collected."""

    def refuse_if_wrong(self) -> None:
        """Raise the fault of an entry, if there is one.

        Raises:
            BundleRefusedError, ClockSkewError: an entry is not acceptable in this ledger, or not yet.
            Exception: the entries could not be sorted, or PostgreSQL could not be reached.
        """
        if isinstance(self.problem, BundleInvalidError):
            raise BundleRefusedError(str(self.problem), file=self.file.name) from self.problem
        if self.problem is not None:
            raise self.problem


def take_verified(file: StagedFile, keys: Keyring, terms: Terms, expect: Expect | None = None) -> TakenBundle:
    """Verify a bundle wholly and collect its entries; runs in a thread. A bundle that ``expect`` rejects is not
    verified.

    Raises:
        UntrustedKeyError, BundleRefusedError: it is not valid; with the verdict.
        InvalidInputError: it is of ``_system``, which each ledger has of its own.
        Exception: as ``expect``.
    """
    with _opened(file, keys) as reader:
        if expect is not None:
            expect(_trusted_manifest(file, reader, keys))
        taken = TakenBundle(file, reader.manifest)
        is_trusted = Manifest.judge(reader.envelope, keys).verdict == "ok"
        rows = _Taking(reader, terms, taken) if is_trusted else BundleChainReader(reader)
        callers = KeyedJudge(keys.callers, passes_unknown=True)
        refuse_unless_trusted(file.name, asyncio.run(judge_bundle(rows, keys, callers=callers)))
        if taken.manifest.tenant_id == SYSTEM_TENANT:
            raise InvalidInputError(
                f"{file.name} is of {SYSTEM_TENANT}: each ledger has that chain of its own, it is never imported"
            )
        assert taken.problem is not None or taken.count == reader.manifest.entry_count
    return taken


def signed_manifest(file: StagedFile, keys: Keyring) -> RangeManifest:
    """The manifest of a bundle, its entries unread; runs in a thread.

    Raises:
        BundleRefusedError: it is no whole bundle.
        UntrustedKeyError: no trusted key signed the manifest.
    """
    with _opened(file, keys) as reader:
        return _trusted_manifest(file, reader, keys)


def _trusted_manifest(file: StagedFile, reader: BundleReader, keys: Keyring) -> RangeManifest:
    signed = Manifest.judge(reader.envelope, keys)
    if signed.detail is not None:
        raise UntrustedKeyError(f"{file.name}: {signed.detail}; bundle.trusted_keys names who is trusted")
    return reader.manifest


def _opened(file: StagedFile, keys: Keyring) -> BundleReader:
    try:
        return BundleReader.of(file.open(), keys)
    except BundleInvalidError as error:
        raise BundleRefusedError(
            f"{file.name}: {error}", refused(error, file.digest, file.size_bytes).to_json(), file.name
        ) from error


class _Taking(BundleChainReader):
    """Reads a bundle for its verification, and collects the entries that it reads."""

    def __init__(self, bundle: BundleReader, terms: Terms, taken: TakenBundle) -> None:
        super().__init__(bundle)
        self._terms = terms
        self._taken = taken
        self._taker = EntryTaker(bundle.source, terms.bounds)

    async def entries(self, from_seq: int | None, to_seq: int | None) -> AsyncIterator[Sequence[Row]]:
        """Batches of ``ENTRY_COLUMNS`` as stored, of all parts that overlap the range."""
        async for rows in super().entries(from_seq, to_seq):
            # No entry is collected twice, nor any after one that failed.
            if rows[0][SEQ] == self._taken.manifest.from_seq + self._taken.count:
                self._take(rows)
            yield rows

    def _take(self, rows: Sequence[Row]) -> None:
        terms, taken = self._terms, self._taken
        try:
            entries = self._taker.take(rows)
            tenant_id, log_origin = taken.manifest.tenant_id, terms.log_origin
            if log_origin is not None and (born := born_in(f"{log_origin}/{tenant_id}", entries)):
                terms.check_born(tenant_id, born)
            source_log = taken.manifest.origin
            if relayed := [each for each in entries if each.key.rank and each.key.log != source_log]:
                terms.check_relayed(tenant_id, source_log, relayed)
            terms.sorter.add(entries)
        except Exception as error:
            # Kept for later: whether the bundle is valid is reported first.
            taken.problem = error
            return
        if taken.count == 0 and entries[0].link_version != LINK_VERSION:
            taken.beginning = entries[0]
        taken.count += len(entries)
