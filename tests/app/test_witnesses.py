"""Witnesses cosign checkpoints; what they sign is taken, kept and served, and nothing that only looks like it."""

from __future__ import annotations

import base64
import itertools
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.dev.embedded import EmbeddedPostgres
from signing.checkpoint import Checkpoint, open_checkpoint, sign_checkpoint
from signing.note import WitnessKey, cosignatures_of, parse
from signing.private_keys import load
from tests.app.service_thread import serving
from tests.app.witness import Witness
from tests.conftest import connected_to
from tests.tally import run_tally
from tests.waiting import until

ONE, TWO, STRANGER = Witness(), Witness("witness.example/w2", 2, is_ml_dsa=True), Witness("stranger.example", 3)
MANY = [Witness(f"witness.example/many{number}", number, is_ml_dsa=True) for number in range(10, 40)]
NOW_S = int(time.time())
NUMBERS = itertools.count(1)
PLAIN = {"content-type": "text/plain"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("witnesses")


@pytest.fixture(scope="module")
def client(postgres: EmbeddedPostgres, folder: Path) -> Iterator[httpx.Client]:
    settings = {
        "log": {"witnesses": [each.verifier_key for each in (ONE, TWO, *MANY)]},
        "chain": {"checkpoint_interval": "20ms"},
    }
    with serving(postgres, folder, "witnesses", **settings) as url, httpx.Client(base_url=url, timeout=30) as client:
        yield client


@pytest.fixture
def tenant(client: httpx.Client) -> str:
    """A tenant of the test's own, whose checkpoint covers two entries."""
    tenant_id = f"tenant-{next(NUMBERS)}"
    grow(client, tenant_id, 2)
    return tenant_id


def grow(client: httpx.Client, tenant_id: str, size: int) -> str:
    """Write until there are ``size`` entries; the checkpoint that covers them."""
    while True:
        head = client.get("/v1/chain/head", params={"tenant_id": tenant_id})
        have = head.json()["seq"] if head.status_code == 200 else 0
        if have == size:
            break
        client.post("/v1/jobs", json={"tenant_id": tenant_id, "job_id": f"j-{have}"}).raise_for_status()

    def signed() -> str | None:
        note = client.get(f"/v1/log/{tenant_id}/checkpoint")
        return note.text if note.status_code == 200 and int(note.text.split("\n")[1]) == size else None

    note: str = until(signed, f"a checkpoint of {size} entries is signed")
    return note


def checkpoint(client: httpx.Client, tenant_id: str, **params: str) -> str:
    return client.get(f"/v1/log/{tenant_id}/checkpoint", params=params).raise_for_status().text


def send(client: httpx.Client, tenant_id: str, note: str | bytes) -> httpx.Response:
    return client.post(f"/v1/log/{tenant_id}/cosignatures", content=note, headers=PLAIN)


def stored(client: httpx.Client, tenant_id: str) -> list[dict[str, Any]]:
    return client.get(f"/v1/log/{tenant_id}/cosignatures").raise_for_status().json()["items"]


def witnesses_of(note: str) -> list[str]:
    keys = [WitnessKey.parse(each.verifier_key) for each in (ONE, TWO, STRANGER)]
    return [each.witness.name for each in cosignatures_of(parse(note), keys)]


def test_a_cosigned_checkpoint_is_kept_and_served_with_its_cosignatures(client: httpx.Client, tenant: str) -> None:
    answer = send(client, tenant, ONE.watch(client, tenant, NOW_S - 60))
    assert answer.status_code == 201
    assert (answer.json()["tree_size"], len(answer.json()["added"])) == (2, 1)
    assert witnesses_of(checkpoint(client, tenant)) == [ONE.name]
    # A second witness sends what it was served, the first one's cosignature too.
    again = send(client, tenant, TWO.watch(client, tenant, NOW_S - 50))
    assert [each["witness"] for each in again.json()["added"]] == [TWO.verifier_key]
    note = checkpoint(client, tenant)
    assert witnesses_of(note) == [ONE.name, TWO.name]
    verifier_keys = client.get("/v1/keys", params={"tenant_id": tenant}).json()["log_verifier_keys"]
    assert open_checkpoint(note, verifier_keys).size == 2
    assert [(each["tree_size"], each["status"]) for each in stored(client, tenant)] == [(2, "ok"), (2, "ok")]


def test_a_note_has_room_for_a_cosignature_of_each_witness_with_an_ml_dsa_key(
    client: httpx.Client, tenant: str
) -> None:
    note = checkpoint(client, tenant)
    for each in MANY:
        note = each.cosign(note, NOW_S - 60)
    assert len(send(client, tenant, note).json()["added"]) == len(MANY)
    assert checkpoint(client, tenant).count("\n") == note.count("\n")


def test_the_newest_cosigned_checkpoint_stays_at_hand_while_the_log_grows(client: httpx.Client, tenant: str) -> None:
    assert client.get(f"/v1/log/{tenant}/checkpoint", params={"cosigned": "true"}).status_code == 404
    assert send(client, tenant, ONE.watch(client, tenant, NOW_S - 60)).status_code == 201
    old = checkpoint(client, tenant)
    grow(client, tenant, 5)
    assert witnesses_of(checkpoint(client, tenant)) == []
    assert checkpoint(client, tenant, cosigned="true") == old
    # The witness proves to itself that the log only grew, and cosigns again.
    assert send(client, tenant, ONE.watch(client, tenant, NOW_S - 30)).status_code == 201
    assert checkpoint(client, tenant, cosigned="true") == checkpoint(client, tenant) != old
    later = send(client, tenant, ONE.cosign(checkpoint(client, tenant), NOW_S - 20))
    assert later.status_code == 201, "the same tree, seen again later"
    assert len(witnesses_of(checkpoint(client, tenant))) == 1


def refused(client: httpx.Client, tenant_id: str, note: str | bytes, kind: str = "cosignature-refused") -> None:
    before = stored(client, tenant_id)
    answer = send(client, tenant_id, note)
    assert answer.status_code in (400, 422), answer.text
    assert answer.json()["type"].endswith(f"/{kind}"), answer.text
    assert stored(client, tenant_id) == before


def test_what_no_registered_witness_cosigned_is_refused(client: httpx.Client, tenant: str) -> None:
    note = checkpoint(client, tenant)
    refused(client, tenant, note)
    refused(client, tenant, STRANGER.cosign(note, NOW_S))
    # Another key under a registered name is a stranger too.
    refused(client, tenant, Witness(ONE.name, 9).cosign(note, NOW_S))


def test_a_cosignature_that_does_not_hold_is_refused(client: httpx.Client, tenant: str) -> None:
    note = checkpoint(client, tenant)
    text = note.rpartition("\n\n")[0] + "\n"
    line = ONE.line(text, NOW_S)
    raw = bytearray(base64.b64decode(line.split(" ")[2]))
    for changed in (4 + 7, 4 + 8, len(raw) - 1):
        forged = bytearray(raw)
        forged[changed] ^= 1
        refused(client, tenant, f"{note}\u2014 {ONE.name} {base64.b64encode(forged).decode()}\n")
    refused(client, tenant, f"{note}\u2014 {ONE.name} {base64.b64encode(raw[:-1]).decode()}\n")
    # One bad cosignature of a registered witness spoils the note, though the other holds.
    refused(client, tenant, TWO.cosign(note, NOW_S) + f"\u2014 {ONE.name} {base64.b64encode(forged).decode()}\n")
    # The cosignature of another text.
    refused(client, tenant, note + ONE.line(text.replace("\n2\n", "\n1\n"), NOW_S))


def test_a_checkpoint_that_this_log_did_not_sign_is_refused(client: httpx.Client, tenant: str, folder: Path) -> None:
    note = checkpoint(client, tenant)
    text, _, _ = note.rpartition("\n\n")
    refused(client, tenant, ONE.cosign(note.replace("\n2\n", "\n1\n", 1), NOW_S))
    refused(client, tenant, f"{text}\n\n{ONE.line(text + chr(10), NOW_S)}")
    # Signed with the log's own key, as a stolen key would: another root, a size the log never had, another log.
    key = load(f"file:{folder / 'keys' / 'signing.pem'}")
    origin, size, root = text.split("\n")
    true_root = base64.b64decode(root)
    for forged in (
        Checkpoint(origin, 2, bytes(32)),
        Checkpoint(origin, 1, true_root),
        Checkpoint(origin, 3, true_root),
        Checkpoint(origin, 0, true_root),
        Checkpoint(origin + "x", 2, true_root),
    ):
        refused(client, tenant, ONE.cosign(sign_checkpoint(forged, key), NOW_S))
    assert sign_checkpoint(Checkpoint(origin, int(size), true_root), key) == note
    grow(client, f"{tenant}b", 2)
    refused(client, f"{tenant}b", ONE.cosign(note, NOW_S))


def test_a_cosignature_sent_again_or_older_than_the_last_adds_nothing(client: httpx.Client, tenant: str) -> None:
    old = ONE.cosign(checkpoint(client, tenant), NOW_S - 60)
    assert send(client, tenant, old).status_code == 201
    refused(client, tenant, old)
    refused(client, tenant, ONE.cosign(old.rpartition("\u2014")[0], NOW_S - 61))
    new = grow(client, tenant, 3)
    assert send(client, tenant, ONE.cosign(new, NOW_S - 59)).status_code == 201
    refused(client, tenant, ONE.cosign(old.rpartition("\u2014")[0], NOW_S - 10))


def test_a_cosignature_from_the_future_is_refused(client: httpx.Client, tenant: str) -> None:
    refused(client, tenant, ONE.cosign(checkpoint(client, tenant), int(time.time()) + 3600), "clock-skew")
    refused(client, tenant, ONE.cosign(checkpoint(client, tenant), 2**63 - 1))
    refused(client, tenant, ONE.cosign(checkpoint(client, tenant), 2**64 - 1))


@pytest.mark.parametrize("garbage", [b"", b"\xff\xfe", b"a\n\n\xe2\x80\x94 b c\n", b"\n\n\n", b"x" * 16_384, b"\x00"])
def test_garbage_is_refused(client: httpx.Client, tenant: str, garbage: bytes) -> None:
    refused(client, tenant, garbage)


def test_a_note_that_is_too_long_or_of_another_kind_is_refused(client: httpx.Client, tenant: str) -> None:
    assert send(client, tenant, b"x" * (128 * 1024 + 1)).status_code == 413
    answer = client.post(f"/v1/log/{tenant}/cosignatures", json={"note": "x"})
    assert answer.status_code == 415
    assert send(client, "nobody", ONE.cosign(checkpoint(client, tenant), NOW_S)).status_code == 404


async def test_a_stored_cosignature_that_does_not_hold_is_reported_and_not_served(
    client: httpx.Client, tenant: str, postgres: EmbeddedPostgres
) -> None:
    note = checkpoint(client, tenant)
    assert send(client, tenant, ONE.cosign(note, NOW_S - 9)).status_code == 201
    async with connected_to(postgres.superuser_url("witnesses")) as superuser:
        for witness, forged in (
            (TWO, Witness(TWO.name, 9).cosign(note, NOW_S)),
            (STRANGER, STRANGER.cosign(note, NOW_S)),
            (TWO, "no note"),
        ):
            await superuser.execute(
                "INSERT INTO scheduler.checkpoint_cosignature (tenant_id, witness, tree_size, cosigned_at, note)"
                " VALUES ($1, $2, 2, now(), $3)",
                tenant,
                witness.verifier_key,
                forged,
            )
    assert [each["status"] for each in stored(client, tenant)] == ["broken", "unknown_key", "broken", "ok"]
    assert witnesses_of(checkpoint(client, tenant)) == [ONE.name]
    assert checkpoint(client, tenant, cosigned="true") == checkpoint(client, tenant)


def test_cosignatures_are_listed_page_by_page(client: httpx.Client, tenant: str) -> None:
    note = checkpoint(client, tenant)
    for ago_s in (5, 4, 3):
        assert send(client, tenant, ONE.cosign(note, NOW_S - ago_s)).status_code == 201
    first = client.get(f"/v1/log/{tenant}/cosignatures", params={"limit": 2}).json()
    rest = client.get(f"/v1/log/{tenant}/cosignatures", params={"cursor": first["next_cursor"]}).json()
    times = [each["time"] for each in first["items"] + rest["items"]]
    assert len(times) == 3
    assert times == sorted(times, reverse=True)
    assert rest["next_cursor"] is None


def tally(client: httpx.Client, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_tally(*arguments, "--url", str(client.base_url))


def test_tally_adds_and_lists_witnesses(client: httpx.Client, tenant: str, tmp_path: Path) -> None:
    file = tmp_path / "cosigned"
    file.write_text(ONE.watch(client, tenant, NOW_S - 5))
    assert "tally witness add" in tally(client, "witness", "list", "-t", tenant).stdout
    other = tally(client, "witness", "add", "-t", tenant, "--verifier-key", TWO.verifier_key, str(file))
    assert other.returncode == 4, other.stderr
    assert stored(client, tenant) == []
    added = tally(client, "witness", "add", "-t", tenant, "--verifier-key", ONE.verifier_key, str(file), "--json")
    assert added.returncode == 0, added.stderr
    assert json.loads(added.stdout)["tree_size"] == 2
    listed = tally(client, "witness", "list", "-t", tenant, "--json")
    assert [each["status"] for each in json.loads(listed.stdout)["items"]] == ["ok"]
    assert ONE.name in tally(client, "witness", "list", "-t", tenant).stdout
    file.write_text(file.read_text().replace("\n2\n", "\n1\n", 1))
    forged = tally(client, "witness", "add", "-t", tenant, "--verifier-key", ONE.verifier_key, str(file))
    assert forged.returncode == 2, forged.stderr
