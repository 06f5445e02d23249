"""Fields that no form has: which one a caller may have meant, and which there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final

from pydantic import TypeAdapter

from app.runtime.settings.words import nearest, words_of
from ledger.enumeration import first_of

LISTED_MAX: Final = 16
"""Fields that are listed where none is near; of more it is said how many."""


def first_error(items: Sequence[Mapping[str, Any]], form: TypeAdapter[Any] | None) -> tuple[tuple[str | int, ...], str]:
    """Where the first thing is that ``items``, errors of pydantic, found wrong, and what. An unknown field comes before
    a missing one beside it, which it may stand for. ``form`` is what was not met, None where it is not known."""
    first = items[0]
    parent = tuple(first["loc"][:-1])
    if first["type"] not in ("missing", "extra_forbidden"):
        return tuple(first["loc"]), words_of(first)
    beside = [item for item in items if tuple(item["loc"][:-1]) == parent]
    missing = [str(item["loc"][-1]) for item in beside if item["type"] == "missing"]
    unknown = [str(item["loc"][-1]) for item in beside if item["type"] == "extra_forbidden"]
    if not unknown:
        return tuple(first["loc"]), words_of(first)
    name = next((name for name in unknown if nearest(name, missing)), unknown[0])
    known = [] if form is None else fields_at(_schema_of(form), parent)
    return (*parent, name), _unknown(name, missing, known)


def nearest_field(given: object, name: str) -> str | None:
    """The member of ``given`` that may stand for the one called ``name``, which it lacks."""
    return nearest(name, [key for key in given if isinstance(key, str)]) if isinstance(given, dict) else None


def _unknown(name: str, missing: Sequence[str], known: Sequence[str]) -> str:
    near = nearest(name, missing) or nearest(name, known)
    if near is not None:
        required = ", which is required" if near in missing else ""
        return f"there is no such field; the nearest is {near}{required}"
    if not known:
        return "there is no such field"
    return f"there is no such field; there are {first_of(known, LISTED_MAX)}"


def fields_at(schema: Mapping[str, Any], path: Sequence[str | int]) -> list[str]:
    """The fields that an object may have at a place of a JSON schema. ``path`` is as pydantic has it: where a form is
    chosen among several, its tag is a part."""
    node = schema
    for part in path:
        node = _step(_resolved(node, schema), part)
    return list(_resolved(node, schema).get("properties", ()))


def _step(node: Mapping[str, Any], part: str | int) -> Mapping[str, Any]:
    forms = node.get("discriminator", {}).get("mapping", {})
    if part in forms:
        return {"$ref": forms[part]}
    if isinstance(part, int):
        found = node.get("items")
    else:
        found = node.get("properties", {}).get(part) or node.get("additionalProperties")
    return found if isinstance(found, dict) else {}


def _resolved(node: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    name = str(node.get("$ref", "")).rpartition("/")[2]
    return schema["$defs"][name] if name else node


@cache
def _schema_of(form: TypeAdapter[Any]) -> Mapping[str, Any]:
    return form.json_schema()
