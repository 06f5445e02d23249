"""What can be promised, and bet on: commitments and preconditions, as payloads of entries have them (seed ``002``).

A proposal is one entry: the commitment, the precondition it hangs on, and, where it was rejected, why. Resources are
whole numbers, dimension by dimension; what is left out is 0.
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
"""The dimension that all accelerators of a node are where its capacity is not known."""

Amount = Annotated[int, msgspec.Meta(ge=0, le=canonical.INTEGER_MAX)]
"""What a rejection can tell, too: more is in no entry that a ledger made."""


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
    """Something that can be promised, or bet on."""

    subject_form: ClassVar[str] = ""

    @property
    def subject(self) -> str:
        """What entries about a commitment are known by."""
        return self.subject_form.format(self)


class Placement(_Kind, frozen=True):
    """A capsule runs on a node, which keeps ``reservation`` for it; it may use up to ``limit``, else just that."""

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
    """A capsule is somebody."""

    subject_form = "capsule:{0.capsule}"
    capsule: str
    identity: str


class ModuleAdjustment(_Kind, frozen=True):
    """A module of a mission has so many replicas, as decided in ``epoch`` of whoever decides it."""

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
    """The commitment at ``index`` holds no longer."""

    subject_form = f"{INDEX_PREFIX}{{0.index}}"
    index: Amount


def members_of(commitment: Commitment) -> Sequence[Placement | GangMember]:
    """The capsules that a commitment places, each on its node."""
    if type(commitment) is Placement:
        return (commitment,)
    return commitment.members if type(commitment) is GangPlacement else ()


Commitment = Placement | GangPlacement | IdentityBind | ModuleAdjustment | QuotaGrant | Lease | Revocation


class Unconditional(_Kind, frozen=True, tag="None"):
    """No bet."""


NO_BET: Final[Mapping[str, str]] = {"kind": "None"}
"""The precondition of a proposal that names none."""


class NodeFreeOf(_Kind, frozen=True):
    """The node has at least this much that nobody claimed."""

    node: str
    at_least: Resources


class GangUnplaced(_Kind, frozen=True):
    """The gang is not placed."""

    gang: str


class ModuleAdjustmentVersion(_Kind, frozen=True):
    """The newest adjustment of the module is of this epoch; 0 where there is none."""

    subject_form = ModuleAdjustment.subject_form
    mission: str
    module: str
    epoch: Amount


Precondition = Unconditional | NodeFreeOf | GangUnplaced | ModuleAdjustmentVersion


class Rejection(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a proposal was rejected, and what the proposer needs to know for a better one."""

    reason: str
    """One of ``REASONS``."""
    detail: str
    free: Resources | None = None
    """What the node had free, in the dimensions that were asked for; None where its capacity is not known."""
    blocking_index: int | None = None
    """Index of a commitment that stands in the way."""
    epoch: int | None = None
    """Of the newest adjustment."""


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
"""What can stand in ``Rejection.reason``; docs/commitments.md says what it means."""

_PROPOSALS: Final = msgspec.json.Decoder(Proposal)


def node_subject(node: str) -> str:
    """What entries about a node are known by."""
    return f"{NODE_PREFIX}{node}"


def read_proposal(payload: bytes | str) -> Proposal:
    """The proposal that an entry is.

    Raises:
        InvalidInputError: it is none.
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
    """The payload of an entry that says why what ``payload`` proposes was rejected."""
    return canonical.encode({**orjson.loads(payload), REJECTION: msgspec.to_builtins(rejection)})


def proposed_payload(payload: bytes | str) -> bytes:
    """What was proposed, of an entry that was judged: its payload without the reason.

    Raises:
        ValueError, TypeError: the payload is none of a proposal.
    """
    facts = orjson.loads(payload)
    facts.pop(REJECTION, None)
    return canonical.encode(facts)
