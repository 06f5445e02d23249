"""Options that commands of both programs have, spelled and explained the same."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
KEYS_HELP: Final = "Public keys you trust: a PEM file, a folder of them, or a saved answer of /v1/keys"
State = Annotated[
    Path | None,
    typer.Option(
        "--state",
        metavar="DIR",
        file_okay=False,
        show_default="$XDG_STATE_HOME/tallystick, else ~/.local/state/tallystick",
        help="Where the newest checkpoint verified of each log is remembered, to compare with the next time.",
    ),
]
NoState = Annotated[bool, typer.Option("--no-state", help="Remember nothing, and compare with nothing remembered.")]
