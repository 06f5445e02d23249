"""Building what is in C where there is a C compiler; without one the package runs on Python alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from setuptools import Distribution, Extension

BUILT_IN = "build/native"
IN_C = ("app/runtime/state", "ledger", "wal")
"""Folders of packages with a module ``_native``."""


class NativeFunctions(BuildHookInterface):  # type: ignore[type-arg]
    """Compiles the modules in place, beside their sources, and takes them into a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before anything is built."""
        extensions = [
            Extension(f"{folder.replace('/', '.')}._native", [f"{folder}/_native.c"], libraries=["dl"], optional=True)
            for folder in IN_C
        ]
        build = Distribution({"name": "tallystick", "ext_modules": extensions}).get_command_obj("build_ext")
        build.inplace = build.force = True
        build.build_lib = build.build_temp = BUILT_IN
        build.ensure_finalized()
        made = [Path(build.get_ext_fullpath(extension.name)).resolve() for extension in extensions]
        for path in made:
            path.unlink(missing_ok=True)
        build.run()
        for path in made:
            if path.is_file():
                build_data["artifacts"].append(f"/{path.relative_to(self.root)}")
                build_data["pure_python"], build_data["infer_tag"] = False, True
