"""``tally verify-bundle``: verify bundles offline, from the files and the keys alone. Loads no database package."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import msgspec
import orjson
import typer
from rich.console import RenderableType
from rich.markup import escape

from app.share.bundle import report
from app.share.bundle.report import OUTCOMES, Against, SignedWith, VerifiedFile, counts_of, to_html
from cli.options import Keys
from cli.verify_proof import Trusted, TrustOptions
from ledger.errors import InvalidInputError, NotABundleError, SignatureError
from ledger.exit_code import ExitCode, exit_code_of_bundle, gravest
from signing import manifest, private_keys
from signing.bundle.reader import BundleReader
from signing.files import open_regular, whole_file
from signing.judging import verify_file
from signing.keys import Keyring
from signing.manifest import REPORT_ENVELOPE_BYTES_MAX, REPORT_SUFFIX, SignedReport, open_report
from signing.memory import Memory, remember_observed
from signing.private_keys import FileSigner
from terminal.outcome import CommandExit, counted, fail, findings, marked, readable, tell, verdict_table
from terminal.program import Json, command_of

_CODE_COLOURS = {0: "bold green", 1: "bold red", 2: "bold red", 3: "bold yellow", 4: "bold magenta"}


REPORT_SUFFIXES = (".html", ".md", ".json")
"""Suffixes of reports, which decide the format."""


@dataclass(kw_only=True)
class VerifyBundle:
    """Verify bundles offline: container, manifest, links, payloads, snapshots, signatures, tree, checkpoints.

    Keys inside a bundle are never used: give those you trust with --keys. A
    checkpoint that you kept, from anywhere, shows with --checkpoint whether
    the log was cut before the export. With --keys, the newest checkpoint that
    was verified of each log is remembered in your state folder, and every
    later bundle of that log must agree with it; an older one is no rollback.

    With --witness-key and --tsa-ca, the statements of external witnesses that
    the bundle carries are judged, and the log is compared with those that hold.
    With --policy the exit code is 3 unless the quorum of that tlog-policy
    file has cosigned all entries of the bundle.

    Exit codes: 0 whole and signed; 2 tampered or corrupt; 3 nothing wrong
    found but not everything checked, such as a range that begins later, an
    unsigned end or no keys; 4 a key is unknown, expired or revoked; 1 could
    not read a file, or it is no bundle. The gravest of all files counts.

    \b
    Examples:
      tally verify-bundle acme.bundle.tar --keys trusted-keys.json
      tally verify-bundle 2024/*.tar --keys keys/ --checkpoint acme.checkpoint --report acme-report.md
      tally verify-bundle acme.bundle.tar --keys keys.json --report acme.html --sign-with auditor.pem
    """

    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Bundles to verify, each by itself.")]
    trust: TrustOptions
    report_to: Annotated[
        Path | None,
        typer.Option(
            "--report",
            metavar="OUT",
            help="Write a report to file: a page to print, OUT.html, Markdown, OUT.md, or JSON, OUT.json.",
        ),
    ] = None
    sign_with: Annotated[
        str | None,
        typer.Option("--sign-with", metavar="KEY", help="Key file to sign the report with, in OUT.dsse.json."),
    ] = None
    as_json: Json = False

    def run(self) -> None:
        """Verify each, report, and exit with the gravest code."""
        report_to = self.report_to
        if report_to is not None and report_to.suffix not in REPORT_SUFFIXES:
            raise InvalidInputError(
                f"--report {readable(report_to)}: a report is a page, .html, Markdown, .md, or JSON, .json"
            )
        if self.sign_with is not None and report_to is None:
            raise InvalidInputError("--sign-with signs a report; name it with --report")
        signer = private_keys.load(self.sign_with) if self.sign_with is not None else None
        trusted = self.trust.loaded()
        against, verified = self._against(trusted), list[VerifiedFile]()
        for path in self.files:
            verified.append(_verify(path, trusted, wants_counts=report_to is not None))
            trusted = trusted._replace(memory=_remembered(trusted.memory, verified[-1]))
        now, tool = datetime.now(UTC), f"tallystick {version('tallystick')}"
        document = report.to_json(verified, against, now, tool)
        if report_to is not None:
            _store(report_to, _written(report_to, verified, against, now, tool, signer), document, signer)
        tell(document, *(line for file in verified for line in _lines(file)), as_json=self.as_json)
        raise CommandExit(gravest(ExitCode(file.exit_code) for file in verified))

    def _against(self, trusted: Trusted) -> Against:
        """What the bundles are verified against, as a report says it."""
        given = self.trust
        external_from = [text for each in given.witness_key or () for text in ("--witness-key", each)]
        external_from += [] if given.tsa_ca is None else ["--tsa-ca", readable(given.tsa_ca)]
        external_from += [] if given.policy is None else ["--policy", readable(given.policy)]
        external_from += [] if given.signatures == "any" else ["--signatures", given.signatures]
        return Against(_name(given.keys), trusted.keyring, _name(given.checkpoint), trusted.kept, external_from)


verify_bundle = command_of(VerifyBundle)


def _verify(path: Path, trusted: Trusted, *, wants_counts: bool) -> VerifiedFile:
    """The verdict on a file, with the counts of its entries if they are valid and wanted."""
    try:
        outcome = asyncio.run(verify_file(path, *trusted))
    except NotABundleError as error:
        return VerifiedFile(readable(path), ExitCode.COULD_NOT_RUN, error=str(error))
    except OSError as error:
        return VerifiedFile(readable(path), ExitCode.COULD_NOT_RUN, error=error.strerror or readable(error))
    counts = None
    if wants_counts and "broken" not in outcome.verdict["verdicts"].values():
        with BundleReader.open(path) as reader:
            counts = counts_of(reader)
    return VerifiedFile(readable(path), exit_code_of_bundle(outcome.verdict), outcome, counts=counts)


def _remembered(memory: Memory | None, file: VerifiedFile) -> Memory | None:
    """The memory for the next file, with the verified checkpoint of this one."""
    if memory is None or file.outcome is None:
        return memory
    remember_observed(memory, [file.outcome.memory])
    return Memory.open(memory.folder)


def _name(path: Path | None) -> str | None:
    return None if path is None else readable(path)


def _written(
    path: Path, files: list[VerifiedFile], against: Against, now: datetime, tool: str, signer: FileSigner | None
) -> bytes:
    """The report in the format of its suffix."""
    if path.suffix == ".json":
        return orjson.dumps(
            report.to_json(files, against, now, tool), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
        )
    if path.suffix == ".md":
        return report.to_markdown(files, against, now, tool).encode()
    key = None if signer is None else SignedWith(signer.key_id, signer.algorithm, readable(Path(path.name)))
    return to_html(files, against, now, tool, key).encode()


def _store(path: Path, content: bytes, document: dict[str, Any], signer: FileSigner | None) -> None:
    """Write the report, and the signature that covers it."""
    with whole_file(path) as file:
        file.write(content)
    if signer is not None:
        signature = manifest.seal_report(readable(Path(path.name)), content, manifest.findings_of(document), signer)
        with whole_file(path.with_name(path.name + manifest.REPORT_SUFFIX)) as file:
            file.write(signature)


def _lines(file: VerifiedFile) -> list[RenderableType]:
    summary = f"[{_CODE_COLOURS[file.exit_code]}]{report.OUTCOMES[file.exit_code]}[/]"
    lines = [marked(f"{escape(file.name)}: {summary}")]
    if (outcome := file.outcome) is None:
        return [*lines, f"  {file.error}"]
    verdict, manifest = outcome.verdict, outcome.manifest
    lines.append(f"SHA-256 {outcome.digest}")
    if manifest is not None:
        lines.append(
            f"tenant {manifest.tenant_id} of log {manifest.origin}: "
            f"{counted(manifest.entry_count, 'entry', 'entries')} (seq {manifest.from_seq} to {manifest.to_seq}), "
            f"signed to seq {verdict['signed_to_seq']}"
        )
    return [*lines, verdict_table(verdict["verdicts"]), *findings(verdict, outcome.memory, outcome.not_checked)]


# --- the signature of a report ----------------------------------------------------------------------

REPORT_BYTES_MAX = 256 << 20
_SIGNED_CODES = {"ok": ExitCode.FINE, "unknown_key": ExitCode.UNKNOWN_KEY, "not_checked": ExitCode.INCOMPLETE}


def verify_report(
    report: Annotated[Path, typer.Argument(metavar="REPORT", help="The report, of whatever kind.")],
    keys: Keys = None,
    signature: Annotated[
        Path | None,
        typer.Option(
            "--signature",
            metavar="FILE",
            show_default=f"REPORT{REPORT_SUFFIX}",
            help="The signature, if elsewhere.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Verify the signature under a report of tally verify-bundle --report --sign-with.

    It says that whoever has the key stands by this report, byte for byte, and by
    the verdict in it. It verifies none of the bundles again: the report says how.

    Exit codes: 0 signed by a key that you trust; 2 the report or the signature
    was changed; 3 no key was given; 4 the key is unknown or revoked; 1 could
    not read a file. What the report came to is printed, and changes no exit code.

    \b
    Examples:
      tally verify-report acme.html --keys auditor.pub.pem
      tally verify-report acme.html --keys auditors/ --signature /mnt/archive/acme.html.dsse.json --json
    """
    keyring = Keyring.load(keys) if keys is not None else None
    beside = signature or report.with_name(report.name + REPORT_SUFFIX)
    content, envelope = _read(report, REPORT_BYTES_MAX), _read(beside, REPORT_ENVELOPE_BYTES_MAX)
    try:
        found = open_report(content, envelope, keyring)
    except SignatureError as error:
        raise fail(f"{report} is not what was signed: {error}", ExitCode.TAMPERED) from error
    code = _SIGNED_CODES[found.signed.verdict]
    tell(
        {
            "file": str(report),
            "exit_code": code,
            "signature": found.signed.verdict,
            "detail": found.signed.detail,
            "key_ids": list(found.signed.key_ids),
            "signed_as": found.name,
            "report": msgspec.to_builtins(found.findings),
        },
        *_signed_lines(found, report),
        as_json=as_json,
    )
    raise CommandExit(code)


def _read(path: Path, bytes_max: int) -> bytes:
    with open_regular(path) as file:
        return file.read(bytes_max + 1)


def _signed_lines(found: SignedReport, report: Path) -> list[str]:
    signed, said = found.signed, found.findings
    by_verdict = {
        "ok": f"{report} is as {', '.join(signed.key_ids)} signed it",
        "unknown_key": f"{report} is as somebody signed it, and nobody trusted did: {signed.detail}",
        "not_checked": f"{report} is as somebody signed it; no key was given to say who",
    }
    return [
        by_verdict[signed.verdict],
        f"verified {said.verified_at} by {said.verified_by}: {OUTCOMES[said.exit_code]}",
        *(f"  {bundle.file}: exit code {bundle.exit_code}, SHA-256 {bundle.sha256}" for bundle in said.bundles),
    ]
