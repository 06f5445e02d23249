"""The bundle that docs/formats shows is real, and tools that know nothing of us can open it."""

from __future__ import annotations

import base64
import gzip
import json
import re
import resource
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

import pytest

from ledger import canonical
from ledger.bundle.format import END, parse_tar_header, tar_header
from ledger.errors import BundleInvalidError
from ledger.verification import SNAPSHOT_COLUMNS
from signing.bundle import writer
from signing.bundle.reader import BundleReader
from signing.bundle.writer import BundleWriter
from signing.snapshot import encode_snapshot
from tests.app.bundles import bundle_of, store
from tests.ledger.ledger_in_memory import build

FORMATS = Path(__file__).resolve().parents[2] / "docs" / "formats"
EXAMPLE = FORMATS / "example.bundle.tar"


def blocks() -> list[str]:
    """The fenced blocks of the document, in order."""
    return re.findall(r"^```\w+\n(.*?)\n```$", (FORMATS / "bundle.md").read_text(), re.DOTALL | re.MULTILINE)


def test_the_example_has_the_members_the_row_and_the_manifest_that_the_document_shows() -> None:
    listing, row, statement = blocks()
    with tarfile.open(EXAMPLE) as tar:
        assert tar.getnames() == listing.splitlines()[1:]
        files = {name: stream.read() for name in tar.getnames() if (stream := tar.extractfile(name))}
    assert gzip.decompress(files["entries/000001.ndjson.gz"]).decode().splitlines()[1] == row
    payload = base64.b64decode(json.loads(files["manifest.dsse.json"])["payload"])
    assert payload == canonical.encode(json.loads(statement))


def test_the_example_reads_as_three_entries_with_one_snapshot() -> None:
    with BundleReader.open(EXAMPLE) as bundle:
        assert [row[0] for batch in bundle.entry_batches() for row in batch] == [1, 2, 3]
        assert [(row[0], row[1]) for row in bundle.snapshot_rows()] == [(1, 3)]


def test_python_and_gnu_tar_open_a_bundle(tmp_path: Path) -> None:
    path = store(tmp_path, bundle_of(build(20, snapshots_to=(20,))))
    with tarfile.open(path) as tar:
        names = tar.getnames()
        assert all(member.isfile() and member.mode == 0o644 and member.mtime == 0 for member in tar.getmembers())
    tar_program = shutil.which("tar")
    assert tar_program is not None
    listed = subprocess.run([tar_program, "tf", path], capture_output=True, text=True, check=True)
    assert (listed.stdout.split(), listed.stderr) == (names, "")


def test_the_same_ledger_gives_the_same_bytes() -> None:
    assert bundle_of(build(20, snapshots_to=(20,))) == bundle_of(build(20, snapshots_to=(20,)))


@pytest.mark.parametrize("size", [0, 1, 511, 512, 8**11 - 1])
def test_a_header_says_its_name_and_size(size: int) -> None:
    assert parse_tar_header(tar_header("snapshots.ndjson", size)) == ("snapshots.ndjson", size)


def test_python_s_tar_reads_the_same_name_and_size_from_a_header() -> None:
    info = tarfile.TarInfo.frombuf(tar_header("checkpoint", 1234), "ascii", "strict")
    assert (info.name, info.size, info.type, info.mode) == ("checkpoint", 1234, tarfile.REGTYPE, 0o644)


@pytest.mark.parametrize(
    "member",
    [
        {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"},
        {"type": tarfile.LNKTYPE, "linkname": "manifest.dsse.json"},
        {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 5},
        {"type": tarfile.BLKTYPE},
        {"type": tarfile.FIFOTYPE},
        {"type": tarfile.DIRTYPE},
        {"type": tarfile.CONTTYPE},
        {"type": tarfile.GNUTYPE_SPARSE},
        {"type": tarfile.GNUTYPE_LONGNAME},
        {"type": tarfile.XHDTYPE},
        {"type": tarfile.XGLTYPE},
        {"mode": 0o755},
        {"uid": 1},
        {"uname": "root"},
        {"mtime": 1},
    ],
    ids=str,
)
def test_a_header_of_anything_but_a_plain_file_is_refused(member: dict[str, object]) -> None:
    info = tarfile.TarInfo("checkpoint")
    for name, value in member.items():
        setattr(info, name, value)
    with pytest.raises(BundleInvalidError):
        parse_tar_header(info.tobuf(tarfile.USTAR_FORMAT))


def test_every_byte_of_a_header_counts() -> None:
    header = tar_header("entries/000001.ndjson.gz", 677)
    for at in range(len(header)):
        for flip in (0x01, 0x20, 0x80):
            broken = bytearray(header)
            broken[at] ^= flip
            try:
                name, size = parse_tar_header(bytes(broken))
            except BundleInvalidError:
                continue
            raise AssertionError(f"byte {at}: {name!r} of {size} bytes")


def test_two_blocks_of_zeros_are_the_end_and_no_header() -> None:
    with pytest.raises(BundleInvalidError):
        parse_tar_header(END[:512])


def test_snapshots_that_the_disk_does_not_take_are_told_at_once_and_the_writer_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(writer, "SPOOL_BYTES", 1)
    made = BundleWriter(tenant_id="acme", node_id="node-1", log_origin="example.org/log")
    stored = build(20, snapshots_to=(20,)).snapshots[0]
    row = [stored[column] for column in SNAPSHOT_COLUMNS]
    # A limit on the size of files stands for the full disk.
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(encode_snapshot("acme", row)) + 100, usual[1]))
    try:
        made.add_snapshots([row])
        with pytest.raises(OSError, match="File too large"):
            made.add_snapshots([row])
        made.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
