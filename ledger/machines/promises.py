"""Commitments and preconditions in the form of payloads of entries (seed ``002``).

A proposal is one entry: the commitment, its precondition, and, if it was rejected, the reason. Resources are whole
numbers by dimension; a missing dimension is 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Final

import msgspec
import orjson

from ledger import canonical
from ledger.errors import InvalidInputError

REJECTION: Final = "rejection"
"""Member of the payload of a proposal that was rejected."""

INDEX_PREFIX: Final = "index:"
NODE_PREFIX: Final = "node:"

ANY_ACCELERATOR: Final = "accelerators"
"""The one dimension of all accelerators of a node whose capacity is unknown."""

Amount = Annotated[int, msgspec.Meta(ge=0, le=canonical.INTEGER_MAX)]
"""An amount, also in a rejection; no ledger writes a larger one."""


class Resources(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    """An amount in each dimension."""

    cpu_millis: Amount = 0
    memory_bytes: Amount = 0
    disk_bytes: Amount = 0
    disk_bw_bps: Amount = 0
    accelerators: dict[str, Amount] = {}

    def amounts(self) -> list[tuple[str, int]]:
        """Each dimension that is not 0, with its amount; accelerators one by one, ``accelerators.NAME``."""
        named = (
            ("cpu_millis", self.cpu_millis),
            ("memory_bytes", self.memory_bytes),
            ("disk_bytes", self.disk_bytes),
            ("disk_bw_bps", self.disk_bw_bps),
            *((f"{ANY_ACCELERATOR}.{name}", amount) for name, amount in self.accelerators.items()),
        )
        return [each for each in named if each[1]]

    def of(self, dimension: str) -> int:
        """The amount in one of those dimensions."""
        if dimension.startswith(f"{ANY_ACCELERATOR}."):
            return self.accelerators.get(dimension.removeprefix(f"{ANY_ACCELERATOR}."), 0)
        amount: int = getattr(self, dimension)
        return amount

    def exceeded_by(self, other: Resources) -> str | None:
        """The first dimension in which ``other`` is more, None when there is none."""
        return next((name for name, amount in other.amounts() if amount > self.of(name)), None)


class _Kind(msgspec.Struct, frozen=True, gc=False, tag_field="kind", forbid_unknown_fields=True):
    """Base of commitments and preconditions."""

    subject_form: ClassVar[str] = ""

    @property
    def subject(self) -> str:
        """The name in the job id of entries about this commitment."""
        return self.subject_form.format(self)


class Placement(_Kind, frozen=True):
    """A capsule runs on a node, which reserves ``reservation`` for it; it may use up to ``limit``, if given."""

    subject_form = "capsule:{0.capsule}"
    capsule: str
    node: str
    reservation: Resources
    limit: Resources | None = None


class GangMember(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """One capsule of a gang."""

    capsule: str
    node: str
    reservation: Resources
    limit: Resources | None = None


class GangPlacement(_Kind, frozen=True):
    """All of these capsules are placed, or none."""

    subject_form = "gang:{0.gang}"
    gang: str
    members: list[GangMember]


class IdentityBind(_Kind, frozen=True):
    """A capsule has an identity."""

    subject_form = "capsule:{0.capsule}"
    capsule: str
    identity: str


class ModuleAdjustment(_Kind, frozen=True):
    """A module of a mission has ``replicas`` replicas, as decided in ``epoch`` of the deciding service."""

    subject_form = "module:{0.mission}/{0.module}"
    mission: str
    module: str
    replicas: Amount
    epoch: Amount


class QuotaGrant(_Kind, frozen=True):
    """Somebody may use so much."""

    subject_form = "quota:{0.subject_name}"
    subject_name: str = msgspec.field(name="subject")
    resources: Resources


class Lease(_Kind, frozen=True):
    """Somebody holds something."""

    subject_form = "lease:{0.resource}"
    resource: str
    holder: str


class Revocation(_Kind, frozen=True):
    """The commitment at ``index`` ends."""

    subject_form = f"{INDEX_PREFIX}{{0.index}}"
    index: Amount


def members_of(commitment: Commitment) -> Sequence[Placement | GangMember]:
    """The capsules that a commitment places, each on its node."""
    if type(commitment) is Placement:
        return (commitment,)
    return commitment.members if type(commitment) is GangPlacement else ()


Commitment = Placement | GangPlacement | IdentityBind | ModuleAdjustment | QuotaGrant | Lease | Revocation


class Unconditional(_Kind, frozen=True, tag="None"):
    """No precondition."""


NO_BET: Final[Mapping[str, str]] = {"kind": "None"}
"""The precondition of a proposal that names none."""


class NodeFreeOf(_Kind, frozen=True):
    """The node has at least this much unclaimed."""

    node: str
    at_least: Resources


class GangUnplaced(_Kind, frozen=True):
    """The gang is not placed."""

    gang: str


class ModuleAdjustmentVersion(_Kind, frozen=True):
    """The newest adjustment of the module has this epoch; 0 if there is none."""

    subject_form = ModuleAdjustment.subject_form
    mission: str
    module: str
    epoch: Amount


Precondition = Unconditional | NodeFreeOf | GangUnplaced | ModuleAdjustmentVersion


class Rejection(msgspec.Struct, frozen=True, omit_defaults=True):
    """The reason for a rejected proposal, and facts for a better one."""

    reason: str
    """One of ``REASONS``."""
    detail: str
    free: Resources | None = None
    """The node's free amounts, in the requested dimensions; None if its capacity is unknown."""
    blocking_index: int | None = None
    """Index of a blocking commitment."""
    epoch: int | None = None
    """Epoch of the newest adjustment."""


class Proposal(msgspec.Struct, frozen=True):
    """The payload of a proposal."""

    commitment: Commitment
    precondition: Precondition
    rejection: Rejection | None = None


class Capacity(msgspec.Struct, frozen=True):
    """The payload of CAPACITY_SET: all that a node has."""

    node: str
    capacity: Resources


REASONS: Final = frozenset(
    {
        "adjustment-version",
        "capsule-placed",
        "gang-placed",
        "identity-bound",
        "node-not-free",
        "not-active",
        "reservation-over-limit",
        "scale-to-zero",
    }
)
"""Values of ``Rejection.reason``; docs/commitments.md explains them."""

_PROPOSALS: Final = msgspec.json.Decoder(Proposal)


def node_subject(node: str) -> str:
    """The name in the job id of entries about a node."""
    return f"{NODE_PREFIX}{node}"


def read_proposal(payload: bytes | str) -> Proposal:
    """The proposal in the payload of an entry.

    Raises:
        InvalidInputError: the payload is no proposal.
    """
    try:
        return _PROPOSALS.decode(payload)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise InvalidInputError(f"not the payload of a proposal: {error}") from None


def read_capacity(payload: bytes | str) -> tuple[str, Resources]:
    """Node and capacity that an entry sets.

    Raises:
        InvalidInputError: it sets none.
    """
    try:
        said = msgspec.json.decode(payload, type=Capacity)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise InvalidInputError(f"not the payload of a capacity: {error}") from None
    return said.node, said.capacity


def rejected_payload(payload: bytes, rejection: Rejection) -> bytes:
    """The payload of the entry that rejects the proposal ``payload``, with the reason."""
    return canonical.encode({**orjson.loads(payload), REJECTION: msgspec.to_builtins(rejection)})


def proposed_payload(payload: bytes | str) -> bytes:
    """The proposal's payload, from a judged entry: its payload without the reason.

    Raises:
        ValueError, TypeError: the payload is none of a proposal.
    """
    facts = orjson.loads(payload)
    facts.pop(REJECTION, None)
    return canonical.encode(facts)
