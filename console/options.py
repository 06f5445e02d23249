"""Options that commands of both programs have, spelled and explained the same."""

from __future__ import annotations

from typing import Annotated, Final

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
KEYS_HELP: Final = "Public keys you trust: a PEM file, a folder of them, or a saved answer of /v1/keys"
