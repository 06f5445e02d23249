"""``tally verify-report``: whether a report is the one that was signed, by whom, and what it was signed to say."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from app.share.bundle.report import OUTCOMES
from cli.options import Keys
from ledger.errors import SignatureError
from ledger.exit_code import ExitCode
from signing.files import open_regular
from signing.keys import Keyring
from signing.manifest import REPORT_ENVELOPE_BYTES_MAX, REPORT_SUFFIX, SignedReport, open_report
from terminal.options import Json
from terminal.outcome import CommandExit, fail, out, print_json

REPORT_BYTES_MAX = 256 << 20
_CODES = {"ok": ExitCode.FINE, "unknown_key": ExitCode.UNKNOWN_KEY, "not_checked": ExitCode.INCOMPLETE}


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
    code = _CODES[found.signed.verdict]
    if as_json:
        print_json(_json(found, report, code))
    else:
        _print(found, report)
    raise CommandExit(code)


def _read(path: Path, bytes_max: int) -> bytes:
    with open_regular(path) as file:
        return file.read(bytes_max + 1)


def _json(found: SignedReport, report: Path, code: ExitCode) -> dict[str, Any]:
    return {
        "file": str(report),
        "exit_code": code,
        "signature": found.signed.verdict,
        "detail": found.signed.detail,
        "key_ids": list(found.signed.key_ids),
        "signed_as": found.name,
        "report": msgspec.to_builtins(found.findings),
    }


def _print(found: SignedReport, report: Path) -> None:
    signed, said = found.signed, found.findings
    if signed.verdict == "ok":
        out.print(f"{report} is as {', '.join(signed.key_ids)} signed it", markup=False)
    elif signed.verdict == "unknown_key":
        out.print(f"{report} is as somebody signed it, and nobody trusted did: {signed.detail}", markup=False)
    else:
        out.print(f"{report} is as somebody signed it; no key was given to say who", markup=False)
    out.print(f"verified {said.verified_at} by {said.verified_by}: {OUTCOMES[said.exit_code]}", markup=False)
    for bundle in said.bundles:
        out.print(f"  {bundle.file}: exit code {bundle.exit_code}, SHA-256 {bundle.sha256}", markup=False)
