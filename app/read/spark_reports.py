"""Reports that Spark makes beside a node: ``python -m pipeline report``, whose page the node takes.

    processes <= 1, each for ``MAKING_S`` at most        cores <= 2        Java's heap <= 1 GiB

The process is the first of a session and works in a folder of the node. When its report is made or fails, or the node
stops, the session is killed and the folder removed. A process whose node was killed ends by itself within seconds, as
nobody reads its progress; the next start removes the folder.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import structlog

from ledger.errors import LedgerError
from pipeline import PROGRESS, PROGRESS_VARIABLE

COMMAND: Final = (sys.executable, "-m", "pipeline", "report", "--dest", "report", "--master", "local[2]")
HEAP: Final = "1g"
"""Java's heap. Two workers and the driver, in Python, take some 250 MiB each beside it."""
NICENESS: Final = 10
"""The processes that serve requests have priority."""
MAKING_S: Final = 3600.0
"""Longest that a report may take."""
PAGE_BYTES_MAX: Final = 4 << 20

log = structlog.get_logger()


class ReportPage(NamedTuple):
    """A report as one HTML file, on so many jobs."""

    html: str
    jobs: int


class SparkFailedError(LedgerError):
    """Spark made no report; the text says why."""


@dataclass(kw_only=True, eq=False)
class SparkReports:
    """Makes one report at a time. Belongs to one event loop."""

    folder: Path
    """Nobody else writes to it."""
    logs: Path
    database_url: str
    command: Sequence[str] = COMMAND
    _one: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def make(self, options: Sequence[str], advance: Callable[[str], object]) -> ReportPage:
        """The page on what ``options`` of the command ask for. ``advance`` is called with words on the progress.

        Raises:
            SparkFailedError: there is no page.
        """
        if self._one.locked():
            raise SparkFailedError("Spark makes another report on this node, and is done in minutes")
        async with self._one:
            try:
                await asyncio.to_thread(self._new_folder)
                async with asyncio.timeout(MAKING_S):
                    await self._run(options, advance)
                return await asyncio.to_thread(self._page)
            except TimeoutError:
                raise SparkFailedError(f"Spark did not make the report within {MAKING_S / 60:.0f} minutes") from None
            except OSError as error:
                raise SparkFailedError(f"Spark did not make the report: {error}") from error
            except (LookupError, TypeError, ValueError) as error:
                raise SparkFailedError(f"what Spark made is no report: {error!r}") from error
            finally:
                await asyncio.to_thread(self._remove_folder)

    async def clear(self) -> None:
        """Remove what a node that was killed left."""
        async with self._one:
            await asyncio.to_thread(self._remove_folder)

    async def _run(self, options: Sequence[str], advance: Callable[[str], object]) -> None:
        # Arguments are there for everybody on the machine to read, the environment is not.
        environment = {
            **os.environ,
            "TALLY_PIPELINE_DSN": self.database_url,
            "TALLY_PIPELINE_LOGS": str(self.logs.absolute()),
            "TMPDIR": str(self.folder.absolute()),
            "SPARK_DRIVER_MEMORY": HEAP,
            PROGRESS_VARIABLE: "1",
        }
        process = await asyncio.create_subprocess_exec(
            *(*self.command, *options),
            cwd=self.folder,
            env=environment,
            stdin=DEVNULL,
            stdout=DEVNULL,
            stderr=PIPE,
            start_new_session=True,
        )
        said = ""
        try:
            with suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
            assert process.stderr is not None
            while line := await _line(process.stderr):
                text = line.decode("utf-8", "replace").strip()
                if text.startswith(PROGRESS):
                    advance(text.removeprefix(PROGRESS))
                else:
                    said = text or said
            code = await process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if code:
            reason = said.removeprefix("error: ") if code > 0 else f"signal {-code} ended it"
            log.warning("report_by_spark_failed", exit_code=code, error=reason)
            raise SparkFailedError(f"Spark did not make the report: {reason}")

    def _new_folder(self) -> None:
        self._remove_folder()
        self.folder.mkdir(mode=0o700, parents=True)

    def _remove_folder(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _page(self) -> ReportPage:
        made = self.folder / "report"
        if (made / "report.html").stat().st_size > PAGE_BYTES_MAX:
            raise SparkFailedError(f"the page of Spark is longer than {PAGE_BYTES_MAX >> 20} MiB")
        numbers = json.loads((made / "report.json").read_text())
        return ReportPage((made / "report.html").read_text(), numbers["at_end"]["jobs"])


async def _line(stream: asyncio.StreamReader) -> bytes:
    """The next line that is no longer than the stream holds; empty at the end."""
    while True:
        with suppress(ValueError):  # The longer one was taken off the stream.
            return await stream.readline()
