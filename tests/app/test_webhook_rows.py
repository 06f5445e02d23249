"""Rows of webhooks that somebody edits below a running node: told, and no more than the webhook itself stands still."""

from __future__ import annotations

import asyncpg
import pytest

from app.store import webhooks as webhook_rows
from tests.app.chain_builder import edit
from tests.app.chains import followed, until
from tests.app.client import Client
from tests.app.conftest import MakeSettings, RunServer
from tests.app.receiver import Receiver, receiving
from tests.app.test_webhooks import LOOPBACK, add, node, receiver, shared, shown, soon, until_taken, write

__all__ = ["node", "receiver", "shared", "soon"]
ADDRESS, SENDING = (f"UPDATE scheduler.webhooks SET {column}" for column in ("url", "sending_seq"))


@pytest.mark.parametrize("time", ["infinity", "-infinity", "20000-01-01", "4000-01-01 BC"])
async def test_no_time_fails_what_is_read_beside_it(
    node: Client, shared_superuser: asyncpg.Connection, receiver: Receiver, time: str
) -> None:
    await write(node, 3)
    await add(node, receiver, from_seq=1)
    await until_taken(receiver, 3)
    receiver.judge = lambda _: 503
    await write(node, 1)

    async def is_failing() -> bool:
        return (await shown(node))["state"] == "failing"

    await until(is_failing, "the list says so")
    set_times = "failing_since = $1::text::timestamptz, created_at = $1::text::timestamptz"
    await shared_superuser.execute(
        f"UPDATE scheduler.webhooks SET {set_times}, delivered_at = $1::text::timestamptz WHERE tenant_id = $2",
        time,
        node.tenant,
    )
    refused = len(receiver.requests)
    await until(lambda: len(receiver.requests) > refused + 2, "it is tried again")
    await until(is_failing, "the list still says so")
    assert (await node.get("/metrics")).status_code == 200
    receiver.judge = lambda _: 200
    await until_taken(receiver, 4)


async def test_a_message_that_would_end_behind_the_chain_is_told_and_passes_nothing_over(
    node: Client, shared_superuser: asyncpg.Connection, receiver: Receiver
) -> None:
    await write(node, 3)
    await add(node, receiver, from_seq=1)
    await until_taken(receiver, 3)
    await shared_superuser.execute(f"{SENDING} = 1000000000000 WHERE tenant_id = $1", node.tenant)

    async def is_told() -> bool:
        return "the chain ends at 3" in ((await shown(node))["last_error"] or "")

    await until(is_told, "the list says what is wrong")
    await shared_superuser.execute(f"{SENDING} = 3 WHERE tenant_id = $1", node.tenant)
    await write(node, 1)
    await until_taken(receiver, 4)


async def test_a_dead_letter_behind_the_chain_is_told_and_is_no_gap_in_the_chain(
    node: Client, shared_superuser: asyncpg.Connection, receiver: Receiver
) -> None:
    await write(node, 3)
    await add(node, receiver, from_seq=1)
    await until_taken(receiver, 3)
    await shared_superuser.execute(
        "INSERT INTO scheduler.webhook_dead_letters (webhook_id, seq, reason, is_again)"
        " SELECT webhook_id, 1000, '', true FROM scheduler.webhooks WHERE tenant_id = $1",
        node.tenant,
    )

    async def told() -> str:
        return (await shown(node))["last_error"] or ""

    await until(told, "the list says what is wrong")
    assert "would end at seq 1000, and the chain ends at 3" in await told()
    await shared_superuser.execute("DELETE FROM scheduler.webhook_dead_letters WHERE seq = 1000")
    await write(node, 1)
    await until_taken(receiver, 4)


FALSE_ENTRIES = [
    (
        "UPDATE scheduler.scheduler_log SET payload = replace(payload::text, '\"a\"', '\"b\"')::json WHERE seq = 4",
        "payload-digest",
    ),
    ("DELETE FROM scheduler.scheduler_log WHERE seq = 4", "gap"),
]


@pytest.mark.parametrize(("edited", "kind"), FALSE_ENTRIES)
async def test_no_entry_is_sent_that_was_not_chained_and_none_that_was_removed_is_passed_over(
    run_server: RunServer,
    make_settings: MakeSettings,
    superuser: asyncpg.Connection,
    receiver: Receiver,
    edited: str,
    kind: str,
) -> None:
    async with receiving() as of_one_action, run_server(make_settings(**LOOPBACK)) as client:
        await write(client, 6)
        await until(lambda: followed(superuser), "the job table has followed")
        await edit(superuser, f"{edited} AND tenant_id = 'acme'")
        await add(client, receiver, from_seq=1)
        await add(client, of_one_action, from_seq=1, actions=["ENQUEUE"])

        async def named() -> bool:
            return f"{kind} at seq" in ((await client.get("/readyz")).json()["checks"]["breaks"]["detail"] or "")

        await until(named, "the break is reported")

        async def are_told() -> bool:
            listed = (await client.get("/v1/webhooks?tenant_id=acme")).json()["items"]
            return len(listed) == 2 and all(each["last_error"] for each in listed)

        await until(are_told, "both have come to it")
        assert not receiver.taken
        assert not of_one_action.taken


@pytest.mark.parametrize("url", ["ftp://127.0.0.1/", "http://127.0.0.1:99999/", "https://[1:2]/", "https://xn--a/", ""])
async def test_an_address_that_cannot_be_asked_is_told(
    node: Client, shared_superuser: asyncpg.Connection, receiver: Receiver, url: str
) -> None:
    await add(node, receiver, from_seq=1)
    await shared_superuser.execute(f"{ADDRESS} = $1 WHERE tenant_id = $2", url, node.tenant)

    async def is_told() -> bool:
        await write(node, 1)
        return f"{url} is no address for a webhook" in ((await shown(node))["last_error"] or "")

    await until(is_told, "the list says what is wrong")
    await shared_superuser.execute(f"{ADDRESS} = $1 WHERE tenant_id = $2", receiver.url, node.tenant)
    await until(lambda: receiver.taken, "it is delivered once the address is right")


async def test_replays_that_were_asked_for_at_one_time_begin_with_the_earliest(
    node: Client, shared_superuser: asyncpg.Connection, receiver: Receiver
) -> None:
    await write(node, 6)
    webhook_id = (await add(node, receiver, from_seq=1))["webhook_id"]
    await until_taken(receiver, 6)
    # Each was checked against the position before the other was stored.
    receiver.judge = lambda _: 503
    await write(node, 1)
    await until(lambda: is_failing_at(node, 6), "a message is being sent")
    for seq in (2, 5):
        await webhook_rows.replay(shared_superuser, webhook_id, seq)
    receiver.judge = lambda _: 200
    await until(lambda: len(receiver.taken) >= 10, "it was sent again")
    await until(lambda: receiver.taken[6:] == [7, 2, 3, 4, 5, 6, 7], "all from the earlier one on came again")


async def test_a_replay_from_a_seq_that_is_not_delivered_again_yet_leaves_the_position_where_it_is(
    node: Client, shared_superuser: asyncpg.Connection, receiver: Receiver
) -> None:
    await write(node, 3)
    webhook_id = (await add(node, receiver, from_seq=1))["webhook_id"]
    await until_taken(receiver, 3)
    receiver.judge = lambda _: 503
    await webhook_rows.replay(shared_superuser, webhook_id, 1)
    await until(lambda: is_failing_at(node, 0), "the position is back")
    holder = await shared_superuser.fetchval("SELECT holder FROM scheduler.webhooks WHERE webhook_id = $1", webhook_id)
    # It was checked against the position before the first one.
    await webhook_rows.replay(shared_superuser, webhook_id, 3)
    assert await webhook_rows.go_back(shared_superuser, webhook_id, holder)
    assert (await shown(node))["delivered_seq"] == 0
    receiver.judge = lambda _: 200
    await until(lambda: receiver.taken[3:] == [1, 2, 3], "all came again")


async def is_failing_at(node: Client, seq: int) -> bool:
    now = await shown(node)
    return bool(now["delivered_seq"] == seq and now["state"] == "failing")
