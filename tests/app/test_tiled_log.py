"""An outsider checks a log: everything below is written from the C2SP texts and RFC 6962 alone and shares no code
with the service. It speaks HTTP, fetches checkpoint, tiles and entries, and believes only the verifier key.

    c2sp.org/signed-note   c2sp.org/tlog-checkpoint   c2sp.org/tlog-tiles
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import http.client
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from app.dev.embedded import EmbeddedPostgres
from tests.app.service_thread import serving
from tests.conftest import connected_to, spread
from tests.waiting import until

DEADLINE_S = 60
ENTRIES = 600
"""Two full tiles and one of width 88 on level 0, one of width 2 on level 1."""


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


class Fsck:
    """Fetches a whole log below ``prefix`` and rebuilds its root from the entries."""

    def __init__(self, prefix: str, verifier_key: str) -> None:
        address = urlsplit(prefix)
        self._connection = http.client.HTTPConnection(address.hostname, address.port, timeout=30)
        self._path = address.path.rstrip("/")
        self._name, self._key_id, self._key = _verifier(verifier_key)

    def get(self, resource: str, **headers: str) -> Answer:
        self._connection.request("GET", f"{self._path}/{resource}", headers=headers)
        response = self._connection.getresponse()
        return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())

    def fetch(self, resource: str) -> bytes:
        answer = self.get(resource)
        assert answer.status == 200, (resource, answer)
        assert answer.headers["content-type"] == "application/octet-stream"
        return answer.body

    def checkpoint(self) -> tuple[int, bytes]:
        """Size and root, once the log's signature holds."""
        answer = self.get("checkpoint")
        assert answer.headers["content-type"] == "text/plain; charset=utf-8"
        text, _, signatures = answer.body.decode().rpartition("\n\n")
        text += "\n"
        origin, size, root = text.split("\n")[:3]
        assert origin == self._name
        for line in signatures.rstrip("\n").split("\n"):
            dash, name, encoded = line.split(" ")
            signature = base64.b64decode(encoded, validate=True)
            assert dash == "\u2014"
            if name == self._name and signature[:4] == self._key_id:
                self._key.verify(signature[4:], text.encode())
                return int(size), base64.b64decode(root, validate=True)
        raise AssertionError("the log did not sign")

    def check(self) -> int:
        """Rebuild everything up to the checkpoint and compare it with what is served; the size."""
        size, root = self.checkpoint()
        entries: list[bytes] = []
        for index, width in _tiles(size):
            bundle = self.fetch(_path("entries", index, width))
            found = _split_bundle(bundle)
            assert len(found) == width
            entries += found
        level, hashes = 0, [hashlib.sha256(b"\x00" + entry).digest() for entry in entries]
        assert _tree_hash(hashes) == root
        while hashes:
            for index, width in _tiles(len(hashes)):
                tile = self.fetch(_path(str(level), index, width))
                assert tile == b"".join(hashes[index * 256 : index * 256 + width])
            full = [hashes[at : at + 256] for at in range(0, len(hashes) - len(hashes) % 256, 256)]
            level, hashes = level + 1, [_tree_hash(each) for each in full]
        return size


def _verifier(text: str) -> tuple[str, bytes, Ed25519PublicKey]:
    name, key_id, encoded = text.split("+", 2)
    key = base64.b64decode(encoded, validate=True)
    assert key[0] == 0x01
    assert hashlib.sha256(name.encode() + b"\n" + key).digest()[:4].hex() == key_id
    return name, bytes.fromhex(key_id), Ed25519PublicKey.from_public_bytes(key[1:])


def _tiles(hashes: int) -> Iterator[tuple[int, int]]:
    """(index, width) of the tiles of a level that has so many hashes."""
    for index in range(hashes // 256):
        yield index, 256
    if hashes % 256:
        yield hashes // 256, hashes % 256


def _path(level: str, index: int, width: int) -> str:
    groups = [f"{index % 1000:03}"]
    while index >= 1000:
        index //= 1000
        groups.insert(0, f"x{index % 1000:03}")
    return f"tile/{level}/{'/'.join(groups)}" + (f".p/{width}" if width < 256 else "")


def _split_bundle(bundle: bytes) -> list[bytes]:
    entries, at = [], 0
    while at < len(bundle):
        (length,) = struct.unpack_from(">H", bundle, at)
        entries.append(bundle[at + 2 : at + 2 + length])
        assert len(entries[-1]) == length
        at += 2 + length
    return entries


def _tree_hash(hashes: list[bytes]) -> bytes:
    """MTH of RFC 6962 2.1 over leaves that are hashed already."""
    if len(hashes) == 1:
        return hashes[0]
    k = 1
    while k * 2 < len(hashes):
        k *= 2
    return hashlib.sha256(b"\x01" + _tree_hash(hashes[:k]) + _tree_hash(hashes[k:])).digest()


# --- the log ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("tiled")
    with serving(postgres, folder, "tiled", chain={"checkpoint_interval": "20ms"}) as url:
        lines = "\n".join(f'{{"tenant_id":"acme","type":"JobCreated","job_id":"j-{n}"}}' for n in range(ENTRIES))
        headers = {"content-type": "application/x-ndjson"}
        httpx.post(f"{url}/v1/events", content=lines, headers=headers, timeout=DEADLINE_S).raise_for_status()
        until(lambda: _checkpoint_size(url) == ENTRIES, "a checkpoint covers all")
        yield url


def _checkpoint_size(url: str) -> int:
    answer = httpx.get(f"{url}/v1/log/acme/checkpoint", timeout=DEADLINE_S)
    return int(answer.text.split("\n")[1]) if answer.status_code == 200 else 0


@pytest.fixture
def fsck(url: str) -> Fsck:
    (key,) = httpx.get(f"{url}/v1/keys", params={"tenant_id": "acme"}, timeout=DEADLINE_S).json()["log_verifier_keys"]
    return Fsck(f"{url}/v1/log/acme", key)


def test_an_outsider_rebuilds_the_signed_root_from_the_entries(fsck: Fsck) -> None:
    assert fsck.check() == ENTRIES


async def test_an_entry_that_does_not_hash_to_what_was_signed_is_not_served(
    postgres: EmbeddedPostgres, url: str, fsck: Fsck
) -> None:
    async with connected_to(postgres.superuser_url("tiled")) as superuser:
        await superuser.execute("SET session_replication_role = replica")
        for forged in ("repeat('ab', 32)", "'no hex'"):
            change = "UPDATE scheduler.scheduler_log SET chain_link = {} WHERE tenant_id = 'acme' AND seq = 300"
            link = await superuser.fetchval(
                "SELECT chain_link FROM scheduler.scheduler_log WHERE tenant_id = 'acme' AND seq = 300"
            )
            await superuser.execute(change.format(forged))
            try:
                answer = fsck.get("tile/entries/001")
                assert (answer.status, answer.headers["cache-control"]) == (409, "no-store")
                assert fsck.get("tile/entries/000").status == 200
            finally:
                await superuser.execute(change.format(f"'{link}'"))
    assert fsck.check() == ENTRIES


@pytest.mark.exhaustive
def test_partial_tiles_of_every_width_up_to_the_checkpoint_are_there_and_no_wider_ones(fsck: Fsck) -> None:
    full = {kind: fsck.fetch(f"tile/{kind}/001") for kind in ("0", "entries")}
    for kind, each in (("0", 32), ("entries", 34)):
        for width in spread(range(1, 256), 20):
            assert fsck.fetch(f"tile/{kind}/001.p/{width}") == full[kind][: width * each]
        for width in (*spread(range(1, 256), 20), 88, 89):
            assert fsck.get(f"tile/{kind}/002.p/{width}").status == (200 if width <= 88 else 404), width
        assert fsck.get(f"tile/{kind}/002").status == 404
    assert [fsck.get(f"tile/1/000.p/{width}").status for width in (1, 2, 3)] == [200, 200, 404]
    assert fsck.get("tile/2/000.p/1").status == 404


@pytest.mark.parametrize(
    "path",
    [
        *("0/000.p/0", "0/000.p/256", "0/000.p/01", "0/000.p/", "0/000.p", "0/0", "0/00", "0/0000", "0/000/", "0/-01"),
        *("0/x000/000", "0/000/x000", "0/x00/000", "0/X001/000", "00/000", "64/000", "-1/000", "x/000", "/000", ""),
        *("entries", "entries/", "entries/0", "entries/x000/000", "entries/000.p/256", "entries/0/000"),
        *("0/x999/x999/x999/x999/x999/999", "63/000", "entries/x999/x999/x999/x999/x999/999", "0/٠٠٠"),
    ],
)
def test_every_tile_has_one_spelling_and_what_is_not_there_is_not_found(url: str, path: str) -> None:
    answer = httpx.get(f"{url}/v1/log/acme/tile/{path}", timeout=DEADLINE_S)
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["cache-control"] == "no-store"


def test_what_never_changes_may_be_kept_for_ever_and_nothing_else(fsck: Fsck) -> None:
    for resource in ("tile/0/000", "tile/0/002.p/88", "tile/1/000.p/1", "tile/entries/001", "tile/entries/002.p/1"):
        assert fsck.get(resource).headers["cache-control"] == "public, max-age=31536000, immutable"
    assert fsck.get("checkpoint").headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    ("accepted", "is_compressed"),
    [
        *(("gzip", True), ("gzip, identity", True), ("br;q=1.0, gzip;q=0.5", True), ("*", True), ("GZIP", True)),
        *(("identity", False), ("", False), ("gzip;q=0", False), ("gzip; q=0.000", False), ("br", False)),
    ],
)
def test_entry_bundles_come_compressed_to_those_who_ask(fsck: Fsck, accepted: str, is_compressed: bool) -> None:
    plain = fsck.fetch("tile/entries/000")
    answer = fsck.get("tile/entries/000", **{"Accept-Encoding": accepted})
    assert answer.headers["vary"] == "Accept-Encoding"
    assert answer.headers.get("content-encoding") == ("gzip" if is_compressed else None)
    assert (gzip.decompress(answer.body) if is_compressed else answer.body) == plain
    assert "content-encoding" not in fsck.get("tile/0/000", **{"Accept-Encoding": accepted}).headers


def test_a_tenant_without_a_log_has_neither_checkpoint_nor_tiles(url: str) -> None:
    for resource in ("checkpoint", "tile/0/000", "tile/entries/000"):
        assert httpx.get(f"{url}/v1/log/nobody/{resource}", timeout=DEADLINE_S).status_code == 404
