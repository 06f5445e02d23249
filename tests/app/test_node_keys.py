"""The file of what a node holds about keys: what is written together, and what is not."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from app.runtime.settings.config import Settings
from app.trust import node_keys
from app.trust.node_keys import KeyBounds
from ledger.hlc import Hlc
from signing import private_keys
from signing.keys import PublicKey
from signing.private_keys import RemoteSigner

ROOT = "0123456789abcdef"
END = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path, database_url="postgresql://ledger@db/ledger")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "wal"
    path.mkdir()
    return path


async def test_what_was_seen_is_kept_beside_the_signers_that_were_stored_last(
    tmp_path: Path, folder: Path, settings: Settings
) -> None:
    keys = node_keys.open_keys(folder, settings)
    keys.store()
    first = keys.signer.key_id
    keys.signer = keys.log_signer = private_keys.generate(tmp_path / "keys" / "second.pem")

    await keys.learn_root(ROOT)

    held = json.loads((folder / node_keys.NAME).read_text())
    assert (held["signer"]["key_id"], held["root_key_id"]) == (first, ROOT), "half a rotation was stored"
    keys.store()
    again = node_keys.open_keys(folder, settings)
    assert (again.signer.key_id, again.root_key_id) == (keys.signer.key_id, ROOT)


async def test_what_was_seen_before_anything_signs_is_kept_with_the_first_signers(
    folder: Path, settings: Settings
) -> None:
    keys = node_keys.open_keys(folder, settings)
    await keys.learn_root(ROOT)
    assert not (folder / node_keys.NAME).exists(), "a start that is refused keeps no keys"
    keys.store()
    assert node_keys.open_keys(folder, settings).root_key_id == ROOT


async def test_a_key_never_counts_longer_than_it_was_seen_to_whatever_is_said_later(
    tmp_path: Path, folder: Path, settings: Settings
) -> None:
    keys = node_keys.open_keys(folder, settings)
    keys.store()
    key = private_keys.generate(tmp_path / "other.pem").public_key
    ended = PublicKey.of(key.material, not_after=END)
    revoked = PublicKey.of(key.material, revoked_from_hlc=Hlc(1, 0, "n"))

    for said in (ended, revoked, key):
        await keys.narrowed({key.key_id: said})

    again = node_keys.open_keys(folder, settings)
    assert again.ended == {key.key_id: KeyBounds(END, "1:0:n")}
    assert (again.bounded(key).not_after, again.bounded(key).revoked_from_hlc) == (END, Hlc(1, 0, "n"))


async def test_a_fork_forgets_the_root_and_nothing_else(tmp_path: Path, folder: Path, settings: Settings) -> None:
    keys = node_keys.open_keys(folder, settings)
    key = private_keys.generate(tmp_path / "other.pem").public_key
    await keys.learn_root(ROOT)
    await keys.narrowed({key.key_id: PublicKey.of(key.material, not_after=END)})
    keys.store()

    node_keys.forget_root(folder)

    again = node_keys.open_keys(folder, settings)
    assert (again.root_key_id, again.ended) == (None, keys.ended)
    assert again.signer.key_id == keys.signer.key_id


def test_the_file_names_a_key_by_where_its_signer_is(tmp_path: Path, folder: Path, settings: Settings) -> None:
    keys = node_keys.open_keys(folder, settings)
    beside = private_keys.generate(tmp_path / "keys" / "second.pem")
    elsewhere = private_keys.generate(tmp_path / "elsewhere" / "second.pem")
    remote = RemoteSigner("hv:name/3", elsewhere.public_key, str)

    assert keys.uri_of(keys.signer) == settings.signing_key_uri
    assert [keys.uri_of(each) for each in (beside, elsewhere, remote)] == [
        "second.pem",
        str(elsewhere.path),
        "hv:name/3",
    ]
    replace(keys, signer=beside, log_signer=elsewhere, configured_key_id=keys.signer.key_id).store()
    again = node_keys.open_keys(folder, settings)
    assert (again.signer.key_id, again.log_signer.key_id) == (beside.key_id, elsewhere.key_id)
