"""``/verify`` in a real browser: it says of every bundle and receipt what the product says, alone and to everybody."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.mldsa import MLDSA44PrivateKey
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from playwright.sync_api import Browser, Error, Page, Request, expect

from app.share.bundle.report import OUTCOMES
from cli.verify_proof import OUTCOMES as RECEIPT_OUTCOMES
from ledger import canonical
from ledger.hlc import Hlc
from signing import envelope
from signing.anchors import BundledAnchor
from signing.checkpoint import Checkpoint, sign_checkpoint
from signing.keys import Keyring, PublicKey
from signing.note import VerifierKey, WitnessKey
from signing.note import parse as parse_note
from signing.note import sign as sign_note
from signing.private_keys import FileSigner
from tests.app.bundles import (
    ENTRIES,
    GOOD,
    LEDGER,
    LOG_ORIGIN,
    anchored,
    bundle_of,
    checkpoint_of,
    container,
    members_of,
    reseal,
    rows_of,
    store,
    with_rows,
    zipped,
)
from tests.app.receipts import DOCUMENTED_WITNESS, cosigned, dishonest_receipt, example_ledger, indexed, receipt_of
from tests.app.second_verifier import as_saved, twin_in
from tests.app.test_commitments_bundled import RULES_1
from tests.app.witness import Witness
from tests.browser import PHONE, browsing, violations
from tests.cases import bundles as bundle_cases
from tests.cases import receipts as receipt_cases
from tests.cases.entries import SEQ, entry_forms
from tests.cases.judges import by_product
from tests.cases.kinds import FILE_KINDS, FileKind
from tests.conftest import EXAMPLES, spread
from tests.ledger.callers import ML_DSA_44
from tests.ledger.committed import RACE, RULES_RAISED, committed, flipped, mend, placement, with_history
from tests.ledger.ledger_in_memory import SIGNER, STRANGER, Ledger, build
from tests.ledger.pruned import pruned, pruned_race
from tests.ledger.test_carried import FLOOR, changed
from tests.ledger.test_carried import RACE as RACE_AT_A_FLOOR
from tests.ledger.test_commitment_check import PAYLOADS
from tests.tally import run_tally

RING: Final = Keyring([SIGNER.public_key])
FORMATS: Final = Path(__file__).resolve().parents[2] / "docs" / "formats"
CASES_AT_ONCE: Final = 40
SECONDS_MAX: Final = 60


def edited() -> bytes:
    """The good bundle with the payload of seq 13 changed, and a manifest that fits."""
    rows = rows_of(GOOD)
    rows[12]["payload"] = '{"type":"JobFailed"}'
    return with_rows(GOOD, rows)


EDITED: Final = edited()
FEW: Final = build(6, snapshots_to=(3, 6))
LITTLE: Final = bundle_of(FEW)
"""A bundle that is whole, of few rows: what a page of many says is not what each test is about."""

JUDGE = """cases => Promise.all(cases.map(async ({file, ...against}) => {
  const blob = new Blob([Uint8Array.from(atob(file), each => each.charCodeAt(0))]);
  try {
    const found = await tallystickVerify(blob, against);
    return [found.exitCode, found.verdict];
  } catch (error) {
    return [1, null, error.message];
  }
}))"""


COUNT_PARTS = """() => {
  const verdict = document.getElementById("verdict");
  window.counts = [];
  new MutationObserver(() => counts.push(verdict.childElementCount)).observe(verdict, {childList: true});
}"""
"""From now on notes how many parts a verdict has, whenever that changes."""


class Asked(NamedTuple):
    """A file, and what is held against it."""

    name: str
    file: bytes
    keyring: Keyring | None = RING
    kept: str | None = None
    witnesses: Sequence[str] = ()
    policy: str | None = None

    def to_page(self) -> dict[str, Any]:
        """As the page's function takes it."""
        return {
            "file": base64.b64encode(self.file).decode(),
            "keys": None if self.keyring is None else [json.dumps(as_saved(self.keyring))],
            "checkpoint": self.kept,
            "witnessKeys": [*self.witnesses],
            "policy": self.policy,
            "signatures": "both" if self.keyring is not None and self.keyring.needs_both else "any",
        }


Said = tuple[int, dict[str, Any]]
"""An exit code and a verdict."""
InPage = Callable[[Iterable[Asked]], list[Said]]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as browser:
        yield browser


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page, as the command saves it, however what it writes is spelled."""
    path = tmp_path_factory.mktemp("page") / "verify.html"
    for spelled in ("-o", "--output", "--out"):
        done = run_tally("verify-page", spelled, path)
        assert done.returncode == 0, done
    return path


@pytest.fixture(scope="module")
def loaded() -> list[str]:
    """Addresses that the page was seen to ask for."""
    return []


@pytest.fixture(scope="module")
def page(browser: Browser, saved: Path, loaded: list[str]) -> Page:
    """The page from disk; whatever goes wrong in it fails a test."""
    return opened(browser, saved.as_uri(), loaded)


def opened(browser: Browser, url: str, loaded: list[str], **context: Any) -> Page:
    page = browser.new_context(**context).new_page()
    page.set_default_timeout(SECONDS_MAX * 1000)

    def note(request: Request) -> None:
        loaded.append(request.url)

    page.on("request", note)
    page.goto(url)
    return page


@pytest.fixture
def in_page(page: Page) -> InPage:
    """What the page says of files."""

    def judge(asked: Iterable[Asked]) -> list[Said]:
        all_of_them, said = [each.to_page() for each in asked], []
        for at in range(0, len(all_of_them), CASES_AT_ONCE):
            said += [
                (code, verdict) for code, verdict, *_ in page.evaluate(JUDGE, all_of_them[at : at + CASES_AT_ONCE])
            ]
        return said

    return judge


def of_product(asked: Asked, folder: Path) -> Said:
    """What the product says; an empty verdict where it judges nothing."""
    return by_product(asked.file, folder, asked.keyring, asked.kept, asked.policy, asked.witnesses)


COMPARED: Final = (
    *("tenant_id", "valid", "entries_checked", "from_seq", "to_seq", "head", "verdicts", "breaks", "compared_with"),
    *("not_compared", "signed_to_seq", "unsigned_entries", "verified_from_seq", "pruned", "policy"),
)
OF_THE_FILE: Final = frozenset(
    ("bundle", "bundle-signature", "receipt", "receipt-signature", "checkpoint-signature", "completeness")
)
"""Kinds of break whose words may be others: some are those of a library."""


def told(said: Said) -> dict[str, Any]:
    """What of a verdict must be the same from both."""
    code, verdict = said
    if not verdict:
        return {"code": code}
    first = dict(verdict["first_break"] or {})
    if first.get("kind") in OF_THE_FILE:
        first["detail"] = ""
    elif first:
        first["detail"] = re.split(": not the payload of a| is malformed: ", first["detail"])[0]
        if first["kind"] in ("malformed", "caller-signature"):
            # What is wrong with it is said in words of each language.
            first["detail"] = first["detail"].partition(": ")[0]
    statuses = [(each["by"], each["to_seq"], each["status"]) for each in verdict["anchors"]]
    about = verdict.get("bundle") or verdict["receipt"]
    return {
        "code": code,
        "first": first,
        "anchors": statuses,
        "sha256": about["sha256"],
        "checkpoint": about.get("checkpoint"),
        **{name: verdict[name] for name in COMPARED if name in verdict},
    }


def disagreements(asked: Sequence[Asked], in_page: InPage, folder: Path) -> list[str]:
    """Names of the files of which page and product say different things, and what."""
    return compared(asked, in_page, folder)[0]


def compared(asked: Sequence[Asked], in_page: InPage, folder: Path) -> tuple[list[str], list[Said]]:
    """The same, and what the page says."""
    found, by_page = [], in_page(asked)
    for each, page_said in zip(asked, by_page, strict=True):
        product_said = of_product(each, folder)
        ours, theirs = told(page_said), told(product_said)
        if product_said[1] == {}:
            ours = {"code": ours["code"]}
        if ours != theirs:
            found.append(
                f"{each.name}: " + str([(k, ours.get(k), theirs.get(k)) for k in theirs if ours.get(k) != theirs[k]])
            )
    return found, by_page


# --- one verdict from both --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FILE_KINDS, ids=lambda kind: kind.name)
def test_page_and_product_judge_every_case_of_the_corpus_alike_and_as_it_says(
    kind: FileKind, in_page: InPage, tmp_path: Path
) -> None:
    found = kind.found()
    asked = [Asked(case.name, case.file, kind.ring(case), case.kept, policy=case.policy) for case, _ in found]
    differing, by_page = compared(asked, in_page, tmp_path)
    assert "\n".join(differing) == ""
    for (case, first_break), (code, verdict) in zip(found, by_page, strict=True):
        assert code == case.code, case.name
        first = (verdict or {}).get("first_break")
        # Of a checkpoint that does not open the page has a verdict, and the commands have an error.
        if first_break is not None or first is not None:
            assert first_break == (first["kind"], first["seq"]) or first["kind"] == "checkpoint-given", case.name


def test_page_and_product_judge_merged_runs_over_what_left_alike(in_page: InPage, tmp_path: Path) -> None:
    cases = [*bundle_cases.large_pruned()]
    differing, by_page = compared([Asked(case.name, case.file) for case in cases], in_page, tmp_path)
    assert differing == []
    assert [code for code, _ in by_page] == [case.code for case in cases]


@pytest.mark.exhaustive
def test_product_second_implementation_and_page_judge_every_form_of_a_prune_alike(
    in_page: InPage, tmp_path: Path
) -> None:
    asked = [
        Asked(f"{name} is {value!r}", bundle_of(pruned(**{name: value}), 11))
        for name, value in spread(bundle_cases.other_members_of_a_prune(), 20)
    ]
    assert disagreements(asked, in_page, tmp_path) == []
    twin = twin_in(tmp_path)
    for each in asked:
        assert twin(store(tmp_path, each.file), RING) == of_product(each, tmp_path)[0], each.name


@pytest.mark.exhaustive
def test_product_second_implementation_and_page_judge_every_form_of_an_entry_alike(
    in_page: InPage, tmp_path: Path
) -> None:
    """What a key that is trusted signed, and no ledger writes, is broken for all of them."""
    forms = spread(entry_forms(), 40)
    ledgers = [form.ledger() for form in forms]
    bundles = [Asked(form.name, bundle_of(ledger)) for form, ledger in zip(forms, ledgers, strict=True)]
    # No receipt holds U+0000.
    kept = [at for at, ledger in enumerate(ledgers) if "\0" not in ledger.entry(SEQ)["job_id"]]
    receipts = [Asked(forms[at].name, dishonest_receipt(ledgers[at], SEQ)) for at in kept]
    of_bundles = [0 if form.is_well_formed else 2 for form in forms]
    # A receipt of an entry whose link has version 1 proves less.
    is_older = [form.is_well_formed and form.columns.get("link_version") == 1 for form in forms]
    of_receipts = [3 if is_older[at] else of_bundles[at] for at in kept]
    twin, codes = twin_in(tmp_path), of_bundles + of_receipts
    asked = bundles + receipts
    by_product = [of_product(each, tmp_path) for each in asked]
    by_page = in_page(asked)
    assert [*map(told, by_page)] == [*map(told, by_product)]
    assert [code for code, _ in by_product] == codes
    assert [twin(store(tmp_path, each.file), RING) for each in asked] == codes
    for form, (_, verdict) in zip(forms, by_product, strict=False):
        assert verdict["breaks"] == ({} if form.is_well_formed else {"malformed": 1}), form.name


def test_a_file_that_is_neither_bundle_nor_receipt_is_named_and_not_judged(
    in_page: InPage, page: Page, tmp_path: Path
) -> None:
    others = {
        "report.html": b"<!doctype html>\n",
        "picture.png": b"\x89PNG\r\n\x1a\n" + bytes(99),
        "report.json": b'{"bundles":[]}',
        "empty": b"",
    }
    said = in_page([Asked(name, content) for name, content in others.items()])
    assert [(code, verdict is None) for code, verdict in said] == [(1, True)] * len(others)
    page.reload()
    page.set_input_files("#subject", store(tmp_path, others["picture.png"], "picture.png"))
    expect(page.locator("#problem")).to_have_text(
        "COULD NOT BE READ: picture.png is no bundle and no receipt; it looks like a picture"
    )
    assert page.locator(".outcome").count() == 0


@pytest.mark.exhaustive
def test_they_agree_without_keys_where_nothing_is_wrong_with_the_file_itself(in_page: InPage, tmp_path: Path) -> None:
    whole = [each for each in bundle_cases.cases() if each.code != 2]
    proved = [each for each in receipt_cases.cases() if each.code != 2]
    bundles = [Asked(each.name, each.file, None, each.kept) for each in spread(whole, 20)]
    receipts = [Asked(each.name, each.file, None, each.kept) for each in spread(proved, 20)]
    assert disagreements(bundles + receipts, in_page, tmp_path) == []


def test_they_agree_on_cosignatures_by_witnesses_that_were_given(in_page: InPage, tmp_path: Path) -> None:
    forked = Witness().cosign(checkpoint_of(build(20, begin_ms=1_704_931_300_000), 20), 1_704_931_300)
    witnesses = [Witness().verifier_key]
    bundles = {
        "two": bundle_of(LEDGER, anchors=[anchored(), anchored(30)]),
        "a later range": bundle_of(LEDGER, 11, anchors=[anchored(5)]),
        "a fork": bundle_of(LEDGER, anchors=[anchored(), anchored(checkpoint=forked)]),
        "no line": bundle_of(LEDGER, anchors=[anchored(checkpoint=checkpoint_of(LEDGER, 20))]),
        "another log": bundle_of(
            LEDGER, anchors=[anchored(checkpoint=forked.replace("log.example/acme\n", "log.example/other\n", 1))]
        ),
        "no time": bundle_of(LEDGER, anchors=[anchored(time="yesterday")]),
    }
    asked = [Asked(name, bundle, witnesses=witnesses) for name, bundle in bundles.items()]
    revoked = Keyring([PublicKey.of(SIGNER.public_key_pem, revoked_from_hlc=Hlc(1_704_931_400_000, 0, "node-1"))])
    asked.append(Asked("before its key was revoked", bundles["two"], revoked, witnesses=witnesses))
    receipt = receipt_of(example_ledger(), said=[cosigned(example_ledger(), 4, SIGNER)])
    asked.append(Asked("a receipt", receipt, witnesses=[DOCUMENTED_WITNESS.verifier_key]))
    differing, by_page = compared(asked, in_page, tmp_path)
    assert differing == []
    assert [verdict["anchors"][0]["status"] for _, verdict in by_page] == [
        *("ok", "ok", "ok", "invalid", "invalid", "invalid", "ok", "ok"),
    ]


def test_they_agree_on_every_spelling_of_a_p256_signature(in_page: InPage, tmp_path: Path) -> None:
    signer = FileSigner(Path("no-file"), ec.derive_private_key(0x5EED, ec.SECP256R1()))
    ledger = build(10)
    ledger.sign(10, signer)
    bundle = bundle_of(ledger, signer=signer, checkpoint=checkpoint_of(ledger))
    ring = Keyring([signer.public_key, SIGNER.public_key])
    members = members_of(bundle)
    held = json.loads(members["manifest.dsse.json"])
    signature = base64.b64decode(held["signatures"][0]["sig"])
    r_bytes = signature[4 : 4 + signature[3]]
    rest = signature[4 + len(r_bytes) :]
    spellings = {
        "as it is": signature,
        "a byte behind it": signature + b"\0",
        "long length": b"\x30\x81" + signature[1:],
        "padded": bytes([0x30, signature[1] + 1, 2, len(r_bytes) + 1, 0]) + r_bytes + rest,
        "negative": bytes([0x30, signature[1], 2, len(r_bytes), r_bytes[0] | 0x80]) + r_bytes[1:] + rest,
        "raw": b"".join(part.lstrip(b"\0").rjust(32, b"\0") for part in (r_bytes, rest[2:])),
        "zeros": bytes([0x30, 6, 2, 1, 0, 2, 1, 0]),
        "cut": signature[:-1],
        "nothing": b"\x30\x00",
    }
    asked = []
    for name, spelt in spellings.items():
        held["signatures"][0]["sig"] = base64.b64encode(spelt).decode()
        changed = members | {"manifest.dsse.json": canonical.encode(held)}
        asked.append(Asked(name, container(changed.items()), ring))
    differing, by_page = compared(asked, in_page, tmp_path)
    assert differing == []
    assert [code for code, _ in by_page] == [0] + [2] * (len(spellings) - 1)


def test_they_agree_on_signatures_in_the_name_of_another(in_page: InPage, tmp_path: Path) -> None:
    both = Keyring([SIGNER.public_key, STRANGER.public_key])
    # A held key signed a snapshot that names another held key.
    ledger = build(30, snapshots_to=(10, 20, 30))
    payload = base64.b64decode(json.loads(ledger.snapshots[-1]["dsse_envelope"])["payload"])
    ledger.snapshots[-1]["dsse_envelope"] = json.dumps(envelope.sign(payload, STRANGER))
    # A held key signed the checkpoint, under a name that is not the log's.
    head = LEDGER.checkpoint()
    body = f"log.example/acme\n{head.size}\n{base64.b64encode(head.root).decode()}\n"
    note = sign_note(body, "other.example", STRANGER)
    named = VerifierKey.of("other.example", STRANGER.public_key).text()
    # A proof that leads to the checkpoint, and not from the tree that the manifest names.
    unproved = reseal(bundle_of(LEDGER, 11, 20), tree_root="00" * 32)
    asked = [
        Asked("a snapshot in the name of another", bundle_of(ledger), both),
        Asked("a checkpoint under another name", bundle_of(LEDGER, checkpoint=note), Keyring([*RING], [named])),
        Asked("a tree that nothing leads from", unproved),
    ]
    differing, by_page = compared(asked, in_page, tmp_path)
    assert differing == []
    assert [code for code, _ in by_page] == [2, 4, 2]


def test_they_agree_on_texts_of_every_script(in_page: InPage, tmp_path: Path) -> None:
    rows = rows_of(GOOD)
    for at, job_id in enumerate(("日本", "\U0001f9fe", 'a"b\\c', "\u2028\x7f", "\x01\t\n", "é" * 300)):
        rows[at]["job_id"] = job_id
    ledger = Ledger("acme", rows)
    ledger.relink()
    asked = [Asked("texts", with_rows(GOOD, ledger.entries))]
    assert disagreements(asked, in_page, tmp_path) == []


@given(races=st.lists(st.tuples(PAYLOADS, st.integers(0, 30)), min_size=10, max_size=10))
@settings(max_examples=EXAMPLES // 12, deadline=None, suppress_health_check=list(HealthCheck))
def test_they_agree_on_verdicts_on_proposals_true_and_forged(
    races: list[tuple[list[dict[str, Any]], int]], in_page: InPage, tmp_path: Path
) -> None:
    ledgers = [committed(payloads) for payloads, _ in races]
    for payloads, at in races:
        judged = [seq for seq, each in enumerate(payloads, 5) if "commitment" in each]
        if judged:
            ledgers.append(flipped(committed(payloads), judged[at % len(judged)]))
            ledgers.append(committed(payloads, forged=[judged[at % len(judged)]]))
    asked = [Asked(f"race {number}", bundle_of(ledger)) for number, ledger in enumerate(ledgers)]
    keys = Keyring.from_json(json.loads((RULES_1 / "keys.json").read_text()))
    asked.append(Asked("from before rules had versions", (RULES_1 / "bundle.tar").read_bytes(), keys))
    assert disagreements(asked, in_page, tmp_path) == []


def test_they_agree_on_every_word_of_a_verdict_on_a_proposal(in_page: InPage, tmp_path: Path) -> None:
    edits: list[tuple[int, dict[str, Any]]] = [
        (7, {"payload": "{}"}),
        (7, {"payload": "[]"}),
        (7, {"payload": '{"commitment":{"kind":"Lease"},"precondition":{"kind":"None"}}'}),
        (5, {"payload": '{"capacity":{"cpu_millis":"9"},"node":"n1"}'}),
        (5, {"payload": '{"capacity":{},"node":"n1","overcommit":{"cpu_millis":"0.5"},"rules":2}'}),
        (5, {"payload": '{"capacity":{"cpu_millis":2},"node":"n1","rules":3}'}),
        (5, {"payload": '{"capacity":{"cpu_millis":2},"node":"n1","rules":null}'}),
        (7, {"job_id": "capsule:z"}),
        (5, {"job_id": "node:n2"}),
    ]
    rejected = json.loads(committed(RACE).entry(8)["payload"])
    for change in (
        {"detail": "no room"},
        {"free": {"cpu_millis": 1}},
        {"blocking_index": 6},
        {"epoch": 0},
        {"more": 1},
    ):
        payload = {**rejected, "rejection": {**rejected["rejection"], **change}}
        edits.append((8, {"payload": canonical.encode(payload).decode()}))
    asked = [Asked("whole", bundle_of(committed(RACE))), Asked("later", bundle_of(committed(RACE), 6))]
    asked.append(Asked("with what was imported", bundle_of(with_history())))
    for seq, change in edits:
        ledger = committed(RACE)
        ledger.entry(seq).update(change)
        mend(ledger)
        asked.append(Asked(str(change), bundle_of(ledger)))
    raised = committed(RULES_RAISED)
    asked.append(Asked("by rules that were raised", bundle_of(raised)))
    asked += [Asked(f"by raised rules, {seq} forged", bundle_of(flipped(raised, seq))) for seq in (7, 13, 14, 20, 21)]
    broken = rows_of(asked[0].file)
    broken[3]["payload"] = "{}"
    asked.append(Asked("in a chain that is broken itself", with_rows(asked[0].file, broken)))
    differing, by_page = compared(asked, in_page, tmp_path)
    assert differing == []
    assert [code for code, _ in by_page] == [0, 3, 0] + [2] * len(edits) + [0] + [2] * 6


def test_they_agree_on_verdicts_behind_a_floor(in_page: InPage, tmp_path: Path) -> None:
    def behind(**facts: Any) -> bytes:
        return bundle_of(pruned_race(RACE_AT_A_FLOOR, FLOOR, **facts), FLOOR + 1)

    state = changed()
    lease = {"kind": "Lease", "resource": "r", "holder": "h"}
    wrong: list[Any] = [
        None,
        {},
        changed(active=[]),
        changed(nodes=[]),
        changed(rules=1),
        changed(rules=3),
        changed(rules="2"),
        changed(active=[{"index": FLOOR + 1, "commitment": lease}]),
        changed(active=[{"index": 5, "commitment": lease}, *state["active"], {"index": 5, "commitment": lease}]),
        changed(active=[{"index": 8, "commitment": {"kind": "Revocation", "index": 7}}]),
        changed(active=[{"index": 8, "commitment": {"kind": "Lease"}}]),
        changed(active=[{"index": state["nodes"][0]["index"], "commitment": lease}]),
        changed(
            nodes=[{"index": 4, **{name: state["nodes"][0][name] for name in ("node", "capacity")}}, *state["nodes"]]
        ),
        changed(nodes=[{"index": 4, "node": "n3"}]),
    ]
    more = {**state, "more": 1, "nodes": [{**each, "more": None} for each in state["nodes"]]}
    raised = pruned_race([*RULES_RAISED[:7], placement("x"), *RULES_RAISED[7:]], FLOOR)
    asked = [Asked("right", behind()), Asked("with more", behind(commitments=more))]
    asked.append(Asked("raised", bundle_of(raised, FLOOR + 1)))
    asked += [Asked(f"{number}: {said}", behind(commitments=said)) for number, said in enumerate(wrong)]
    differing, by_page = compared(asked, in_page, tmp_path)
    assert differing == []
    assert [code for code, _ in by_page] == [0, 0, 0] + [2] * len(wrong)


# --- files that were made to do harm ----------------------------------------------------------------------


@pytest.mark.exhaustive
def test_no_byte_of_a_bundle_or_a_receipt_can_be_changed(page: Page) -> None:
    flip_all = """async ({file, keys, step}) => {
      const bytes = Uint8Array.from(atob(file), each => each.charCodeAt(0)), codes = new Set();
      for (let at = 0; at < bytes.length; at += step) {
        bytes[at] ^= 1 << (at % 8);
        codes.add((await tallystickVerify(new Blob([bytes]), {keys})).exitCode);
        bytes[at] ^= 1 << (at % 8);
      }
      codes.add(`whole: ${(await tallystickVerify(new Blob([bytes]), {keys})).exitCode}`);
      return [...codes];
    }"""
    small = bundle_of(build(2, snapshots_to=(2,)))
    for file in (small, receipt_cases.GOOD):
        asked = Asked("", file).to_page()
        step = max(len(file) // (3 * EXAMPLES), 1)
        codes = page.evaluate(flip_all, {"file": asked["file"], "keys": asked["keys"], "step": step})
        assert set(codes) <= {2, 4, "whole: 0"}
        assert "whole: 0" in codes


def test_a_part_that_unpacks_to_more_than_is_listed_is_not_unpacked_further(in_page: InPage, tmp_path: Path) -> None:
    zeros = zipped(bytes(12 << 20))
    bomb = reseal(GOOD, {ENTRIES: zeros}, parts=lambda parts: parts[0].update(raw_bytes=4 << 20, rows=30))
    assert disagreements([Asked("a bomb", bomb)], in_page, tmp_path) == []


def test_nothing_that_stands_in_a_file_becomes_markup_or_script(page: Page, tmp_path: Path) -> None:
    hostile = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    ledger = build(4)
    for row in ledger.entries:
        row.update(job_id=hostile, action="TENANT_CREATED", payload='{"type":"TENANT_CREATED"}')
    ledger.relink()
    ledger.sign(4, SIGNER)
    give(page, tmp_path, bundle_of(ledger))
    page.locator(".jobs summary").click()
    page.locator(".timeline").wait_for()
    assert hostile in page.locator(".jobs").inner_text()
    assert page.locator("#verdict img, #verdict script").count() == 0


# --- second signatures ------------------------------------------------------------------------------------

SECOND: Final = FileSigner(Path("no-file"), MLDSA44PrivateKey.from_seed_bytes(bytes(range(32))))
TWO: Final = Keyring([SIGNER.public_key, SECOND.public_key])
HEAD: Final = Checkpoint(f"{LOG_ORIGIN}/acme", 12, build(12).checkpoint().root)
BY_BOTH: Final = sign_checkpoint(HEAD, SIGNER, SECOND)
Signatures = list[dict[str, str]]


def doubly(*ends: int, change: Callable[[Signatures], object] = list) -> Ledger:
    """Twelve entries with snapshots to 4, 8 and 12, of which those to ``ends`` have a second signature; ``change`` is
    done to the signatures of the last."""
    ledger = build(12, snapshots_to=(4, 8, 12))
    for row in ledger.snapshots:
        made = json.loads(row["dsse_envelope"])
        if row["to_seq"] in ends:
            message = envelope.pae(made["payloadType"], base64.b64decode(made["payload"]))
            sig = base64.b64encode(SECOND.sign(message)).decode()
            made["signatures"].append({"keyid": SECOND.key_id, "sig": sig})
        if row["to_seq"] == 12:
            change(made["signatures"])
        row["dsse_envelope"] = json.dumps(made)
    return ledger


def flip(line: dict[str, str]) -> None:
    raw = bytearray(base64.b64decode(line["sig"]))
    raw[-1] ^= 1
    line["sig"] = base64.b64encode(raw).decode()


def nameless(lines: Signatures) -> None:
    for line in lines:
        line["keyid"] = ""


def spoiled_and_nameless(lines: Signatures) -> None:
    nameless(lines)
    for line in lines:
        flip(line)


def with_lines(*numbers: int, note: str = BY_BOTH, change: Callable[[bytearray], object] = bytes) -> str:
    """A checkpoint with these of its signature lines, the last of them changed."""
    parsed = parse_note(note)
    lines = [parsed.signatures[number] for number in numbers]
    data = bytearray(lines[-1].signature)
    change(data)
    lines[-1] = lines[-1]._replace(signature=bytes(data))
    return parsed._replace(signatures=tuple(lines)).encode()


def rings() -> dict[str, Keyring]:
    first, second = TWO
    revoked = replace(second, revoked_from_hlc=Hlc.parse(build(12).entry(6)["t_hlc"]))
    expired = replace(second, not_after=datetime(2000, 1, 1, tzinfo=UTC))
    return {
        "one held": Keyring([first]),
        "the second alone": Keyring([second]),
        "any": TWO,
        "both": TWO.demanding_both(),
        "both, revoked": Keyring([first, revoked]).demanding_both(),
        "any, revoked": Keyring([first, revoked]),
        "both, expired": Keyring([first, expired]).demanding_both(),
        "both, of a stranger": Keyring([first, ML_DSA_44.caller.key]).demanding_both(),
    }


def files_of_two() -> dict[str, bytes]:
    """Bundles and receipts with two signatures, and with one of them left out or changed."""
    last = b"\x80\0\0\0\0\0\0\0"
    checkpoints = {
        "both": BY_BOTH,
        "the first": with_lines(0),
        "the second": with_lines(1),
        "a changed second": with_lines(0, 1, change=lambda data: data.__setitem__(-1, data[-1] ^ 1)),
        "a short second": with_lines(0, 1, change=lambda data: data.pop()),
        "a second of another time": with_lines(0, 1, change=lambda data: data.__setitem__(7, 1)),
        "a second of no time": with_lines(0, 1, change=lambda data: data.__setitem__(slice(8), last)),
    }
    ledgers = {
        "all": doubly(4, 8, 12),
        "the last": doubly(12),
        "all but the last": doubly(4, 8),
        "none": doubly(),
        "no first": doubly(4, 8, 12, change=lambda lines: lines.pop(0)),
        "a changed first": doubly(4, 8, 12, change=lambda lines: flip(lines[0])),
        "a changed second": doubly(4, 8, 12, change=lambda lines: flip(lines[1])),
        "no names": doubly(4, 8, 12, change=nameless),
        "changed and no names": doubly(4, 12, change=spoiled_and_nameless),
    }
    whole = ledgers["all"]
    job_id = whole.entry(9)["job_id"]
    files = {f"checkpoint by {name}": bundle_of(whole, checkpoint=note) for name, note in checkpoints.items()}
    files |= {f"snapshots by {name}": bundle_of(each, checkpoint=BY_BOTH) for name, each in ledgers.items()}
    for name, note in checkpoints.items():
        files[f"receipt, checkpoint by {name}"] = receipt_of(whole, job_id, checkpoint=note)
    for name in ("all", "none", "a changed second", "no first"):
        proof = indexed(whole, job_id)._replace(envelope=ledgers[name].snapshots[-1]["dsse_envelope"])
        files[f"receipt, index by {name}"] = receipt_of(whole, job_id, checkpoint=BY_BOTH, indexed=proof)
    return files


def test_product_second_implementation_and_page_judge_two_signatures_alike(in_page: InPage, tmp_path: Path) -> None:
    asked = [
        Asked(f"{name}, {held}", file, ring) for name, file in files_of_two().items() for held, ring in rings().items()
    ]
    kept = [(BY_BOTH, "any"), (BY_BOTH, "both"), (with_lines(0), "both"), (with_lines(1), "one held")]
    bundle = bundle_of(doubly(4, 8, 12), checkpoint=BY_BOTH)
    asked += [Asked(f"kept {at}", bundle, rings()[held], note) for at, (note, held) in enumerate(kept)]
    differing, by_page = compared(asked, in_page, tmp_path)
    assert "\n".join(differing) == ""
    twin = twin_in(tmp_path)
    codes = {each.name: code for each, (code, _) in zip(asked, by_page, strict=True)}
    by_twin = {each.name: twin(store(tmp_path, each.file), each.keyring, each.kept) for each in asked}
    assert {name: (code, by_twin[name]) for name, code in codes.items() if code != by_twin[name]} == {}
    expected = {
        "checkpoint by both, both": 0,
        "checkpoint by the first, any": 0,
        "checkpoint by the first, both": 4,
        "checkpoint by a changed second, any": 2,
        "checkpoint by a changed second, one held": 0,
        "snapshots by the last, both": 0,
        "snapshots by all but the last, any": 0,
        "snapshots by all but the last, both": 3,
        "snapshots by a changed second, any": 2,
        "receipt, index by all, both": 0,
        "receipt, index by none, both": 3,
        "kept 2": 0,
        "kept 3": 4,
    }
    assert {name: codes[name] for name in expected} == expected


def test_both_signatures_may_be_demanded_of_the_page(page: Page, tmp_path: Path) -> None:
    shown = give(page, tmp_path, bundle_of(doubly(4, 8), checkpoint=BY_BOTH), TWO)
    assert shown.startswith("WHOLE AND SIGNED")
    page.locator(".more summary").click()
    page.get_by_label("Demand both").check()
    page.locator(".report.incomplete").wait_for()
    assert "both signatures of each statement" in page.locator("#verdict").inner_text()
    page.set_input_files("#subject", store(tmp_path, bundle_of(doubly(12), checkpoint=BY_BOTH), "again.bundle.tar"))
    expect(page.locator("#outcome")).to_have_text("WHOLE AND SIGNED")
    page.get_by_role("button", name="Remove keys.json").click()
    expect(page.locator("#problem")).to_contain_text("both signatures are demanded, and none of the keys is ml-dsa-44")


def test_a_witness_and_a_log_of_a_policy_may_have_keys_of_ml_dsa(in_page: InPage, tmp_path: Path) -> None:
    signer = FileSigner(Path("no-file"), MLDSA44PrivateKey.from_seed_bytes(b"\x05" * 32))
    witness = WitnessKey.of("witness.example/pq", signer.public_key)
    whole = doubly(4, 8, 12)

    def stated(note: str, change: Callable[[bytearray], object] = bytes) -> BundledAnchor:
        parsed = parse_note(note)
        line = witness.line(parsed.text, signer, 1_704_931_300)
        made = parsed._replace(signatures=(*parsed.signatures, line)).encode()
        made = with_lines(*range(len(parsed.signatures) + 1), note=made, change=change)
        return BundledAnchor(witness.text(), made, [], "witness", "", "2024-01-11T00:01:40Z")

    logs = [VerifierKey.of(HEAD.origin, key).text() for key in TWO]
    strange = VerifierKey.of(HEAD.origin, signer.public_key).text()
    files = {
        "whole": stated(BY_BOTH),
        "by the first alone": stated(with_lines(0)),
        "changed": stated(BY_BOTH, lambda data: data.__setitem__(-1, data[-1] ^ 1)),
        "of another time": stated(BY_BOTH, lambda data: data.__setitem__(7, data[7] ^ 1)),
        "short": stated(BY_BOTH, lambda data: data.pop()),
    }
    policies = {
        "any log": "",
        "the first": f"log {logs[0]}\n",
        "the second": f"log {logs[1]}\n",
        "another": f"log {strange}\n",
    }
    held = {"any": TWO, "both": TWO.demanding_both()}
    asked = [
        Asked(
            f"{file}, {log}, {name}",
            bundle_of(whole, checkpoint=BY_BOTH, anchors=[anchor]),
            ring,
            policy=f"{line}witness w {witness.text()}\nquorum w\n",
        )
        for file, anchor in files.items()
        for log, line in policies.items()
        for name, ring in held.items()
    ]
    receipt = receipt_of(whole, whole.entry(9)["job_id"], checkpoint=BY_BOTH)
    asked.append(Asked("a receipt without", receipt, TWO, witnesses=[witness.text()]))
    differing, by_page = compared(asked, in_page, tmp_path)
    assert "\n".join(differing) == ""
    twin = twin_in(tmp_path)
    codes = {each.name: code for each, (code, _) in zip(asked, by_page, strict=True)}
    assert codes == {each.name: twin(store(tmp_path, each.file), each.keyring, policy=each.policy) for each in asked}
    fine = {name for name, code in codes.items() if code == 0}
    met = {
        f"{file}, {log}" for file in ("whole", "by the first alone") for log in ("any log", "the first", "the second")
    }
    assert fine == {f"{each}, {name}" for each in met - {"by the first alone, the second"} for name in held} | {
        "a receipt without"
    }


# --- the page by itself -----------------------------------------------------------------------------------


def give(page: Page, folder: Path, file: bytes, ring: Keyring | None = RING, name: str = "acme.bundle.tar") -> str:
    """Open the page anew, give it a file and keys, and wait for the outcome."""
    page.reload()
    keys = folder / "keys.json"
    if ring is not None:
        keys.write_text(json.dumps(ring.to_json()))
        page.set_input_files("#keys", keys)
        page.locator("#keys-given li").wait_for()
    page.set_input_files("#subject", store(folder, file, name))
    page.locator("#outcome").wait_for()
    return page.locator(".outcome").inner_text()


DROP = """([files, selector]) => {
  const transfer = new DataTransfer();
  for (const [name, text] of files) {
    transfer.items.add(new File([Uint8Array.from(atob(text), each => each.charCodeAt(0))], name));
  }
  document.querySelector(selector).dispatchEvent(new DragEvent("drop", {dataTransfer: transfer, bubbles: true}));
}"""


def drop(page: Page, *files: tuple[str, bytes]) -> None:
    page.evaluate(DROP, [[[name, base64.b64encode(data).decode()] for name, data in files], "main"])


@pytest.mark.parametrize("outcomes", [OUTCOMES, RECEIPT_OUTCOMES], ids=["bundle", "receipt"])
def test_the_outcome_is_that_of_the_command_and_comes_first(
    page: Page, tmp_path: Path, outcomes: Mapping[int, str]
) -> None:
    good, bad, name = LITTLE, EDITED, "acme.bundle.tar"
    if outcomes is RECEIPT_OUTCOMES:
        good, bad, name = receipt_cases.GOOD, receipt_cases.GOOD[:-1], "job.receipt.json"
    page.reload()
    for field, content, code in (
        ("#subject", good, 3),
        ("#keys", STRANGER.public_key_pem.encode(), 4),
        ("#keys", SIGNER.public_key_pem.encode(), 0),
        ("#subject", bad, 2),
    ):
        page.set_input_files(field, store(tmp_path, content, name if field == "#subject" else f"{code}.pem"))
        outcome = re.sub(r"\[/?[a-z ]*\]", "", outcomes[code])
        expect(page.locator("#announced")).to_have_text(outcome)
        shown, (head, _, rest) = page.locator(".outcome").inner_text(), outcome.partition(": ")
        assert shown.startswith(head)
        assert rest.casefold() in shown.casefold()
        assert f"exit code {code}" in shown
        assert page.locator("#verdict > article > *").first.get_attribute("class") == "outcome"
        assert page.title() == f"{head} · {name}"
        if field == "#subject":
            assert page.evaluate("document.activeElement.id") == "verdict"


def test_a_break_is_shown_in_its_place(page: Page, tmp_path: Path) -> None:
    give(page, tmp_path, EDITED)
    page.locator("tr.broken").wait_for()
    card = page.locator("section", has=page.get_by_role("heading", name="The break")).inner_text()
    for text in ("payload-digest", LEDGER.entry(13)["payload_digest"], '{"type":"JobFailed"}'):
        assert text in card
    assert page.locator("tr.broken th").inner_text() == "13 here"
    assert "Nothing. A file that does not hold" in page.locator("#verdict").inner_text()


def test_a_bundle_keys_and_a_checkpoint_are_told_apart_when_they_are_dropped_together(page: Page) -> None:
    page.reload()
    drop(
        page,
        ("ours.tar", GOOD),
        ("signer.pem", SIGNER.public_key_pem.encode()),
        ("kept", checkpoint_of(LEDGER, 7).encode()),
        ("w1.vkey", Witness().verifier_key.encode()),
    )
    page.locator("#outcome").wait_for()
    assert page.locator("#outcome").inner_text() == "WHOLE AND SIGNED"
    assert SIGNER.key_id in page.locator("#keys-given").inner_text()
    assert "size 7" in page.locator("#checkpoint-given").text_content()  # type: ignore[operator]
    assert "witness.example/w1" in page.locator("#witness-given").text_content()  # type: ignore[operator]
    assert "The checkpoint that you kept is of this same history" in page.locator("#verdict").inner_text()
    # Taken back, they count no more, and what was said with them is gone at once.
    page.locator(".more summary").click()
    page.evaluate(COUNT_PARTS)
    page.get_by_role("button", name="Remove kept").click()
    page.get_by_text("no checkpoint kept elsewhere was given").wait_for()
    assert page.evaluate("counts[0]") == 0
    assert page.locator("#outcome").inner_text() == "WHOLE AND SIGNED"
    page.get_by_role("button", name="Remove signer.pem").click()
    page.locator(".report.incomplete").wait_for()


def test_a_policy_that_is_dropped_says_who_is_missing_until_it_is_taken_back(page: Page) -> None:
    page.reload()
    policy = f"witness w1 {Witness().verifier_key}\nquorum w1\n"
    signer = SIGNER.public_key_pem.encode()
    drop(page, ("ours.tar", GOOD), ("signer.pem", signer), ("witnesses.policy", policy.encode()))
    page.locator(".report.incomplete").wait_for()
    said = "Below quorum. Quorum w1 covers entries up to seq 0; w1: has cosigned nothing of this log."
    assert said in page.locator("#verdict").inner_text()
    assert "quorum w1" in page.locator("#policy-given").text_content()  # type: ignore[operator]
    page.locator(".more summary").click()
    page.get_by_role("button", name="Remove witnesses.policy").click()
    expect(page.locator("#outcome")).to_have_text("WHOLE AND SIGNED")


def test_the_example_receipt_of_the_document_is_proved(page: Page, tmp_path: Path) -> None:
    keys = json.loads((FORMATS / "example.receipt.json").read_text())["receipt"]["keys"]
    ring = Keyring.from_json(keys)
    shown = give(page, tmp_path, (FORMATS / "example.receipt.json").read_bytes(), ring, "example.receipt.json")
    assert shown.startswith("PROVED")
    page.locator(".jobs summary").click()
    page.locator(".timeline").wait_for()
    assert [each.inner_text().split()[0] for each in page.locator(".timeline strong").all()] == [
        *("created", "accepted", "completed"),
    ]
    assert "That the job has no other entries" in page.locator("#verdict").inner_text()


def test_keys_inside_a_file_are_named_and_never_used(page: Page, tmp_path: Path) -> None:
    name = "all of it by a stranger, with the key inside"
    attacker = next(case.file for case in bundle_cases.cases() if case.name == name)
    assert give(page, tmp_path, attacker).startswith("KEY UNKNOWN")
    assert f"Not among yours: {STRANGER.key_id}" in page.locator("#verdict").inner_text()


def test_what_is_no_key_is_refused_with_what_is_wrong(page: Page) -> None:
    for name, content, said in (
        ("private.pem", "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", "this is a private key"),
        (
            "rsa.pem",
            "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n",
            "keys must be Ed25519, ECDSA P-256 or ML-DSA-44",
        ),
        ("other.json", '{"keys": [{"key_id": "00"}]}', "not a PEM public key"),
        ("twice.json", '{"keys": [], "keys": []}', "a name stands twice"),
    ):
        page.reload()
        drop(page, (name, content.encode()))
        page.locator("#problem").wait_for()
        assert name in page.locator("#problem").inner_text()
        assert said in page.locator("#problem").inner_text()
    # Of what is dropped together all is taken or nothing.
    drop(page, ("little.tar", LITTLE), ("other.json", b'{"keys": [{"key_id": "00"}]}'))
    expect(page.locator("#problem")).to_contain_text("not a PEM public key")
    drop(page, ("signer.pem", SIGNER.public_key_pem.encode()))
    expect(page.locator("#keys-given")).to_contain_text("signer.pem")
    expect(page.locator("#subject-given")).to_be_hidden()


def test_whatever_else_is_dropped_is_named_or_gets_a_verdict(page: Page) -> None:
    dropped = {b"": "an empty file", b"text": "text", b"\x89PNG\r\n\x1a\n" * 200: "a picture"}
    for content, looks_like in dropped.items():
        page.reload()
        drop(page, ("signer.pem", SIGNER.public_key_pem.encode()), ("holiday.png", content))
        expect(page.locator("#problem")).to_have_text(
            f"COULD NOT BE READ: holiday.png is no bundle and no receipt; it looks like {looks_like}"
        )
        assert page.locator("#outcome").count() == 0
    page.reload()
    drop(page, ("signer.pem", SIGNER.public_key_pem.encode()), ("holiday.png", b'{"receipt":'))
    page.locator("#outcome").wait_for()
    assert page.locator("#outcome").inner_text() == "TAMPERED WITH OR CORRUPT"


def test_it_can_be_used_by_keyboard(page: Page, tmp_path: Path) -> None:
    page.reload()
    reached = []
    for _ in range(6):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert reached[:4] == ["A", "subject", "keys", "SUMMARY"]
    give(page, tmp_path, LITTLE)
    page.locator(".jobs summary").first.focus()
    page.keyboard.press("Enter")
    page.locator(".timeline").first.wait_for()


# --- nothing leaves ---------------------------------------------------------------------------------------


def test_the_page_asks_nobody_for_anything(page: Page, loaded: list[str], saved: Path) -> None:
    assert {each for each in loaded if not each.startswith("blob:")} == {saved.as_uri()}
    for attempt in (
        "fetch('http://127.0.0.1:9/')",
        "new Promise((_, no) => { const i = new Image(); i.onerror = no; i.src = 'http://127.0.0.1:9/x.png'; })",
        "import('http://127.0.0.1:9/x.js')",
    ):
        with pytest.raises(Error):
            page.evaluate(attempt)
    with pytest.raises(Error, match="TrustedHTML"):
        page.evaluate("document.body.innerHTML = '<b>'")
    with pytest.raises(Error, match="TrustedScriptURL"):
        page.evaluate("new Worker('x.js')")


def test_a_page_that_saves_itself_is_a_page_that_verifies(page: Page, browser: Browser, tmp_path: Path) -> None:
    give(page, tmp_path, LITTLE)
    with page.expect_download() as download:
        page.get_by_role("button", name="save it").click()
    copy = tmp_path / "copy.html"
    download.value.save_as(copy)
    again = opened(browser, copy.as_uri(), [])
    assert again.locator("#outcome").count() == 0
    assert give(again, tmp_path, LITTLE).startswith("WHOLE AND SIGNED")
    again.context.close()


# --- for everybody ----------------------------------------------------------------------------------------

WIDE: Final = {"width": 1280, "height": 720}


def test_nothing_keeps_anybody_from_using_it(browser: Browser, saved: Path, tmp_path: Path) -> None:
    page = opened(browser, saved.as_uri(), [], has_touch=True)
    found = violations(page)
    rows = rows_of(LITTLE)
    rows[3]["payload"] = '{"type":"JobFailed"}'
    head = checkpoint_of(FEW)
    signed = bundle_of(FEW, anchors=[anchored(checkpoint=Witness().cosign(head, 1_704_931_300))])
    for name, field, file in (
        ("INCOMPLETE", "#subject", signed),
        ("KEY UNKNOWN", "#keys", STRANGER.public_key_pem.encode()),
        ("", "#keys", SIGNER.public_key_pem.encode()),
        ("TAMPERED", "#subject", with_rows(LITTLE, rows)),
    ):
        page.set_input_files(field, store(tmp_path, file, f"{name}.file"))
        if not name:
            continue
        expect(page.locator("#outcome")).to_contain_text(name)
        page.locator(".jobs summary").first.click()
        page.locator(".timeline").last.wait_for()
        found += violations(page)
        page.emulate_media(color_scheme="dark")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
        page.set_viewport_size(PHONE)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
        found += violations(page)
        page.emulate_media(color_scheme="light")
        page.set_viewport_size(WIDE)
    assert [(each["id"], each["nodes"][0]["html"]) for each in found] == []
    page.context.close()


def test_a_print_has_the_verdict_and_not_the_controls(page: Page, tmp_path: Path) -> None:
    give(page, tmp_path, LITTLE)
    page.emulate_media(media="print")
    assert not page.locator(".inputs").is_visible()
    assert not page.get_by_role("button", name="Print").is_visible()
    for text in ("WHOLE AND SIGNED", SIGNER.key_id, "What this does not prove", "by the clock of this computer"):
        assert text in page.locator("#verdict").inner_text()
    page.emulate_media(media="screen")
