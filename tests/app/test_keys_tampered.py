"""Keys stay what the chain says of them, whatever a superuser writes into the tables."""

from __future__ import annotations

import asyncpg
import pytest

from tests.app.conftest import MakeSettings, RunServer
from tests.app.test_key_changes import Client, add_jobs, keys_of, problem, rotate, sign, signer_of, verdict_of


@pytest.mark.parametrize(
    "edit",
    [
        "SET not_before = '294276-01-01'",
        "SET not_after = '0001-01-01 BC'",
        "SET not_after = '-infinity'",
        "SET public_key_pem = NULL",
        "SET algorithm = NULL, node_id = NULL, revoked_from_hlc = 'x'",
    ],
)
async def test_a_row_that_no_key_can_have_is_passed_over_and_the_chain_counts(
    run_server: RunServer, make_settings: MakeSettings, superuser: asyncpg.Connection, edit: str
) -> None:
    settings = make_settings()
    async with run_server(settings) as client:
        await add_jobs(client, 2)
        old = signer_of(await sign(client))
        await rotate(client)
        for column in ("public_key_pem", "algorithm", "node_id"):
            await superuser.execute(f"ALTER TABLE scheduler.signing_keys ALTER {column} DROP NOT NULL")
        await superuser.execute(f"UPDATE scheduler.signing_keys {edit} WHERE key_id = $1", old)
        listed = await keys_of(client)
        assert listed[old]["not_after"] is not None
        assert listed[old]["public_key_pem"] is not None
        assert (await verdict_of(client))["verdicts"]["signatures"] == "ok"
    for column in ("public_key_pem", "algorithm", "node_id"):
        await superuser.execute(
            f"UPDATE scheduler.signing_keys SET {column} = 'x' WHERE {column} IS NULL"
            f";ALTER TABLE scheduler.signing_keys ALTER {column} SET NOT NULL"
        )
    async with run_server(settings) as client:
        assert (await verdict_of(client))["verdicts"]["signatures"] == "ok"


async def test_bounds_of_the_key_in_use_that_no_key_can_have_do_not_keep_it_from_signing(
    client: Client, superuser: asyncpg.Connection
) -> None:
    await superuser.execute(
        "ALTER TABLE scheduler.signing_keys DROP CONSTRAINT IF EXISTS signing_keys_check;"
        "UPDATE scheduler.signing_keys SET not_before = '294276-01-01', not_after = '0001-01-01 BC'"
    )
    await add_jobs(client, 2)
    assert (await sign(client))["to_seq"] == 2


@pytest.mark.parametrize("uri", ["\0", "file:/a%00b", "hsm:\0", "hv:\0", "a" * 5000])
async def test_a_key_uri_that_names_nothing_is_refused(client: Client, uri: str) -> None:
    status, kind = problem(await client.post("/v1/keys/rotate", json={"new_key_uri": uri}))
    assert (status, kind) in [(422, "invalid-request"), (503, "signing-unavailable")]
