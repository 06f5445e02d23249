"""The keys that a pipeline command signs with: as the service's, a file or a signer of an HSM, Vault or cloud."""

from __future__ import annotations

import os
from typing import Final, NamedTuple

from ledger.errors import ConfigurationError
from ledger.secret_text import secret_text
from signing import private_keys
from signing.keys import ED25519, Signer
from signing.private_keys import FileSigner

PIN_VARIABLE: Final = "TALLY_PIPELINE_SIGNING_PIN"
"""Where the PIN of an HSM comes from."""


class Signers(NamedTuple):
    """``signer`` signs statements, ``log_signer``, which is of Ed25519, checkpoints."""

    signer: Signer
    log_signer: Signer


def open_signers(uri: str | None) -> Signers:
    """The signers that ``uri`` names, as ``signing.key_uri`` does. None is made; of a P-256 key in a file the Ed25519
    key beside it signs checkpoints.

    Raises:
        ConfigurationError: there is none, or it cannot be used for checkpoints.
        SigningUnavailableError: a signer outside of files does not answer.
    """
    signer = open_signer(uri)
    if signer.public_key.algorithm == ED25519:
        return Signers(signer, signer)
    if not isinstance(signer, FileSigner):
        raise ConfigurationError(f"checkpoints are signed with {ED25519}, and {uri} is another kind of key")
    return Signers(signer, private_keys.log_signer(signer, may_generate=False))


def open_signer(uri: str | None) -> Signer:
    """The signer that ``uri`` names, for statements alone; raises as ``open_signers``."""
    if not uri:
        raise ConfigurationError("name the key to sign with: --signing-key file:PATH")
    return private_keys.fetch(uri, _pin) if private_keys.is_remote(uri) else private_keys.load(uri)


def _pin() -> str:
    pin = secret_text(os.environ.get(PIN_VARIABLE, ""), PIN_VARIABLE)
    if not pin:  # A token counts wrong PINs, so none is guessed.
        raise ConfigurationError(f"{PIN_VARIABLE} is not set, and the HSM that holds the signing key asks for its PIN")
    return pin
