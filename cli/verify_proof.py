"""``tally verify-proof``: verify receipts offline, from files and keys alone. ``tally verify-page``: a page for that.

Loads no database package.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import orjson
import typer
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from cli.options import CheckpointFile, Keys, TsaCa, WitnessKeys
from ledger import rfc3339
from ledger.exit_code import ExitCode, exit_code_of_receipt, gravest
from signing.anchors import ExternalWitnesses
from signing.checkpoint import JudgedCheckpoint, judge_checkpoint, read_kept
from signing.files import HEAD_BYTES, is_like_receipt, looks_like, open_regular, whole_file
from signing.keys import Keyring
from signing.memory import Memory, memory_of
from signing.receipt import FILE_BYTES_MAX, JOB, Receipt
from signing.receipt_judging import LIMITS, ReceiptVerdict, judged
from terminal.outcome import CommandExit, counted, findings, marked, out, readable, tell, verdict_table
from terminal.program import Json, NoState, State

OUTCOMES = {
    0: "[bold green]PROVED[/]: it holds, and a key that you trust signed it",
    1: "[bold red]COULD NOT BE READ[/]",
    2: "[bold red]TAMPERED WITH OR CORRUPT[/]: do not rely on it",
    3: "[bold yellow]INCOMPLETE[/]: nothing wrong was found, not everything could be checked",
    4: "[bold magenta]KEY UNKNOWN[/]: a key that signed is not held, or was revoked",
}
"""Meaning of an exit code, in the first line about a file."""
ENTRIES_SHOWN_MAX = 50
"""Most entries listed; further ones are counted."""


class Trusted(NamedTuple):
    """Keys, a kept checkpoint, remembered checkpoints of logs, and external witnesses; None if not given."""

    keyring: Keyring | None
    kept: JudgedCheckpoint | None
    memory: Memory | None
    external: ExternalWitnesses

    @classmethod
    def load(
        cls,
        keys: Path | None,
        checkpoint: Path | None,
        witness_keys: list[str] | None,
        tsa_ca: Path | None,
        *,
        state: Path | None,
        no_state: bool,
    ) -> Trusted:
        """Read the files that the options name; without keys nothing is remembered.

        Raises:
            InvalidInputError: a file has the wrong format.
            OSError: a file cannot be read.
        """
        keyring = Keyring.load(keys) if keys is not None else None
        return cls(
            keyring,
            judge_checkpoint(read_kept(checkpoint), keyring) if checkpoint is not None else None,
            memory_of(state, is_off=no_state or keyring is None),
            ExternalWitnesses.load(witness_keys or [], tsa_ca),
        )


class Verified(NamedTuple):
    """One file and its result; ``error`` instead of ``outcome`` when it could not be read."""

    name: str
    exit_code: ExitCode
    outcome: ReceiptVerdict | None = None
    error: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The verdict object with the file's name."""
        about = {"file": self.name, "exit_code": self.exit_code}
        return {**about, "error": self.error} if self.outcome is None else {**self.outcome.to_json(), **about}


def verify_proof(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Receipts to verify, each by itself.")],
    keys: Keys = None,
    checkpoint: CheckpointFile = None,
    witness_key: WitnessKeys = None,
    tsa_ca: TsaCa = None,
    state: State = None,
    no_state: NoState = False,
    as_json: Json = False,
) -> None:
    """Verify receipts offline: that each entry stands, as it is shown, in the log that signed the checkpoint.

    Keys inside a receipt are never used: give those you trust with --keys. A
    checkpoint that you kept is compared as far as the receipt says what the
    log was at that size; tally prove --checkpoint makes one that does. What is
    remembered of a log is compared in the same way, and nothing is added.

    With --witness-key and --tsa-ca, the statements of external witnesses that
    the receipt carries are judged: they say by when the entries were there.

    Exit codes: 0 proved; 2 tampered or corrupt; 3 nothing wrong found but not
    everything checked, such as without keys; 4 a key is unknown or revoked;
    1 could not read a file, or it is no receipt. The gravest of all files counts.

    \b
    Examples:
      tally verify-proof job-1.receipt.json --keys trusted-keys.json
      tally verify-proof *.receipt.json --keys keys/ --checkpoint acme.checkpoint --json
    """
    trusted = Trusted.load(keys, checkpoint, witness_key, tsa_ca, state=state, no_state=no_state)
    verified = []
    for path in files:
        name = readable(path)
        try:
            with open_regular(path) as file:
                data = file.read(FILE_BYTES_MAX + 1)
        except OSError as error:
            verified.append(Verified(name, ExitCode.COULD_NOT_RUN, error=error.strerror or readable(error)))
            continue
        if not is_like_receipt(data):
            verified.append(
                Verified(
                    name,
                    ExitCode.COULD_NOT_RUN,
                    error=f"it is no receipt; it looks like {looks_like(data[:HEAD_BYTES])}",
                )
            )
            continue
        outcome = judged(data, *trusted)
        verified.append(Verified(name, exit_code_of_receipt(outcome.verdict), outcome))
    items = [each.to_json() for each in verified]
    told = {**(items[0] if len(items) == 1 else {}), "receipts": items}
    tell(told, *(line for each in verified for line in _lines(each)), as_json=as_json)
    raise CommandExit(gravest(each.exit_code for each in verified))


def _lines(verified: Verified) -> list[RenderableType]:
    lines = [marked(f"{escape(verified.name)}: {OUTCOMES[verified.exit_code]}")]
    outcome = verified.outcome
    if outcome is None:
        return [*lines, f"  {verified.error}"]
    if outcome.receipt is not None and outcome.checkpoint is not None:
        lines += [*subject_of(outcome.receipt, outcome.checkpoint.size), *_entries_of(outcome.receipt)]
    limits = LIMITS if outcome.verdict["valid"] else ()
    return [
        *lines,
        verdict_table(outcome.verdict["verdicts"]),
        *findings(outcome.verdict, outcome.memory, outcome.not_checked),
        *(f"never shown by a receipt: {text}" for text in limits),
    ]


def subject_of(receipt: Receipt, size: int) -> list[str]:
    """The subject of the receipt, in two lines."""
    count = counted(len(receipt.entries), "entry", "entries")
    what = f"all {count} of job" if receipt.covers == JOB else "one entry of job"
    return [
        f"{what} {receipt.job_id} of tenant {receipt.tenant_id}",
        f"in log {receipt.origin}, up to its checkpoint of {size} entries, says {receipt.node_id}",
    ]


def _entries_of(receipt: Receipt) -> list[RenderableType]:
    table = Table("seq", "time (UTC, of the node)", "what")
    for entry in receipt.entries[:ENTRIES_SHOWN_MAX]:
        row = entry.row
        table.add_row(
            str(row.seq), rfc3339.time_of(row.t_hlc) or row.t_hlc, escape(_type_of(row.payload) or row.action)
        )
    more = len(receipt.entries) - ENTRIES_SHOWN_MAX
    return [table, f"and {counted(more, 'entry', 'entries')} more"] if more > 0 else [table]


def _type_of(payload: str) -> str | None:
    try:
        value = orjson.loads(payload)
    except orjson.JSONDecodeError:
        return None
    found = value.get("type") if isinstance(value, dict) else None
    return found if isinstance(found, str) else None


# --- the page that verifies in a browser ------------------------------------------------------------


def verify_page(
    output: Annotated[
        Path,
        typer.Option(
            "--out", "--output", "-o", metavar="FILE", help="The file to write; one that is there is replaced."
        ),
    ] = Path("verify.html"),
) -> None:
    """Save the page that verifies bundles and receipts in a browser alone, as one file that opens from disk.

    It is what a service answers at /verify. It needs no network and no
    service: open it, drop a bundle or a receipt, and the keys you trust.

    \b
    Examples:
      tally verify-page -o verify.html
    """
    from app.pages.verify_page import verify_page as page_of_package

    content = page_of_package().file.content
    with whole_file(output) as file:
        file.write(content)
    out.print(f"{output}: {len(content):,} bytes, SHA-256 {hashlib.sha256(content).hexdigest()}", markup=False)
