"""A Spark cluster of this machine: a standalone master and workers on loopback, on ports that are free."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyspark

from pipeline.java import class_archive_options, find_java_home

SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Of the Javas that work out how to launch another."""
JAVA_OPTIONS = f"{SHORT_LIVED} {class_archive_options()}"
"""Of master, workers, executors and drivers."""
DAEMON_MEMORY = "-Xmx256m"
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0
SPARK_HOME = Path(pyspark.__file__).parent
SCALA = "2.13"
CLASSES = (SPARK_HOME / "conf", next(SPARK_HOME.glob("jars/slf4j-api-*.jar")), SPARK_HOME / "jars" / "*")
"""The class path that Spark gives to all of its Javas, in its order: for another they pass the archive over."""
LOOK_INTERVAL_S = 0.1
_LOOK_AGAIN = threading.Event()
_MASTER = re.compile(r"Starting Spark master at (spark://\S+)")
_REGISTERED = re.compile(r"Successfully registered with master")


@contextmanager
def cluster(folder: Path, workers: int) -> Iterator[str]:
    """The URL of a master that has so many workers with one core each; all are gone afterwards."""
    environment = {
        "JAVA_HOME": str(find_java_home(folder)),
        "PATH": os.environ["PATH"],
        "SPARK_HOME": str(SPARK_HOME),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_SCALA_VERSION": SCALA,
    }
    here = ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
    with ExitStack() as stack:
        log = stack.enter_context(_daemon("master.Master", here, folder / "master", environment))
        url = said(log, _MASTER)[1]
        logs = []
        for number in range(workers):
            name = folder / f"worker-{number}"
            options = [*here, "--cores", "1", "--memory", "1200m", "--work-dir", str(name / "work"), url]
            logs.append(stack.enter_context(_daemon("worker.Worker", options, name, environment)))
        for log in logs:
            said(log, _REGISTERED)
        yield url


@contextmanager
def _daemon(name: str, options: list[str], folder: Path, environment: dict[str, str]) -> Iterator[Path]:
    """A daemon of Spark, in ``folder``; the file it writes its log to.

    It is what Spark's scripts start, without the Java that works out how.
    """
    folder.mkdir()
    log = folder / "log"
    java = Path(environment["JAVA_HOME"]) / "bin" / "java"
    classes = ":".join(map(str, CLASSES))
    command = [java, "-cp", classes, DAEMON_MEMORY, *shlex.split(JAVA_OPTIONS), f"org.apache.spark.deploy.{name}"]
    command += options
    with log.open("wb") as file:
        daemon = subprocess.Popen(command, cwd=folder, env=environment, stdout=file, stderr=file)
    try:
        yield log
    finally:
        daemon.terminate()
        try:
            daemon.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()


def said(log: Path, what: re.Pattern[str]) -> re.Match[str]:
    """Where ``log`` says ``what``, once it does."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while (found := what.search(log.read_text())) is None:
        assert time.monotonic() < deadline_s, f"no {what.pattern!r} in:\n{log.read_text()}"
        _LOOK_AGAIN.wait(LOOK_INTERVAL_S)
    return found
