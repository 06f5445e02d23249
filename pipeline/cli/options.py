"""Options that several pipeline commands share, spelled and explained the same everywhere."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated, Final

import typer

DSN_VARIABLE: Final = "TALLY_PIPELINE_DSN"
"""``tally pipeline`` puts the local service's database here."""
SIGNING_KEY_VARIABLE: Final = "TALLY_PIPELINE_SIGNING_KEY"
ARCHIVE_VARIABLE: Final = "TALLY_PIPELINE_ARCHIVE"
LOG_FOLDER_VARIABLE: Final = "TALLY_PIPELINE_LOGS"

Master = Annotated[
    str | None,
    typer.Option(
        "--master",
        show_default="local[*]",
        help="Spark master, such as local[4] or spark://host:7077; under spark-submit what that says.",
    ),
]
Dsn = Annotated[
    str | None,
    typer.Option("--dsn", envvar=DSN_VARIABLE, show_default="the local service's", help="PostgreSQL of the ledger."),
]
SigningKey = Annotated[
    str | None,
    typer.Option(
        "--signing-key",
        envvar=SIGNING_KEY_VARIABLE,
        show_default="the local service's",
        help="Key that signs what is written, as signing.key_uri: file:PATH or a signer of an HSM, Vault or cloud.",
    ),
]
Keys = Annotated[
    Path | None,
    typer.Option("--keys", help="Public keys you trust: a PEM file, a folder of them, or a saved answer of /v1/keys."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


def log_file(command: str) -> Path:
    """Where Spark's log of this run goes: the folder the environment names, else the working folder's ``logs``."""
    folder = Path(os.environ.get(LOG_FOLDER_VARIABLE) or "logs").absolute()
    return folder / f"pipeline-{command}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.getpid()}.log"
