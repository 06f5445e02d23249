"""What is wrong with a value or a name that somebody gave, in words: a regular expression is for programs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, Final

from pydantic import BaseModel, ValidationError

from ledger import hlc, names, rfc3339
from ledger.machines.promises import OVERCOMMIT_FACTOR
from ledger.machines.retention import KEPT_PATTERN
from signing.manifest import LOG_ORIGIN

_TENANT: Final = "1 to 63 of a-z, 0-9, _ and -, the first and the last a letter or a digit"
_DIGEST: Final = "must be 64 hexadecimal digits in small letters"
_VISIBLE: Final = "visible ASCII characters"
WORDS: Final[Mapping[str, str]] = {
    names.anchored(names.TENANT_ID): f"must name a tenant: {_TENANT}",
    names.anchored(names.READABLE_TENANT_ID): f"must name a tenant: {_TENANT}; or _system",
    names.anchored(f"({names.READABLE_TENANT_ID})?"): f"must name a tenant, or nothing: {_TENANT}; or _system",
    names.anchored(f"({names.NEWS_CURSOR})?"): "must be the cursor of an answer before, or nothing",
    names.anchored(names.TENANTS): f"must be a tenant ({_TENANT}), the beginning of some and *, or * for all",
    names.anchored(names.NODE_ID): "must be 1 to 63 of a-z, 0-9 and -, the first and the last a letter or a digit",
    names.anchored(names.GATE): "must be 1 to 32 of a-z and 0-9",
    names.anchored(f"({names.GATE})?"): "must be 1 to 32 of a-z and 0-9, or nothing",
    names.anchored(names.PRINCIPAL): "must be 1 to 128 of A-Z, a-z, 0-9, . _ @ and -, the first a letter or a digit",
    names.anchored(names.JOB_ID): "must be a job id: 1 to 128 of A-Z, a-z, 0-9, . _ : and -, but neither . nor ..",
    names.anchored(OVERCOMMIT_FACTOR): 'must be a number from 1 to 999.999 as text, such as "1.5"',
    names.anchored(names.PROMISE_NAME): "must be 1 to 120 of A-Z, a-z, 0-9, . _ : and -, the first other than .",
    names.anchored(names.SPAN): "must be a traceparent of W3C Trace Context: 00, trace, span and flags",
    names.anchored(hlc.TEXT): "must be an HLC, such as 1704931200000:1:node-7f3a: milliseconds, a counter and a node",
    names.anchored(rfc3339.TEXT): "must be a time of RFC 3339, such as 2026-11-21T13:40:00.250Z",
    rfc3339.MOMENT_PATTERN: "must be an HLC, or a time of RFC 3339, such as 2026-11-21T13:40:00.250Z",
    names.anchored(LOG_ORIGIN): "must be the origin of a ledger's log, as its checkpoints have it before the tenant",
    KEPT_PATTERN: "must be a whole number with s, m, h or d, such as 400d",
    "^(none|(governance|compliance):[1-9][0-9]{0,4}d)$": "must be none, or governance or compliance with days, such as "
    "governance:400d",
    names.anchored("[0-9a-f]{64}"): _DIGEST,
    "^[0-9a-f]{64}$": _DIGEST,
    "^[!-~]{1,255}$": f"must be one Idempotency-Key of 1 to 255 {_VISIBLE}",
    r"^[A-Za-z0-9_-]+([ \t]*,[ \t]*[A-Za-z0-9_-]+)*$": "must be tokens of Tally-Session, separated by commas",
    "^[A-Za-z0-9_-]{1,2048}$": "must be the next_cursor of a page before",
    "^[A-Z][A-Z_]{0,63}$": "must be an action, which is written in capitals, such as COMPLETE",
    r"^[\x21-\x7e]{1,200}$": f"must be 1 to 200 {_VISIBLE}",
    "^[A-Za-z0-9._~+/=-]+$": "must be a token: letters, digits and . _ ~ + / = -",
    r"^[^\x00-\x1f\x7f]+$": "must not have a control character",
    "^[a-z][a-z0-9_]{0,63}$": "must be 1 to 64 of a-z, 0-9 and _, the first a letter",
    "^[0-9a-f]{16}$": "must be a key id: 16 hexadecimal digits in small letters",
    names.anchored(names.REPORT_ID): "must be the id of a report: a node, - and 32 hexadecimal digits in small letters",
    "^[!-*,-~]{1,200}$": f"must be 1 to 200 {_VISIBLE} other than +",
    "^[!-~]([ -~]{0,248}[!-~])?$": "must be 1 to 250 characters of ASCII, without blanks at its ends",
    "^[!-~]+( [!-~]+)*$": f"must be words of {_VISIBLE}, with one blank between two",
}
"""By pattern, of all values that callers and settings give. Each goes on behind the name of the field."""


def words_of(item: Mapping[str, Any]) -> str:
    """What pydantic found wrong with a value, an item of its ``errors()``, in words."""
    if item["type"] == "string_pattern_mismatch":
        return WORDS.get(item["ctx"]["pattern"], "is not of the form that it must have")
    return "is required" if item["type"] == "missing" else str(item["msg"]).removeprefix("Value error, ")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Which of the known names somebody may have meant who wrote ``name``; None where none is near."""
    name, known = name.lower().replace("-", "_"), list(known)
    longer = [each for each in known if each.startswith(f"{name}_")]
    found = get_close_matches(name, known, 1) or (longer if len(longer) == 1 else [])
    return found[0] if found else None


ENV_PREFIX = "TALLY_"
ENV_OF_PIPELINE = frozenset(
    f"TALLY_PIPELINE_{name}"
    for name in ("ARCHIVE", "ARCHIVE_LOCK", "DSN", "LOGS", "NO_DSN", "PROGRESS", "SIGNING_KEY", "SIGNING_PIN")
)
ENV_NOT_SETTINGS = ENV_OF_PIPELINE | {
    f"TALLY_{name}"
    for name in (
        *("CONFIG", "CA", "CLUSTER", "EVENT", "LEG", "SIGN_KEY", "SPOOL", "STATUS", "TENANT", "TOKEN"),
        *("URL", "WAIT"),
        *("AUDITOR_PASSWORD", "KEEPER_OPTIONS", "OWNER_PASSWORD", "SERVICE_PASSWORD"),
    )
}
"""Variables with our prefix that are read elsewhere: the path of the file of settings, what clients and recipes ask and
with what, what units and scripts of SQL read, the pipeline's own."""


def unknown_variables(settings: type[BaseModel]) -> list[str]:
    """What to say of each variable of the environment that has our prefix and names none of ``settings``."""
    return [
        f"{name} is not a setting; allowed: {', '.join(_names_near(settings, name))}"
        for name in sorted(os.environ)
        if name.upper().startswith(ENV_PREFIX)
        and name.upper() not in ENV_NOT_SETTINGS
        and _path(name)[-1] not in getattr(_section(settings, _path(name)[:-1]), "model_fields", ())
    ]


def _section(settings: type[BaseModel], path: list[str]) -> type[BaseModel] | None:
    """The section that these names lead to, all settings without any; None when they lead to none."""
    found = settings
    for name in path:
        field = found.model_fields.get(name)
        kind = None if field is None else field.annotation
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            return None
        found = kind
    return found


def _path(variable: str) -> list[str]:
    """The names that lead to a setting, as a variable of the environment has them."""
    return variable.upper().removeprefix(ENV_PREFIX).lower().split("__")


def _names_near(settings: type[BaseModel], variable: str) -> list[str]:
    """The settings of the innermost section that ``variable`` points into, as variables of the environment."""
    path = _path(variable)
    while (section := _section(settings, path)) is None:
        path.pop()
    return [
        ENV_PREFIX + "__".join([*path, name]).upper() + ("__…" if _section(settings, [*path, name]) else "")
        for name in section.model_fields
    ]


def explain(error: ValidationError, settings: type[BaseModel]) -> list[str]:
    """What is wrong with each setting that ``error`` found, by its name; of an unknown one the names that are near."""
    lines = []
    for item in error.errors(include_url=False, include_input=False):
        name = ".".join(str(part) for part in item["loc"])
        message = words_of(item)
        if item["type"] == "extra_forbidden":
            message = f"is not a setting; allowed: {', '.join(_names_near(settings, name.replace('.', '__')))}"
        lines.append(f"{name}: {message}" if name else message)
    return lines
