"""The signature of whoever verified under their report: a DSSE envelope that lies beside it (docs/formats/report.md).

The payload is an in-toto Statement, canonical JSON: its subject is the report, by SHA-256, its predicate says what was
verified and what that came to. So the envelope alone says what was found, and with the report that this is the one.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from ledger import canonical
from ledger.errors import SignatureError
from ledger.exit_code import ExitCode, gravest
from signing import envelope
from signing import manifest as statements
from signing.envelope import Signed
from signing.keys import Keyring, Signer
from signing.manifest import STATEMENT_TYPE, Hash
from signing.strict import parse_json

PREDICATE_TYPE: Final = "https://tallystick.dev/verification-report/v1"
SUFFIX: Final = ".dsse.json"
"""What the name of the envelope has behind that of the report."""
ENVELOPE_BYTES_MAX: Final = 4 << 20


_Code = Annotated[int, Meta(ge=0, le=4)]


class VerifiedBundle(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A file that the report is about. All but ``exit_code`` and ``file`` are None where it could not be read."""

    entries: int | None
    exit_code: _Code
    file: str
    from_seq: int | None
    log: str | None
    sha256: Hash | None
    to_seq: int | None


class Findings(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What the statement says of a report."""

    bundles: list[VerifiedBundle]
    exit_code: _Code
    verified_at: str
    verified_by: str


class _Digest(msgspec.Struct, forbid_unknown_fields=True):
    sha256: Hash


class _Subject(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    digest: _Digest


class _Statement(msgspec.Struct, forbid_unknown_fields=True):
    type_: str = msgspec.field(name="_type")
    subject: tuple[_Subject]
    predicate_type: str = msgspec.field(name="predicateType")
    predicate: Findings


class SignedReport(msgspec.Struct, frozen=True):
    """What came of an envelope and a report that belong together."""

    name: str
    """The report's, as it was signed; it may have been renamed since."""
    findings: Findings
    signed: Signed


def seal(name: str, report: bytes, findings: Findings, signer: Signer) -> bytes:
    """The envelope for ``report``, stored under ``name``.

    Raises:
        SigningUnavailableError: the signer cannot be reached.
    """
    subject: dict[str, object] = {"name": name, "digest": {"sha256": sha256(report).hexdigest()}}
    payload = statements.encode([subject], PREDICATE_TYPE, msgspec.to_builtins(findings))
    return canonical.encode(envelope.sign(payload, signer)) + b"\n"


def open_report(report: bytes, data: bytes, keyring: Keyring | None) -> SignedReport:
    """What was signed of ``report``, by the envelope in ``data`` and the keys of ``keyring``.

    Raises:
        SignatureError: malformed, of another report, or a held key is named that did not sign it.
    """
    if len(data) > ENVELOPE_BYTES_MAX:
        raise SignatureError(f"the signature is over {ENVELOPE_BYTES_MAX} bytes")
    opened = envelope.parse(parse_json(data, "the signature"), envelope.PAYLOAD_TYPE)
    signed = envelope.judge(opened, keyring)
    try:
        said = msgspec.json.decode(opened.payload, type=_Statement)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise SignatureError(f"the statement is none about a report: {error}") from error
    if (said.type_, said.predicate_type) != (STATEMENT_TYPE, PREDICATE_TYPE):
        raise SignatureError("the statement is none about a report")
    (subject,) = said.subject
    if subject.digest.sha256 != sha256(report).hexdigest():
        raise SignatureError("the report is not the one that was signed: its digest is another")
    return SignedReport(subject.name, said.predicate, signed)


def findings_of(report: Mapping[str, Any]) -> Findings:
    """What to sign of a report, given as its JSON form."""
    bundles = [_bundle(item) for item in report["bundles"]]
    code = gravest(ExitCode(bundle.exit_code) for bundle in bundles)
    return Findings(bundles, code.value, report["verified_at"], report["verified_by"])


def _bundle(item: Mapping[str, Any]) -> VerifiedBundle:
    about = item.get("bundle", {})
    return VerifiedBundle(
        entries=item.get("entries_checked"),
        exit_code=item["exit_code"],
        file=item["file"],
        from_seq=about.get("from_seq"),
        log=f"{about['log_origin']}/{about['tenant_id']}" if "log_origin" in about else None,
        sha256=about.get("sha256"),
        to_seq=about.get("to_seq"),
    )
