"""Private fields of a payload: which may be declared, and the form that replaces a private value.

A private value is replaced before the payload becomes canonical bytes, so what is hashed, stored and exported is::

    {"$private": {"alg": "A256GCM", "ciphertext": "<base64url>", "key": "<32 hex>", "nonce": "<16 base64url>"}}

The plaintext is the value's canonical JSON, encrypted by AES-256-GCM with a tag of 16 bytes at the end. Its associated
data is the canonical JSON of ``["tallystick.private.v1", tenant_id, hlc, key, path]``, so it opens only in this field
of this event. Base64url is without padding. Once the key is destroyed, readers show ``{"$erased": true}``.

    1 <= len(path) <= PATH_PARTS_MAX        no declared path lies inside another

The cipher itself and the keys are elsewhere (``signing.private_keys``): this module holds no secret.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, NamedTuple

import msgspec

from ledger import canonical
from ledger.decoding import convert
from ledger.errors import InvalidInputError
from ledger.facts.events import SystemAction

PRIVATE_MARK: Final = "$private"
ERASED_MARK: Final = "$erased"
ALGORITHM: Final = "A256GCM"
FIELDS_MAX: Final = 64
"""Most private fields of one tenant."""
PATH_PARTS_MAX: Final = 16
PATH_CHARACTERS_MAX: Final = 512
NONCE_BYTES: Final = 12
TAG_BYTES: Final = 16

Path = tuple[str, ...]
"""Place of a value in a payload: names of members, outermost first."""

_WITH_PARTS: Final = ("spec", "aggregate_metrics")
_WHOLE: Final = ("reason", "requestor", "error", "actor")
ALLOWED: Final = "spec, spec.*, aggregate_metrics, aggregate_metrics.*, reason, requestor, error, actor"
"""What may be private: nothing that identifies an event or decides the state of a job."""

_CONTEXT: Final = "tallystick.private.v1"
_KEY_ID: Final = re.compile(r"[0-9a-f]{32}")
_ABSENT: Final = object()


class Declaration(NamedTuple):
    """The private fields of one tenant; ``subject`` is the field whose value names the person, if there is one."""

    fields: tuple[Path, ...]
    subject: Path | None


class SealedValue(NamedTuple):
    """The form in the log of one private value."""

    key_id: str
    nonce: bytes
    ciphertext: bytes


def declaration_of(fields: Sequence[str], subject: str | None) -> Declaration:
    """The declaration that dotted names, such as ``spec.user``, make.

    Raises:
        InvalidInputError: a name is malformed, cannot be private, or lies inside another; or the subject lies in none
            of the fields, so that it would be stored in clear.
    """
    if len(fields) > FIELDS_MAX:
        raise InvalidInputError(f"fields: at most {FIELDS_MAX} may be private", ("fields",))
    paths = [_path_of(field, ("fields", index)) for index, field in enumerate(fields)]
    for index, path in enumerate(paths):
        for other in paths[:index]:
            if path[: len(other)] == other or other[: len(path)] == path:
                raise InvalidInputError(
                    f"fields.{index}: {'.'.join(path)} and {'.'.join(other)} lie inside each other", ("fields", index)
                )
    if subject is None:
        return Declaration(tuple(paths), None)
    path = _path_of(subject, ("subject",))
    if not any(path[: len(other)] == other for other in paths):
        raise InvalidInputError(
            f"subject: {subject} is not private itself, so the subject would be stored in clear; add it to fields",
            ("subject",),
        )
    return Declaration(tuple(paths), path)


def _path_of(field: str, place: tuple[str | int, ...]) -> Path:
    path = tuple(field.split("."))
    where = ".".join(str(part) for part in place)
    if len(field) > PATH_CHARACTERS_MAX or len(path) > PATH_PARTS_MAX or not all(path):
        raise InvalidInputError(
            f"{where}: must be names with dots between them, at most {PATH_PARTS_MAX} of them and "
            f"{PATH_CHARACTERS_MAX} characters",
            place,
        )
    if not (path[0] in _WITH_PARTS or (path[0] in _WHOLE and len(path) == 1)):
        raise InvalidInputError(f"{where}: {field[:100]} cannot be private; these can: {ALLOWED}", place)
    canonical.encode(field)
    return path


def private_in_either(one: Declaration, other: Declaration) -> Declaration:
    """The union of two declarations' private fields, with the subject of ``one``, else of ``other``."""
    paths = {*one.fields, *other.fields}
    outer = [path for path in paths if not any(path[:length] in paths for length in range(1, len(path)))]
    return Declaration(tuple(sorted(outer)), one.subject or other.subject)


def may_hold_private(fields: Mapping[str, Any]) -> bool:
    """Whether an event of these fields has any that could be declared private."""
    return any(name in fields for name in (*_WITH_PARTS, *_WHOLE))


def value_at(fields: Mapping[str, Any], path: Path) -> tuple[bool, Any]:
    """Whether there is a value at ``path``, and the value."""
    value: Any = fields
    for name in path:
        value = value.get(name, _ABSENT) if isinstance(value, dict) else _ABSENT
        if value is _ABSENT:
            return False, None
    return True, value


def refuse_hidden(fields: Mapping[str, Any], path: Path) -> None:
    """Return if every member on the way to ``path`` is an object or missing.

    Raises:
        InvalidInputError: a member is no object, and may contain in clear what ``path`` keeps private.
    """
    value: Any = fields
    for depth, name in enumerate(path[:-1], start=1):
        value = value.get(name, _ABSENT)
        if value is _ABSENT:
            return
        if not isinstance(value, dict):
            raise InvalidInputError(
                f"{'.'.join(path[:depth])}: must be an object, as {'.'.join(path)} is private", path[:depth]
            )


def with_value(fields: Mapping[str, Any], path: Path, value: Any) -> dict[str, Any]:
    """A copy of ``fields`` with the value at ``path``, which exists, replaced."""
    changed = dict(fields)
    changed[path[0]] = value if len(path) == 1 else with_value(changed[path[0]], path[1:], value)
    return changed


def refuse_marks(value: Any, path: tuple[str | int, ...] = ()) -> None:
    """Return if ``value`` contains nothing that looks like a private or an erased value.

    Raises:
        InvalidInputError: an object has a member of such a name; ``path`` is the member's.
    """
    if isinstance(value, dict):
        for mark in (PRIVATE_MARK, ERASED_MARK):
            if mark in value:
                where = ".".join(str(part) for part in (*path, mark))
                raise InvalidInputError(f"{where}: this name is kept for private fields", (*path, mark))
        for name, item in value.items():
            refuse_marks(item, (*path, name))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            refuse_marks(item, (*path, index))


def associated_data(tenant_id: str, hlc: str, key_id: str, path: Sequence[str]) -> bytes:
    """The associated data that binds a private value to its field."""
    return canonical.encode([_CONTEXT, tenant_id, hlc, key_id, list(path)])


def to_json(sealed: SealedValue) -> dict[str, Any]:
    """The object that replaces the value."""
    return {
        PRIVATE_MARK: {
            "alg": ALGORITHM,
            "ciphertext": _base64url(sealed.ciphertext),
            "key": sealed.key_id,
            "nonce": _base64url(sealed.nonce),
        }
    }


def from_json(value: Any) -> SealedValue | None:
    """The private value in ``value``, None if it is anything else."""
    if not isinstance(value, dict) or len(value) != 1:
        return None
    parts = value.get(PRIVATE_MARK)
    if not isinstance(parts, dict) or parts.keys() != {"alg", "ciphertext", "key", "nonce"}:
        return None
    key_id, nonce, ciphertext = parts["key"], _bytes_of(parts["nonce"]), _bytes_of(parts["ciphertext"])
    if (
        parts["alg"] != ALGORITHM
        or not isinstance(key_id, str)
        or _KEY_ID.fullmatch(key_id) is None
        or (nonce is None or len(nonce) != NONCE_BYTES)
        or (ciphertext is None or len(ciphertext) <= TAG_BYTES)
    ):
        return None
    return SealedValue(key_id, nonce, ciphertext)


def sealed_values(value: Any) -> Iterator[SealedValue]:
    """Every private value in ``value``; arrays contain none, since no declared path leads through one."""
    if (sealed := from_json(value)) is not None:
        yield sealed
    elif isinstance(value, dict):
        for item in value.values():
            yield from sealed_values(item)


def shown(value: Any, path: Path, show: Callable[[SealedValue, Path], Any]) -> Any:
    """``value``, which is at ``path``, with each private value replaced by the result of ``show``."""
    if (sealed := from_json(value)) is not None:
        return show(sealed, path)
    if isinstance(value, dict):
        return {name: shown(item, (*path, name), show) for name, item in value.items()}
    return value


def erased() -> dict[str, Any]:
    """The object shown for a private value whose key was destroyed."""
    return {ERASED_MARK: True}


def _base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _bytes_of(text: Any) -> bytes | None:
    if not isinstance(text, str):
        return None
    try:
        data = base64.b64decode(text.encode() + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return None
    return data if _base64url(data) == text else None


# --- entries about private fields -----------------------------------------------------------------
#
#     PRIVACY_DECLARED    {"fields": [...], "id": "<32 hex>", "subject": "..."?}
#     SUBJECT_ERASED      {"id": "<32 hex>", "key_ids": ["<32 hex>", ...], "reason": "..."?}

_Id = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
_NAMED: Final = {SystemAction.PRIVACY_DECLARED: "privacy", SystemAction.SUBJECT_ERASED: "erasure"}
_MEMBERS: Final[Mapping[str, Mapping[str, tuple[Any, bool]]]] = {
    SystemAction.PRIVACY_DECLARED: {"fields": (list[str], False), "id": (_Id, False), "subject": (str, True)},
    SystemAction.SUBJECT_ERASED: {"id": (_Id, False), "key_ids": (list[_Id], False), "reason": (str, True)},
}
"""By action: the members, the type of each, and whether it may be missing."""


def name_of(action: SystemAction, facts_id: str) -> str:
    """The value of ``job_id`` in the entry."""
    return f"{_NAMED[action]}:{facts_id}"


def facts_of(action: str, value: Any) -> dict[str, Any]:
    """The members of ``value`` that entries of this action have.

    Raises:
        InvalidInputError: ``value`` is not the payload of such an entry.
    """
    if (members := _MEMBERS.get(action)) is None or not isinstance(value, dict):
        raise InvalidInputError("it is none that says what is private or who was erased")
    facts = {name: value[name] for name in members if name in value}
    for name, (kind, is_optional) in members.items():
        if not (_is_of(facts[name], kind) if name in facts else is_optional):
            raise InvalidInputError(f"{name}: is not what such an entry has there", (name,))
    canonical.encode(facts)
    return facts


def _is_of(value: Any, kind: Any) -> bool:
    try:
        convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True
