"""``tally`` as a process of its own, forked from one that has imported its commands already.

That commands find what they import is no part of this: each file of tests that is about starting, such as
``tests/app/test_cli_outcome.py``, starts ``COLD`` ones too, and so does whatever runs ``tally`` below another program.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.forked import Forked, run_forked

COLD = (sys.executable, "-m", "cli")
"""``tally`` that imports by itself."""
IMPORTED = "from tests.tally import import_all; import_all()"
"""What has run where ``tally`` is forked from; it serves other programs that use the service as well."""

_LAZY = (
    "alembic.command",
    "app.dev.embedded",
    "app.node.serving",
    "app.store.migrate",
    "asyncpg",
    "certifi",
    "cryptography.hazmat.primitives.ciphers.aead",
    "encodings.idna",
    "httpcore",
    "rich.markdown",
    "typer._adapters",
    "typer.rich_utils",
    "uvicorn.lifespan.off",
    "uvloop",
)
"""What commands import when they run."""


class Tally(Forked):
    """``tally`` with these arguments, else as ``Forked``."""

    def __init__(self, *arguments: str | Path, **given: Any) -> None:
        super().__init__(IMPORTED, *COLD[1:], *arguments, **given)


def run_tally(
    *arguments: str | Path, said: str = "", folder: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run ``tally`` to its end, with ``said`` on its standard input; of TALLY_* it has only what is given here."""
    return run_forked(IMPORTED, *COLD[1:], *arguments, said=said, env=bare_environment() | environment, cwd=folder)


def run_tally_limited(
    file_bytes_max: int, *arguments: str | Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """The same where no file may become longer than so many bytes, as on a disk that is full."""
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({file_bytes_max}, {file_bytes_max}))"
    begin = "import runpy; runpy.run_module('cli', run_name='__main__', alter_sys=True)"
    return run_forked(IMPORTED, "-c", f"{limit}; {begin}", *arguments, env=bare_environment() | environment)


def bare_environment() -> dict[str, str]:
    """The environment without anything that is meant for ``tally``."""
    return {name: value for name, value in os.environ.items() if not name.startswith("TALLY_")}


def import_all() -> None:
    """Import what commands are, and what they import."""
    from cli import Commands
    from lab import COMMANDS as LAB_COMMANDS

    for name in (*(entry.module for entry in (*Commands.ENTRY_POINTS.values(), *LAB_COMMANDS.values())), *_LAZY):
        importlib.import_module(name)
