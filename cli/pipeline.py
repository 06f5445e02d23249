"""``tally pipeline``: executes the data pipeline, a separate program, with settings of the local service.

The pipeline also runs without a service, so it never reads the service's settings: this module puts them into its
environment. Its packages are large and rarely needed; in a checkout they are installed at first use.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import typer

from app.runtime.settings.config import Settings, load_settings
from app.trust.node_keys import uri_in_use
from ledger.errors import LedgerError
from pipeline import is_installed
from terminal.outcome import err, fail

_CHECKOUT: Final = Path(__file__).resolve().parents[1]


def pipeline(context: typer.Context) -> None:
    """Verify, archive, merge, compare and report on ledgers of any size, on Spark.

    \b
    Examples:
      tally pipeline --help
      tally pipeline verify
      tally pipeline archive --dest s3://ledger-archive/prod
    """
    environment = prepared(load_settings())
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", "pipeline", *context.args], environment)  # noqa: S606 (takes our place)


def prepared(settings: Settings) -> dict[str, str]:
    """Install the pipeline's packages if needed; returns the environment to execute it in."""
    if not is_installed():
        _install()
    return {**_known_of(settings), **os.environ}


def _install() -> None:
    """Install the pipeline's packages from the lock file of this command's checkout."""
    if not (_CHECKOUT / "Makefile").exists() or Path(sys.prefix) != _CHECKOUT / ".venv":
        raise fail("the packages of the pipeline are not installed: pip install 'tallystick[pipeline]'")
    err.print("installing what the pipeline needs, once: Spark and Arrow, about a minute ...")
    if subprocess.run(["make", "--silent", "-C", _CHECKOUT, "pipeline"], stdout=sys.stderr, check=False).returncode:
        raise fail("the packages of the pipeline could not be installed; see above")


def _known_of(settings: Settings) -> dict[str, str]:
    """The environment variables of the pipeline from the settings, or from the embedded PostgreSQL."""
    known = {
        "TALLY_PIPELINE_SIGNING_KEY": uri_in_use(settings),
        "TALLY_PIPELINE_LOGS": str(settings.data_dir / "logs"),
        **({} if settings.signing.pin is None else {"TALLY_PIPELINE_SIGNING_PIN": settings.signing.read_pin()}),
        **({} if settings.archive.url is None else {"TALLY_PIPELINE_ARCHIVE": settings.archive.url}),
        **({} if settings.archive.lock == "none" else {"TALLY_PIPELINE_ARCHIVE_LOCK": settings.archive.lock}),
    }
    if settings.database_url is not None:
        return {**known, "TALLY_PIPELINE_DSN": settings.database_url}
    from cli.serve import embedded_postgres

    try:
        return {**known, "TALLY_PIPELINE_DSN": embedded_postgres(settings.data_dir).service_url()}
    except (LedgerError, OSError) as error:
        return {**known, "TALLY_PIPELINE_NO_DSN": str(error)}
