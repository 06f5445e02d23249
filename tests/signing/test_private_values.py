"""Keys of private values, and the master key that wraps them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger import canonical
from ledger.errors import ConfigurationError, PrivateValueError
from ledger.private_fields import SealedValue, associated_data, from_json, to_json
from signing.private_keys import KEY_BYTES, DataKey, MasterKey, new_key_id, new_secret
from tests.ledger.test_private_fields import VALUES

SECRET = bytes(range(KEY_BYTES))
KEY = DataKey("ab" * 16, SECRET)
AT = associated_data("acme", "1:0:n", KEY.key_id, ("spec", "user"))


@given(VALUES, st.lists(st.text(max_size=4), min_size=1, max_size=3))
def test_any_value_comes_back_from_the_field_it_was_sealed_for(value: object, path: list[str]) -> None:
    path = [name.replace("\0", "").encode("utf-8", "replace").decode() for name in path]
    plaintext = canonical.encode(value)
    at = associated_data("acme", "1:0:n", KEY.key_id, path)
    stored = canonical.encode(to_json(KEY.seal(plaintext, at)))
    sealed = from_json(orjson.loads(stored))
    assert sealed is not None
    assert DataKey(KEY.key_id, SECRET).open(sealed, at) == plaintext
    with pytest.raises(PrivateValueError):
        KEY.open(sealed, associated_data("acme", "1:0:n", KEY.key_id, [*path, "x"]))


@given(st.binary(min_size=1, max_size=40), st.data())
def test_one_changed_bit_and_nothing_opens(plaintext: bytes, data: st.DataObject) -> None:
    sealed = KEY.seal(plaintext, AT)
    part = data.draw(st.sampled_from(["nonce", "ciphertext"]))
    given_bytes = bytearray(getattr(sealed, part))
    bit = data.draw(st.integers(0, len(given_bytes) * 8 - 1))
    given_bytes[bit // 8] ^= 1 << bit % 8
    with pytest.raises(PrivateValueError):
        KEY.open(sealed._replace(**{part: bytes(given_bytes)}), AT)
    with pytest.raises(PrivateValueError):
        KEY.open(SealedValue(sealed.key_id, sealed.nonce, sealed.ciphertext[:-1]), AT)
    with pytest.raises(PrivateValueError):
        DataKey(KEY.key_id, new_secret()).open(sealed, AT)


def test_the_same_value_is_never_sealed_alike_and_keys_do_not_show_themselves() -> None:
    assert len({KEY.seal(b"1", AT).ciphertext for _ in range(50)}) == 50
    assert len({new_key_id() for _ in range(50)}) == 50
    assert SECRET.hex() not in repr(KEY)
    assert "ab" * 16 in repr(KEY)


def test_a_master_key_opens_what_it_wrapped_for_the_same_thing_only(tmp_path: Path) -> None:
    master = MasterKey.generate(f"file:{tmp_path}/keys/master.key")
    assert stat.S_IMODE(os.stat(tmp_path / "keys" / "master.key").st_mode) == 0o600
    again = MasterKey.load_or_generate(str(tmp_path / "keys" / "master.key"))
    assert again.master_key_id == master.master_key_id
    wrapped = master.wrap(SECRET, b"acme/one")
    assert again.unwrap(wrapped, b"acme/one") == SECRET
    assert SECRET not in wrapped
    other = MasterKey.load_or_generate(f"file:{tmp_path}/other.key")
    assert other.master_key_id != master.master_key_id
    for key, changed, context in (
        (other, wrapped, b"acme/one"),
        (master, wrapped, b"acme/two"),
        (master, wrapped[:-1] + bytes([wrapped[-1] ^ 1]), b"acme/one"),
        (master, b"", b"acme/one"),
    ):
        with pytest.raises(PrivateValueError):
            key.unwrap(changed, context)


def test_a_file_that_holds_no_master_key_or_is_open_to_others_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "master.key"
    with pytest.raises(ConfigurationError, match="cannot be read"):
        MasterKey.load(str(path))
    for content in (
        b"",
        b"tallystick-master-key-1 AAAA\n",
        b"tallystick-master-key-1 ?\n",
        b"-----BEGIN",
        b"x" * 99999,
    ):
        path.unlink(missing_ok=True)
        path.touch(0o600)
        path.write_bytes(content)
        with pytest.raises(ConfigurationError, match=str(path)):
            MasterKey.load(str(path))
    path.unlink()
    MasterKey.generate(str(path))
    with pytest.raises(ConfigurationError, match="exists already"):
        MasterKey.generate(str(path))
    path.chmod(0o640)
    with pytest.raises(ConfigurationError, match="others"):
        MasterKey.load_or_generate(str(path))
    with pytest.raises(ConfigurationError, match="not supported"):
        MasterKey.load("awskms:alias/tally")
