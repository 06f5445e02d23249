"""Spark's verdict on archives and bundles is that of verifying them in one process, whatever was done to them."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from ledger.errors import InvalidInputError, SignatureError
from objects.store import ArchiveStore
from pipeline.archive.parquet import ENTRY_FILE_SCHEMA
from pipeline.archive.reader import verify_tenant
from pipeline.places import parse_place
from pipeline.places.archive import ArchivePlace
from pipeline.verify import Verified, verify, verify_bundles
from signing.judging import verify_file
from signing.keys import Keyring
from tests.conftest import Database
from tests.ledger.ledger_in_memory import STRANGER
from tests.pipeline.archived_ledgers import RING, archive_here, days, ledger_of, store
from tests.pipeline.sites import drawn_sites
from tests.pipeline.test_archive_reading import ARCHIVE_BREAKS, ROW_BREAKS, rewrite


def plain(verdict: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in verdict.items() if name not in ("duration_ms", "file")}


def listed(verified: Verified) -> dict[tuple[str | None, str], int]:
    return Counter((row.tenant_id, row.kind) for row in verified.breaks().collect())


async def test_an_archive_gets_the_verdict_of_one_process_and_every_break_is_listed(
    spark: SparkSession, database: Database, tmp_path: Path
) -> None:
    sound, ledger = tmp_path / "sound", ledger_of("acme", days(35))
    await store(database, ledger)
    archive_here(database, sound)
    ledger_of("acme", days(20, 35), start=ledger)
    await store(database, ledger, ledger_of("other", days(12)))
    archive_here(database, sound)
    cases: dict[str, Any] = {"sound": lambda folder: None}
    cases |= {name: ARCHIVE_BREAKS[name][0] for name in ("a file cut by a byte", "a manifest by another key")}
    for name in ("a payload", "a seq"):
        number, change, *_ = ROW_BREAKS[name]
        cases[name] = lambda folder, number=number, change=change: rewrite(
            folder, number, lambda rows: rows[3].update(change), ENTRY_FILE_SCHEMA
        )
    for name, damage in cases.items():
        folder = tmp_path / name.replace(" ", "-")
        if folder != sound:
            shutil.copytree(sound, folder)
            # Damage is done to the one tenant that is named; the other goes on being sound.
            others = [path for path in folder.rglob("tenant_id=other") if "entries" in path.parts]
            for path in others:
                path.rename(tmp_path / "aside")
            damage(folder)
            for path in others:
                (tmp_path / "aside").rename(path)
        for ring in (RING, Keyring([STRANGER.public_key])) if name == "sound" else (RING,):
            with ArchivePlace(str(folder)).open() as place:
                verified = verify(spark, place, keyring=ring)
                expected = [await verify_tenant(ArchiveStore(str(folder)), each, ring) for each in ("acme", "other")]
                assert [*map(plain, verified.objects)] == [*map(plain, expected)], name
                counts = {
                    (each["tenant_id"], kind): count for each in expected for kind, count in each["breaks"].items()
                }
                told = listed(verified)
                assert {key: told[key] for key in counts} == counts, name
                verified.close()


def test_bundles_get_the_verdict_of_one_process_each(spark: SparkSession, tmp_path: Path) -> None:
    files = drawn_sites(tmp_path, 5, conflicts=False)[:3]
    torn, strange = tmp_path / "torn.tar", tmp_path / "strange.tar"
    torn.write_bytes(files[0].read_bytes()[:-700])
    strange.write_bytes(b"entries/000001.ndjson.gz")
    files += [torn, strange]
    for ring in (RING, None):
        verified = verify_bundles(spark, files, keyring=ring)
        expected = [asyncio.run(verify_file(file, ring)).to_json() for file in files]
        assert [*map(plain, verified.objects)] == [*map(plain, expected)]
        assert [each["file"] for each in verified.objects] == [str(file) for file in files]
        assert [each["verdicts"]["bundle"] for each in verified.objects[3:]] == ["broken", "broken"]
        assert listed(verified) == {(None, "bundle"): 2}
        assert verified.breaks().rdd.getNumPartitions() <= spark.sparkContext.defaultParallelism
        verified.close()


def test_a_bundle_is_verified_as_a_file_and_not_in_pieces(spark: SparkSession, tmp_path: Path) -> None:
    (file,) = drawn_sites(tmp_path, 5, conflicts=False)[:1]
    with parse_place(str(file)).open() as bundle, pytest.raises(InvalidInputError, match="verify_bundles for bundles"):
        verify(spark, bundle)


def test_a_file_that_cannot_be_read_stands_among_the_verdicts(spark: SparkSession, tmp_path: Path) -> None:
    files = drawn_sites(tmp_path, 5, conflicts=False)[:1]
    picture = tmp_path / "picture.png"
    picture.write_bytes(b"\x89PNG")
    verified = verify_bundles(spark, [tmp_path / "gone.tar", tmp_path, picture, *files], keyring=RING)
    gone, folder, no_bundle, whole = verified.objects
    assert (no_bundle["error"], no_bundle["exit_code"]) == ("it is no bundle; it looks like a picture", 1)
    assert (gone["error"], folder["error"]) == ("No such file or directory", "it is not a regular file, but a folder")
    assert (gone["exit_code"], gone["verdicts"], "error" in whole) == (1, {}, False)
    assert [row.entries_checked > 0 for row in verified.verdicts().collect()] == [False, False, False, True]
    assert verified.breaks().count() == 0
    verified.close()


def test_a_checkpoint_that_is_none_is_refused_before_any_bundle_is_read(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(SignatureError):
        verify_bundles(spark, [tmp_path / "none"], keyring=RING, kept="no note")
