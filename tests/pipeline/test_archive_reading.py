"""Verifying from an archive alone: what holds is ok, and whatever was changed in it is found."""

from __future__ import annotations

import base64
import io
import json
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ledger import canonical
from ledger.errors import ArchiveInvalidError, ConfigurationError, TenantNotFoundError, UnknownKeyError
from ledger.exit_code import ExitCode, exit_code_of_bundle
from ledger.merkle import Frontier
from ledger.verification.entry_check import ENTRY_COLUMNS
from ledger.verification.verdict import Head
from objects.store import ArchiveStore
from pipeline.archive.parquet import ENTRY_FILE_SCHEMA, FileWriter
from pipeline.archive.ranges import archived_end, entries_between, verified_range
from pipeline.archive.reader import tenants_of, verify_tenant
from pipeline.archiving.filing import Ledger as PostgresLedger
from pipeline.places import parse_place
from pipeline.places.protocol import Times
from pipeline.source import open_pieces
from signing import envelope
from signing.keys import Keyring
from tests.conftest import Database
from tests.ledger.ledger_in_memory import SIGNER, STRANGER, Ledger
from tests.pipeline.archived_ledgers import DAY_MS, JANUARY_MS, RING, archive_here, days, ledger_of, store

Edit = Callable[[dict[str, Any]], None]


_made: list[tuple[Ledger, Path]] = []


@pytest.fixture
def database_at_first(request: pytest.FixtureRequest) -> Database | None:
    """A database for the first test that asks, which makes what all use."""
    return None if _made else request.getfixturevalue("database")


@pytest.fixture
async def ledger(
    database_at_first: Database | None, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Ledger:
    """A ledger whose first 50 of 55 entries are archived under ``tmp_path``, in ranges of 30 and 20."""
    if database_at_first is not None:
        ledger, folder = ledger_of("acme", days(35)), tmp_path_factory.mktemp("archive")
        await store(database_at_first, ledger)
        archive_here(database_at_first, folder)
        ledger_of("acme", days(20, 35), start=ledger)
        await store(database_at_first, ledger)
        archive_here(database_at_first, folder)
        _made.append((ledger, folder))
    ledger, folder = _made[0]
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    return ledger.copy()


async def verified(folder: Path, keyring: Keyring | None = RING) -> dict[str, Any]:
    return await verify_tenant(ArchiveStore(str(folder)), "acme", keyring)


def manifest_files(folder: Path) -> list[Path]:
    return sorted((folder / "manifests" / "acme").iterdir())


def entry_files(folder: Path) -> list[Path]:
    return sorted((folder / "entries").rglob("*.parquet"), key=lambda file: file.name)


def payload_of(file: Path) -> dict[str, Any]:
    statement: dict[str, Any] = json.loads(base64.b64decode(json.loads(file.read_text())["payload"]))
    return statement


def reseal(folder: Path, number: int, edit: Edit) -> None:
    """Edit what a manifest says, and have the ledger's key sign it, and those behind it, again."""
    previous = None
    for at, file in enumerate(manifest_files(folder)):
        statement = payload_of(file)
        said = statement["predicate"]
        if at == number:
            edit(said)
        if at > number:
            said["previous_manifest"] = previous
        digests = b"".join(bytes.fromhex(each["sha256"]) for each in said["files"])
        statement["subject"][0]["digest"]["sha256"] = sha256(digests).hexdigest()
        payload = canonical.encode(statement)
        previous = sha256(payload).hexdigest()
        file.write_bytes(canonical.encode(envelope.sign(payload, SIGNER)))


def rewrite(folder: Path, number: int, edit: Callable[[list[dict[str, Any]]], None], schema: pa.Schema) -> None:
    """Edit the rows of an entry file, and have the manifests fit."""
    file = entry_files(folder)[number]
    rows = pq.ParquetFile(file).read().to_pylist()
    edit(rows)
    local = io.BytesIO()
    writer = FileWriter(local, ENTRY_FILE_SCHEMA)
    for batch in pa.Table.from_pylist(rows, schema).to_batches():
        writer.add(batch)
    writer.finish("a")
    replace(folder, file, local.getvalue())


def replace(folder: Path, file: Path, data: bytes) -> None:
    """Put ``data`` in the place of a file, and have the manifests fit."""
    file.write_bytes(data)
    name = file.relative_to(folder).as_posix()

    def edit(said: dict[str, Any]) -> None:
        for listed in said["files"]:
            if listed["name"] == name:
                listed |= {"sha256": sha256(data).hexdigest(), "bytes": len(data)}

    for number in range(len(manifest_files(folder))):
        reseal(folder, number, edit)


async def test_a_sound_archive_is_valid_as_far_as_it_goes(ledger: Ledger, tmp_path: Path) -> None:
    verdict = await verified(tmp_path)
    assert verdict["verdicts"] == {
        "archive": "ok",
        "links": "ok",
        "payloads": "ok",
        "head": "ok",
        "snapshots": "ok",
        "signatures": "ok",
        "tree": "ok",
        "projection": "not_checked",
        "checkpoint": "not_checked",
    }
    assert (verdict["valid"], verdict["entries_checked"], verdict["unsigned_entries"]) == (True, 50, 0)
    assert verdict["head"] == Head(50, ledger.entry(50)["chain_link"], ledger.entry(50)["t_hlc"])._asdict()
    assert verdict["compared_with"] == "archive"
    assert verdict["archive"]["manifest_key_ids"] == [SIGNER.key_id]
    assert exit_code_of_bundle(verdict) == ExitCode.FINE


async def test_an_archive_ends_at_a_signed_snapshot_and_keeps_the_unsigned_ones_before_it(
    database: Database, tmp_path: Path
) -> None:
    ledger, unsigned = ledger_of("acme", days(40)), ledger_of("other", days(20))
    ledger.snapshots.clear()
    unsigned.snapshots.clear()
    for to_seq in (10, 20):
        ledger.cover(to_seq)
        unsigned.cover(to_seq)
    ledger.sign(30)
    ledger.cover(40)
    await store(database, ledger, unsigned)
    done = archive_here(database, tmp_path)
    assert [(each.tenant_id, each.to_seq, each.first_break) for each in done] == [
        ("acme", 30, None),
        ("other", 0, None),
    ]
    (file,) = (tmp_path / "snapshots").rglob("*.parquet")
    assert [row["dsse_envelope"] is None for row in pq.ParquetFile(file).read().to_pylist()] == [True, True, False]
    verdict = await verified(tmp_path)
    assert (verdict["verdicts"]["signatures"], verdict["signed_to_seq"], verdict["first_break"]) == ("ok", 30, None)
    with PostgresLedger.connected(database.superuser_url) as connected:
        assert connected.unsigned() == {"other": 20}


async def test_without_keys_nothing_vouches_and_a_strangers_are_unknown(ledger: Ledger, tmp_path: Path) -> None:
    unkeyed = await verified(tmp_path, None)
    assert (unkeyed["verdicts"]["archive"], unkeyed["verdicts"]["signatures"]) == ("not_checked", "not_checked")
    assert exit_code_of_bundle(unkeyed) == ExitCode.INCOMPLETE
    unknown = await verified(tmp_path, Keyring([STRANGER.public_key]))
    assert {unknown["verdicts"][aspect] for aspect in ("archive", "signatures", "checkpoint")} == {"unknown_key"}
    assert exit_code_of_bundle(unknown) == ExitCode.UNKNOWN_KEY
    assert not unknown["valid"]


def cut_byte(folder: Path) -> None:
    file = entry_files(folder)[1]
    file.write_bytes(file.read_bytes()[:-1])


def flip_bit(folder: Path) -> None:
    file = entry_files(folder)[2]
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)


def strange_signature(folder: Path) -> None:
    file = manifest_files(folder)[0]
    signed = json.loads(file.read_text())
    other = envelope.sign(base64.b64decode(signed["payload"]), STRANGER)
    other["signatures"] = [{**other["signatures"][0], "keyid": SIGNER.key_id}]
    file.write_bytes(canonical.encode(other))


def reworded(name: str, value: object, number: int = 1) -> Callable[[Path], None]:
    return lambda folder: reseal(folder, number, lambda said: said.update({name: value}))


def other_parquet(folder: Path) -> None:
    local = io.BytesIO()
    pq.write_table(pa.table({"seq": [1, 2, 3]}), local)
    replace(folder, entry_files(folder)[0], local.getvalue())


def fewer_rows(folder: Path) -> None:
    rewrite(folder, 0, lambda rows: rows.pop(), ENTRY_FILE_SCHEMA)


def long_repeated(folder: Path) -> None:
    """A text of 4 MB that stands once in the file and in every row."""
    rewrite(folder, 0, lambda rows: [row.update(job_id="j" * (4 << 20)) for row in rows], ENTRY_FILE_SCHEMA)


def no_utf8(folder: Path) -> None:
    file, local = entry_files(folder)[0], io.BytesIO()
    table = pq.ParquetFile(file).read()
    payloads = pa.array([b"\xff"] * len(table)).cast(pa.string(), safe=False)
    (batch,) = table.set_column(11, table.schema.field(11), payloads).combine_chunks().to_batches()
    writer = FileWriter(local, ENTRY_FILE_SCHEMA)
    writer.add(batch)
    writer.finish("a")
    replace(folder, file, local.getvalue())


def dictionary_of_payloads(folder: Path) -> None:
    file, local = entry_files(folder)[0], io.BytesIO()
    pq.write_table(pq.ParquetFile(file).read(), local, compression="zstd", store_schema=False)
    replace(folder, file, local.getvalue())


def later_month(folder: Path) -> None:
    rewrite(folder, 0, lambda rows: rows[3].update(hlc_physical=JANUARY_MS + 90 * DAY_MS), ENTRY_FILE_SCHEMA)


ARCHIVE_BREAKS: dict[str, tuple[Callable[[Path], object], str, int]] = {
    "a file cut by a byte": (cut_byte, "archive", 22),
    "a bit of a file": (flip_bit, "archive", 31),
    "a file that is gone": (lambda folder: entry_files(folder)[1].unlink(), "archive", 22),
    "a file that is no Parquet": (lambda f: replace(f, entry_files(f)[0], b"PAR1 or so PAR1"), "archive", 1),
    "a file of other columns": (other_parquet, "archive", 1),
    "a file with fewer rows": (fewer_rows, "archive", 1),
    "a text that repeats itself for too long": (long_repeated, "archive", 1),
    "a file with dictionaries where none may be": (dictionary_of_payloads, "archive", 1),
    "a text that is none": (no_utf8, "archive", 1),
    "an entry of a later month": (later_month, "archive", 1),
    "the first manifest gone": (lambda folder: manifest_files(folder)[0].unlink(), "archive", 0),
    "something among the manifests": (
        lambda folder: (folder / "manifests" / "acme" / "x").write_bytes(b""),
        "archive",
        0,
    ),
    "a manifest that is empty": (lambda folder: manifest_files(folder)[1].write_bytes(b""), "archive", 0),
    "a manifest by another key": (strange_signature, "archive-signature", 0),
    "a manifest of another one before it": (reworded("previous_manifest", "0" * 64), "archive", 0),
    "a manifest of another log": (reworded("log_origin", "other.example"), "archive", 0),
    "a manifest with another count": (reworded("entry_count", 21), "archive", 0),
    "a manifest with another root": (reworded("tree_root", "0" * 64), "archive", 0),
    "a manifest with no proof": (reworded("consistency", []), "archive", 50),
    "a manifest that is no checkpoint": (reworded("checkpoint", "log.example/acme\n1\n"), "archive", 50),
    "a manifest of a later version": (reworded("format_version", 4), "archive", 0),
    "a manifest without the cosignatures of its version": (reworded("format_version", 3), "archive", 0),
    "a manifest with one more field": (reworded("note", "x"), "archive", 0),
    "a manifest of an earlier version with the proof of this one": (reworded("format_version", 1), "archive", 0),
    "a manifest whose tree does not extend the one before": (reworded("extends", ["0" * 64]), "archive", 31),
    "a manifest that goes back in time": (reworded("highest_physical_ms", 5), "archive", 0),
    "a manifest over its bound": (
        lambda folder: manifest_files(folder)[0].write_bytes(bytes(5 << 20)),
        "archive",
        0,
    ),
}


@pytest.mark.parametrize("name", ARCHIVE_BREAKS)
async def test_an_archive_that_does_not_hold_says_why(ledger: Ledger, tmp_path: Path, name: str) -> None:
    damage, kind, seq = ARCHIVE_BREAKS[name]
    damage(tmp_path)
    verdict = await verified(tmp_path)
    assert (verdict["verdicts"]["archive"], verdict["valid"]) == ("broken", False)
    assert (verdict["first_break"]["kind"], verdict["first_break"]["seq"]) == (kind, seq), verdict["first_break"]
    assert exit_code_of_bundle(verdict) == ExitCode.TAMPERED


async def test_manifests_of_version_1_have_no_such_proof_and_hold(ledger: Ledger, tmp_path: Path) -> None:
    def as_before(said: dict[str, Any]) -> None:
        del said["extends"]
        said["format_version"] = 1

    reseal(tmp_path, 0, as_before)
    reseal(tmp_path, 1, as_before)

    assert (await verified(tmp_path))["verdicts"]["archive"] == "ok"


ROW_BREAKS: dict[str, tuple[int, dict[str, Any], str, int]] = {
    "a payload": (1, {"payload": "{}"}, "payload-digest", 25),
    "a link": (1, {"chain_link": "0" * 64}, "link", 25),
    "a job": (2, {"job_id": "another"}, "link", 34),
    "a time": (0, {"hlc_physical": JANUARY_MS}, "hlc-columns", 4),
    "a seq": (1, {"seq": 24}, "duplicate-seq", 24),
}


@pytest.mark.parametrize("name", ROW_BREAKS)
async def test_rows_that_were_changed_and_signed_again_are_found_as_in_any_ledger(
    ledger: Ledger, tmp_path: Path, name: str
) -> None:
    number, change, kind, seq = ROW_BREAKS[name]
    rewrite(tmp_path, number, lambda rows: rows[3].update(change), ENTRY_FILE_SCHEMA)
    verdict = await verified(tmp_path)
    assert verdict["verdicts"]["archive"] == "ok"
    assert (verdict["first_break"]["kind"], verdict["first_break"]["seq"]) == (kind, seq), verdict["first_break"]


async def test_a_history_made_up_anew_is_not_the_one_of_the_tree_heads(ledger: Ledger, tmp_path: Path) -> None:
    forged = ledger.copy()
    forged.entry(8)["payload"] = forged.entry(8)["payload"][:-1] + ',"zz":"forged"}'
    forged.relink()
    by_seq = {row["seq"]: {name: row[name] for name in ENTRY_COLUMNS} for row in forged.entries}
    for number in range(len(entry_files(tmp_path))):

        def edit(rows: list[dict[str, Any]]) -> None:
            for row in rows:
                row.update(by_seq[row["seq"]])

        rewrite(tmp_path, number, edit, ENTRY_FILE_SCHEMA)
    verdict = await verified(tmp_path)
    assert verdict["breaks"]["rollback"] == 2
    assert verdict["verdicts"]["snapshots"] == verdict["verdicts"]["checkpoint"] == "broken"


async def test_an_archive_is_a_place_whose_pieces_are_its_files(ledger: Ledger, tmp_path: Path) -> None:
    place = parse_place(str(tmp_path))
    with place.open() as archive:
        assert archive.tenants() == tenants_of(ArchiveStore(str(tmp_path))) == ["acme"]
        pieces = archive.pieces()
        assert [(piece.from_seq, piece.to_seq, piece.rows, piece.is_first) for piece in pieces] == [
            (None, 21, 21, True),
            (22, 30, 9, False),
            (31, None, 20, False),
        ]
        seqs, snapshots = [], []
        for _, reader in open_pieces(pieces):
            for batch in reader.entries(("t_hlc", "seq")):
                assert batch.schema.names == ["t_hlc", "seq"]
                seqs += batch.column(1).to_pylist()
            snapshots += [row for batch in reader.snapshots() for row in batch.column(0).to_pylist()]
        assert seqs == list(range(1, 51))
        assert snapshots == [1, 11, 21, 21, 31, 41]
        assert archive.facts("acme").head == archive.facts("acme").last
        some = archive.pieces(["acme"], from_seq=25, to_seq=33)
        assert [
            seq
            for _, reader in open_pieces(some)
            for batch in reader.entries(["seq"])
            for seq in batch.column(0).to_pylist()
        ] == list(range(25, 34))
        timed = archive.pieces(times=Times(JANUARY_MS + 40 * DAY_MS, JANUARY_MS + 42 * DAY_MS))
        assert len(timed) < 3
        assert [
            seq
            for _, reader in open_pieces(timed)
            for batch in reader.entries(["seq"])
            for seq in batch.column(0).to_pylist()
        ] == [41, 42, 43]
        with pytest.raises(TenantNotFoundError):
            archive.pieces(["nobody"])


def test_what_is_no_place_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="is no ledger"):
        parse_place("ftp://somewhere")
    with pytest.raises(ConfigurationError, match="no place for an archive"):
        ArchiveStore("ftp://somewhere")


# --- ranges for a caller that acts on them ----------------------------------------------------------


def test_the_end_of_each_range_is_what_its_signed_manifest_states(ledger: Ledger, tmp_path: Path) -> None:
    store = ArchiveStore(str(tmp_path))

    first, newest = archived_end(store, "acme", RING, 30), archived_end(store, "acme", RING)

    assert first is not None
    assert newest is not None
    assert [(each.from_seq, each.to_seq) for each in (first, newest)] == [(1, 30), (31, 50)]
    assert newest.chain_link == ledger.entries[49]["chain_link"]
    assert newest.manifest == sha256(canonical.encode(payload_of(manifest_files(tmp_path)[1]))).hexdigest()
    tree = Frontier.restore(50, [bytes.fromhex(each) for each in newest.frontier])
    assert tree.root().hex() == newest.tree_root
    assert archived_end(store, "acme", RING, 51) is None
    assert archived_end(store, "other", RING) is None


def test_ranges_that_no_held_key_signed_are_no_ends(ledger: Ledger, tmp_path: Path) -> None:
    store, strangers = ArchiveStore(str(tmp_path)), Keyring([STRANGER.public_key])

    with pytest.raises(UnknownKeyError, match="seq 31 to 50"):
        archived_end(store, "acme", strangers)
    with pytest.raises(UnknownKeyError, match="seq 1 to 30"):
        verified_range(store, "acme", strangers, 1, 5)


@pytest.mark.parametrize(("from_seq", "to_seq", "ends"), [(1, 50, [30, 50]), (35, 40, [50]), (2, 3, [30])])
def test_a_range_is_read_back_with_the_ranges_that_hold_it(
    ledger: Ledger, tmp_path: Path, from_seq: int, to_seq: int, ends: list[int]
) -> None:
    store = ArchiveStore(str(tmp_path))

    assert [each.to_seq for each in verified_range(store, "acme", RING, from_seq, to_seq)] == ends
    rows = [row for batch in entries_between(store, "acme", RING, from_seq, to_seq) for row in batch]
    assert rows == [tuple(entry[name] for name in ENTRY_COLUMNS) for entry in ledger.entries[from_seq - 1 : to_seq]]


def test_a_range_beyond_the_archive_is_refused(ledger: Ledger, tmp_path: Path) -> None:
    store = ArchiveStore(str(tmp_path))

    with pytest.raises(ArchiveInvalidError, match="ends at seq 50"):
        verified_range(store, "acme", RING, 45, 51)
    with pytest.raises(ArchiveInvalidError, match="ends at seq 0"):
        entries_between(store, "other", RING, 1, 1)


def test_a_range_with_a_changed_file_is_not_verified(ledger: Ledger, tmp_path: Path) -> None:
    file = entry_files(tmp_path)[-1]
    file.write_bytes(file.read_bytes()[:-1] + b"X")

    with pytest.raises(ArchiveInvalidError, match="size or digest is another"):
        verified_range(ArchiveStore(str(tmp_path)), "acme", RING, 31, 50)


def test_a_range_of_a_forged_payload_is_not_verified_though_its_manifest_was_signed(
    ledger: Ledger, tmp_path: Path
) -> None:
    def forge(rows: list[dict[str, Any]]) -> None:
        rows[0]["payload"] = '{"forged":true}'

    rewrite(tmp_path, len(entry_files(tmp_path)) - 1, forge, ENTRY_FILE_SCHEMA)

    with pytest.raises(ArchiveInvalidError, match="payload-digest at seq"):
        verified_range(ArchiveStore(str(tmp_path)), "acme", RING, 31, 50)
