"""``tally verify-proof``: verify receipts offline, from files and keys alone. ``tally verify-page``: a page for that.

Loads no database package.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import orjson
import typer
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from cli.options import CheckpointFile, Keys, PolicyFile, TsaCa, WitnessKeys
from ledger import rfc3339
from ledger.exit_code import ExitCode, exit_code_of_receipt, gravest
from signing.anchors import ExternalWitnesses
from signing.checkpoint import JudgedCheckpoint, judge_kept, read_kept
from signing.files import HEAD_BYTES, is_like_receipt, looks_like, open_regular, whole_file
from signing.keys import Keyring, demanding
from signing.memory import Memory, memory_of
from signing.receipt import ABSENT, FILE_BYTES_MAX, JOB, Receipt
from signing.receipt_judging import COMPLETENESS, ReceiptVerdict, judged
from terminal.outcome import CommandExit, counted, findings, marked, out, readable, tell, verdict_table
from terminal.program import Json, NoState, Signatures, State, command_of

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


@dataclass(kw_only=True)
class TrustOptions:
    """The options by which signatures are good, and what a ledger is compared with."""

    keys: Keys = None
    checkpoint: CheckpointFile = None
    witness_key: WitnessKeys = None
    tsa_ca: TsaCa = None
    policy: PolicyFile = None
    signatures: Signatures = "any"
    state: State = None
    no_state: NoState = False

    @property
    def keyring(self) -> Keyring | None:
        """The given keys, whatever ``signatures`` demands of them."""
        return None if self.keys is None else Keyring.load(self.keys)

    @property
    def external(self) -> ExternalWitnesses:
        """The external witnesses that count."""
        return ExternalWitnesses.load(self.witness_key or [], self.tsa_ca, self.policy)

    @property
    def kept(self) -> str | None:
        """The text of the kept checkpoint."""
        return None if self.checkpoint is None else read_kept(self.checkpoint)

    def memory(self, *, is_off: bool) -> Memory | None:
        """What is remembered of logs; nothing where ``is_off``."""
        return memory_of(self.state, is_off=self.no_state or is_off)

    def loaded(self) -> Trusted:
        """What the options name, for files; without keys nothing is remembered.

        Raises:
            InvalidInputError: a file has the wrong format.
            OSError: a file cannot be read.
        """
        keyring = demanding(self.signatures, self.keyring)
        kept = self.kept
        return Trusted(
            keyring,
            None if kept is None else judge_kept(kept, keyring),
            self.memory(is_off=keyring is None),
            self.external,
        )


@dataclass(kw_only=True)
class VerifyProof:
    """Verify receipts offline: that each entry stands, as it is shown, in the log that signed the checkpoint.

    Keys inside a receipt are never used: give those you trust with --keys. A
    checkpoint that you kept is compared as far as the receipt says what the
    log was at that size; tally prove --checkpoint makes one that does. What is
    remembered of a log is compared in the same way, and nothing is added.

    With --witness-key and --tsa-ca, the statements of external witnesses that
    the receipt carries are judged: they say by when the entries were there.
    With --policy the exit code is 3 unless the quorum of that tlog-policy
    file has cosigned a tree with all entries of the receipt.

    Exit codes: 0 proved; 2 tampered or corrupt; 3 nothing wrong found but not
    everything checked, such as without keys; 4 a key is unknown or revoked;
    1 could not read a file, or it is no receipt. The gravest of all files counts.

    \b
    Examples:
      tally verify-proof job-1.receipt.json --keys trusted-keys.json
      tally verify-proof *.receipt.json --keys keys/ --checkpoint acme.checkpoint --json
      tally verify-proof job-1.receipt.json --keys trusted-keys.json --policy witnesses.policy
    """

    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Receipts to verify, each by itself.")]
    trust: TrustOptions
    as_json: Json = False

    def run(self) -> None:
        """Verify each, and exit with the gravest code."""
        trusted = self.trust.loaded()
        items, lines = list[dict[str, Any]](), list[RenderableType]()
        for path in self.files:
            found = _judged(path, trusted)
            code = ExitCode.COULD_NOT_RUN if isinstance(found, str) else exit_code_of_receipt(found.verdict)
            about = {"file": readable(path), "exit_code": code}
            items.append({**about, "error": found} if isinstance(found, str) else {**found.to_json(), **about})
            lines += [marked(f"{escape(readable(path))}: {OUTCOMES[code]}"), *_lines(found)]
        tell({**(items[0] if len(items) == 1 else {}), "receipts": items}, *lines, as_json=self.as_json)
        raise CommandExit(gravest(item["exit_code"] for item in items))


verify_proof = command_of(VerifyProof)


def _judged(path: Path, trusted: Trusted) -> ReceiptVerdict | str:
    """The verdict on a file, or why it could not be read as a receipt."""
    try:
        with open_regular(path) as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        return error.strerror or readable(error)
    return (
        judged(data, *trusted)
        if is_like_receipt(data)
        else f"it is no receipt; it looks like {looks_like(data[:HEAD_BYTES])}"
    )


def _lines(found: ReceiptVerdict | str) -> list[RenderableType]:
    if isinstance(found, str):
        return [f"  {found}"]
    lines: list[RenderableType] = []
    if found.receipt is not None:
        lines += [*subject_of(found), *_entries_of(found.receipt)]
    return [
        *lines,
        verdict_table(found.verdict["verdicts"]),
        *findings(found.verdict, found.memory, found.not_checked),
        *(f"never shown by a receipt: {text}" for text in (found.limits if found.verdict["valid"] else ())),
    ]


def subject_of(found: ReceiptVerdict) -> list[str]:
    """The subject of a receipt that could be read, and how far nothing is left out of it."""
    receipt = found.receipt
    assert receipt is not None
    is_whole = found.verdict["verdicts"].get(COMPLETENESS) == "ok"
    seqs = f"seq {found.complete_from_seq} to {found.complete_to_seq}"
    what = {JOB: f"all {counted(len(receipt.entries), 'entry', 'entries')}", ABSENT: "no entry"}.get(
        receipt.covers, "one entry"
    )
    return [
        f"{what} of job {receipt.job_id} of tenant {receipt.tenant_id}",
        f"in log {receipt.origin}, up to its checkpoint of {receipt.tree_head.size} entries, says {receipt.node_id}",
        *([f"proved by the index of jobs: nothing of this job is missing from {seqs}"] if is_whole else []),
    ]


def _entries_of(receipt: Receipt) -> list[RenderableType]:
    if not receipt.entries:
        return []
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
