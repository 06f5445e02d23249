"""Session tokens: what a client shows to read its own writes.

A token names one durable write, so a reader can check that it sees it. Opaque to clients; inside, the
unpadded base64url form of::

    t1 {node_id} {epoch} {lsn} {hlc}

``node_id``, ``epoch`` and ``lsn`` are the write's position in a WAL, ``hlc`` its time. Example:
``t1 node-7f3a 3 17 1704931200000:1:node-7f3a``. A ``Tally-Session`` header holds one token or several,
separated by commas. A token carries no rights; a made-up one can only make its bearer wait.
"""

import base64
import binascii
import re
from typing import NamedTuple

from ledger.errors import InvalidInputError
from ledger.hlc import Hlc
from ledger.names import NODE_ID

SESSION_HEADER_BYTES_MAX = 4096
"""Longest ``Tally-Session`` header that is read."""
SESSION_TOKENS_MAX = 32
"""Most tokens in one header."""

_HEADER_PATH = ("Tally-Session",)
_PLAIN = re.compile(
    rf"t1 (?P<node>{NODE_ID}) (?P<epoch>[1-9][0-9]{{0,17}}) (?P<lsn>[1-9][0-9]{{0,17}})"
    r" (?P<hlc>[0-9]{1,19}:[0-9]{1,10}:[a-z0-9-]{1,63})"
)
_SEPARATOR = re.compile(r"[ \t]*,[ \t]*")


class Token(NamedTuple):
    """One write: LSN ``lsn`` of epoch ``epoch`` in the WAL of ``node_id``, stamped ``hlc`` (text form)."""

    node_id: str
    epoch: int
    lsn: int
    hlc: str

    def encode(self) -> str:
        """The opaque text a client is given."""
        plain = f"t1 {self.node_id} {self.epoch} {self.lsn} {self.hlc}".encode()
        return base64.urlsafe_b64encode(plain).rstrip(b"=").decode()


def decode(text: str) -> Token:
    """The token that ``text`` stands for.

    Raises:
        InvalidInputError: ``text`` was not made by ``Token.encode``.
    """
    try:
        plain = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True).decode("ascii")
    except (binascii.Error, ValueError):
        raise _malformed() from None
    match = _PLAIN.fullmatch(plain)
    if match is None:
        raise _malformed()
    try:
        Hlc.parse(match["hlc"])
    except InvalidInputError:
        raise _malformed() from None
    token = Token(match["node"], int(match["epoch"]), int(match["lsn"]), match["hlc"])
    if token.encode() != text:
        raise _malformed()
    return token


def decode_header(header: str | None) -> list[Token]:
    """The tokens of a ``Tally-Session`` header, in its order; none when there is no header.

    Raises:
        InvalidInputError: too long, too many, or one is malformed.
    """
    if not header:
        return []
    if len(header) > SESSION_HEADER_BYTES_MAX:
        raise InvalidInputError(f"longer than {SESSION_HEADER_BYTES_MAX} bytes", _HEADER_PATH)
    parts = _SEPARATOR.split(header.strip(" \t"))
    if len(parts) > SESSION_TOKENS_MAX:
        raise InvalidInputError(f"more than {SESSION_TOKENS_MAX} tokens", _HEADER_PATH)
    return [decode(part) for part in parts]


def _malformed() -> InvalidInputError:
    return InvalidInputError(
        "not a session token; send back the value of an earlier Tally-Session answer", _HEADER_PATH
    )
