"""Session tokens, by which a client reads its own writes.

A token names one durable write, so a reader can check that it sees it. Opaque to clients; inside, the unpadded
base64url form of::

    t2 {node_id} {epoch} {lsn} {hlc}, then 16 bytes: the first of HMAC-SHA256 over all before them

``node_id``, ``epoch`` and ``lsn`` are the write's position in a WAL, ``hlc`` its time, the key is the secret of the
ledger, which its nodes share. Example of the text: ``t2 node-7f3a 3 17 1704931200000:1:node-7f3a``. A
``Tally-Session`` header holds one token or several, separated by commas. A token carries no rights. A token that no
node of the ledger made is refused, so a token moves a clock, or makes its bearer wait, only for real writes.
"""

import base64
import binascii
import hmac
import re
from typing import NamedTuple

from ledger.errors import InvalidInputError
from ledger.hlc import Hlc
from ledger.names import NODE_ID
from ledger.positions import Epoch, Lsn

SESSION_HEADER_BYTES_MAX = 4096
"""Longest ``Tally-Session`` header that is accepted."""
SESSION_TOKENS_MAX = 32
"""Most tokens in one header."""
SECRET_BYTES = 32
MAC_BYTES = 16

_HEADER_PATH = ("Tally-Session",)
_PLAIN = re.compile(
    rf"t2 (?P<node>{NODE_ID}) (?P<epoch>[1-9][0-9]{{0,17}}) (?P<lsn>[1-9][0-9]{{0,17}})"
    r" (?P<hlc>[0-9]{1,19}:[0-9]{1,10}:[a-z0-9-]{1,63})"
)


class Token(NamedTuple):
    """One write: LSN ``lsn`` of epoch ``epoch`` in the WAL of ``node_id``, stamped ``hlc`` (text form)."""

    node_id: str
    epoch: Epoch
    lsn: Lsn
    hlc: str


class SessionTokens:
    """Makes and reads the tokens of one ledger, whose ``secret`` binds them."""

    def __init__(self, secret: bytes) -> None:
        assert len(secret) == SECRET_BYTES
        self._keyed = hmac.new(secret, digestmod="sha256")

    def encode(self, token: Token) -> str:
        """The opaque text a client is given; equal tokens give equal text."""
        plain = f"t2 {token.node_id} {token.epoch} {token.lsn} {token.hlc}".encode()
        return base64.urlsafe_b64encode(plain + self._mac(plain)).rstrip(b"=").decode()

    def decode(self, text: str) -> Token:
        """The token that ``text`` encodes.

        Raises:
            InvalidInputError: ``text`` is not what ``encode`` made with this secret.
        """
        try:
            whole = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            raise _malformed() from None
        if base64.urlsafe_b64encode(whole).rstrip(b"=").decode() != text:
            raise _malformed()
        plain, mac = whole[:-MAC_BYTES], whole[-MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(plain)):
            raise InvalidInputError(
                "not a session token of this ledger, or one from before its tokens were signed; drop it, and read on "
                "with the token of the next write",
                _HEADER_PATH,
            )
        match = _PLAIN.fullmatch(plain.decode("ascii", "replace"))
        if match is None:
            raise _malformed()
        try:
            Hlc.parse(match["hlc"])
        except InvalidInputError:
            raise _malformed() from None
        return Token(match["node"], Epoch(int(match["epoch"])), Lsn(int(match["lsn"])), match["hlc"])

    def decode_header(self, header: str | None) -> list[Token]:
        """The tokens of a ``Tally-Session`` header, in its order; none when there is no header.

        Raises:
            InvalidInputError: too long, too many, or a token is not of this ledger.
        """
        if not header:
            return []
        if len(header) > SESSION_HEADER_BYTES_MAX:
            raise InvalidInputError(f"longer than {SESSION_HEADER_BYTES_MAX} bytes", _HEADER_PATH)
        parts = re.split(r"[ \t]*,[ \t]*", header.strip(" \t"))
        if len(parts) > SESSION_TOKENS_MAX:
            raise InvalidInputError(f"more than {SESSION_TOKENS_MAX} tokens", _HEADER_PATH)
        return [self.decode(part) for part in parts]

    def _mac(self, plain: bytes) -> bytes:
        keyed = self._keyed.copy()
        keyed.update(plain)
        return keyed.digest()[:MAC_BYTES]


def _malformed() -> InvalidInputError:
    return InvalidInputError(
        "not a session token; send back the value of an earlier Tally-Session answer", _HEADER_PATH
    )
