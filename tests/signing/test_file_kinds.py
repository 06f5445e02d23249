"""Whether a file is a bundle or a receipt, whole or damaged; what it looks like otherwise; and what is no file."""

from __future__ import annotations

import gzip
import io
import json
import os
import socket
import tarfile
from pathlib import Path

import pytest

from app.node.lease import HOLDER_NAME, holder_of
from app.share.exchange.peer_client import _context_of, _token_in
from app.trust.tls import _expires_at
from cli.client import _read_token
from ledger.errors import (
    ArchiveInvalidError,
    ConfigurationError,
    NotABundleError,
    StartRefusedError,
    WalCorruptError,
    WalError,
)
from objects.store import ArchiveStore
from signing import files
from signing.anchors import ExternalWitnesses, load_authorities
from signing.bundle.reader import BundleReader
from signing.checkpoint import read_kept
from signing.entry_proof import TLOG_PROOF_HEAD
from signing.files import HEAD_BYTES, is_like_bundle, is_like_receipt, looks_like
from signing.keys import Keyring
from signing.memory import Memory
from tests.app.bundles import GOOD, checkpoint_of
from tests.cases.receipts import GOOD as RECEIPT
from tests.ledger.ledger_in_memory import SIGNER, build
from tests.wal.logs import naive_segment
from wal import control
from wal import inspect as wal_inspect
from wal.replication.tls import PeerTls, TlsFiles


def tar_of_text() -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        info = tarfile.TarInfo("notes.txt")
        info.size = 2
        tar.addfile(info, io.BytesIO(b"hi"))
    return data.getvalue()


OTHER_FILES = {
    "an empty file": b"",
    "a picture": b"\x89PNG\r\n\x1a\n" + bytes(99),
    "a PDF document": b"%PDF-1.7\n",
    "a ZIP archive": b"PK\x03\x04" + bytes(99),
    "a file compressed with gzip; decompress it first": gzip.compress(GOOD),
    "a tar archive of something else": tar_of_text(),
    "a tlog-proof: a program that reads C2SP tlog-proofs verifies that (docs/proofs.md)": (
        f"{TLOG_PROOF_HEAD}\n".encode()
    ),
    "a COSE_Sign1: if it is a COSE receipt, a library for RFC 9942 verifies that (docs/proofs.md)": (
        Path(__file__).parents[2] / "docs/formats/example.statement-receipt.cose"
    ).read_bytes(),
    "a PEM file, such as a key": SIGNER.public_key_pem.encode(),
    "a page (HTML), such as a report of a verification": b"<!doctype html>\n<p>entries/000001.ndjson.gz</p>",
    "a text in Markdown, such as a report of a verification": b"# Report\n\nentries/000001.ndjson.gz\n",
    "a checkpoint: give it with --checkpoint": checkpoint_of(build(3)).encode(),
    "a list of keys: give it with --keys": json.dumps({"keys": []}).encode(),
    "JSON, such as a report of a verification": b'{"bundles":[],"files":1}',
    "text": b"hello\n",
    "binary data": bytes(range(200)) * 30,
}


@pytest.mark.parametrize("name", OTHER_FILES)
def test_a_file_that_is_neither_is_named_and_is_no_bundle(name: str, tmp_path: Path) -> None:
    data = OTHER_FILES[name]
    assert (is_like_bundle(data[:HEAD_BYTES]), is_like_receipt(data[:HEAD_BYTES])) == (False, False)
    assert looks_like(data[:HEAD_BYTES]) == name
    path = tmp_path / "file"
    path.write_bytes(data)
    with pytest.raises(NotABundleError, match="looks like"):
        BundleReader.open(path)


def test_damage_to_a_few_bytes_makes_no_other_kind_of_a_bundle_or_a_receipt() -> None:
    for at in range(600):
        for bit in (1, 0x20, 0x80):
            damaged = bytearray(GOOD[:HEAD_BYTES])
            damaged[at] ^= bit
            assert is_like_bundle(bytes(damaged)), at
    for at in range(64):
        damaged = bytearray(RECEIPT[:HEAD_BYTES])
        damaged[at] ^= 1
        assert is_like_receipt(bytes(damaged)), at
    assert all(is_like_bundle(GOOD[:size]) for size in (1, 23, 24, 100, 511, 512))


# --- what is no file at all -------------------------------------------------------------------------------


@pytest.fixture(params=["a FIFO", "a folder", "a socket", "a device"])
def irregular(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    """Something that stands where a file should, and what it is."""
    path = tmp_path / "it"
    if request.param == "a FIFO":
        os.mkfifo(path)
    elif request.param == "a folder":
        path.mkdir()
    elif request.param == "a socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(os.path.relpath(path))
    else:
        path.symlink_to("/dev/zero")
    return path, request.param


def test_what_is_no_regular_file_is_refused_at_once(irregular: tuple[Path, str]) -> None:
    path, name = irregular
    for opening in (files.open_regular, files.read_regular, BundleReader.open, read_kept):
        with pytest.raises(OSError, match="not a regular file") as refused:
            opening(path)
        assert refused.value.strerror == f"it is not a regular file, but {name}"
    with pytest.raises(OSError, match=name):
        ExternalWitnesses.load([str(path)], None)
    with pytest.raises(ConfigurationError, match=name):
        load_authorities(path)
    with pytest.raises(ConfigurationError, match=name):
        files.read(path)
    for reading in (_token_in, _context_of):
        with pytest.raises(OSError, match=name):
            reading(path)
    with pytest.raises(ConfigurationError, match=rf"{name}\. What a command prints can be given as TALLY_TOKEN"):
        _read_token(None, None, path)
    with pytest.raises(ConfigurationError, match=f"tls.cert .* {name}"):
        _expires_at(path, "tls.cert")
    with pytest.raises(ConfigurationError, match="is not a regular file"):
        PeerTls(TlsFiles(None, None, path), server_side=False)
    if name != "a folder":
        with pytest.raises(ConfigurationError, match=name):
            Keyring.load(path)
    path.rename(path.with_name(HOLDER_NAME))
    with pytest.raises(StartRefusedError, match=f"{name}.* Remove it"):
        holder_of(path.parent)


def test_a_fifo_in_an_archive_is_named_and_not_waited_for(tmp_path: Path) -> None:
    store = ArchiveStore(str(tmp_path))
    os.mkfifo(tmp_path / "part.parquet")
    for read in (lambda name: store.read(name, 1 << 20), store.digest, lambda name: store.create(name, io.BytesIO())):
        with pytest.raises(ArchiveInvalidError, match=r"part\.parquet of the archive is not a regular file"):
            read("part.parquet")
    (tmp_path / ".writing").mkdir()
    os.mkfifo(tmp_path / ".writing" / "left")
    store.prepare()


def test_a_fifo_in_the_place_of_what_a_verifier_remembers_is_named(tmp_path: Path) -> None:
    Memory.open(tmp_path)
    os.mkfifo(tmp_path / "checkpoints.json")
    with pytest.raises(ConfigurationError, match="not a regular file, but a FIFO"):
        Memory.open(tmp_path)


def test_a_fifo_in_a_log_is_damage_that_is_named(tmp_path: Path) -> None:
    segment = naive_segment(tmp_path, [[1], [2, 3]])
    segment.unlink()
    os.mkfifo(segment)
    for look in (wal_inspect.verify, lambda path: [*wal_inspect.dump(path)]):
        with pytest.raises(WalCorruptError, match="is not a regular file"):
            look(tmp_path)
    os.mkfifo(tmp_path / control.CONTROL_NAME)
    with pytest.raises(WalError, match="is not a regular file") as refused:
        control.load(tmp_path)
    said = str(refused.value)
    assert "WAL file control is damaged" in said
    assert said.endswith("is not a regular file. Nothing was changed. Put the file of this WAL back there")
    assert "--accept-lost-wal" not in said
