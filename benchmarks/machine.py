"""The machine under the benchmarks: what it is, and that its disk is one."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.row import BenchmarkError, expect

IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
"""File systems on which an fsync costs nothing."""
FSYNC_PROBES = 300
PROBE_BYTES = 4096


class Mount(NamedTuple):
    """A mounted file system."""

    device: str
    folder: str
    type: str


def mount_of(path: Path) -> Mount:
    """The file system that holds ``path``, by the device number in ``/proc/self/mountinfo``."""
    status = path.stat()
    wanted = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    found = None
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, source = line.partition(" - ")
        _, _, device, _, folder, *_ = fields.split(" ")
        if device == wanted:
            kind, name, *_ = source.split(" ")
            found = Mount(name, folder, kind)
    if found is None:
        raise BenchmarkError(f"no mount of device {wanted}, which holds {path}, is listed")
    return found


def check_disk(*folders: Path) -> None:
    """All ``folders`` are on one file system, and that is not in memory.

    Raises:
        BenchmarkError: they are not; the text says what to do.
    """
    for folder in folders:
        mount = mount_of(folder)
        expect(
            mount.type not in IN_MEMORY,
            f"{folder} is on {mount.type}, in memory; name a folder on a disk in BENCH_DIR",
        )
    devices = {folder.stat().st_dev for folder in folders}
    expect(
        len(devices) == 1,
        f"{', '.join(map(str, folders))} are on different file systems; name a folder in BENCH_DIR that every "
        "account can enter, so that PostgreSQL can live beside the WAL",
    )


def fsync_p50_us(folder: Path) -> float:
    """Median of an fdatasync behind an append of 4 KiB, in microseconds."""
    path = folder / "fsync-probe"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    block = os.urandom(PROBE_BYTES)
    took: list[float] = []
    try:
        for _ in range(FSYNC_PROBES):
            os.write(descriptor, block)
            began_s = time.perf_counter()
            os.fdatasync(descriptor)
            took.append((time.perf_counter() - began_s) * 1e6)
    finally:
        os.close(descriptor)
        path.unlink()
    return round(statistics.median(took), 1)


def describe(folder: Path, postgres_version: str | None) -> dict[str, object]:
    """The machine, as the report names it."""
    mount = mount_of(folder)
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_bytes / (1 << 30), 1),
        "file_system": mount.type,
        "device": mount.device,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "postgresql": postgres_version,
        "load_before": round(os.getloadavg()[0], 2),
    }


def commit() -> str:
    """The commit of this checkout, with ``+changes`` behind it when files differ from it."""
    here = Path(__file__).resolve().parent.parent
    try:
        head = _git(here, "rev-parse", "HEAD")
        return f"{head}+changes" if _git(here, "status", "--porcelain", "--untracked-files=no") else head
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def peak_memory_mib() -> float:
    """Most resident memory this process ever had, in MiB; unlike ``ru_maxrss`` without that of its parent."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise BenchmarkError("/proc/self/status has no VmHWM")


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, check=True, text=True
    ).stdout.strip()


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
