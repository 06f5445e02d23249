"""What one ``tally verify`` is asked to verify, and against what."""

from __future__ import annotations

from dataclasses import dataclass

from signing.anchors import Outsiders
from signing.keys import Keyring
from signing.memory import Memory


@dataclass(frozen=True, slots=True)
class Request:
    """A tenant's chain, all of it or a range, and what the caller trusts."""

    tenant: str
    from_seq: int | None
    to_seq: int | None
    keyring: Keyring | None
    """None when no keys were given: then nobody vouches for what is found."""
    kept: str | None
    """Text of a checkpoint kept elsewhere."""
    outsiders: Outsiders
    memory: Memory | None = None
    """What was verified before, None when nothing is to be remembered."""
