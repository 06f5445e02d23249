"""What verifying a bundle says, by the product and by docs/formats/verify.py, which must agree on every one."""

from __future__ import annotations

import ast
import asyncio
import base64
import json
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from ledger import canonical
from ledger.errors import NotABundleError, SignatureError
from ledger.hlc import Hlc
from signing.anchors import NOBODY, ExternalWitnesses
from signing.bundle import reader
from signing.bundle.reader import BundleReader
from signing.checkpoint import judge_checkpoint
from signing.envelope import PAYLOAD_TYPE
from signing.judging import BundleVerdict, verify_file
from signing.keys import Keyring, PublicKey
from signing.private_keys import FileSigner
from signing.snapshot import open_snapshot
from tests.app.bundles import GOOD, LEDGER, anchored, bundle_of, checkpoint_of, container, exit_code, members_of, store
from tests.app.second_verifier import VERIFY_PY, Twin, second_verifier, twin_in
from tests.app.witness import Witness
from tests.cases.bundles import MANIFEST, cases
from tests.ledger.ledger_in_memory import SIGNER, STRANGER, build
from tests.ledger.pruned import enter, finish, pruned
from tests.signing.conftest import RFC_8032_TEST_1, ed25519

RING = Keyring([SIGNER.public_key])
CASES = cases()


def product(path: Path, keyring: Keyring | None, kept: str | None = None) -> int:
    """Exit code of the product."""
    try:
        checkpoint = judge_checkpoint(kept, keyring) if kept is not None else None
    except SignatureError:
        return 2
    try:
        return exit_code(asyncio.run(verify_file(path, keyring, checkpoint)))
    except NotABundleError:
        return 1


@pytest.fixture
def twin(tmp_path: Path) -> Twin:
    """Exit code of the second implementation."""
    return twin_in(tmp_path)


def test_the_second_implementation_is_one_file_of_short_functions_that_knows_nothing_of_the_project() -> None:
    modules = set()
    for item in ast.walk(ast.parse(VERIFY_PY.read_text())):
        if isinstance(item, ast.FunctionDef):
            assert item.end_lineno - item.lineno < 50, item.name
        modules |= {item.module} if isinstance(item, ast.ImportFrom) else set()
        modules |= {name.name for name in item.names} if isinstance(item, ast.Import) else set()
    roots = {str(module).split(".")[0] for module in modules}
    assert roots - set(sys.stdlib_module_names) == {"cryptography"}


# --- keys over time -----------------------------------------------------------------------------------


def ring(**window: object) -> Keyring:
    """A ring with the held key alone, which holds in ``window``."""
    return Keyring([PublicKey.of(SIGNER.public_key_pem, **window)])  # type: ignore[arg-type]


BEGIN = datetime.fromtimestamp(1_704_931_200, UTC)
LAST = Hlc.parse(LEDGER.entry(30)["t_hlc"])
LATER = Hlc(LAST.physical_ms, LAST.logical + 1, LAST.node_id)
A_MILLISECOND = timedelta(milliseconds=1)


def test_a_p256_key_signs_bundles_and_its_log_key_their_checkpoints(twin: Twin, tmp_path: Path) -> None:
    signer = FileSigner(Path("no-file"), ec.derive_private_key(0x5EED, ec.SECP256R1()))
    ledger = build(10)
    ledger.sign(10, signer)
    path = store(tmp_path, bundle_of(ledger, signer=signer, checkpoint=checkpoint_of(ledger)))
    both, alone = Keyring([signer.public_key, SIGNER.public_key]), Keyring([signer.public_key])
    assert (product(path, both), twin(path, both)) == (0, 0)
    assert (product(path, alone), twin(path, alone)) == (4, 4)
    # Revoked behind its last snapshot: the snapshots count, the manifest, which carries no time, does not.
    revoked = Keyring([PublicKey.of(signer.public_key_pem, revoked_from_hlc=LATER), SIGNER.public_key])
    assert (product(path, revoked), twin(path, revoked)) == (4, 4)
    found = asyncio.run(verify_file(path, revoked)).verdict
    assert (found["verdicts"]["signatures"], found["verdicts"]["bundle"]) == ("ok", "unknown_key")


def test_keys_are_taken_from_pem_from_saved_answers_and_from_folders(tmp_path: Path) -> None:
    path = store(tmp_path, GOOD)
    folder = tmp_path / "keys"
    folder.mkdir()
    (folder / "a.pem").write_text(STRANGER.public_key_pem + SIGNER.public_key_pem)
    (folder / "b.json").write_text(json.dumps(RING.to_json()))
    (folder / "notes.txt").write_text("not keys")
    for keys in (folder / "a.pem", folder / "b.json", folder):
        assert product(path, Keyring.load(keys)) == 0
        assert second_verifier().main(str(path), "--keys", str(keys)) == 0
    (folder / "c.json").write_text(json.dumps(ring(not_after=BEGIN - A_MILLISECOND).to_json()))
    assert product(path, Keyring.load(folder)) == 4
    assert second_verifier().main(str(path), "--keys", str(folder)) == 4


# --- what the verdict says ----------------------------------------------------------------------------


def verdict_of(path: Path) -> BundleVerdict:
    return asyncio.run(verify_file(path, RING))


def test_the_verdict_is_that_of_a_chain_with_the_bundle_beside_it(tmp_path: Path) -> None:
    found = verdict_of(store(tmp_path, GOOD)).to_json()
    assert list(found["verdicts"].values()) == ["ok"] * 7 + ["not_checked"] * 2
    assert next(iter(found["verdicts"])) == "bundle"
    assert (found["tenant_id"], found["valid"], found["entries_checked"]) == ("acme", True, 30)
    assert (found["from_seq"], found["to_seq"], found["signed_to_seq"], found["unsigned_entries"]) == (1, 30, 30, 0)
    assert (found["first_break"], found["compared_with"]) == (None, "bundle")
    assert found["head"] == dict(zip(("seq", "chain_link", "hlc"), LEDGER.last(), strict=True))
    assert found["bundle"]["manifest_key_ids"] == found["bundle"]["snapshot_key_ids"] == [SIGNER.key_id]


def test_a_break_of_the_bundle_itself_says_what_is_wrong_with_it(tmp_path: Path) -> None:
    for name, detail in (
        ("a member named ../manifest.dsse.json", "stands where checkpoint must"),
        ("manifest whose snapshot_count is 2", "snapshot_count of the manifest"),
        ("manifest whose tree_size is 11", "tree_size of the manifest"),
        ("manifest with the signature of another", "the manifest's signature does not hold"),
        ("a checkpoint of another log", "it is of log 'log.example/other'"),
        ("a part longer than listed", "not one gzip member of"),
        ("cut at byte 600", "cut short at byte 600"),
    ):
        (case,) = [case for case in CASES if case.name == name]
        first = verdict_of(store(tmp_path, case.file)).verdict["first_break"]
        assert detail in first["detail"], name
        assert first["kind"] == ("bundle-signature" if "signature" in name else "bundle"), name


def test_a_manifest_that_a_held_key_is_named_for_and_did_not_sign_is_not_parsed(tmp_path: Path) -> None:
    signature = {"keyid": SIGNER.key_id, "sig": base64.b64encode(bytes(64)).decode()}
    payload = base64.b64encode(b"no manifest").decode()
    changed = {"payload": payload, "payloadType": PAYLOAD_TYPE, "signatures": [signature]}
    path = store(tmp_path, container((members_of(GOOD) | {MANIFEST: canonical.encode(changed)}).items()))
    found = verdict_of(path)
    assert (found.verdict["first_break"]["kind"], found.manifest_keys) == ("bundle-signature", ())
    unheld = asyncio.run(verify_file(path, Keyring([STRANGER.public_key])))
    assert (unheld.verdict["first_break"]["kind"], unheld.manifest_keys) == ("bundle", ())


def test_where_the_bundle_itself_is_broken_nothing_else_is_claimed(tmp_path: Path) -> None:
    found = verdict_of(store(tmp_path, GOOD[:-1]))
    assert found.verdict["verdicts"].pop("bundle") == "broken"
    assert set(found.verdict["verdicts"].values()) == {"not_checked"}
    assert (found.verdict["first_break"]["kind"], found.verdict["valid"]) == ("bundle", False)


def test_a_snapshot_still_opens_after_its_way_through_a_bundle(tmp_path: Path) -> None:
    with BundleReader.open(store(tmp_path, GOOD)) as bundle:
        opened = [open_snapshot(row[7], RING) for row in bundle.snapshot_rows()]
    assert [(each.claim.from_seq, each.verdict) for each in opened] == [(1, "ok"), (11, "ok"), (21, "ok")]


def test_the_example_of_the_document_is_whole(twin: Twin) -> None:
    example = VERIFY_PY.with_name("example.bundle.tar")
    keys = Keyring([ed25519(RFC_8032_TEST_1).public_key])
    assert (product(example, keys), twin(example, keys)) == (0, 0)


def test_a_statement_of_an_outsider_that_holds_and_is_not_so_is_a_rollback(tmp_path: Path) -> None:
    external = ExternalWitnesses.load([Witness().verifier_key], None)

    def found(
        bundle: bytes, keyring: Keyring | None = RING, who: ExternalWitnesses = external
    ) -> tuple[str, list[str]]:
        verdict = asyncio.run(verify_file(store(tmp_path, bundle), keyring, external=who)).verdict
        kind = verdict["first_break"]["kind"] if verdict["first_break"] is not None else ""
        return kind, [each["status"] for each in verdict["anchors"]]

    forked = Witness().cosign(checkpoint_of(build(20, begin_ms=1_704_931_300_000), 20), 1_704_931_300)
    assert found(bundle_of(LEDGER, anchors=[anchored(), anchored(30)])) == ("", ["ok", "ok"])
    assert found(bundle_of(LEDGER, 11, anchors=[anchored(5)])) == ("", ["ok"])
    assert found(bundle_of(LEDGER, anchors=[anchored(), anchored(checkpoint=forked)])) == ("rollback", ["ok", "broken"])
    # Nobody vouches for it, or it says nothing itself.
    assert found(bundle_of(LEDGER, anchors=[anchored(checkpoint=forked)]), None) == ("", ["not_checked"])
    assert found(bundle_of(LEDGER, anchors=[anchored(checkpoint=forked)]), who=NOBODY) == ("", ["not_checked"])
    for replaced in (
        {"checkpoint": checkpoint_of(LEDGER, 20)},
        {"checkpoint": "nothing"},
        {"checkpoint": forked.replace("log.example/acme\n", "log.example/other\n", 1)},
        {"time": "yesterday"},
    ):
        assert found(bundle_of(LEDGER, anchors=[anchored(**replaced)])) == ("", ["invalid"]), replaced
    beyond = Witness().cosign(checkpoint_of(build(40), 40), 1_704_931_300)
    assert found(bundle_of(LEDGER, anchors=[anchored(checkpoint=beyond)])) == ("", ["not_checked"])


def test_a_bundle_that_says_too_much_of_retention_is_refused_before_it_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store(tmp_path, bundle_of(pruned(), 11))
    assert product(path, RING) == 0
    monkeypatch.setattr(reader, "RETENTION_BYTES_MAX", 1000)
    found = asyncio.run(verify_file(path, RING)).verdict
    assert found["first_break"]["detail"] == "entries about retention have more than 1000 bytes"
    # What holds say is not kept.
    held = pruned()
    hold = {"hold_id": "0" * 16, "reason": "law", "job_ids": ["j" * 100] * 50}
    enter(held, 27, "HOLD_PLACED", hold, signer=None)
    monkeypatch.setattr(reader, "RETENTION_BYTES_MAX", 4000)
    assert product(store(tmp_path, bundle_of(finish(held), 11)), RING) == 0
