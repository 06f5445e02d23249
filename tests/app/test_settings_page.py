"""The page of settings names every setting there is, and no other, each with its default and what it may be."""

from __future__ import annotations

import re
from collections.abc import Sized
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
from annotated_types import Ge, Le
from pydantic import AfterValidator, BaseModel, TypeAdapter
from pydantic.fields import FieldInfo

from app.runtime.settings.config import Settings
from app.runtime.settings.types import Bounds
from app.runtime.settings.words import ENV_NOT_SETTINGS, unknown_variables
from wal.group_commit import GroupCommit
from wal.log import Log

PAGE = (Path(__file__).parents[2] / "docs" / "settings.md").read_text()
_ROW = re.compile(r"^\| `([a-z_.]+)` \| ([^|]+) \| ([^|]+) \| [^|]+ \|$", re.MULTILINE)
DEFAULTS = {name: default for name, default, _ in _ROW.findall(PAGE)}
ROWS = {name: allowed for name, _, allowed in _ROW.findall(PAGE)}


def fields(of: type[BaseModel] = Settings, above: str = "") -> dict[str, FieldInfo]:
    found: dict[str, FieldInfo] = {}
    for name, field in of.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            found |= fields(section, f"{above}{name}.")
        else:
            found[above + name] = field
    return found


def bounds_of(field: FieldInfo) -> tuple[str, str] | None:
    """The least and the most that a setting may be, as a person writes them; None when it has no bounds."""
    metadata = [*field.metadata, *(each for part in get_args(field.annotation) for each in metadata_of(part))]
    for each in metadata:
        if isinstance(each, AfterValidator) and isinstance(each.func, Bounds):
            return each.func.low, each.func.high
    low = [str(each.ge) for each in metadata if isinstance(each, Ge)]
    high = [str(each.le) for each in metadata if isinstance(each, Le)]
    return (low[0], high[0]) if low and high else None


def metadata_of(annotation: Any) -> list[Any]:
    constraints = [*getattr(annotation, "__metadata__", ())]
    return [item for each in constraints for item in (each.metadata if isinstance(each, FieldInfo) else [each])]


def allowed(field: FieldInfo) -> str | None:
    """What the page must say of a setting; None when it is free to say it in words."""
    if get_origin(field.annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(field.annotation))
    if field.annotation is bool:
        return "`true`, `false`"
    bounds = bounds_of(field)
    return f"{bounds[0]} to {bounds[1]}" if bounds is not None else None


def test_the_page_lists_exactly_the_settings_that_exist() -> None:
    assert set(ROWS) == set(fields())


def test_the_page_says_what_each_setting_may_be() -> None:
    said = {name: allowed(field) for name, field in fields().items()}
    known = {name: text for name, text in said.items() if text is not None}
    assert {name: ROWS[name] for name in known} == known
    assert len(known) > 25, "the bounds are not seen any more"


@pytest.mark.parametrize("name", sorted(ENV_NOT_SETTINGS))
def test_the_page_names_the_variables_that_are_no_settings(name: str) -> None:
    assert f"`{name}`" in PAGE


def test_a_shell_set_up_for_clients_and_recipes_starts_a_service(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [
        path
        for folder in ("clients", "deploy", "docs")
        for path in (Path(__file__).parents[2] / folder).rglob("*")
        if path.is_file() and path.suffix not in (".png", ".pyc")
    ]
    named = {name for path in files for name in re.findall(r"\bTALLY_[A-Z_]+[A-Z]\b", path.read_text(errors="replace"))}
    assert "TALLY_CLUSTER" in named
    for name in named:
        monkeypatch.setenv(name, "any")
    assert unknown_variables(Settings) == []


@pytest.mark.parametrize("end", [0, 1], ids=["least", "most"])
def test_the_wal_takes_every_setting_at_both_ends_of_what_it_may_be(end: int, tmp_path: Path) -> None:
    bounds = {name.removeprefix("wal."): bounds_of(field) for name, field in fields().items() if "wal." in name}
    ends = {name: pair[end] for name, pair in bounds.items() if pair is not None}
    wal = Settings.model_validate({"wal": ends}).wal
    writer = GroupCommit(
        Log(tmp_path, node_id="node-a", wal_id="00" * 16, epoch=1, next_lsn=1, segment_bytes=wal.segment_bytes),
        on_failure=lambda error: pytest.fail(str(error)),
        batch_timeout_us=wal.batch_timeout_microseconds,
        batch_max_entries=wal.batch_max_entries,
        batch_max_bytes=wal.batch_max_bytes,
        record_bytes_max=wal.record_bytes_max,
        queue_max_entries=wal.backlog_max_entries,
    )
    writer.close(60.0)


def test_every_setting_has_the_default_that_the_page_says() -> None:
    wrong = {}
    for name, field in fields().items():
        said, default = DEFAULTS[name], field.get_default(call_default_factory=True)
        if value := re.fullmatch("`([^<]+)`", said):
            form = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
            is_right = TypeAdapter(form).validate_python(value[1]) == default
        else:  # words: it is not set, or made by the node
            is_right = default is None or (isinstance(default, Sized) and not default)
        if not is_right:
            wrong[name] = said, default
    assert not wrong
