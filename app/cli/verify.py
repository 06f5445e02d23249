"""``tally verify``: ask the service to verify a chain, or do it here with rows straight from PostgreSQL."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from app.cli.client import LedgerClient, RequestRefusedError
from app.cli.options import Checkpoint, Json, Keys, Tenant, Url
from app.cli.outcome import CommandExit, err, exit_code_of_verdict, out, print_json
from ledger.errors import ProofError, UnknownKeyError
from ledger.merkle import verify_consistency
from ledger.verdict import KINDS
from ledger.verification import TreeHead
from signing.checkpoint import Checkpoint as TreeCheckpoint
from signing.checkpoint import open_checkpoint
from signing.keys import Keyring

CHECKPOINT_BYTES_MAX = 1 << 20
SOURCE = "file"
"""What ``compared_with`` calls a checkpoint given with ``--checkpoint``."""
_COLOURS = {"ok": "green", "not_checked": "yellow", "unknown_key": "magenta", "broken": "red"}


def verify(
    tenant: Tenant,
    url: Url,
    dsn: Annotated[
        str | None,
        typer.Option("--dsn", help="Read straight from this PostgreSQL and trust no service.", metavar="DSN"),
    ] = None,
    keys: Keys = None,
    checkpoint: Checkpoint = None,
    from_seq: Annotated[int | None, typer.Option("--from-seq", min=1, help="First entry.")] = None,
    to_seq: Annotated[int | None, typer.Option("--to-seq", min=1, help="Last entry.")] = None,
    as_json: Json = False,
) -> None:
    """Verify a tenant's chain: links, payloads, head, snapshots, signatures, tree, job states, checkpoints.

    Exit codes: 0 whole; 2 tampered; 3 nothing wrong found but not everything
    checked, such as an end that no snapshot signs yet; 4 a key is unknown,
    expired or revoked; 1 could not run.

    With --dsn everything is computed here from the rows, and signatures are
    checked with --keys only. Without it the service verifies; --keys then
    serves to check the signature of --checkpoint.

    \b
    Examples:
      tally verify --tenant acme
      tally verify -t acme --checkpoint /mnt/elsewhere/acme.checkpoint --keys trusted-keys.json
      tally verify -t acme --dsn postgresql://reader@db/tallystick --keys trusted-keys.json --json
    """
    keyring = Keyring.load(keys) if keys is not None else None
    kept = _read(checkpoint) if checkpoint is not None else None
    if dsn is not None:
        verdict = _verify_by_rows(dsn, tenant, from_seq, to_seq, keyring, kept)
    else:
        verdict = _verify_by_service(url, tenant, from_seq, to_seq, keyring, kept)
    if as_json:
        print_json(verdict)
    else:
        _print(verdict)
    raise CommandExit(exit_code_of_verdict(verdict))


def _read(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(CHECKPOINT_BYTES_MAX).decode("utf-8", "replace")


# --- through the service ------------------------------------------------------------------------------


def _verify_by_service(
    url: str, tenant: str, from_seq: int | None, to_seq: int | None, keyring: Keyring | None, kept: str | None
) -> dict[str, Any]:
    with LedgerClient(url) as client:
        verdict: dict[str, Any] = client.get("/v1/chain/verify", tenant_id=tenant, from_seq=from_seq, to_seq=to_seq)
        if kept is None:
            return verdict
        ring = keyring if keyring is not None else Keyring.from_json(client.get("/v1/keys"))
        present = client.get_text(f"/v1/log/{tenant}/checkpoint")
        try:
            now = open_checkpoint(present, ring)
            then = open_checkpoint(kept, ring, origin=now.origin)
        except UnknownKeyError as error:
            err.print(f"the checkpoint proves nothing: {error}", markup=False)
            return with_checkpoint(verdict, "unknown_key")
        try:
            _check_grown(client, tenant, then, now)
        except ProofError as error:
            rollback = {"seq": then.size, "kind": "rollback", "detail": str(error)}
            rollback |= {"expected": then.root.hex(), "actual": now.root.hex() if now.size == then.size else None}
            return with_checkpoint(verdict, "broken", rollback)
        return with_checkpoint(verdict, "ok")


def _check_grown(client: LedgerClient, tenant: str, then: TreeCheckpoint, now: TreeCheckpoint) -> None:
    """Raises ProofError unless the log at ``now`` is the log at ``then``, with entries added at the end."""
    if then.size > now.size:
        raise ProofError(f"the checkpoint holds {then.size} entries, and the log has {now.size}")
    if then.size == now.size:
        if then.root != now.root:
            raise ProofError(f"the first {then.size} entries are not those of the checkpoint")
        return
    if then.size == 0:
        return
    try:
        proof = client.get("/v1/chain/proof/consistency", tenant_id=tenant, first=then.size, second=now.size)
    except RequestRefusedError as error:
        raise ProofError(f"the log cannot prove that it extends the checkpoint: {error}") from error
    hashes = [bytes.fromhex(text) for text in proof["hashes"]]
    verify_consistency(then.size, now.size, then.root, now.root, hashes)


def with_checkpoint(verdict: dict[str, Any], outcome: str, rollback: dict[str, Any] | None = None) -> dict[str, Any]:
    """``verdict`` with what the comparison with the given checkpoint came to; ``rollback`` is the break it found.

    What was broken before stays broken.
    """
    found = dict(verdict)
    verdicts = found["verdicts"] = dict(verdict["verdicts"])
    if verdicts["checkpoint"] != "broken":
        verdicts["checkpoint"] = outcome
    found["valid"] = not {"broken", "unknown_key"} & set(verdicts.values())
    if outcome != "unknown_key":
        found["compared_with"] = ", ".join(filter(None, (verdict["compared_with"], SOURCE)))
    breaks = [item for item in (verdict["first_break"], rollback) if item is not None]
    found["first_break"] = min(breaks, key=lambda item: (item["seq"], KINDS.index(item["kind"])), default=None)
    return found


# --- straight from PostgreSQL -------------------------------------------------------------------------


def _verify_by_rows(
    dsn: str, tenant: str, from_seq: int | None, to_seq: int | None, keyring: Keyring | None, kept: str | None
) -> dict[str, Any]:
    # Imported here: it loads the database driver, which the other way of verifying does without.
    from app.cli.verify_database import kept_head, verify_database

    heads: list[TreeHead] = []
    is_key_unknown = False
    if kept is not None:
        try:
            heads.append(kept_head(kept, tenant, keyring, SOURCE))
        except UnknownKeyError as error:
            err.print(f"the checkpoint proves nothing: {error}", markup=False)
            is_key_unknown = True
    verdict = asyncio.run(verify_database(dsn, tenant, from_seq, to_seq, keyring, heads))
    return with_checkpoint(verdict, "unknown_key") if is_key_unknown else verdict


# --- what was found -------------------------------------------------------------------------------------


def _print(verdict: dict[str, Any]) -> None:
    state = "[bold green]valid[/]" if verdict["valid"] else "[bold red]NOT VALID[/]"
    out.print(
        f"tenant {verdict['tenant_id']}: {state}, {verdict['entries_checked']:,} entries "
        f"(seq {verdict['from_seq']} to {verdict['to_seq']}) in {verdict['duration_ms']:.0f} ms"
    )
    table = Table("checked", "verdict")
    for aspect, result in verdict["verdicts"].items():
        table.add_row(aspect, f"[{_COLOURS[result]}]{result}[/]")
    out.print(table)
    head = verdict["head"]
    if head["seq"]:
        out.print(f"head: seq {head['seq']}, link {head['chain_link']}, HLC {head['hlc']}", markup=False)
    out.print(f"signed to seq {verdict['signed_to_seq']}, {verdict['unsigned_entries']} entries after it unsigned")
    if verdict["compared_with"] is None:
        out.print("compared with no checkpoint, so a tail cut without trace would not be seen; see --checkpoint")
    else:
        out.print(f"compared with the checkpoint kept by: {verdict['compared_with']}", markup=False)
    first = verdict["first_break"]
    if first is not None:
        out.print(f"[bold red]first break:[/] seq {first['seq']}, {first['kind']}: {escape(first['detail'])}")
        out.print(f"  expected {first['expected']}\n  actual   {first['actual']}", markup=False)
