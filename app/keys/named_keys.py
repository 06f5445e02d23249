"""Keys that a caller names: only those that ``signing.uris_allowed`` leaves to be named.

An entry is a folder, whose key files may be named, or the beginning of a URI outside of files that ends with ``:`` or
``/``, or such a URI itself. A file is taken when it lies in the folder itself, no link leads out of it, and it is this
user's. Every other file is answered alike, whether or not it is there and whatever it holds: the log says why.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import structlog

from app.keys.node_keys import LocalOrRemote, open_signer
from ledger.errors import ConfigurationError, InvalidInputError
from signing import remote_signer
from signing.private_file import path_of

log = structlog.get_logger()


def open_named(uri: str, allowed: Sequence[str], pin: remote_signer.PinSource) -> LocalOrRemote:
    """The signer that a caller named by ``uri``. Blocks.

    Raises:
        InvalidInputError: it may not be named, or there is no such key.
        SigningUnavailableError: it may, and the signer does not answer.
    """
    if remote_signer.is_remote(uri):
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
        OSError, RuntimeError: it cannot be looked at.
    """
    path = Path(os.path.abspath(path_of(uri)))
    folders = [Path(os.path.abspath(path_of(entry))) for entry in allowed if not remote_signer.is_remote(entry)]
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
