"""The commands around an archive that need no Spark: what they say and how they end."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path

import pytest

from ledger.exit_code import ExitCode
from signing import private_keys
from signing.bundle.reader import BundleReader
from signing.keys import Keyring
from tests.conftest import Database
from tests.ledger.ledger_in_memory import SIGNER
from tests.pipeline.archived_ledgers import archive_at, days, ledger_of, query, store
from tests.pipeline.conftest import RunCommand
from tests.tally import run_tally


def test_archive_says_what_it_lacks_and_what_is_wrong_with_rows(
    run_command: RunCommand, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private_keys.generate(tmp_path / "key.pem")
    monkeypatch.setenv("TALLY_PIPELINE_DSN", database.service_url)
    monkeypatch.setenv("TALLY_PIPELINE_SIGNING_KEY", str(tmp_path / "key.pem"))
    nowhere = run_command("archive")
    assert (nowhere.returncode, "archive.url" in nowhere.stderr) == (ExitCode.COULD_NOT_RUN, True)

    asyncio.run(store(database, ledger_of("acme", days(10))))
    asyncio.run(query(database, "DELETE FROM scheduler.scheduler_log"))
    monkeypatch.setenv("TALLY_PIPELINE_ARCHIVE", str(tmp_path / "archive"))
    broken = run_command("archive", "--json")
    assert broken.returncode == ExitCode.TAMPERED, broken.stderr
    (acme,) = json.loads(broken.stdout)["tenants"]
    assert (acme["first_break"]["kind"], acme["to_seq"]) == ("gap", 0)
    told = run_command("archive", "--dest", tmp_path / "archive")
    assert told.stderr.startswith("broken: acme: gap at seq 1")


def test_keys_of_the_database_are_not_believed_beside_those_that_are_named(
    run_command: RunCommand, database: Database, tmp_path: Path
) -> None:
    asyncio.run(store(database, ledger_of("acme", days(10))))
    asyncio.run(
        query(
            database,
            "INSERT INTO scheduler.signing_keys (key_id, algorithm, public_key_pem, not_before, node_id) VALUES"
            f" ('{SIGNER.key_id}', 'ed25519', '{SIGNER.public_key_pem}', '2020-01-01', 'node-1')",
        )
    )
    mine = private_keys.generate(tmp_path / "key.pem")
    (tmp_path / "trusted.pem").write_text(mine.public_key_pem)
    refused = run_command(
        *("archive", "--dest", str(tmp_path / "archive"), "--dsn", database.service_url, "--json"),
        *("--signing-key", str(tmp_path / "key.pem"), "--keys", str(tmp_path / "trusted.pem")),
    )
    assert refused.returncode == ExitCode.UNKNOWN_KEY, refused.stderr
    (acme,) = json.loads(refused.stdout)["tenants"]
    assert (acme["first_break"]["kind"], acme["to_seq"]) == ("tree", 0)
    assert not (tmp_path / "archive" / "plans").exists()


def test_a_bundle_of_an_archive_has_what_held_keys_signed_and_nothing_else(database: Database, tmp_path: Path) -> None:
    asyncio.run(store(database, ledger_of("acme", days(20))))
    signer = private_keys.generate(tmp_path / "key.pem")
    archive_at(database, str(tmp_path / "archive"), Keyring([signer.public_key, SIGNER.public_key]), signer)
    # The snapshots and checkpoints are of another key than the manifests.
    for name, keys in (("own", signer), ("ledger", SIGNER)):
        (tmp_path / f"{name}.pem").write_text(keys.public_key_pem)

    def export(tenant: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
        archive = ("--from-archive", tmp_path / "archive", "--key", tmp_path / "key.pem", "-o", tmp_path / "b.tar")
        return run_tally("bundle", "export", "-t", tenant, *archive, *words)

    by_ledger = ("--keys", tmp_path / "ledger.pem")
    unknown = export("acme", "--keys", tmp_path / "own.pem")
    assert (unknown.returncode, "--keys" in unknown.stderr) == (ExitCode.UNKNOWN_KEY, True), unknown.stderr
    assert export("other", *by_ledger).returncode == ExitCode.COULD_NOT_RUN
    beyond = export("acme", *by_ledger, "--from-seq", "21")
    assert (beyond.returncode, "ends at seq 20" in beyond.stderr) == (ExitCode.COULD_NOT_RUN, True), beyond.stderr
    assert not (tmp_path / "b.tar").exists()

    for first in (1, 8):
        done = export("acme", *by_ledger, "--json", "--from-seq", str(first))
        assert done.returncode == 0, done.stderr
        written = json.loads(done.stdout)
        assert [written[name] for name in ("from_seq", "to_seq", "snapshot_count")] == [
            first,
            20,
            2 if first == 1 else 1,
        ]
        with BundleReader.open(tmp_path / "b.tar") as reader:
            assert [row[0] for rows in reader.entry_batches() for row in rows] == list(range(first, 21))
        verified = run_tally("verify-bundle", tmp_path / "b.tar", "--no-state", *by_ledger)
        # The key that signed the bundle is another one.
        assert verified.returncode == ExitCode.UNKNOWN_KEY
    with (tmp_path / "ledger.pem").open("a") as both:
        both.write(signer.public_key_pem)
    verified = run_tally("verify-bundle", tmp_path / "b.tar", "--no-state", *by_ledger)
    assert verified.returncode == ExitCode.INCOMPLETE, verified.stderr  # It begins at seq 8.

    next((tmp_path / "archive" / "entries").rglob("*.parquet")).unlink()
    assert export("acme", *by_ledger).returncode == ExitCode.TAMPERED


def test_archive_says_what_it_leaves_because_no_snapshot_signs_it(
    run_command: RunCommand, database: Database, tmp_path: Path
) -> None:
    unsigned = ledger_of("fresh", days(7))
    asyncio.run(store(database, ledger_of("acme", days(25)), unsigned))
    archive_at(database, str(tmp_path / "archive"))
    (tmp_path / "ledger.pem").write_text(SIGNER.public_key_pem)
    private_keys.generate(tmp_path / "key.pem")
    options = [
        *("archive", "--dest", str(tmp_path / "archive"), "--dsn", database.service_url),
        *("--signing-key", str(tmp_path / "key.pem"), "--keys", str(tmp_path / "ledger.pem")),
    ]
    told = json.loads(run_command(*options, "--json").stdout)["tenants"]
    assert [(each["tenant_id"], each["to_seq"], each["unsigned"]) for each in told] == [
        ("acme", 20, 5),
        ("fresh", 0, 7),
    ]
    done = run_command(*options)
    assert done.returncode == ExitCode.FINE
    assert "acme: 5 entries left, which no snapshot signs yet" in done.stdout
    assert "fresh: 7 entries left, which no snapshot signs yet" in done.stdout
