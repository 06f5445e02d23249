"""Bundles made to do harm: every byte changed, bombs, odd files. Never valid, no traceback, in bounded memory."""

from __future__ import annotations

import asyncio
import base64
import os
import resource
import subprocess
import sys
import textwrap
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ledger.bundle.format import END, ENTRY_PARTS_MAX, padding_of, tar_header
from ledger.errors import BundleInvalidError, NotABundleError
from signing.bundle.reader import BundleReader
from signing.judging import verify_file
from signing.keys import Keyring
from tests.app.bundles import ENTRIES, GOOD, bundle_of, container, exit_code, members_of, reseal, store, zipped
from tests.cases.bundles import KEYS, MANIFEST, SNAPSHOTS
from tests.conftest import EXAMPLES, EXAMPLES_USUAL, spread
from tests.ledger.ledger_in_memory import SIGNER, build

RING = Keyring([SIGNER.public_key])
SHARE = 1 if EXAMPLES > EXAMPLES_USUAL else 8
"""In `make test` there are as many members as an eighth of what may be, for which a process may grow an eighth."""
GROWTH_MIB_MAX = 100
SMALL = bundle_of(build(2, snapshots_to=(2,)))


@pytest.mark.exhaustive
def test_no_byte_of_a_bundle_can_be_changed(tmp_path: Path) -> None:
    path = store(tmp_path, SMALL)

    async def flip_all() -> None:
        with path.open("r+b") as file:
            for at, byte in spread(enumerate(SMALL), 500):
                os.pwrite(file.fileno(), bytes((byte ^ (1 << at % 8),)), at)
                assert exit_code(await verify_file(path, RING)) in (2, 4), f"byte {at}"
                os.pwrite(file.fileno(), bytes((byte,)), at)
        assert exit_code(await verify_file(path, RING)) == 0

    asyncio.run(flip_all())


@pytest.mark.exhaustive
def test_no_end_of_a_bundle_can_be_cut_off(tmp_path: Path) -> None:
    path = store(tmp_path, SMALL)

    async def cut_all() -> None:
        for size in spread(range(len(SMALL) - 1, -1, -7), 250):
            os.truncate(path, size)
            assert exit_code(await verify_file(path, RING)) == 2, size

    asyncio.run(cut_all())


@given(
    edits=st.lists(
        st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 64), st.binary(max_size=64)), min_size=1, max_size=4
    )
)
@settings(max_examples=4 * EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_replaced_removed_or_put_in_is_seen(edits: list[tuple[int, int, bytes]], tmp_path: Path) -> None:
    changed = bytearray(GOOD)
    for at, removed, inserted in edits:
        changed[at : at + removed] = inserted
    if bytes(changed) != GOOD:
        try:
            found = asyncio.run(verify_file(store(tmp_path, bytes(changed)), RING))
        except NotABundleError:
            return  # It is no bundle any more, and said to be none.
        assert exit_code(found) in (2, 4)


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


def growth_mib(folder: Path, names: list[str]) -> dict[str, tuple[float, int]]:
    """How much a process that verifies each bundle grows over one that verified a small one, and its exit code."""
    small = store(folder, SMALL, "small.tar")
    script = f"""
        import asyncio, os, re
        from pathlib import Path
        from signing.judging import verify_file
        from tests.app.bundles import exit_code
        peak_kib = lambda: int(re.search("VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
        for name in {names!r}:
            if child := os.fork():
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, name
                continue
            asyncio.run(verify_file(Path({str(small)!r}), None))
            Path("/proc/self/clear_refs").write_text("5")  # the peak so far counts no more
            before_kib = peak_kib()
            code = exit_code(asyncio.run(verify_file(Path({str(folder)!r}, name), None)))
            print(name, (peak_kib() - before_kib) / 1024, code)
            break
    """
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, cwd=root)
    assert done.returncode == 0, done.stderr
    told = [line.split() for line in done.stdout.splitlines()]
    return {name: (float(mib), int(code)) for name, mib, code in told}


def _bomb() -> bytes:
    """A part that is listed with as much as a part may hold, and holds sixteen times that."""
    packer = zlib.compressobj(1, wbits=31)
    zeros = packer.compress(bytes(128 << 20)) + packer.flush()
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


MANIFEST_BYTES = 8_000_000


@cache
def _headers_of_parts(count: int) -> bytes:
    return b"".join(tar_header(f"entries/{n:06d}.ndjson.gz", 0) for n in range(1, count + 1))


def _with_manifest(head: bytes, item: bytes, tail: bytes) -> bytes:
    """So many members that the manifest may be long, and one that is little but ``item``, again and again."""
    room = MANIFEST_BYTES - len(head) - len(tail)
    manifest = head + item * (room // len(item)) + tail
    headers = [_headers_of_parts(16_000), *(tar_header(name, 0) for name in (SNAPSHOTS, "checkpoint", KEYS))]
    return b"".join(headers) + tar_header(MANIFEST, len(manifest)) + manifest + bytes(padding_of(len(manifest))) + END


def _manifest_of_signatures() -> bytes:
    head = b'{"payload":"","payloadType":"application/vnd.in-toto+json","signatures":['
    return _with_manifest(head, b"[],", b"[]]}")


@cache
def _manifest_of_values() -> bytes:
    payload = b'{"_type":"","predicate":{"consistency":[' + b"[]," * (1 << 20)
    signature = b'{"keyid":"0123456789abcdef","sig":"' + b"A" * 86 + b'=="}'
    tail = b'","payloadType":"application/vnd.in-toto+json","signatures":[' + signature + b"]}"
    return _with_manifest(b'{"payload":"' + base64.b64encode(payload), b"W10s", tail)


def _many_members() -> bytes:
    return _headers_of_parts(ENTRY_PARTS_MAX // SHARE + 1)


def _sparse(path: Path) -> None:
    """A file of 8 GiB that takes no room on disk: one member, all holes."""
    with path.open("wb") as file:
        file.write(tar_header(ENTRIES, 8**11 - 1))
        file.truncate(8**11 + 1024)


TAKING_MEMORY: tuple[Callable[[], bytes], ...] = (
    *(_bomb, _large_row, _long_snapshot, _huge_keys, _huge_manifest),
    *(_manifest_of_signatures, _manifest_of_values, _many_members),
)


@pytest.mark.exhaustive
def test_what_is_made_to_take_memory_is_refused_in_little(tmp_path: Path) -> None:
    for make in TAKING_MEMORY:
        store(tmp_path, make(), make.__name__)
    grown = growth_mib(tmp_path, [make.__name__ for make in TAKING_MEMORY])
    assert {name: code for name, (_, code) in grown.items()} == {
        make.__name__: 2 if make is not _huge_keys else 3 for make in TAKING_MEMORY
    }
    bounds_mib = dict.fromkeys(grown, GROWTH_MIB_MAX) | {_many_members.__name__: GROWTH_MIB_MAX // SHARE}
    assert {name: mib for name, (mib, _) in grown.items() if mib >= bounds_mib[name]} == {}


def test_a_member_larger_than_any_may_be_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "sparse.tar"
    _sparse(path)
    before_s = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    with pytest.raises(BundleInvalidError, match="larger than a bundle allows"):
        BundleReader.open(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - before_s < 1


# --- the second implementation ------------------------------------------------------------------------------

VERIFY_PY = Path(__file__).resolve().parents[2] / "docs" / "formats" / "verify.py"
TWIN_BYTES_MAX = 256 << 20


def twin(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """docs/formats/verify.py, in a process that may not hold much."""
    script = (
        "import resource, runpy, sys; "
        f"resource.setrlimit(resource.RLIMIT_AS, ({TWIN_BYTES_MAX}, {TWIN_BYTES_MAX})); "
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [sys.executable, "-c", script, str(VERIFY_PY), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_the_second_implementation_holds_little_whatever_a_file_says(tmp_path: Path) -> None:
    negative = bytearray(tar_header(ENTRIES, 0))
    negative[124:135] = b"-0000000001"
    negative[148:156] = b" " * 8
    negative[148:156] = b"%06o\0 " % sum(negative)
    for name, head in {
        "a negative size": bytes(negative),
        "long snapshots": tar_header(ENTRIES, 0) + tar_header(SNAPSHOTS, 2 * TWIN_BYTES_MAX),
    }.items():
        path = store(tmp_path, head)
        os.truncate(path, 2 * TWIN_BYTES_MAX)
        done = twin(path)
        assert (done.returncode, done.stderr) == (2, ""), (name, done)
    done = twin(store(tmp_path, _manifest_of_values()))
    assert (done.returncode, done.stderr) == (2, ""), done


def test_the_second_implementation_says_so_when_it_is_called_wrongly(tmp_path: Path) -> None:
    done = twin(store(tmp_path, GOOD), "--keys")
    assert (done.returncode, done.stdout) == (1, ""), done
    assert "verify.py FILE [--keys K]" in done.stderr
