"""``tally prove``: fetch the receipt of a job, or of one entry, and verify it before it is stored."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import quote

import typer

from cli.client import Service
from cli.options import CheckpointFile, Tenant
from cli.verify_proof import subject_of
from ledger.errors import InvalidInputError
from ledger.exit_code import ExitCode, exit_code_of_receipt
from ledger.machines.jobs import refused_job_id
from signing.checkpoint import judge_checkpoint, read_kept
from signing.files import whole_file
from signing.keys import Keyring
from signing.memory import Memory, memory_of
from signing.receipt import ENTRY, JOB, Receipt
from signing.receipt_judging import ReceiptVerdict, judged
from tallystick_client import NotTheLedgerError, ProblemError
from terminal.outcome import fail, tell
from terminal.program import Json, NoState, State

_WRITTEN: Final = (ExitCode.FINE, ExitCode.INCOMPLETE)
"""Verdicts on a receipt with which it is written."""


def prove(
    tenant: Tenant,
    client: Service,
    output: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Where the receipt goes.")],
    job: Annotated[str | None, typer.Option("--job", "-j", help="Prove all that was recorded of this job.")] = None,
    seq: Annotated[int | None, typer.Option("--seq", min=1, help="Prove this one entry of the chain.")] = None,
    checkpoint: CheckpointFile = None,
    state: State = None,
    no_state: NoState = False,
    as_json: Json = False,
) -> None:
    """Get a receipt: one file that proves a job, or one entry, alone and offline.

    It holds the entries, a proof for each that a signed checkpoint covers it,
    and what witnesses and time-stamping authorities said of the log. Whoever
    has the ledger's public keys verifies it with tally verify-proof, or with
    the page /verify in a browser. Entries that no checkpoint covers yet are
    waited for.

    With --checkpoint, and where a checkpoint of this log is remembered, the
    receipt also proves that the log still begins with that. A receipt that
    does not hold is not written. --seq needs the right audit, --job read.

    \b
    Examples:
      tally prove --tenant acme --job job-1 -o job-1.receipt.json
      tally prove -t acme --seq 4711 -o entry.receipt.json --checkpoint acme.checkpoint
    """
    if (job is None) is (seq is None):
        raise InvalidInputError("say what to prove: --job J, or --seq N")
    memory = memory_of(state, is_off=no_state)
    keyring = Keyring.from_json(client.get("/v1/keys"))
    kept = judge_checkpoint(read_kept(checkpoint), keyring) if checkpoint is not None else None
    extends = kept.checkpoint.size if kept is not None else _remembered(memory, tenant, keyring)
    path = "/v1/chain/receipt" if job is None else f"/v1/jobs/{quote(job, safe='')}/receipt"
    try:
        reply = client.ask("GET", path, params={"tenant_id": tenant, "seq": seq, "extends": extends or None})
    except ProblemError as error:
        if error.kind == "seq-out-of-range" and error.members.get("path") == "extends":
            known = "given" if kept is not None else "remembered"
            raise fail(f"the log went back behind the checkpoint {known}: {error.detail}", ExitCode.TAMPERED) from error
        raise
    client.json(reply, Any)
    outcome = judged(reply.content, keyring, kept, memory)
    if (code := exit_code_of_receipt(outcome.verdict)) not in _WRITTEN:
        first = outcome.verdict["first_break"]
        raise fail(
            f"the receipt of {client.url} does not hold and is not kept: {first['kind']}: {first['detail']}", code
        )
    receipt, own = outcome.receipt, outcome.checkpoint
    assert receipt is not None
    assert own is not None
    if not _is_asked(receipt, tenant, job, seq):
        raise NotTheLedgerError(f"{client.url} sent a receipt of something else than was asked for")
    with whole_file(output) as written:
        written.write(reply.content)
    _tell(outcome, subject_of(receipt, own.size), output, as_json=as_json)


def _remembered(memory: Memory | None, tenant: str, keyring: Keyring) -> int | None:
    """Size of the newest checkpoint of the tenant's log that was verified before, if there is one."""
    seen = [] if memory is None else memory.seen_of_tenant(tenant, keyring)
    return max((each.checkpoint.size for each in seen), default=None)


def _is_asked(receipt: Receipt, tenant: str, job: str | None, seq: int | None) -> bool:
    is_entry = job is None and receipt.covers == ENTRY and receipt.seqs == [seq]
    is_job = job is not None and receipt.covers == JOB and receipt.job_id in (job, refused_job_id(job))
    return receipt.tenant_id == tenant and (is_entry or is_job)


def _tell(outcome: ReceiptVerdict, subject: list[str], output: Path, *, as_json: bool) -> None:
    tell(
        {**outcome.to_json(), "file": str(output)},
        *subject,
        *(
            f"carries the word of {each['kind']} {each['by']} to seq {each['to_seq']}"
            for each in outcome.verdict["anchors"]
        ),
        *(["the log begins with the checkpoint that you had"] if outcome.verdict["compared_with"] is not None else ()),
        f"{output}: {outcome.size_bytes:,} bytes, SHA-256 {outcome.digest}",
        "verify it with: tally verify-proof FILE --keys K, of keys that you trust",
        as_json=as_json,
    )
