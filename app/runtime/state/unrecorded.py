"""What befell this node's log and ``_system`` does not record yet: a fork, ranges of its WAL that were given up, and
files of it that were set aside and may hold records that were answered.

A process may end between such a thing and the entry that says so; the next start finds it in a file beside the WAL and
records it then::

    fork.json   {"from_origin", "to_origin", "reason", "node_id", "differing_count",
                 "differing": [{"tenant_id", "root_hash", "size"}]}
    lost.json   [[first_lsn, last_lsn], ...]
    aside.json  {"lost-1": {"chained_lsn", "is_known"}}

``lost.json`` has what the start misses; what of it is found in files that ``aside.json`` names is not lost.

``differing`` are the checkpoints beside the WAL that the chains do not reach any more or do not fit: what was signed
and is not in the ledger. The first ``DIFFERING_LISTED_MAX`` are listed, all are counted.
"""

from __future__ import annotations

import hashlib
from typing import Final

import msgspec

from app.runtime.state.kept_file import KeptFile
from app.runtime.state.lsn_ranges import LsnRange
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


class Aside(msgspec.Struct, frozen=True):
    """A log that was set aside, in a folder of this name, or under ``CUT`` the ends that a start cut off."""

    chained_lsn: int
    """All up to here is chained, but for what was held back, by its control file or by Postgres."""
    is_known: bool
    """Whether it is the WAL that Postgres knows; else nothing of ``lost.json`` is found in it."""


CUT: Final = "cut"
_REMEDY: Final = "restore it, or move it away"
FORK: Final[KeptFile[Fork | None]] = KeptFile("fork.json", Fork | None, b"null", _REMEDY)
LOST: Final[KeptFile[list[LsnRange]]] = KeptFile("lost.json", list[LsnRange], b"[]", _REMEDY)
ASIDE: Final[KeptFile[dict[str, Aside]]] = KeptFile("aside.json", dict[str, Aside], b"{}", _REMEDY)
