"""Building ``ledger._native`` where there is a C compiler; without one the package runs on Python alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from setuptools import Distribution, Extension

BUILT_IN = "build/native"


class NativeFunctions(BuildHookInterface):  # type: ignore[type-arg]
    """Compiles the module in place, beside its source, and takes it into a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before anything is built."""
        extension = Extension("ledger._native", ["ledger/_native.c"], libraries=["dl"], optional=True)
        build = Distribution({"name": "tallystick", "ext_modules": [extension]}).get_command_obj("build_ext")
        build.inplace = build.force = True
        build.build_lib = build.build_temp = BUILT_IN
        build.ensure_finalized()
        made = Path(build.get_ext_fullpath(extension.name)).resolve()
        made.unlink(missing_ok=True)
        build.run()
        if made.is_file():
            build_data["artifacts"].append(f"/{made.relative_to(self.root)}")
            build_data["pure_python"], build_data["infer_tag"] = False, True
