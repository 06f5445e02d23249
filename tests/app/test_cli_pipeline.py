"""What ``tally pipeline`` hands to the pipeline of the service it belongs to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from app.node.start.restore import own_signers
from app.runtime.settings.config import Settings
from app.runtime.state import kept_files
from app.trust import node_keys
from cli.pipeline import prepared
from signing import private_keys


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path, database_url="postgresql://ledger@db/ledger")


def handed_over(settings: Settings) -> str:
    return prepared(settings)["TALLY_PIPELINE_SIGNING_KEY"]


def test_before_a_first_start_the_configured_key_is_handed_over_and_nothing_is_made(settings: Settings) -> None:
    assert handed_over(settings) == settings.signing_key_uri
    assert list(settings.data_dir.iterdir()) == []


def test_after_a_rotation_the_key_that_signs_now_is_handed_over(settings: Settings) -> None:
    settings.wal_dir.mkdir()
    who = kept_files.load_or_make(settings.wal_dir, None, None)
    folder = settings.wal_dir / who.node_id
    folder.mkdir(parents=True)
    keys = node_keys.open_keys(folder, settings)
    keys.store()
    assert handed_over(settings) == settings.signing_key_uri
    successor = private_keys.generate(node_keys.new_key_path(settings.signing_key_uri))
    replace(keys, signer=successor, log_signer=successor).store()
    assert private_keys.load(handed_over(settings)).key_id == successor.key_id != keys.signer.key_id


def test_a_key_that_the_settings_name_anew_is_handed_over(settings: Settings, tmp_path: Path) -> None:
    settings.wal_dir.mkdir()
    who = kept_files.load_or_make(settings.wal_dir, None, None)
    folder = settings.wal_dir / who.node_id
    folder.mkdir(parents=True)
    node_keys.open_keys(folder, settings).store()
    new = private_keys.generate(tmp_path / "new.pem")
    changed = Settings(
        data_dir=tmp_path, database_url="postgresql://ledger@db/ledger", signing={"key_uri": f"file:{new.path}"}
    )
    assert handed_over(changed) == f"file:{new.path}"


def test_a_restore_signs_with_the_key_that_is_handed_over(settings: Settings) -> None:
    settings.wal_dir.mkdir()
    first, *_ = own_signers(settings)
    assert private_keys.load(handed_over(settings)).public_key == first.public_key


def test_the_pin_of_an_hsm_is_handed_over_when_there_is_one(settings: Settings, tmp_path: Path) -> None:
    assert "TALLY_PIPELINE_SIGNING_PIN" not in prepared(settings)
    with_pin = Settings(data_dir=tmp_path, database_url="postgresql://ledger@db/ledger", signing={"pin": "1234"})
    assert prepared(with_pin)["TALLY_PIPELINE_SIGNING_PIN"] == "1234"


def test_why_there_is_no_database_is_handed_over(tmp_path: Path) -> None:
    known = prepared(Settings(data_dir=tmp_path))
    assert "there is no embedded PostgreSQL" in known["TALLY_PIPELINE_NO_DSN"]
    assert "TALLY_PIPELINE_DSN" not in known
