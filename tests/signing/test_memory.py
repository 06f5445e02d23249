"""What a verifier remembers on disk: one checkpoint a log, never less, never lost in silence, for one user alone."""

from __future__ import annotations

import json
import multiprocessing
import stat
import time
from base64 import b64encode
from datetime import UTC, datetime
from pathlib import Path

import pytest

from ledger import rfc3339
from ledger.errors import ConfigurationError, SignatureError
from signing import memory as memories
from signing.checkpoint import Checkpoint, sign_checkpoint
from signing.keys import Keyring, PublicKey
from signing.memory import Memory, Observation, Seen, memory_of, user_folder
from signing.note import VerifierKey
from tests.ledger.ledger_in_memory import SIGNER, STRANGER

NOW = datetime(2026, 11, 22, 2, 40, tzinfo=UTC)
ORIGIN = "log.example/acme"
RING = Keyring([SIGNER.public_key])


def seen(size: int, *, origin: str = ORIGIN, root_key: str = "root", root: int = 1, signer=SIGNER) -> Seen:
    note = sign_checkpoint(Checkpoint(origin, size, bytes([root]) * 32), signer)
    return Seen(note, root_key, rfc3339.written(NOW, "seconds"))


def test_the_newest_checkpoint_of_each_log_is_kept_for_this_user_alone(tmp_path: Path) -> None:
    folder = tmp_path / "state" / "tallystick"
    memory = Memory.open(folder)
    assert memory.seen(seen(5)) is None
    memory.remember([seen(5), seen(9, origin="log.example/other")])
    memory.remember([seen(7)])
    memory.remember([seen(6)])
    again = Memory.open(folder)
    assert again.seen(seen(1)) == seen(7)
    assert len(again.logs) == 2
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())}
    assert modes == {"tallystick": 0o700, "checkpoints.json": 0o600, "lock": 0o600}


def test_a_log_is_one_origin_under_one_root_key_or_one_signing_key(tmp_path: Path) -> None:
    Memory.open(tmp_path).remember([seen(7, root_key="one")])
    memory = Memory.open(tmp_path)
    assert memory.seen(seen(3, root_key="two", signer=STRANGER)) is None, "a ledger set up again under an old name"
    assert memory.seen(seen(3, root_key="one", signer=STRANGER)) == seen(7, root_key="one"), "its key was rotated"
    assert memory.seen(seen(3, root_key="two")) == seen(7, root_key="one"), "only said to have another root"
    assert memory.seen(seen(3, root_key="one", origin="log.example/other")) is None


def test_a_ledger_that_names_no_log_is_every_log_of_the_tenant_that_a_held_key_signed(tmp_path: Path) -> None:
    memory = Memory.open(tmp_path)
    memory.remember([seen(7), seen(8, origin="b.example/acme", signer=STRANGER), seen(9, origin="log.example/other")])
    assert Memory.open(tmp_path).seen_of_tenant("acme", RING) == [seen(7)]


def test_what_nobody_vouches_for_in_a_checkpoint_is_not_remembered_with_it(tmp_path: Path) -> None:
    """Anybody can add signature lines: under the key hash of another log of that name, or too many to keep."""
    honest = sign_checkpoint(Checkpoint(ORIGIN, 5, bytes(32)), SIGNER)
    hostile = sign_checkpoint(Checkpoint(ORIGIN, 9, bytes(32)), STRANGER)
    forged = hostile + f"— {ORIGIN} {b64encode(hash_of(SIGNER.public_key) + bytes(64)).decode()}\n"
    look = Observation.at(Memory.open(tmp_path), "acme", forged, Keyring([STRANGER.public_key]), NOW)
    assert look.now is not None
    look.memory.remember([look.now])
    padded = honest + f"— {'x' * 8000} {b64encode(bytes(68)).decode()}\n" * 20
    look = Observation.at(Memory.open(tmp_path), "acme", padded, RING, NOW)
    assert look.before == (), "another log, whose keys are others"
    assert look.now is not None
    look.memory.remember([look.now])
    assert Memory.open(tmp_path).seen(look.now) == look.now


@pytest.mark.parametrize(
    ("end", "own", "reached", "why_not"),
    [
        (9, 9, [7], None),
        (7, 9, [7], None),
        (5, 9, [], "only the entries up to seq 5 are here"),
        (5, 5, [], "what is here is older, and ends at 5 entries: that is no rollback by itself"),
        (5, 7, [], None),
    ],
)
def test_a_range_is_held_against_what_it_reaches_and_says_what_it_does_not(
    tmp_path: Path, end: int, own: int, reached: list[int], why_not: str | None
) -> None:
    key_id = SIGNER.public_key.key_id
    Memory.open(tmp_path).remember([seen(7, root_key=key_id)])
    memory, note = Memory.open(tmp_path), seen(own).note
    look = Observation.at(memory, "acme", note, RING, NOW, to_seq=end)
    assert ([head.size for head in look.heads], look.why_not) == (reached, why_not)
    assert Observation.at(memory, "acme", None, RING, NOW, to_seq=end).before == (), (
        "a range without a checkpoint is of no log"
    )
    whole = Observation.at(memory, "acme", note, RING, NOW)
    assert [(head.size, head.is_own) for head in whole.heads] == [(7, False), (own, True)]
    assert whole.why_not is None


def hash_of(key: PublicKey) -> bytes:
    return VerifierKey.of(ORIGIN, key).key_hash


def test_two_histories_of_one_size_are_never_both_remembered(tmp_path: Path) -> None:
    memory = Memory.open(tmp_path)
    memory.remember([seen(7)])
    with pytest.raises(SignatureError, match="two histories of 7 entries"):
        memory.remember([seen(7, root=2)])
    assert Memory.open(tmp_path).seen(seen(1)) == seen(7)


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "version", "form"])
def test_a_damaged_file_is_an_error_that_names_it_and_is_left_as_it_is(tmp_path: Path, damage: str) -> None:
    Memory.open(tmp_path).remember([seen(7)])
    path = tmp_path / "checkpoints.json"
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[data.index(b"\\n7\\n") + 2] ^= 1
    elif damage == "version":
        data = bytearray(json.dumps({**json.loads(data), "version": 2}).encode())
    else:
        data = {"cut": data[:-1], "empty": bytearray(), "form": bytearray(b"[]")}[damage]
    path.write_bytes(data)
    for use in (lambda: Memory.open(tmp_path), lambda: Memory(tmp_path, {}).remember([seen(8)])):
        with pytest.raises(ConfigurationError, match=str(path)):
            use()
    assert path.read_bytes() == data


def test_a_file_that_others_can_write_to_is_not_believed(tmp_path: Path) -> None:
    Memory.open(tmp_path).remember([seen(7)])
    (tmp_path / "checkpoints.json").chmod(0o620)
    with pytest.raises(ConfigurationError, match="others may have changed it"):
        Memory.open(tmp_path)


def test_a_full_memory_forgets_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memories, "LOGS_MAX", 2)
    memory = Memory.open(tmp_path)
    memory.remember(seen(1, origin=f"log.example/{name}") for name in "ab")
    with pytest.raises(ConfigurationError, match="--state DIR"):
        memory.remember([seen(1, origin="log.example/c")])
    memory.remember([seen(2, origin="log.example/b")])
    assert sorted(name for name, _ in Memory.open(tmp_path).logs) == ["log.example/a", "log.example/b"]


def test_a_ledger_of_very_many_tenants_is_remembered_and_looked_up_in_a_breath(tmp_path: Path) -> None:
    """Looking through all logs for each tenant would take many seconds."""
    one, count = seen(5), 2_000
    notes = [one.note.replace(ORIGIN, f"{ORIGIN}-{number}") for number in range(count)]
    logs = [Seen(note, one.root_key, one.seen_at) for note in notes]
    Memory.open(tmp_path).remember(logs)
    memory = Memory.open(tmp_path)
    began_s = time.thread_time()
    assert all(memory.seen(each) is not None for each in logs)
    assert all(memory.seen_of_tenant(f"nobody-{number}", RING) == [] for number in range(count))
    assert time.thread_time() - began_s < 1


def test_a_file_that_would_be_too_long_to_be_read_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory.open(tmp_path)
    memory.remember([seen(1)])
    monkeypatch.setattr(memories, "FILE_BYTES_MAX", (tmp_path / "checkpoints.json").stat().st_size + 10)
    with pytest.raises(ConfigurationError, match="--state DIR"):
        memory.remember([seen(1, origin="log.example/other")])
    memory.remember([seen(2)])
    assert Memory.open(tmp_path).seen(seen(1)) == seen(2)


def _remember_one(folder: Path, number: int) -> None:
    Memory.open(folder).remember([seen(number, origin=f"log.example/t{number}"), seen(number)])


def test_verifiers_side_by_side_do_not_overwrite_each_other(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_remember_one, args=(tmp_path, number)) for number in range(1, 9)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    memory = Memory.open(tmp_path)
    assert len(memory.logs) == 9
    assert memory.seen(seen(1)) == seen(8)


def test_a_folder_that_cannot_be_written_to_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="--no-state"):
        Memory.open(tmp_path / "file" / "state")
    with pytest.raises(ConfigurationError, match="cannot both"):
        memory_of(tmp_path, is_off=True)
    assert memory_of(None, is_off=True) is None


def test_the_folder_is_that_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_folder({"XDG_STATE_HOME": "/state"}) == Path("/state/tallystick")
    for value in ("", "relative"):
        assert user_folder({"XDG_STATE_HOME": value}) == tmp_path / ".local" / "state" / "tallystick"
