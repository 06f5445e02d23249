"""The roles file for servers of one's own, run as an administrator runs it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from app.dev.account import find_package

ROLES_SQL = Path(__file__).parents[2] / "deploy" / "postgres" / "roles.sql"


def run_roles_sql(superuser_url: str, **passwords: str) -> str:
    """What psql says when it fails, nothing when it does not; ``passwords`` are the file's variables."""
    psql = find_package() / "pginstall18" / "bin" / "psql"
    done = subprocess.run(
        [psql, "-X", "-d", superuser_url, "-f", ROLES_SQL],
        env={"PATH": os.environ["PATH"]} | passwords,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return "" if done.returncode == 0 else done.stdout
