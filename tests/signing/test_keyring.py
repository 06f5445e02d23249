"""Rings of keys: every form that ``--keys`` takes, and what is refused."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from ledger.errors import ConfigurationError, InvalidInputError
from ledger.hlc import Hlc
from signing import note
from signing.keys import ECDSA_P256, KEYS_MAX, Keyring, PublicKey
from signing.private_keys import FileSigner, generate

JUNE = datetime(2026, 6, 1, tzinfo=UTC)
JULY = datetime(2026, 7, 1, tzinfo=UTC)


def ids(ring: Keyring) -> set[str]:
    return {key.key_id for key in ring}


def test_a_ring_gives_keys_by_id(signer: FileSigner, other_signer: FileSigner) -> None:
    ring = Keyring.of([signer.public_key])
    assert ring.get(signer.key_id) == signer.public_key
    assert ring.get(other_signer.key_id) is None
    assert Keyring.of(ring) is ring


def test_json_gives_back_the_same_ring(signer: FileSigner, other_signer: FileSigner) -> None:
    key = PublicKey.of(signer.public_key_pem, not_before=JUNE, revoked_from_hlc=Hlc(1, 2, "n"))
    verifier_key = note.VerifierKey.of("log.example/acme", other_signer.public_key).text()
    ring = Keyring([key, other_signer.public_key], [verifier_key])
    again = Keyring.from_json(json.loads(json.dumps(ring.to_json())))
    assert list(again) == [key, other_signer.public_key]
    assert again.log_verifier_keys == (verifier_key,)


def test_a_key_given_twice_holds_only_where_both_say_so(signer: FileSigner) -> None:
    pem = signer.public_key_pem
    ring = Keyring(
        [
            PublicKey.of(pem, not_before=JUNE, revoked_from_hlc=Hlc(9, 0, "n")),
            PublicKey.of(pem),
            PublicKey.of(pem, not_before=JULY, not_after=JULY, revoked_from_hlc=Hlc(8, 0, "n")),
        ]
    )
    expected = PublicKey.of(pem, not_before=JULY, not_after=JULY, revoked_from_hlc=Hlc(8, 0, "n"))
    assert list(ring) == [expected]


def test_windows_that_do_not_meet_refuse_the_key(signer: FileSigner) -> None:
    pem = signer.public_key_pem
    with pytest.raises(InvalidInputError, match="ends before"):
        Keyring([PublicKey.of(pem, not_before=JULY), PublicKey.of(pem, not_after=JUNE)])


def test_a_public_pem_file_loads(signer: FileSigner, tmp_path: Path) -> None:
    (tmp_path / "key.pub").write_text(signer.public_key_pem)
    assert ids(Keyring.load(tmp_path / "key.pub")) == {signer.key_id}
    assert ids(Keyring.load(str(tmp_path / "key.pub"))) == {signer.key_id}


def test_of_a_private_pem_file_the_public_half_is_taken(tmp_path: Path) -> None:
    made = generate(tmp_path / "signing.pem", ECDSA_P256)
    ring = Keyring.load(tmp_path / "signing.pem")
    assert ids(ring) == {made.key_id}
    assert "PRIVATE" not in json.dumps(ring.to_json())


def test_a_pem_file_may_hold_several_keys_and_text_around_them(
    signer: FileSigner, other_signer: FileSigner, tmp_path: Path
) -> None:
    (tmp_path / "keys.pem").write_text(f"# ours\n{signer.public_key_pem}\n# theirs\n{other_signer.public_key_pem}")
    assert ids(Keyring.load(tmp_path / "keys.pem")) == {signer.key_id, other_signer.key_id}


def test_saved_v1_keys_json_loads(signer: FileSigner, tmp_path: Path) -> None:
    ring = Keyring([PublicKey.of(signer.public_key_pem, not_after=JULY)])
    (tmp_path / "saved").write_text(json.dumps(ring.to_json(), indent=2))
    assert list(Keyring.load(tmp_path / "saved")) == list(ring)


def test_a_folder_is_read_whole_and_other_files_in_it_are_left_alone(
    signer: FileSigner, other_signer: FileSigner, tmp_path: Path
) -> None:
    made = generate(tmp_path / "signing.pem")
    (tmp_path / "a.pem").write_text(signer.public_key_pem)
    verifier_key = note.VerifierKey.of("log", other_signer.public_key).text()
    (tmp_path / "b.json").write_text(json.dumps(Keyring([other_signer.public_key], [verifier_key]).to_json()))
    (tmp_path / "README.txt").write_text("not a key")
    (tmp_path / ".hidden.pem").write_text("not a key")
    (tmp_path / "folder.pem").mkdir()
    ring = Keyring.load(tmp_path)
    assert ids(ring) == {made.key_id, signer.key_id, other_signer.key_id}
    assert ring.log_verifier_keys == (verifier_key,)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no key",
        b"\xff\xfe",
        b"{",
        b"{}",
        b'{"keys": {}}',
        b'{"keys": [1]}',
        b'{"keys": []}',
        b'{"keys": [], "log_verifier_keys": [1]}',
        b'{"keys": [{"key_id": "x", "algorithm": "ed25519", "public_key_pem": "x"}]}',
        b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n",
        b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n",
        b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
        b"[" * 100_000,
        b" " * (5 * 2**20),
    ],
)
def test_a_file_without_keys_is_refused_with_its_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "keys.pem").write_bytes(content)
    for given in (tmp_path / "keys.pem", tmp_path):
        with pytest.raises(ConfigurationError, match=str(tmp_path)):
            Keyring.load(given)


def test_what_is_absent_or_empty_is_refused_with_its_name(tmp_path: Path) -> None:
    for given in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ConfigurationError, match=str(given)):
            Keyring.load(given)


def test_the_number_of_keys_is_bounded() -> None:
    keys = [PublicKey.of_raw(index.to_bytes(32, "little")) for index in range(2, KEYS_MAX + 3)]
    assert len(Keyring(keys[:KEYS_MAX])) == KEYS_MAX
    with pytest.raises(InvalidInputError, match=str(KEYS_MAX)):
        Keyring(keys)
