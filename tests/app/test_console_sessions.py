"""Sessions of the console: as much as their token, for pages of the service alone, until a time."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from http.cookies import SimpleCookie
from pathlib import Path
from urllib.parse import parse_qsl

import asyncpg
import httpx
import pytest

from app.trust.console_sessions import ENDED_MAX, ConsoleSessions, set_cookie, shown_cookie
from ledger.errors import InvalidInputError, UnauthenticatedError
from ledger.facts.events import SystemAction
from tests.app.chains import until
from tests.app.oidc_issuer import AUDIENCE, DISCOVERY, GRANTS, Issuer
from tests.app.served import Serve, Served
from tests.app.test_access_records import entries

OWN_PAGE = {"Sec-Fetch-Site": "same-origin"}
SESSION = "/v1/console/session"


@asynccontextmanager
async def signed_in(served: Served, token: str) -> AsyncIterator[httpx.AsyncClient]:
    """A browser whose user signed in with ``token``, on a page of the service."""
    async with served.client(None, **OWN_PAGE) as browser:
        answer = await browser.post(SESSION, json={"token": token}, headers={"Origin": served.url})
        assert answer.status_code == 201, answer.text
        yield browser


async def test_whoever_signs_in_has_the_rights_of_his_token_and_is_on_record_as_its_principal(
    serve: Serve, superuser: asyncpg.Connection
) -> None:
    async with serve() as served:
        issued = await served.issue("write", "operate", tenants="acme", name="ada")
        async with signed_in(served, issued["token"]) as ada:
            who = (await ada.get("/v1/whoami")).json()
            assert (who["principal"], who["token_id"], who["source"]) == ("ada", issued["token_id"], "token")
            body = {"tenant_id": "acme", "job_id": "one", "durability": "GLOBAL"}
            assert (await ada.post("/v1/jobs", json=body)).status_code == 201
            assert (await ada.post("/v1/jobs", json={**body, "tenant_id": "other"})).status_code == 403
            assert (await ada.get("/v1/jobs", params={"tenant_id": "acme"})).status_code == 403
            assert (await ada.post("/v1/snapshots", json={"tenant_id": "acme"})).status_code == 201
            assert (await ada.get(SESSION)).json()["principal"] == "ada"

        async def is_on_record() -> bool:
            acts = await entries(superuser, SystemAction.ACT_ALLOWED)
            return [act["route"] for act in acts if act["actor"] == "ada"] == ["POST /v1/snapshots"]

        await until(is_on_record, "what she did is on record as hers")
        async with served.client(served.root) as root:
            assert (await root.get("/v1/jobs/one")).json()["actor"] == "ada"


async def test_a_session_ends_with_its_token(serve: Serve) -> None:
    async with serve() as served, served.client(served.root) as root:
        issued = await served.issue("audit", name="ada")
        async with signed_in(served, issued["token"]) as ada:
            assert (await ada.get("/v1/whoami")).status_code == 200
            await root.delete(f"/v1/tokens/{issued['token_id']}")
            assert (await ada.get("/v1/whoami")).status_code == 401
            assert (await ada.get(SESSION)).json()["principal"] is None


async def test_a_watch_of_a_session_ends_when_somebody_signs_out(serve: Serve) -> None:
    async with serve() as served, signed_in(served, served.root) as ada, asyncio.timeout(60):
        await ada.post("/v1/jobs", json={"tenant_id": "acme", "job_id": "one", "durability": "GLOBAL"})
        async with ada.stream("GET", "/v1/watch", params={"tenant_id": "acme", "from_seq": 1}) as stream:
            lines = stream.aiter_lines()
            while "event: ENQUEUE" not in await anext(lines):
                pass
            kept = {"Cookie": f"tally_console={ada.cookies['tally_console']}"}
            assert (await ada.delete(SESSION)).status_code == 200
            async for _ in lines:
                pass
        assert (await ada.get("/v1/whoami")).status_code == 401
        async with served.client(None, **OWN_PAGE) as thief:
            assert (await thief.get("/v1/whoami", headers=kept)).status_code == 401


async def test_only_pages_of_the_service_may_use_a_session(serve: Serve) -> None:
    async with serve() as served:
        async with signed_in(served, served.root) as ada:
            value = ada.cookies["tally_console"]
        own, other = served.url, "https://evil.example"
        refused: list[dict[str, str]] = [
            {},
            {"Sec-Fetch-Site": "cross-site"},
            {"Sec-Fetch-Site": "same-site"},
            {"Sec-Fetch-Site": "none"},
            {"Origin": other},
            {"Origin": "null"},
            {"Origin": own.rpartition(":")[0] + ":1"},
            {"Origin": other, **OWN_PAGE},
            {"Origin": own, "Sec-Fetch-Site": "cross-site"},
        ]
        async with served.client(None) as page:
            for headers in refused:
                sent = {"Cookie": f"tally_console={value}", **headers}
                for path in ("/v1/whoami", "/v1/watch?tenant_id=acme", "/v1/tokens"):
                    assert (await page.get(path, headers=sent)).status_code == 401, (headers, path)
                answer = await page.post("/v1/jobs", json={"tenant_id": "acme"}, headers=sent)
                assert answer.status_code in (401, 403), headers
            for headers in ({"Origin": own}, OWN_PAGE, {"Origin": own, **OWN_PAGE}):
                sent = {"Cookie": f"tally_console={value}", **headers}
                assert (await page.get("/v1/whoami", headers=sent)).status_code == 200, headers


async def test_no_other_page_signs_anybody_in_or_out(serve: Serve) -> None:
    async with serve() as served, signed_in(served, served.root) as ada:
        for headers in ({"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}, {"Origin": "null"}):
            assert (await ada.post(SESSION, json={"token": served.root}, headers=headers)).status_code == 403
            assert (await ada.delete(SESSION, headers=headers)).status_code == 403
        assert (await ada.get("/v1/whoami")).status_code == 200


async def test_what_is_no_token_signs_nobody_in_and_is_repeated_nowhere(
    serve: Serve, superuser: asyncpg.Connection, capfd: pytest.CaptureFixture[str]
) -> None:
    wrong = "tally_" + "w" * 43
    async with serve() as served, served.client(None) as nobody:
        for token, status in ((wrong, 401), ("a b", 422), ("", 422), ("x" * 20_000, 413)):
            answer = await nobody.post(SESSION, json={"token": token})
            assert (answer.status_code, "set-cookie" in answer.headers) == (status, False)
            assert wrong not in answer.text
        async with signed_in(served, served.root) as root:
            value = root.cookies["tally_console"]
        refusals = await until(lambda: entries(superuser, SystemAction.ACCESS_REFUSED), "the refusals are on record")
        assert refusals[0]["refusals"][0]["route"] == f"POST {SESSION}"
    said = "".join(capfd.readouterr())
    assert wrong not in said
    assert served.root not in said + value
    assert value not in said


async def test_a_cookie_is_shown_to_no_script_and_no_other_site_and_over_tls_only_there(serve: Serve) -> None:
    async with serve() as served, served.client(None) as nobody:
        expires_at = datetime.now(UTC) + timedelta(hours=1)
        issued = await served.issue("read", name="ada", expires_in="1h")
        set_to = (await nobody.post(SESSION, json={"token": issued["token"]})).headers["set-cookie"]
    (cookie,) = SimpleCookie(set_to).values()
    assert (cookie.key, cookie["path"], cookie["httponly"]) == ("tally_console", "/", True)
    assert cookie["samesite"] == "Strict"
    assert abs(int(cookie["max-age"]) - (expires_at - datetime.now(UTC)).total_seconds()) < 60
    assert cookie["domain"] == ""
    over_tls = set_cookie("https", "v", 5)
    assert over_tls.startswith("__Host-tally_console=v; Path=/;")
    assert over_tls.endswith("; Secure")
    headers = [(b"host", b"h"), (b"sec-fetch-site", b"same-origin"), (b"cookie", b"tally_console=forced; a=b")]
    assert shown_cookie(headers, "https") is None
    assert shown_cookie(headers, "http") == "forced"


def test_a_cookie_that_comes_twice_is_refused() -> None:
    twice = b"tally_console=a; tally_console=b"
    with pytest.raises(UnauthenticatedError, match="twice"):
        shown_cookie([(b"sec-fetch-site", b"same-origin"), (b"cookie", twice)], "http")


def test_what_was_not_sealed_here_or_was_changed_opens_nothing() -> None:
    sessions = ConsoleSessions(b"s" * 32, timedelta(hours=1))
    now_s = time.time()
    session, value = sessions.begin(b"tally_secret", None, now_s)
    assert sessions.open(value, now_s) == session
    assert session.token == b"tally_secret"
    assert "tally_secret" not in value
    others = ConsoleSessions(b"t" * 32, timedelta(hours=1)).begin(b"tally_secret", None, now_s)[1]
    swapped = [value[:at] + ("A" if value[at] != "A" else "B") + value[at + 1 :] for at in range(3, len(value) - 1)]
    for forged in ("", "v1.", "v1", "tally_secret", "v1.é", "v1.AAAA", value[:-4], value[3:] + "v", others, *swapped):
        with pytest.raises(UnauthenticatedError):
            sessions.open(forged, now_s)


def test_a_session_is_no_longer_than_its_token_and_than_the_setting() -> None:
    sessions = ConsoleSessions(b"s" * 32, timedelta(hours=1))
    session, value = sessions.begin(b"t", None, 1000.0)
    assert session.expires_s == 4600
    assert sessions.open(value, 4599.9).token == b"t"
    with pytest.raises(UnauthenticatedError, match="ended"):
        sessions.open(value, 4600.0)
    short, _ = sessions.begin(b"t", datetime.fromtimestamp(1060, UTC), 1000.0)
    assert short.expires_s == 1060


def test_sessions_that_were_ended_are_remembered_until_they_would_have_ended() -> None:
    sessions = ConsoleSessions(b"s" * 32, timedelta(hours=1))
    session, value = sessions.begin(b"t", None, 0.0)
    sessions.end(session, 1.0)
    with pytest.raises(UnauthenticatedError, match="ended"):
        sessions.open(value, 2.0)
    for number in range(ENDED_MAX - 1):
        sessions.end(session._replace(session_id=number.to_bytes(16)), 3.0)
    with pytest.raises(UnauthenticatedError, match="ended"):
        sessions.open(value, 4.0)
    sessions.end(session._replace(session_id=b"another", expires_s=9999), 3600.0)
    assert len(sessions._ended) == 1


def test_a_token_that_no_cookie_holds_is_refused() -> None:
    sessions = ConsoleSessions(b"s" * 32, timedelta(hours=1))
    with pytest.raises(InvalidInputError, match="too long"):
        sessions.begin(secrets.token_urlsafe(4000).encode(), None, 0.0)


async def test_where_nobody_is_asked_there_is_nothing_to_sign_in_to(client: httpx.AsyncClient) -> None:
    assert (await client.get(SESSION)).json() == {
        "auth_mode": "none", "oidc_sign_in": False, "principal": None, "expires_at": None, "trace_url": None
    }  # fmt: skip
    answer = await client.post(SESSION, json={"token": "x"})
    assert (answer.status_code, "set-cookie" in answer.headers) == (201, False)
    assert (await client.get("/v1/console/oidc")).status_code == 404
    assert (await client.get("/v1/console/oidc/callback", params={"code": "x", "state": "y"})).status_code == 404


# --- at an issuer ---------------------------------------------------------------------------------

CALLBACK = "/v1/console/oidc/callback"
REFUSED = "/console#/sign-in/refused"


@pytest.fixture
def serve_oidc(serve: Serve, issuer: Issuer) -> Serve:
    """Runs a node where people sign in at the issuer: ``async with serve_oidc() as served``."""
    known = {"issuer": issuer.url, "audience": [AUDIENCE], "grants": GRANTS}
    return lambda **more: serve(auth={"mode": "oidc", "oidc": {**known, "client_id": "console", **more}})


async def departed(browser: httpx.AsyncClient, issuer: Issuer) -> dict[str, str]:
    """What a browser that signs in is sent to the issuer with."""
    answer = await browser.get("/v1/console/oidc")
    assert answer.status_code == 303
    place, _, query = answer.headers["location"].partition("?")
    assert place == f"{issuer.url}/authorize"
    return dict(parse_qsl(query))


async def test_who_signs_in_at_the_issuer_has_a_session_over_its_token(serve_oidc: Serve, issuer: Issuer) -> None:
    async with serve_oidc(scope="openid ledger") as served, served.client(None) as browser:
        asked = await departed(browser, issuer)
        assert asked["redirect_uri"] == served.url + CALLBACK
        assert (asked["client_id"], asked["scope"], asked["response_type"]) == ("console", "openid ledger", "code")
        issuer.gives = {"access_token": issuer.token(groups="writers", exp=int(time.time()) + 60)}
        returned = {"code": "c", "state": asked["state"]}
        answer = await browser.get(CALLBACK, params={**returned, "session_state": "of theirs"})
        assert (answer.status_code, answer.headers["location"]) == (303, "/console#/signed-in")
        ((_, form),) = issuer.posted
        assert (form["code"], form["redirect_uri"]) == ("c", asked["redirect_uri"])
        digest = hashlib.sha256(form["code_verifier"].encode()).digest()
        assert asked["code_challenge"] == base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
        who = await browser.get("/v1/whoami", headers=OWN_PAGE)
        assert (who.json()["principal"], who.json()["source"]) == ("oidc:ada", "oidc")
        ends = datetime.fromisoformat((await browser.get(SESSION, headers=OWN_PAGE)).json()["expires_at"])
        assert ends - datetime.now(UTC) < timedelta(seconds=61)
        assert (await browser.get(CALLBACK, params=returned)).headers["location"] == REFUSED


async def test_an_id_token_counts_where_the_access_token_is_for_somebody_else(
    serve_oidc: Serve, issuer: Issuer, tmp_path: Path
) -> None:
    secret = tmp_path / "client.secret"
    secret.write_text("of:the client\n")
    secret.chmod(0o600)
    async with serve_oidc(client_secret_file=secret) as served, served.client(None) as browser:
        asked = await departed(browser, issuer)
        issuer.gives = {"access_token": "opaque", "id_token": issuer.token()}
        answer = await browser.get(CALLBACK, params={"code": "c", "state": asked["state"]})
        assert answer.headers["location"] == "/console#/signed-in"
        ((headers, _),) = issuer.posted
        assert base64.b64decode(headers["authorization"].removeprefix("Basic ")) == b"console:of%3Athe%20client"


async def test_nobody_is_signed_in_by_what_he_did_not_begin_or_the_issuer_does_not_confirm(
    serve_oidc: Serve, issuer: Issuer
) -> None:
    async with serve_oidc() as served, served.client(None) as victim, served.client(None) as attacker:
        theirs = await departed(attacker, issuer)
        issuer.gives = {"access_token": issuer.token()}
        for params in (
            {"code": "c", "state": theirs["state"]},
            {"code": "c"},
            {"code": "c", "state": ""},
        ):
            answer = await victim.get(CALLBACK, params=params)
            assert answer.headers["location"] == REFUSED
            assert "tally_console" not in answer.headers["set-cookie"]
        assert issuer.posted == []
        for gives, expected in (
            ({"access_token": issuer.token(aud="somebody-else"), "id_token": "x"}, REFUSED),
            ({"error": "invalid_grant"}, "/console#/sign-in/unanswered"),
        ):
            issuer.gives = gives
            asked = await departed(victim, issuer)
            answer = await victim.get(CALLBACK, params={"code": "c", "state": asked["state"]})
            assert answer.headers["location"] == expected
            assert victim.cookies.get("tally_console") is None
        asked = await departed(victim, issuer)
        answer = await victim.get(CALLBACK, params={"error": "access_denied", "state": asked["state"]})
        assert answer.headers["location"] == "/console#/sign-in/denied"
        assert issuer.asked[f"/realm{DISCOVERY}"] <= 2, "who begins to sign in makes the service ask no more than once"


async def test_who_does_not_say_what_the_service_is_called_cannot_sign_in_at_the_issuer(
    serve_oidc: Serve, issuer: Issuer
) -> None:
    async with serve_oidc() as served:
        port = httpx.URL(served.url).port
        for path, expected in (("/v1/console/oidc", b"422"), (f"{CALLBACK}?code=c&state=s", b"303")):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"GET {path} HTTP/1.0\r\n\r\n".encode())
            assert (await reader.read()).split(b" ")[1] == expected
            writer.close()
    assert issuer.posted == []


async def test_where_the_issuer_is_away_people_are_told_so_and_let_in_once_it_is_back(
    serve_oidc: Serve, issuer: Issuer
) -> None:
    issuer.stop()
    async with serve_oidc() as served, served.client(None) as browser:
        assert (await browser.get("/v1/console/oidc")).headers["location"] == "/console#/sign-in/unanswered"
        issuer.start()

        async def leads_to_the_issuer() -> bool:
            return str((await browser.get("/v1/console/oidc")).headers["location"]).startswith(issuer.url)

        await until(leads_to_the_issuer, "the issuer is asked again")
