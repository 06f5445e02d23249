"""A bundle is read in pieces of its parts, by tasks that hash only what they read."""

from __future__ import annotations

import os
import pickle
from functools import cache
from pathlib import Path

import pytest

from ledger.errors import BundleInvalidError, ConfigurationError, TenantNotFoundError
from ledger.verification import ENTRY_COLUMNS
from objects.store import ArchiveStore
from pipeline.places import Times, parse_place
from pipeline.source import open_pieces
from pipeline.source.data_source import places_of
from tests.app.bundles import bundle_of, reseal, rows_of, with_rows
from tests.ledger.ledger_in_memory import Ledger, build
from tests.pipeline.test_source_postgres import rows_of as rows_in

SHORT = build(40, snapshots_to=(10, 20))


@cache
def long() -> Ledger:
    """A ledger of three parts: a part has 10,000 rows."""
    return build(23_000, snapshots_to=(4_000, 12_000, 23_000))


@cache
def long_bundle() -> bytes:
    """The bundle of ``long``."""
    return bundle_of(long())


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A file with ``long_bundle``."""
    path = tmp_path / "acme.bundle.tar"
    path.write_bytes(long_bundle())
    return path


def expected(columns: tuple[str, ...], rows: list[dict[str, object]]) -> list[tuple[object, ...]]:
    return [tuple(row[name] for name in columns) for row in rows]


def test_the_pieces_of_a_bundle_are_its_rows_its_snapshots_and_what_its_manifest_says(bundle: Path) -> None:
    with parse_place(str(bundle)).open() as opened:
        assert opened.tenants() == ["acme"]
        pieces = opened.pieces(rows_a_piece=5_000)
        assert [(piece.from_seq, piece.to_seq, piece.rows, piece.is_first) for piece in pieces] == [
            (1, 10_000, 10_000, True),
            (10_001, 20_000, 10_000, False),
            (20_001, 23_000, 3_000, False),
        ]
        assert [piece.rows for piece in opened.pieces(rows_a_piece=20_000)] == [20_000, 3_000]
        read, snapshots = [], []
        for _, reader in open_pieces(pickle.loads(pickle.dumps(pieces))):
            batches = list(reader.entries())
            assert max(batch.num_rows for batch in batches) <= 10_000
            read += rows_in(batches)
            snapshots.append([row[:2] for row in rows_in(reader.snapshots())])
            assert (reader.tiles(0, 0, 9), reader.jobs()) == (None, None)
        assert read == expected(ENTRY_COLUMNS, long().entries)
        assert snapshots == [[(1, 4000), (4001, 12000)], [(4001, 12000), (12001, 23000)], [(12001, 23000)]]
        facts = opened.facts("acme")
        assert (facts.head, facts.last) == (long().head, long().last())
        assert facts.tree == long().tree


def test_bounds_of_seq_and_time_read_only_the_parts_they_touch(bundle: Path) -> None:
    with parse_place(str(bundle)).open() as opened:
        pieces = opened.pieces(["acme"], rows_a_piece=10_000, from_seq=9_999, to_seq=10_002)
        assert [(piece.from_seq, piece.to_seq) for piece in pieces] == [(9_999, 10_000), (10_001, 10_002)]
        read = [row[0] for _, reader in open_pieces(pieces) for row in rows_in(reader.entries(("seq",)))]
        assert read == [9_999, 10_000, 10_001, 10_002]
        assert opened.pieces(["acme"], from_seq=23_001) == []
        moment = long().entry(15_000)["hlc_physical"]
        timed = opened.pieces(times=Times(moment, moment))
        read = [row[0] for _, reader in open_pieces(timed) for row in rows_in(reader.entries(("seq",)))]
        assert read == [row["seq"] for row in long().entries if row["hlc_physical"] == moment]
        with pytest.raises(TenantNotFoundError, match="no tenant 'other' in"):
            opened.pieces(["other"])


def test_rows_with_other_seqs_than_the_manifest_promises_are_read_as_they_stand(tmp_path: Path) -> None:
    rows = rows_of(bundle_of(SHORT))
    rows[4]["seq"], rows[5]["seq"] = 500_000, 1
    path = tmp_path / "forged.tar"
    path.write_bytes(with_rows(bundle_of(SHORT), rows))
    with parse_place(str(path)).open() as opened:
        read = [row for _, reader in open_pieces(opened.pieces()) for row in rows_in(reader.entries())]
    assert read == expected(ENTRY_COLUMNS, rows)


@pytest.mark.parametrize("at", [600, -1500, 30_000])
def test_a_file_that_changes_between_driver_and_task_is_refused(bundle: Path, at: int) -> None:
    with parse_place(str(bundle)).open() as opened:
        pieces = opened.pieces()
        data = bytearray(bundle.read_bytes())
        data[at] ^= 1
        bundle.write_bytes(data)
        with pytest.raises(BundleInvalidError):
            [list(reader.entries()) for _, reader in open_pieces(pieces)]


def test_a_bundle_put_in_the_place_of_another_is_refused(bundle: Path, tmp_path: Path) -> None:
    with parse_place(str(bundle)).open() as opened:
        pieces = opened.pieces()
        other = tmp_path / "other"
        other.write_bytes(reseal(long_bundle(), node_id="node-2"))
        os.replace(other, bundle)
        with pytest.raises(BundleInvalidError):
            list(open_pieces(pieces))


def test_what_is_no_ledger_is_refused_by_name(tmp_path: Path) -> None:
    for text in (str(tmp_path / "nothing"), "mysql://host/db", ""):
        with pytest.raises(ConfigurationError, match="is no ledger"):
            parse_place(text)
    (tmp_path / "text").write_text("no bundle")
    with (
        pytest.raises(BundleInvalidError, match=r"/text: it is no bundle; it looks like text"),
        parse_place(str(tmp_path / "text")).open(),
    ):
        pass


def test_a_path_becomes_absolute_where_it_is_named_as_tasks_run_elsewhere(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(bundle.parent)
    assert str(parse_place(bundle.name)) == str(bundle)
    assert str(parse_place(".")) == ArchiveStore(".").url == str(bundle.parent)


def test_an_option_of_the_data_source_takes_the_kind_of_place_that_it_names(bundle: Path, tmp_path: Path) -> None:
    (named,) = places_of({"bundle": str(bundle)})
    assert str(named) == str(bundle)
    for option, text in (("dsn", bundle), ("archive", bundle), ("bundle", tmp_path), ("dsn", tmp_path)):
        with pytest.raises(ConfigurationError, match=f"^{option} takes a"):
            places_of({option: str(text)})
