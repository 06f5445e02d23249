"""Options that several pipeline commands share, with one spelling and one help text."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import typer

from ledger.errors import ConfigurationError, InvalidInputError
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
ARCHIVE_HELP: Final = "Where the archive is: a folder, or s3://BUCKET/PATH, gs:// or az://."

Master = Annotated[
    str | None,
    typer.Option(
        "--master",
        show_default="local[*]",
        help="Spark master, such as local[4] or spark://host:7077; under spark-submit what that says.",
    ),
]
Dsn = Annotated[
    str | None,
    typer.Option("--dsn", envvar=DSN_VARIABLE, show_default="the local service's", help="PostgreSQL of the ledger."),
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
Archive = Annotated[
    str | None,
    typer.Option("--archive", metavar="URL", envvar=ARCHIVE_VARIABLE, show_default="archive.url", help=ARCHIVE_HELP),
]
AnyArchive = Annotated[str | None, typer.Option("--archive", metavar="URL", help=ARCHIVE_HELP)]
"""For commands that read an archive only if it is named."""
Bundles = Annotated[list[Path] | None, typer.Option("--bundle", metavar="FILE...", help="Bundle files, any number.")]
MoreBundles = Annotated[list[Path] | None, typer.Argument(hidden=True, metavar="--bundle FILE")]
"""The files after the first in ``--bundle FILE...``, as a shell expands a pattern."""
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


class NamedPlace(NamedTuple):
    """The place that a command reads from, according to its options."""

    option: str
    """``--dsn``, ``--archive`` or ``--bundle``."""
    names: list[str]
    """A database, an archive, or bundle files."""


def named_place(
    context: typer.Context,
    dsn: str | None,
    archive: str | None,
    bundles: Sequence[Path] | None,
    more_bundles: Sequence[Path] | None,
    tenants: Sequence[str] | None,
) -> NamedPlace:
    """The one place that these options name; an option on the command line overrides a DSN of the environment.

    Raises:
        InvalidInputError: the options name no place, several places, or tenants of bundles.
    """
    source = context.get_parameter_source("dsn")
    is_dsn_given = source is not None and source.name == "COMMANDLINE"  # It may be in the environment, too.
    if sum((is_dsn_given, archive is not None, bool(bundles))) > 1:
        raise InvalidInputError("name one place: --dsn, --archive or --bundle")
    if more_bundles and not bundles:
        raise InvalidInputError(f"{str(more_bundles[0])!r} is no option; bundles are named with --bundle FILE...")
    if bundles and tenants:
        raise InvalidInputError("--tenant goes with --dsn and --archive; a bundle is of one tenant")
    if bundles:
        return NamedPlace("--bundle", [str(file) for file in (*bundles, *(more_bundles or ()))])
    if archive is not None:
        return NamedPlace("--archive", [archive])
    if not dsn:
        raise no_dsn("name the ledger: --dsn postgresql://..., --archive URL or --bundle FILE")
    return NamedPlace("--dsn", [dsn])


def no_dsn(asked: str) -> InvalidInputError:
    """The error if no database is named, with the reason why the local service has none, if known."""
    reason = os.environ.get(NO_DSN_VARIABLE)
    return InvalidInputError(f"{asked} ({reason})" if reason else asked)
