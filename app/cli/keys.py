"""``tally keys``: make a signing key, list the keys of a ledger, rotate and revoke them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote

import typer

from app.cli.answers import Key, Keys, Rotation
from app.cli.client import LedgerClient
from app.cli.options import Url
from console.options import Json
from console.outcome import out, print_json
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
    """List the public keys of the ledger, when they count and where they sign. --json prints what --keys takes.

    \b
    Examples:
      tally keys list
      tally keys list --json > trusted-keys.json
    """
    with LedgerClient(url) as client:
        answer = client.get("/v1/keys", Keys)
    if as_json:
        print_json(answer)
        return
    for key in answer["keys"]:
        out.print(_told(key), markup=False)
    for verifier_key in answer["log_verifier_keys"]:
        out.print(f"checkpoints: {verifier_key}", markup=False)


@keys.command("rotate")
def rotate(
    url: Url,
    new_key_uri: Annotated[
        str | None,
        typer.Option(
            "--new-key-uri",
            metavar="URI",
            help="The new key, as the service's machine sees it: a key file, or an HSM, Vault or cloud key, that "
            "signing.uris_allowed leaves to be named.",
            show_default="a new file beside the present one",
        ),
    ] = None,
    log_key: Annotated[
        bool, typer.Option("--log-key", help="Rotate the separate key of checkpoints, not the one of snapshots.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Let a new key of the node sign from now on.

    What the old key signed stays valid; nothing that it signs for later
    entries verifies. The change is an entry of the chain of _system, and
    outlives a restart. A key that was stolen is revoked after that.

    \b
    Examples:
      tally keys rotate
      tally keys rotate --new-key-uri file:/etc/tallystick/2027.pem
      tally keys rotate --new-key-uri "hsm:2?label=ledger" --json
    """
    body: dict[str, object] = {"log_key": log_key} if log_key else {}
    if new_key_uri is not None:
        body["new_key_uri"] = new_key_uri
    with LedgerClient(url) as client:
        answer = client.post("/v1/keys/rotate", body, Rotation)
    if as_json:
        print_json(answer)
        return
    key, previous = answer["key"], answer["previous"]
    out.print(f"key {key['key_id']} ({key['algorithm']}) signs now on node {key['node_id']}", markup=False)
    out.print(f"key {previous['key_id']} counts up to {previous['not_after']}", markup=False)
    out.print("give those who verify the new list: tally keys list --json", markup=False)


@keys.command("revoke")
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="KEY_ID", help="The key, as tally keys list names it.")],
    url: Url,
    from_hlc: Annotated[
        str | None,
        typer.Option(
            "--from-hlc",
            metavar="HLC",
            help="Nothing counts that it signed for this HLC or later.",
            show_default="now",
        ),
    ] = None,
    reason: Annotated[str | None, typer.Option("--reason", help="Why; stands in the chain.")] = None,
    as_json: Json = False,
) -> None:
    """Revoke a key from an HLC on. Snapshots of earlier entries stay valid, later ones are named by verify.

    The key that the node signs with must be rotated first. Of a key that is
    revoked already only an earlier HLC is taken.

    \b
    Examples:
      tally keys revoke 06e3fd8fda29bb60 --reason "laptop stolen"
      tally keys revoke 06e3fd8fda29bb60 --from-hlc 1704931200000:0:node-7f3a --json
    """
    given = {"from_hlc": from_hlc, "reason": reason}
    with LedgerClient(url) as client:
        key = client.post(
            f"/v1/keys/{quote(key_id, safe='')}/revoke", {n: v for n, v in given.items() if v is not None}, Key
        )
    if as_json:
        print_json(key)
        return
    out.print(f"key {key['key_id']} is revoked from HLC {key['revoked_from_hlc']} on", markup=False)


def _told(key: Mapping[str, Any]) -> str:
    """One key in two lines: who signs what with it, and when it counts."""
    signs = " and ".join(name for name in ("snapshots", "checkpoints") if key[f"signs_{name}"])
    use = f"signs {signs}" if signs else "signs no more"
    bounds = [f"from {key['not_before'] or 'ever'}"]
    if key["not_after"]:
        bounds.append(f"to {key['not_after']}")
    if key["revoked_from_hlc"]:
        bounds.append(
            f"revoked from HLC {key['revoked_from_hlc']} on ({key['revocation_reason'] or 'no reason given'})"
        )
    return f"{key['key_id']} {key['algorithm']}, node {key['node_id'] or '-'}, {use}\n  counts {', '.join(bounds)}"
