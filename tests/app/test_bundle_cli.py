"""``tally verify-bundle`` as a person runs it: offline, several files, exit codes, and a report to file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from app.share.bundle.report import ACTORS_MAX
from ledger import canonical
from ledger.facts.events import TYPE_OF_ACTION
from ledger.hlc import Hlc
from signing.bundle.writer import OwnEntry
from signing.keys import Keyring
from tests.app.bundles import GOOD, LEDGER, bundle_of, checkpoint_of, store
from tests.app.second_verifier import second_verifier
from tests.ledger.committed import RACE, committed
from tests.ledger.ledger_in_memory import SIGNER, STRANGER, build
from tests.ledger.pruned import pruned
from tests.pipeline.sites import bundle_of_site
from tests.tally import run_tally

Done = subprocess.CompletedProcess[str]


@pytest.fixture
def keys(tmp_path: Path) -> str:
    path = tmp_path / "trusted-keys.json"
    path.write_text(json.dumps(Keyring([SIGNER.public_key]).to_json()))
    return str(path)


def tally(*arguments: str, code: int) -> Done:
    done = run_tally("verify-bundle", *arguments)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def test_it_needs_no_database_package(keys: str, tmp_path: Path) -> None:
    path = store(tmp_path, GOOD)
    script = f"""
        import sys
        sys.argv = ["tally", "verify-bundle", {str(path)!r}, "--keys", {keys!r}]
        from cli import main
        try:
            main()
        except SystemExit as ended:
            code = ended.code
        roots = {{name.split(".")[0] for name in sys.modules}}
        print(code, sorted(roots & {{"asyncpg", "sqlalchemy", "psycopg", "alembic", "fastapi", "uvicorn"}}))
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout.splitlines()[-1] == "0 []"


def test_one_file_is_told_as_a_verdict_and_in_words(keys: str, tmp_path: Path) -> None:
    path = store(tmp_path, GOOD)
    told = json.loads(tally(str(path), "--keys", keys, "--json", code=0).stdout)
    assert (told["tenant_id"], told["valid"], told["verdicts"]["links"], told["exit_code"]) == ("acme", True, "ok", 0)
    assert told["bundles"][0]["bundle"]["sha256"] == told["bundle"]["sha256"]
    text = tally(str(path), "--keys", keys, code=0).stdout
    assert "WHOLE AND SIGNED" in text
    assert told["bundle"]["sha256"] in text


def test_of_a_pruned_chain_it_says_from_where_on_it_is_verified(keys: str, tmp_path: Path) -> None:
    path, report, page = store(tmp_path, bundle_of(pruned(), 11)), tmp_path / "report.md", tmp_path / "report.html"
    told = json.loads(tally(str(path), "--keys", keys, "--json", "--report", str(page), code=0).stdout)
    assert (told["verified_from_seq"], told["pruned"]["to_seq"], told["pruned"]["manifest"]) == (11, 10, "a" * 64)
    text = " ".join(tally(str(path), "--keys", keys, "--report", str(report), code=0).stdout.split())
    assert "verified from seq 11 on: entries up to seq 10 left for the archive" in text
    assert "- Entries up to seq 10 left for the archive at" in report.read_text()
    assert "left for the archive, up to seq" in page.read_text()


def test_of_several_files_the_gravest_counts(keys: str, tmp_path: Path) -> None:
    good = str(store(tmp_path, GOOD, "good.tar"))
    open_end = str(store(tmp_path, bundle_of(build(30, snapshots_to=(10,))), "open.tar"))
    strange = str(store(tmp_path, bundle_of(LEDGER, signer=STRANGER), "strange.tar"))
    broken = str(store(tmp_path, GOOD[:-1], "broken.tar"))
    missing = str(tmp_path / "missing.tar")
    for files, code in (
        ([good, missing], 1),
        ([good, open_end, missing], 3),
        ([good, open_end, strange], 4),
        ([broken, strange, missing, open_end], 2),
    ):
        told = json.loads(tally(*files, "--keys", keys, "--json", code=code).stdout)
        assert [item["file"] for item in told["bundles"]] == files


def test_what_cannot_run_is_told_apart_from_what_is_broken(keys: str, tmp_path: Path) -> None:
    path = str(store(tmp_path, GOOD))
    assert "Usage" in tally(code=1).stderr
    tally(path, "--keys", str(tmp_path / "nowhere"), code=1)
    tally(path, "--keys", keys, "--checkpoint", str(tmp_path / "nowhere"), code=1)
    kept = tmp_path / "kept"
    kept.write_text("no checkpoint")
    tally(path, "--keys", keys, "--checkpoint", str(kept), code=2)


def test_a_report_says_what_was_checked_what_not_against_what_and_how_to_repeat_it(keys: str, tmp_path: Path) -> None:
    path = store(tmp_path, bundle_of(LEDGER, to_seq=25))
    kept = tmp_path / "acme.checkpoint"
    kept.write_text(checkpoint_of(LEDGER, 20))
    report, as_json = tmp_path / "report.md", tmp_path / "report.json"
    options = (str(path), "--keys", keys, "--checkpoint", str(kept))
    tally(*options, "--report", str(report), code=3)
    told = json.loads(tally(*options, "--report", str(as_json), "--json", code=3).stdout)
    assert json.loads(as_json.read_text())["bundles"] == told["bundles"] or told["bundles"][0]["duration_ms"] > 0
    text = report.read_text()
    for wanted in (
        "INCOMPLETE",
        told["bundle"]["sha256"],
        "Entries seq 1 to 25",
        "2024-01-11T00:00:00.000Z",
        "| links | ok |",
        "| projection | not checked |",
        "no signed snapshot covers the last 5 entries, from seq 21 on",
        f"`{SIGNER.key_id}` ed25519",
        "size 20",
        f"tally verify-bundle {path} --keys {keys} --checkpoint {kept}",
        f"sha256sum {path}",
        "Jobs by status, as these entries say: COMPLETED 3, RUNNING 3, SUBMITTED 1; 7 in all",
        "- Events by who sent them: `ci` 7, not said 18",
        "- Reads of payloads that these entries record, by who read: none",
        "- Erased: nothing",
        "Times of entries are those of the clocks of the nodes that wrote them",
        "No bundle carries a word of a witness",
        "Compared with: bundle, file.",
        "Remembered by the verifier: this is the first look at this log",
    ):
        assert wanted in text, wanted
    assert [word.rstrip(":") for word in text.split("## Signed off")[1].split()[::2]] == ["Name", "Date", "Signature"]
    jobs = {"COMPLETED": 3, "RUNNING": 3, "SUBMITTED": 1}
    assert json.loads(as_json.read_text())["counts"] == {
        "jobs": jobs,
        "erasures": 0,
        "erased_keys": 0,
        "senders": {"named": {"ci": 7}, "others": 0, "private": 0, "unnamed": 18},
        "readers": {"named": {}, "others": 0, "private": 0, "unnamed": 0},
        "proposals": {"accepted": 0, "rejected": 0},
    }
    assert told["against"]["keys"][0]["key_id"] == SIGNER.key_id
    assert told["against"]["checkpoint"]["size"] == 20


def payload_of(action: str, facts: dict[str, object]) -> bytes:
    return canonical.encode({"type": TYPE_OF_ACTION[action], "fence_token": 1, **facts})


def test_a_report_counts_who_sent_and_read_shows_the_first_and_says_nothing_of_a_private_name(
    keys: str, tmp_path: Path
) -> None:
    sealed = {"$private": {"alg": "A256GCM", "ciphertext": "c2VjcmV0", "key": "0" * 32, "nonce": "0" * 16}}
    senders = [*(f"ci-{n:04}" for n in range(ACTORS_MAX + 5)), *["busy|`"] * 3, "ci-0000", sealed, sealed, None]
    entries = [
        OwnEntry(Hlc(1_704_931_200_000, n, "site-a"), f"job-{n}", action, payload_of(action, facts))
        for n, (action, facts) in enumerate(
            [
                ("PAYLOADS_READ", {"actor": "eve", "route": "GET /v1/jobs"}),
                ("PAYLOADS_READ", {"route": "GET /v1/jobs"}),
                *(("ENQUEUE", {} if each is None else {"actor": each}) for each in reversed(senders)),
            ]
        )
    ]
    path = bundle_of_site(tmp_path / "a.tar", "site-a", entries)
    report, as_json = tmp_path / "report.md", tmp_path / "report.json"
    tally(str(path), "--keys", keys, "--report", str(report), code=0)
    tally(str(path), "--keys", keys, "--report", str(as_json), "--json", code=0)
    counts = json.loads(as_json.read_text())["counts"]
    assert counts["readers"] == {"named": {"eve": 1}, "others": 0, "private": 0, "unnamed": 1}
    named = counts["senders"].pop("named")
    assert [*named.items()][:3] == [("busy|`", 3), ("ci-0000", 2), ("ci-0007", 1)]
    assert (len(named), counts["senders"]) == (ACTORS_MAX, {"others": 6, "private": 2, "unnamed": 1})
    (line,) = [line for line in report.read_text().splitlines() if line.startswith("- Events by")]
    assert line.startswith("- Events by who sent them: `busy¦'` 3, `ci-0000` 2, `ci-0007` 1")
    assert line.endswith(f", others {ACTORS_MAX - 20 + 6}, private 2, not said 1")
    assert "c2VjcmV0" not in report.read_text() + as_json.read_text()


@pytest.mark.parametrize(
    ("tenant", "said"),
    [("acme", []), ("other", ["the checkpoint given is of log '{origin}', the bundle of '{own}'"])],
)
def test_a_checkpoint_that_was_given_is_not_called_missing(
    tenant: str, said: list[str], keys: str, tmp_path: Path
) -> None:
    path, kept = str(store(tmp_path, GOOD)), tmp_path / "kept"
    kept.write_text(checkpoint_of(build(20, tenant_id=tenant), 20))
    options = ("--keys", keys, "--json")
    told = json.loads(tally(path, *options, "--checkpoint", str(kept), code=3 if said else 0).stdout)
    about = [text for text in told["not_checked"] if "checkpoint" in text]
    logs = {"origin": told["against"]["checkpoint"]["origin"], "own": told["bundle"]["checkpoint"]["origin"]}
    assert about == [text.format(**logs) for text in said]
    without = json.loads(tally(path, *options, "--no-state", code=0).stdout)["not_checked"]
    assert [text for text in without if "no checkpoint kept elsewhere was given" in text]


def test_a_report_on_a_broken_file_names_the_break_and_claims_nothing(keys: str, tmp_path: Path) -> None:
    broken = bytearray(GOOD)
    broken[600] ^= 1
    path, report = store(tmp_path, bytes(broken)), tmp_path / "report.md"
    tally(str(path), "--keys", keys, "--report", str(report), code=2)
    text = report.read_text()
    assert "TAMPERED WITH OR CORRUPT" in text
    assert "First break: `bundle`" in text
    assert "| links | not checked |" in text
    assert "| links | ok |" not in text


def test_a_file_name_that_is_no_text_is_told_escaped(keys: str, tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"bad\xff.tar")
    odd.write_bytes(GOOD)
    for report in (tmp_path / "report.md", tmp_path / "report.json"):
        done = tally(str(odd), "--keys", keys, "--report", str(report), "--json", code=0)
        assert json.loads(done.stdout)["file"].endswith("bad\\xff.tar")
        assert "bad\\" in report.read_text()


# --- what is remembered ---------------------------------------------------------------------------------


def test_a_later_bundle_must_agree_with_what_was_verified_before(keys: str, tmp_path: Path, user_state: Path) -> None:
    snapshots = (10, 20, 30, 40)
    grown, forked = build(40, snapshots_to=snapshots), build(40, snapshots_to=snapshots, begin_ms=1_704_931_200_001)
    good, more, fork = (
        str(store(tmp_path, data, name))
        for data, name in ((GOOD, "good.tar"), (bundle_of(grown), "more.tar"), (bundle_of(forked), "fork.tar"))
    )
    part = str(store(tmp_path, bundle_of(grown, to_seq=20), "part.tar"))

    def verify(file: str, code: int, *options: str) -> tuple[str, str | None, str]:
        told = json.loads(tally(file, "--keys", keys, "--json", *options, code=code).stdout)
        return told["verdicts"]["checkpoint"], told["compared_with"], told.get("memory", {}).get("says", "")

    # A first look says so, and compares with nothing from outside.
    checkpoint, compared_with, says = verify(good, 0)
    assert (checkpoint, compared_with) == ("not_checked", "bundle")
    assert "this is the first look at this log" in says
    assert "30 entries are remembered now" in says
    assert (user_state / "checkpoints.json").exists()
    # The same once more proves nothing more: what is remembered came from it.
    checkpoint, compared_with, says = verify(good, 0)
    assert (checkpoint, compared_with) == ("not_checked", "bundle")
    assert "is the checkpoint that came along: comparing the two would check nothing" in says
    assert "first look" not in says
    # A longer one, and the beginning of that, which has the same checkpoint.
    assert verify(more, 0)[:2] == ("ok", "bundle, memory")
    assert verify(part, 0)[:2] == ("not_checked", "bundle")
    # An older one is no rollback, and not compared.
    checkpoint, compared_with, says = verify(good, 0)
    assert (checkpoint, compared_with) == ("not_checked", "bundle")
    assert "what is here is older, and ends at 30 entries: that is no rollback by itself" in says
    # Another history is one; also beyond what was seen, and never remembered.
    assert verify(fork, 2)[0] == "broken"
    assert verify(fork, 2)[0] == "broken"
    assert verify(fork, 0, "--no-state") == ("not_checked", "bundle", "")
    assert verify(fork, 0, "--state", str(tmp_path / "another"))[0] == "not_checked"


def test_what_no_trusted_key_signed_or_does_not_hold_is_not_remembered(
    keys: str, tmp_path: Path, user_state: Path
) -> None:
    strange = str(store(tmp_path, bundle_of(LEDGER, signer=STRANGER), "strange.tar"))
    broken = str(store(tmp_path, GOOD[:-1], "broken.tar"))
    later = str(store(tmp_path, bundle_of(LEDGER, 11), "later.tar"))
    for file, code in ((strange, 4), (broken, 2), (later, 3)):
        tally(file, "--keys", keys, code=code)
        assert not (user_state / "checkpoints.json").exists(), file
    tally(str(store(tmp_path, GOOD)), code=3)
    assert not user_state.joinpath("checkpoints.json").exists(), "no key was given"


def test_a_damaged_memory_ends_the_command_in_one_line(keys: str, tmp_path: Path, user_state: Path) -> None:
    path = str(store(tmp_path, GOOD))
    tally(path, "--keys", keys, code=0)
    state = user_state / "checkpoints.json"
    state.write_bytes(state.read_bytes()[:-2])
    done = tally(path, "--keys", keys, code=1)
    assert len(done.stderr.splitlines()) == 1
    assert f"{state}, which holds the checkpoints verified so far, is damaged" in done.stderr


def test_a_report_of_a_kind_that_cannot_be_written_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    for name in ("r.pdf", "r", "r.MD"):
        done = tally("nowhere.tar", "--report", str(tmp_path / name), code=1)
        kinds = "a page, .html, Markdown, .md, or JSON, .json"
        assert done.stderr == f"error: --report {tmp_path / name}: a report is {kinds}\n"
        assert not (tmp_path / name).exists()


def test_the_second_implementation_says_how_it_is_used_and_what_it_needs(
    keys: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = Path(__file__).resolve().parents[2] / "docs" / "formats" / "verify.py"
    (tmp_path / "cryptography.py").write_text("raise ImportError('No module named cryptography')")

    def run(*arguments: str, path: str = "") -> Done:
        command = [sys.executable, str(program), *arguments]
        environment = {**os.environ, "PYTHONPATH": path}
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=240)

    bundle = str(store(tmp_path, GOOD))
    assert run(bundle, "--keys", keys).returncode == 0
    usage = "verify.py FILE [--keys K]"
    for arguments in (["--help"], ["-h"], [bundle, "--help"]):
        assert second_verifier().run(arguments) == 0
        shown = capsys.readouterr()
        assert (usage in shown.out, shown.err) == (True, "")
    for arguments in ([], ["--keys", keys], [bundle, "--keys"], [bundle, "--key", keys], [bundle, bundle]):
        assert second_verifier().run(arguments) == 1
        refused = capsys.readouterr()
        assert (usage in refused.err, refused.out) == (True, "")
    lacking = run(bundle, path=str(tmp_path))
    assert (lacking.returncode, len(lacking.stderr.splitlines())) == (1, 1)
    assert "pip install cryptography" in lacking.stderr


def test_a_report_counts_proposals_by_their_verdict(keys: str, tmp_path: Path) -> None:
    path, report = store(tmp_path, bundle_of(committed(RACE))), tmp_path / "report.md"
    tally(str(path), "--keys", keys, "--report", str(report), code=0)
    assert "- Proposals: 5 accepted, 2 rejected\n" in report.read_text()
    assert "| projection | ok |" in report.read_text()


# --- what is no bundle ------------------------------------------------------------------------------------


def test_a_file_that_is_no_bundle_or_receipt_is_named_and_not_called_tampered(keys: str, tmp_path: Path) -> None:
    others = {
        "report.html": b"<!doctype html>\n<title>acme</title>\n",
        "picture.png": b"\x89PNG\r\n\x1a\n" + bytes(99),
        "empty.tar": b"",
        "job.receipt.json": b'{"receipt":{}}',
    }
    for name, content in others.items():
        file = str(store(tmp_path, content, name))
        done = tally(file, "--keys", keys, code=1)
        assert "it is no bundle; it looks like " in " ".join(done.stdout.split()), done.stdout
        assert "TAMPERED" not in done.stdout
        told = json.loads(tally(file, "--keys", keys, "--json", code=1).stdout)
        assert (told["exit_code"], "verdicts" in told) == (1, False)
        assert second_verifier().main(file, "--keys", keys) == (2 if name.endswith(".json") else 1)
    proved = run_tally("verify-proof", str(store(tmp_path, GOOD)), "--keys", keys)
    assert proved.returncode == 1
    assert "it is no receipt; it looks like a bundle: tally verify-bundle verifies that" in proved.stdout
    sent = run_tally("bundle", "import", str(tmp_path / "picture.png"), "--url", "http://127.0.0.1:1")
    assert (sent.returncode, "is no bundle; it looks like a picture" in " ".join(sent.stderr.split())) == (1, True)


def test_a_fifo_in_the_place_of_a_bundle_its_keys_or_its_checkpoint_is_not_waited_for(
    keys: str, tmp_path: Path
) -> None:
    fifo, good = str(tmp_path / "fifo"), str(store(tmp_path, GOOD))
    os.mkfifo(fifo)
    for arguments in ((fifo, "--keys", keys), (good, "--keys", fifo), (good, "--keys", keys, "--checkpoint", fifo)):
        done = tally(*arguments, code=1)
        assert "it is not a regular file, but a FIFO" in " ".join((done.stdout + done.stderr).split())
        assert second_verifier().main(*arguments) == 1
