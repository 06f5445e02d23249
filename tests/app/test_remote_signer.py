"""Signing with a key in an HSM (SoftHSM): as with a file, and when the HSM is away only snapshots wait."""

from __future__ import annotations

import asyncio
import json
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import asyncpg
import pkcs11
import pytest
from pkcs11 import Attribute, KeyType
from pkcs11.util.ec import encode_named_curve_parameters
from securesystemslib.dsse import Envelope
from securesystemslib.signer import SSlibKey

from app.runtime.settings.config import Settings
from app.trust import key_in_use as in_use
from ledger.errors import ConfigurationError, SignerAwayError, SigningUnavailableError
from signing import private_keys
from signing.keys import Keyring, material_of
from signing.snapshot import open_snapshot
from tests.app.admitting import start_recorded
from tests.app.chains import UNTIL_S, until
from tests.app.conftest import MakeSettings, RunNode, RunServer
from tests.app.drafts import created
from tests.app.starting import assert_no_start
from tests.app.test_key_changes import (
    add_jobs,
    keys_of,
    problem,
    rotate,
    sign,
    signer_of,
    signing_key,
    verdict_of,
)
from tests.conftest import Database

LIBRARY = "/usr/lib/softhsm/libsofthsm2.so"
PIN = "1234"


class Token:
    """An initialised token in a folder, which can be taken away and brought back."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._away = folder.with_name("away")

    def make_key(self, key_number: int, curve: str = "secp256r1") -> str:
        """Make a key pair in the token; its URI."""
        with pkcs11.lib(LIBRARY).get_token(token_label="ledger").open(rw=True, user_pin=PIN) as session:
            parameters = {Attribute.EC_PARAMS: encode_named_curve_parameters(curve)}
            domain = session.create_domain_parameters(KeyType.EC, parameters, local=True)
            domain.generate_keypair(store=True, id=bytes([key_number]), label=f"key {key_number}")
        return f"hsm:{key_number}?label=ledger"

    def take_away(self) -> None:
        self._folder.rename(self._away)

    def bring_back(self) -> None:
        self._away.rename(self._folder)


@pytest.fixture
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Token:
    folder = tmp_path / "tokens"
    folder.mkdir()
    configuration = tmp_path / "softhsm2.conf"
    configuration.write_text(f"directories.tokendir = {folder}\nobjectstore.backend = file\nlog.level = ERROR\n")
    monkeypatch.setenv("SOFTHSM2_CONF", str(configuration))
    monkeypatch.setenv("PYKCS11LIB", LIBRARY)
    initialise = ["softhsm2-util", "--init-token", "--free", "--label", "ledger", "--so-pin", "0000", "--pin", PIN]
    subprocess.run(initialise, check=True, capture_output=True)
    pkcs11.lib(LIBRARY).reinitialize()
    return Token(folder)


@pytest.fixture
def settings_of(make_settings: MakeSettings) -> Callable[..., Settings]:
    """Settings of a node that signs with the key at a URI, with small snapshots."""

    def make(uri: str, **more: Any) -> Settings:
        return make_settings(signing={"key_uri": uri, "pin": PIN}, chain={"batch_size": 5, "batch_interval": "1h"})

    return make


async def test_snapshots_of_a_key_in_an_hsm_verify_here_and_with_securesystemslib(
    run_server: RunServer, settings_of: Callable[..., Settings], token: Token
) -> None:
    async with run_server(settings_of(token.make_key(2))) as client:
        await add_jobs(client, 2)
        snapshot = await sign(client)
        keys = (await client.get("/v1/keys")).json()
        verdict = await verdict_of(client)
        log_key = next(key for key in keys["keys"] if key["signs_checkpoints"])
    envelope = snapshot["dsse_envelope"]
    key = next(key for key in keys["keys"] if key["key_id"] == signer_of(snapshot))
    assert (key["algorithm"], log_key["algorithm"], verdict["valid"]) == ("ecdsa-p256", "ed25519", True)
    assert open_snapshot(json.dumps(envelope), Keyring.from_json(keys)).verdict == "ok"
    held = SSlibKey.from_crypto(material_of(key["public_key_pem"]), keyid=key["key_id"])
    assert Envelope.from_dict(json.loads(json.dumps(envelope))).verify([held], 1)


async def test_while_the_hsm_is_away_all_but_snapshots_goes_on_and_they_catch_up(
    run_server: RunServer, settings_of: Callable[..., Settings], token: Token
) -> None:
    async with run_server(settings_of(token.make_key(2))) as client:
        # Without the word of the key in the HSM the one that signs checkpoints would not be admitted.
        await start_recorded(client)
        await add_jobs(client, 1)
        await sign(client)
        token.take_away()

        await add_jobs(client, 20)
        refused = await client.post("/v1/snapshots", json={"tenant_id": "acme"})
        assert problem(refused) == (503, "signing-unavailable")
        assert "Retry-After" in refused.headers
        ready = await client.get("/readyz")
        assert (ready.status_code, ready.json()["checks"]["signing"]["ok"]) == (200, False)
        assert "scheduler_signing_failures_total 0.0" not in (await client.get("/metrics")).text
        await until(lambda: covers(client, 21), "checkpoints go on")

        token.bring_back()
        await until(lambda: signed_to(client, 21), "full batches are signed by themselves")
        ready = await client.get("/readyz")
        verdict = await verdict_of(client)
    assert ready.json()["checks"]["signing"]["ok"]
    assert (verdict["valid"], verdict["signed_to_seq"]) == (True, 21)


async def covers(client: Any, size: int) -> bool:
    """Whether the served checkpoint has that many entries."""
    return (await client.get("/v1/log/acme/checkpoint")).text.split("\n")[1] == str(size)


async def signed_to(client: Any, seq: int) -> bool:
    """Whether snapshots reach entry ``seq``, none of which was asked for."""
    return (await verdict_of(client))["signed_to_seq"] == seq


async def test_the_storing_of_an_earlier_signature_does_not_end_the_fault_of_the_signer(
    run_node: RunNode, settings_of: Callable[..., Settings], token: Token, database: Database
) -> None:
    async with run_node(settings_of(token.make_key(2))) as service:
        await service.key_changes.recorded.wait()
        await service.submitter.submit(created("acme", 1), key=None)
        keys, connection = service.keys, await asyncpg.connect(database.service_url)
        try:
            await until(lambda: keys.not_admitted is None, "the key is admitted")
            signer, hlc = keys.signer, service.node.clock.last
            token.take_away()
            with pytest.raises(SignerAwayError):
                await keys.sign(lambda: signer.sign(b"text"))
            await keys.check_window(connection, [signer], [hlc])
            assert keys.fault is not None
        finally:
            await connection.close()


async def test_a_signer_that_is_being_asked_is_no_signer_that_owes_an_answer(
    run_node: RunNode, settings_of: Callable[..., Settings], token: Token, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_node(settings_of(token.make_key(2))) as service:
        keys, asked, answer = service.keys, threading.Event(), threading.Event()

        def slowly() -> str:
            asked.set()
            answer.wait(UNTIL_S)
            return "signed"

        await service.key_changes.recorded.wait()
        signed = asyncio.ensure_future(keys.sign(slowly))
        await until(asked.is_set, "the signer is asked for one tenant")
        async with keys.signing():
            # So another tenant has its turn.
            answer.set()
            assert await signed == "signed"
        assert keys.fault is None
        answer.clear()
        monkeypatch.setattr(in_use, "SIGN_TIMEOUT_S", 0.05)
        with pytest.raises(SignerAwayError, match="no answer in"):
            await keys.sign(slowly)
        await until(keys.may_try, "it is asked again")
        with pytest.raises(SignerAwayError, match="still owes the answer"):
            async with keys.signing():
                pass
        answer.set()


async def test_a_node_starts_while_its_hsm_is_away_and_signs_when_it_is_back(
    run_server: RunServer, settings_of: Callable[..., Settings], token: Token
) -> None:
    settings = settings_of(token.make_key(2))
    async with run_server(settings) as client:
        await start_recorded(client)
        await add_jobs(client, 1)
        await sign(client)
    token.take_away()
    async with run_server(settings) as client:
        await add_jobs(client, 1)
        refused = await client.post("/v1/snapshots", json={"tenant_id": "acme"})
        assert problem(refused) == (503, "signing-unavailable")
        token.bring_back()
        assert (await sign(client))["to_seq"] == 2
        assert (await verdict_of(client))["valid"]


async def test_keys_rotate_from_a_file_into_the_hsm_and_on_to_another_key_in_it(
    run_server: RunServer, make_settings: MakeSettings, token: Token
) -> None:
    settings = make_settings(signing={"pin": PIN, "uris_allowed": ["hsm:"]})
    first, second = token.make_key(2), token.make_key(3)
    async with run_server(settings) as client:
        await add_jobs(client, 1)
        await sign(client)
        await rotate(client, new_key_uri=first)
        await add_jobs(client, 1)
        log_key = [key["key_id"] for key in (await keys_of(client)).values() if key["signs_checkpoints"]]
        assert problem(await client.post("/v1/keys/rotate", json={})) == (422, "invalid-request")
        newest = (await rotate(client, new_key_uri=second))["key"]["key_id"]
    async with run_server(settings) as client:
        await add_jobs(client, 1)
        assert signer_of(await sign(client)) == newest == await signing_key(client)
        assert [key["key_id"] for key in (await keys_of(client)).values() if key["signs_checkpoints"]] == log_key
        assert (await verdict_of(client))["valid"]


async def test_a_signer_that_cannot_be_had_changes_nothing(
    run_server: RunServer, make_settings: MakeSettings, token: Token
) -> None:
    wrong_curve = token.make_key(4, "secp384r1")
    settings = make_settings(signing={"pin": PIN, "uris_allowed": ["hsm:", "hv:"]})
    async with run_server(settings) as client:
        await add_jobs(client, 1)
        own = await signing_key(client)
        for uri, expected in (
            ("hsm:9?label=ledger", (503, "signing-unavailable")),
            ("hsm:x?label=ledger", (422, "invalid-request")),
            (wrong_curve, (422, "invalid-request")),
            ("hv:transit-key", (422, "invalid-request")),
            ("gpg:whatever", (422, "invalid-request")),
        ):
            assert problem(await client.post("/v1/keys/rotate", json={"new_key_uri": uri})) == expected, uri
        assert await signing_key(client) == own
        assert signer_of(await sign(client)) == own


def test_a_wrong_pin_is_tried_once(token: Token) -> None:
    uri = token.make_key(2)
    asked = []

    def wrong_pin() -> str:
        asked.append(1)
        return "9999"

    signer = private_keys.fetch(uri, wrong_pin)
    for _ in range(3):
        with pytest.raises(SigningUnavailableError):
            signer.sign(b"message")
    assert len(asked) == 1


def test_another_key_behind_the_same_uri_signs_nothing(token: Token) -> None:
    uri, other = token.make_key(2), token.make_key(3)
    mixed = private_keys.RemoteSigner(other, private_keys.fetch(uri, lambda: PIN).public_key, lambda: PIN)
    with pytest.raises(SigningUnavailableError, match="signs with another key"):
        mixed.sign(b"message")


async def test_a_start_with_a_signer_that_never_answered_says_so(
    run_server: RunServer, settings_of: Callable[..., Settings], token: Token
) -> None:
    await assert_no_start(
        run_server(settings_of("hsm:7?label=ledger")), (SigningUnavailableError, ConfigurationError), match="hsm:7"
    )
