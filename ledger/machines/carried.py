"""What later entries need of the entries that left with a prune, as the PRUNED entry carries it
(docs/formats/retention.md)::

    commitments       rules      the version in force
                      active     the active commitments, each with its index, by index
                      nodes      the capacities of nodes, each with the index of its entry, by index
    private_fields    declared   the last declaration, with its seq and its time
                      erased     how many keys the erasures destroyed, and the SHA-256 of their ids, sorted

Each is missing where no entry about it ever left. The machine of commitments that applies the active ones and the
capacities in the order of their indexes is in the same state as after all entries that left: a commitment that ended
has no effect on those still in force.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from operator import itemgetter
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import orjson

from ledger import canonical
from ledger.chain.form import Count, Hash, Seq
from ledger.decoding import convert
from ledger.errors import InvalidInputError
from ledger.facts.events import CAPACITY_TYPE, PROPOSAL_TYPE, CommitmentAction, SystemAction
from ledger.machines.commitments import Commitments
from ledger.machines.promises import (
    NO_BET,
    RULES,
    RULES_NEWEST,
    Capacity,
    Commitment,
    Overcommit,
    Proposal,
    Resources,
    Revocation,
    RulesVersion,
    Unconditional,
    node_subject,
    read_capacity,
    read_proposal,
)
from ledger.private_fields import facts_of, name_of

CARRIED_SHARE: Final = 6
"""The commitments carried are at most this part of ``wal.record_bytes_max``: the entry has them twice, once encoded,
and an entry takes half a record."""


class _Active(msgspec.Struct, frozen=True):
    index: Seq
    commitment: Commitment


class _Node(msgspec.Struct, frozen=True):
    index: Seq
    node: str
    capacity: Resources
    overcommit: Overcommit | None = None


class _State(msgspec.Struct, frozen=True):
    rules: Annotated[int, msgspec.Meta(ge=1, le=RULES_NEWEST)]
    active: list[_Active]
    nodes: list[_Node]


class CarriedCommitments(NamedTuple):
    """The commitments at the floor."""

    state: _State
    said: Mapping[str, Any]
    """The same, as the PRUNED entry has it."""

    @property
    def rules(self) -> int:
        """The version of the rules in force."""
        return self.state.rules

    def machine(self) -> Commitments:
        """The machine in this state."""
        machine, state = Commitments(), self.state
        machine.state.rules[RULES] = state.rules
        for each in state.active:
            machine.apply(each.index, Proposal(each.commitment, Unconditional()))
        for known in state.nodes:
            machine.set_capacity(Capacity(known.node, known.capacity, known.overcommit))
        machine.state.rules[RULES] = state.rules
        return machine

    def subjects(self) -> dict[int, str]:
        """By index, ascending, the names that entries about these have."""
        active = [(each.index, each.commitment.subject) for each in self.state.active]
        return dict(sorted([*active, *((known.index, node_subject(known.node)) for known in self.state.nodes)]))

    def payloads(self) -> dict[int, tuple[str, str]]:
        """By index, action and payload of an entry that says the same."""
        said: dict[int, tuple[str, dict[str, Any]]] = {}
        for each in self.said["active"]:
            proposal = {"type": PROPOSAL_TYPE, "commitment": each["commitment"], "precondition": dict(NO_BET)}
            said[each["index"]] = (CommitmentAction.PROPOSE_ACCEPTED, proposal)
        for known in self.said["nodes"]:
            capacity = {name: value for name, value in known.items() if name != "index"}
            said[known["index"]] = (CommitmentAction.CAPACITY_SET, {"type": CAPACITY_TYPE, **capacity})
        return {
            index: (action, canonical.encode({**facts, RULES: self.rules}).decode())
            for index, (action, facts) in sorted(said.items())
        }


def read_commitments(said: Mapping[str, Any] | None, to_seq: int) -> CarriedCommitments | None:
    """The commitments that a PRUNED entry about the entries up to ``to_seq`` carries, None if none ever left.

    Raises:
        InvalidInputError: they are not of the form, or not those of one state.
    """
    if said is None:
        return None
    try:
        state = convert(said, _State)
    except (msgspec.ValidationError, OverflowError) as error:
        raise InvalidInputError(f"{_NO_STATE}: {error}") from None
    active, known = [each.index for each in state.active], [each.index for each in state.nodes]
    is_ordered = _is_ascending(active, to_seq) and _is_ascending(known, to_seq) and not {*active}.intersection(known)
    is_once_each = len({each.node for each in state.nodes}) == len(known)
    if not (is_ordered and is_once_each) or any(type(each.commitment) is Revocation for each in state.active):
        raise InvalidInputError(_NO_STATE)
    return CarriedCommitments(state, said)


_NO_STATE: Final = "it carries no state of the commitments"


def _is_ascending(indexes: Sequence[int], last: int) -> bool:
    return [*indexes] == sorted({*indexes}) and max(indexes, default=0) <= last


def carry_commitments(
    before: Mapping[str, Any] | None, entries: Iterable[tuple[int, str, bytes | str]]
) -> dict[str, Any] | None:
    """What the PRUNED entry carries: the commitments that the one before carries, after further entries, each by seq,
    action and payload, whose verdicts were judged. None if there is none.

    Raises:
        InvalidInputError: an entry is none of commitments.
    """
    rules = None if before is None else before["rules"]
    active = {} if before is None else {each["index"]: each for each in before["active"]}
    nodes = {} if before is None else {each["node"]: each for each in before["nodes"]}
    for index, action, payload in entries:
        facts = orjson.loads(payload)
        if action == CommitmentAction.CAPACITY_SET:
            capacity = read_capacity(payload)
            rules = capacity.rules if rules is None else rules
            members = {name: facts[name] for name in ("node", "capacity", "overcommit") if facts.get(name) is not None}
            nodes[capacity.node] = {"index": index, **members}
            continue
        proposal = read_proposal(payload)
        rules = proposal.rules if rules is None else rules
        if isinstance(proposal.commitment, Revocation):
            active.pop(proposal.commitment.index, None)
            continue
        if isinstance(proposal.commitment, RulesVersion):
            rules = proposal.commitment.version
        active[index] = {"index": index, "commitment": facts["commitment"]}
    if rules is None:
        return None
    return {"rules": rules, "active": [*active.values()], "nodes": sorted(nodes.values(), key=itemgetter("index"))}


def digest_of_carried(said: Mapping[str, Any] | None) -> str | None:
    """SHA-256 of what is carried, in hex; None if nothing is, empty if it has no canonical form."""
    if said is None:
        return None
    try:
        return sha256(canonical.encode(said)).hexdigest()
    except InvalidInputError:
        return ""


# --- private fields -------------------------------------------------------------------------------


class CarriedDeclaration(msgspec.Struct, frozen=True, omit_defaults=True):
    """The last declaration among the entries that left."""

    seq: Seq
    at_ms: Count
    """Time of its HLC, ms since 1970."""
    id: str
    fields: list[str]
    subject: str | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """What its entry says."""
        return {name: value for name, value in msgspec.to_builtins(self).items() if name not in ("seq", "at_ms")}

    @property
    def name(self) -> str:
        """What its entry is about."""
        return name_of(SystemAction.PRIVACY_DECLARED, self.id)


class ErasedKeys(msgspec.Struct, frozen=True):
    """The keys that erasures among the entries that left destroyed."""

    count: Count
    sha256: Hash

    @classmethod
    def of(cls, key_ids: Iterable[str]) -> ErasedKeys:
        """Of these keys."""
        ids = sorted({*key_ids})
        return cls(len(ids), sha256(canonical.encode(ids)).hexdigest())


class CarriedFields(msgspec.Struct, frozen=True):
    """What the entries that left said about private fields."""

    declared: CarriedDeclaration | None = None
    erased: ErasedKeys = ErasedKeys.of(())

    def to_json(self) -> dict[str, Any] | None:
        """As the PRUNED entry has it; None if nothing was said."""
        said: dict[str, Any] = {}
        if self.declared is not None:
            said["declared"] = msgspec.to_builtins(self.declared)
        if self.erased.count:
            said["erased"] = msgspec.to_builtins(self.erased)
        return said or None


NOTHING_PRIVATE: Final = CarriedFields()


def read_private_fields(said: Mapping[str, Any] | None) -> CarriedFields:
    """What a PRUNED entry says about private fields.

    Raises:
        InvalidInputError: it is not of the form.
    """
    if said is None:
        return NOTHING_PRIVATE
    try:
        found = convert(said, CarriedFields)
    except (msgspec.ValidationError, OverflowError) as error:
        raise InvalidInputError(f"what it says about private fields is of another form: {error}") from None
    if found.declared is not None:
        facts_of(SystemAction.PRIVACY_DECLARED, found.declared.facts)
    return found
