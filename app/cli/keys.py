"""``tally keys``: make a signing key, list the keys that a service has signed with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.table import Table

from app.cli.client import LedgerClient
from app.cli.options import Json, Url
from app.cli.outcome import out, print_json
from signing.keys import generate

keys = typer.Typer(no_args_is_help=True, help="Signing keys.")


@keys.command("new")
def new(
    path: Annotated[Path, typer.Argument(help="File to make; must not exist.")],
    algorithm: Annotated[
        Literal["ed25519", "ecdsa-p256"], typer.Option("--algorithm", help="Kind of key.")
    ] = "ed25519",
    as_json: Json = False,
) -> None:
    """Make a signing key in a file that only you can read, and print its public half.

    \b
    Examples:
      tally keys new /etc/tallystick/signing.pem
      tally keys new signing.pem --algorithm ecdsa-p256 --json
    """
    signer = generate(path, algorithm)
    if as_json:
        print_json(
            {
                "path": str(path),
                "key_id": signer.key_id,
                "algorithm": signer.algorithm,
                "public_key_pem": signer.public_key_pem,
            }
        )
        return
    out.print(f"key {signer.key_id} ({signer.algorithm}) is in {path}", markup=False)
    out.print(f"use it with TALLY_SIGNING__KEY_URI=file:{path.absolute()}", markup=False)
    out.print(signer.public_key_pem, end="", markup=False)


@keys.command("list")
def list_keys(url: Url, as_json: Json = False) -> None:
    """List the public keys that the service names as its own. --json prints what --keys takes.

    \b
    Examples:
      tally keys list
      tally keys list --json > trusted-keys.json
    """
    with LedgerClient(url) as client:
        answer = client.get("/v1/keys")
    if as_json:
        print_json(answer)
        return
    table = Table()
    for title in ("key id", "algorithm", "not before", "not after", "revoked from"):
        table.add_column(title, overflow="fold")
    for key in answer["keys"]:
        table.add_row(
            key["key_id"],
            key["algorithm"],
            key["not_before"] or "-",
            key["not_after"] or "-",
            key["revoked_from_hlc"] or "-",
        )
    out.print(table)
    for verifier_key in answer["log_verifier_keys"]:
        out.print(f"checkpoints: {verifier_key}", markup=False)
