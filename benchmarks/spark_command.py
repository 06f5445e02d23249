"""``tally pipeline verify`` as users start it: how long it took, and the most memory that each kind of process held."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import orjson
import psutil

from benchmarks.row import expect

TIMEOUT_S: Final = 1800
SAMPLE_S: Final = 0.25
_MIB: Final = 1 << 20


class SparkRun(NamedTuple):
    """One run of the command."""

    took_s: float
    """From the start of Python and Java to the exit."""
    at_work_s: float
    """Of it, the work itself."""
    peaks_mib: dict[str, int]
    """Most resident memory of one process, by kind: driver, java, worker."""


def verify_on_spark(*arguments: str | Path, cores: int, entries: int, folder: Path) -> SparkRun:
    """Verify a place that holds so many entries, all of them sound.

    Raises:
        BenchmarkError: the command failed, or did not check all of them.
    """
    command = [
        sys.executable,
        "-m",
        "pipeline",
        "verify",
        *map(str, arguments),
        "--master",
        f"local[{cores}]",
        "--json",
    ]
    kept = {name: value for name, value in os.environ.items() if not name.upper().startswith("TALLY_")}
    environment = {**kept, "TALLY_PIPELINE_LOGS": str(folder / "logs")}
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as errors:
        began_s = time.perf_counter()
        process = subprocess.Popen(command, env=environment, stdout=said, stderr=errors)
        peaks = _peaks_until_it_ends(process)
        took_s = time.perf_counter() - began_s
        said.seek(0)
        errors.seek(0)
        expect(process.returncode == 0, f"the command ended with {process.returncode}: {errors.read()[-500:].decode()}")
        told = orjson.loads(said.read())
    expect_whole(told["tenants"], entries)
    return SparkRun(took_s, told["seconds"], peaks)


def expect_whole(verdicts: list[dict[str, Any]], entries: int) -> None:
    """Fail the row unless all of ``entries`` were checked and hold."""
    invalid = [each["tenant_id"] for each in verdicts if not each["valid"]]
    expect(not invalid, f"these do not hold: {invalid}")
    checked = sum(each["entries_checked"] for each in verdicts)
    expect(checked == entries, f"{checked} entries were checked, not {entries}")


def _peaks_until_it_ends(process: subprocess.Popen[bytes]) -> dict[str, int]:
    driver = psutil.Process(process.pid)
    peaks = dict.fromkeys(("driver", "java", "worker"), 0)
    deadline_s = time.monotonic() + TIMEOUT_S
    while process.poll() is None:
        expect(time.monotonic() < deadline_s, f"the command did not end within {TIMEOUT_S} s")
        with suppress(psutil.Error):
            for each in (driver, *driver.children(recursive=True)):
                with suppress(psutil.Error):
                    kind = _kind(each, driver)
                    peaks[kind] = max(peaks[kind], each.memory_info().rss // _MIB)
        with suppress(subprocess.TimeoutExpired):
            process.wait(SAMPLE_S)
    return peaks


def _kind(process: psutil.Process, driver: psutil.Process) -> str:
    if process == driver:
        return "driver"
    return "java" if process.name() == "java" else "worker"
