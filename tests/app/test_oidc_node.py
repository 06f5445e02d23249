"""A node that takes the tokens of an OpenID Connect issuer beside its own."""

from __future__ import annotations

import json
import time
from functools import partial

import pytest

from app.edge.accepted import AccessControl
from app.runtime.principals import Right
from app.share import watch as watchers
from app.trust.oidc import NAME_CHARACTERS_MAX
from tests.app.chains import until
from tests.app.event_streams import watching
from tests.app.oidc_issuer import AUDIENCE, GRANTS, JWKS, Issuer, make_key, segment
from tests.app.served import Serve
from tests.app.test_tokens import status


@pytest.fixture
def serve_oidc(serve: Serve, issuer: Issuer) -> Serve:
    """Runs a node that takes the issuer's tokens, and those of the ledger: ``async with serve_oidc() as served``."""
    oidc = {"issuer": issuer.url, "audience": [AUDIENCE], "grants": GRANTS, "refresh_interval": "1s"}
    return partial(serve, auth={"mode": "oidc", "oidc": oidc})


async def test_a_node_knows_callers_by_the_issuers_tokens_and_by_its_own(serve_oidc: Serve, issuer: Issuer) -> None:
    async with serve_oidc() as served:
        await until(lambda: issuer.asked[JWKS] > 1, "the keys are followed before anybody calls")
        expires_s = int(time.time()) + 600
        token = issuer.token(groups=["writers"], exp=expires_s)
        async with served.client(token) as ada, served.client(served.root) as root:
            answer = (await ada.get("/v1/whoami")).json()
            assert (answer["principal"], answer["source"], answer["token_id"]) == ("oidc:ada", "oidc", None)
            assert answer["expires_at"] == time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(expires_s))
            assert answer["grants"] == [{"rights": ["read", "write"], "tenants": ["team-*", "acme"]}]
            for tenant, expected in (("team-a", 201), ("acme", 201), ("other", 403)):
                assert (await ada.post("/v1/jobs", json={"tenant_id": tenant})).status_code == expected
            assert await status(ada, "/v1/chain/head?tenant_id=acme") == 403
            assert await status(root, "/v1/chain/head?tenant_id=acme") == 200
            assert (await root.get("/readyz")).json()["checks"]["issuer"]["ok"]
            made = await served.issue("read", tenants="acme", name="machine")
        async with served.client(made["token"]) as machine, served.client(issuer.token()) as nobody:
            assert (await machine.get("/v1/whoami")).json()["source"] == "token"
            assert (await nobody.get("/v1/whoami")).json()["grants"] == []
            for path in ("/v1/jobs?tenant_id=acme", "/v1/tenants", "/metrics", "/v1/tokens"):
                assert await status(nobody, path) == 403
            assert (await nobody.post("/v1/jobs", json={"tenant_id": "acme"})).status_code == 403


async def test_who_the_issuer_names_stands_in_what_is_written(serve_oidc: Serve, issuer: Issuer) -> None:
    async with serve_oidc() as served:
        for name in ("auth0|5f7c8ec7", 'J\u00f6rg \U0001f600 "B" \\', "x" * NAME_CHARACTERS_MAX):
            async with served.client(issuer.token(sub=name, groups="writers")) as client:
                made = []
                for _ in range(2):
                    answer = await client.post("/v1/jobs", json={"tenant_id": "acme"})
                    assert answer.status_code == 201, answer.text
                    made.append(answer.json()["job_id"])
                line = json.dumps({"tenant_id": "acme", "type": "JobCreated", "job_id": f"of-{len(name)}"})
                answer = await client.post("/v1/events", content=line, headers={"Content-Type": "application/x-ndjson"})
                assert answer.status_code == 200, answer.text
                for job in (*made, f"of-{len(name)}"):
                    assert (await client.get(f"/v1/jobs/{job}")).json()["actor"] == f"oidc:{name}"


async def test_a_token_that_does_not_count_is_401_and_is_repeated_nowhere(serve_oidc: Serve, issuer: Issuer) -> None:
    async with serve_oidc() as served:
        header, payload, _ = issuer.token().split(".")
        unsigned = f"{segment({'alg': 'none'})}.{payload}."
        for token in (unsigned, f"{header}.{payload}.AAAA", issuer.token(aud="x"), "a" * 17_000, "a.b.c", "a.b.c.d.e"):
            async with served.client(token) as client:
                for answer in (
                    await client.get("/v1/whoami"),
                    await client.post("/v1/jobs", json={"tenant_id": "acme"}),
                ):
                    assert answer.status_code == 401, token
                    assert answer.json()["type"].endswith("/unauthenticated")
                    assert answer.headers["WWW-Authenticate"].startswith("Bearer")
                    assert token not in answer.text


async def test_the_second_write_with_a_token_is_taken_from_the_connection(serve_oidc: Serve, issuer: Issuer) -> None:
    token = issuer.token(groups="writers")
    scope = {"headers": [(b"authorization", f"Bearer {token}".encode())]}
    async with serve_oidc() as served, served.client(token) as ada:
        callers = served.services[AccessControl].callers
        assert callers.known(scope) is None
        assert (await ada.post("/v1/jobs", json={"tenant_id": "acme"})).status_code == 201
        principal = callers.known(scope)
        assert principal is not None
        assert principal.may(Right.WRITE, "acme")
        issuer.stop()
        assert (await ada.post("/v1/jobs", json={"tenant_id": "acme"})).status_code == 201
        assert (await ada.post("/v1/jobs", json={"tenant_id": "other"})).status_code == 403
        assert callers.known(scope) is principal


async def test_a_node_without_the_issuers_keys_asks_callers_to_come_again(serve_oidc: Serve, issuer: Issuer) -> None:
    issuer.stop()
    async with serve_oidc() as served, served.client(issuer.token(groups="writers")) as ada:
        for answer in (await ada.get("/v1/whoami"), await ada.post("/v1/jobs", json={"tenant_id": "acme"})):
            assert (answer.status_code, answer.json()["type"].rpartition("/")[2]) == (503, "not-ready")
            assert int(answer.headers["Retry-After"]) > 0
        async with served.client(served.root) as root:
            assert await status(root) == 200
            ready = await root.get("/readyz")
            assert (ready.status_code, ready.json()["checks"]["issuer"]["ok"]) == (200, False)
        issuer.start()

        async def answers() -> bool:
            return await status(ada) == 200

        await until(answers, "the keys are fetched")
        assert (await ada.post("/v1/jobs", json={"tenant_id": "acme"})).status_code == 201
        issuer.stop()

        async def is_told() -> bool:
            return not (await ada.get("/readyz")).json()["checks"]["issuer"]["ok"]

        await until(is_told, "the issuer is found to be away")
        assert (await ada.post("/v1/jobs", json={"tenant_id": "acme"})).status_code == 201
        async with served.client(issuer.token(sub="bob")) as bob:
            assert await status(bob) == 200


async def test_a_key_that_the_issuer_rotated_out_counts_no_more(serve_oidc: Serve, issuer: Issuer) -> None:
    async with serve_oidc() as served:
        old = issuer.token(groups="writers")
        async with served.client(old) as ada:
            assert (await ada.post("/v1/jobs", json={"tenant_id": "acme"})).status_code == 201
            issuer.keys.append(make_key("RS256", "rsa-2"))
            async with served.client(issuer.token("rsa-2", sub="bob")) as bob:

                async def counts() -> bool:
                    return await status(bob) == 200

                await until(counts, "the new key counts")
                assert await status(ada) == 200
                issuer.keys = [key for key in issuer.keys if key.kid != "rsa"]

                async def counts_not() -> bool:
                    return await status(ada) == 401

                await until(counts_not, "the old key counts no more")
                assert (await ada.post("/v1/jobs", json={"tenant_id": "acme"})).status_code == 401
                assert await status(bob) == 200


@pytest.mark.parametrize("why", ["its key is withdrawn", "it expires"])
async def test_a_watch_ends_when_its_token_counts_no_more(
    serve_oidc: Serve, issuer: Issuer, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    monkeypatch.setattr(watchers, "LOOK_INTERVAL_S", 0.1)
    async with serve_oidc() as served:
        expires_s = int(time.time()) + 600
        async with served.client(issuer.token(groups="writers", exp=expires_s)) as ada:
            assert (await ada.post("/v1/jobs", json={"tenant_id": "acme"})).status_code == 201
            async with watching(ada, from_seq=1) as stream:
                assert len(await stream.take(1)) == 1
                if why == "it expires":
                    served.services[AccessControl].callers.now_s = lambda: expires_s + 600
                else:
                    issuer.keys = [make_key("RS256", "rsa-2")]
                assert await stream.rest() == []


async def test_a_key_that_takes_the_name_of_another_takes_its_place(serve_oidc: Serve, issuer: Issuer) -> None:
    async with serve_oidc() as served:
        old = issuer.token()
        async with served.client(old) as ada:
            assert await status(ada) == 200
            issuer.keys[0] = make_key("RS256", "rsa")
            async with served.client(issuer.token()) as again:

                async def counts() -> bool:
                    return await status(again) == 200

                await until(counts, "the new key counts")
            assert await status(ada) == 401
