"""What the pipeline's commands share: their options, and the folder of Spark's running."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from cli.bundle import bundle
from ledger.errors import InvalidInputError
from pipeline.cli import commands, running
from pipeline.cli.ledgers import local_ledger
from pipeline.cli.options import NO_DSN_VARIABLE, load_keys
from tests.ledger.ledger_in_memory import SIGNER, STRANGER

ENDED = 1 << 30
"""No process has this id."""


def test_keys_of_several_places_are_one_ring(tmp_path: Path) -> None:
    paths = [tmp_path / "a.pem", tmp_path / "b.pem"]
    for path, signer in zip(paths, (SIGNER, STRANGER), strict=True):
        path.write_text(signer.public_key_pem)
    assert [key.key_id for key in load_keys(paths)] == [SIGNER.key_id, STRANGER.key_id]
    assert len(load_keys([])) == 0


def test_commands_spell_and_explain_what_they_share_in_the_same_way() -> None:
    said: dict[str, set[tuple[str | None, bool]]] = {}
    for command in typer.main.get_group(commands).commands.values():
        for option in command.params:
            if option.name in ("tenants", "keys", "signing_key", "master", "as_json"):
                said.setdefault(option.name, set()).add((getattr(option, "help", None), option.multiple))
    assert {name: len(texts) for name, texts in said.items()} == dict.fromkeys(said, 1)
    assert [next(iter(said[name]))[1] for name in ("tenants", "keys")] == [True, True]
    assert len(said) == 5


def test_the_help_of_every_command_lists_its_exit_codes() -> None:
    for name, command in typer.main.get_group(commands).commands.items():
        assert "Exit codes: 0 " in (command.help or ""), name


def test_what_a_command_writes_bundles_to_is_spelled_the_same_in_both_programs() -> None:
    spelled = {
        (name, *option.opts)
        for group in (commands, bundle)
        for name, command in typer.main.get_group(group).commands.items()
        for option in command.params
        if {"-o", "--out", "--output"} & {*option.opts}
    }
    assert spelled == {(name, "--out", "-o") for name in ("diff", "merge", "export", "from-v1")}


def test_it_is_said_why_the_local_service_has_no_database(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TALLY_PIPELINE_DSN", raising=False)
    monkeypatch.setenv(NO_DSN_VARIABLE, "there is no embedded PostgreSQL in var")
    with pytest.raises(InvalidInputError, match=r"^name it \(there is no embedded PostgreSQL in var\)$"):
        local_ledger("name it")
    for arguments in (["verify"], ["archive", "--dest", "somewhere"]):
        assert "no embedded PostgreSQL in var" in str(CliRunner().invoke(commands, arguments).exception)


def test_the_newest_logs_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(running.FOLDER_VARIABLE, str(tmp_path / "logs"))
    monkeypatch.setattr(running, "LOG_FILES_MAX", 3)
    assert running.log_file("verify").parent == tmp_path / "logs"
    at_work = f"pipeline-stats-{os.getpid()}.log"
    names = (at_work, f"pipeline-merge-{ENDED}.log", "pipeline-verify-x.log", "pipeline-diff-y.log")
    for number, name in enumerate(names):
        file = tmp_path / "logs" / name
        file.touch()
        os.utime(file, (1000 + number, 1000 + number))
    (tmp_path / "logs" / "postgres.log").touch()
    running.log_file("verify").touch()
    kept = {file.name for file in (tmp_path / "logs").iterdir()}
    assert {at_work, "pipeline-diff-y.log", "postgres.log"} < kept
    assert not {f"pipeline-merge-{ENDED}.log", "pipeline-verify-x.log"} & kept
    assert len(kept) == 4
