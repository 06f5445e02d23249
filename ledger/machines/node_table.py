"""The nodes of a tenant as of one seq: what each has, what is reserved of it, and what is free.

It holds no active commitments, so its size is that of the cluster. An entry that revokes comes with the commitment that
it ends.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any

import msgspec

from ledger.machines.commitment_state import NodeState, change_capacity, change_reserved, claims_of
from ledger.machines.promises import (
    RULES_NEWEST,
    Capacity,
    Commitment,
    Proposal,
    Revocation,
    RulesVersion,
)


@dataclass(frozen=True, slots=True)
class ListedNode:
    """One node of known capacity."""

    index: int
    """Seq of the entry that set its capacity."""
    name: str
    known: NodeState
    rules: int

    def to_json(self) -> dict[str, Any]:
        """The item of ``GET /v1/nodes``."""
        known, rules = self.known, self.rules
        assert known.capacity is not None
        excess = msgspec.to_builtins(known.excess(rules))
        return {
            "index": self.index,
            "node": self.name,
            "capacity": msgspec.to_builtins(known.capacity),
            "overcommit": {} if known.overcommit is None else msgspec.to_builtins(known.overcommit),
            "reserved": msgspec.to_builtins(known.reserved_amounts()),
            "free": msgspec.to_builtins(known.free([name for name, _ in known.capacity.amounts()], rules)),
            "overbooked": bool(excess),
            "excess": excess,
        }


class NodeTable:
    """The table as of ``seq``. It is filled by the methods ``take...`` and not changed once it is read."""

    def __init__(self, seq: int = 0, rules: int | None = None) -> None:
        """``rules`` are in force at ``seq``; None if the entries that are taken tell."""
        self.seq = seq
        self._rules = rules
        self._nodes: dict[str, NodeState] = {}
        self._indexes: dict[str, int] = {}
        self._overbooked: set[str] = set()

    def copy(self) -> NodeTable:
        """A table that can take the entries behind ``seq``."""
        other = NodeTable(self.seq, self._rules)
        other._nodes = dict(self._nodes)
        other._indexes = dict(self._indexes)
        other._overbooked = set(self._overbooked)
        return other

    @property
    def rules(self) -> int:
        """The version of the rules in force; of a tenant without commitments, the one that it would start with."""
        return RULES_NEWEST if self._rules is None else self._rules

    def take_capacity(self, index: int, said: Capacity) -> None:
        """Take the entry at ``index``, which sets the capacity of a node."""
        self._begin(said.rules)
        change_capacity(self._nodes, said)
        self._indexes[said.node] = index
        self._compare(said.node)

    def take_proposal(self, accepted: Proposal, ended: Commitment | None) -> None:
        """Take an accepted proposal; ``ended`` is the commitment that it revokes."""
        self._begin(accepted.rules)
        commitment = accepted.commitment
        if type(commitment) is RulesVersion:
            self._rules = commitment.version
            for node in self._indexes:
                self._compare(node)
        elif type(commitment) is Revocation:
            if ended is not None:
                self._change(ended, -1)
        else:
            self._change(commitment, 1)

    def _begin(self, rules: int) -> None:
        if self._rules is None:
            self._rules = rules

    def _change(self, commitment: Commitment, sign: int) -> None:
        for node, claimed in claims_of(commitment).items():
            change_reserved(self._nodes, node, claimed, sign)
            self._compare(node)

    def _compare(self, node: str) -> None:
        """Compare what is reserved of the node with its limit."""
        known = self._nodes.get(node)
        if known is not None and known.capacity is not None and known.excess(self.rules).amounts():
            self._overbooked.add(node)
        else:
            self._overbooked.discard(node)

    # --- reading ----------------------------------------------------------------------------------

    def __len__(self) -> int:
        """How many nodes are known, also those without a capacity."""
        return len(self._nodes)

    @property
    def overbooked_count(self) -> int:
        """Of how many nodes more is reserved than their limit."""
        return len(self._overbooked)

    @cached_property
    def _order(self) -> Sequence[tuple[int, str]]:
        """Index and name of each node of known capacity."""
        return sorted((index, name) for name, index in self._indexes.items())

    def page(self, after: int, limit: int, *, overbooked: bool = False) -> list[ListedNode]:
        """At most ``limit`` nodes of known capacity, of an index above ``after``: all, or those that are overbooked."""
        nodes = sorted((self._indexes[name], name) for name in self._overbooked) if overbooked else self._order
        begin = bisect_right(nodes, after, key=itemgetter(0))
        return [ListedNode(index, name, self._nodes[name], self.rules) for index, name in nodes[begin : begin + limit]]
