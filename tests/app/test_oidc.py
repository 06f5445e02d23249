"""Tokens of an OpenID Connect issuer: whom they name, what they allow, and when they count for nothing."""

from __future__ import annotations

import base64
import hmac
import itertools
import json
from typing import Any

import pytest
from joserfc import jws

from app.runtime.principals import Grant, Principal
from app.trust.oidc import ASK_PAUSE_S, TOKENS_KNOWN_MAX
from tests.app.oidc_issuer import AUDIENCE, DISCOVERY, GRANTS, JWKS, Checked, Issuer, make_key, segment

pytestmark = pytest.mark.filterwarnings("ignore::joserfc.errors.SecurityWarning")

LEEWAY_S = 30


def rights(principal: Principal) -> list[tuple[set[str], tuple[str, ...]]]:
    return [(set(map(str, grant.rights)), grant.tenants) for grant in principal.grants]


# --- tokens that count ------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "algorithm"), [("rsa", "RS256"), ("ec", "ES256"), ("ed", "EdDSA")])
async def test_a_token_of_the_issuer_counts_once_and_is_known_from_then_on(
    checked: Checked, issuer: Issuer, name: str, algorithm: str
) -> None:
    token = issuer.token(name, algorithm, sub="ada", exp=int(checked.now_s) + 60)
    assert checked.known(token) is None
    principal = await checked.caller(token)
    assert (principal.id, principal.source, principal.token_id, rights(principal)) == ("oidc:ada", "oidc", None, [])
    assert principal.expires_at is not None
    assert principal.expires_at.timestamp() == int(checked.now_s) + 60
    assert checked.known(token) is principal
    assert checked.known(token + "A") is None
    assert issuer.asked == {f"/realm{DISCOVERY}": 1, JWKS: 1}


@pytest.mark.parametrize("algorithm", ["RS384", "RS512", "PS256", "PS384", "PS512", "ES384", "ES512", "Ed25519"])
async def test_every_algorithm_that_can_be_set_works_where_it_is(issuer: Issuer, algorithm: str) -> None:
    issuer.keys = [make_key(algorithm, "other")]
    token = issuer.token("other", algorithm)
    assert (await Checked(issuer, algorithms=[algorithm]).caller(token)).id == "oidc:ada"
    await Checked(issuer).refused(token, "not allowed")


@pytest.mark.parametrize(
    ("claims", "expected"),
    [
        ({}, []),
        ({"groups": "writers"}, [0]),
        ({"groups": ["readers", "writers"]}, [0]),
        ({"groups": ["writer", 7, None, ["writers"]]}, []),
        ({"groups": "readers writers"}, []),
        ({"groups": {"writers": True}}, []),
        ({"groups": True}, []),
        ({"realm_access": {"roles": ["x", "auditor"]}}, [1]),
        ({"realm_access": {"roles": "auditor"}, "groups": ["writers"]}, [0, 1]),
        ({"realm_access": ["roles", "auditor"]}, []),
        ({"realm_access.roles": ["auditor"]}, [1]),
        ({"realm_access.roles": [], "realm_access": {"roles": ["auditor"]}}, []),
        ({"scope": "openid ledger.operate email"}, [2]),
        ({"scope": ["ledger.operate"]}, [2]),
        ({"scope": "openid ledger.operate.not"}, []),
        ({"https://example.org/role": "root"}, [3]),
        ({"https://example": {"org/role": "root"}}, [3]),
    ],
)
async def test_rights_come_from_claims_as_configured(
    checked: Checked, issuer: Issuer, claims: dict[str, Any], expected: list[int]
) -> None:
    principal = await checked.caller(issuer.token(**claims))
    wanted = [(set(GRANTS[index]["rights"]), tuple(GRANTS[index]["tenants"])) for index in expected]
    assert rights(principal) == wanted
    assert all(isinstance(grant, Grant) for grant in principal.grants)


@pytest.mark.parametrize("typ", [None, "JWT", "jwt", "at+jwt", "application/at+jwt"])
async def test_a_token_may_say_that_it_is_an_access_token(checked: Checked, issuer: Issuer, typ: str | None) -> None:
    assert (await checked.caller(issuer.token(head={"typ": typ, "x5t": "abc", "nonce": "n"}))).id == "oidc:ada"


async def test_the_audience_may_be_one_of_several(checked: Checked, issuer: Issuer) -> None:
    assert (await checked.caller(issuer.token(aud=["other", AUDIENCE]))).id == "oidc:ada"
    await checked.refused(issuer.token(aud=["other", AUDIENCE + "x"]), "'aud'")
    await checked.refused(issuer.token(aud=[]), "'aud'")


async def test_a_principal_may_be_named_by_another_claim(issuer: Issuer) -> None:
    checked = Checked(issuer, principal_claim="profile.email")
    assert (await checked.caller(issuer.token(profile={"email": "a@example.org"}))).id == "oidc:a@example.org"
    for wrong in (None, {}, {"email": ""}, {"email": 7}, {"email": "a\nb"}, {"email": "\u202eb"}, {"email": "a" * 251}):
        await checked.refused(issuer.token(profile=wrong), "does not say who calls")


async def test_times_have_the_leeway_either_way(checked: Checked, issuer: Issuer) -> None:
    now = int(checked.now_s)
    for right in ({"exp": now - LEEWAY_S + 1}, {"nbf": now + LEEWAY_S}, {"iat": now + LEEWAY_S}):
        assert (await checked.caller(issuer.token(**right))).id == "oidc:ada"
    for wrong, because in (
        ({"exp": now - LEEWAY_S}, "is expired"),
        ({"nbf": now + LEEWAY_S + 1}, "not yet valid"),
        ({"iat": now + LEEWAY_S + 1}, "issued in the future"),
    ):
        await checked.refused(issuer.token(**wrong), because)


async def test_a_known_token_is_forgotten_when_it_expires(checked: Checked, issuer: Issuer) -> None:
    token = issuer.token(exp=int(checked.now_s) + 60)
    await checked.caller(token)
    checked.now_s = int(checked.now_s) + 60 + LEEWAY_S - 0.5
    assert checked.known(token) is not None
    checked.now_s += 0.5
    assert checked.known(token) is None
    await checked.refused(token, "is expired")


async def test_no_more_tokens_are_kept_than_there_is_room_for(
    checked: Checked, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert TOKENS_KNOWN_MAX < 10_000
    monkeypatch.setattr("app.trust.oidc.TOKENS_KNOWN_MAX", 3)
    made = [issuer.token("ed", "EdDSA", sub=f"user-{number}") for number in range(5)]
    for token in made:
        await checked.caller(token)
    assert [checked.known(token) is not None for token in made] == [False, False, True, True, True]


# --- tokens that do not -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("claims", "because"),
    [
        ({"iss": "https://evil.example"}, r"'iss' \(auth\.oidc\.issuer\)"),
        ({"iss": None}, "'iss'"),
        ({"iss": ["a"]}, "'iss'"),
        ({"aud": "other"}, r"'aud' \(auth\.oidc\.audience\)"),
        ({"aud": None}, "'aud'"),
        ({"aud": {"tallystick": 1}}, "'aud'"),
        ({"exp": None}, "'exp'"),
        ({"exp": "2099-01-01"}, "'exp'"),
        ({"exp": True}, "'exp'"),
        ({"exp": 10**18}, "no time"),
        ({"exp": 1e300}, "no time"),
        ({"exp": 0}, "is expired"),
        ({"exp": -(10**17)}, "is expired"),
        ({"nbf": "soon"}, "'nbf'"),
        ({"iat": []}, "'iat'"),
        ({"sub": None}, r"does not say who calls: its claim sub \(auth\.oidc\.principal_claim\) is missing"),
        ({"sub": 7}, "'sub'"),
    ],
)
async def test_a_token_with_wrong_claims_is_refused(
    checked: Checked, issuer: Issuer, claims: dict[str, Any], because: str
) -> None:
    await checked.refused(issuer.token(**claims), because)


@pytest.mark.parametrize(
    "head", [{"typ": "logout+jwt"}, {"typ": "dpop+jwt"}, {"typ": 7}, {"crit": ["exp"], "exp": 1}, {"crit": 5}]
)
async def test_a_token_for_another_end_or_with_what_is_not_understood_is_refused(
    checked: Checked, issuer: Issuer, head: dict[str, Any]
) -> None:
    payload = issuer.token().split(".")[1]
    header = segment({"alg": "RS256", "kid": "rsa", **head})
    signature = jws.JWSRegistry.algorithms["RS256"].sign(f"{header}.{payload}".encode(), issuer.key("rsa"))
    await checked.refused(f"{header}.{payload}.{segment(signature)}")
    assert not issuer.asked


async def test_a_token_whose_claims_are_not_encoded_is_refused(checked: Checked, issuer: Issuer) -> None:
    """RFC 7797, 7: a JWT has no ``b64``; between its dots it may hold what no header of HTTP may."""
    claims = base64.urlsafe_b64decode(issuer.token().split(".")[1] + "==").replace(
        b"127.0.0.1", b"127\\u002e0\\u002e0\\u002e1"
    )
    head = segment({"alg": "RS256", "kid": "rsa", "b64": False, "crit": ["b64"]})
    signature = jws.JWSRegistry.algorithms["RS256"].sign(f"{head}.".encode() + claims, issuer.key("rsa"))
    await checked.refused(f"{head}.{claims.decode()}.{segment(signature)}", "critical")


async def test_a_token_without_a_signature_is_refused(checked: Checked, issuer: Issuer) -> None:
    header, payload, signature = issuer.token().split(".")
    for algorithm in ("none", "None", "NONE", "nOnE", "", None, 7, ["RS256"], {"RS256": 1}):
        for kid in ("rsa", None):
            bare = segment({"alg": algorithm, "kid": kid} if kid else {"alg": algorithm})
            for end in ("", signature):
                await checked.refused(f"{bare}.{payload}.{end}")
    assert not issuer.asked, "what cannot count makes nobody ask the issuer"
    await checked.refused(f"{header}.{payload}.", "signature")


async def test_a_public_key_is_no_secret(checked: Checked, issuer: Issuer) -> None:
    """HS256 with what everybody can have, in each form in which a careless verifier might take it for a secret."""
    for name in ("rsa", "ec", "ed"):
        public = issuer.key(name)
        forms = public.as_pem(private=False), public.as_der(private=False), json.dumps(public.as_dict()).encode()
        for secret, digest in itertools.product(forms, ("sha256", "sha384", "sha512")):
            head = segment({"alg": f"HS{digest[3:]}", "kid": name})
            signed = f"{head}.{issuer.token().split('.')[1]}"
            signature = segment(hmac.digest(secret, signed.encode(), digest))
            await checked.refused(f"{signed}.{signature}", "not allowed")
    assert not issuer.asked


async def test_what_is_tampered_with_is_refused(checked: Checked, issuer: Issuer) -> None:
    header, payload, signature = issuer.token(groups="readers").split(".")
    other = issuer.token(groups="writers").split(".")
    for token in (
        f"{header}.{other[1]}.{signature}",
        f"{header}.{payload}.{other[2]}",
        f"{header}.{payload}.{signature[:-4]}",
        f"{header}.{payload}.{signature}AAAA",
        f"{header}.{payload}=.{signature}",
        f"{segment({'alg': 'RS256', 'kid': 'rsa', 'typ': 'JWT', 'x': 1})}.{payload}.{signature}",
    ):
        await checked.refused(token)
    assert (await checked.caller(f"{header}.{payload}.{signature}")).grants == ()


@pytest.mark.parametrize(
    "token",
    [
        "..",
        "a.b.c",
        "e30.e30.e30",
        f"{segment([])}.e30.e30",
        f"{segment('alg b64')}.e30.e30",
        f"{segment(['alg', 'b64'])}.e30.e30",
        f"{segment(7)}.e30.e30",
        f"{segment(None)}.e30.e30",
        f"{segment({'alg': 'RS256', 'kid': 7})}.e30.e30",
        f"{segment({'alg': 'RS256', 'b64': 'x'})}.e30.e30",
        f"{segment(b'[' * 380)}.e30.e30",
        f"{segment(b'[' * 9000)}.e30.e30",
        f"{segment(b'{' + b' ' * 12_000)}.e30.e30",
        f"{segment({'alg': 'RS256', 'kid': 'k' * 11_000})}.e30.e30",
        f"{segment(bytes([0xFF, 0xFE]))}.e30.e30",
    ],
    ids=range(15),
)
async def test_what_is_no_token_is_refused_without_asking_the_issuer(
    checked: Checked, issuer: Issuer, token: str
) -> None:
    await checked.refused(token)
    assert not issuer.asked


@pytest.mark.parametrize("payload", [b"", b"[]", b"7", b"{", b'{"exp": NaN}', b"\xff", b"[" * 5000])
async def test_a_signed_text_that_holds_no_claims_is_refused(checked: Checked, issuer: Issuer, payload: bytes) -> None:
    header = {"alg": "RS256", "kid": "rsa"}
    await checked.refused(jws.serialize_compact(header, payload, issuer.key("rsa"), ["RS256"]), "no claims")


async def test_a_key_of_another_issuer_or_kind_is_refused(checked: Checked, issuer: Issuer) -> None:
    await checked.refused(issuer.token(key=make_key("RS256", "rsa")), "signature")
    await checked.refused(issuer.token("ec", "RS256", key=issuer.key("rsa")), "does not publish")
    await checked.refused(issuer.token("rsa", "ES256", key=issuer.key("ec")), "does not publish")
    await checked.refused(issuer.token("unknown", key=issuer.key("rsa")), "does not publish")
    issuer.keys = [make_key("ES384", "p384")]
    checked.clock_s += ASK_PAUSE_S
    token = issuer.token("p384", "ES256", key=make_key("ES256", "p384"))
    await checked.refused(token, "not for the key that it names")


async def test_keys_in_the_token_itself_are_not_looked_at(checked: Checked, issuer: Issuer) -> None:
    mine = make_key("RS256", "mine")
    mine_url = f"http://127.0.0.1:{issuer.port}/mine"
    for head in ({"jwk": mine.as_dict(private=False)}, {"jku": mine_url}, {"x5u": mine_url}):
        await checked.refused(issuer.token("rsa", key=mine, head=head))
    assert "/mine" not in issuer.asked


async def test_a_token_that_names_no_key_means_the_only_one_of_its_kind(issuer: Issuer) -> None:
    token = issuer.token(head={"kid": None})
    assert (await Checked(issuer).caller(token)).id == "oidc:ada"
    issuer.keys.append(make_key("RS256", "rsa-2"))
    await Checked(issuer).refused(token, "does not publish")


async def test_keys_that_sign_no_tokens_are_left_out_and_the_others_count(issuer: Issuer) -> None:
    document = issuer.document(JWKS)
    good = document["keys"]
    short = {**make_key("RS256", "short").as_dict(), "n": segment(b"\xc1" * 128), "kid": "short"}
    private = make_key("ES256", "private")
    odd = [
        7,
        None,
        {},
        {"kty": "oct", "k": "c2VjcmV0", "kid": "rsa"},
        {"kty": "AKP", "alg": "ML-DSA-44", "pub": "AAAA", "kid": "pq"},
        {"kty": "RSA", "kid": "rsa"},
        {"kty": "RSA", "kid": "x", "n": "!", "e": "AQAB"},
        {"kty": "EC", "crv": "P-999", "x": "AA", "y": "AA", "kid": "x"},
        {"kty": "EC", "crv": "P-256", "x": "AA", "y": "AA", "kid": "ec"},
        {"kty": "OKP", "crv": "Ed25519", "x": "AA", "kid": "ed"},
        {**make_key("RS256", "enc").as_dict(), "use": "enc", "kid": "rsa"},
        {**make_key("RS256", "op").as_dict(), "key_ops": ["encrypt"], "kid": "rsa"},
        private.as_dict(private=True),
        short,
    ]
    issuer.answers[JWKS] = (200, {}, json.dumps({"keys": odd + good}).encode())
    checked = Checked(issuer)
    for name, algorithm in (("rsa", "RS256"), ("ec", "ES256"), ("ed", "EdDSA")):
        assert (await checked.caller(issuer.token(name, algorithm))).id == "oidc:ada"
    await checked.refused(issuer.token("private", "ES256", key=private), "does not publish")
    keys = checked.keys.counting()
    assert keys is not None
    assert keys.find("short", "RSA") is None
