"""What the commitment machine knows: the active commitments, and what they reserve of each node.

The tables of ``LiveState`` are any mappings: dicts in a node and in verification, overlays while a batch is judged, a
file in the simulator.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any, Final, NamedTuple

from ledger import canonical
from ledger.machines.promises import ANY_ACCELERATOR, Capacity, Commitment, Overcommit, Resources, members_of

CAPACITY_BINDS_FROM: Final = 2
"""The first rules by which no claim goes beyond a known capacity, a node can be overcommitted, and no adjustment is of
an older epoch than the newest."""


class NodeState(NamedTuple):
    """The known state of one node."""

    capacity: Resources | None
    reserved: dict[str, int]
    """Claims of active commitments by dimension, without zeros. Never changed in place."""
    overcommit: Overcommit | None = None

    def limit(self, dimension: str, rules: int) -> int:
        """The most that may be reserved in a dimension; the capacity is known."""
        assert self.capacity is not None
        amount = self.capacity.of(dimension)
        if self.overcommit is None or rules < CAPACITY_BINDS_FROM:
            return amount
        return self.overcommit.limit(dimension, amount)

    def reserved_amounts(self) -> Resources:
        """What is reserved, accelerators by name."""
        return _resources((name, amount) for name, amount in self.reserved.items() if name != ANY_ACCELERATOR)

    def free(self, dimensions: Iterable[str], rules: int) -> Resources:
        """What may still be reserved in these dimensions; the capacity is known."""
        return _resources((name, self.limit(name, rules) - self.reserved.get(name, 0)) for name in dimensions)

    def excess(self, rules: int) -> Resources:
        """What is reserved beyond the limit; the node is overbooked if that is anything. The capacity is known."""
        beyond = {
            name: amount - self.limit(name, rules) for name, amount in self.reserved.items() if name != ANY_ACCELERATOR
        }
        return _resources((name, amount) for name, amount in beyond.items() if amount > 0)


class Neighbours(NamedTuple):
    """The indexes of the previous and next active commitment of one subject; 0 if there is none."""

    older: int
    newer: int


class LiveState(NamedTuple):
    """All state that judging needs: it grows with active commitments, not with history. Any mappings may be used."""

    active: MutableMapping[int, Commitment]
    """By index."""
    holders: MutableMapping[str, int]
    """Index of the holder of a name: ``capsule:NAME`` the placement, ``gang:NAME``, ``identity:CAPSULE`` the bind."""
    nodes: MutableMapping[str, NodeState]
    newest: MutableMapping[str, int]
    """Index of the newest claim of ``node:NAME``, of the newest adjustment of ``module:MISSION/NAME``."""
    neighbours: MutableMapping[tuple[str, int], Neighbours]
    """By subject and index."""
    rules: MutableMapping[str, int]
    """The version of the rules in force, under ``RULES``; empty until a first entry sets it."""


class Overlay(MutableMapping[Any, Any]):
    """Changes to a table, held separately until ``commit``."""

    __slots__ = ("_base", "_changed")

    def __init__(self, base: MutableMapping[Any, Any]) -> None:
        self._base = base
        self._changed: dict[Any, Any] = {}

    def __getitem__(self, key: Any) -> Any:
        if (value := self.get(key, _GONE)) is _GONE:
            raise KeyError(key)
        return value

    def get(self, key: Any, default: Any = None) -> Any:
        if (value := self._changed.get(key, _UNCHANGED)) is _UNCHANGED:
            return self._base.get(key, default)
        return default if value is _GONE else value

    def __setitem__(self, key: Any, value: Any) -> None:
        self._changed[key] = value

    def __delitem__(self, key: Any) -> None:
        self._changed[key] = _GONE

    def __iter__(self) -> Iterator[Any]:
        return (key for key in {**self._base, **self._changed} if key in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def commit(self) -> None:
        """Make the changes in the table below."""
        for key, value in self._changed.items():
            if value is _GONE:
                self._base.pop(key, None)
            else:
                self._base[key] = value
        self._changed = {}


_GONE: Final = object()
_UNCHANGED: Final = object()


def overlaid(state: Iterable[Any]) -> LiveState:
    """An overlay of ``state``: ``commit`` makes its changes in ``state``; without it they are dropped."""
    return LiveState(*map(Overlay, state))


def commit(state: Iterable[Any]) -> None:
    """Make the changes of an overlay from ``overlaid`` in the state below."""
    for table in state:
        assert isinstance(table, Overlay)
        table.commit()


def claims_of(commitment: Commitment) -> dict[str, dict[str, int]]:
    """The commitment's claims by node and dimension; accelerators by name and in total."""
    claims: dict[str, dict[str, int]] = {}
    for member in members_of(commitment):
        claimed = claims.setdefault(member.node, {})
        for name, amount in member.reservation.amounts():
            for dimension in (name, ANY_ACCELERATOR) if name.startswith(ANY_ACCELERATOR) else (name,):
                claimed[dimension] = claimed.get(dimension, 0) + amount
    return claims


def change_capacity(nodes: MutableMapping[str, NodeState], said: Capacity) -> None:
    """Set the capacity of a node, and keep what is reserved there."""
    known = nodes.get(said.node)
    nodes[said.node] = NodeState(said.capacity, {} if known is None else known.reserved, said.overcommit)


def change_reserved(nodes: MutableMapping[str, NodeState], node: str, claimed: dict[str, int], sign: int) -> None:
    """Reserve what is claimed of a node, or give it back where ``sign`` is -1."""
    known = nodes.get(node) or NodeState(None, {})
    changed = {dimension: known.reserved.get(dimension, 0) + sign * amount for dimension, amount in claimed.items()}
    reserved = {dimension: amount for dimension, amount in {**known.reserved, **changed}.items() if amount}
    if reserved or known.capacity is not None:
        nodes[node] = known._replace(reserved=reserved)
    else:
        nodes.pop(node, None)


def _resources(amounts: Iterable[tuple[str, int]]) -> Resources:
    """Amounts by dimension, from 0 to the largest that a payload can hold."""
    found: dict[str, Any] = {}
    for name, amount in amounts:
        bounded = min(max(0, amount), canonical.INTEGER_MAX)
        if name.startswith(f"{ANY_ACCELERATOR}."):
            found.setdefault(ANY_ACCELERATOR, {})[name.removeprefix(f"{ANY_ACCELERATOR}.")] = bounded
        else:
            found[name] = bounded
    return Resources(**found)
