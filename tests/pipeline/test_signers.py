"""The keys that pipeline commands sign with: named as the service names them, never made."""

from __future__ import annotations

from pathlib import Path

import pytest

from ledger.errors import ConfigurationError
from pipeline.cli.options import open_signers
from signing.keys import ECDSA_P256
from signing.private_keys import ED25519, LOG_KEY_SUFFIX, generate


def test_an_ed25519_key_in_a_file_signs_everything(tmp_path: Path) -> None:
    made = generate(tmp_path / "key.pem")
    for uri in (str(tmp_path / "key.pem"), f"file:{tmp_path}/key.pem"):
        signers = open_signers(uri)
        assert (signers.signer.key_id, signers.log_signer.key_id) == (made.key_id, made.key_id)


def test_beside_a_p256_key_an_ed25519_key_signs_checkpoints_and_none_is_made(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    generate(path, ECDSA_P256)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        open_signers(str(path))
    assert [file.name for file in tmp_path.iterdir()] == ["key.pem"]
    log_key = generate(str(path) + LOG_KEY_SUFFIX)
    signers = open_signers(str(path))
    assert signers.signer.public_key.algorithm == ECDSA_P256
    assert (signers.log_signer.public_key.algorithm, signers.log_signer.key_id) == (ED25519, log_key.key_id)


@pytest.mark.parametrize("uri", [None, ""])
def test_without_a_key_it_is_said_how_to_name_one(uri: str | None) -> None:
    with pytest.raises(ConfigurationError, match="--signing-key"):
        open_signers(uri)
