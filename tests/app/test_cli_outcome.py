"""Exit codes and errors of ``tally``, as scripts rely on them."""

import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli import Commands
from cli import tally as command_line
from ledger.exit_code import ExitCode, exit_code_of_verdict, gravest
from ledger.verification.verdict import with_checkpoint
from tests.forked import run_forked
from tests.tally import COLD, IMPORTED, bare_environment, run_tally

ASPECTS = ("links", "payloads", "head", "snapshots", "signatures", "tree", "projection", "checkpoint")


def verdict(*, unsigned_entries: int = 0, from_seq: int = 1, **results: str) -> dict[str, object]:
    verdicts = dict.fromkeys(ASPECTS, "ok") | results
    return {
        "valid": not {"broken", "unknown_key"} & set(verdicts.values()),
        "verdicts": verdicts,
        "unsigned_entries": unsigned_entries,
        "from_seq": from_seq,
        "first_break": None,
        "compared_with": "node",
    }


def run_cold(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    given = bare_environment() | environment
    return subprocess.run([*COLD, *arguments], capture_output=True, text=True, env=given, check=False)


@pytest.mark.parametrize(
    ("found", "code"),
    [
        (verdict(), ExitCode.FINE),
        (verdict(links="broken"), ExitCode.TAMPERED),
        (verdict(signatures="unknown_key"), ExitCode.UNKNOWN_KEY),
        (verdict(signatures="not_checked"), ExitCode.INCOMPLETE),
        (verdict(checkpoint="not_checked"), ExitCode.INCOMPLETE),
        (verdict(checkpoint="not_checked") | {"compared_with": None}, ExitCode.FINE),
        (verdict(checkpoint="not_checked") | {"compared_with": "bundle", "not_compared": []}, ExitCode.FINE),
        (
            verdict(checkpoint="not_checked") | {"compared_with": "bundle", "not_compared": ["file"]},
            ExitCode.INCOMPLETE,
        ),
        (verdict(checkpoint="not_checked") | {"compared_with": "memory, bundle"}, ExitCode.INCOMPLETE),
        (verdict(unsigned_entries=1), ExitCode.INCOMPLETE),
        (verdict(from_seq=2), ExitCode.INCOMPLETE),
        (verdict(payloads="broken", signatures="unknown_key", unsigned_entries=3), ExitCode.TAMPERED),
        (verdict(signatures="unknown_key", unsigned_entries=3), ExitCode.UNKNOWN_KEY),
        (verdict() | {"not_mended": []}, ExitCode.FINE),
        (verdict(unsigned_entries=1) | {"not_mended": [{"kind": "idempotency"}]}, ExitCode.TAMPERED),
    ],
)
def test_a_verdict_has_the_gravest_exit_code_that_holds(found: Mapping[str, object], code: ExitCode) -> None:
    assert exit_code_of_verdict(found) is code


def test_of_several_codes_tampered_comes_before_unknown_key_before_incomplete_before_could_not_run() -> None:
    codes = [ExitCode.COULD_NOT_RUN, ExitCode.INCOMPLETE, ExitCode.UNKNOWN_KEY, ExitCode.TAMPERED]

    assert [gravest(codes[:length]) for length in range(5)] == [ExitCode.FINE, *codes]


@pytest.mark.parametrize("arguments", [("bogus",), ("verify",), ("replay", "/nowhere", "-t", "a"), ("--what",)])
def test_a_wrong_command_line_is_1_and_never_2_which_says_tampered(arguments: tuple[str, ...]) -> None:
    done = run_tally(*arguments)

    assert done.returncode == 1
    assert "Usage:" in done.stderr


def test_a_service_that_does_not_answer_is_1_with_one_line_that_says_so() -> None:
    done = run_tally("snapshot", "-t", "acme", "--url", "http://127.0.0.1:9")

    assert done.returncode == 1
    assert done.stderr.startswith("error: no answer from http://127.0.0.1:9")
    assert "Traceback" not in done.stderr


def test_a_command_is_not_run_when_the_ledger_cannot_take_the_job(tmp_path: Path) -> None:
    touched = tmp_path / "touched"

    done = run_tally("run", "-t", "acme", "--url", "not-an-address", "--", "touch", str(touched))

    assert done.returncode == 125
    assert not touched.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("--", "touch"),
        ("-t", "acme"),
        ("--what", "-t", "acme", "--", "touch"),
        ("-t", "acme", "--durability", "SOME", "--", "touch"),
        ("-t", "acme", "--token-file", "/nowhere", "--", "touch"),
        ("-t",),
    ],
)
def test_a_wrong_command_line_of_run_is_125_as_other_codes_may_be_those_of_the_command(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    touched = tmp_path / "touched"
    given = [*arguments, str(touched)] if arguments[-1] == "touch" else arguments

    assert run_tally("run", *given).returncode == 125
    assert not touched.exists()


def test_a_wrong_command_line_of_a_flush_which_runs_nothing_is_1() -> None:
    for arguments in (("--flush",), ("--flush", "--what"), ("--flush", "--spool", "/nowhere", "--", "touch")):
        assert run_tally("run", *arguments).returncode == 1
    assert run_tally("run", "--help").returncode == 0


def test_a_wrong_setting_is_1_and_named() -> None:
    done = run_tally("serve", TALLY_WAL__RETAIN="soon")

    assert done.returncode == 1
    assert "wal.retain" in done.stderr


def test_the_url_of_a_database_that_was_never_made_is_1(tmp_path: Path) -> None:
    done = run_tally("db-url", TALLY_DATA_DIR=str(tmp_path))

    assert done.returncode == 1
    assert "there is no embedded PostgreSQL" in done.stderr


def test_every_command_explains_itself_with_an_example() -> None:
    commands = ("dev", "serve", "migrate", "db-url", "run", "replay", "verify", "snapshot")
    grouped = (("keys", "new"), ("keys", "list"), ("wal", "dump"), ("wal", "verify"), ("demo", "tamper"))

    for command in (*((name,) for name in commands), *grouped):
        shown = CliRunner().invoke(command_line, [*command, "--help"])
        assert "Examples:" in shown.stdout, command


@pytest.mark.parametrize("name", Commands(name="tally").list_commands(None))
def test_every_command_is_where_it_is_looked_for(name: str) -> None:
    command = Commands(name="tally").get_command(None, name)

    assert command.name == name
    assert command.help


def test_an_installed_node_does_without_the_laboratory(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = Commands(name="tally")
    assert {"demo", "replay", "simulate"} <= {*commands.list_commands(None)}

    monkeypatch.setitem(sys.modules, "lab", None)

    assert commands.list_commands(None) == [*Commands.ENTRY_POINTS]
    assert commands.get_command(None, "simulate") is None


def test_the_version_is_that_of_the_package() -> None:
    done = run_tally("--version")

    assert done.returncode == 0
    assert done.stdout.split()[:2] == ["tallystick", version("tallystick")]


def test_a_shell_is_told_how_a_command_may_go_on() -> None:
    # By its name: the shell completes what is called so.
    completing = "import sys; sys.argv = ['tally']; from cli import main; main()"
    for typed, offered in (
        (["ver"], {"verify", "verify-bundle"}),
        (["keys", "r"], {"rotate", "revoke"}),
        (["verify", "--ten"], {"--tenant"}),
    ):
        asked = bare_environment() | {
            "_TALLY_COMPLETE": "complete_bash",
            "COMP_WORDS": f"tally {' '.join(typed)}",
            "COMP_CWORD": str(len(typed)),
        }
        done = run_forked(IMPORTED, "-c", completing, env=asked, check=True)
        assert offered <= set(done.stdout.split())
    command = Path(sys.executable).with_name("tally")
    cold = subprocess.run([command], capture_output=True, text=True, env=asked, check=True)
    assert cold.stdout == done.stdout


def test_a_misspelt_command_is_answered_with_the_one_it_is_near_to() -> None:
    done = run_tally("verfy")

    assert done.returncode == 1
    assert "Did you mean 'verify'" in done.stderr


def test_a_command_does_not_load_what_only_others_need() -> None:
    looks = "import sys, cli, cli.snapshot; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", looks], capture_output=True, text=True, check=True)

    assert not {"app.runtime.settings.config", "app.node.wiring", "asyncpg", "sqlalchemy", "uvloop"} & set(
        done.stdout.split()
    )


def test_a_checkpoint_that_the_chain_does_not_extend_makes_the_verdict_broken() -> None:
    rollback = {"seq": 9, "kind": "rollback"}

    found = with_checkpoint(verdict(), "broken", "file", rollback)

    assert found["valid"] is False
    assert found["verdicts"]["checkpoint"] == "broken"
    assert found["first_break"] == rollback
    assert found["compared_with"] == "node, file"


def test_the_first_break_stays_the_lowest_when_a_checkpoint_adds_one() -> None:
    edited = verdict(links="broken") | {"first_break": {"seq": 4, "kind": "link"}}

    found = with_checkpoint(edited, "broken", "file", {"seq": 9, "kind": "rollback"})

    assert found["first_break"] == {"seq": 4, "kind": "link"}


def test_a_checkpoint_of_an_unknown_key_is_not_a_comparison() -> None:
    found = with_checkpoint(verdict(), "unknown_key", "file")

    assert found["valid"] is False
    assert found["compared_with"] == "node"
    assert exit_code_of_verdict(found) is ExitCode.UNKNOWN_KEY


def test_a_forked_command_says_and_does_what_one_does_that_imports_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ("snapshot", "-t", "a", "--url", "no address")
    forked, cold = (run(*arguments, TALLY_DATA_DIR=str(tmp_path)) for run in (run_tally, run_cold))

    assert (forked.returncode, forked.stdout, forked.stderr) == (cold.returncode, cold.stdout, cold.stderr)
