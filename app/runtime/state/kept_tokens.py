"""What a node keeps of tokens beside its data: the first one, until the ledger knows it, and which were revoked.

    first-token.json   {"name", "digest"}     made by ``tally token new --first``; all rights for all tenants
    tokens.json        {"counting": [ids], "revoked": [ids]}

The first token counts while the ledger has none, from the file, and is issued as soon as the ledger takes it. A token
that this node knows as revoked stays so, whatever becomes of the database.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from app.runtime.state.kept_file import KeptFile


class FirstToken(msgspec.Struct, frozen=True):
    """Whose the first token is, and its SHA-256 in hex."""

    name: str
    digest: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class KeptTokens(msgspec.Struct, frozen=True):
    """Ids of tokens: those that counted when this was written, and all that were ever seen revoked."""

    counting: list[str] = []
    revoked: list[str] = []


FIRST_TOKEN: Final[KeptFile[FirstToken | None]] = KeptFile(
    "first-token.json", FirstToken | None, b"null", "remove it, and make a first token again"
)
KEPT_TOKENS: Final[KeptFile[KeptTokens]] = KeptFile(
    "tokens.json",
    KeptTokens,
    msgspec.json.encode(KeptTokens()),
    "restore it, or move it away: tokens that were revoked then count again if the database was put back",
)
