"""``tally pipeline verify`` from its command line: what it prints, what it exits with, what it refuses."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow.dataset as ds
import pytest

from ledger.exit_code import ExitCode
from signing import private_keys
from tests.app.bundles import bundle_of
from tests.app.chains import until
from tests.app.roles import run_roles_sql
from tests.app.witness import Witness
from tests.conftest import Database, connected_to
from tests.ledger.ledger_in_memory import SIGNER
from tests.pipeline.archived_ledgers import archive_here, checkpoint_of, cosign, days, ledger_of, store
from tests.pipeline.conftest import RunCommand
from tests.pipeline.sites import drawn_sites

pytestmark = pytest.mark.usefixtures("spark")


def test_a_database_is_verified_and_every_break_is_written(
    run_command: RunCommand, database: Database, tmp_path: Path
) -> None:
    whole, forged = ledger_of("acme", days(30)), ledger_of("other", days(20))
    for row in forged.entries[4:9]:
        row["payload"] += " "
    for ledger in (whole, forged):
        ledger.store_jobs()
    asyncio.run(store(database, whole, forged))
    (tmp_path / "keys.pem").write_text(SIGNER.public_key_pem)
    (tmp_path / "kept").write_text(checkpoint_of(whole))
    found = run_command(
        *("verify", "--dsn", database.service_url, "--keys", "keys.pem", "--checkpoint", "kept"),
        *("--breaks", tmp_path / "breaks", "--json"),
    )
    assert found.returncode == ExitCode.TAMPERED, found.stderr
    told = json.loads(found.stdout)
    acme, other = told["tenants"]
    assert (acme["tenant_id"], acme["valid"], acme["compared_with"]) == ("acme", True, "file")
    assert set(acme["verdicts"].values()) == {"ok"}
    assert (other["valid"], other["breaks"]) == (False, {"payload-digest": 5})
    assert told["entries_checked"] == 50
    assert told["rows_per_second"] > 0
    rows = ds.dataset(str(tmp_path / "breaks"), format="parquet").to_table().to_pylist()
    assert sorted((row["tenant_id"], row["seq"], row["kind"]) for row in rows) == [
        ("other", seq, "payload-digest") for seq in range(5, 10)
    ]


def test_an_auditor_who_can_only_read_verifies_a_database(
    run_command: RunCommand, database: Database, tmp_path: Path
) -> None:
    ledger = ledger_of("acme", days(20))
    ledger.store_jobs()
    asyncio.run(store(database, ledger))
    (tmp_path / "keys.pem").write_text(SIGNER.public_key_pem)
    owner, service = urlsplit(database.owner_url), urlsplit(database.service_url)
    # The server is that of other tests too: its logins keep their passwords.
    passwords = {"OWNER": owner.password, "SERVICE": service.password, "AUDITOR": "auditor"}
    given = {f"TALLY_{login}_PASSWORD": password or "" for login, password in passwords.items()}
    assert run_roles_sql(database.superuser_url, **given) == ""
    auditor = f"postgresql://auditor:auditor@{service.hostname}:{service.port}{service.path}"
    found = run_command("verify", "--dsn", auditor, "--keys", "keys.pem", "--json")
    assert found.returncode == ExitCode.FINE, found.stderr
    (told,) = json.loads(found.stdout)["tenants"]
    assert (told["valid"], told["entries_checked"]) == (True, 20)

    private_keys.generate(tmp_path / "archive.pem")
    options = ("--dest", str(tmp_path / "archive"), "--dsn", auditor, "--keys", "keys.pem", "--json")
    archived = run_command("archive", *options, "--signing-key", str(tmp_path / "archive.pem"))
    assert archived.returncode == ExitCode.FINE, archived.stderr
    (told,) = json.loads(archived.stdout)["tenants"]
    assert told["to_seq"] == 20


def test_a_database_that_ends_while_it_is_read_is_told_in_one_line(run_command: RunCommand, database: Database) -> None:
    ledger = ledger_of("acme", days(20))
    ledger.store_jobs()
    asyncio.run(store(database, ledger))
    reading = "SELECT pid FROM pg_locks WHERE NOT granted AND pg_backend_pid() = ANY(pg_blocking_pids(pid))"
    ending = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"

    is_locked = threading.Event()

    async def end() -> None:
        async with connected_to(database.superuser_url) as superuser, superuser.transaction():
            await superuser.execute("LOCK TABLE scheduler.jobs")
            is_locked.set()

            async def is_read() -> bool:
                return await superuser.fetchval(reading) is not None

            await until(is_read, "the table of jobs is read")
            await superuser.execute(f"{ending} AND pid <> pg_backend_pid()")

    with ThreadPoolExecutor(1) as other:
        ended = other.submit(asyncio.run, end())
        assert is_locked.wait(60)
        found = run_command("verify", "--dsn", database.service_url)
        ended.result()
    assert (found.returncode, found.stdout) == (ExitCode.COULD_NOT_RUN, "")
    (told,) = found.stderr.splitlines()
    assert told.startswith("error: the database postgresql://tallystick@")
    assert "does not answer: " in told


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name the ledger"),
        (["--dsn", "postgresql://x/y", "--bundle", "a.tar"], "bundles are read alone"),
        (["some.tar"], "bundles are named with --bundle"),
        (["--bundle", "a.tar", "b.tar", "--tenant", "acme"], "a bundle is of one tenant"),
        (["--dsn", "nowhere"], "--dsn takes a database (postgresql://...), and 'nowhere' is none"),
        (["--dsn", "a.tar"], "--dsn takes a database (postgresql://...), and 'a.tar' is none"),
        (["--dsn", "archive"], "--dsn takes a database (postgresql://...), and 'archive' is none"),
        (["--archive", "a.tar"], "--archive takes an archive (a folder, s3://...), and 'a.tar' is none"),
        (["--archive", "postgresql://reader:secret@db/x"], "and what it is given is none"),
    ],
)
def test_a_wrong_command_line_is_refused_in_one_line(
    run_command: RunCommand, tmp_path: Path, arguments: list[str], said: str
) -> None:
    (tmp_path / "a.tar").write_bytes(b"a bundle")
    (tmp_path / "archive").mkdir()
    found = run_command("verify", *arguments)
    assert found.returncode == ExitCode.COULD_NOT_RUN
    assert said in found.stderr
    assert len(found.stderr.splitlines()) == 1
    assert "secret" not in found.stderr
    assert found.stdout == ""


def test_a_file_that_cannot_be_read_is_told_and_the_others_are_verified(
    run_command: RunCommand, tmp_path: Path
) -> None:
    (file,) = drawn_sites(tmp_path, 5, conflicts=False)[:1]
    found = run_command("verify", "--bundle", "gone.tar", file, "--json")
    told = json.loads(found.stdout)
    gone, whole = told["tenants"]
    assert (gone["file"], gone["error"], gone["valid"]) == (
        str(tmp_path / "gone.tar"),
        "No such file or directory",
        False,
    )
    assert (whole["file"], whole["breaks"], whole["entries_checked"]) == (str(file), {}, told["entries_checked"])
    assert whole["entries_checked"] > 0
    assert "everything is checked: no --keys are given, so no signature is judged\n" in found.stderr
    assert found.returncode == ExitCode.INCOMPLETE, "no key was given, which is graver than a file that is not there"


@pytest.mark.parametrize(
    ("breaks", "said"),
    [
        ("full", "is there and not empty: name a folder that is not there yet"),
        ("full/a.tar", "is a file: name a folder that is not there yet"),
        ("full/a.tar/below", "is no folder that can be written to"),
    ],
)
def test_a_folder_that_cannot_take_the_breaks_is_refused_before_anything_is_verified(
    run_command: RunCommand, tmp_path: Path, breaks: str, said: str
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a.tar").write_bytes(b"no bundle")
    found = run_command("verify", "--bundle", "full/a.tar", "--breaks", breaks)
    assert (found.returncode, found.stdout) == (ExitCode.COULD_NOT_RUN, "")
    assert said in found.stderr
    assert f"--breaks {tmp_path / breaks}" in found.stderr
    assert len(found.stderr.splitlines()) == 1


def test_a_verdict_is_printed_and_counts_although_the_breaks_cannot_be_written(
    run_command: RunCommand, tmp_path: Path
) -> None:
    (tmp_path / "torn.tar").write_bytes(b"entries/000001.ndjson.gz")
    found = run_command("verify", "--bundle", "torn.tar", "--breaks", "nowhere://bucket/breaks", "--json")
    told = json.loads(found.stdout)
    assert (told["tenants"][0]["breaks"], told["breaks_written"]) == ({"bundle": 1}, None)
    assert "the breaks could not be written to nowhere://bucket/breaks: " in found.stderr
    assert found.returncode == ExitCode.TAMPERED, "which is graver than that the breaks are not there"


def test_breaks_go_to_an_empty_folder_of_the_caller(run_command: RunCommand, tmp_path: Path) -> None:
    (tmp_path / "torn.tar").write_bytes(b"entries/000001.ndjson.gz")
    (tmp_path / "empty").mkdir()
    found = run_command("verify", "--bundle", "torn.tar", "--breaks", "empty")
    assert found.returncode == ExitCode.TAMPERED
    assert f"every break: {tmp_path / 'empty'}" in found.stdout
    assert ds.dataset(str(tmp_path / "empty"), format="parquet").to_table().num_rows == 1


def test_why_a_verification_is_incomplete_is_said(run_command: RunCommand, database: Database, tmp_path: Path) -> None:
    ledger = ledger_of("acme", days(25))
    ledger.store_jobs()
    asyncio.run(store(database, ledger))
    (tmp_path / "keys.pem").write_text(SIGNER.public_key_pem)
    for keys, said in ((("--keys", "keys.pem"), ""), ((), "no --keys are given, so no signature is judged; ")):
        found = run_command("verify", "--dsn", database.service_url, *keys)
        assert found.returncode == ExitCode.INCOMPLETE
        (acme,) = (line for line in found.stdout.splitlines() if "acme" in line)
        unsigned = acme.split("│")[3].strip()
        assert int(unsigned) > 0
        assert found.stderr == (
            f"exit code 3, not everything is checked: {said}{unsigned} entries of 1 ledger that no snapshot signs yet\n"
        )


def test_ledgers_below_the_quorum_of_a_policy_are_incomplete_wherever_they_are(
    run_command: RunCommand, database: Database, tmp_path: Path
) -> None:
    one, two = Witness("witness.example/w1", 1), Witness("witness.example/w2", 2)
    (tmp_path / "keys.pem").write_text(SIGNER.public_key_pem)
    (tmp_path / "policy").write_text(
        f"witness w1 {one.verifier_key}\nwitness w2 {two.verifier_key}\ngroup g all w1 w2\nquorum g\n"
    )
    (tmp_path / "acme.tar").write_bytes(bundle_of(ledger_of("acme", days(20))))
    acme, other = ledger_of("acme", days(30)), ledger_of("other", days(20))
    for ledger in (acme, other):
        ledger.store_jobs()
    asyncio.run(store(database, acme, other))
    asyncio.run(cosign(database, acme, one, two))
    asyncio.run(cosign(database, other, one))

    def verdicts(code: ExitCode, *place: object) -> list[dict[str, Any]]:
        found = run_command("verify", *place, "--keys", "keys.pem", "--policy", "policy", "--json", "--no-state")
        assert found.returncode == code, found.stderr
        assert ("1 ledger below the quorum of the policy" in found.stderr) == (code == ExitCode.INCOMPLETE)
        return json.loads(found.stdout)["tenants"]

    met, below = verdicts(ExitCode.INCOMPLETE, "--dsn", database.service_url)
    assert (met["policy"]["met"], met["policy"]["quorum_to_seq"]) == (True, 30)
    assert (below["valid"], below["policy"]["missing"]) == (True, ["w2: has cosigned nothing of this log"])
    (bundled,) = verdicts(ExitCode.INCOMPLETE, "--bundle", "acme.tar")
    assert bundled["policy"]["quorum_to_seq"] == 0
    archive_here(database, tmp_path / "archive")
    met, below = verdicts(ExitCode.INCOMPLETE, "--archive", tmp_path / "archive")
    assert (met["policy"]["met"], below["policy"]["missing"]) == (True, ["w2: has cosigned nothing of this log"])
    # A witness has seen another history of this length.
    asyncio.run(cosign(database, ledger_of("other", days(20)[::-1]), two))
    _, rolled_back = verdicts(ExitCode.TAMPERED, "--dsn", database.service_url)
    assert rolled_back["first_break"]["kind"] == "rollback"


def test_ledgers_whose_end_lacks_a_second_signature_are_incomplete_where_both_are_demanded(
    run_command: RunCommand, database: Database, tmp_path: Path
) -> None:
    second = private_keys.second_signer(f"file:{tmp_path}/second.pem", may_generate=True)
    (tmp_path / "keys.pem").write_text(SIGNER.public_key_pem + second.public_key_pem)
    (tmp_path / "first.pem").write_text(SIGNER.public_key_pem)
    whole, stripped = ledger_of("acme", days(30)), ledger_of("other", days(30))
    for ledger, signed_last in ((whole, (second,)), (stripped, ())):
        ledger.snapshots.clear()
        ledger.sign(10)
        ledger.sign(20, SIGNER, second)
        ledger.sign(30, SIGNER, *signed_last)
        ledger.store_jobs()
    asyncio.run(store(database, whole, stripped, more=[second]))
    archive_here(database, tmp_path / "archive")
    (tmp_path / "acme.tar").write_bytes(bundle_of(whole, checkpoint=checkpoint_of(whole, more=[second])))
    (tmp_path / "bare.tar").write_bytes(bundle_of(whole))

    def verdicts(code: ExitCode, *given: object, keys: str = "keys.pem") -> list[dict[str, Any]]:
        found = run_command("verify", *given, "--keys", keys, "--json", "--no-state")
        assert found.returncode == code, found.stderr
        return json.loads(found.stdout)["tenants"] if found.stdout else []

    both = ("--signatures", "both")
    for place in (("--dsn", database.service_url), ("--archive", tmp_path / "archive")):
        verdicts(ExitCode.FINE, *place)
        verdicts(ExitCode.FINE, *place, keys="first.pem")
        found = verdicts(ExitCode.INCOMPLETE, *place, *both)
        assert [(each["signed_to_seq"], each["verdicts"]["signatures"]) for each in found] == [
            (30, "ok"),
            (20, "not_checked"),
        ]
    verdicts(ExitCode.FINE, "--bundle", "acme.tar", *both)
    verdicts(ExitCode.UNKNOWN_KEY, "--bundle", "bare.tar", *both)
    verdicts(ExitCode.COULD_NOT_RUN, "--bundle", "acme.tar", *both, keys="first.pem")


def test_the_help_speaks_of_files_as_a_user_names_them(run_command: RunCommand) -> None:
    assert "verify [OPTIONS] [--bundle FILE]..." in run_command("verify", "--help").stdout


def test_a_tenant_that_is_not_there_is_told_and_the_others_are_verified(
    run_command: RunCommand, database: Database, tmp_path: Path
) -> None:
    whole = ledger_of("acme", days(20))
    whole.store_jobs()
    asyncio.run(store(database, whole))
    (tmp_path / "keys.pem").write_text(SIGNER.public_key_pem)
    found = run_command(
        *("verify", "--dsn", database.service_url, "--keys", "keys.pem"),
        *("--tenant", "nobody", "--tenant", "acme", "--json"),
    )
    assert (found.returncode, "no tenant 'nobody' in postgresql://" in found.stderr) == (1, True), found.stderr
    assert [each["tenant_id"] for each in json.loads(found.stdout)["tenants"]] == ["acme"]


def test_a_place_without_any_tenant_is_not_fine(run_command: RunCommand, database: Database, tmp_path: Path) -> None:
    (tmp_path / "archive").mkdir()
    for place in (("--archive", "archive"), ("--dsn", database.service_url)):
        found = run_command("verify", *place)
        assert (found.returncode, found.stdout) == (ExitCode.COULD_NOT_RUN, "")
        assert "there is nothing to verify in" in found.stderr


def test_a_ledger_that_was_cut_since_it_was_verified_is_a_rollback_wherever_it_is(
    run_command: RunCommand, database: Database, tmp_path: Path
) -> None:
    whole, cut, other = ledger_of("acme", days(30)), ledger_of("acme", days(20)), ledger_of("other", days(10))
    (tmp_path / "keys.pem").write_text(SIGNER.public_key_pem)
    for name, ledger in (("whole", whole), ("cut", cut)):
        (tmp_path / f"{name}.tar").write_bytes(bundle_of(ledger))
    for ledger in (cut, other):
        ledger.store_jobs()
    asyncio.run(store(database, cut, other))

    def verify(*place: str) -> tuple[int, list[dict[str, object]]]:
        found = run_command("verify", *place, "--keys", "keys.pem", "--json")
        return found.returncode, json.loads(found.stdout)["tenants"]

    _, (first,) = verify("--bundle", "whole.tar")
    assert (first["verdicts"]["checkpoint"], first["compared_with"]) == ("not_checked", "bundle")
    assert (first["memory"]["first_look"], first["memory"]["remembered"]["size"]) == (True, 30)
    _, (again, older) = verify("--bundle", "whole.tar", "cut.tar")
    assert (again["verdicts"]["checkpoint"], again["compared_with"]) == ("not_checked", "bundle")
    assert "comparing the two would check nothing" in again["memory"]["says"]
    assert (older["valid"], older["verdicts"]["checkpoint"]) == (True, "not_checked")
    assert "that is no rollback by itself" in older["memory"]["says"]
    code, (acme, untouched) = verify("--dsn", database.service_url)
    assert (code, acme["first_break"]["kind"], acme["compared_with"]) == (ExitCode.TAMPERED, "rollback", "memory")
    assert (untouched["valid"], untouched["compared_with"]) == (True, None)
