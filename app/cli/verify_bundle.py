"""``tally verify-bundle``: verify bundles offline, from the files and the keys alone. Loads no database package."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.markup import escape

from app.bundle import report
from app.bundle.counting import counts_of
from app.bundle.report import Against, VerifiedFile
from app.bundle.verify import verify_file
from app.cli.options import CheckpointFile, Keys, TsaCa, WitnessKeys
from console.counted import counted
from console.options import Json, NoState, State
from console.outcome import CommandExit, out, print_json
from console.verifying import print_findings, print_verdicts, read_checkpoint
from ledger.errors import InvalidInputError
from ledger.exit_code import ExitCode, exit_code_of_bundle, gravest
from signing.anchors import Outsiders
from signing.bundle.reader import BundleReader
from signing.checkpoint import JudgedCheckpoint, judge_checkpoint
from signing.keys import Keyring
from signing.looks import remember_told
from signing.memory import Memory, memory_of

_CODE_COLOURS = {0: "bold green", 1: "bold red", 2: "bold red", 3: "bold yellow", 4: "bold magenta"}


REPORT_SUFFIXES = (".md", ".json")
"""Names of reports; what they end in says what is written."""


def verify_bundle(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Bundles to verify, each by itself.")],
    keys: Keys = None,
    checkpoint: CheckpointFile = None,
    report_to: Annotated[
        Path | None,
        typer.Option(
            "--report",
            metavar="OUT",
            help="Write a report to file: Markdown, OUT.md, or JSON, OUT.json.",
        ),
    ] = None,
    witness_key: WitnessKeys = None,
    tsa_ca: TsaCa = None,
    state: State = None,
    no_state: NoState = False,
    as_json: Json = False,
) -> None:
    """Verify bundles offline: container, manifest, links, payloads, snapshots, signatures, tree, checkpoints.

    Keys inside a bundle are never used: give those you trust with --keys. A
    checkpoint that you kept, from anywhere, shows with --checkpoint whether
    the log was cut before the export. With --keys, the newest checkpoint that
    was verified of each log is remembered in your state folder, and every
    later bundle of that log must agree with it; an older one is no rollback.

    With --witness-key and --tsa-ca, what those outsiders said of the log, and
    the bundle carries, is judged, and what holds is held against the log.

    Exit codes: 0 whole and signed; 2 tampered or corrupt; 3 nothing wrong
    found but not everything checked, such as a range that begins later, an
    unsigned end or no keys; 4 a key is unknown, expired or revoked; 1 could
    not read a file. The gravest of all files counts.

    \b
    Examples:
      tally verify-bundle acme.bundle.tar --keys trusted-keys.json
      tally verify-bundle 2024/*.tar --keys keys/ --checkpoint acme.checkpoint --report acme-report.md
    """
    if report_to is not None and report_to.suffix not in REPORT_SUFFIXES:
        raise InvalidInputError(f"--report {_readable(report_to)}: a report is Markdown, .md, or JSON, .json")
    keyring = Keyring.load(keys) if keys is not None else None
    kept = judge_checkpoint(read_checkpoint(checkpoint), keyring) if checkpoint is not None else None
    memory = memory_of(state, is_off=no_state or keyring is None)
    outsiders = Outsiders.load(witness_key or [], tsa_ca)
    verified = []
    for path in files:
        verified.append(_verify(path, keyring, kept, memory, outsiders))
        if report_to is not None:
            verified[-1] = _with_counts(path, verified[-1])
        memory = _remembered(memory, verified[-1])
    outsiders_from = [text for each in witness_key or () for text in ("--witness-key", each)]
    outsiders_from += [] if tsa_ca is None else ["--tsa-ca", _readable(tsa_ca)]
    against = Against(_name(keys), keyring, _name(checkpoint), kept, outsiders_from)
    now, tool = datetime.now(UTC), f"tallystick {version('tallystick')}"
    document = report.to_json(verified, against, now, tool)
    if report_to is not None:
        _store(report_to, document, report.to_markdown(verified, against, now, tool))
    if as_json:
        print_json(document)
    else:
        for file in verified:
            _print(file)
    raise CommandExit(gravest(ExitCode(file.exit_code) for file in verified))


def _verify(
    path: Path, keyring: Keyring | None, kept: JudgedCheckpoint | None, memory: Memory | None, outsiders: Outsiders
) -> VerifiedFile:
    try:
        outcome = asyncio.run(verify_file(path, keyring, kept, memory, outsiders))
    except OSError as error:
        return VerifiedFile(_readable(path), ExitCode.COULD_NOT_RUN, error=error.strerror or _readable(error))
    return VerifiedFile(_readable(path), exit_code_of_bundle(outcome.verdict), outcome)


def _with_counts(path: Path, file: VerifiedFile) -> VerifiedFile:
    """``file`` with what its entries add up to, if they hold."""
    if file.outcome is None or "broken" in file.outcome.verdict["verdicts"].values():
        return file
    with BundleReader.open(path) as reader:
        return replace(file, counts=counts_of(reader))


def _remembered(memory: Memory | None, file: VerifiedFile) -> Memory | None:
    """The memory that the next file is compared with: what was verified of this one is in it."""
    if memory is None or file.outcome is None:
        return memory
    remember_told(memory, [file.outcome.memory])
    return Memory.open(memory.folder)


def _name(path: Path | None) -> str | None:
    return None if path is None else _readable(path)


def _readable(named: Path | OSError) -> str:
    """The text of a file's name, or of an error with one; bytes of it that are no UTF-8 are escaped."""
    return str(named).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _store(path: Path, document: dict[str, Any], markdown: str) -> None:
    if path.suffix == ".json":
        path.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    else:
        path.write_text(markdown, "utf-8")


def _print(file: VerifiedFile) -> None:
    summary = f"[{_CODE_COLOURS[file.exit_code]}]{report.OUTCOMES[file.exit_code]}[/]"
    out.print(f"{escape(file.name)}: {summary}")
    outcome = file.outcome
    if outcome is None:
        out.print(f"  {file.error}", markup=False)
        return
    verdict, manifest = outcome.verdict, outcome.manifest
    out.print(f"SHA-256 {outcome.digest}")
    if manifest is not None:
        out.print(
            f"tenant {manifest.tenant_id} of log {manifest.origin}: "
            f"{counted(manifest.entry_count, 'entry', 'entries')} (seq {manifest.from_seq} to {manifest.to_seq}), "
            f"signed to seq {verdict['signed_to_seq']}",
            markup=False,
        )
    print_verdicts(verdict["verdicts"])
    print_findings(verdict, outcome.memory, outcome.not_checked)
