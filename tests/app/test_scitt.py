"""SCITT for a tenant: signed statements are registered once, their receipts verify by the program of the page, and
nothing else is registered."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import cbor2
import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from app.dev.embedded import EmbeddedPostgres
from ledger import canonical
from signing.cose import STATEMENT_BYTES_MAX, facts_of, read_statement
from signing.entry_proof import verify_cose
from signing.judging import verify_file
from signing.keys import Keyring
from tests.app.bundles import bundle_of, exit_code
from tests.app.cose_judge import CoseJudge
from tests.app.receipts import example_statement
from tests.app.second_verifier import twin_in
from tests.app.service_thread import serving
from tests.app.signed_statements import PAYLOAD, parts_of, protected_of, statement
from tests.conftest import connected_to
from tests.ledger.callers import ED25519, ML_DSA_44, P256, STRANGER, Signing
from tests.ledger.ledger_in_memory import SIGNER, build
from tests.signing.test_documented_examples import documented_ring
from tests.tally import run_tally
from tests.waiting import until

DATABASE = "scitt"
PAGE = Path(__file__).parents[2] / "docs" / "scitt.md"
COSE = "application/cose"
P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
CONCISE = "application/concise-problem-details+cbor"


class Site(NamedTuple):
    """A service, its client and its database."""

    url: str
    client: httpx.Client
    superuser_url: str

    def register(self, data: bytes, tenant: str = "acme", media_type: str = COSE, **headers: str) -> httpx.Response:
        path = f"/v1/tenants/{tenant}/scitt/entries"
        return self.client.post(path, content=data, headers={"Content-Type": media_type, **headers})

    def receipt(self, data: bytes, tenant: str = "acme") -> bytes:
        """The receipt of a statement, registered or not before."""
        answer = self.register(data, tenant)
        while answer.status_code in (302, 303):
            answer = self.client.get(answer.headers["Location"])
        assert answer.status_code in (200, 201), answer.content
        assert answer.headers["Content-Type"] == COSE
        return answer.content

    def keys(self) -> bytes:
        answer = self.client.get("/.well-known/scitt-keys")
        assert (answer.status_code, answer.headers["Content-Type"]) == (200, "application/cbor")
        return answer.content

    def entries(self, tenant: str = "acme") -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.client.get(
            "/v1/chain/entries", params={"tenant_id": tenant, "limit": 1000}
        ).json()["items"]
        return found

    def caller(self, signing: Signing, name: str, tenants: list[str]) -> None:
        body = {"name": name, "tenants": tenants, "public_key_pem": signing.caller.key.public_key_pem}
        self.client.post("/v1/callers", json=body).raise_for_status()

    def execute(self, statement: str, *values: object) -> list[Any]:
        async def run() -> list[Any]:
            async with connected_to(self.superuser_url) as connection:
                return await connection.fetch(statement, *values)

        return asyncio.run(run())


@pytest.fixture(scope="module")
def site(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("scitt")
    (folder / "other.pem").write_text(SIGNER.public_key_pem)
    settings = {"chain": {"checkpoint_interval": "20ms"}, "bundle": {"trusted_keys": folder / "other.pem"}}
    with (
        serving(postgres, folder / "data", DATABASE, **settings) as url,
        httpx.Client(base_url=url, timeout=60, trust_env=False) as client,
    ):
        found = Site(url, client, postgres.superuser_url(DATABASE))
        for signing in (ED25519, P256, ML_DSA_44):
            found.caller(signing, signing.caller.name, ["acme", "t-*"])
        yield found


def id_of(data: bytes) -> str:
    """The id of a statement with an empty unprotected header, in deterministic encoding."""
    return hashlib.sha256(data).hexdigest()


def checked(folder: Path, *files: bytes) -> subprocess.CompletedProcess[str]:
    """What the program of the page says of a statement, a receipt and keys."""
    names = ("statement.cose", "receipt.cose", "keys.cbor")
    for name, content in zip(names, files, strict=True):
        (folder / name).write_bytes(content)
    command = [sys.executable, "-I", "-c", programs()[1], *(folder / name for name in names)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def programs() -> list[str]:
    """The programs of the page, which sign and check; they know nothing of this project."""
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def problem(answer: httpx.Response) -> tuple[int, str]:
    """Status and name of a problem in CBOR, which has a title and a detail."""
    assert answer.headers["Content-Type"] == CONCISE, answer.content
    found = cbor2.loads(answer.content)
    assert all(found[label] for label in (-1, -2))
    (uri,) = (key for key in found if isinstance(key, str))
    assert found[uri]["status"] == answer.status_code
    return answer.status_code, uri.rpartition("/")[2]


def test_the_other_form_of_an_es256_signature_is_a_statement_of_its_own(site: Site, tmp_path: Path) -> None:
    protected, _, payload, signature = parts_of(P256, b"two forms")
    other = signature[:32] + (P256_ORDER - int.from_bytes(signature[32:])).to_bytes(32)
    receipts = []
    for each in (signature, other):
        data = cbor2.dumps(cbor2.CBORTag(18, [protected, {}, payload, each]))
        receipts.append(site.receipt(data))
        done = checked(tmp_path, data, receipts[-1], site.keys())
        assert done.returncode == 0, done.stderr
    assert receipts[0] != receipts[1]
    assert checked(tmp_path, data, receipts[0], site.keys()).returncode != 0


@pytest.mark.parametrize("signing", [ED25519, P256, ML_DSA_44], ids=lambda each: each.caller.key.algorithm)
def test_a_statement_is_registered_and_its_receipt_verifies_by_the_program_of_the_page(
    site: Site, signing: Signing, tmp_path: Path
) -> None:
    data = statement(signing)
    receipt = site.receipt(data)
    done = checked(tmp_path, data, receipt, site.keys())
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("pkg:cli@1.2.3 is entry "), done.stdout
    # The transparent statement, with the receipt in its unprotected header, verifies like the statement.
    transparent = statement(signing, unprotected={394: [receipt]})
    if signing is ED25519:
        assert checked(tmp_path, transparent, receipt, site.keys()).stdout == done.stdout
    for other in (statement(signing, b'{"sbom":"spdx"} '), statement(signing, claims={1: "a", 2: "b"})):
        assert "InvalidSignature" in checked(tmp_path, other, receipt, site.keys()).stderr
    claims = cbor2.loads(cbor2.loads(receipt).value[0])[15]
    assert claims == {1: claims[1], 2: "pkg:cli@1.2.3"}
    assert claims[1].endswith("/acme")


def test_the_program_of_the_page_signs_what_is_registered(site: Site, tmp_path: Path) -> None:
    private = ED25519._private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (tmp_path / "vendor.pem").write_bytes(private)
    command = [sys.executable, "-I", "-c", programs()[0], tmp_path / "vendor.pem", "pkg:cli@1.2.3"]
    data = subprocess.run(command, input=PAYLOAD, capture_output=True, check=True).stdout
    assert data == statement(ED25519)
    assert site.register(data).is_success


def test_the_entry_holds_the_whole_statement_and_the_chain_verifies(site: Site, tmp_path: Path) -> None:
    data, tenant = statement(P256), "t-whole"
    site.receipt(data, tenant)
    (entry,) = site.entries(tenant)
    assert (entry["action"], entry["job_id"]) == ("STATEMENT_REGISTERED", f"statement:{id_of(data)}")
    payload = json.loads(entry["payload"])
    assert base64.b64decode(payload["statement"]) == data
    said = payload["iss"], payload["sub"], payload["key_id"]
    assert said == ("https://vendor.example", "pkg:cli@1.2.3", P256.key_id)
    site.client.post("/v1/snapshots", json={"tenant_id": tenant})
    verdict = site.client.get("/v1/chain/verify", params={"tenant_id": tenant}).json()
    assert verdict["valid"], verdict
    assert site.client.get("/v1/jobs", params={"tenant_id": tenant}).json()["items"] == []
    # Both verifiers of bundles take it for an entry, too.
    bundle, keys = tmp_path / "one.tar", Keyring.from_json(site.client.get("/v1/keys").json())
    bundle.write_bytes(site.client.post("/v1/bundles/export", json={"tenant_id": tenant}).content)
    assert exit_code(asyncio.run(verify_file(bundle, keys))) == 0
    assert twin_in(tmp_path)(bundle, keys) == 0
    proof = tmp_path / "entry.cose"
    done = run_tally("prove", "-t", tenant, "--seq", "1", "--cose", "-o", proof, "--url", site.url, "--no-state")
    assert done.returncode == 0, done.stderr
    assert checked(tmp_path, data, proof.read_bytes(), site.keys()).returncode == 0


def test_a_statement_that_comes_again_in_any_spelling_is_there_once(site: Site) -> None:
    tenant, parts = "t-again", parts_of(ML_DSA_44)
    data = cbor2.dumps(cbor2.CBORTag(18, parts))
    first = site.register(data, tenant)
    # Another unprotected header, a longer head of the array, and a parameter of the media type.
    spelled = cbor2.dumps(cbor2.CBORTag(18, [parts[0], {394: [first.content], "x": [1]}, *parts[2:]]))
    again = [
        site.register(data, tenant),
        site.register(spelled, tenant),
        site.register(data.replace(b"\xd2\x84", b"\xd2\x98\x04", 1), tenant),
        site.register(data, tenant, 'application/cose; cose-type="cose-sign1"'),
    ]
    assert {each.headers["Location"] for each in (first, *again)} == {
        f"{site.url}/v1/tenants/{tenant}/scitt/entries/{id_of(data)}"
    }
    assert {each.status_code for each in again} == {201}
    assert [entry["action"] for entry in site.entries(tenant)] == ["STATEMENT_REGISTERED"]
    # Another tenant registers it by itself.
    site.receipt(data, "t-again-elsewhere")
    assert len(site.entries("t-again-elsewhere")) == 1


def test_of_the_same_statement_many_times_at_once_one_is_chained(site: Site) -> None:
    tenant, data = "t-at-once", statement(P256)
    with ThreadPoolExecutor(16) as at_once:
        receipts = [*at_once.map(lambda _: site.receipt(data, tenant), range(32))]
    entries = {cbor2.loads(each).value[1][-65537] for each in receipts}
    assert len(entries) == 1
    assert len(site.entries(tenant)) == 1


def test_a_statement_is_found_by_its_entry_long_after_its_key_was_forgotten(site: Site) -> None:
    tenant, data = "t-later", statement(ED25519)
    first = site.receipt(data, tenant)
    site.execute("DELETE FROM scheduler.idempotency WHERE tenant_id = $1", tenant)
    assert cbor2.loads(site.receipt(data, tenant)).value[1][-65537] == cbor2.loads(first).value[1][-65537]
    assert len(site.entries(tenant)) == 1


def test_an_imported_entry_is_the_registration_of_the_statement_that_it_holds_and_of_no_other(site: Site) -> None:
    tenant, data, carried = "t-imported", statement(ED25519, b"blocked"), statement(ED25519, b"carried")
    other, right = facts_of(read_statement(carried)), facts_of(read_statement(data))
    import_entries(
        site, tenant, *((data, facts) for facts in (other, {"statement": "no"}, right | {"sub": "x"})), (carried, other)
    )
    place = f"/v1/tenants/{tenant}/scitt/entries/{id_of(data)}"
    assert problem(site.client.get(place)) == (404, "not-found")
    site.receipt(data, tenant)
    site.receipt(data, tenant)
    assert site.client.get(place).status_code == 200
    site.receipt(carried, tenant)
    assert [entry["seq"] for entry in site.entries(tenant) if entry["origin"] is None] == [5]


def import_entries(site: Site, tenant: str, *about: tuple[bytes, dict[str, str]]) -> None:
    """Import entries of another ledger about statements, with these facts."""
    ledger = build(len(about), tenant_id=tenant)
    for entry, (data, facts) in zip(ledger.entries, about, strict=True):
        payload = canonical.encode({"type": "STATEMENT_REGISTERED", **facts}).decode()
        entry |= {"job_id": f"statement:{id_of(data)}", "action": "STATEMENT_REGISTERED", "payload": payload}
    ledger.relink()
    ledger.store_tree()
    ledger.sign(len(about))
    site.client.post("/v1/bundles/import", files={"file": ("it.tar", bundle_of(ledger))}).raise_for_status()


def test_a_regular_expression_in_a_header_is_not_compiled(site: Site) -> None:
    broken = cbor2.CBORTag(35, "(")
    site.receipt(statement(ED25519, unprotected={"pattern": broken}, headers={"pattern": broken}), "t-pattern")


REFUSED: dict[str, dict[str, Callable[[], bytes]]] = {
    "the signed statement is malformed": {
        "no CBOR": lambda: b"\xff\x00",
        "nothing": lambda: b"",
        "text": lambda: b"{}",
        "bytes behind it": lambda: statement(ED25519) + b"\x00",
        "cut off": lambda: statement(ED25519)[:-1],
        "no tag": lambda: cbor2.dumps(parts_of(ED25519)),
        "the tag of COSE_Sign": lambda: cbor2.dumps(cbor2.CBORTag(98, parts_of(ED25519))),
        "a tag around the tag": lambda: cbor2.dumps(cbor2.CBORTag(61, cbor2.CBORTag(18, parts_of(ED25519)))),
        "three parts": lambda: cbor2.dumps(cbor2.CBORTag(18, parts_of(ED25519)[:3])),
        "indefinite length": lambda: b"\xd2\x9f" + b"".join(map(cbor2.dumps, parts_of(ED25519))) + b"\xff",
        "indefinite length of the header": lambda: statement(ED25519, protected=b"\xbf\x01\x27\xff"),
        "a label twice": lambda: statement(ED25519, protected=b"\xa5\x01\x27" + cbor2.dumps(protected_of(ED25519))[1:]),
        "a label that is no integer": lambda: statement(
            ED25519, protected=cbor2.dumps({**protected_of(ED25519, headers={1: None}), 1.0: -8})
        ),
        "a header that is no map": lambda: statement(ED25519, protected=cbor2.dumps([1, -8])),
        "an empty header": lambda: statement(ED25519, protected=b"\xa0"),
        "too deep": lambda: statement(ED25519, headers={99: cbor2.loads(b"\x81" * 30 + b"\x00")}),
        "an unprotected header that is no map": lambda: statement(ED25519, unprotected=[]),
        "a signature of text": lambda: cbor2.dumps(cbor2.CBORTag(18, [*parts_of(ED25519)[:3], "s"])),
        "no kid": lambda: statement(ED25519, headers={4: None}),
        "a kid of text": lambda: statement(ED25519, headers={4: ED25519.key_id}),
        "a kid of no text": lambda: statement(ED25519, headers={4: b"\xff" * 8}),
        "no claims": lambda: statement(ED25519, headers={15: None}),
    },
    "it has more than 256 data items": {
        "a protected header of many labels": lambda: statement(ED25519, headers=dict.fromkeys(range(100, 3_000), 0)),
        "an unprotected header of many": lambda: statement(
            ED25519, unprotected={n * (2**61 - 1): 0 for n in range(4_000)}
        ),
        "an array of many in one": lambda: statement(ED25519, unprotected={99: [0] * 300}),
    },
    "payload": {
        "a detached payload": lambda: cbor2.dumps(cbor2.CBORTag(18, [*parts_of(ED25519)[:2], None, b"s" * 64])),
        "a payload of text": lambda: cbor2.dumps(cbor2.CBORTag(18, [*parts_of(ED25519)[:2], "p", b"s" * 64])),
    },
    "algorithm": {
        "no algorithm": lambda: statement(ED25519, headers={1: None}),
        "an unknown algorithm": lambda: statement(ED25519, headers={1: -35}),
        "an algorithm by name": lambda: statement(ED25519, headers={1: "EdDSA"}),
    },
    "is ed25519, not ecdsa-p256": {
        "the algorithm of another key": lambda: statement(ED25519, headers={1: -7}),
    },
    "crit": {
        "critical headers": lambda: statement(ED25519, headers={2: [99], 99: 1}),
    },
    "is of no caller of this ledger": {
        "the kid of a stranger": lambda: statement(STRANGER),
        "the kid of another caller": lambda: statement(ED25519, headers={4: STRANGER.key_id.encode()}),
    },
    "(iss) is not a text": {
        "no issuer": lambda: statement(ED25519, claims={2: "s"}),
        "an empty issuer": lambda: statement(ED25519, claims={1: "", 2: "s"}),
        "a long issuer": lambda: statement(ED25519, claims={1: "i" * 1025, 2: "s"}),
    },
    "(sub) is not a text": {
        "no subject": lambda: statement(ED25519, claims={1: "i"}),
        "an empty subject": lambda: statement(ED25519, claims={1: "i", 2: ""}),
        "a subject of bytes": lambda: statement(ED25519, claims={1: "i", 2: b"s"}),
        "a subject with a zero": lambda: statement(ED25519, claims={1: "i", 2: "s\0"}),
    },
    "did not sign this": {
        "another payload": lambda: swapped(2, b"other"),
        "another header": lambda: swapped(0, cbor2.dumps(protected_of(ED25519, claims={1: "i", 2: "s"}))),
        "a short signature": lambda: swapped(3, b"s" * 63),
        "another signature": lambda: swapped(3, b"s" * 64),
        "an ECDSA signature in DER": lambda: swapped(3, base64.b64decode(P256.sign(b"")), P256),
        "an ECDSA signature of zeros": lambda: swapped(3, bytes(64), P256),
        "a short ML-DSA signature": lambda: swapped(3, bytes(2419), ML_DSA_44),
    },
}
"""Makers of what is refused, by the reason."""


def swapped(at: int, part: Any, signing: Signing = ED25519) -> bytes:
    parts = parts_of(signing)
    parts[at] = part
    return cbor2.dumps(cbor2.CBORTag(18, parts))


@pytest.mark.parametrize(("reason", "how"), [(reason, how) for reason, each in REFUSED.items() for how in each])
def test_what_no_caller_of_the_tenant_signed_so_is_rejected_and_nothing_is_stored(
    site: Site, reason: str, how: str
) -> None:
    site.receipt(statement(ED25519), "t-refused")
    answer = site.register(REFUSED[reason][how](), "t-refused")
    assert problem(answer) == (400, "statement-rejected")
    assert reason in cbor2.loads(answer.content)[-2]
    assert len(site.entries("t-refused")) == 1


def test_other_requests_are_refused_in_cbor_too(site: Site) -> None:
    data, unknown = statement(ED25519), "0" * 64
    entries = "/v1/tenants/acme/scitt/entries"
    largest = STATEMENT_BYTES_MAX - len(statement(ED25519, b"p" * 60_000)) + 60_000
    assert site.register(statement(ED25519, b"p" * largest), "t-large").status_code in (201, 303)
    assert problem(site.register(statement(ED25519, b"p" * (largest + 1)), "t-large")) == (413, "payload-too-large")
    assert problem(site.register(data, media_type="application/json")) == (415, "unsupported-media-type")
    assert problem(site.register(data, media_type="application/cose; cose-type=x")) == (415, "unsupported-media-type")
    assert problem(site.register(data, tenant="beta")) == (400, "statement-rejected"), "the caller is not of beta"
    assert problem(site.register(data, tenant="_system")) == (422, "invalid-request")
    assert problem(site.client.get(f"{entries}/{unknown}")) == (404, "not-found")
    assert problem(site.client.get(f"{entries}/no-id")) == (422, "invalid-request")
    assert problem(site.client.get(f"{entries}/{unknown}?a=1")) == (422, "invalid-request")
    assert problem(site.client.get("/.well-known/scitt-keys/no-kid")) == (404, "not-found")


def test_a_revoked_caller_registers_nothing_more_and_its_receipts_are_resolved(site: Site) -> None:
    signing = Signing(Ed25519PrivateKey.from_private_bytes(b"\x0a" * 32), "leaver")
    site.caller(signing, "leaver", ["acme"])
    data = statement(signing)
    site.receipt(data)
    revoked = site.client.delete(f"/v1/callers/{signing.key_id}", params={"reason": "left", "from_hlc": "1:0:n"})
    assert revoked.status_code == 200, revoked.text
    assert problem(site.register(data)) == (400, "statement-rejected")
    assert problem(site.register(statement(signing, b"new"))) == (400, "statement-rejected")
    assert site.client.get(f"/v1/tenants/acme/scitt/entries/{id_of(data)}").status_code == 200


def test_keys_that_signed_receipts_are_published_until_they_are_revoked(site: Site, tmp_path: Path) -> None:
    data, tenant = statement(ED25519), "t-keys"
    old = site.receipt(data, tenant)
    kid = cbor2.loads(cbor2.loads(old).value[0])[4].decode()
    site.client.post("/v1/keys/rotate", json={}).raise_for_status()
    site.receipt(statement(ED25519, b"more"), tenant)

    def fresh() -> bytes | None:
        found = site.receipt(data, tenant)
        return found if cbor2.loads(cbor2.loads(found).value[0])[4].decode() != kid else None

    new = until(fresh, "the new key signs receipts")
    assert new is not None
    for receipt in (old, new):
        assert checked(tmp_path, data, receipt, site.keys()).returncode == 0
    keys = cbor2.loads(site.keys())
    assert all(key.keys() == {1, 2, 3, -1, -2} for key in keys)
    for key in keys:
        one = site.client.get(f"/.well-known/scitt-keys/{key[2].decode()}")
        assert (one.headers["Content-Type"], cbor2.loads(one.content)) == ("application/cbor", key)
    site.client.post(f"/v1/keys/{kid}/revoke", json={"reason": "stolen"}).raise_for_status()
    assert kid.encode() not in [key[2] for key in cbor2.loads(site.keys())]
    assert problem(site.client.get(f"/.well-known/scitt-keys/{kid}")) == (404, "not-found")
    assert "StopIteration" in checked(tmp_path, data, old, site.keys()).stderr
    assert checked(tmp_path, data, site.receipt(data, tenant), site.keys()).returncode == 0


def test_the_example_of_the_page_is_what_the_code_makes_and_verifies(tmp_path: Path) -> None:
    names = ("example.statement.cose", "example.statement-receipt.cose", "example.scitt-keys.cbor")
    shown = [(PAGE.parent / "formats" / name).read_bytes() for name in names]
    assert shown == [*example_statement()]
    assert checked(tmp_path, *shown).stdout in PAGE.read_text()
    row = json.loads(cbor2.loads(shown[1]).value[1][-65537])
    assert verify_cose(shown[1], bytes.fromhex(row["chain_link"]), documented_ring()).tree_size == 6


@pytest.mark.torture
@pytest.mark.foreign
def test_the_library_of_the_authors_of_scitt_verifies_statement_and_receipt(site: Site, tmp_path: Path) -> None:
    judge, tenant, parts = CoseJudge.installed(tmp_path), "t-judged", parts_of(P256)
    data = cbor2.dumps(cbor2.CBORTag(18, parts))
    receipt = site.receipt(data, tenant)
    # The library takes for the bytes on the ledger what the entry holds.
    transparent = judge.file(
        "transparent.cose", cbor2.dumps(cbor2.CBORTag(18, [parts[0], {394: [receipt]}, *parts[2:]]))
    )
    issuer = judge.file("issuer.pem", P256.caller.key.public_key_pem)
    said = judge.says("statement", transparent, issuer)
    assert said.stdout.strip() == data.hex(), said.stderr
    (entry,) = site.entries(tenant)
    assert json.loads(entry["payload"])["statement"] == base64.b64encode(data).decode()
    # Given the leaf, it verifies the receipt, and finds the root of the tree.
    kid = cbor2.loads(cbor2.loads(receipt).value[0])[4].decode()
    (ledger_key,) = [each for each in site.client.get("/v1/keys").json()["keys"] if each["key_id"] == kid]
    key = judge.file("ledger.pem", ledger_key["public_key_pem"])
    said = judge.says("receipt", judge.file("receipt.cose", receipt), entry["chain_link"], key)
    size, index, _ = cbor2.loads(cbor2.loads(receipt).value[1][396][-1][0])
    proved = {"tenant_id": tenant, "seq": index + 1, "tree_size": size}
    root = site.client.get("/v1/chain/proof/inclusion", params=proved).json()["root_hash"]
    assert said.stdout.strip() == root, said.stderr
