"""A Spark cluster of this machine: a standalone master, and workers that come to it, in the Java of a session."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyspark
from pyspark import SparkConf
from pyspark.sql import SparkSession

from pipeline.java import class_archive_options

SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Of the Java that works out how to launch another."""
JAVA_OPTIONS = f"{SHORT_LIVED} {class_archive_options()}"
"""Of executors and drivers."""
TIMEOUT_S = 300.0
SPARK_HOME = Path(pyspark.__file__).parent
LOOK_INTERVAL_S = 0.1
_LOOK_AGAIN = threading.Event()
_LOOPBACK = "127.0.0.1"
_WORKER_MIB = 1200


class Cluster:
    """A master without workers at first, on ports that are free."""

    def __init__(self, spark: SparkSession) -> None:
        context = spark.sparkContext
        gateway, jvm = context._gateway, context._jvm
        assert gateway is not None
        assert jvm is not None
        self._java: Any = jvm
        # Settings of the session are not for those who work for others.
        self._settings = SparkConf(loadDefaults=False, _jvm=jvm)._jconf
        self._none = getattr(getattr(jvm, "scala.None$"), "MODULE$")
        started = jvm.org.apache.spark.deploy.master.Master.startRpcEnvAndEndpoint(_LOOPBACK, 0, 0, self._settings)
        self._there: list[Any] = [started._1()]
        address = self._there[0].address()
        self.url = f"spark://{address.host()}:{address.port()}"
        self._masters = gateway.new_array(jvm.java.lang.String, 1)
        self._masters[0] = self.url

    def add_worker(self, folder: Path) -> None:
        """A worker of one core, whose executors each work in a folder of their own below ``folder``."""
        worker = self._java.org.apache.spark.deploy.worker.Worker
        of_it = (_LOOPBACK, 0, 0, 1, _WORKER_MIB, self._masters, str(folder))
        number = self._java.scala.Option.apply(len(self._there))
        self._there.append(worker.startRpcEnvAndEndpoint(*of_it, number, self._settings, self._none))

    def stop(self) -> None:
        """End the workers, with their executors, and then the master."""
        for each in reversed(self._there):
            each.shutdown()
            each.awaitTermination()


@contextmanager
def cluster(spark: SparkSession) -> Iterator[Cluster]:
    """A cluster in the Java of ``spark``, which goes on when the cluster is gone."""
    begun = Cluster(spark)
    try:
        yield begun
    finally:
        begun.stop()


def said(log: Path, what: re.Pattern[str]) -> re.Match[str]:
    """Where ``log`` says ``what``, once it does."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while (found := what.search(log.read_text())) is None:
        assert time.monotonic() < deadline_s, f"no {what.pattern!r} in:\n{log.read_text()}"
        _LOOK_AGAIN.wait(LOOK_INTERVAL_S)
    return found
