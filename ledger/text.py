"""Text from people and for people: secrets as given, shortened lists, and text that is safe for a terminal.

Secrets come in variables, files and options, often with a line end after them: ``tally token new > file`` and
Kubernetes' ``--from-file`` leave one. Any other control character is a mistake; in a header, a URL or a login it would
cause an error that quotes the secret. So it is refused here. The message names the character and the place, never the
secret.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
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
    """``value`` without trailing line ends; ``place`` is its source, for the error text.

    Raises:
        ConfigurationError: it has a control character.
    """
    value = value.rstrip(_LINE_ENDS)
    if (found := control_character(value)) is not None:
        raise ConfigurationError(f"{place} has {found} inside; its value is not repeated here")
    return value


def control_character(value: str) -> str | None:
    """The name of the first control character of ``value``, None where it has none."""
    found = _CONTROL.search(value)
    return None if found is None else f"{_NAMES.get(found[0], 'a control character')} (U+{ord(found[0]):04X})"


def without_login(url: str) -> str:
    """``url`` without user and password."""
    return _LOGIN.sub("//", url)


def token_text(value: str, place: str) -> str:
    """The bearer token in ``value``, without surrounding space; an empty one is returned as it is.

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
    """As ``token_text``, for the content of a file."""
    try:
        return token_text(content.decode("ascii"), place)
    except UnicodeDecodeError:
        raise ConfigurationError(f"{place} holds no token; a token is one word of ASCII") from None


# --- text for people ------------------------------------------------------------------------------

_UNSHOWN: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except tab and newline, characters that change text direction, and lone surrogates."""


def printable(text: str) -> str:
    """``text`` with characters that move, colour or reorder output escaped as ``\\x1b`` or ``\\u202e``."""
    return _UNSHOWN.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def first_of(texts: Sequence[str], count_max: int, separator: str = ", ") -> str:
    """The first ``count_max`` of ``texts``, joined; if there are more, with their number. Empty if there are none."""
    named = separator.join(texts[:count_max])
    if len(texts) <= count_max:
        return named
    link = separator if separator != ", " else " "
    return f"{named}{link}and {len(texts) - count_max} more"
