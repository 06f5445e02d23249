"""Bundles taken while they are verified: what is taken is what they hold, and whether they hold is said first."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest

from app.share.bundle import merging
from app.share.bundle.merging import Sorter
from app.share.bundle.taking import Born, TakenBundle, Terms, _Taking, take_verified
from ledger.bundle.merge import ClockBounds, Incoming, incoming_entries
from ledger.errors import BundleInvalidError, BundleRefusedError, ClockSkewError, NotReadyError, UntrustedKeyError
from ledger.hlc import Hlc
from signing.bundle.reader import BundleChainReader, BundleReader
from signing.keys import Keyring
from tests.app.bundles import GOOD, LOG_ORIGIN, bundle_of, rows_of, store, with_rows
from tests.app.importing import staged
from tests.cases.bundles import cases
from tests.conftest import spread
from tests.ledger.ledger_in_memory import SIGNER, STRANGER, build

RING = Keyring([SIGNER.public_key])
BOUNDS = ClockBounds(2**62, Hlc(2**61, 0, "importing"))


class Taken:
    """Where entries go, and what was asked of the ledger on the way."""

    def __init__(self, file: BinaryIO, before_write: Callable[[], None]) -> None:
        self.sorter = Sorter(file, before_write)
        self.asked: list[int] = []
        self.problem: Exception | None = None

    def check_born(self, tenant_id: str, born: Born) -> None:
        assert tenant_id == "acme"
        self.asked += born
        if self.problem is not None:
            raise self.problem

    def check_relayed(self, tenant_id: str, source_log: str, relayed: Sequence[Incoming]) -> None:
        raise AssertionError(f"no entry of another log was brought, and {source_log} is asked about")

    def terms(self, bounds: ClockBounds = BOUNDS, log_origin: str | None = None) -> Terms:
        return Terms(bounds, log_origin, self.check_born, self.check_relayed, self.sorter)

    def take(self, path: Path, log_origin: str | None = "ours.example", bounds: ClockBounds = BOUNDS) -> TakenBundle:
        return take_verified(staged(path), RING, self.terms(bounds, log_origin))

    def entries(self) -> list[Incoming]:
        return [*self.sorter.entries()]


@contextmanager
def taking(before_write: Callable[[], None] = lambda: None) -> Iterator[Taken]:
    with tempfile.TemporaryFile() as file:
        yield Taken(cast("BinaryIO", file), before_write)


def unusable(**change: Any) -> bytes:
    """A bundle that holds, and has one entry that no ledger takes."""
    ledger = build(30)
    never_issued = {"t_hlc": f"{2**52}:0:ours", "hlc_physical": 2**52, "hlc_logical": 0, "hlc_node": "ours"}
    ledger.entry(9).update(change or never_issued)
    ledger.relink()
    ledger.sign(30)
    return bundle_of(ledger)


def test_every_entry_is_taken_once_whatever_range_the_bundle_is_of(tmp_path: Path) -> None:
    ledger = build(30, snapshots_to=(10, 20, 30))
    long = build(9_000, snapshots_to=(9_000,))
    for bundle in (GOOD, bundle_of(ledger, 11), bundle_of(ledger, 12, 18), bundle_of(long)):
        path = store(tmp_path, bundle)
        with taking() as target:
            taken = target.take(path)
            taken.refuse_if_wrong()
            entries = target.entries()
        with BundleReader.open(path, RING) as reader:
            expected = sorted(incoming_entries(reader.source, reader.entry_batches(), BOUNDS))
            assert (taken.count, taken.file.digest) == (reader.manifest.entry_count, reader.digest)
        assert entries == expected


def test_what_is_shown_twice_is_taken_once(tmp_path: Path) -> None:
    path = store(tmp_path, GOOD)

    async def read_twice(rows: BundleChainReader) -> None:
        for _ in range(2):
            assert [row async for batch in rows.entries(None, None) for row in batch]

    with taking() as target, BundleReader.open(path, RING) as reader:
        taken = TakenBundle(staged(path), reader.manifest)
        asyncio.run(read_twice(_Taking(reader, target.terms(), taken)))
        assert (taken.count, len(target.entries())) == (30, 30)


def test_nothing_is_taken_from_a_bundle_that_no_trusted_key_signed(tmp_path: Path) -> None:
    with taking() as target:
        with pytest.raises(UntrustedKeyError):
            target.take(store(tmp_path, bundle_of(build(30), signer=STRANGER)))
        assert target.entries() == []


def test_an_entry_that_no_ledger_takes_is_named_once_the_bundle_was_found_to_hold(tmp_path: Path) -> None:
    path = store(tmp_path, unusable())
    with taking() as target:
        taken = target.take(path, bounds=ClockBounds(2**62, Hlc(5, 0, "ours")))
    with pytest.raises(BundleRefusedError, match="seq 9 cannot be imported") as raised:
        taken.refuse_if_wrong()
    assert raised.value.file == path.name
    broken = rows_of(path.read_bytes())
    broken[20]["payload"] = '{"changed":1}'
    with taking() as target, pytest.raises(BundleRefusedError, match="payload-digest") as raised:
        target.take(store(tmp_path, with_rows(path.read_bytes(), broken)))
    assert raised.value.verdict is not None


@pytest.mark.exhaustive
def test_no_bundle_that_does_not_hold_is_refused_for_what_it_says_to_the_ledger(tmp_path: Path) -> None:
    broken = [case for case in cases() if case.code == 2 and case.kept is None]
    assert len(broken) > 100
    for case in spread(broken, 40):
        with taking() as target:
            target.problem = NotReadyError("never to be seen")
            with pytest.raises(BundleRefusedError) as raised:
                target.take(store(tmp_path, case.file), LOG_ORIGIN, ClockBounds(0, BOUNDS.issued))
        assert raised.value.verdict is not None, case.name


def test_entries_that_say_they_were_born_here_are_asked_about_and_others_are_not(tmp_path: Path) -> None:
    path = store(tmp_path, GOOD)
    for log_origin, asked in ((LOG_ORIGIN, [*range(1, 31)]), ("ours.example", []), (None, [])):
        with taking() as target:
            target.take(path, log_origin).refuse_if_wrong()
        assert target.asked == asked
    with taking() as target:
        target.problem = BundleInvalidError("another entry stands there")
        taken = target.take(path, LOG_ORIGIN)
        assert target.entries() == []
    with pytest.raises(BundleRefusedError, match="another entry stands there"):
        taken.refuse_if_wrong()


def test_a_time_that_has_not_come_and_a_disk_that_is_too_full_are_said_behind_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store(tmp_path, GOOD)
    with taking() as target:
        taken = target.take(path, bounds=ClockBounds(0, BOUNDS.issued))
    with pytest.raises(ClockSkewError):
        taken.refuse_if_wrong()

    def refuse() -> None:
        raise NotReadyError("make room")

    monkeypatch.setattr(merging, "HELD_ENTRIES_MAX", 2)
    with taking(refuse) as target:
        taken = target.take(path)
    with pytest.raises(NotReadyError, match="make room"):
        taken.refuse_if_wrong()
