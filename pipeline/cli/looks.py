"""What the verifier remembers of the ledgers of a place, and what it is to remember: see ``signing.memory``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from ledger.errors import ArchiveInvalidError
from ledger.verification.tree_check import TreeHead
from pipeline.places import OpenPlace
from signing.checkpoint import judge_checkpoint
from signing.keys import Keyring
from signing.memory import Look, Memory, Seen


class Looks:
    """One look at each tenant of a database or an archive."""

    def __init__(
        self, opened: OpenPlace, tenants: Sequence[str], keyring: Keyring | None, memory: Memory | None
    ) -> None:
        """Without keys nobody vouches for a checkpoint, and without a memory there is nothing to compare with."""
        self._looks: dict[str, Look] = {}
        self._keyring, self._memory = keyring, memory
        if keyring is None or memory is None:
            return
        for tenant in tenants:
            try:
                newest = next(reversed(opened.sealed(tenant)), None)
            except ArchiveInvalidError:
                continue  # Its verification says so.
            note, to_seq = (None, None) if newest is None else (newest.checkpoint, newest.to_seq)
            self._looks[tenant] = Look.at(
                memory, tenant, note, keyring, datetime.now(UTC), to_seq=to_seq, is_file=to_seq is not None
            )

    def heads(self, tenant: str) -> list[TreeHead]:
        """Tree heads that the entries of ``tenant`` must agree with."""
        look = self._looks.get(tenant)
        return [] if look is None else look.heads

    def gone(self, held: Collection[str]) -> list[Seen]:
        """What was verified before of tenants that are not among ``held``, which are all that the ledger has: of logs
        named as its others are, that a given key signed."""
        seen = (each for look in self._looks.values() for each in (look.now, *look.before) if each is not None)
        bases = {each.checkpoint.origin.rpartition("/")[0] for each in seen}
        if self._keyring is None or self._memory is None:
            return []
        present = {*held}
        return [
            each
            for (origin, _), each in sorted(self._memory.logs.items())
            if origin.rpartition("/")[0] in bases
            and origin.rpartition("/")[2] not in present
            and judge_checkpoint(each.note, self._keyring).unknown is None
        ]

    def told(self, verdict: Mapping[str, Any]) -> dict[str, Any]:
        """The verdict object of a tenant with what the look at it came to."""
        look = self._looks.get(verdict["tenant_id"])
        return {**verdict} if look is None else look.with_verdict(verdict)
