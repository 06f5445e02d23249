"""The archive of classes that Java starts from."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from pipeline import java


def test_spark_starts_from_the_archive(spark: SparkSession) -> None:
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    assert str(java.CLASS_ARCHIVE) in Path(f"/proc/{gateway.proc.pid}/maps").read_text()


BEGINNING = 1 << 20


def beginning_of_the_archive() -> bytes:
    with java.CLASS_ARCHIVE.open("rb") as archive:
        return archive.read(BEGINNING)


@pytest.mark.parametrize(
    ("content", "whole"),
    [(lambda: b"", 0), (lambda: b"no archive", len(b"no archive")), (beginning_of_the_archive, BEGINNING + 1)],
    ids=["empty", "none", "cut short"],
)
def test_java_passes_over_an_archive_that_is_none_without_a_word(
    content: Callable[[], bytes], whole: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / 'with space, " and \\' / "spark.jsa"
    path.parent.mkdir()
    path.write_bytes(content())
    java.size_file(path).write_text(str(whole))
    monkeypatch.setattr(java, "CLASS_ARCHIVE", path)
    program = java.find_java_home(tmp_path) / "bin" / "java"
    command = [program, *shlex.split(java.class_archive_options()), "--version"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (ran.returncode, ran.stderr) == (0, "")
    plain = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    assert ran.stdout.replace(", sharing", "") == plain.replace(", sharing", "")
    assert list(tmp_path.iterdir()) == [path.parent]


def test_without_a_whole_archive_java_is_told_of_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / "spark.jsa"
    monkeypatch.setattr(java, "CLASS_ARCHIVE", archive)
    assert java.class_archive_options() == ""
    archive.write_bytes(b"12345")
    assert java.class_archive_options() == "", "nothing says how long it is to be"
    for said, is_taken in (("6", False), ("", False), ("5", True)):
        java.size_file(archive).write_text(said)
        assert (str(archive) in java.class_archive_options()) is is_taken
