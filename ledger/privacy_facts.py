"""What the entries PRIVACY_DECLARED and SUBJECT_ERASED of a tenant's chain say, and the notes of them.

::

    PRIVACY_DECLARED    {"fields": [...], "id": "<32 hex>", "subject": "..."?}
    SUBJECT_ERASED      {"id": "<32 hex>", "key_ids": ["<32 hex>", ...], "reason": "..."?}
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

from ledger import canonical
from ledger.errors import InvalidInputError
from ledger.facts.events import SystemAction

_ID: Final = re.compile(r"[0-9a-f]{32}")
_NAMED: Final = {SystemAction.PRIVACY_DECLARED: "privacy", SystemAction.SUBJECT_ERASED: "erasure"}


def name_of(action: SystemAction, facts_id: str) -> str:
    """What stands in the entry where others have their job."""
    return f"{_NAMED[action]}:{facts_id}"


def facts_of(action: str, value: Any) -> dict[str, Any]:
    """Those members of ``value`` that entries of this action have.

    Raises:
        InvalidInputError: it is not what such an entry says.
    """
    members = _MEMBERS.get(action)
    if members is None or not isinstance(value, dict):
        raise InvalidInputError("it is none that says what is private or who was erased")
    facts = {name: value[name] for name in members if name in value}
    for name, (fits, optional) in members.items():
        if not (fits(facts[name]) if name in facts else optional):
            raise InvalidInputError(f"{name}: is not what such an entry has there", (name,))
    canonical.encode(facts)
    return facts


def _is_id(value: Any) -> bool:
    return isinstance(value, str) and _ID.fullmatch(value) is not None


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_id, value))


_Fits = Callable[[Any], bool]
_MEMBERS: Final[dict[str, dict[str, tuple[_Fits, bool]]]] = {
    SystemAction.PRIVACY_DECLARED: {"fields": (_are_texts, False), "id": (_is_id, False), "subject": (_is_text, True)},
    SystemAction.SUBJECT_ERASED: {"id": (_is_id, False), "key_ids": (_are_ids, False), "reason": (_is_text, True)},
}
"""By action: the members, what each must be, and whether it may be missing."""
