"""What files of a ledger are held against when they are verified offline, as the options of a command name it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from signing.anchors import ExternalWitnesses
from signing.checkpoint import JudgedCheckpoint, judge_checkpoint, read_kept
from signing.keys import Keyring
from signing.memory import Memory, memory_of


class Trusted(NamedTuple):
    """Keys, a checkpoint that was kept, what is remembered of logs, and outsiders; None is what was not given."""

    keyring: Keyring | None
    kept: JudgedCheckpoint | None
    memory: Memory | None
    outsiders: ExternalWitnesses

    @classmethod
    def load(
        cls,
        keys: Path | None,
        checkpoint: Path | None,
        witness_keys: list[str] | None,
        tsa_ca: Path | None,
        *,
        state: Path | None,
        no_state: bool,
    ) -> Trusted:
        """Read what the options name; without keys nothing is remembered.

        Raises:
            InvalidInputError: a file is none of its kind.
            OSError: a file cannot be read.
        """
        keyring = Keyring.load(keys) if keys is not None else None
        kept = judge_checkpoint(read_kept(checkpoint), keyring) if checkpoint is not None else None
        memory = memory_of(state, is_off=no_state or keyring is None)
        return cls(keyring, kept, memory, ExternalWitnesses.load(witness_keys or [], tsa_ca))
