"""What must hold a write before it counts as committed."""

from __future__ import annotations

from enum import StrEnum


class AckMode(StrEnum):
    """``wal.ack_mode``. With the local ones members keep copies; with the others they vote."""

    LOCAL_ASYNC = "LOCAL_ASYNC"
    LOCAL_GROUP_SYNC = "LOCAL_GROUP_SYNC"
    LOCAL_SYNC = "LOCAL_SYNC"
    REPLICATED_QUORUM = "REPLICATED_QUORUM"
    REPLICATED_ALL = "REPLICATED_ALL"

    @property
    def is_replicated(self) -> bool:
        """Whether nothing is committed that other machines do not hold."""
        return self in (AckMode.REPLICATED_QUORUM, AckMode.REPLICATED_ALL)
