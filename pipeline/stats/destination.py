"""Where the stream writes, and what it says there of itself, so that nobody goes on with something else.

``DEST/_checkpoint/stream.json`` holds the source and the length of a window: Spark knows a file that it has read by its
path, and an open window by its length, so with others all would be read again, or be put together wrongly.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from py4j.protocol import Py4JJavaError

from ledger.errors import ConfigurationError
from pipeline.stats.output import CHECKPOINT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_DESCRIPTION: Final = "stream.json"


class Destination:
    """A folder, or a URL that Spark can write to."""

    def __init__(self, spark: SparkSession, url: str) -> None:
        """``url`` is a path, or a URL whose scheme Spark knows.

        Raises:
            ConfigurationError: it does not.
        """
        parts = urlsplit(url)
        self.is_local = parts.scheme in ("", "file")
        self.url = str(Path(parts.path if parts.scheme else url).absolute()) if self.is_local else url
        if parts.scheme == "s3":
            self.url = "s3a" + url.removeprefix("s3")
        self.checkpoint = f"{self.url}/{CHECKPOINT}"
        jvm: Any = spark._jvm
        self._jvm = jvm
        path = self._jvm.org.apache.hadoop.fs.Path(self.checkpoint)
        try:
            self._files = path.getFileSystem(spark._jsc.hadoopConfiguration())
        except Py4JJavaError:
            version = jvm.org.apache.hadoop.util.VersionInfo.getVersion()
            raise ConfigurationError(
                f"this Spark cannot write to {parts.scheme}: write to a folder and copy its committed files, "
                "or run under a spark-submit whose --packages bring that file system (for s3: "
                f"org.apache.hadoop:hadoop-aws:{version})"
            ) from None

    @contextmanager
    def held(self) -> Iterator[None]:
        """No other run on this machine writes here meanwhile; Spark itself notices those on others.

        Raises:
            ConfigurationError: one does.
        """
        if not self.is_local:
            yield
            return
        Path(self.checkpoint).mkdir(parents=True, exist_ok=True)
        lock = os.open(Path(self.checkpoint) / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigurationError(f"another run writes to {self.url}; let it end first") from None
            yield
        finally:
            os.close(lock)

    def describe(self, wanted: dict[str, Any]) -> None:
        """Say what is written here, or see that it is what was said before.

        Raises:
            ConfigurationError: it is something else.
        """
        path = self._jvm.org.apache.hadoop.fs.Path(f"{self.checkpoint}/{_DESCRIPTION}")
        if not self._files.exists(path):
            self._write(path, json.dumps(wanted).encode())
            return
        stream = self._files.open(path)
        try:
            said = json.loads(self._jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
        finally:
            stream.close()
        for name, value in wanted.items():
            if said.get(name) != value:
                raise ConfigurationError(
                    f"{self.url} was begun with {name} {said.get(name)}, not {value}: say that, or write elsewhere"
                )

    def _write(self, path: Any, content: bytes) -> None:
        """Whole or not at all."""
        beside = self._jvm.org.apache.hadoop.fs.Path(f"{path}.tmp")
        stream = self._files.create(beside, True)
        stream.write(bytearray(content))
        stream.close()
        self._files.rename(beside, path)
