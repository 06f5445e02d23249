"""Admitting the keys of a further node as an operator does: from the list, by a node that is admitted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from app.node.service import Service
from app.runtime.settings.config import Settings
from signing import key_statement
from signing.private_keys import FileSigner
from tests.app.chains import until
from tests.app.conftest import RunNode


async def waiting_keys(client: httpx.AsyncClient) -> dict[str, dict[str, Any]]:
    """The keys that nobody has admitted, by id."""
    return {key["key_id"]: key for key in (await client.get("/v1/keys")).json()["not_admitted"]}


async def start_recorded(client: httpx.AsyncClient) -> None:
    """Return once the chain names every key that the one node there is signs with, the last thing that a start does."""

    async def is_named() -> bool:
        entries = (await client.get("/v1/chain/entries", params={"tenant_id": "_system"})).json().get("items", [])
        named = {entry["job_id"] for entry in entries}
        return {f"key:{key['key_id']}" for key in (await client.get("/v1/keys")).json()["keys"]} <= named

    await until(is_named, "the chain names the node's keys")


async def is_admitted(client: httpx.AsyncClient) -> bool:
    """Whether what this node signs counts."""
    return bool((await client.get("/readyz")).json()["checks"]["admission"]["ok"])


async def admit_node(by: httpx.AsyncClient, node: httpx.AsyncClient) -> None:
    """Let the keys of ``node`` be admitted by the node that ``by`` talks to; on return ``node`` signs."""
    node_id = (await node.get("/v1/node")).json()["node_id"]

    async def its_keys() -> list[str]:
        return [key_id for key_id, key in (await waiting_keys(by)).items() if key["node_id"] == node_id]

    await until(lambda: is_admitted(by), "the node that admits is admitted")
    for key_id in await until(its_keys, "the node's key is in the chain"):
        answer = await by.post(f"/v1/keys/{key_id}/admit", json={})
        assert answer.status_code == 200, answer.text
    await until(lambda: is_admitted(node), "the node knows that it is admitted")


async def admit_service(by: Service, node: Service) -> None:
    """The same of nodes in this process."""
    for key_id in await until(lambda: _waiting_of(node), "the node's key is in the chain"):
        await by.key_changes.admit(key_id, None)
    await until(lambda: node.keys.not_admitted is None, "the node knows that it is admitted")


@asynccontextmanager
async def run_two(run_node: RunNode, one: Settings, two: Settings) -> AsyncIterator[tuple[Service, Service]]:
    """Two nodes that sign: the ledger begins with the key of the first, which has admitted the second."""
    async with run_node(one) as first:
        await first.key_changes.recorded.wait()
        async with run_node(two) as second:
            await admit_service(first, second)
            yield first, second


async def admit_by_hand(node: Service, root: FileSigner) -> None:
    """The same without another node: by its root key, on the new node itself."""
    for key_id in await until(lambda: _waiting_of(node), "the node's key is in the chain"):
        (waiting,) = [item for item in (await node.trust.published()).waiting if item.key.key_id == key_id]
        said = key_statement.sign("KEY_ADMITTED", waiting.facts, root.key_id, waiting.introduced.at, root)
        await node.key_changes.admit(key_id, said[key_statement.FIELD])
    await until(lambda: node.keys.not_admitted is None, "the node knows that it is admitted")


async def _waiting_of(node: Service) -> list[str]:
    own = {key.key_id for key in node.keys.own()}
    return [item.key.key_id for item in (await node.trust.published()).waiting if item.key.key_id in own]
