"""Tokens: issued, used, revoked, forged, stolen; and by whom the ledger lets itself be told of one."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest
from structlog.testing import capture_logs

from app.runtime.principals import Principal, Right, covers, grant_of
from app.runtime.settings.config import Settings
from app.runtime.state.kept_files import FIRST_TOKEN, KEPT_TOKENS, FirstToken, KeptFile
from app.share.bundle.importer import BundleImporter
from app.trust import callers
from app.trust import tokens as keys_tokens
from app.trust.key_chain import Trust
from app.trust.tokens import Tokens
from ledger import canonical
from ledger.errors import ChainDamagedError, UnauthenticatedError
from ledger.facts.events import SystemAction
from signing.key_statement import TOKEN_PREFIX
from tests.app.chains import UNTIL_S, until
from tests.app.conftest import MakeSettings, RunServer
from tests.app.forging import forge
from tests.app.postgres_proxy import PostgresProxy
from tests.app.served import Serve, Served, serving_with_tokens
from tests.tally import run_tally

ALL = sorted(map(str, Right))


async def status(client: httpx.AsyncClient, path: str = "/v1/whoami") -> int:
    return (await client.get(path)).status_code


async def test_the_first_token_counts_at_once_and_is_issued_by_the_ledger(serve: Serve, superuser: Any) -> None:
    async with serve() as served, served.client(served.root) as root:
        assert (await root.get("/v1/whoami")).json() == {
            "principal": "root",
            "source": "token",
            "token_id": "first",
            "expires_at": None,
            "grants": [{"rights": list(map(str, Right)), "tenants": ["*"]}],
        }
        folder = served.services[Settings].data_dir

        async def is_issued() -> bool:
            return (await root.get("/v1/whoami")).json()["token_id"] != "first" and not (
                folder / FIRST_TOKEN.name
            ).exists()

        await until(is_issued, "the first token is issued")
        (listed,) = (await root.get("/v1/tokens")).json()["items"]
        assert (listed["name"], listed["rights"], listed["tenants"]) == ("root", list(map(str, Right)), ["*"])
        assert "token" not in listed
    payload = await superuser.fetchval("SELECT payload FROM scheduler.scheduler_log WHERE action = 'TOKEN_ISSUED'")
    facts = json.loads(payload)
    assert facts["digest"] == hashlib.sha256(served.root.encode()).hexdigest()
    assert served.root not in payload


async def test_a_first_token_made_beside_a_running_node_counts_before_the_next_read_of_the_chain(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys_tokens, "FOLLOW_INTERVAL_S", 3600.0)
    async with serve("without a first token") as served:
        made = callers.new_token()
        FIRST_TOKEN.store(served.services[Settings].data_dir, FirstToken("root", made.digest.hex()))
        async with served.client(made.text) as root:

            async def counts() -> bool:
                return await status(root) == 200

            await until(counts, "the first token counts")


async def test_without_a_token_nothing_but_what_is_open_is_answered(served: Served) -> None:
    async with served.client(None) as nobody:
        for path in ("/livez", "/readyz", "/docs", "/v1/keys"):
            assert await status(nobody, path) == 200, path
        for path in ("/v1/whoami", "/v1/node", "/v1/jobs?tenant_id=acme", "/metrics", "/v1/tokens"):
            answer = await nobody.get(path)
            assert (answer.status_code, answer.json()["type"].rpartition("/")[2]) == (401, "unauthenticated"), path
            assert answer.headers["WWW-Authenticate"] == 'Bearer realm="tallystick"'
        answer = await nobody.post("/v1/jobs", json={"tenant_id": "acme"})
        assert answer.status_code == 401


async def test_a_token_allows_what_it_says_for_the_tenants_it_says(served: Served, tenant: str) -> None:
    tried = ((f"{tenant}-team-a", 201), (tenant, 201), (f"{tenant}-2", 403), (f"{tenant}-other", 403))
    writer = await served.issue("write", "read", tenants=f"{tenant}-team-*,{tenant}", name="ci")
    async with served.client(writer["token"]) as ci, served.client(served.root) as root:
        for each, expected in tried:
            answer = await ci.post("/v1/jobs", json={"tenant_id": each})
            assert answer.status_code == expected, (each, answer.text)
            assert await status(ci, f"/v1/jobs?tenant_id={each}") == (200 if expected == 201 else 403)
        assert await status(ci, f"/v1/chain/head?tenant_id={tenant}") == 403
        assert (await ci.get("/v1/tenants")).status_code == 403
        lines = "".join(
            json.dumps({"tenant_id": each, "type": "JobCreated"}) + "\n" for each in (tenant, f"{tenant}-other")
        )
        before = (await root.get(f"/v1/chain/head?tenant_id={tenant}")).json()["seq"]
        answer = await ci.post("/v1/events", content=lines, headers={"Content-Type": "application/x-ndjson"})
        assert answer.status_code == 403
        assert (await root.get(f"/v1/chain/head?tenant_id={tenant}")).json()["seq"] == before
        tenants = [item["tenant_id"] for item in (await root.get("/v1/tenants")).json()["items"]]
        assert [each for each in tenants if each.startswith(tenant)] == [tenant, f"{tenant}-team-a"]


async def test_lists_and_lookups_tell_nothing_of_tenants_without_the_right(served: Served, tenant: str) -> None:
    mine_id, yours_id = f"{tenant}-mine", f"{tenant}-yours"
    async with served.client(served.root) as root:
        for each in (mine_id, yours_id):
            await root.post("/v1/jobs", json={"tenant_id": each, "job_id": f"of-{each}"})
            await root.post("/v1/jobs", json={"tenant_id": each, "job_id": f"of-both-{tenant}"})
            assert (await root.post("/v1/snapshots", json={"tenant_id": each})).status_code == 201
        token = await served.issue("read", "audit", tenants=mine_id)
        async with served.client(token["token"]) as mine, served.client(None) as nobody:
            assert await status(mine, f"/v1/jobs/of-{mine_id}") == 200
            assert await status(mine, f"/v1/jobs/of-{yours_id}") == 404
            assert (await mine.get(f"/v1/jobs/of-both-{tenant}")).json()["tenant_id"] == mine_id
            assert [item["tenant_id"] for item in (await mine.get("/v1/tenants")).json()["items"]] == [mine_id]
            assert await status(mine, "/v1/jobs?tenant_id=_system") == 403
            snapshots = [
                (await root.get(f"/v1/snapshots?tenant_id={each}")).json()["items"][0]["id"]
                for each in (mine_id, yours_id)
            ]
            assert [await status(mine, f"/v1/snapshots/{each}") for each in snapshots] == [200, 404]
            for client, told in ((root, {"_system", mine_id, yours_id}), (mine, {mine_id}), (nobody, set())):
                keys = (await client.get("/v1/keys")).json()["log_verifier_keys"]
                named = {key.partition("+")[0].rpartition("/")[2] for key in keys}
                assert named == told if client is not root else named >= told


NO_TOKENS = ["", "Bearer", "Basic dXNlcjpwYXNz", "Bearer a b", "Bearer \u00e9", "Bearer " + "x" * 20_000]


async def test_what_is_no_token_is_refused(served: Served) -> None:
    async with served.client(None) as client:
        for shown in NO_TOKENS:
            answer = await client.get("/v1/whoami", headers={"Authorization": shown.encode()})
            assert answer.status_code == 401, shown
        twice = [("Authorization", f"Bearer {served.root}")] * 2
        assert (await client.get("/v1/whoami", headers=twice)).status_code == 401
        cookie = {
            "Cookie": f"token={served.root}; Authorization=Bearer {served.root}",
            "Origin": "https://evil.example",
        }
        assert (await client.get("/v1/whoami", headers=cookie)).status_code == 401
        assert (await client.get(f"/v1/whoami?access_token={served.root}")).status_code == 401


async def test_forged_truncated_and_altered_tokens_are_refused(served: Served) -> None:
    right = (await served.issue("read"))["token"]
    digest = hashlib.sha256(right.encode()).hexdigest()
    wrong = [right[:-1], right + "A", right.swapcase(), callers.new_token().text, digest]
    for text in wrong:
        async with served.client(text) as client:
            answer = await client.get("/v1/whoami")
            assert answer.status_code == 401, text
            assert text not in answer.text


@asynccontextmanager
async def two_nodes(serve: Serve) -> AsyncIterator[tuple[Served, Served]]:
    """Two nodes of a ledger that the first began: its key is that of the ledger, and it has issued its first token."""
    async with serve() as one:
        await until(one.services[Tokens].counting, "the first token is issued")
        async with serve("other", node_id="node-b") as other:
            yield one, other


async def test_a_revoked_token_counts_no_more_on_any_node(serve: Serve) -> None:
    async with two_nodes(serve) as (one, other):
        made = await one.issue("read", tenants="acme", name="leaver")
        async with one.client(made["token"]) as here, other.client(made["token"]) as there:
            assert await status(here) == 200

            async def counts() -> bool:
                return await status(there) == 200

            async def counts_not() -> bool:
                return await status(there) == 401

            await until(counts, "the other node knows it")
            async with one.client(one.root) as root:
                assert (await root.delete(f"/v1/tokens/{made['token_id']}")).json()["revoked"] is True
                assert await status(here) == 401
                assert (await root.delete(f"/v1/tokens/{made['token_id']}")).status_code == 200
                assert (await root.delete("/v1/tokens/0123456789abcdef")).status_code == 404
            await until(counts_not, "the other node knows it is revoked")


async def test_a_token_expires(served: Served) -> None:
    made = await served.issue("read", expires_in="1h")
    expires_at = datetime.fromisoformat(made["expires_at"])
    assert timedelta(minutes=59) < expires_at - datetime.now(UTC) <= timedelta(hours=1)
    known = served.services[Tokens].known
    now_s = expires_at.timestamp()
    assert known.caller(made["token"].encode(), now_s - 1).id == "somebody"
    with pytest.raises(UnauthenticatedError, match="expired"):
        known.caller(made["token"].encode(), now_s)
    async with served.client(served.root) as root:
        for wrong in ("0s", "soon", "99999d", "-1h"):
            body = {"name": "x", "rights": ["read"], "tenants": ["*"], "expires_in": wrong}
            answer = await root.post("/v1/tokens", json=body)
            assert (answer.status_code, answer.json().get("path")) == (422, "expires_in"), wrong


async def test_what_is_held_for_a_peer_of_some_tenants_is_found_behind_pages_of_others(
    served: Served, tenant: str, shared_superuser: asyncpg.Connection
) -> None:
    theirs, ours = [f"{tenant}-{number}" for number in range(4)], [f"{tenant}-team_{number}" for number in range(3)]
    await shared_superuser.executemany(
        "INSERT INTO scheduler.exchange_positions (log_origin, tenant_id, note, tree_size, imported_seq)"
        " VALUES ($1, $2, '', 7, 7)",
        [(f"asks.example/{each}", each) for each in (*theirs, f"{tenant}-teams", *ours)],
    )
    peer = await served.issue("audit", tenants=f"{tenant}-team_*", name="peer")
    async with served.client(peer["token"]) as client, served.client(served.root) as root:
        found: list[str] = []
        while len(found) < len(ours):
            asked = {"origin": "asks.example", "limit": 1, "after": found[-1] if found else ""}
            items = (await client.get("/v1/exchange/held", params=asked)).json()["items"]
            assert [each["seq"] for each in items] == [7], "a page that is not full would be the last"
            found += [each["tenant_id"] for each in items]
        assert found == ours
        asked = {"origin": "asks.example", "after": tenant}
        all_held = (await root.get("/v1/exchange/held", params=asked)).json()["items"]
        assert {each["tenant_id"] for each in all_held} >= {*theirs, *ours}


async def test_a_peer_is_told_of_the_tenants_that_it_may_audit(served: Served, tenant: str) -> None:
    theirs, other = f"{tenant}-team_a", f"{tenant}-teams"
    async with served.client(served.root) as root:
        for each in (theirs, other):
            job = {"tenant_id": each, "spec": {}, "assigned_dcs": ["x"], "durability": "REGIONAL"}
            assert (await root.post("/v1/jobs", json=job)).status_code == 201
    peer = await served.issue("audit", tenants=f"{tenant}-team_*", name="peer")
    reader = await served.issue("read", tenants=f"{tenant}-team_*", name="reader")
    asked, wanted = {"origin": "asks.example"}, {"tenant_id": theirs, "from_seq": 1, "to_seq": 3}
    async with served.client(peer["token"]) as client:
        listed = (await client.get("/v1/exchange/news", params=asked)).json()
        assert ([each["tenant_id"] for each in listed["items"]], listed["is_list"]) == ([theirs], True)
        asked["cursor"] = listed["cursor"]
        assert not (await client.get("/v1/exchange/news", params=asked)).json()["is_list"]
        # What is not stored is lacking: the export says why it cannot be had.
        ranges = (await client.get("/v1/exchange/lacking", params=wanted)).json()["items"]
        assert ranges == [{"from_seq": 1, "to_seq": 3}]
        hidden = await client.get("/v1/exchange/lacking", params=wanted | {"tenant_id": other})
        assert hidden.status_code == 403
    async with served.client(reader["token"]) as client:
        for path, params in (("news", asked), ("lacking", wanted)):
            assert (await client.get(f"/v1/exchange/{path}", params=params)).status_code == 403, path


async def test_an_admin_of_some_tenants_gives_no_rights_for_others(served: Served, tenant: str) -> None:
    boss = await served.issue("admin", tenants=f"{tenant}-*", name="boss")
    hidden = await served.issue("read", tenants="other", name="hidden")
    async with served.client(boss["token"]) as client:
        for tenants, expected in (([f"{tenant}-a"], 201), ([f"{tenant}-a*"], 201), (["other"], 403), (["*"], 403)):
            body = {"name": "worker", "rights": ["write"], "tenants": tenants}
            assert (await client.post("/v1/tokens", json=body)).status_code == expected, tenants
        assert {item["name"] for item in (await client.get("/v1/tokens")).json()["items"]} == {"boss", "worker"}
        assert (await client.delete(f"/v1/tokens/{hidden['token_id']}")).status_code == 404
        assert (await client.post("/v1/keys/rotate", json={})).status_code == 403
        assert (await client.put("/v1/tenants/other/privacy", json={"fields": []})).status_code == 403
    async with served.client(hidden["token"]) as client:
        assert await status(client) == 200


@pytest.mark.parametrize(
    ("pattern", "covered", "others"),
    [
        ("acme", ["acme"], ["acme-2", "acm", "ac*", "*", "_system"]),
        ("team-*", ["team-a", "team-a*", "team-*"], ["team", "te*", "*", "_system"]),
        ("*", ["acme", "team-*", "*", "_system"], []),
        ("_system", ["_system"], ["acme", "*"]),
    ],
)
def test_what_a_pattern_of_tenants_covers(pattern: str, covered: list[str], others: list[str]) -> None:
    assert [each for each in covered + others if covers(pattern, each)] == covered


async def test_whoever_writes_the_database_issues_no_token(serve: Serve, superuser: asyncpg.Connection) -> None:
    """A row in the table of the log, whole and linked at the head, but without the word of an admitted key."""
    forged = callers.new_token()
    async with serve() as served:
        await served.issue("read", name="real")
    facts = {
        "type": "TOKEN_ISSUED",
        "token_id": "f" * 16,
        "name": "intruder",
        "digest": forged.digest.hex(),
        "rights": ALL,
        "tenants": ["*"],
    }
    real = json.loads(
        await superuser.fetchval(
            "SELECT payload FROM scheduler.scheduler_log WHERE action = 'TOKEN_ISSUED' ORDER BY seq DESC LIMIT 1"
        )
    )
    for statement in ({}, {"statement": real["statement"]}):
        payload = canonical.encode({**facts, **statement})
        subject = f"{TOKEN_PREFIX}{'f' * 16}"
        await forge(superuser, "_system", "node-of-mine", subject, SystemAction.TOKEN_ISSUED, payload)
    async with serve() as served, served.client(forged.text) as intruder:
        assert await status(intruder) == 401


async def test_a_token_that_was_revoked_stays_so_when_the_database_forgets_it(
    serve: Serve, superuser: asyncpg.Connection
) -> None:
    async with serve() as served:
        made = await served.issue("read", name="stolen")
        async with served.client(served.root) as root:
            await root.delete(f"/v1/tokens/{made['token_id']}")
        assert made["token_id"] in KEPT_TOKENS.load(served.services[Settings].data_dir).revoked
    await superuser.execute("SET session_replication_role = replica")
    await superuser.execute("UPDATE scheduler.scheduler_log SET job_id = 'x' WHERE action = 'TOKEN_REVOKED'")
    async with serve() as again, again.client(made["token"]) as thief, served.client(served.root) as root:
        root.base_url = again.url
        assert await status(root) == 200
        assert await status(thief) == 401


async def test_whoever_lost_all_tokens_makes_another_where_nobody_is_asked_who_he_is(serve: Serve) -> None:
    async with serve() as served:
        (lost,) = await until(served.services[Tokens].counting, "the first token is issued")
    async with serve(auth={"mode": "none"}) as opened, opened.client(None) as anybody:
        assert (await anybody.delete(f"/v1/tokens/{lost.token_id}")).status_code == 200
        body = {"name": "root", "rights": ALL, "tenants": ["*"]}
        made = (await anybody.post("/v1/tokens", json=body)).json()["token"]
    async with serve() as again, again.client(made) as root, again.client(served.root) as finder:
        assert [await status(client, "/v1/tokens") for client in (root, finder)] == [200, 401]


async def test_where_the_chain_is_damaged_what_is_revoked_stays_so_and_is_revoked_at_once(
    serve: Serve, superuser: asyncpg.Connection
) -> None:
    """A node that reads no further than a row which somebody altered, here that of a revocation."""
    async with serve() as served, served.client(served.root) as root:
        stolen, leaver = [await served.issue("read", name=name) for name in ("stolen", "leaver")]
        await root.delete(f"/v1/tokens/{stolen['token_id']}")
        folder = served.services[Settings].data_dir
    (folder / KEPT_TOKENS.name).unlink()
    await superuser.execute("SET session_replication_role = replica")
    await superuser.execute("UPDATE scheduler.scheduler_log SET payload = '{}' WHERE action = 'TOKEN_REVOKED'")
    async with serve() as again, again.client(served.root) as root, again.client(leaver["token"]) as client:
        assert again.services[Trust].fault() is not None
        async with again.client(stolen["token"]) as thief:
            assert [await status(each) for each in (root, client, thief)] == [200, 200, 401]
        assert (await root.delete(f"/v1/tokens/{leaver['token_id']}")).status_code == 200
        assert [await status(each) for each in (root, client)] == [200, 401]


async def test_a_token_is_revoked_while_postgres_is_away(
    proxy: PostgresProxy, make_settings: MakeSettings, superuser: asyncpg.Connection
) -> None:
    settings = make_settings("node", auth={"mode": "tokens"}, write={"timeout": "3s"})
    async with serving_with_tokens(settings, proxy.url, with_first=True) as served, served.client(served.root) as root:
        made = await served.issue("read", name="stolen")
        await proxy.refuse()
        async with served.client(made["token"]) as thief:
            answer = await root.delete(f"/v1/tokens/{made['token_id']}")
            assert (answer.status_code, answer.json()["type"].rpartition("/")[2]) == (503, "durability-timeout")
            assert await status(thief) == 401
            assert KEPT_TOKENS.load(settings.data_dir).revoked == [made["token_id"]]
            await proxy.accept()

            async def is_chained() -> int:
                count: int = await superuser.fetchval(
                    "SELECT count(*) FROM scheduler.scheduler_log WHERE action = 'TOKEN_REVOKED'"
                )
                return count

            await until(is_chained, "it is chained once Postgres is back")
            assert [await status(each) for each in (root, thief)] == [200, 401]


class _SlowFirst(KeptFile[Any]):
    """A file whose first write takes until it is let go."""

    def __init__(self, of: KeptFile[Any]) -> None:
        self.__dict__.update(vars(of))
        self.begun, self.let_go = threading.Event(), threading.Event()

    def store(self, folder: Path, value: Any) -> None:
        if not self.begun.is_set():
            self.begun.set()
            self.let_go.wait(UNTIL_S)
        super().store(folder, value)


async def test_of_two_tokens_revoked_at_once_both_are_kept(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve() as served, served.client(served.root) as root:
        made = [(await served.issue("read", name=name))["token_id"] for name in ("one", "other")]
        file = _SlowFirst(KEPT_TOKENS)
        monkeypatch.setattr(keys_tokens, "KEPT_TOKENS", file)
        one = asyncio.ensure_future(root.delete(f"/v1/tokens/{made[0]}"))
        await until(file.begun.is_set, "the first is being kept")
        other = asyncio.ensure_future(root.delete(f"/v1/tokens/{made[1]}"))
        await until(lambda: len(served.services[Tokens]._kept.revoked) == 2, "the second is to be kept, too")
        file.let_go.set()
        assert [answer.status_code for answer in await asyncio.gather(one, other)] == [200, 200]
        assert KEPT_TOKENS.load(served.services[Settings].data_dir).revoked == sorted(made)


class _FullDisk(KeptFile[Any]):
    """A file that cannot be written."""

    def __init__(self, of: KeptFile[Any]) -> None:
        self.__dict__.update(vars(of))

    def store(self, folder: Path, value: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def test_a_revocation_counts_also_while_the_disk_takes_nothing(
    serve: Serve, superuser: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve() as served, served.client(served.root) as root:
        made = await served.issue("read", name="leaver")
        monkeypatch.setattr(keys_tokens, "KEPT_TOKENS", _FullDisk(KEPT_TOKENS))
        async with served.client(made["token"]) as leaver:
            assert (await root.delete(f"/v1/tokens/{made['token_id']}")).status_code == 200
            assert await status(leaver) == 401
            folder = served.services[Settings].data_dir
            assert KEPT_TOKENS.load(folder).revoked == []
            monkeypatch.setattr(keys_tokens, "KEPT_TOKENS", KEPT_TOKENS)
            await until(lambda: KEPT_TOKENS.load(folder).revoked, "it is kept once the disk takes it")


async def test_the_first_token_does_not_come_back_when_its_file_stays(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash before the file is removed, or a folder that takes nothing: the file says no more than the ledger."""
    monkeypatch.setattr(keys_tokens, "FIRST_TOKEN", _FullDisk(FIRST_TOKEN))
    async with serve() as served, served.client(served.root) as root:
        tokens_of = served.services[Tokens]
        (issued,) = await until(tokens_of.counting, "the first token is issued")
        folder = served.services[Settings].data_dir
        assert (await root.delete(f"/v1/tokens/{issued.token_id}")).status_code == 200
        assert FIRST_TOKEN.load(folder) is not None
        assert await status(root) == 401
    monkeypatch.setattr(keys_tokens, "FIRST_TOKEN", FIRST_TOKEN)
    async with serve() as served, served.client(served.root) as root:
        await until(lambda: not (folder / FIRST_TOKEN.name).exists(), "the file is removed")
        assert await status(root) == 401
        assert len(served.services[Tokens]._issued) == 1


async def test_a_file_of_a_first_token_that_cannot_be_read_lets_no_revoked_token_count(serve: Serve) -> None:
    async with two_nodes(serve) as (served, other):
        root_id = served.services[Tokens].counting()[0].token_id
        async with served.client(served.root) as here, other.client(served.root) as there:
            await until(lambda: other.services[Tokens].counting(), "the other node knows it")
            (other.services[Settings].data_dir / FIRST_TOKEN.name).write_text("{")

            async def counts_not() -> bool:
                return await status(there) == 401

            assert (await here.delete(f"/v1/tokens/{root_id}")).status_code == 200
            await until(counts_not, "the other node knows it is revoked")
            (other.services[Settings].data_dir / FIRST_TOKEN.name).unlink()


async def test_an_admin_of_some_tenants_calls_nobody_as_an_admin_of_others_is_called(
    served: Served, tenant: str
) -> None:
    alice, boss_name, bob = [f"{name}-{tenant}" for name in ("alice", "boss", "bob")]
    await served.issue("operate", tenants="*", name=alice)
    boss = await served.issue("admin", tenants=f"{tenant}-*", name=boss_name)
    async with served.client(boss["token"]) as client:
        body: dict[str, Any] = {"rights": ["admin"], "tenants": [f"{tenant}-a"]}
        for name, expected in ((alice, 403), ("root", 403), (boss_name, 201), (bob, 201), (bob, 201)):
            assert (await client.post("/v1/tokens", json={"name": name, **body})).status_code == expected, name
    assert (await served.issue("read", name=alice))["name"] == alice


async def test_what_nobody_needs_a_token_for_names_no_tenant(serve: Serve) -> None:
    async with serve() as served, served.client(None) as nobody, served.client(served.root) as root:
        await root.post("/v1/jobs", json={"tenant_id": "acme"})
        served.services[BundleImporter]._on_damaged(ChainDamagedError("acme", "takes nothing"))
        some = await served.issue("operate", "audit", tenants="other")
        async with served.client(some["token"]) as other:
            for client, is_told in ((nobody, False), (other, False), (root, True)):
                ready = await client.get("/readyz")
                assert ready.json()["checks"]["tenants"]["ok"] is False
                assert ("acme" in ready.text) is is_told
                assert ("acme" in (await client.get("/v1/keys")).text) is is_told


async def test_no_cache_that_many_share_keeps_what_needs_a_token(served: Served, tenant: str) -> None:
    async with served.client(served.root) as root:
        await root.post("/v1/jobs", json={"tenant_id": tenant})
        for path in ("entries/000.p/1", "0/000.p/1"):

            async def tile(path: str = path) -> httpx.Response | None:
                answer = await root.get(f"/v1/log/{tenant}/tile/{path}")
                return answer if answer.status_code == 200 else None

            answer = await until(tile, "the tile is there")
            assert answer.headers["cache-control"] == "private, max-age=31536000, immutable"


async def test_how_long_a_wrong_token_takes_says_nothing_of_a_right_one(serve: Serve) -> None:
    """A wrong token that begins as a right one does takes as long as one that does not."""
    async with serve() as served:
        right = (await served.issue("read"))["token"].encode()
        known = served.services[Tokens].known
    near, far = right[:-1] + (b"A" if right[-1:] != b"A" else b"B"), callers.new_token().text.encode()
    took: dict[bytes, list[int]] = {near: [], far: []}
    for _ in range(4000):
        for wrong in (near, far):
            began = time.perf_counter_ns()
            with pytest.raises(UnauthenticatedError):
                known.caller(wrong, 0.0)
            took[wrong].append(time.perf_counter_ns() - began)
    medians = [sorted(each)[len(each) // 2] for each in took.values()]
    assert max(medians) < 1.5 * min(medians)


async def test_no_token_has_the_name_of_a_principal_that_others_name(serve: Serve, tmp_path: Path) -> None:
    async with serve() as served, served.client(served.root) as root:
        for name in ("oidc:ada", "", "a b", "-a", "a" * 129, "\u00e4"):
            done = run_tally("token", "new", "--first", "--", name, TALLY_DATA_DIR=str(tmp_path / "data"))
            assert (done.returncode, "is no name" in done.stderr) == (1, True), done.stderr
            body = {"name": name, "rights": ["read"], "tenants": ["*"]}
            assert (await root.post("/v1/tokens", json=body)).status_code == 422, name


def test_a_principal_may_read_system_with_audit_alone() -> None:
    reader = Principal("r", "token", (grant_of(["read"], ["*"]),))
    auditor = Principal("a", "token", (grant_of(["audit"], ["*"]),))
    assert [each.may(Right.READ, "_system") for each in (reader, auditor)] == [False, True]
    assert [each.may(Right.READ, "acme") for each in (reader, auditor)] == [True, False]


async def test_the_command_issues_lists_and_revokes(serve: Serve, tmp_path: Path) -> None:
    async with serve() as served:
        secret = tmp_path / "token"
        secret.write_text(f"{served.root}\n")

        async def tally(*arguments: str, code: int = 0, token: str = "") -> str:
            shown = {"TALLY_TOKEN": token} if token else {}
            done = await asyncio.to_thread(run_tally, "token", *arguments, TALLY_URL=served.url, **shown)
            assert done.returncode == code, done.stderr
            return done.stdout if code == 0 else done.stderr

        made = (await tally("new", "ci", "-r", "write", "-t", "team-*", "--token-file", str(secret))).strip()
        assert made.startswith(callers.TOKEN_PREFIX)
        async with served.client(made) as ci:
            assert (await ci.post("/v1/jobs", json={"tenant_id": "team-a"})).status_code == 201
        assert "forbidden" in await tally("list", code=1, token=made)
        assert "TALLY_TOKEN or --token-file" in await tally("list", code=1)
        assert "is no name: 1 to 128" in await tally("new", "a:b", "-r", "write", "-t", "*", code=1, token=served.root)
        wrong = await tally("new", "ci", "-r", "write", "-t", "a b", code=1, token=served.root)
        assert "tenants.0: must be a tenant, the beginning of some and *, such as team-*, or * for all" in wrong
        wrong = await tally("new", "ci", "-r", "write", "-t", "a", "--expires", "3", code=1, token=served.root)
        assert "expires_in: a duration is a number with" in wrong
        empty = tmp_path / "empty"
        empty.touch()
        assert "empty is empty: it should hold a token" in await tally("list", "--token-file", str(empty), code=1)
        listed = await tally("list", token=served.root)
        token_id = next(line.split()[0] for line in listed.splitlines() if " ci: " in line)
        assert "counts no more" in await tally("revoke", token_id, token=served.root)
        async with served.client(made) as ci:
            assert await status(ci) == 401


async def test_tokens_that_nobody_is_asked_for_are_reported_at_each_start(
    make_settings: MakeSettings, run_server: RunServer
) -> None:
    settings = make_settings()
    settings.data_dir.mkdir()
    FIRST_TOKEN.store(settings.data_dir, FirstToken("root", callers.new_token().digest.hex()))
    for given, is_meant in (({}, False), ({"auth": {"allow_open": True}}, True)):
        with capture_logs() as lines:
            async with run_server(make_settings(**given)) as client:
                answer = await client.get("/readyz")
        assert [line["count"] for line in lines if line["event"] == "tokens_not_asked_for"] == [1]
        check = answer.json()["checks"]["authentication"]
        assert (answer.status_code, check["ok"]) == (200, is_meant)
        assert is_meant or "set auth.mode to tokens" in check["detail"]
