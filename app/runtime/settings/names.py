"""Names of settings as people write them, in the environment or in a file: a wrong one is told the names near it."""

from __future__ import annotations

import os

from pydantic import BaseModel, ValidationError

from app.runtime.settings.validation_words import words_of

ENV_PREFIX = "TALLY_"
ENV_OF_PIPELINE = frozenset(
    f"TALLY_PIPELINE_{name}" for name in ("ARCHIVE", "DSN", "LOGS", "NO_DSN", "SIGNING_KEY", "SIGNING_PIN")
)
ENV_OF_CLIENTS = frozenset(
    f"TALLY_{name}" for name in ("CA", "CLUSTER", "EVENT", "LEG", "SPOOL", "STATUS", "TENANT", "TOKEN", "URL", "WAIT")
)
ENV_OF_DEPLOYMENT = frozenset(
    f"TALLY_{name}" for name in ("AUDITOR_PASSWORD", "KEEPER_OPTIONS", "OWNER_PASSWORD", "SERVICE_PASSWORD")
)
ENV_NOT_SETTINGS = frozenset({"TALLY_CONFIG"}) | ENV_OF_CLIENTS | ENV_OF_DEPLOYMENT | ENV_OF_PIPELINE
"""Variables with our prefix that are read elsewhere: the path of the file of settings, what clients and recipes ask and
with what, what units and scripts of SQL read, the pipeline's own."""


def unknown_variables(settings: type[BaseModel]) -> list[str]:
    """What to say of each variable of the environment that has our prefix and names none of ``settings``."""
    return [
        f"{name} is not a setting; allowed: {', '.join(_names_near(settings, name))}"
        for name in sorted(os.environ)
        if name.upper().startswith(ENV_PREFIX)
        and name.upper() not in ENV_NOT_SETTINGS
        and not _is_setting(settings, _path(name))
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


def _is_setting(settings: type[BaseModel], path: list[str]) -> bool:
    section = _section(settings, path[:-1])
    return section is not None and path[-1] in section.model_fields


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
