"""Two signatures under one snapshot and one checkpoint: each that is known must hold, and both may be demanded."""

from __future__ import annotations

import base64
import hashlib
import json
import pickle
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import mldsa

from ledger.errors import ConfigurationError, InvalidInputError, SignatureError, UnknownKeyError
from ledger.hlc import Hlc
from ledger.verification.snapshot_check import SnapshotClaim
from signing import note
from signing.checkpoint import Checkpoint, open_checkpoint, sign_checkpoint, signed_by
from signing.keys import Keyring, PublicKey
from signing.note import VerifierKey, WitnessKey, cosignatures_of
from signing.policy import Policy
from signing.private_keys import FileSigner, generate, load, second_signer
from signing.snapshot import open_snapshot, sign_snapshot

HEAD = Checkpoint("log.example/acme", 3, bytes(range(32)))
ClaimOf = Callable[..., SnapshotClaim]


@pytest.fixture
def ring(ed25519_signer: FileSigner, second_signer: FileSigner) -> Keyring:
    return Keyring([ed25519_signer.public_key, second_signer.public_key])


@pytest.fixture
def checkpoint(ed25519_signer: FileSigner, second_signer: FileSigner) -> str:
    return sign_checkpoint(HEAD, ed25519_signer, second_signer)


def with_line(text: str, number: int, change: Callable[[bytearray], object]) -> str:
    """The note with one signature line changed."""
    parsed = note.parse(text)
    lines = list(parsed.signatures)
    data = bytearray(lines[number].signature)
    change(data)
    lines[number] = lines[number]._replace(signature=bytes(data))
    return parsed._replace(signatures=tuple(lines)).encode()


def flip_last(data: bytearray) -> None:
    data[-1] ^= 1


# Checkpoints


def test_the_second_line_is_a_cosignature_of_type_6_over_the_tree_head(
    checkpoint: str, second_signer: FileSigner
) -> None:
    """Made again here, from the text of c2sp.org/tlog-cosignature."""
    name = HEAD.origin.encode()
    raw = second_signer.public_key.raw()
    line = note.parse(checkpoint).signatures[1]
    assert (line.name, line.key_hash) == (HEAD.origin, hashlib.sha256(name + b"\n\x06" + raw).digest()[:4])
    assert (len(raw), len(line.signature), line.signature[:8]) == (1312, 8 + 2420, bytes(8))
    message = b"subtree/v1\n\0" + bytes([len(name)]) + name + bytes(8)
    message += bytes([len(name)]) + name + bytes(8) + (3).to_bytes(8, "big") + HEAD.root
    mldsa.MLDSA44PublicKey.from_public_bytes(raw).verify(line.signature[8:], message)


def test_a_checkpoint_opens_with_either_key_and_with_both(checkpoint: str, ring: Keyring) -> None:
    for keys in (ring, ring.demanding_both(), *(Keyring([key]) for key in ring)):
        assert open_checkpoint(checkpoint, keys, origin=HEAD.origin) == HEAD
    for key in ring:
        assert open_checkpoint(checkpoint, [VerifierKey.of(HEAD.origin, key).text()]) == HEAD


@pytest.mark.parametrize("number", [0, 1])
def test_a_line_of_a_held_key_that_does_not_hold_spoils_the_checkpoint(
    checkpoint: str, ring: Keyring, number: int
) -> None:
    for change in (flip_last, lambda data: data.pop(), lambda data: data.append(0)):
        spoiled = with_line(checkpoint, number, change)
        with pytest.raises(SignatureError):
            open_checkpoint(spoiled, ring)
        assert open_checkpoint(spoiled, Keyring([list(ring)[1 - number]])) == HEAD


def test_a_second_signature_holds_for_one_log_one_size_one_root_and_one_time(checkpoint: str, ring: Keyring) -> None:
    second = Keyring([list(ring)[1]])
    text, _, lines = checkpoint.rpartition("\n\n")
    for changed in (text.replace("\n3\n", "\n4\n"), text.replace("AAEC", "AAEB")):
        assert changed != text
        with pytest.raises(SignatureError, match="does not hold"):
            open_checkpoint(f"{changed}\n\n{lines}", second)
    with pytest.raises(SignatureError, match="does not hold"):
        open_checkpoint(with_line(checkpoint, 1, lambda data: data.__setitem__(7, 9)), second)
    with pytest.raises(SignatureError, match="names no time"):
        open_checkpoint(with_line(checkpoint, 1, lambda data: data.__setitem__(0, 0x7F)), second)


def test_where_both_are_demanded_a_stripped_checkpoint_is_vouched_for_by_no_key(checkpoint: str, ring: Keyring) -> None:
    """As by an attacker who has broken Ed25519 alone: without the demand nothing is found."""
    parsed = note.parse(checkpoint)
    for number, lacking in ((0, "ml-dsa-44"), (1, "first key")):
        stripped = parsed._replace(signatures=(parsed.signatures[number],)).encode()
        assert open_checkpoint(stripped, ring) == HEAD
        with pytest.raises(UnknownKeyError, match=lacking):
            open_checkpoint(stripped, ring.demanding_both())


def test_where_both_are_demanded_a_revoked_second_key_and_another_log_s_do_not_count(
    checkpoint: str, ring: Keyring, second_signer: FileSigner, ed25519_signer: FileSigner
) -> None:
    first, second = ring
    revoked = Keyring([first, replace(second, revoked_from_hlc=Hlc(1, 0, "n"))])
    assert open_checkpoint(checkpoint, revoked) == HEAD
    with pytest.raises(UnknownKeyError, match="ml-dsa-44"):
        open_checkpoint(checkpoint, revoked.demanding_both())
    parsed = note.parse(sign_checkpoint(HEAD, ed25519_signer))
    strange = VerifierKey.of("log.example/other", second).line(parsed.text, second_signer)
    elsewhere = Keyring([first, second], [VerifierKey.of("log.example/other", first).text()]).demanding_both()
    with pytest.raises(UnknownKeyError, match="ml-dsa-44"):
        open_checkpoint(parsed._replace(signatures=(*parsed.signatures, strange)).encode(), elsewhere)


def test_the_lines_of_a_log_are_kept_and_others_left_out(checkpoint: str, ring: Keyring) -> None:
    assert signed_by(checkpoint + "— someone YWJjZGVm\n", ring) == checkpoint


def test_an_origin_too_long_for_the_message_is_signed_by_first_keys_alone(
    ring: Keyring, ed25519_signer: FileSigner, second_signer: FileSigner
) -> None:
    head = HEAD._replace(origin="o" * 256)
    assert open_checkpoint(sign_checkpoint(head, ed25519_signer), ring) == head
    with pytest.raises(InvalidInputError, match="longer than 255"):
        sign_checkpoint(head, ed25519_signer, second_signer)
    named = VerifierKey.of("short.example", second_signer.public_key)
    with pytest.raises(SignatureError, match="255 bytes"):
        named.line(f"{'o' * 256}\n3\n{base64.b64encode(HEAD.root).decode()}\n", second_signer)


def test_a_text_that_is_no_checkpoint_is_not_signed_by_a_second_key(second_signer: FileSigner) -> None:
    with pytest.raises(SignatureError, match="signs checkpoints"):
        note.sign("a text\n", "log", second_signer)


# Snapshots


def test_a_snapshot_is_judged_by_each_key_that_is_held(
    claim_of: ClaimOf, signer: FileSigner, second_signer: FileSigner
) -> None:
    made, _ = sign_snapshot(claim_of(signer), signer, second_signer)
    text, ring = json.dumps(made), Keyring([signer.public_key, second_signer.public_key])
    for keys in (ring, ring.demanding_both(), *(Keyring([key]) for key in ring)):
        assert open_snapshot(text, keys).verdict == "ok"
    for number in (0, 1):
        spoiled = json.loads(text)
        raw = bytearray(base64.b64decode(spoiled["signatures"][number]["sig"]))
        raw[-1] ^= 1
        spoiled["signatures"][number]["sig"] = base64.b64encode(raw).decode()
        found = open_snapshot(json.dumps(spoiled), ring)
        assert (found.verdict, "does not hold" in str(found.detail)) == ("broken", True)
    assert open_snapshot(text, Keyring([second_signer.public_key])).claim.key_id == signer.key_id


def test_where_both_are_demanded_a_snapshot_with_one_lacks_the_other(
    claim_of: ClaimOf, signer: FileSigner, second_signer: FileSigner
) -> None:
    made, _ = sign_snapshot(claim_of(signer), signer, second_signer)
    ring = Keyring([signer.public_key, second_signer.public_key])
    for number in (0, 1):
        stripped = json.dumps({**made, "signatures": [made["signatures"][number]]})
        if number == 0:
            assert open_snapshot(stripped, ring).verdict == "ok"
            assert open_snapshot(stripped, ring.demanding_both()).verdict == "lacks_one"
        else:
            assert open_snapshot(stripped, ring.demanding_both()).verdict == "broken"


def test_a_second_key_counts_within_its_own_window(
    claim_of: ClaimOf, signer: FileSigner, second_signer: FileSigner
) -> None:
    claim = claim_of(signer)
    made, _ = sign_snapshot(claim, signer, second_signer)
    revoked = replace(second_signer.public_key, revoked_from_hlc=Hlc.parse(claim.snapshot_hlc))
    ring = Keyring([signer.public_key, revoked])
    assert open_snapshot(json.dumps(made), ring).verdict == "ok"
    assert open_snapshot(json.dumps(made), ring.demanding_both()).verdict == "lacks_one"
    assert open_snapshot(json.dumps(made), Keyring([revoked])).verdict == "unknown_key"


# Keys


def test_a_saved_ring_keeps_second_keys_apart_so_that_earlier_releases_read_the_rest(ring: Keyring) -> None:
    first, second = ring
    saved = ring.to_json()
    assert [key["key_id"] for key in saved["keys"]] == [first.key_id]
    assert [key["key_id"] for key in saved["second_keys"]] == [second.key_id]
    assert [*Keyring.from_json(json.loads(json.dumps(saved)))] == [first, second]
    assert "second_keys" not in Keyring([first]).to_json()
    assert [*Keyring.of(first.public_key_pem + second.public_key_pem)] == [first, second]


def test_the_demand_for_both_needs_a_second_key_and_travels_with_the_ring(ring: Keyring) -> None:
    with pytest.raises(ConfigurationError, match="none of the keys is ml-dsa-44"):
        Keyring([next(iter(ring))]).demanding_both()
    assert pickle.loads(pickle.dumps(ring.demanding_both())).needs_both
    assert not pickle.loads(pickle.dumps(ring)).needs_both


def test_a_second_key_in_a_file_signs_as_a_second_key_alone(tmp_path) -> None:
    made = second_signer(f"file:{tmp_path}/second.pem", may_generate=True)
    again = second_signer(f"file:{tmp_path}/second.pem", may_generate=False)
    assert (made.algorithm, made.path.stat().st_mode & 0o777) == ("ml-dsa-44", 0o600)
    assert again.key_id == made.key_id
    assert made.public_key.made(again.sign(b"message"), b"message")
    with pytest.raises(ConfigurationError, match="key of ml-dsa-44, not of ed25519"):
        load(f"file:{tmp_path}/second.pem")
    generate(tmp_path / "first.pem")
    with pytest.raises(ConfigurationError, match="key of ed25519, not of ml-dsa-44"):
        second_signer(f"file:{tmp_path}/first.pem", may_generate=True)
    made.path.chmod(0o640)
    with pytest.raises(ConfigurationError, match="mode 0640"):
        second_signer(f"file:{tmp_path}/second.pem", may_generate=True)


# Witnesses


def test_a_witness_with_an_ml_dsa_key_cosigns_a_tree_for_a_time(checkpoint: str, second_signer: FileSigner) -> None:
    witness = WitnessKey.of("witness.example/w1", second_signer.public_key)
    assert WitnessKey.parse(witness.text()) == witness
    parsed = note.parse(checkpoint)
    line = witness.line(parsed.text, second_signer, 1_700_000_000)
    cosigned = parsed._replace(signatures=(*parsed.signatures, line))
    (found,) = cosignatures_of(cosigned, [witness])
    assert (found.witness, found.time.timestamp()) == (witness, 1_700_000_000)
    for spoiled in (
        with_line(cosigned.encode(), 2, lambda data: data.__setitem__(7, data[7] ^ 1)),
        cosigned.encode().replace("\n3\n", "\n4\n", 1),
    ):
        with pytest.raises(SignatureError, match="does not hold"):
            cosignatures_of(note.parse(spoiled), [witness])


def test_a_policy_names_witnesses_and_logs_by_keys_of_both_kinds(ring: Keyring) -> None:
    first, second = ring
    old, new = (WitnessKey.of("witness.example", key).text() for key in ring)
    logs = [VerifierKey.of("log.example/acme", key).text() for key in ring]
    policy = Policy.parse(
        f"log {logs[0]}\nlog {logs[1]}\nwitness w1 {old}\nwitness w2 {new}\ngroup g all w1 w2\nquorum g"
    )
    assert [each.key.public_key.key_id for each in policy.witnesses.values()] == [first.key_id, second.key_id]
    assert policy.judge({old: 5, new: 4}, 5).missing == ("w2: has cosigned 4 of 5 entries",)
    with pytest.raises(InvalidInputError, match="count twice"):
        Policy.parse(f"witness w1 {new}\nwitness w2 {new}\nquorum w1")
    with pytest.raises(InvalidInputError, match="not of type 4, ed25519 or 6, ml-dsa-44"):
        Policy.parse(f"witness w1 {logs[0]}\nquorum w1")
    with pytest.raises(InvalidInputError, match="not of type 1, ed25519 or 6, ml-dsa-44"):
        Policy.parse(f"log {old}\nquorum none")


@pytest.mark.parametrize("cut", [1, 0])
def test_a_verifier_key_of_another_length_than_its_type_s_is_refused(second_signer: FileSigner, cut: int) -> None:
    typed = b"\x06" + second_signer.public_key.raw()
    changed = typed[:-1] if cut else typed + b"\0"
    key_hash = hashlib.sha256(b"w\n" + changed).digest()[:4].hex()
    with pytest.raises(InvalidInputError, match="not of type"):
        WitnessKey.parse(f"w+{key_hash}+{base64.b64encode(changed).decode()}")


def test_public_keys_of_one_length_have_one_id(second_signer: FileSigner) -> None:
    again = PublicKey.of_raw(second_signer.public_key.raw(), "ml-dsa-44")
    assert again == second_signer.public_key
    with pytest.raises(InvalidInputError, match="not an ml-dsa-44"):
        PublicKey.of_raw(bytes(32), "ml-dsa-44")


# Programs of others


@pytest.mark.torture
@pytest.mark.foreign
def test_go_opens_a_checkpoint_by_the_first_key_alone_and_by_both(
    checkpoint: str, ring: Keyring, tmp_path: Path
) -> None:
    """golang.org/x/mod passes over the line of a type that it does not know; filippo.io/mldsa verifies it."""
    go = shutil.which("go")
    assert go is not None, "install Go 1.25 or newer: it opens checkpoints as others do"
    shutil.copy(Path(__file__).with_name("note_judge.go"), tmp_path)
    (tmp_path / "go.mod").write_text("module judge\n\ngo 1.25.0\n")
    modules = ("golang.org/x/mod@v0.31.0", "filippo.io/mldsa@v1.0.0")
    subprocess.run([go, "get", *modules], cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "checkpoint").write_text(checkpoint)
    first, second = (VerifierKey.of(HEAD.origin, key).text() for key in ring)

    def judged(text: str, *keys: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "checkpoint").write_text(text)
        command = [go, "run", ".", "checkpoint", *keys]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert judged(checkpoint, first, second).stdout.split("\n")[:2] == ["1 1", "2 0"]
    spoiled = judged(with_line(checkpoint, 1, flip_last), first, second)
    assert (spoiled.stdout.split("\n")[0], "invalid signature" in spoiled.stderr) == ("1 1", True), spoiled.stderr
