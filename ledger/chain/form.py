"""The form of an entry: the rules that every entry meets that this ledger writes or imports.

A chain can be linked and signed over an entry that no ledger can write, and two readers may read it differently. So
every verifier checks the form as well; a break of it has the kind ``malformed``. The rules are those of
docs/formats/chain-link.md, "The form of an entry"::

    t_hlc       an HLC
    action      1 to 64 characters of A-Z and _
    job_id      of a job event: 1 to 128 characters of A-Z a-z 0-9 . _ : -
                of any other action: 1 to 255 bytes of UTF-8, none of them below U+0020
    origin      None, or canonical JSON of bundle_digest, chain_link, log, node_id and seq; None in version 1
    payload     an object in canonical JSON, at most 64 levels deep
                its type is that of the action; fence_token of a job event is an integer from 0 to 2^53 - 1
                a CONFLICT entry holds the event from which its HLC follows, and that event has this form too
                in version 1: any JSON that has a canonical form, without a name twice in one object

The ``type`` of an unknown action is not checked: a later version may write it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, NamedTuple

from msgspec import Meta

from ledger import canonical, native
from ledger.chain import LINK_VERSION
from ledger.chain.conflict import conflict_hlc, held_event
from ledger.errors import InvalidInputError
from ledger.facts.events import EVENTS_BY_ACTION, TYPE_OF_ACTION, SystemAction
from ledger.hlc import Hlc
from ledger.names import NODE_ID, READABLE_TENANT_ID

HLC_CHARACTERS_MAX: Final = 200

Hash = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Count = Annotated[int, Meta(ge=0, le=canonical.INTEGER_MAX)]
Seq = Annotated[int, Meta(ge=1, le=canonical.INTEGER_MAX)]
HlcText = Annotated[str, Meta(max_length=HLC_CHARACTERS_MAX)]
TenantId = Annotated[str, Meta(pattern=rf"^(?:{READABLE_TENANT_ID})\Z")]
NodeId = Annotated[str, Meta(pattern=rf"^(?:{NODE_ID})\Z")]
"""Forms of single fields, as msgspec checks them."""

ORIGIN_BYTES_MAX: Final = 4 << 10
"""Longest origin."""
SUBJECT_BYTES_MAX: Final = 255
"""Longest job id of an entry that is not about a job: a WAL record has one byte for its length."""

_ACTION = re.compile("[A-Z_]{1,64}")
_JOB_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_CONTROL = re.compile("[\0-\x1f]")
_HASH = re.compile("[0-9a-f]{64}")
_ORIGIN_MEMBERS: Final = frozenset(("bundle_digest", "chain_link", "log", "node_id", "seq"))


class Origin(NamedTuple):
    """The log that first chained an imported entry, its seq there, and the bundle that first contained it."""

    log: str
    seq: int
    bundle_digest: str


def fault_of(version: int, t_hlc: str, job_id: str, action: str, payload: str, origin: str | None) -> str | None:
    """The first violation of the form by an entry of these columns; None if it has the form.

    The caller has checked that the columns agree: the HLC's parts are those of ``t_hlc``, digest and link are right.
    """
    try:
        hlc = Hlc.parse(t_hlc)
        check_names(action, job_id)
        if version != LINK_VERSION:
            if origin is not None:
                raise InvalidInputError(f"link version {version} binds no origin, yet it has one")
            canonical.encode(canonical.read(payload))
            return None
        if origin is not None:
            read_origin(origin)
        _check_event(hlc, job_id, action, read_payload(payload))
    except InvalidInputError as error:
        return str(error)
    return None


def are_well_formed(
    t_hlcs: Sequence[str],
    job_ids: Sequence[str],
    actions: Sequence[str],
    payloads: Sequence[str],
    origins: Sequence[str | None],
) -> bool:
    """Whether each of these entries of version 2 has the form of an entry."""
    columns = (t_hlcs, job_ids, actions, payloads, origins)
    if native.are_well_formed(*columns):
        return True
    return all(fault_of(LINK_VERSION, *entry) is None for entry in zip(*columns, strict=True))


def check_names(action: str, job_id: str) -> None:
    """Refuse an action or a job id that no entry can have.

    Raises:
        InvalidInputError: names it.
    """
    if not _ACTION.fullmatch(action):
        raise InvalidInputError(f"{action[:100]!r} is not an action")
    if action in EVENTS_BY_ACTION:
        is_named = _JOB_ID.fullmatch(job_id) is not None
    else:
        is_named = 0 < len(job_id.encode()) <= SUBJECT_BYTES_MAX and _CONTROL.search(job_id) is None
    if not is_named:
        raise InvalidInputError(f"{job_id[:200]!r} is not a job id")


def read_payload(payload: str) -> dict[str, Any]:
    """The payload of a version 2 entry as an object.

    Raises:
        InvalidInputError: the payload is no object in canonical JSON.
    """
    try:
        value = canonical.read_exact(payload)
    except InvalidInputError as error:
        raise InvalidInputError(f"its payload is not an object in canonical JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidInputError("its payload is not an object in canonical JSON")
    return value


def read_origin(origin: str) -> Origin:
    """The origin of an imported entry, parsed.

    Raises:
        InvalidInputError: the text is no origin.
    """
    try:
        value = canonical.read_exact(origin)
    except InvalidInputError as error:
        raise InvalidInputError(f"its origin is not canonical JSON: {error}") from error
    if len(origin.encode()) > ORIGIN_BYTES_MAX or not _is_origin(value):
        raise InvalidInputError("its origin is not one")
    return Origin(value["log"], value["seq"], value["bundle_digest"])


def check_conflict(payload: Mapping[str, Any], job_id: str, hlc: Hlc) -> None:
    """Refuse the payload of a CONFLICT entry that does not hold the event from which its HLC follows.

    Raises:
        InvalidInputError: it does not, or that event lacks the form of an entry.
    """
    if (held := held_event(payload, job_id)) is None or conflict_hlc(held.event) != hlc:
        raise InvalidInputError("it is a CONFLICT entry that does not hold the event it is named for")
    check_names(held.event.action, job_id)
    if held.event.action == SystemAction.CONFLICT:
        raise InvalidInputError("it is a CONFLICT entry that holds another one")
    _check_event(held.hlc, job_id, held.event.action, read_payload(held.payload))


def _check_event(hlc: Hlc, job_id: str, action: str, payload: Mapping[str, Any]) -> None:
    if action in TYPE_OF_ACTION and payload.get("type") != TYPE_OF_ACTION[action]:
        raise InvalidInputError(f"the type of its payload is not {TYPE_OF_ACTION[action]}, which {action} entries have")
    if action in EVENTS_BY_ACTION:
        fence = payload.get("fence_token")
        if type(fence) is not int or not 0 <= fence <= canonical.INTEGER_MAX:
            raise InvalidInputError("its fence_token is not an integer from 0 to 2^53 - 1")
    if action == SystemAction.CONFLICT:
        check_conflict(payload, job_id, hlc)


def _is_origin(value: Any) -> bool:
    if not isinstance(value, dict) or value.keys() != _ORIGIN_MEMBERS:
        return False
    texts = [value[name] for name in ("bundle_digest", "chain_link", "log", "node_id")]
    if not all(isinstance(text, str) for text in texts) or type(value["seq"]) is not int:
        return False
    return value["seq"] >= 1 and all(_HASH.fullmatch(text) for text in texts[:2])
