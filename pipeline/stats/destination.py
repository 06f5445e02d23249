"""Where the stream writes, and what it says there of itself, so that nobody goes on with something else.

``DEST/_checkpoint/stream.json`` holds the source and the length of a window: Spark knows a file that it has read by its
path, and an open window by its length, so with others all would be read again, or be put together wrongly.
``DEST/_checkpoint/clock`` holds the ticks (``pipeline.stats.clock``), each in the name of a file.

Spark numbers its batches, and notes a batch in three logs one after the other, so of a place that is whole::

    newest in _checkpoint/commits <= newest in _spark_metadata <= newest in _checkpoint/offsets; stream.json before all

Spark passes over a batch whose number ``_spark_metadata`` has already. So where the checkpoint is gone or older than
what was written, the next files would be noted as taken, and what they hold be written nowhere.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from py4j.protocol import Py4JJavaError

from ledger.errors import ConfigurationError
from pipeline.stats.clock import Tick
from pipeline.stats.output import CHECKPOINT, COMMIT_LOG

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_DESCRIPTION: Final = "stream.json"
_TICKS: Final = "clock"


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
        self.ticks = f"{self.checkpoint}/{_TICKS}"
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

    def check_whole(self) -> None:
        """See that what is here fits together.

        Raises:
            ConfigurationError: it does not.
        """
        check_logs(
            self.url,
            is_described=bool(self._files.exists(self._path(_DESCRIPTION))),
            commits=self._names(f"{self.checkpoint}/commits"),
            written=self._names(f"{self.url}/{COMMIT_LOG}"),
            offsets=self._names(f"{self.checkpoint}/offsets"),
        )

    def describe(self, wanted: dict[str, Any]) -> None:
        """Say what is written here, or see that it is what was said before.

        Raises:
            ConfigurationError: it is something else.
        """
        path = self._path(_DESCRIPTION)
        self._files.mkdirs(self._path(_TICKS))
        if not self._files.exists(path):
            self._write(path, json.dumps(wanted).encode())
            return
        try:
            said = json.loads(self._text(path))
        except (ValueError, RecursionError):
            said = None
        if not isinstance(said, dict):
            raise ConfigurationError(f"{_DESCRIPTION} of {self.url} is damaged: bring it back, or write elsewhere")
        for name, value in wanted.items():
            if said.get(name) != value:
                raise ConfigurationError(
                    f"{self.url} was begun with {name} {said.get(name)}, not {value}: say that, or write elsewhere"
                )

    def last_tick(self) -> Tick:
        """The newest tick that was noted here."""
        names = (name.lstrip("_").partition("-") for name in self._names(self.ticks))
        return max((Tick(int(newest), int(time)) for newest, _, time in names), default=Tick(0, 0))

    def note_tick(self, tick: Tick, *, is_later: bool) -> None:
        """Note ``tick``, for the stream to read where it ``is_later`` than the last one, in whose place it stands."""
        earlier = self._names(self.ticks)
        # Spark passes over names that begin with a line.
        name = f"{'' if is_later else '_'}{tick.newest_ms}-{tick.time_ms}"
        self._write(self._path(f"{_TICKS}/{name}"), f"{tick.time_ms}\n".encode())
        for each in earlier:
            self._files.delete(self._path(f"{_TICKS}/{each}"), False)

    def _path(self, name: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(f"{self.checkpoint}/{name}")

    def _names(self, folder: str) -> list[str]:
        path = self._jvm.org.apache.hadoop.fs.Path(folder)
        return [each.getPath().getName() for each in self._files.listStatus(path)] if self._files.exists(path) else []

    def _text(self, path: Any) -> str:
        try:
            stream = self._files.open(path)
            try:
                return str(self._jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
            finally:
                stream.close()
        except Py4JJavaError as error:
            reason = str(error.java_exception).splitlines()[0]
            raise ConfigurationError(f"{path} cannot be read ({reason}): write elsewhere") from None

    def _write(self, path: Any, content: bytes) -> None:
        """Whole or not at all."""
        beside = self._path("unfinished.tmp")
        stream = self._files.create(beside, True)
        stream.write(bytearray(content))
        stream.close()
        self._files.rename(beside, path)


def check_logs(
    url: str, *, is_described: bool, commits: Iterable[str], written: Iterable[str], offsets: Iterable[str]
) -> None:
    """See that the names in the three logs are those of one place, the inequality above.

    Raises:
        ConfigurationError: part of it is gone, or older than the rest.
    """
    committed, in_sink, begun = (_newest(names) for names in (commits, written, offsets))
    if not is_described and max(committed, in_sink, begun) >= 0:
        raise ConfigurationError(
            f"{url} was written to before, and {CHECKPOINT}/{_DESCRIPTION} is not there any more: what was read is not "
            "known. Bring it back, or write elsewhere; what stands there can still be read"
        )
    if in_sink > begun:
        raise ConfigurationError(
            f"{url} holds batch {in_sink}, and its {CHECKPOINT} knows of none after {begun}: it is gone or older than "
            "what was written. Bring it back, or write elsewhere; what stands there can still be read"
        )
    if committed > in_sink:
        raise ConfigurationError(
            f"the {CHECKPOINT} of {url} has come to batch {committed}, and {COMMIT_LOG} to {in_sink}: that is gone or "
            "older. Bring it back, or write elsewhere"
        )


def _newest(names: Iterable[str]) -> int:
    """The number of the newest batch, of files as Spark names them; -1 for none."""
    numbers = (name.removesuffix(".compact") for name in names)
    return max((int(number) for number in numbers if number.isascii() and number.isdecimal()), default=-1)
