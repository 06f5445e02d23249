"""The report for the file: one page that says plainly what was found, prints on A4, asks for nothing, and is signed."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page
from securesystemslib.dsse import Envelope
from securesystemslib.signer import SSlibKey

from app.share.bundle.report import HEADLINES, Actors, Against, SignedWith, VerifiedFile, counts_of, to_html
from ledger import canonical
from ledger.exit_code import ExitCode, exit_code_of_bundle
from signing import private_keys
from signing.anchors import ExternalWitnesses
from signing.bundle.reader import BundleReader
from signing.checkpoint import judge_checkpoint
from signing.judging import verify_file
from signing.keys import Keyring
from signing.manifest import open_report
from tests.app.bundles import GOOD, LEDGER, anchored, bundle_of, checkpoint_of, store
from tests.app.witness import Witness
from tests.browser import browsing, violations
from tests.cases.bundles import cases
from tests.ledger.ledger_in_memory import SIGNER
from tests.signing.test_documented_examples import documented_ring, examples
from tests.tally import run_tally

RING = Keyring([SIGNER.public_key])
NOW = datetime(2026, 11, 23, 4, 0, tzinfo=UTC)
FULL = bundle_of(LEDGER, anchors=[anchored(), anchored(30)])
"""With two cosignatures."""
HOSTILE = '<script src="https://evil.example/x.js">|`&\u202e\x1b[2J'


def verified(folder: Path, bundle: bytes, keyring: Keyring | None = RING, name: str = "acme.tar") -> VerifiedFile:
    """A file as ``tally verify-bundle --report`` has it."""
    path = store(folder, bundle, name)
    external = ExternalWitnesses.load([Witness().verifier_key], None)
    outcome = asyncio.run(verify_file(path, keyring, external=external))
    file = VerifiedFile(name, exit_code_of_bundle(outcome.verdict), outcome)
    if "broken" in outcome.verdict["verdicts"].values():
        return file
    with BundleReader.open(path) as reader:
        return replace(file, counts=counts_of(reader))


def page_of(*files: VerifiedFile, keyring: Keyring | None = RING, signed: SignedWith | None = None) -> str:
    kept = judge_checkpoint(checkpoint_of(LEDGER, 20), RING)
    return to_html(files, Against("keys.json", keyring, "acme.checkpoint", kept), NOW, "tallystick 1.0", signed)


def words(page: str) -> str:
    """What a reader reads."""
    body = page.partition("<body>")[2]
    return " ".join(re.sub(r"<[^>]+>", " ", body).split())


# --- what it says -------------------------------------------------------------------------------------


def test_the_conclusion_stands_first_then_what_it_does_not_show_then_the_rest(tmp_path: Path) -> None:
    text = words(page_of(verified(tmp_path, FULL)))
    order = [
        "Whole and signed",
        "none between the first and the last was changed, removed, added or moved",
        "What this does not show",
        "Whether what the entries say is true",
        "What the entries add up to",
        "Anchors: statements of external witnesses",
        "Who did it",
        "What was verified",
        "What was checked",
        "What it was held against",
        "To check again",
        "Signed off",
    ]
    places = [text.find(each) for each in order]
    assert -1 not in places, order[places.index(-1)]
    assert places == sorted(places)
    for told in (
        hashlib.sha256(FULL).hexdigest(),
        "witness.example/w1 witness 2024-01-11 00:01:40 UTC 1 to 30 ✓ holds",
        "completed 4 running 4",
        "Erased: nothing",
        "ci 8 not said 22",
        f"{SIGNER.key_id} ed25519 from the beginning to no end not revoked",
        "2024-01-11 00:00:00 UTC HLC 1704931200000:1:node-1",
        "tally verify-bundle acme.tar --keys keys.json --checkpoint acme.checkpoint",
        "20 entries, root",
        "Name Role Place and date Signature",
    ):
        assert told in text, told


def bundle_named(name: str) -> bytes:
    return next(case.file for case in cases() if case.name == name)


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("an unsigned end", 3, "What could not be checked stands below"),
        ("rows with a payload edited", 2, "Do not rely on this file"),
        ("cut at byte 600", 2, "This is no bundle that can be opened"),
        ("manifest by a stranger", 4, "Nobody who is trusted vouches for the 12 entries from seq 1 to 12"),
    ],
)
def test_the_conclusion_is_that_of_the_exit_code(name: str, code: int, said: str, tmp_path: Path) -> None:
    file = verified(tmp_path, bundle_named(name))
    page = page_of(file)
    assert file.exit_code == code
    assert f'<section class="conclusion c{code}"><h2>{HEADLINES[code]}</h2>' in page
    assert f"<title>{HEADLINES[code]}: " in page
    assert said in words(page)
    assert ("The first break" in words(page)) is (code in (2, 4))
    assert "none between the first and the last was changed" not in words(page) or code == 3
    if code == 2:
        assert "What the entries add up to" not in words(page)


def test_of_several_files_the_gravest_is_said_first_and_each_has_its_part(tmp_path: Path) -> None:
    good, bad = verified(tmp_path, GOOD, name="good.tar"), verified(tmp_path, GOOD[:-1], name="bad.tar")
    gone = VerifiedFile("gone.tar", ExitCode.COULD_NOT_RUN, error="No such file or directory")
    text = words(page_of(good, bad, gone))
    assert text.index("All together: Tampered with or corrupt") < text.index("What none of them shows")
    assert "good.tar Whole and signed bad.tar Tampered with or corrupt gone.tar Could not be read" in text
    assert "gone.tar could not be read: No such file or directory. Nothing is said of what it holds." in text
    assert text.count("Whether what the entries say is true") == 1


def test_without_keys_it_says_that_nothing_vouches(tmp_path: Path) -> None:
    text = words(page_of(verified(tmp_path, GOOD, None), keyring=None))
    assert "No key was given. Signatures were not checked." in text
    assert "No key was given, so no signature was checked: the author of the file may have invented all of it." in text


# --- what it is ---------------------------------------------------------------------------------------


def test_nothing_from_a_ledger_becomes_markup_or_turns_the_text_around_it(tmp_path: Path) -> None:
    file = verified(tmp_path, FULL)
    assert file.counts is not None
    hostile = replace(
        file, name=HOSTILE, counts=file.counts._replace(senders=Actors(Counter({HOSTILE: 3})), jobs={HOSTILE: 1})
    )
    page = page_of(hostile, hostile)
    assert "<script" not in page
    assert {"\u202e", "\x1b"} & set(page) == set()
    assert "&lt;script src=&quot;https://evil.example/x.js&quot;&gt;" in page


def test_the_page_allows_its_own_style_and_nothing_else(tmp_path: Path) -> None:
    page = page_of(verified(tmp_path, FULL))
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert "default-src &#x27;none&#x27;" in page
    assert f"style-src &#x27;sha256-{digest}&#x27;" in page
    assert re.findall(r"\s(?:src|href|style|on\w+)=", page) == []


@pytest.fixture(scope="module")
def asked() -> list[str]:
    """What the page asks for in the browser."""
    return []


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory, asked: list[str]) -> Iterator[Page]:
    """A signed report in a browser, whose event loop runs in this thread until no other test needs one."""
    folder = tmp_path_factory.mktemp("shown")
    file = folder / "report.html"
    file.write_text(page_of(verified(folder, FULL), signed=SignedWith("0" * 16, "ed25519", "report.html")))
    with browsing() as browser:
        page = browser.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.goto(file.as_uri())
        yield page


def test_in_a_browser_it_is_read_by_everybody_asks_for_nothing_and_fits_a_phone(shown: Page, asked: list[str]) -> None:
    assert [each["id"] for each in violations(shown)] == []
    for width in (1280, 360):
        shown.set_viewport_size({"width": width, "height": 800})
        assert shown.evaluate("document.documentElement.scrollWidth") <= width
    border = "getComputedStyle(document.querySelector('.conclusion')).borderLeftColor"
    assert shown.evaluate(border) == "rgb(29, 107, 69)", "the policy lets the style in"
    assert asked == [shown.url]


def test_it_prints_on_a4_and_the_sign_off_is_not_torn_apart(shown: Page) -> None:
    pdf = shown.pdf(prefer_css_page_size=True)
    assert pdf.startswith(b"%PDF")
    assert set(re.findall(rb"/MediaBox \[0 0 ([\d.]+) ([\d.]+)\]", pdf)) == {(b"594.95996", b"841.91998")}
    assert 2 <= len(re.findall(rb"/Type /Page\b", pdf)) <= 4
    shown.emulate_media(media="print")
    for name in (".signed-off", ".conclusion", "table"):
        assert shown.locator(name).first.evaluate("element => getComputedStyle(element).breakInside") == "avoid"


# --- the signature ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a report, its signature and the auditor's keys."""
    folder = tmp_path_factory.mktemp("signed")
    store(folder, FULL, "acme.tar")
    (folder / "keys.json").write_text(json.dumps(RING.to_json()))
    (folder / "auditor.pub").write_text(private_keys.generate(folder / "auditor.pem").public_key_pem)
    options = ("--keys", folder / "keys.json", "--report", folder / "acme.html", "--sign-with", folder / "auditor.pem")
    done = run_tally("verify-bundle", folder / "acme.tar", *options, "--no-state")
    assert done.returncode == 0, done.stderr
    return folder


def verify(signed: Path, *options: str | Path, code: int, report: Path | None = None) -> dict[str, Any]:
    done = run_tally("verify-report", report or signed / "acme.html", *options, "--json")
    assert done.returncode == code, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout) if done.stdout else {}
    return found


def test_a_signed_report_is_found_to_be_the_auditor_s_and_says_what_it_came_to(signed: Path) -> None:
    found = verify(signed, "--keys", signed / "auditor.pub", code=0)
    assert (found["signature"], found["signed_as"], found["report"]["exit_code"]) == ("ok", "acme.html", 0)
    (bundle,) = found["report"]["bundles"]
    assert (bundle["log"], bundle["to_seq"], bundle["entries"]) == ("log.example/acme", 30, 30)
    assert bundle["sha256"] == hashlib.sha256(FULL).hexdigest()
    (key,) = Keyring.load(signed / "auditor.pub")
    assert f"signed with key <code>{key.key_id}</code>" in (signed / "acme.html").read_text()
    assert "tally verify-report acme.html --keys KEYS" in (signed / "acme.html").read_text()
    done = run_tally("verify-report", signed / "acme.html", "--keys", signed / "auditor.pub")
    assert f"is as {key.key_id} signed it" in done.stdout
    assert "WHOLE AND SIGNED" in done.stdout


def test_a_report_counts_by_the_key_that_is_given(signed: Path) -> None:
    assert verify(signed, code=3)["signature"] == "not_checked"
    assert verify(signed, "--keys", signed / "keys.json", code=4)["signature"] == "unknown_key"


def test_a_report_that_was_changed_or_is_another_is_not_the_one_signed(signed: Path, tmp_path: Path) -> None:
    report, signature = (signed / "acme.html").read_bytes(), signed / "acme.html.dsse.json"
    options = ("--keys", signed / "auditor.pub", "--signature", signature)
    other = tmp_path / "other.html"
    for changed in (report.replace(b"Whole", b"whole", 1), report + b"\n", b""):
        other.write_bytes(changed)
        verify(signed, *options, code=2, report=other)
    other.write_bytes(report)
    assert verify(signed, *options, code=0, report=other)["signed_as"] == "acme.html"
    said = json.loads(signature.read_text())
    forged = tmp_path / "forged"
    payload = base64.b64decode(said["payload"]).replace(b'"exit_code":0', b'"exit_code":3')
    for envelope in (
        {**said, "payload": base64.b64encode(payload).decode()},
        {**said, "signatures": []},
        {**said, "payloadType": "text/plain"},
        {},
    ):
        forged.write_text(json.dumps(envelope))
        verify(signed, "--keys", signed / "auditor.pub", "--signature", forged, code=2)
    verify(signed, "--signature", tmp_path / "gone", code=1)


def test_the_signature_in_the_document_is_one() -> None:
    envelope, payload = examples("report.md")
    found = open_report(b"An example.\n", envelope.encode(), documented_ring())
    assert (found.signed.verdict, found.name, found.findings.bundles[0].file) == (
        "ok",
        "acme.html",
        "example.bundle.tar",
    )
    assert base64.b64decode(json.loads(envelope)["payload"]) == canonical.encode(json.loads(payload))


def test_another_program_finds_the_signature_to_hold(signed: Path) -> None:
    (key,) = Keyring.load(signed / "auditor.pub")
    foreign = SSlibKey(key.key_id, "ed25519", "ed25519", {"public": key.raw().hex()})
    envelope = Envelope.from_dict(json.loads((signed / "acme.html.dsse.json").read_text()))
    assert list(envelope.verify([foreign], 1)) == [key.key_id]
    (subject,) = json.loads(envelope.payload)["subject"]
    assert subject["digest"]["sha256"] == hashlib.sha256((signed / "acme.html").read_bytes()).hexdigest()


def test_reports_of_every_kind_are_signed_and_a_signature_wants_a_report(signed: Path, tmp_path: Path) -> None:
    for kind in (".md", ".json"):
        report = tmp_path / f"report{kind}"
        options = ("--keys", signed / "keys.json", "--report", report, "--sign-with", signed / "auditor.pem")
        assert run_tally("verify-bundle", signed / "acme.tar", *options, "--no-state").returncode == 0
        verify(signed, "--keys", signed / "auditor.pub", code=0, report=report)
    done = run_tally("verify-bundle", signed / "acme.tar", "--sign-with", signed / "auditor.pem")
    assert (done.returncode, "name it with --report" in done.stderr) == (1, True)
