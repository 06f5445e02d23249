"""Options that several commands share, so that each is spelled and explained the same everywhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from terminal.program import KEYS_HELP


def local_url() -> str:
    """Address of the service on this machine, at port ``TALLY_PORT``, else 8080."""
    return f"http://127.0.0.1:{os.environ.get('TALLY_PORT') or '8080'}"


Url = Annotated[
    str,
    typer.Option(
        "--url",
        envvar="TALLY_URL",
        default_factory=local_url,
        show_default="the local service",
        help="Address of the service.",
    ),
]
Tenant = Annotated[str, typer.Option("--tenant", "-t", help="Tenant whose chain this is about.")]
Level = Literal["LOCAL", "REGIONAL", "GLOBAL"]
Durability = Annotated[
    Level | None,
    typer.Option("--durability", help="Level at which events are acknowledged.", show_default="by type"),
]
Keys = Annotated[
    Path | None,
    typer.Option("--keys", help=f"{KEYS_HELP}."),
]
Key = Annotated[
    str | None,
    typer.Option(
        "--key", metavar="URI", help="Key that signs what is made here, when it is not the node's of the settings."
    ),
]
WitnessKeys = Annotated[
    list[str] | None,
    typer.Option(
        "--witness-key",
        help="Verifier key of a witness you trust, or a file that holds it; may be given several times.",
    ),
]
PolicyFile = Annotated[
    Path | None,
    typer.Option(
        "--policy",
        exists=True,
        dir_okay=False,
        help="A tlog-policy file: below its quorum of witnesses the exit code is 3.",
    ),
]
TsaCa = Annotated[
    Path | None,
    typer.Option("--tsa-ca", exists=True, dir_okay=False, help="PEM certificates that time stamps must lead to."),
]
CheckpointFile = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint",
        exists=True,
        dir_okay=False,
        help="A checkpoint kept outside the ledger; shows whether the chain went back since.",
    ),
]
