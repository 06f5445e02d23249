"""What the edge uses of the inside of other libraries is there, or the start says what is not and what to do."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.edge import library_internals
from app.edge.library_internals import USED, HttpToolsProtocol, RequestResponseCycle, check_libraries
from app.node.wiring import running
from ledger.errors import StartRefusedError
from tests.app.conftest import MakeSettings

ROOT = Path(__file__).parent.parent.parent


def test_the_versions_in_use_have_all_that_is_used() -> None:
    check_libraries()


def test_each_library_whose_inside_is_used_has_an_upper_bound() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    bounded = {each.split(">=")[0] for each in declared if ",<" in each}
    assert {library for library, _ in USED.values()} <= bounded


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Changes classes before they are read, which a process does once."""
    library_internals._names_of.cache_clear()
    yield monkeypatch
    library_internals._names_of.cache_clear()


async def test_a_start_is_refused_by_the_name_of_what_a_library_has_no_more(
    make_settings: MakeSettings, changed: pytest.MonkeyPatch
) -> None:
    """The node starts with no database: it is refused before it asks for one."""
    changed.delattr(HttpToolsProtocol, "on_response_complete")
    with pytest.raises(StartRefusedError) as refused:
        async with running(make_settings(), "postgresql://localhost:1/none"):
            pass
    assert "uvicorn" in str(refused.value)
    assert "HttpToolsProtocol has no on_response_complete; install uvicorn" in str(refused.value)


def test_what_a_constructor_no_longer_sets_is_named_too(changed: pytest.MonkeyPatch) -> None:
    def made_otherwise(self: object) -> None:
        return

    changed.setattr(RequestResponseCycle, "__init__", made_otherwise)
    with pytest.raises(StartRefusedError, match="RequestResponseCycle has no default_headers; install"):
        library_internals.check_libraries()
