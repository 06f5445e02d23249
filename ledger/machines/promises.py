"""Commitments and preconditions in the form of payloads of entries (seed ``002``).

A proposal is one entry: the commitment, its precondition, and, if it was rejected, the reason. Resources are whole
numbers by dimension; a missing dimension is 0.

Proposals and capacities also have ``rules``, the newest version of the rules that the writing node knew. Only that of
the first accepted proposal or capacity of a tenant counts: its rules judge the tenant until a ``RulesVersion`` is
accepted (:mod:`ledger.machines.commitments` lists the versions). An entry without it is older than the versions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Final

import msgspec
import orjson

from ledger import canonical
from ledger.decoding import decoder_of
from ledger.errors import InvalidInputError

REJECTION: Final = "rejection"
"""Member of the payload of a proposal that was rejected."""

INDEX_PREFIX: Final = "index:"
NODE_PREFIX: Final = "node:"

ANY_ACCELERATOR: Final = "accelerators"
"""The one dimension of all accelerators of a node whose capacity is unknown."""

RULES_NEWEST: Final = 2
"""The newest version of the rules; tenants start with it."""
RULES: Final = "rules"
"""Member of the payload of a proposal or capacity: the version that the tenant starts with if this is its first."""
_RULES_BEFORE_VERSIONS: Final = 1

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


OVERCOMMIT_FACTOR: Final = r"[1-9][0-9]{0,2}(?:\.[0-9]{1,3})?"
"""The grammar of a factor: a decimal number from 1 to 999.999, as text, so that no float is hashed or computed with."""
Factor = Annotated[str, msgspec.Meta(pattern=rf"^{OVERCOMMIT_FACTOR}\Z")]


class Overcommit(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    """How many times its capacity a node may have reserved, in each dimension; a missing dimension is ``1``."""

    cpu_millis: Factor = "1"
    memory_bytes: Factor = "1"
    disk_bytes: Factor = "1"
    disk_bw_bps: Factor = "1"
    accelerators: dict[str, Factor] = {}

    def limit(self, dimension: str, amount: int) -> int:
        """The most that may be reserved of ``amount`` in a dimension of ``Resources.amounts``, rounded down."""
        if dimension.startswith(f"{ANY_ACCELERATOR}."):
            factor = self.accelerators.get(dimension.removeprefix(f"{ANY_ACCELERATOR}."), "1")
        else:
            factor = getattr(self, dimension)
        whole, _, decimals = factor.partition(".")
        return amount * int(whole + decimals.ljust(3, "0")) // 1000


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


class RulesVersion(_Kind, frozen=True):
    """The proposals behind this one are judged by this version of the rules. It cannot be revoked."""

    subject_form = "rules:commitments"
    version: Annotated[int, msgspec.Meta(ge=1, le=RULES_NEWEST)]


def members_of(commitment: Commitment) -> Sequence[Placement | GangMember]:
    """The capsules that a commitment places, each on its node."""
    if type(commitment) is Placement:
        return (commitment,)
    return commitment.members if type(commitment) is GangPlacement else ()


Commitment = (
    Placement | GangPlacement | IdentityBind | ModuleAdjustment | QuotaGrant | Lease | Revocation | RulesVersion
)


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
    rules: Amount = _RULES_BEFORE_VERSIONS


class Capacity(msgspec.Struct, frozen=True):
    """The payload of CAPACITY_SET: all that a node has, and how far it may be overcommitted."""

    node: str
    capacity: Resources
    overcommit: Overcommit | None = None
    rules: Amount = _RULES_BEFORE_VERSIONS


REASONS: Final = frozenset(
    {
        "adjustment-version",
        "capsule-placed",
        "gang-placed",
        "identity-bound",
        "node-not-free",
        "not-active",
        "not-revocable",
        "older-epoch",
        "over-capacity",
        "reservation-over-limit",
        "rules-in-force",
        "scale-to-zero",
    }
)
"""Values of ``Rejection.reason``; docs/commitments.md explains them."""

_PROPOSALS: Final = decoder_of(Proposal)
_CAPACITIES: Final = decoder_of(Capacity)


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


def read_capacity(payload: bytes | str) -> Capacity:
    """The capacity that an entry sets.

    Raises:
        InvalidInputError: it sets none.
    """
    try:
        return _CAPACITIES.decode(payload)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise InvalidInputError(f"not the payload of a capacity: {error}") from None


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
