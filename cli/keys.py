"""``tally keys``: make a signing key, list the keys of a ledger, rotate, admit and revoke them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote

import typer

from app.runtime.answers.node import KeyAnswer, KeyList, NodeAnswer, RotationAnswer
from cli.client import LedgerClient, Service, given
from ledger.errors import SignatureError
from ledger.hlc import Hlc
from signing import key_statement
from signing.key_history import revoked_facts
from signing.keys import PublicKey
from signing.private_keys import generate, load
from terminal.outcome import fail, tell
from terminal.program import Json

RootKey = Annotated[
    Path | None,
    typer.Option(
        "--root-key",
        exists=True,
        dir_okay=False,
        metavar="FILE",
        help="Private key that vouches, kept on this machine.",
    ),
]

_NEW_LIST = "give those who verify the new list: tally keys list --json"

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

    A node signs the ledger with such a key, an auditor a report, whoever holds
    the root key offline the changes of other keys. Nothing uses it by itself.

    \b
    Examples:
      tally keys new /etc/tallystick/signing.pem
      tally keys new signing.pem --algorithm ecdsa-p256 --json
    """
    signer = generate(path, algorithm)
    tell(
        {
            "path": str(path),
            "key_id": signer.key_id,
            "algorithm": signer.algorithm,
            "public_key_pem": signer.public_key_pem,
        },
        f"key {signer.key_id} ({signer.algorithm}) is in {path}",
        f"a node signs with it once it has TALLY_SIGNING__KEY_URI=file:{path.absolute()}",
        f"an auditor signs a report with it: tally verify-bundle FILE --report OUT --sign-with {path}",
        "give each its own key, and the public half below to those who verify",
        signer.public_key_pem.removesuffix("\n"),
        as_json=as_json,
    )


@keys.command("list")
def list_keys(client: Service, as_json: Json = False) -> None:
    """List the public keys of the ledger, when they count and where they sign. --json prints what --keys takes.

    Those that nobody has admitted yet come last; nothing that they sign counts.
    The time from which a key counts is that of the oldest entry that it may
    sign, which can be older than the key: a new key signs what none has yet.

    \b
    Examples:
      tally keys list
      tally keys list --json > trusted-keys.json
    """
    answer = client.get("/v1/keys", KeyList)
    tell(
        answer,
        *[_told(key, answer["root_key_id"]) for key in (*answer["keys"], *answer.get("second_keys", ()))],
        *[
            f"{key['key_id']} {key['algorithm']}, node {key['node_id'] or '-'}, NOT ADMITTED: nothing it signs counts\n"
            f"  if this is what that node says of itself: tally keys admit {key['key_id']}"
            for key in answer["not_admitted"]
        ],
        *[
            f"checkpoints: {verifier_key}"
            for verifier_key in (*answer["log_verifier_keys"], *answer.get("second_log_verifier_keys", ()))
        ],
        as_json=as_json,
    )


@keys.command("rotate")
def rotate(
    client: Service,
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
    second: Annotated[
        bool, typer.Option("--second", help="Rotate the second key, of signing.second, and leave the others.")
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
      tally keys rotate --second
      tally keys rotate --new-key-uri "hsm:2?label=ledger" --json
    """
    body = {"new_key_uri": new_key_uri, "log_key": log_key or None, "second_key": second or None}
    answer = client.post("/v1/keys/rotate", given(body), RotationAnswer)
    key, previous = answer["key"], answer["previous"]
    tell(
        answer,
        f"key {key['key_id']} ({key['algorithm']}) signs now on node {key['node_id']}",
        f"key {previous['key_id']} counts up to {previous['not_after']}",
        _NEW_LIST,
        as_json=as_json,
    )


@keys.command("revoke")
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="KEY_ID", help="The key, as tally keys list names it.")],
    client: Service,
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
    root_key: RootKey = None,
    as_json: Json = False,
) -> None:
    """Revoke a key from an HLC on. Snapshots of earlier entries stay valid, later ones are named by verify.

    The key that the node signs with must be rotated first, unless the root
    key revokes it. Of a key that is revoked already only an earlier HLC is
    taken. Keys that it admitted from that HLC on count no more either.

    \b
    Examples:
      tally keys revoke 06e3fd8fda29bb60 --reason "laptop stolen"
      tally keys revoke 06e3fd8fda29bb60 --from-hlc 1704931200000:0:node-7f3a --json
    """
    body: dict[str, object] = {"from_hlc": from_hlc, "reason": reason}
    if root_key is not None:
        body |= _revocation(client, key_id, from_hlc, reason, root_key)
    key = client.post(f"/v1/keys/{quote(key_id, safe='')}/revoke", given(body), KeyAnswer)
    tell(key, f"key {key['key_id']} is revoked from HLC {key['revoked_from_hlc']} on", as_json=as_json)


def _revocation(
    client: LedgerClient, key_id: str, from_hlc: str | None, reason: str | None, root_key: Path
) -> dict[str, object]:
    """The request with a statement about the revocation by the key in the file ``root_key``."""
    listed, node_id = client.get("/v1/keys", KeyList), client.get("/v1/node", NodeAnswer)["node_id"]
    introduced_by = _listed(listed, key_id).get("introduced_by")
    if introduced_by is None:
        return {}
    # By this machine's clock: a service could name a time that revokes every signature of the key.
    start = Hlc.parse(from_hlc) if from_hlc else Hlc(time.time_ns() // 1_000_000, 0, node_id)
    facts = revoked_facts(key_id, node_id, start, reason)
    return {
        "from_hlc": start.text(),
        "statement": _statement("KEY_REVOKED", facts, listed, introduced_by, root_key),
    }


@keys.command("admit")
def admit(
    client: Service,
    key_id: Annotated[
        str | None, typer.Argument(metavar="KEY_ID", help="The key, as the new node and tally keys list name it.")
    ] = None,
    root_key: RootKey = None,
    all_known: Annotated[
        bool,
        typer.Option(
            "--all-known",
            help="Every key of a ledger that was begun before keys were admitted; look at the list first.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Let the key of a node count in the ledger.

    A new node writes its key into the chain of _system and signs nothing
    until somebody whose key counts vouches for it: the node that is asked
    here, or whoever has the private half of the root key, which then never
    leaves this machine. Compare KEY_ID with what the new node says of
    itself, in its log and under /readyz.

    \b
    Examples:
      tally keys admit 06e3fd8fda29bb60
      tally keys admit 06e3fd8fda29bb60 --root-key /media/safe/root.pem
      tally keys admit --all-known --root-key signing.pem
    """
    if (key_id is None) != all_known:
        raise fail("name one KEY_ID, or --all-known")
    listed = client.get("/v1/keys", KeyList)
    known = [key for key in listed["not_admitted"] if key["is_old_form"]]
    wanted = known if all_known else [_listed(listed, str(key_id))]
    admitted = [_admitted(client, listed, key, root_key) for key in wanted]
    later = [
        f"key {key['key_id']} of node {key['node_id']} came later and waits; if it is yours: tally keys admit "
        f"{key['key_id']}"
        for key in listed["not_admitted"]
    ]
    tell(
        {"admitted": admitted},
        *(f"key {key['key_id']} of node {key['node_id']} is admitted by {key['admitted_by']}" for key in admitted),
        *([_NEW_LIST] if admitted else ["no key of an earlier version waits to be admitted", *later]),
        as_json=as_json,
    )


def _listed(listed: Mapping[str, Any], key_id: str) -> dict[str, Any]:
    """The listed key, else one with only this id, for which the service then reports the error."""
    known = (*listed["not_admitted"], *listed["keys"], *listed.get("second_keys", ()))
    return next((key for key in known if key["key_id"] == key_id), {"key_id": key_id})


def _admitted(
    client: LedgerClient, listed: Mapping[str, Any], key: Mapping[str, Any], root_key: Path | None
) -> dict[str, Any]:
    body: dict[str, object] = {}
    if root_key is not None and "facts" in key:
        _check_is_said_of(key["facts"], key["key_id"])
        body["statement"] = _statement("KEY_ADMITTED", key["facts"], listed, key["introduced_by"], root_key)
    answer: dict[str, Any] = client.post(f"/v1/keys/{quote(key['key_id'], safe='')}/admit", body, KeyAnswer)
    return answer


def _check_is_said_of(facts: Mapping[str, Any], key_id: str) -> None:
    """Check that facts to be signed are about the compared key alone, as the service may be an impostor.

    Raises:
        SignatureError: they are not.
    """
    named = PublicKey.from_json({name: facts.get(name) for name in ("key_id", "algorithm", "public_key_pem")})
    if named.key_id != key_id or facts.keys() - {"key_id", "algorithm", "public_key_pem", "node_id"}:
        raise SignatureError(
            f"what the service says of key {key_id} is not about that key alone: nothing was signed. It may not be the "
            "service of your ledger"
        )


def _statement(
    action: str,
    facts: Mapping[str, Any],
    listed: Mapping[str, Any],
    introduced_by: Mapping[str, Any],
    root_key: Path,
) -> object:
    """The envelope of a statement about a change by the key in the file ``root_key``."""
    return key_statement.sign(
        action,
        facts,
        listed["root_key_id"],
        key_statement.Anchor(introduced_by["seq"], introduced_by["chain_link"]),
        load(str(root_key)),
    )[key_statement.FIELD]


def _told(key: Mapping[str, Any], root_key_id: str | None) -> str:
    """One key in two lines: its node and use, the key that admitted it, and its validity."""
    signs = " and ".join(name for name in ("snapshots", "checkpoints") if key[f"signs_{name}"])
    admitted = f", admitted by {key['admitted_by']}" if key["admitted_by"] else ""
    role = ", root of the ledger" if key["key_id"] == root_key_id else admitted
    reason = key["revocation_reason"] or "no reason given"
    bounds = [
        f"from {key['not_before']} on" if key["not_before"] else "of any time",
        *([f"up to {key['not_after']}"] if key["not_after"] else ()),
        *([f"revoked from HLC {key['revoked_from_hlc']} on ({reason})"] if key["revoked_from_hlc"] else ()),
    ]
    made = f"introduced at seq {entry['seq']} of _system, " if (entry := key["introduced_by"]) else ""
    return (
        f"{key['key_id']} {key['algorithm']}, node {key['node_id'] or '-'}, "
        f"{f'signs {signs}' if signs else 'signs no more'}{role}\n"
        f"  {made}counts for entries {', '.join(bounds)}"
    )
