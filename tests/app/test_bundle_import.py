"""Importing bundles over HTTP: what is stored, what is not added twice, and what leaves the ledger as it was."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.bundle.verify import BundleVerdict, verify_file
from app.embedded import EmbeddedPostgres
from signing.keys import Keyring
from tests.app.bundles import bundle_of, exit_code, store
from tests.app.service_thread import serving
from tests.ledger.ledger_in_memory import SIGNER, build

DATABASE = "bundle_import"
LEDGER = build(30, snapshots_to=(10, 20, 30))


@pytest.fixture(scope="module")
def client(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a service that trusts the key of ``SIGNER``."""
    folder = tmp_path_factory.mktemp("import")
    keys = folder / "trusted.pem"
    keys.write_text(SIGNER.public_key_pem)
    with (
        serving(postgres, folder / "data", DATABASE, bundle={"trusted_keys": keys}) as url,
        httpx.Client(base_url=url, timeout=60, trust_env=False) as client,
    ):
        yield client


def send(client: httpx.Client, *bundles: bytes, **params: Any) -> httpx.Response:
    files = [("file", (f"{n}.tar", bundle)) for n, bundle in enumerate(bundles)]
    return client.post("/v1/bundles/import", files=files, params=params)


def imported(client: httpx.Client, *bundles: bytes, **params: Any) -> dict[str, Any]:
    answer = send(client, *bundles, **params)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    assert told["imported"] + told["duplicates"] == told["entries"]
    return told


def verdict_of(client: httpx.Client, tenant: str) -> dict[str, Any]:
    verdict: dict[str, Any] = client.get("/v1/chain/verify", params={"tenant_id": tenant}).json()
    return verdict


def test_a_bundle_is_merged_verified_exported_again_and_adds_nothing_twice(
    client: httpx.Client, tmp_path: Path
) -> None:
    ledger = build(30, tenant_id="whole", snapshots_to=(10, 20, 30))
    bundle = bundle_of(ledger)
    told = imported(client, bundle)
    assert (told["bundles"], told["imported"], told["duplicates"], told["conflicts"]) == (1, 30, 0, [])
    assert told["jobs_changed"] == len(ledger.jobs)
    assert told["new_head"]["seq"] == 30
    again = imported(client, bundle)
    assert (again["imported"], again["duplicates"], again["new_head"]) == (0, 30, told["new_head"])
    assert client.post("/v1/snapshots", json={"tenant_id": "whole"}).status_code in (200, 201)
    verdict = verdict_of(client, "whole")
    assert verdict["valid"], verdict
    assert set(verdict["verdicts"].values()) == {"ok"}, verdict
    items = client.get("/v1/chain/entries", params={"tenant_id": "whole"}).json()["items"]
    origins = [json.loads(item["origin"]) for item in items]
    assert [(one["log"], one["seq"], one["chain_link"]) for one in origins] == [
        ("log.example/whole", row["seq"], row["chain_link"]) for row in ledger.entries
    ]
    answer = client.post("/v1/bundles/export", json={"tenant_id": "whole"})
    found: BundleVerdict = asyncio.run(
        verify_file(store(tmp_path, answer.content), Keyring.from_json(client.get("/v1/keys").json()))
    )
    assert exit_code(found) == 0, found.verdict
