"""The keys of an OpenID Connect issuer that is away, lies, hangs, or withdraws them."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from app.trust import oidc
from app.trust.oidc import ASK_PAUSE_S, AWAY_MAX_S, DOCUMENT_BYTES_MAX
from ledger.errors import NotReadyError
from tests.app.chains import until
from tests.app.oidc_issuer import DISCOVERY, JWKS, Checked, Issuer, certify, make_key


async def test_keys_are_followed_and_count_on_for_a_bounded_time_while_the_issuer_is_away(
    checked: Checked, issuer: Issuer
) -> None:
    token = issuer.token()
    await checked.caller(token)
    issuer.stop()
    checked.clock_s = AWAY_MAX_S
    assert checked.known(token) is not None
    assert (await checked.caller(issuer.token(sub="bob"))).id == "oidc:bob"
    checked.clock_s += 1
    assert checked.known(token) is None
    with pytest.raises(NotReadyError):
        await checked.caller(token)
    assert "does not say what its keys are" in (checked.keys.fault or "")
    issuer.start()
    with pytest.raises(NotReadyError):
        await checked.caller(token)
    checked.clock_s += ASK_PAUSE_S
    assert (await checked.caller(token)).id == "oidc:ada"
    assert checked.keys.fault is None


async def test_tokens_that_name_unknown_keys_make_nobody_ask_more_often_than_allowed(
    checked: Checked, issuer: Issuer
) -> None:
    await checked.caller(issuer.token())
    checked.clock_s += ASK_PAUSE_S
    for number in range(50):
        await checked.refused(issuer.token(f"garbage-{number}", key=issuer.key("rsa")))
    assert issuer.asked[JWKS] == 2
    issuer.keys.append(make_key("ES256", "next"))
    await checked.refused(issuer.token("next", "ES256"), "does not publish")
    checked.clock_s += ASK_PAUSE_S
    assert (await checked.caller(issuer.token("next", "ES256"))).id == "oidc:ada"
    assert issuer.asked[JWKS] == 3
    assert (await checked.caller(issuer.token())).id == "oidc:ada"


async def test_many_first_tokens_at_once_ask_the_issuer_once(checked: Checked, issuer: Issuer) -> None:
    held = issuer.hanging[JWKS] = threading.Event()
    made = [asyncio.create_task(checked.caller(issuer.token(sub=f"u{number}"))) for number in range(20)]
    await until(lambda: issuer.asked[JWKS], "the issuer is asked")
    held.set()
    assert {principal.id for principal in await asyncio.gather(*made)} == {f"oidc:u{number}" for number in range(20)}
    assert issuer.asked[JWKS] == 1


WRONG_ANSWERS: dict[str, tuple[int, dict[str, str], bytes]] = {
    "redirects": (302, {"Location": "/elsewhere"}, b""),
    "redirects to no address": (302, {"Location": "http://xn--ls8h-.la/"}, b""),
    "fails": (500, {}, b"{}"),
    "is huge": (200, {}, b'{"keys": [' + b" " * DOCUMENT_BYTES_MAX + b"]}"),
    "is no JSON": (200, {}, b"<html>"),
    "is a list": (200, {}, b"[]"),
    "is other JSON": (200, {}, b'{"jwks": []}'),
    "has no list": (200, {}, b'{"keys": {}}'),
    "is nested": (200, {}, b"[" * 100_000),
    "is cut short": (200, {"Content-Length": "100"}, b'{"keys": []}'),
    "is packed": (200, {"Content-Encoding": "gzip"}, b"\x1f\x8b\x08"),
}


@pytest.mark.parametrize("place", [JWKS, f"/realm{DISCOVERY}"])
@pytest.mark.parametrize("wrong", WRONG_ANSWERS)
async def test_an_issuer_that_answers_something_else_is_as_one_that_is_away(
    checked: Checked, issuer: Issuer, wrong: str, place: str
) -> None:
    issuer.answers[place] = WRONG_ANSWERS[wrong]
    with pytest.raises(NotReadyError):
        await checked.caller(issuer.token())
    assert "/elsewhere" not in issuer.asked
    issuer.answers.clear()
    checked.clock_s += ASK_PAUSE_S
    token = issuer.token()
    await checked.caller(token)
    issuer.answers[place] = WRONG_ANSWERS[wrong]
    checked.clock_s += ASK_PAUSE_S
    await checked.refused(issuer.token("unknown", key=issuer.key("rsa")))
    assert checked.known(token) is not None


@pytest.mark.parametrize("how", ["hanging", "dripping"])
async def test_an_issuer_that_does_not_come_to_an_end_is_not_waited_for_long(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    assert oidc.FETCH_TIMEOUT_S <= 10
    monkeypatch.setattr(oidc, "FETCH_TIMEOUT_S", 2.0)
    checked = Checked(issuer, jwks_uri=issuer.jwks_uri)
    held = getattr(issuer, how)[JWKS] = threading.Event()
    async with asyncio.timeout(30):
        with pytest.raises(NotReadyError):
            await checked.caller(issuer.token())
    assert "Timeout" in (checked.keys.fault or "")
    held.set()
    with pytest.raises(NotReadyError):
        await checked.caller(issuer.token())
    assert issuer.asked[JWKS] == 1


async def test_an_issuer_that_publishes_no_keys_has_withdrawn_all(checked: Checked, issuer: Issuer) -> None:
    token = issuer.token()
    await checked.caller(token)
    keys, issuer.keys = issuer.keys, []
    checked.clock_s += ASK_PAUSE_S
    await checked.refused(issuer.token("unknown", key=keys[0]), "does not publish")
    await checked.refused(token, "does not publish")


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        ({"issuer": "https://evil.example"}, "about another issuer"),
        ({"issuer": None}, "about another issuer"),
        ({"jwks_uri": "http://evil.example/keys"}, "names no jwks_uri"),
        ({"jwks_uri": "file:///etc/passwd"}, "names no jwks_uri"),
        ({"jwks_uri": "https://user@evil.example/"}, "names no jwks_uri"),
        ({"jwks_uri": 7}, "names no jwks_uri"),
        ({"jwks_uri": None}, "names no jwks_uri"),
    ],
)
async def test_a_discovery_document_that_is_not_the_issuers_own_counts_for_nothing(
    checked: Checked, issuer: Issuer, said: dict[str, Any], fault: str
) -> None:
    place = f"/realm{DISCOVERY}"
    issuer.answers[place] = (200, {}, json.dumps({**issuer.document(place), **said}).encode())
    with pytest.raises(NotReadyError):
        await checked.caller(issuer.token())
    assert fault in (checked.keys.fault or "")
    assert not issuer.asked[JWKS]


async def test_an_issuer_over_tls_is_believed_by_its_certificate_and_its_keys_come_so_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    public, certified = certify(tmp_path)
    issuer = Issuer()
    issuer.start(certified)
    try:
        stranger = Checked(issuer)
        with pytest.raises(NotReadyError):
            await stranger.caller(issuer.token())
        assert "CERTIFICATE_VERIFY_FAILED" in (stranger.keys.fault or "")
        monkeypatch.setenv("SSL_CERT_FILE", str(public))
        assert (await Checked(issuer).caller(issuer.token())).id == "oidc:ada"
        plain = {"issuer": issuer.url, "jwks_uri": issuer.jwks_uri.replace("https", "http")}
        issuer.answers[f"/realm{DISCOVERY}"] = (200, {}, json.dumps(plain).encode())
        weak = Checked(issuer)
        with pytest.raises(NotReadyError):
            await weak.caller(issuer.token())
        assert "names no jwks_uri of https" in (weak.keys.fault or "")
    finally:
        issuer.stop()


async def test_an_issuer_that_is_back_is_noticed_long_before_the_next_interval(
    checked: Checked, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oidc, "ASK_PAUSE_S", 0.05)
    issuer.stop()
    following = asyncio.create_task(checked.keys.run())
    try:
        await until(lambda: checked.keys.fault is not None, "it is away")
        issuer.start()
        await until(lambda: checked.keys.fault is None, "it is back", timeout_s=checked.keys.interval_s / 2)
    finally:
        following.cancel()


async def test_keys_at_a_named_place_are_not_discovered(issuer: Issuer) -> None:
    checked = Checked(issuer, jwks_uri=issuer.jwks_uri)
    assert (await checked.caller(issuer.token())).id == "oidc:ada"
    assert issuer.asked == {JWKS: 1}


async def test_no_proxy_stands_between_the_service_and_an_issuer_on_its_machine(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert (await Checked(issuer).caller(issuer.token())).id == "oidc:ada"
