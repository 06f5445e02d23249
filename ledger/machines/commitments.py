"""The commitment machine: it accepts or rejects proposals, and holds the active commitments (DESIGN section 9, seed
``002``).

This is the only copy of the rules. The appender judges with it in chain order, verification judges again, and reads as
of a seq, Spark and the simulator run entries through it. It reads no clock: a verdict follows from the entries before
it::

    judge(proposal)             the reason to reject it, None if it is accepted
    apply(index, proposal)      the proposal was accepted at this seq
    set_capacity(capacity)      the node has this capacity

Invariants, for any proposals::

    a capsule has at most one active placement, by itself or in a gang, and at most one active identity
    a gang is active as a whole or not at all, and once
    only an active commitment can be revoked, which ends it
    reserved[node][dimension] == sum of the active reservations there
    from rules 2 on, where the capacity is known:
        a placement is accepted only if then reserved[node][dimension] <= limit[node][dimension] where it claims
        an adjustment is accepted only if its epoch >= that of the newest active adjustment of its module

If the capacity of a node is known, its limit is the capacity, from rules 2 on times the overcommit, and free is the
limit less reservations, per dimension. If it is unknown, a dimension is free if no active commitment claims it, and all
accelerators are one dimension. Preconditions are the caller's choice: by rules 1 a placement without one may claim more
than a node has. A capacity below what is reserved counts as well: the node is overbooked, and takes no claim on that
dimension until enough is revoked.

**Versions of the rules.** 1: as every release judged before there were versions. 2: ``over-capacity``, ``older-epoch``
and overcommit. The first accepted proposal or capacity of a tenant sets the version that it starts with, a
``RulesVersion`` raises it. Each entry is judged by the version in force before it. Imported entries set nothing.

The cost of judging and applying depends on the number of gang members, not on the number of active commitments: every
lookup in ``LiveState`` (:mod:`ledger.machines.commitment_state`) is by name. The caller passes in its tables.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ledger.errors import InvalidInputError
from ledger.facts.events import CommitmentAction
from ledger.machines.commitment_state import (
    CAPACITY_BINDS_FROM,
    LiveState,
    Neighbours,
    NodeState,
    change_capacity,
    change_reserved,
    claims_of,
)
from ledger.machines.promises import (
    ANY_ACCELERATOR,
    RULES,
    RULES_NEWEST,
    Capacity,
    Commitment,
    GangMember,
    GangPlacement,
    GangUnplaced,
    IdentityBind,
    ModuleAdjustment,
    ModuleAdjustmentVersion,
    NodeFreeOf,
    Placement,
    Precondition,
    Proposal,
    Rejection,
    Revocation,
    RulesVersion,
    members_of,
    node_subject,
    read_capacity,
    read_proposal,
)

CLAIMS_LOOKED_AT_MAX: Final = 64
"""Most of a node's newest claims that are searched for a blocking one."""


class Commitments:
    """The machine over one tenant's entries, in the order of its chain."""

    def __init__(self, state: LiveState | None = None) -> None:
        self.state = state if state is not None else LiveState({}, {}, {}, {}, {}, {})

    def decide(self, index: int, proposal: Proposal) -> Rejection | None:
        """Judge the proposal at seq ``index`` and apply it if it is accepted."""
        if (rejection := self.judge(proposal)) is None:
            self.apply(index, proposal)
        return rejection

    def judge(self, proposal: Proposal) -> Rejection | None:
        """Check the precondition, then the invariants; returns the rejection, None if the proposal is accepted.

        Raises:
            InvalidInputError: the rules in force are newer than this program.
        """
        rules = self._rules(proposal.rules)
        return self._judge_precondition(proposal.precondition, rules) or self._judge_commitment(
            proposal.commitment, rules
        )

    def _rules(self, first: int) -> int:
        """The version of the rules in force; ``first`` if no entry has set it yet."""
        rules = self.state.rules.get(RULES, first)
        if rules > RULES_NEWEST:
            raise InvalidInputError(f"it is judged by rules {rules}, and this program knows rules up to {RULES_NEWEST}")
        return rules

    def fold(self, index: int, action: str, payload: bytes | str) -> None:
        """Apply one entry of the chain without judging it: a recorded acceptance is trusted. Imported entries, and
        entries that are not about commitments, MUST be left out.

        Raises:
            InvalidInputError: it is no such entry, or could not be accepted.
        """
        if action == CommitmentAction.PROPOSE_ACCEPTED:
            proposal = read_proposal(payload)
            commitment = proposal.commitment
            if isinstance(commitment, Revocation) and commitment.index not in self.state.active:
                raise InvalidInputError(f"seq {index} revokes {commitment.index}, which is not active")
            self.apply(index, proposal)
        elif action == CommitmentAction.CAPACITY_SET:
            self.set_capacity(read_capacity(payload))

    # --- judging ----------------------------------------------------------------------------------

    def _judge_precondition(self, precondition: Precondition, rules: int) -> Rejection | None:
        match precondition:
            case NodeFreeOf():
                return self._judge_node(precondition, rules)
            case GangUnplaced():
                return self._judge_gang(precondition.gang)
            case ModuleAdjustmentVersion():
                index, epoch = self._newest_adjustment(precondition.subject)
                if epoch != precondition.epoch:
                    return Rejection(
                        "adjustment-version",
                        f"the newest adjustment of {precondition.mission}/{precondition.module} is of epoch {epoch}, "
                        f"not {precondition.epoch}",
                        blocking_index=index or None,
                        epoch=epoch,
                    )
        return None

    def _newest_adjustment(self, module: str) -> tuple[int, int]:
        """Index and epoch of the newest active adjustment of a module, zeros if there is none."""
        index = self.state.newest.get(module, 0)
        newest = self.state.active[index] if index else None
        return index, newest.epoch if type(newest) is ModuleAdjustment else 0

    def _judge_node(self, precondition: NodeFreeOf, rules: int) -> Rejection | None:
        if (known := self.state.nodes.get(precondition.node)) is None:
            return None
        wanted = precondition.at_least.amounts()
        if known.capacity is not None:
            return self._judge_free(precondition.node, known, dict(wanted), rules, "node-not-free", "asked for")
        for name, _ in wanted:
            dimension = ANY_ACCELERATOR if name.startswith(f"{ANY_ACCELERATOR}.") else name
            if dimension in known.reserved:
                return Rejection(
                    "node-not-free",
                    f"node {precondition.node}: {dimension} is claimed, and the node's capacity is not known",
                    blocking_index=self._claim_of(precondition.node, dimension),
                )
        return None

    def _judge_capacity(self, commitment: Placement | GangPlacement, rules: int) -> Rejection | None:
        """The rejection if all members together do not fit on a node of known capacity."""
        if rules < CAPACITY_BINDS_FROM:
            return None
        for node, claimed in claims_of(commitment).items():
            known = self.state.nodes.get(node)
            if known is None or known.capacity is None:
                continue
            claimed.pop(ANY_ACCELERATOR, None)
            if (found := self._judge_free(node, known, claimed, rules, "over-capacity", "claimed")) is not None:
                return found
        return None

    def _judge_free(
        self, node: str, known: NodeState, wanted: dict[str, int], rules: int, reason: str, verb: str
    ) -> Rejection | None:
        """The rejection if a node of known capacity has less than ``wanted`` free in a dimension. ``verb`` is what the
        proposal does with ``wanted``."""
        for name, amount in wanted.items():
            free = known.limit(name, rules) - known.reserved.get(name, 0)
            if free < amount:
                return Rejection(
                    reason,
                    f"node {node} has {max(free, 0)} of {name} free, {amount} is {verb}",
                    known.free(wanted, rules),
                    self._claim_of(node, name),
                )
        return None

    def _judge_commitment(self, commitment: Commitment, rules: int) -> Rejection | None:
        match commitment:
            case Placement():
                return self._judge_members((commitment,)) or self._judge_capacity(commitment, rules)
            case GangPlacement():
                return (
                    self._judge_gang(commitment.gang)
                    or self._judge_members(commitment.members)
                    or self._judge_capacity(commitment, rules)
                )
            case IdentityBind():
                if (index := self.state.holders.get(f"identity:{commitment.capsule}")) is not None:
                    return Rejection(
                        "identity-bound",
                        f"capsule {commitment.capsule} has an identity, bound at index {index}",
                        blocking_index=index,
                    )
            case ModuleAdjustment():
                return self._judge_adjustment(commitment, rules)
            case Revocation():
                return self._judge_revocation(commitment.index)
            case RulesVersion() if commitment.version <= rules:
                return Rejection("rules-in-force", f"rules {rules} are in force, and only newer ones can replace them")
        return None

    def _judge_adjustment(self, adjustment: ModuleAdjustment, rules: int) -> Rejection | None:
        module = f"{adjustment.mission}/{adjustment.module}"
        if adjustment.replicas < 1:
            return Rejection(
                "scale-to-zero",
                f"{module} cannot have {adjustment.replicas} replicas; to end it, revoke its placements",
            )
        index, epoch = self._newest_adjustment(adjustment.subject)
        if rules < CAPACITY_BINDS_FROM or adjustment.epoch >= epoch:
            return None
        return Rejection(
            "older-epoch",
            f"the newest adjustment of {module} is of epoch {epoch}, this one is of epoch {adjustment.epoch}",
            blocking_index=index,
            epoch=epoch,
        )

    def _judge_revocation(self, index: int) -> Rejection | None:
        if (commitment := self.state.active.get(index)) is None:
            return Rejection("not-active", f"there is no active commitment at index {index}")
        if type(commitment) is RulesVersion:
            return Rejection("not-revocable", f"the rules that index {index} set in force stay until newer ones are")
        return None

    def _judge_gang(self, gang: str) -> Rejection | None:
        if (index := self.state.holders.get(f"gang:{gang}")) is None:
            return None
        return Rejection("gang-placed", f"gang {gang} is placed, at index {index}", blocking_index=index)

    def _judge_members(self, members: Iterable[Placement | GangMember]) -> Rejection | None:
        seen: set[str] = set()
        for member in members:
            if member.limit is not None and (name := member.limit.exceeded_by(member.reservation)) is not None:
                reserved, limit = member.reservation.of(name), member.limit.of(name)
                return Rejection(
                    "reservation-over-limit",
                    f"capsule {member.capsule} reserves {reserved} of {name}, its limit is {limit}",
                )
            if (index := self.state.holders.get(f"capsule:{member.capsule}")) is not None:
                return Rejection(
                    "capsule-placed", f"capsule {member.capsule} is placed, at index {index}", blocking_index=index
                )
            if member.capsule in seen:
                return Rejection("capsule-placed", f"capsule {member.capsule} is in the gang twice")
            seen.add(member.capsule)
        return None

    def _claim_of(self, node: str, dimension: str) -> int | None:
        """Index of the newest active commitment that claims the dimension there, None if it is too far back."""
        subject = node_subject(node)
        index = self.state.newest.get(subject, 0)
        for _ in range(CLAIMS_LOOKED_AT_MAX):
            if not index:
                return None
            if dimension in claims_of(self.state.active[index]).get(node, ()):
                return index
            index = self.state.neighbours[subject, index].older
        return None

    # --- applying ---------------------------------------------------------------------------------

    def apply(self, index: int, proposal: Proposal) -> None:
        """Apply a proposal that the entry at seq ``index`` accepts. It MUST have been accepted, or be recorded as
        accepted in a chain that only revokes active commitments. Of two holders of one name the newer is valid.

        Raises:
            InvalidInputError: as ``judge``; nothing was changed.
        """
        state, commitment = self.state, proposal.commitment
        rules = self._rules(proposal.rules)
        state.rules[RULES] = commitment.version if type(commitment) is RulesVersion else rules
        if type(commitment) is Revocation:
            self._end(commitment.index)
            return
        state.active[index] = commitment
        state.holders.update(dict.fromkeys(_names_of(commitment), index))
        claims = claims_of(commitment)
        for node, claimed in claims.items():
            change_reserved(state.nodes, node, claimed, 1)
        for subject in _ordered_subjects(commitment, claims):
            self._link(subject, index)

    def _end(self, index: int) -> None:
        state = self.state
        commitment = state.active.pop(index)
        for name in _names_of(commitment):
            if state.holders.get(name) == index:
                del state.holders[name]
        claims = claims_of(commitment)
        for node, claimed in claims.items():
            change_reserved(state.nodes, node, claimed, -1)
        for subject in _ordered_subjects(commitment, claims):
            self._unlink(subject, index)

    def set_capacity(self, capacity: Capacity) -> None:
        """Set the node's capacity from now on.

        Raises:
            InvalidInputError: as ``judge``; nothing was changed.
        """
        self.state.rules[RULES] = self._rules(capacity.rules)
        change_capacity(self.state.nodes, capacity)

    def _link(self, subject: str, index: int) -> None:
        """Add ``index`` as the newest of its subject."""
        neighbours, older = self.state.neighbours, self.state.newest.get(subject, 0)
        if older:
            neighbours[subject, older] = neighbours[subject, older]._replace(newer=index)
        neighbours[subject, index] = Neighbours(older, 0)
        self.state.newest[subject] = index

    def _unlink(self, subject: str, index: int) -> None:
        neighbours = self.state.neighbours
        older, newer = neighbours[subject, index]
        del neighbours[subject, index]
        if older:
            neighbours[subject, older] = neighbours[subject, older]._replace(newer=newer)
        if newer:
            neighbours[subject, newer] = neighbours[subject, newer]._replace(older=older)
        elif older:
            self.state.newest[subject] = older
        else:
            del self.state.newest[subject]


def _names_of(commitment: Commitment) -> list[str]:
    """The names that only one active commitment may hold."""
    if type(commitment) is IdentityBind:
        return [f"identity:{commitment.capsule}"]
    gang = [commitment.subject] if type(commitment) is GangPlacement else []
    return [*gang, *(f"capsule:{member.capsule}" for member in members_of(commitment))]


def _ordered_subjects(commitment: Commitment, claims: Iterable[str]) -> Iterable[str]:
    """The subjects whose newest commitment is tracked: modules, and the nodes of ``claims``."""
    return (commitment.subject,) if type(commitment) is ModuleAdjustment else map(node_subject, claims)
