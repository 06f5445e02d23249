"""The modules in C as ``tests.fuzz.sanitize`` built them, in the place of the installed ones.

Import it first, or name it to pytest with ``-p``: Python then loads ``MODULES`` from the folder ``SANITIZED_MODULES``.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Final

VARIABLE: Final = "SANITIZED_MODULES"
"""Names the folder that the modules were built into."""
IS_USED: Final = VARIABLE in os.environ
MODULES: Final = ("app.runtime.state._native", "ledger._native", "wal._native")
SUFFIX: Final = str(sysconfig.get_config_var("EXT_SUFFIX"))


class _InstrumentedModules:
    """Finds ``MODULES`` in one folder, and no others."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in MODULES:
            return None
        file = str(self._folder.joinpath(*name.split(".")).with_suffix(SUFFIX))
        return importlib.util.spec_from_file_location(
            name, file, loader=importlib.machinery.ExtensionFileLoader(name, file)
        )


def check_used() -> None:
    """Each module is the instrumented one, and the sanitizer is there that it calls."""
    for name in MODULES:
        file = Path(str(importlib.import_module(name).__file__))
        assert file.is_relative_to(os.environ[VARIABLE]), f"{name} was loaded from {file}"
        assert b"__asan_report_load" in file.read_bytes(), f"{file} was built without a sanitizer"
    assert "libasan" in Path("/proc/self/maps").read_text()


if IS_USED:
    assert not sys.modules.keys() & set(MODULES), "a module in C is loaded already"
    sys.meta_path.insert(0, _InstrumentedModules(Path(os.environ[VARIABLE])))  # type: ignore[arg-type]
