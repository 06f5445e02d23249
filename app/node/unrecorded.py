"""What befell this node's log and ``_system`` does not record yet: a fork, and ranges of its WAL that were given up.

A process may end between such a thing and the entry that says so; the next start finds it in a file beside the WAL and
records it then::

    fork.json   {"from_origin", "to_origin", "reason", "node_id", "differing_count",
                 "differing": [{"tenant_id", "root_hash", "size"}]}
    lost.json   [[first_lsn, last_lsn], ...]

``differing`` are the checkpoints beside the WAL that the chains do not reach any more or do not fit: what was signed
and is not in the ledger. The first ``DIFFERING_LISTED_MAX`` are listed, all are counted.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Final

import msgspec

from app.node.kept_file import KeptFile
from signing.key_history import FORK_PREFIX

DIFFERING_LISTED_MAX: Final = 100


class SignedHead(msgspec.Struct, frozen=True):
    """A tree head that this node signed for one tenant; ``root_hash`` is lowercase hex."""

    tenant_id: str
    size: int
    root_hash: str


class Fork(msgspec.Struct, frozen=True):
    """Where the log went on under a new origin, and why."""

    from_origin: str
    to_origin: str
    reason: str
    node_id: str
    differing: list[SignedHead]
    differing_count: int

    @property
    def subject(self) -> str:
        """Names this fork in ``_system``; follows from the new origin alone."""
        return fork_subject(self.to_origin)

    def facts(self) -> dict[str, object]:
        """Fields of the LOG_FORKED entry."""
        facts: dict[str, object] = msgspec.to_builtins(self)
        return facts


def fork_subject(to_origin: str) -> str:
    """What the LOG_FORKED entry of the fork to ``to_origin`` is about."""
    return f"{FORK_PREFIX}{hashlib.sha256(to_origin.encode()).hexdigest()[:16]}"


_Lsn = Annotated[int, msgspec.Meta(ge=0)]
LsnRange = tuple[_Lsn, _Lsn]
"""First and last LSN; the last is below the first when nobody knows how much there was."""


_REMEDY: Final = "restore it, or move it away"
FORK: Final[KeptFile[Fork | None]] = KeptFile("fork.json", Fork | None, b"null", _REMEDY)
LOST: Final[KeptFile[list[LsnRange]]] = KeptFile("lost.json", list[LsnRange], b"[]", _REMEDY)
