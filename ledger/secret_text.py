"""Secrets as people hand them over: in variables, files and options, often with the end of a line behind them.

``tally token new > file`` and Kubernetes' ``--from-file`` leave that end. Any other control character is a mistake,
which a header, a URL or a login would turn into an error that quotes the secret. So it is refused here, by the name of
the character and of the place; no message has the secret.
"""

from __future__ import annotations

import re
from typing import Final

from ledger.errors import ConfigurationError

_LINE_ENDS: Final = "\r\n"
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_NAMES: Final = {
    "\0": "NUL",
    "\t": "a tab",
    "\n": "a line feed",
    "\r": "a carriage return",
    "\x1b": "an escape",
    "\x7f": "a delete",
}
_LOGIN: Final = re.compile(r"//[^/?#]*@")
_TOKEN: Final = re.compile(r"[!-~]{1,16384}")


def secret_text(value: str, place: str) -> str:
    """``value`` without line ends behind it; ``place`` says where it was found.

    Raises:
        ConfigurationError: it has a control character.
    """
    value = value.rstrip(_LINE_ENDS)
    found = control_character(value)
    if found is not None:
        raise ConfigurationError(f"{place} has {found} inside; its value is not repeated here")
    return value


def control_character(value: str) -> str | None:
    """The name of the first control character of ``value``, None where it has none."""
    found = _CONTROL.search(value)
    if found is None:
        return None
    return f"{_NAMES.get(found[0], 'a control character')} (U+{ord(found[0]):04X})"


def without_login(url: str) -> str:
    """``url`` without user and password."""
    return _LOGIN.sub("//", url)


def token_text(value: str, place: str) -> str:
    """The bearer token that ``value`` is, without what surrounds it; an empty one is returned as it is.

    Raises:
        ConfigurationError: it is no token.
    """
    value = value.strip()
    if value and _TOKEN.fullmatch(value) is None:
        found = control_character(value)
        reason = "" if found is None else f": it has {found} inside"
        raise ConfigurationError(f"{place} holds no token{reason}; a token is one word of ASCII")
    return value


def token_in(content: bytes, place: str) -> str:
    """The same of the content of a file."""
    try:
        return token_text(content.decode("ascii"), place)
    except UnicodeDecodeError:
        raise ConfigurationError(f"{place} holds no token; a token is one word of ASCII") from None
