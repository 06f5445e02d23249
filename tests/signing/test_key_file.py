"""Key files: whole or absent, for one user alone, never overwritten, never with rights changed."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)

from ledger.errors import ConfigurationError
from signing import note
from signing.keys import ALGORITHMS, ECDSA_P256, ED25519
from signing.private_keys import generate, load, load_or_generate, log_signer


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_new_key_signs_and_loads_as_the_same_key(tmp_path: Path, algorithm: str) -> None:
    made = generate(tmp_path / "signing.pem", algorithm)
    loaded = load(str(tmp_path / "signing.pem"))
    assert (loaded.key_id, loaded.algorithm, loaded.path) == (
        made.key_id,
        algorithm,
        tmp_path / "signing.pem",
    )
    assert made.public_key.made(loaded.sign(b"message"), b"message")
    assert loaded.public_key_pem.startswith("-----BEGIN PUBLIC KEY-----\n")


def test_a_new_key_is_the_only_file_and_for_its_owner_alone(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        generate(tmp_path / "signing.pem")
    finally:
        os.umask(umask)
    assert os.listdir(tmp_path) == ["signing.pem"]
    assert mode_of(tmp_path / "signing.pem") == 0o600
    assert (tmp_path / "signing.pem").read_text().startswith("-----BEGIN PRIVATE KEY-----\n")


def test_folders_that_are_there_keep_their_rights_and_new_ones_are_private(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    there.chmod(0o751)
    generate(there / "new" / "newer" / "signing.pem")
    assert mode_of(there) == 0o751
    assert mode_of(there / "new") == 0o700
    assert mode_of(there / "new" / "newer") == 0o700


def test_a_key_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "signing.pem"
    first = generate(path)
    with pytest.raises(ConfigurationError, match="exists already"):
        generate(path)
    assert load(str(path)).key_id == first.key_id
    assert os.listdir(tmp_path) == ["signing.pem"]


def test_file_and_folder_are_synced_before_a_key_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    real_fsync, real_link = os.fsync, os.link

    def fsync(descriptor: int) -> None:
        real_fsync(descriptor)
        target = os.readlink(f"/proc/self/fd/{descriptor}")
        size = os.fstat(descriptor).st_size
        steps.append(f"sync {'folder ' + Path(target).name if Path(target).is_dir() else f'file {size > 100}'}")

    def link(source: Path, target: Path) -> None:
        real_link(source, target)
        steps.append("link")

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "link", link)
    generate(tmp_path / "keys" / "signing.pem")
    assert steps == [f"sync folder {tmp_path.name}", "sync file True", "link", "sync folder keys"]


def test_a_failure_on_the_way_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(ConfigurationError, match="No space left"):
        generate(tmp_path / "signing.pem")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o610, 0o620, 0o644, 0o777])
def test_a_key_that_others_can_reach_is_refused_and_left_as_it_is(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "signing.pem"
    generate(path)
    path.chmod(mode)
    with pytest.raises(ConfigurationError, match=f"mode {mode:04o}.*chmod 600 {path}"):
        load(str(path))
    with pytest.raises(ConfigurationError, match="others"):
        load_or_generate(str(path))
    assert mode_of(path) == mode


def pem_of(private, encryption=None) -> bytes:  # type: ignore[no-untyped-def]
    return private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption or NoEncryption())


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "PEM"),
        (b"no key", "PEM"),
        (b"\xff\x00", "PEM"),
        (pem_of(Ed25519PrivateKey.generate())[:60], "PEM"),
        (pem_of(Ed25519PrivateKey.generate(), BestAvailableEncryption(b"secret")), "unencrypted"),
        (pem_of(rsa.generate_private_key(65537, 2048)), "Ed25519, ECDSA P-256 or ML-DSA-44"),
        (pem_of(ec.generate_private_key(ec.SECP384R1())), "Ed25519, ECDSA P-256 or ML-DSA-44"),
        (b"x" * 2**20, "too much"),
    ],
    ids=["empty", "text", "bytes", "cut short", "encrypted", "RSA", "P-384", "huge"],
)
def test_a_file_without_a_usable_key_is_refused_with_its_name(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "signing.pem"
    path.touch(0o600)
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=says) as refused:
        load_or_generate(str(path))
    assert str(path) in str(refused.value)
    assert path.read_bytes() == content


def test_what_is_not_a_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    for name, says in (("absent.pem", "No such file"), ("fifo", "not a regular file"), (".", "not a regular file")):
        with pytest.raises(ConfigurationError, match=says):
            load(str(tmp_path / name))


def test_a_link_that_leads_nowhere_is_not_followed_to_make_a_key(tmp_path: Path) -> None:
    (tmp_path / "signing.pem").symlink_to(tmp_path / "elsewhere.pem")
    with pytest.raises(ConfigurationError, match="exists already"):
        load_or_generate(str(tmp_path / "signing.pem"))
    assert os.listdir(tmp_path) == ["signing.pem"]


def test_a_key_is_made_on_the_first_start_and_found_on_the_next(tmp_path: Path) -> None:
    uri = str(tmp_path / "keys" / "signing.pem")
    assert load_or_generate(uri).key_id == load_or_generate(uri, ECDSA_P256).key_id


def test_processes_that_start_at_once_use_one_key(tmp_path: Path) -> None:
    uri = str(tmp_path / "signing.pem")
    with ThreadPoolExecutor(16) as pool:
        signers = list(pool.map(load_or_generate, [uri] * 64))
    assert len({signer.key_id for signer in signers}) == 1
    assert os.listdir(tmp_path) == ["signing.pem"]


def test_a_key_uri_is_a_path_or_a_file_uri(tmp_path: Path) -> None:
    made = generate(tmp_path / "with space.pem")
    for uri in (str(made.path), f"file:{tmp_path}/with%20space.pem", f"file://{tmp_path}/with%20space.pem"):
        assert load(uri).key_id == made.key_id


@pytest.mark.parametrize("uri", ["awskms:alias/key", "file://host/key.pem", "https://host/key.pem", "file:"])
def test_other_key_uris_are_refused_with_what_is_allowed(uri: str) -> None:
    with pytest.raises(ConfigurationError, match="file:/path"):
        load(uri)


def test_an_unknown_algorithm_is_refused_with_what_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="ed25519, ecdsa-p256"):
        generate(tmp_path / "signing.pem", "rsa")
    assert os.listdir(tmp_path) == []


def test_an_ed25519_key_signs_checkpoints_itself(tmp_path: Path) -> None:
    signer = generate(tmp_path / "signing.pem", ED25519)
    assert log_signer(signer) is signer
    assert os.listdir(tmp_path) == ["signing.pem"]


def test_a_p256_key_gets_an_ed25519_log_key_beside_it_once(tmp_path: Path) -> None:
    signer = generate(tmp_path / "signing.pem", ECDSA_P256)
    second = log_signer(signer)
    assert second.algorithm == ED25519
    assert log_signer(load(str(signer.path))).key_id == second.key_id
    assert mode_of(second.path) == 0o600
    assert sorted(os.listdir(tmp_path)) == ["signing.pem", "signing.pem.log-key.pem"]
    assert note.sign("text\n", "log", second).startswith("text\n\n— log ")


def test_a_log_key_of_another_algorithm_is_refused(tmp_path: Path) -> None:
    signer = generate(tmp_path / "signing.pem", ECDSA_P256)
    generate(tmp_path / "signing.pem.log-key.pem", ECDSA_P256)
    with pytest.raises(ConfigurationError, match="not of ed25519"):
        log_signer(signer)


def test_a_signer_shows_no_secret(tmp_path: Path) -> None:
    made = generate(tmp_path / "signing.pem")
    secret = made.path.read_text().splitlines()[1]
    assert secret not in repr(made)
    assert made.key_id in repr(made)
