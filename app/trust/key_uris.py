"""Keys by URI: how they are opened, where new ones go, and which a caller may name.

A caller names only what ``signing.uris_allowed`` leaves to be named. An entry of it is a folder, whose key files may be
named, or the beginning of a URI outside of files that ends with ``:`` or ``/``, or such a URI itself. A file is taken
when it lies in the folder itself, no link leads out of it, and it is this user's. Every other file is answered alike,
whether or not it is there and whatever it holds: the log says why.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import structlog

from app.runtime.settings.config import Settings
from ledger.errors import ConfigurationError, InvalidInputError
from signing import private_keys
from signing.files import path_of
from signing.private_keys import FileSigner

LOG_KEY_NAME = "log-key"
"""What the file of a log key is called that stands beside no key file, without its suffix."""

LocalOrRemote = FileSigner | private_keys.RemoteSigner

log = structlog.get_logger()


def open_signer(uri: str, pin: private_keys.PinSource, *, may_generate: bool) -> LocalOrRemote:
    """The signer that ``uri`` names; the public key of one outside of files is fetched, which blocks.

    Raises:
        ConfigurationError: the key cannot be used.
        SigningUnavailableError: the signer does not answer.
    """
    if private_keys.is_remote(uri):
        return private_keys.fetch(uri, pin)
    return private_keys.load_or_generate(uri) if may_generate else private_keys.load(uri)


def log_signer_of(signer: LocalOrRemote, settings: Settings) -> FileSigner:
    """The key of checkpoints that goes with ``signer``: the same if it can be, else a file of its own."""
    if isinstance(signer, FileSigner):
        return private_keys.log_signer(signer)
    return private_keys.load_or_generate(str(settings.data_dir / "keys" / f"{LOG_KEY_NAME}.pem"))


def new_key_path(configured: str) -> Path:
    """A file for a new key beside the configured one, named by the time."""
    path = path_of(configured)
    return path.with_name(f"{path.stem}-{time.time_ns() // 1_000_000}{path.suffix}")


def log_key_beside(configured: str, settings: Settings) -> Path:
    """A file for a new log key: beside the configured key, else below ``data_dir``."""
    if private_keys.is_remote(configured):
        folder = settings.data_dir / "keys"
        return folder / f"{LOG_KEY_NAME}-{time.time_ns() // 1_000_000}.pem"
    path = path_of(configured)
    return path.with_name(f"{path.stem}.{LOG_KEY_NAME}-{time.time_ns() // 1_000_000}.pem")


def file_of(uri: str, configured: str) -> Path:
    """The file of ``uri``: a bare name stands beside the configured key."""
    path = path_of(uri)
    if path.parent == Path() and not uri.startswith("file:") and not private_keys.is_remote(configured):
        return path_of(configured).with_name(path.name)
    return path


# --- named by a caller ----------------------------------------------------------------------------


def open_named(uri: str, allowed: Sequence[str], pin: private_keys.PinSource) -> LocalOrRemote:
    """The signer that a caller named by ``uri``. Blocks.

    Raises:
        InvalidInputError: it may not be named, or there is no such key.
        SigningUnavailableError: it may, and the signer does not answer.
    """
    if private_keys.is_remote(uri):
        if not any(_covers(entry, uri) for entry in allowed):
            raise _refused()
        try:
            return open_signer(uri, pin, may_generate=False)
        except ConfigurationError as error:
            raise InvalidInputError(f"new_key_uri: {error}", ("new_key_uri",)) from error
    try:
        return open_signer(str(_named_file(uri, allowed)), pin, may_generate=False)
    except (ConfigurationError, OSError, RuntimeError) as error:
        log.warning("new_key_refused", uri=uri, reason=str(error))
        raise _refused() from None


def _covers(entry: str, uri: str) -> bool:
    """Whether the entry, of any kind, is this URI outside of files, or a beginning of it."""
    entry, uri = (scheme.lower() + ":" + rest for scheme, _, rest in (each.partition(":") for each in (entry, uri)))
    return uri == entry or (entry.endswith((":", "/")) and uri.startswith(entry))


def _named_file(uri: str, allowed: Sequence[str]) -> Path:
    """The file that the URI names.

    Raises:
        ConfigurationError: none that may be named.
        OSError, RuntimeError: it cannot be checked.
    """
    path = Path(os.path.abspath(path_of(uri)))
    folders = [Path(os.path.abspath(path_of(entry))) for entry in allowed if not private_keys.is_remote(entry)]
    if path.parent not in folders:
        raise ConfigurationError("it lies in no folder of signing.uris_allowed")
    real = path.resolve(strict=True)
    if real.parent != path.parent.resolve():
        raise ConfigurationError(f"it leads to {real}")
    if real.stat().st_uid != os.geteuid():
        raise ConfigurationError(f"user {real.stat().st_uid} owns it, not this service's")
    return real


def _refused() -> InvalidInputError:
    return InvalidInputError(
        "new_key_uri: signing.uris_allowed leaves no such key to be named; its folder needs the key in a file of this "
        "service's user, mode 0600; the log says more",
        ("new_key_uri",),
    )
