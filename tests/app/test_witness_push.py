"""The node pushes checkpoints to witnesses and keeps what they sign; one that lies or is away stops nothing."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest

from app.write.followers import witnesses as pushing
from ledger.errors import ConfigurationError
from signing.note import VerifierKey, WitnessKey, cosignatures_of, parse
from signing.private_keys import load
from tests.app.chains import until
from tests.app.conftest import MakeSettings, RunServer
from tests.app.starting import assert_no_start
from tests.app.witness_server import Answer, WitnessServer, policy_of, serving_witness
from tests.conftest import Database
from tests.tally import run_tally

QUORUM_P95_S = 3.0


class Keys:
    """The logs that the witnesses know: those that the node in ``folder`` signs, but ``unknown`` ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.unknown: set[str] = set()

    def __call__(self, origin: str) -> list[str]:
        key = load(f"file:{self.folder / 'keys' / 'signing.pem'}").public_key
        return [] if origin in self.unknown else [VerifierKey.of(origin, key).text()]


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "node")


@pytest.fixture
def three(keys: Keys) -> Iterator[list[WitnessServer]]:
    """Three witnesses that serve, with keys of both kinds."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                serving_witness(WitnessServer(f"witness.example/w{number}", number, keys, is_ml_dsa=number > 1))
            )
            for number in (1, 2, 3)
        ]


@pytest.fixture
def settings(make_settings: MakeSettings, three: list[WitnessServer], tmp_path: Path) -> Any:
    """Settings of a node that pushes to the three; two of them must cosign."""
    return make_settings(log={"policy": str(policy_of(three, tmp_path / "policy", 2))})


@pytest.fixture
async def client(run_server: RunServer, settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with run_server(settings) as client:
        yield client


async def write(client: httpx.AsyncClient, tenant_id: str = "acme", count: int = 1) -> int:
    """The seq of the last of so many new jobs."""
    for _ in range(count):
        body = {"tenant_id": tenant_id, "durability": "GLOBAL"}
        answer = (await client.post("/v1/jobs", json=body)).raise_for_status().json()
    return answer["chain"]["seq"]


async def cosigned_by(client: httpx.AsyncClient, three: list[WitnessServer], tenant_id: str = "acme") -> dict[str, int]:
    """By name of a witness, the largest tree with a valid cosignature that is served."""
    answer = await client.get(f"/v1/log/{tenant_id}/cosignatures", params={"limit": 1000})
    sizes: dict[str, int] = {}
    known = [WitnessKey.parse(each.verifier_key) for each in three]
    for item in answer.json()["items"] if answer.status_code == 200 else ():
        for each in cosignatures_of(parse(item["note"]), known):
            assert item["status"] == "ok"
            sizes[each.witness.name] = max(sizes.get(each.witness.name, 0), item["tree_size"])
    return sizes


async def covered(client: httpx.AsyncClient, three: list[WitnessServer], seq: int, tenant_id: str = "acme") -> set[str]:
    """The witnesses that have cosigned entry ``seq``."""
    return {name for name, size in (await cosigned_by(client, three, tenant_id)).items() if size >= seq}


async def quorum(
    client: httpx.AsyncClient, three: list[WitnessServer], seq: int, names: int = 2, tenant_id: str = "acme"
) -> None:
    async def reached() -> bool:
        return len(await covered(client, three, seq, tenant_id)) >= names

    await until(reached, f"{names} witnesses cosign entry {seq}")


async def check(client: httpx.AsyncClient) -> str | None:
    """What /readyz says of the witnesses."""
    answer = await client.get("/readyz")
    assert answer.status_code == 200, "a witness stops nothing"
    found = answer.json()["checks"]["witnesses"]
    return found.get("detail") if isinstance(found, dict) else found


async def failing(client: httpx.AsyncClient, text: str) -> None:
    async def says() -> bool:
        return text in (await check(client) or "")

    await until(says, f"/readyz says: {text}")


async def test_each_new_checkpoint_is_cosigned_by_all_and_served_with_their_lines(
    client: httpx.AsyncClient, three: list[WitnessServer]
) -> None:
    seq = await write(client, count=3)
    await quorum(client, three, seq, 3)
    note = (await client.get("/v1/log/acme/checkpoint", params={"cosigned": "true"})).text
    known = [WitnessKey.parse(each.verifier_key) for each in three]
    assert {each.witness for each in cosignatures_of(parse(note), known)} == set(known)
    # The log grows: each proves to itself that it only grew.
    seq = await write(client, count=2)
    await quorum(client, three, seq, 3)
    assert {status for each in three for status in each.answered} == {200}
    # The ledger's own log is witnessed too.
    await quorum(client, three, 1, 3, "_system")
    assert await check(client) is None


async def test_a_verdict_counts_the_cosignatures_that_were_pushed_for(
    client: httpx.AsyncClient, three: list[WitnessServer]
) -> None:
    seq = await write(client, count=2)
    await quorum(client, three, seq, 3)
    verdict = (await client.get("/v1/chain/verify", params={"tenant_id": "acme"})).json()
    found = {(each["by"], each["to_seq"], each["status"]) for each in verdict["anchors"]}
    assert found == {(each.name, seq, "ok") for each in three}


async def test_append_to_quorum_takes_three_seconds_at_p95_with_one_that_lies(
    client: httpx.AsyncClient, three: list[WitnessServer]
) -> None:
    three[2].lie = lambda _, answer: answer._replace(body=answer.body[:-6] + b"AAAA=\n")
    taken_s = []
    for number in range(20):
        began_s = time.monotonic()
        seq = await write(client, f"tenant-{number % 5}")
        await quorum(client, three, seq, 2, f"tenant-{number % 5}")
        taken_s.append(time.monotonic() - began_s)
    assert sorted(taken_s)[int(len(taken_s) * 0.95) - 1] <= QUORUM_P95_S, taken_s
    assert three[2].name not in await cosigned_by(client, three, "tenant-0")
    await failing(client, "w3: ")
    assert "below quorum" not in (await check(client) or ""), "the others are enough"


async def test_append_to_quorum_takes_three_seconds_at_p95_with_one_that_is_dead_and_one_that_hangs(
    run_server: RunServer, make_settings: MakeSettings, keys: Keys, tmp_path: Path
) -> None:
    with ExitStack() as stack, socket.create_server(("127.0.0.1", 0)) as silent:
        live = [
            stack.enter_context(serving_witness(WitnessServer(f"witness.example/w{number}", number, keys)))
            for number in (1, 2)
        ]
        dead, hanging = (WitnessServer(f"witness.example/w{number}", number, keys) for number in (3, 4))
        with serving_witness(dead):
            pass
        hanging.url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        policy = policy_of([*live, dead, hanging], tmp_path / "policy", 2)
        async with run_server(make_settings(log={"policy": str(policy)})) as client:
            taken_s = []
            for _ in range(12):
                began_s = time.monotonic()
                await quorum(client, live, await write(client), 2)
                taken_s.append(time.monotonic() - began_s)
            assert sorted(taken_s)[-2] <= QUORUM_P95_S, taken_s
            await failing(client, "w3: ")


LIES: dict[str, tuple[Callable[[bytes, Answer], Answer], str]] = {
    "of-another-tree": (lambda body, _: _signed(body.replace(b"\n1\n", b"\n2\n")), "does not hold"),
    "of-a-stranger": (
        lambda body, answer: answer._replace(body=_line(body, WitnessServer("witness.example/w1", 9, lambda _: []))),
        "0 cosignatures",
    ),
    "of-the-future": (lambda body, _: _signed(body, 3600), "which is not now"),
    "of-the-past": (lambda body, _: _signed(body, -3600), "which is not now"),
    "garbage": (lambda body, _: Answer(200, b"\xff\xfe"), "UTF-8"),
    "more-than-lines": (lambda body, answer: answer._replace(body=b"x\n\n" + answer.body), "more than signature lines"),
    "too-long": (lambda body, _: Answer(200, b"x" * 20_000), "more than"),
    "conflict-without-size": (lambda body, _: Answer(409, b"many"), "without the size"),
    "conflict-with-what-was-named": (lambda body, _: Answer(409, body.split(b"\n")[0][4:] + b"\n"), "that was named"),
    "an-error": (lambda body, _: Answer(500, b"oops"), "it answers 500: oops"),
    "a-redirect": (lambda body, _: Answer(307, b"", (("Location", "/add-checkpoint"),)), "it answers 307"),
}


def _text(body: bytes) -> str:
    return body.partition(b"\n\n")[2].decode().rpartition("\n\n")[0] + "\n"


def _line(body: bytes, by: WitnessServer, ahead_s: int = 0) -> bytes:
    return by.line(_text(body), int(time.time()) + ahead_s).encode()


def _signed(body: bytes, ahead_s: int = 0) -> Answer:
    """As the first witness would answer to ``body``, at another time."""
    return Answer(200, _line(body, WitnessServer("witness.example/w1", 1, lambda _: []), ahead_s))


@pytest.mark.parametrize("lie", LIES)
async def test_a_lie_is_dropped_and_its_witness_named(
    client: httpx.AsyncClient, three: list[WitnessServer], lie: str
) -> None:
    three[0].lie, said = LIES[lie]
    seq = await write(client)
    await quorum(client, three, seq)
    await failing(client, "w1: ")
    assert said in (await check(client) or "")
    assert three[0].name not in await cosigned_by(client, three)
    # Once it does its work, what it missed is pushed again.
    three[0].lie = None
    await quorum(client, three, seq, 3)
    await until(lambda: _is_whole(client), "/readyz says nothing of witnesses")


async def _is_whole(client: httpx.AsyncClient) -> bool:
    return await check(client) is None


async def test_an_old_cosignature_that_is_played_back_for_a_grown_log_is_dropped(
    client: httpx.AsyncClient, three: list[WitnessServer]
) -> None:
    kept: list[Answer] = []

    def replay(body: bytes, answer: Answer) -> Answer:
        if b"/acme\n" in body:
            kept.append(answer)
            return kept[0]
        return answer

    three[0].lie = replay
    await quorum(client, three, await write(client), 3)
    seq = await write(client)
    await quorum(client, three, seq)
    await failing(client, "w1: ")
    assert (await cosigned_by(client, three))[three[0].name] == 1


async def test_a_witness_that_has_seen_another_size_is_met_where_it_is(
    client: httpx.AsyncClient, three: list[WitnessServer], superuser: asyncpg.Connection
) -> None:
    seq = await write(client, count=2)
    await quorum(client, three, seq, 3)
    (origin,) = {origin for origin, _ in three[0].served if origin.endswith("/acme")}
    # One has lost what it saw, one has seen a tree that this ledger has no cosignature of.
    del three[0].seen[origin]
    await superuser.execute("SET session_replication_role = replica")
    await superuser.execute("DELETE FROM scheduler.checkpoint_cosignature WHERE witness = $1", three[1].verifier_key)
    seq = await write(client)
    await quorum(client, three, seq, 3)
    assert 409 in three[0].answered
    assert await check(client) is None


async def test_a_witness_that_has_seen_more_than_there_is_is_named_with_the_tenant(
    client: httpx.AsyncClient, three: list[WitnessServer]
) -> None:
    await quorum(client, three, await write(client), 3)
    (origin,) = {origin for origin, _ in three[0].served if origin.endswith("/acme")}
    three[0].seen[origin] = (7, bytes(32))
    await quorum(client, three, await write(client), 2)
    await failing(client, "w1 has seen more or other entries of acme")


async def test_a_witness_that_has_seen_another_history_is_named_with_the_tenant(
    client: httpx.AsyncClient, three: list[WitnessServer]
) -> None:
    """As after a restore from an old backup, whose lost entries were written again."""
    await quorum(client, three, await write(client), 3)
    (origin,) = {origin for origin, _ in three[0].served if origin.endswith("/acme")}
    three[0].seen[origin] = (1, bytes(32))
    await quorum(client, three, await write(client), 2)
    await failing(client, "w1 has seen more or other entries of acme")
    assert 422 in three[0].answered
    # Other logs go on.
    await quorum(client, three, await write(client, "other"), 3, "other")
    assert "below quorum" not in (await check(client) or "")
    three[1].seen[origin] = (1, bytes(32))
    await write(client)
    await failing(client, "new entries of acme are below quorum")


async def test_a_log_that_a_witness_does_not_know_keeps_none_of_the_others_waiting(
    client: httpx.AsyncClient, three: list[WitnessServer], keys: Keys
) -> None:
    seq = await write(client, "known")
    (origin,) = await until(
        lambda: {origin for origin, _ in three[0].served if origin.endswith("/known")}, "a log is pushed"
    )
    keys.unknown.add(origin.replace("known", "unknown"))
    await write(client, "unknown")
    for number in range(3):
        seq = await write(client, f"other-{number}")
        await quorum(client, three, seq, 3, f"other-{number}")
    await until(lambda: 404 in three[0].answered, "the unknown log was pushed")
    assert await cosigned_by(client, three, "unknown") == {}
    assert await check(client) is None, "that a witness does not know a log is no fault of it"


async def test_pushes_keep_to_the_rate_that_a_witness_sets(
    client: httpx.AsyncClient, three: list[WitnessServer]
) -> None:
    await keep_to_rate(client, three, tenants=60, turn=20)


@pytest.mark.torture
@pytest.mark.foreign
async def test_pushes_of_ten_thousand_tenants_keep_to_the_rate_that_a_witness_sets(
    client: httpx.AsyncClient, three: list[WitnessServer]
) -> None:
    await keep_to_rate(client, three, tenants=10_000, turn=40)


async def keep_to_rate(client: httpx.AsyncClient, three: list[WitnessServer], tenants: int, turn: int) -> None:
    three[0].turn = turn
    names = [f"tenant-{number:05}" for number in range(tenants)]
    headers = {"content-type": "application/x-ndjson"}
    for first in range(0, tenants, 500):
        some = names[first : first + 500]
        lines = "".join(f'{{"tenant_id":"{name}","type":"JobCreated"}}\n' for name in some)
        (await client.post("/v1/events?durability=GLOBAL", content=lines, headers=headers)).raise_for_status()

    def all_cosigned() -> bool:
        return len({origin for origin, _ in three[0].served}) >= tenants

    await until(all_cosigned, "all are cosigned", timeout_s=60 + 6 * tenants / turn)
    assert len(three[0].refused) >= tenants // turn - 1, "the rate was met"
    assert max(three[0].refused) <= pushing.PUSHES_AT_ONCE_MAX, "in a pause only what was under way as it began arrives"
    assert three[0].hasty == 0, "nothing is pushed before Retry-After"
    await until(lambda: _is_whole(client), "a witness that sets a rate does not fail")


async def test_what_was_not_cosigned_before_a_restart_is_pushed_after_it(
    run_server: RunServer, settings: Any, three: list[WitnessServer]
) -> None:
    for each in three:
        each.lie = lambda _, __: Answer(503, b"away")
    async with run_server(settings) as client:
        seq = await write(client)
        await failing(client, "w1: ")
        await failing(client, "new entries of all logs are below quorum")
        assert await cosigned_by(client, three) == {}
    for each in three:
        each.lie = None
    async with run_server(settings) as client:
        await quorum(client, three, seq, 3)
    for each in three:
        each.answered.clear()
    async with run_server(settings) as client:
        seq = await write(client)
        await quorum(client, three, seq, 3)
    # What was cosigned before is not pushed again, and each is met where it is.
    assert all(each.answered.count(200) <= 4 and 409 not in each.answered for each in three)


async def test_a_checkpoint_that_another_node_signed_and_left_is_pushed_by_a_sweep(
    run_server: RunServer,
    make_settings: MakeSettings,
    three: list[WitnessServer],
    keys: Keys,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pushing, "SWEEP_INTERVAL_S", 0.2)
    policy = str(policy_of(three, tmp_path / "policy", 2))
    # The witnesses know the log by the key of the node that signs it, which is the first.
    async with run_server(make_settings()) as alone, run_server(make_settings("other", log={"policy": policy})):
        await write(alone, "late")
        await until(lambda: any(origin.endswith("/late") for origin, _ in three[0].served), "it is pushed")


async def test_a_policy_that_names_logs_pushes_those_alone(
    run_server: RunServer, make_settings: MakeSettings, three: list[WitnessServer], keys: Keys, tmp_path: Path
) -> None:
    log_key = VerifierKey.of("ledger.example/acme", WitnessKey.parse(three[0].verifier_key).public_key)
    policy = policy_of(three, tmp_path / "policy", 2, f"log {log_key.text()}")
    async with run_server(make_settings(log={"policy": str(policy), "origin": "ledger.example"})) as client:
        await write(client, "other")
        await quorum(client, three, await write(client), 3)
        assert {origin for each in three for origin, _ in each.served} == {"ledger.example/acme"}


async def tally(code: int, *arguments: object) -> dict[str, Any]:
    done = await asyncio.to_thread(run_tally, *arguments, "--json")
    assert done.returncode == code, done.stderr + done.stdout
    return json.loads(done.stdout)


async def test_the_commands_exit_with_3_below_the_quorum_and_say_who_is_missing(
    client: httpx.AsyncClient, three: list[WitnessServer], tmp_path: Path, database: Database
) -> None:
    url, keyring = ("--url", str(client.base_url)), tmp_path / "keys.json"
    keyring.write_text((await client.get("/v1/keys")).text)
    all_of, two_of = policy_of(three, tmp_path / "all"), tmp_path / "policy"
    three[2].lie = lambda _, __: Answer(503, b"away")
    seq = await write(client, count=2)
    (await client.post("/v1/snapshots", json={"tenant_id": "acme"})).raise_for_status()
    await quorum(client, three, seq, 2)
    missing = ["w3: has cosigned nothing of this log"]

    status = await tally(0, "witness", "status", "-t", "acme", *url)
    assert [each["tree_size"] for each in status["witnesses"]] == [seq, seq, 0]
    assert (status["policy"]["met"], status["tree_size"]) == (True, seq)
    assert "503" in status["witnesses"][2]["fault"]
    for place in (url, ("--dsn", database.service_url)):
        verify = ("verify", "-t", "acme", "--keys", keyring, "--no-state", *place)
        assert (await tally(0, *verify, "--policy", two_of))["policy"]["quorum_to_seq"] == seq
        below = await tally(3, *verify, "--policy", all_of)
        assert (below["valid"], below["policy"]["missing"]) == (True, missing)
    prove = ("prove", "-t", "acme", "--seq", "1", "--no-state", "-o", tmp_path / "one.receipt.json", *url)
    await tally(0, *prove, "--policy", two_of)
    await tally(3, *prove, "--policy", all_of)
    receipt = ("verify-proof", tmp_path / "one.receipt.json", "--keys", keyring, "--no-state")
    await tally(0, *receipt, "--policy", two_of)
    assert (await tally(3, *receipt, "--policy", all_of))["policy"]["missing"] == missing
    await tally(0, "bundle", "export", "-t", "acme", "-o", tmp_path / "acme.tar", *url)
    bundle = ("verify-bundle", tmp_path / "acme.tar", "--keys", keyring, "--no-state")
    await tally(0, *bundle, "--policy", two_of)
    assert (await tally(3, *bundle, "--policy", all_of))["policy"]["missing"] == missing
    three[1].lie = three[2].lie
    seq = await write(client)
    await quorum(client, three, seq, 1)
    assert (await tally(3, "witness", "status", "-t", "acme", *url))["policy"]["quorum_to_seq"] == seq - 1


async def test_a_receipt_waits_for_the_quorum_and_without_it_is_written_with_who_is_missing(
    client: httpx.AsyncClient, three: list[WitnessServer], tmp_path: Path
) -> None:
    policy, file = policy_of(three, tmp_path / "policy", 2), tmp_path / "job.receipt.json"
    prove = ("prove", "-t", "acme", "--no-state", "-o", file, "--policy", policy, "--url", str(client.base_url))
    body = {"tenant_id": "acme", "durability": "GLOBAL"}
    job = (await client.post("/v1/jobs", json=body)).raise_for_status().json()["job_id"]
    await quorum(client, three, 1)
    (await client.post("/v1/snapshots", json={"tenant_id": "acme"})).raise_for_status()

    away = Answer(503, b"away")
    left = dict.fromkeys((each.name for each in three), 3)

    def away_at_first(_: bytes, answer: Answer, name: str) -> Answer:
        left[name] -= 1
        return away if left[name] >= 0 else answer

    for each in three:
        each.lie = partial(away_at_first, name=each.name)
    (await client.post(f"/v1/jobs/{job}/cancel", json=body)).raise_for_status()
    verdict = await tally(0, *prove, "--job", job, "--wait", "30s")
    assert verdict["policy"]["quorum_to_seq"] == verdict["to_seq"] > 1
    assert verdict["receipt"]["complete_to_seq"] <= verdict["policy"]["quorum_to_seq"], (
        "by a snapshot that the quorum covers"
    )
    absent = await tally(0, *prove, "--job", "job-404", "--absent")
    assert absent["policy"]["quorum_to_seq"] == absent["receipt"]["complete_to_seq"]

    for each in three:
        each.lie = lambda _, __: away
    seq = await write(client)
    file.unlink()
    verdict = await tally(3, *prove, "--seq", seq, "--wait", "100ms")
    assert verdict["policy"]["missing"] == [f"w{n}: has cosigned nothing of this log" for n in (1, 2, 3)]
    assert file.exists()


async def test_a_witness_that_is_no_longer_named_is_listed_and_does_not_count(
    run_server: RunServer, make_settings: MakeSettings, settings: Any, three: list[WitnessServer], tmp_path: Path
) -> None:
    async with run_server(settings) as client:
        await quorum(client, three, await write(client), 3)
    policy = policy_of(three[:2], tmp_path / "two")
    async with run_server(make_settings(log={"policy": str(policy)})) as client:
        answer = (await client.get("/v1/log/acme/witnesses")).json()
    assert [(each["name"], each["status"]) for each in answer["witnesses"]] == [
        ("w1", "ok"),
        ("w2", "ok"),
        (three[2].name, "unknown_key"),
    ]
    assert answer["policy"]["met"]


@pytest.mark.parametrize("text", [None, "witness w1 nothing\nquorum w1", "quorum"])
async def test_a_policy_that_is_none_stops_the_start(
    run_server: RunServer, make_settings: MakeSettings, tmp_path: Path, text: str | None
) -> None:
    path = tmp_path / "policy"
    if text is not None:
        path.write_text(text)
    await assert_no_start(run_server(make_settings(log={"policy": str(path)})), ConfigurationError, "log.policy")
