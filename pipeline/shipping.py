"""The project's own packages as one file that the workers of a cluster import them from.

Packages of others MUST be on the workers already: a virtual environment under the same path as the driver's, or one
that ``PYSPARK_PYTHON`` names.
"""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path
from typing import Final

PACKAGES: Final = ("ledger", "signing", "pipeline")
"""What tasks import."""


def pack(folder: Path) -> Path:
    """A zip of ``PACKAGES`` in ``folder``, as they are imported here."""
    archive = folder / "tallystick.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        for package in PACKAGES:
            root = _root_of(package)
            for path in sorted(root.rglob("*")):
                if path.is_file() and "__pycache__" not in path.parts:
                    packed.write(path, f"{package}/{path.relative_to(root)}")
    return archive


def _root_of(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"{package} is part of this program"
    assert spec.origin is not None, f"{package} has an __init__.py"
    return Path(spec.origin).parent
