"""Bundles made to do harm: every byte changed, bombs, odd files. Never valid, no traceback, in bounded memory."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.bundle.format import ENTRY_PARTS_MAX, tar_header
from app.bundle.reader import BundleReader
from app.bundle.verify import verify_file
from ledger.errors import BundleInvalidError
from signing.keys import Keyring
from tests.app.bundle_cases import GOOD, KEYS, SNAPSHOTS
from tests.app.bundles import ENTRIES, bundle_of, container, exit_code, members_of, reseal, store, zipped
from tests.ledger.ledger_in_memory import SIGNER, build

RING = Keyring([SIGNER.public_key])
GROWTH_MIB_MAX = 100
SMALL = bundle_of(build(2, snapshots_to=(2,)))


def test_no_byte_of_a_bundle_can_be_changed(tmp_path: Path) -> None:
    path = store(tmp_path, SMALL)

    async def flip_all() -> None:
        with path.open("r+b") as file:
            for at, byte in enumerate(SMALL):
                os.pwrite(file.fileno(), bytes((byte ^ (1 << at % 8),)), at)
                assert exit_code(await verify_file(path, RING)) in (2, 4), f"byte {at}"
                os.pwrite(file.fileno(), bytes((byte,)), at)
        assert exit_code(await verify_file(path, RING)) == 0

    asyncio.run(flip_all())


def test_no_end_of_a_bundle_can_be_cut_off(tmp_path: Path) -> None:
    path = store(tmp_path, SMALL)

    async def cut_all() -> None:
        for size in range(len(SMALL) - 1, -1, -7):
            os.truncate(path, size)
            assert exit_code(await verify_file(path, RING)) == 2, size

    asyncio.run(cut_all())


@given(
    edits=st.lists(
        st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 64), st.binary(max_size=64)), min_size=1, max_size=4
    )
)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_replaced_removed_or_put_in_is_seen(edits: list[tuple[int, int, bytes]], tmp_path: Path) -> None:
    changed = bytearray(GOOD)
    for at, removed, inserted in edits:
        changed[at : at + removed] = inserted
    if bytes(changed) != GOOD:
        assert exit_code(asyncio.run(verify_file(store(tmp_path, bytes(changed)), RING))) in (2, 4)


# --- what is no plain file ------------------------------------------------------------------------------


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "pipe", tmp_path / "folder", Path("/dev/zero"), tmp_path / "missing"):
        with pytest.raises(OSError):
            BundleReader.open(path)


def test_a_bundle_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = store(tmp_path, GOOD)
    with BundleReader.open(path) as bundle:
        path.write_bytes(GOOD.replace(members_of(GOOD)[ENTRIES][100:120], bytes(20)))
        with pytest.raises(BundleInvalidError, match="changed while it was read"):
            list(bundle.entry_batches())


# --- bounded memory --------------------------------------------------------------------------------------


def growth_mib(path: Path) -> tuple[float, int]:
    """How much a process that verifies the bundle grows over one that verified a small one, and its exit code."""
    small = store(path.parent, SMALL, "small.tar")
    script = f"""
        import asyncio, re
        from pathlib import Path
        from app.bundle.verify import verify_file
        from tests.app.bundles import exit_code
        peak_kib = lambda: int(re.search("VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
        asyncio.run(verify_file(Path({str(small)!r}), None))
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far counts no more
        before_kib = peak_kib()
        code = exit_code(asyncio.run(verify_file(Path({str(path)!r}), None)))
        print((peak_kib() - before_kib) / 1024, code)
    """
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, cwd=root)
    assert done.returncode == 0, done.stderr
    mib, code = done.stdout.split()
    return float(mib), int(code)


def _bomb() -> bytes:
    """A part that is listed with as much as a part may hold, and holds sixteen times that."""
    zeros = zipped(bytes(128 << 20))
    return reseal(GOOD, {ENTRIES: zeros}, parts=lambda parts: parts[0].update(raw_bytes=8 << 20, rows=30))


def _large_row() -> bytes:
    """One row as long as any may be, which is no row."""
    return reseal(
        bundle_of(build(1, snapshots_to=(1,))),
        {ENTRIES: zipped(b"9" * (8 << 20))},
        parts=lambda parts: parts[0].update(raw_bytes=8 << 20, rows=1),
    )


def _long_snapshot() -> bytes:
    return reseal(GOOD, {SNAPSHOTS: b"[" * (32 << 20)}, snapshot_count=0)


def _huge_keys() -> bytes:
    return reseal(GOOD, {KEYS: bytes(4 << 20)})


def _huge_manifest() -> bytes:
    return container((members_of(GOOD) | {"manifest.dsse.json": b"[" * (64 << 10)}).items())


def _many_members() -> bytes:
    return b"".join(tar_header(f"entries/{n:06d}.ndjson.gz", 0) for n in range(1, ENTRY_PARTS_MAX + 2))


def _sparse(path: Path) -> None:
    """A file of 8 GiB that takes no room on disk: one member, all holes."""
    with path.open("wb") as file:
        file.write(tar_header(ENTRIES, 8**11 - 1))
        file.truncate(8**11 + 1024)


@pytest.mark.parametrize(
    "make",
    [_bomb, _large_row, _long_snapshot, _huge_keys, _huge_manifest, _many_members],
    ids=lambda make: make.__name__,
)
def test_what_is_made_to_take_memory_is_refused_in_little(make: Callable[[], bytes], tmp_path: Path) -> None:
    mib, code = growth_mib(store(tmp_path, make()))
    assert code == (2 if make is not _huge_keys else 3)
    assert mib < GROWTH_MIB_MAX


def test_a_member_larger_than_any_may_be_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "sparse.tar"
    _sparse(path)
    before_s = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    with pytest.raises(BundleInvalidError, match="larger than a bundle allows"):
        BundleReader.open(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - before_s < 1
