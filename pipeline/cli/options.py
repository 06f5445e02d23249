"""Options that several pipeline commands share, with one spelling and one help text."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from ledger.errors import ConfigurationError
from ledger.text import secret_text
from signing import private_keys
from signing.keys import ED25519, Keyring, Signer
from signing.private_keys import FileSigner
from terminal.program import KEYS_HELP

if TYPE_CHECKING:
    from pipeline.merge.deciding import Signers


DSN_VARIABLE: Final = "TALLY_PIPELINE_DSN"
"""Set by ``tally pipeline`` to the local service's database."""
NO_DSN_VARIABLE: Final = "TALLY_PIPELINE_NO_DSN"
"""Set instead to the reason why there is no local database."""
SIGNING_KEY_VARIABLE: Final = "TALLY_PIPELINE_SIGNING_KEY"
ARCHIVE_VARIABLE: Final = "TALLY_PIPELINE_ARCHIVE"
LOCK_VARIABLE: Final = "TALLY_PIPELINE_ARCHIVE_LOCK"
"""Holds the setting ``archive.lock``, for an archive in S3."""
ARCHIVE_HELP: Final = "Where the archive is: a folder, or s3://BUCKET/PATH, gs:// or az://."

Master = Annotated[
    str | None,
    typer.Option(
        "--master",
        show_default="local[*]",
        help="Spark master, such as local[4] or spark://host:7077; under spark-submit what that says.",
    ),
]
SigningKey = Annotated[
    str | None,
    typer.Option(
        "--signing-key",
        envvar=SIGNING_KEY_VARIABLE,
        show_default="the local service's",
        help="Key that signs what is written, as signing.key_uri: file:PATH or a signer of an HSM, Vault or cloud.",
    ),
]
Tenants = Annotated[
    list[str] | None, typer.Option("--tenant", "-t", show_default="all", help="Only this one; may be repeated.")
]
_KEYS: Final = typer.Option(
    "--keys",
    help=f"{KEYS_HELP}; may be repeated.",
)
Keys = Annotated[list[Path] | None, _KEYS]
RequiredKeys = Annotated[list[Path], _KEYS]


def load_keys(paths: Sequence[Path]) -> Keyring:
    """The keys in all of ``paths``.

    Raises:
        ConfigurationError: a file cannot be read, or holds no key.
    """
    return Keyring.merged([Keyring.load(path) for path in paths])


PIN_VARIABLE: Final = "TALLY_PIPELINE_SIGNING_PIN"
"""Holds the PIN of an HSM."""


def open_signers(uri: str | None) -> Signers:
    """The existing signers that ``uri`` names, in the form of ``signing.key_uri``. For a P-256 key in a file, the
    Ed25519 key beside it signs checkpoints.

    Raises:
        ConfigurationError: the signer does not exist, or cannot be used for checkpoints.
        SigningUnavailableError: a signer outside of files does not answer.
    """
    from pipeline.merge.deciding import Signers

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
