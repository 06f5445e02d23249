"""The Iceberg table of an archive: engines read it without a catalog, and whatever was changed in it is found."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyiceberg.table import StaticTable
from pyspark.sql import SparkSession

from cli.verify_archive import verify_archive
from ledger.errors import ArchiveConflictError, ArchiveInvalidError, TenantNotFoundError, UnknownKeyError
from ledger.exit_code import ExitCode
from objects.store import ArchiveStore
from pipeline.archive import SealedManifest, table_writer
from pipeline.archive.parquet import ENTRY_FILE_SCHEMA, FileWriter, batches, opened
from pipeline.archive.reader import TenantArchive, newest_manifest, tenants_of
from pipeline.archive.table import (
    TableFiles,
    describing,
    metadata_name,
    new_table,
    open_statement,
    statement_name,
    versions_of,
)
from pipeline.archive.table_reader import verify_table
from pipeline.archive.table_writer import TableVersion, TableWriter
from signing.keys import Keyring
from terminal.outcome import CommandExit
from tests.conftest import Database
from tests.ledger.ledger_in_memory import SIGNER, STRANGER
from tests.pipeline.archived_ledgers import LOG_ORIGIN, RING, archive_here, checkpoint_of, days, ledger_of, store
from tests.pipeline.conftest import RunCommand

_made: list[Path] = []


@pytest.fixture
def database_at_first(request: pytest.FixtureRequest) -> Database | None:
    """A database for the first test that asks, which makes what all use."""
    return None if _made else request.getfixturevalue("database")


@pytest.fixture
async def archive(database_at_first: Database | None, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive of 30 and then 20 entries of acme, and 10 of beta, whose table has two versions."""
    if database_at_first is not None:
        made = tmp_path_factory.mktemp("archive")
        acme = ledger_of("acme", days(35))
        await store(database_at_first, acme)
        archive_here(database_at_first, made)
        extend(made, ["acme"])
        await store(database_at_first, ledger_of("acme", days(20, 35), start=acme), ledger_of("beta", days(10)))
        archive_here(database_at_first, made)
        extend(made, ["acme", "beta"])
        _made.append(made)
    copy = tmp_path / "archive"
    shutil.copytree(_made[0], copy)
    return copy


def newest_of(folder: Path, *tenants: str) -> dict[str, SealedManifest]:
    found = {each: newest_manifest(ArchiveStore(str(folder)), each, RING) for each in tenants}
    return {tenant: sealed for tenant, sealed in found.items() if sealed is not None}


def extend(folder: Path, tenants: list[str]) -> int:
    return TableWriter(ArchiveStore(str(folder)), LOG_ORIGIN).extend(newest_of(folder, *tenants), SIGNER, RING).number


def no_table(folder: Path) -> None:
    for each in ("metadata", "table"):
        shutil.rmtree(folder / each)


def table_anew(folder: Path, tenants: list[str]) -> None:
    """A table whose locations are in ``folder``."""
    no_table(folder)
    extend(folder, tenants)


def verified(folder: Path, keyring: Keyring | None = RING) -> dict[str, Any]:
    place = ArchiveStore(str(folder))
    return verify_table(
        place, {each: TenantArchive.read(place, each, keyring).sealed for each in tenants_of(place)}, keyring
    )


def read_by_duckdb(folder: Path, condition: str = "true") -> tuple[Any, ...]:
    """Entries, those with a tenant, those with a month, tenants."""
    # It starts a thread when it is imported, and workers are forked from what has imported all tests.
    import duckdb
    import duckdb_extension_avro
    import duckdb_extension_iceberg

    connection = duckdb.connect()
    for package, name in ((duckdb_extension_avro, "avro"), (duckdb_extension_iceberg, "iceberg")):
        (extension,) = Path(package.__file__).parent.glob(f"extensions/*/{name}.duckdb_extension")
        connection.execute(f"LOAD '{extension}'")
    (row,) = connection.sql(
        "SELECT count(*), count(tenant_id), count(month), count(DISTINCT tenant_id)"
        f" FROM iceberg_scan('{folder}') WHERE {condition}"
    ).fetchall()
    return tuple(row)


# --- engines ------------------------------------------------------------------------------------------


def test_engines_without_a_catalog_count_the_same_entries_in_partitions_that_are_never_null(
    archive: Path, spark: SparkSession
) -> None:
    made = _made[0]  # where its locations are

    of_duckdb = read_by_duckdb(made)

    table = StaticTable.from_metadata(str(made))
    by_pyiceberg = table.scan(selected_fields=("seq", "tenant_id", "month")).to_arrow()
    files = [task.file.file_path for task in table.scan().plan_files()]
    by_spark = spark.read.option("basePath", f"{made}/entries").parquet(*files)
    assert of_duckdb == (60, 60, 60, 2)
    assert by_pyiceberg.num_rows == 60
    assert [by_pyiceberg.column(name).null_count for name in ("tenant_id", "month")] == [0, 0]
    assert by_spark.count() == by_spark.filter("tenant_id IS NOT NULL AND month IS NOT NULL").count() == 60
    assert read_by_duckdb(made, "tenant_id = 'acme' AND seq > 45") == (5, 5, 5, 1)
    assert read_by_duckdb(made, "month = '2024-01' AND tenant_id = 'beta'")[0] == 10


def test_a_file_beside_those_that_manifests_signed_is_read_by_no_engine_that_goes_by_the_table(
    archive: Path, spark: SparkSession
) -> None:
    table_anew(archive, ["acme", "beta"])
    (file,) = (archive / "entries" / "tenant_id=beta").rglob("*.parquet")
    shutil.copy(file, file.with_name(f"{11:020d}-{20:020d}.parquet"))

    scanned = StaticTable.from_metadata(str(archive)).scan()

    files = [task.file.file_path for task in scanned.plan_files()]
    entries = f"{archive}/entries"
    assert spark.read.parquet(entries).count() == 70
    assert spark.read.option("basePath", entries).parquet(*files).count() == 60
    assert (read_by_duckdb(archive)[0], scanned.to_arrow().num_rows) == (60, 60)
    signed = [*signed_files(archive, "acme"), *signed_files(archive, "beta")]
    assert sorted(each.removeprefix(f"{archive}/") for each in files) == sorted(signed)


def signed_files(folder: Path, tenant_id: str) -> list[str]:
    sealed = TenantArchive.read(ArchiveStore(str(folder)), tenant_id, RING).sealed
    return [file.name for each in sealed for file in each.manifest.entry_files]


def test_an_archive_that_was_copied_is_verified_where_it_is(archive: Path) -> None:
    assert verified(archive)["verdict"] == "ok"


def test_snapshots_name_the_manifests_of_their_files(archive: Path) -> None:
    place = ArchiveStore(str(archive))
    newest = {each: TenantArchive.read(place, each, RING).sealed[-1].digest for each in ("acme", "beta")}

    snapshot = StaticTable.from_metadata(str(_made[0])).current_snapshot()

    assert snapshot is not None
    assert snapshot.summary is not None
    assert {each: snapshot.summary[f"tally.manifest.{each}"] for each in newest} == newest


# --- writing ------------------------------------------------------------------------------------------


def test_a_table_that_has_all_is_not_written_again(archive: Path) -> None:
    assert extend(archive, ["acme", "beta"]) == 2
    assert versions_of(ArchiveStore(str(archive))) == [1, 2]


def test_a_version_that_another_process_wrote_first_is_gone_on_from(archive: Path) -> None:
    late = TableWriter(ArchiveStore(str(archive)), LOG_ORIGIN)
    for name in ("v1.metadata.json", "v2.metadata.json", "version-hint.text"):
        (archive / "metadata" / name).unlink()
    late._newest = late._open(RING)  # of the empty table
    extend(archive, ["acme"])

    version = late.extend(newest_of(archive, "acme", "beta"), SIGNER, RING)

    assert (version.number, version.covered) == (2, {"acme": 50, "beta": 10})
    assert verified(archive)["verdict"] == "ok"


def test_processes_that_never_come_first_say_so(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TableWriter, "_commit", lambda *_: None)
    shutil.rmtree(archive / "metadata")

    with pytest.raises(ArchiveConflictError, match="run one at a time"):
        extend(archive, ["acme"])


def test_lists_are_merged_and_snapshots_forgotten_so_that_a_version_stays_small(
    archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_table(archive)
    for name, value in (("COMMIT_FILES_MAX", 1), ("LISTS_MAX", 2), ("SNAPSHOTS_KEPT", 2)):
        monkeypatch.setattr(table_writer, name, value)

    version = TableWriter(ArchiveStore(str(archive)), LOG_ORIGIN).extend(
        newest_of(archive, "acme", "beta"), SIGNER, RING
    )

    current = version.metadata.current_snapshot()
    assert current is not None
    assert version.number == current.sequence_number == 4
    assert len(version.metadata.snapshots) == 2
    assert len(current.manifests(TableFiles(ArchiveStore(str(archive)), str(archive)))) <= 2
    assert verified(archive)["verdict"] == "ok"
    assert read_by_duckdb(archive)[0] == 60
    oldest = min((archive / "metadata").glob("snap-*.avro"), key=lambda file: file.stat().st_mtime_ns)
    assert oldest.name not in (archive / metadata_name(4)).read_text()
    oldest.write_bytes(b"Obj")
    assert "is not the object that its statement names" in verified(archive)["detail"]


def test_a_process_that_died_before_its_version_was_whole_leaves_nothing_that_counts(archive: Path) -> None:
    table_anew(archive, ["acme"])
    extend(archive, ["beta"])
    (archive / "metadata" / "v2.metadata.json").unlink()
    (archive / "metadata" / "version-hint.text").write_text("1")

    behind = verified(archive)

    assert (behind["verdict"], behind["version"]) == ("behind", 1)
    assert "newer files yet" in behind["detail"]
    assert read_by_duckdb(archive)[0] == 50
    assert extend(archive, ["acme", "beta"]) == 2
    assert verified(archive)["verdict"] == "ok"
    assert read_by_duckdb(archive)[0] == 60


def test_a_process_that_died_before_the_hint_has_it_made_right(archive: Path) -> None:
    (archive / "metadata" / "version-hint.text").write_text("1")

    extend(archive, [])

    assert (archive / "metadata" / "version-hint.text").read_text() == "2"


def test_a_table_that_no_held_key_signed_is_not_gone_on_from(archive: Path) -> None:
    with pytest.raises(UnknownKeyError, match="version 2 of the table"):
        TableWriter(ArchiveStore(str(archive)), LOG_ORIGIN).extend(
            newest_of(archive, "acme"), SIGNER, Keyring([STRANGER.public_key])
        )


def test_a_metadata_file_that_no_statement_signs_is_not_gone_on_from(archive: Path) -> None:
    shutil.copy(archive / metadata_name(1), archive / metadata_name(3))

    with pytest.raises(ArchiveInvalidError, match=r"no statement signs metadata/v3\.metadata\.json"):
        extend(archive, ["acme"])


# --- verifying ----------------------------------------------------------------------------------------


def test_a_whole_table_holds(archive: Path) -> None:
    assert verified(archive) == {
        "verdict": "ok",
        "version": 2,
        "metadata": f"{archive}/metadata/v2.metadata.json",
        "files": 4,
        "detail": None,
    }


def test_without_keys_or_with_others_a_table_is_not_said_to_hold(archive: Path) -> None:
    assert verified(archive, None)["verdict"] == "not_checked"
    strangers = verify_table(ArchiveStore(str(archive)), {}, Keyring([STRANGER.public_key]))
    assert strangers["verdict"] == "broken"  # it names files, and no manifest is given
    place = ArchiveStore(str(archive))
    archives = {each: TenantArchive.read(place, each, None).sealed for each in tenants_of(place)}
    assert verify_table(place, archives, Keyring([STRANGER.public_key]))["verdict"] == "unknown_key"


def test_an_archive_without_a_table_says_so(archive: Path) -> None:
    no_table(archive)

    assert verified(archive)["verdict"] == "absent"


def lists(folder: Path) -> list[Path]:
    return sorted((folder / "metadata").glob("*-m0.avro"), key=lambda file: file.stat().st_mtime_ns)


def forged_version(folder: Path, edit: Callable[[str], str]) -> None:
    """A third version, made of the second, which nobody signed."""
    (folder / metadata_name(3)).write_text(edit((folder / metadata_name(2)).read_text()))


TABLE_BREAKS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a metadata file with one byte more": (
        lambda folder: (folder / metadata_name(2)).write_text((folder / metadata_name(2)).read_text() + " "),
        r"no statement signs metadata/v2",
    ),
    "an older metadata file that was edited": (
        lambda folder: (folder / metadata_name(1)).write_text("{}"),
        r"no statement signs metadata/v1",
    ),
    "a metadata file that is gone": (
        lambda folder: (folder / metadata_name(1)).unlink(),
        r"v1\.metadata\.json is missing",
    ),
    "the newest metadata file gone": (
        lambda folder: (folder / metadata_name(2)).unlink(),
        r"version-hint\.text names version b'2'",
    ),
    "a version that nobody signed": (lambda folder: forged_version(folder, str), r"no statement signs metadata/v3"),
    "a list that was edited": (
        lambda folder: lists(folder)[0].write_bytes(b"Obj"),
        "is not the object that its statement",
    ),
    "a list that is gone": (lambda folder: lists(folder)[1].unlink(), r"\.avro is missing"),
    "a statement that is gone": (
        lambda folder: next((folder / "table").glob("*1-*")).unlink(),
        r"no statement signs metadata/v1",
    ),
    "files that no manifest signed": (
        lambda folder: shutil.rmtree(folder / "manifests" / "beta"),
        "and no manifest signed such a file",
    ),
    "a hint of no version": (
        lambda folder: (folder / "metadata" / "version-hint.text").write_text("9"),
        "names version b'9'",
    ),
}


@pytest.mark.parametrize("name", TABLE_BREAKS)
def test_a_changed_table_is_found(archive: Path, name: str) -> None:
    damage, detail = TABLE_BREAKS[name]
    damage(archive)

    found = verified(archive)

    assert found["verdict"] == "broken"
    assert re.search(detail, found["detail"]), found["detail"]


def test_a_table_signed_by_the_ledgers_own_key_that_leaves_a_file_out_is_found(archive: Path) -> None:
    no_table(archive)
    writer = TableWriter(ArchiveStore(str(archive)), LOG_ORIGIN)
    writer._newest = TableVersion(0, None, new_table(str(archive)), {"acme": 30})
    writer.extend(newest_of(archive, "acme", "beta"), SIGNER, RING)

    assert "the table does not name entries/tenant_id=acme" in verified(archive)["detail"]


def test_a_statement_is_of_one_metadata_file(archive: Path) -> None:
    data = (archive / metadata_name(1)).read_bytes()
    name = archive / statement_name(1, sha256(data).hexdigest())
    other = archive / statement_name(2, sha256((archive / metadata_name(2)).read_bytes()).hexdigest())
    other.write_bytes(name.read_bytes())

    assert "is the statement of another version" in verified(archive)["detail"]
    assert open_statement(name.read_bytes(), RING).statement.version == 1


def test_a_file_is_described_by_the_footer_that_its_writer_holds_as_by_the_file(archive: Path) -> None:
    place = ArchiveStore(str(archive))
    (*_, file), table = newest_of(archive, "acme")["acme"].manifest.entry_files, new_table(str(archive))
    with opened(place, file, ENTRY_FILE_SCHEMA) as found:
        writer = FileWriter(io.BytesIO(), ENTRY_FILE_SCHEMA)
        for batch in batches(found, file):
            writer.add(batch)
    assert writer.finish(file.name) == file

    by_footer = describing(ArchiveStore(str(archive / "gone")), table, {file.name: writer.footer})(file)

    by_file = describing(place, table, {})(file)
    assert by_footer == by_file
    assert by_file.lower_bounds


def test_a_file_that_the_table_has_with_other_rows_than_its_manifest_is_found(archive: Path) -> None:
    place = ArchiveStore(str(archive))
    acme, beta = (TenantArchive.read(place, each, RING).sealed for each in ("acme", "beta"))
    manifest, envelope, _ = beta[0]
    file, snapshots = manifest.files
    other = msgspec.structs.replace(manifest, files=(msgspec.structs.replace(file, rows=9), snapshots))

    found = verify_table(place, {"acme": acme, "beta": [SealedManifest(other, envelope)]}, RING)

    assert found["verdict"] == "broken"
    assert "as ('beta', '2024-01', 10, " in found["detail"]


# --- commands -----------------------------------------------------------------------------------------


def exit_code(archive: Path, keys: Keyring | None = RING, tenant: str | None = None) -> ExitCode:
    """The exit code of ``tally verify --archive``, in this process."""
    with pytest.raises(CommandExit) as ended:
        verify_archive(str(archive), tenant, keys, kept=None, memory=None, as_json=False)
    return ExitCode(int(str(ended.value.code)))


def test_the_command_verifies_all_tenants_and_the_table(archive: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(archive) == ExitCode.FINE
    said = " ".join(capsys.readouterr().out.split())
    assert "tenant acme: valid, 50 entries" in said
    assert "tenant beta: valid, 10 entries" in said
    assert "ok, version 2, 4 files" in said


def test_the_command_says_in_its_exit_code_what_does_not_hold(
    archive: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(archive, None) == ExitCode.INCOMPLETE
    assert exit_code(archive, Keyring([STRANGER.public_key])) == ExitCode.UNKNOWN_KEY
    assert exit_code(archive, tenant="acme") == ExitCode.FINE
    with pytest.raises(TenantNotFoundError, match="no tenant 'gone'"):
        exit_code(archive, tenant="gone")
    (tmp_path / "empty").mkdir()
    with pytest.raises(TenantNotFoundError, match="nothing to verify"):
        exit_code(tmp_path / "empty")
    table_anew(archive, ["acme"])
    assert exit_code(archive) == ExitCode.INCOMPLETE
    assert "the table does not have 1 newer files yet" in capsys.readouterr().err
    lists(archive)[0].write_bytes(b"Obj")
    assert exit_code(archive) == ExitCode.TAMPERED
    assert "is not the object that its statement names" in " ".join(capsys.readouterr().out.split())


def test_a_table_whose_file_was_changed_is_not_ok(archive: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed = sorted((archive / "entries" / "tenant_id=acme").rglob("*.parquet"))[0]
    changed.write_bytes(changed.read_bytes().replace(b"PAR1", b"PAR2"))
    assert exit_code(archive, tenant="beta") == ExitCode.FINE
    capsys.readouterr()
    assert exit_code(archive) == ExitCode.TAMPERED
    said = " ".join(capsys.readouterr().out.split())
    assert "broken, version 2, 4 files: what it names does not hold, as the verdicts say, of acme" in said


def test_a_checkpoint_kept_elsewhere_shows_that_an_archive_was_cut_off(
    archive: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = checkpoint_of(ledger_of("acme", days(60)))
    with pytest.raises(CommandExit) as ended:
        verify_archive(str(archive), "acme", RING, kept=kept, memory=None, as_json=False)

    assert ended.value.code == ExitCode.TAMPERED
    assert "rollback" in capsys.readouterr().out


def test_spark_verifies_the_table_too(
    archive: Path, tmp_path: Path, spark: SparkSession, run_command: RunCommand
) -> None:
    (tmp_path / "keys.pem").write_text(SIGNER.public_key_pem)
    command = ["verify", "--archive", str(archive), "--keys", str(tmp_path / "keys.pem"), "--no-state", "--json"]

    whole = run_command(*command)
    lists(archive)[0].write_bytes(b"Obj")
    changed = run_command(*command)

    assert (whole.returncode, changed.returncode) == (0, 2)
    assert [json.loads(each.stdout)["tables"][0]["verdict"] for each in (whole, changed)] == ["ok", "broken"]
