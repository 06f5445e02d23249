"""The archive of classes that Java starts from."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from pipeline import java


def test_spark_starts_from_the_archive(spark: SparkSession) -> None:
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    assert str(java.CLASS_ARCHIVE) in Path(f"/proc/{gateway.proc.pid}/maps").read_text()


@pytest.mark.parametrize("content", [b"", b"no archive"])
def test_java_passes_over_an_archive_that_is_none_without_a_word(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "with space" / "spark.jsa"
    path.parent.mkdir()
    path.write_bytes(content)
    monkeypatch.setattr(java, "CLASS_ARCHIVE", path)
    program = java.find_java_home(tmp_path) / "bin" / "java"
    command = [program, *shlex.split(java.class_archive_options()), "--version"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    plain = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    assert ran.stdout == plain.replace(", sharing", "")


def test_without_an_archive_java_is_told_of_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(java, "CLASS_ARCHIVE", tmp_path / "spark.jsa")
    assert java.class_archive_options() == ""
