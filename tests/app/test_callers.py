"""Callers sign their events: registered, required and refused at a node; and whoever has the node's key, the database
and the WAL puts nothing into their mouths that any verifier believes."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import orjson
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from app.dev.embedded import EmbeddedPostgres
from app.write.intake.caller_signatures import CheckingThreads
from ledger import canonical, signed_events
from ledger.chain import Linker
from ledger.merkle import leaf_hash, levels_of
from ledger.signed_events import MEMBER
from tallystick_client import Client, ProblemError
from tests.app.bundles import bundle_of
from tests.app.service_thread import serving
from tests.cases.callers import respelt
from tests.conftest import connected_to
from tests.ledger.callers import ED25519, EVERYBODY, ML_DSA_44, P256, STRANGER, Signing
from tests.ledger.ledger_in_memory import SIGNER, Ledger
from tests.ledger.test_caller_check import SIGNED_SEQ, edit, mend, sign, signed_ledger
from tests.tally import run_tally

DATABASE = "callers"
DEADLINE_S = 60


class Site(NamedTuple):
    """A service, its folder and database, and what an auditor and an attacker do with them."""

    url: str
    client: httpx.Client
    superuser_url: str
    folder: Path

    def tally(self, *arguments: str, code: int = 0) -> Any:
        done = run_tally(*arguments, "--json", TALLY_URL=self.url, TALLY_DATA_DIR=str(self.folder / "data"))
        assert done.returncode == code, done.stderr + done.stdout
        return json.loads(done.stdout)

    def execute(self, statement: str, *values: object) -> list[Any]:
        async def run() -> list[Any]:
            async with connected_to(self.superuser_url) as connection:
                await connection.execute("SET session_replication_role = replica")
                return await connection.fetch(statement, *values)

        return asyncio.run(run())

    def keyfile(self, signing: Signing) -> Path:
        path = self.folder / f"{signing.key_id}.pem"
        if not path.exists():
            path.write_bytes(signing._private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return path

    def signing_client(self, signing: Signing) -> Client:
        return Client(self.url, sign_with=self.keyfile(signing), patience_s=0.0)

    def saved_keys(self) -> Path:
        path = self.folder / "saved-keys.json"
        path.write_text(self.client.get("/v1/keys").text)
        return path


@pytest.fixture(scope="module")
def site(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("callers")
    (folder / "trusted.pem").write_text(SIGNER.public_key_pem)
    with (
        serving(postgres, folder / "data", DATABASE, bundle={"trusted_keys": str(folder / "trusted.pem")}) as url,
        httpx.Client(base_url=url, timeout=DEADLINE_S, trust_env=False) as client,
    ):
        found = Site(url, client, postgres.superuser_url(DATABASE), folder)
        for signing in (ED25519, P256, ML_DSA_44):
            found.tally(
                "caller", "new", signing.caller.name, "--key", str(found.keyfile(signing)), "-t", "t-*", "-t", "acme"
            )
        yield found


def problem(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["type"].rsplit("/", 1)[-1]


def verified(site: Site, tenant: str) -> dict[str, Any]:
    """The verdict on the tenant once all is signed, unless that is what nobody signs."""
    site.client.post("/v1/snapshots", json={"tenant_id": tenant})
    answer = site.client.get("/v1/chain/verify", params={"tenant_id": tenant})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.parametrize("signing", [ED25519, P256, ML_DSA_44], ids=lambda each: each.caller.name)
def test_a_client_signs_with_one_argument_and_every_event_holds(site: Site, signing: Signing) -> None:
    tenant = f"t-{signing.caller.name}"
    with site.signing_client(signing) as ledger:
        with ledger.job(tenant, {"image": "a/b:1", "cpu": 0.5, "note": "ä€😀"}) as job:
            job.progress(3, 1)
        made = ledger.create_job(tenant, {"image": "c"}, durability="GLOBAL")
        ledger.cancel_job(tenant, made["job_id"], reason="enough")
        ledger.send_event(tenant, made["job_id"], "JobCompleted", final_status="ok", durability="LOCAL", fence_token=1)
        events = [
            {"tenant_id": tenant, "type": "JobCreated", "job_id": f"b-{number}", "spec": {"at": 1e-7 * number}}
            for number in range(5)
        ]
        assert ledger.send_batch(events, durability="GLOBAL").accepted == 5
    entries = site.client.get("/v1/chain/entries", params={"tenant_id": tenant}).json()["items"]
    assert [MEMBER in json.loads(each["payload"]) for each in entries] == [True] * len(entries) == [True] * 12
    verdict = verified(site, tenant)
    assert (verdict["valid"], verdict["verdicts"]["signatures"]) == (True, "ok"), verdict


def signed_job(signing: Signing, tenant: str, job_id: str, identity: str) -> dict[str, Any]:
    now_ms = time.time_ns() // 1_000_000
    said = {**signing.said(now_ms, identity), "not_after_ms": now_ms + 3_600_000}
    payload = {"type": "JobCreated", "fence_token": 1, "spec": {"n": 1}}
    message = signed_events.message(tenant, job_id, said, canonical.encode(payload))
    signature = {**said, "sig": signing.sign(message)}
    return {"tenant_id": tenant, "job_id": job_id, "fence_token": 1, "spec": {"n": 1}, MEMBER: signature}


REFUSED: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "of a stranger": lambda body: body | {MEMBER: signed_job(STRANGER, "t-edge", body["job_id"], "x")[MEMBER]},
    "changed": lambda body: body | {"spec": {"n": 2}},
    "of another job": lambda body: body | {"job_id": "other"},
    "of another tenant": lambda body: body | {"tenant_id": "t-other"},
    "of another fence": lambda body: body | {"fence_token": 2},
    "of another time": lambda body: body | {MEMBER: body[MEMBER] | {"not_after_ms": body[MEMBER]["not_after_ms"] + 1}},
    "of a tenant that the caller may not sign for": lambda _: signed_job(ED25519, "beta", "j", "of-beta"),
    "expired": lambda body: body | {MEMBER: body[MEMBER] | {"not_after_ms": body[MEMBER]["not_before_ms"]}},
}


@pytest.mark.parametrize("how", REFUSED)
@pytest.mark.parametrize("durability", ["LOCAL", "GLOBAL"])
def test_the_edge_refuses_what_the_caller_did_not_sign(site: Site, how: str, durability: str) -> None:
    body = signed_job(
        ED25519, "t-edge", f"job-{how.replace(' ', '-')}-{durability}", f"{how}-{durability}".replace(" ", "-")
    )
    answer = site.client.post("/v1/jobs", json=REFUSED[how](body) | {"durability": durability})
    assert problem(answer) == (422, "signature-invalid"), answer.text
    assert site.client.post("/v1/jobs", json=body | {"durability": durability}).status_code == 201


@pytest.mark.parametrize("gone", ["job_id", "fence_token"])
def test_a_signed_event_names_all_that_is_signed(site: Site, gone: str) -> None:
    body = signed_job(ED25519, "t-edge", f"job-without-{gone}", f"without-{gone}")
    del body[gone]
    assert problem(site.client.post("/v1/jobs", json=body)) == (422, "invalid-request")


@pytest.mark.parametrize("durability", ["LOCAL", "GLOBAL"])
def test_a_signature_in_another_spelling_is_refused(site: Site, durability: str) -> None:
    body = signed_job(ED25519, "t-edge", f"job-spelt-{durability}", f"spelt-{durability}") | {"durability": durability}
    respelled = body[MEMBER] | {"sig": respelt(body[MEMBER]["sig"])}
    answer = site.client.post("/v1/jobs", json=body | {MEMBER: respelled})
    assert problem(answer) == (422, "invalid-request"), answer.text
    assert "stray bits" in answer.json()["detail"]
    assert site.client.post("/v1/jobs", json=body).status_code == 201


@pytest.mark.parametrize("durability", ["LOCAL", "GLOBAL"])
def test_a_signed_event_that_is_sent_again_is_there_once(site: Site, durability: str) -> None:
    tenant, identity = f"t-again-{durability.lower()}", f"again-{durability}"
    body = signed_job(ED25519, tenant, "job-1", identity) | {"durability": durability}
    first = site.client.post("/v1/jobs", json=body)
    keyed = [site.client.post("/v1/jobs", json=body, headers={"Idempotency-Key": key}) for key in (identity, "another")]
    again = site.client.post("/v1/jobs", json=body)
    anew = site.client.post(
        "/v1/jobs", json=signed_job(ED25519, tenant, "job-1", identity) | {"durability": durability}
    )
    other = site.client.post(
        "/v1/jobs",
        json=signed_job(ED25519, tenant, "job-2", identity) | {"durability": durability},
        headers={"Idempotency-Key": identity},
    )
    assert (first.status_code, keyed[0].status_code) == (201, 201)
    assert problem(keyed[1]) == (422, "invalid-request"), "the key is the id"
    if durability == "GLOBAL":  # Else the chain decides later.
        assert keyed[0].json()["hlc"] == first.json()["hlc"]
        assert problem(other) == (422, "idempotency-key-reused")
    assert {again.status_code, anew.status_code} == {201}
    session = {"Tally-Session": ",".join(each.json()["session"] for each in (again, anew))}
    assert site.client.get("/v1/jobs/job-1", params={"tenant_id": tenant}, headers=session).json()["spec"] == {"n": 1}
    site.client.post("/v1/snapshots", json={"tenant_id": tenant})
    entries = site.client.get("/v1/chain/entries", params={"tenant_id": tenant}).json()["items"]
    assert [each["action"] for each in entries if each["action"] != "REFUSED"] == ["ENQUEUE"]
    assert verified(site, tenant)["valid"]


async def test_signatures_that_wait_for_a_thread_are_answered_together_and_each_as_its_key_made_it() -> None:
    threads, loop, given = CheckingThreads(), asyncio.get_running_loop(), [*EVERYBODY, STRANGER] * 25
    answered: dict[int, bool] = {}
    turns: list[int] = []
    everything: asyncio.Future[None] = loop.create_future()

    def on_checked(number: int, made: bool) -> None:
        if not turns or turns[-1] != len(answered):
            loop.call_soon(lambda: turns.append(len(answered)))
        answered[number] = made
        if len(answered) == len(given):
            loop.call_soon(everything.set_result, None)

    for number, signing in enumerate(given):
        signature = base64.b64decode(signing.sign(b"one" if number % 2 else b"another"))
        threads.check(signing.caller.key, signature, b"one", partial(on_checked, number))
        if number < 80:
            await asyncio.sleep(0)
    await everything
    assert answered == {number: number % 2 == 1 for number in range(len(given))}
    assert len(set(turns)) < len(given) - 10, "the last 20 came in one turn"


def test_lines_are_signed_together_and_what_is_left_out_or_added_is_refused(site: Site) -> None:
    tenant = "t-lines"
    events = [{"tenant_id": tenant, "type": "JobCreated", "job_id": f"j-{n}", "fence_token": 1} for n in range(7)]
    now_ms = time.time_ns() // 1_000_000

    def sent(lines: list[dict[str, Any]], identity: str, signed: list[dict[str, Any]] | None = None) -> httpx.Response:
        said = {**P256.said(now_ms, identity), "not_after_ms": now_ms + 3_600_000}
        payloads = [{name: each[name] for name in ("type", "fence_token")} for each in signed or lines]
        leaves = [
            leaf_hash(signed_events.message(tenant, each["job_id"], said, canonical.encode(payload)))
            for each, payload in zip(signed or lines, payloads, strict=True)
        ]
        root = levels_of(leaves)[-1][0]
        header = json.dumps({**said, "sig": P256.sign(signed_events.root_message(said, len(leaves), root))})
        headers = {"Content-Type": "application/x-ndjson", "Tally-Signature": header}
        content = b"\n".join(map(orjson.dumps, lines))
        return site.client.post("/v1/events?durability=GLOBAL", content=content, headers=headers)

    assert problem(sent(events[:6], "less", events)) == (422, "signature-invalid")
    assert problem(sent(events, "more", events[:6])) == (422, "signature-invalid")
    assert problem(sent([*reversed(events)], "order", events)) == (422, "signature-invalid")
    with_signature = [each | {MEMBER: {}} for each in events]
    assert problem(sent(with_signature, "twice", events)) == (422, "invalid-event")
    without_fence = [{name: value for name, value in each.items() if name != "fence_token"} for each in events]
    assert problem(sent(without_fence, "fence", events)) == (422, "invalid-event")
    first = sent(events, "whole")
    assert first.json()["accepted"] == 7, first.text
    assert sent(events, "whole").headers["Idempotent-Replay"] == "true"
    verdict = verified(site, tenant)
    assert (verdict["valid"], verdict["verdicts"]["signatures"], verdict["entries_checked"]) == (True, "ok", 7)


def test_what_must_be_signed_is_refused_without_and_by_every_way_in(site: Site) -> None:
    tenant = "t-required"
    body = {"tenant_id": tenant, "job_id": "plain"}
    assert site.client.post("/v1/jobs", json=body).status_code == 201
    told = site.tally("caller", "require", "-t", tenant, "--event", "JobCreated", "--event", "JobCompleted")
    assert told["signatures_required"][-1]["types"] == ["JobCompleted", "JobCreated"]
    for durability in ("LOCAL", "GLOBAL"):
        answer = site.client.post("/v1/jobs", json=body | {"job_id": "other", "durability": durability})
        assert problem(answer) == (403, "signature-required")
    line = orjson.dumps(body | {"job_id": "third", "type": "JobCreated"})
    answer = site.client.post("/v1/events", content=line, headers={"Content-Type": "application/x-ndjson"})
    assert problem(answer) == (403, "signature-required")
    accepted = {"tenant_id": tenant, "type": "JobAccepted", "dc_id": "use1", "durability": "GLOBAL"}
    assert site.client.post("/v1/jobs/plain/events", json=accepted).status_code == 201
    with site.signing_client(P256) as ledger:
        ledger.send_event(tenant, "plain", "JobCompleted", final_status="ok")
        assert ledger.create_job(tenant, {})["type"] == "JobCreated"
    assert verified(site, tenant)["valid"]


def test_what_need_no_longer_be_signed_is_taken_unsigned_only_once_verifiers_agree(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant, body = "t-lifted", {"tenant_id": "t-lifted", "durability": "GLOBAL"}
    with monkeypatch.context() as patched:
        patched.setattr("app.trust.caller_keys.REQUIRED_AFTER_MS", 0)
        site.tally("caller", "require", "-t", tenant, "--event", "JobCreated", "--event", "JobCompleted")
    site.tally("caller", "require", "-t", tenant, "--event", "JobCreated")
    assert problem(site.client.post("/v1/jobs", json=body)) == (403, "signature-required")
    site.tally("caller", "require", "-t", tenant, "--event", "JobFailed")
    assert problem(site.client.post("/v1/jobs", json=body)) == (403, "signature-required")
    site.tally("caller", "require", "-t", tenant)
    answer = site.client.post("/v1/jobs", json=body)
    assert problem(answer) == (403, "signature-required")
    assert "from HLC" in answer.json()["detail"]


def test_a_requirement_in_force_is_lifted_at_once_and_the_chain_stays_valid(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant, body = "t-freed", {"tenant_id": "t-freed", "durability": "GLOBAL"}
    with monkeypatch.context() as patched:
        patched.setattr("app.trust.caller_keys.REQUIRED_AFTER_MS", 0)
        site.tally("caller", "require", "-t", tenant, "--event", "JobCreated")
    assert problem(site.client.post("/v1/jobs", json=body)) == (403, "signature-required")
    site.tally("caller", "require", "-t", tenant)
    assert site.client.post("/v1/jobs", json=body).status_code == 201
    assert verified(site, tenant)["valid"]


def test_a_revoked_key_signs_nothing_more_and_what_it_signed_before_counts(site: Site) -> None:
    tenant, signing = "t-revoked", Signing(Ed25519PrivateKey.from_private_bytes(b"\x09" * 32), "leaver")
    key_id = site.tally("caller", "new", "leaver", "--key", str(site.keyfile(signing)), "-t", tenant)["key_id"]
    again = site.client.post(
        "/v1/callers",
        json={"name": "again", "tenants": [tenant], "public_key_pem": signing.caller.key.public_key_pem},
    )
    assert problem(again) == (409, "key-conflict")
    with site.signing_client(signing) as ledger:
        ledger.create_job(tenant, {}, durability="GLOBAL")
        revoked = site.tally("caller", "revoke", key_id, "--reason", "left")
        assert revoked["revoked_from_hlc"] is not None
        with pytest.raises(ProblemError, match="is revoked from HLC"):
            ledger.create_job(tenant, {})
    assert verified(site, tenant)["valid"]
    listed = {each["key_id"]: each["name"] for each in site.tally("caller", "list")["callers"]}
    assert listed[key_id] == "leaver"
    actions = site.execute(
        "SELECT action FROM scheduler.scheduler_log WHERE job_id = $1 ORDER BY seq", f"caller:{key_id}"
    )
    assert [row["action"] for row in actions] == ["CALLER_REGISTERED", "CALLER_REVOKED"]


def test_a_command_runs_as_a_signed_job(site: Site) -> None:
    tenant = "t-run"
    code = "import sys; sys.exit(0)"
    key = str(site.keyfile(ED25519))
    done = run_tally("run", "-t", tenant, "--sign", key, "--", "python3", "-c", code, TALLY_URL=site.url)
    assert done.returncode == 0, done.stderr
    entries = site.client.get("/v1/chain/entries", params={"tenant_id": tenant}).json()["items"]
    assert [json.loads(each["payload"])[MEMBER]["key_id"] for each in entries] == [ED25519.key_id] * 3
    assert verified(site, tenant)["valid"]
    absent = run_tally("run", "-t", tenant, "--sign", "/no/such.pem", "--", "true", TALLY_URL=site.url)
    assert (absent.returncode, "/no/such.pem" in absent.stderr) == (125, True)


def forge(site: Site, tenant: str, row: dict[str, Any], **changes: Any) -> int:
    """Chain an event again as this node would, with the database in hand; its seq."""
    head = site.execute("SELECT * FROM scheduler.chain_heads WHERE tenant_id = $1", tenant)[0]
    payload = canonical.encode({**json.loads(row["payload"]), **changes.pop("members", {})})
    physical, logical, node = (changes.pop("t_hlc", None) or row["t_hlc"]).split(":")
    entry = {**row, "seq": head["head_seq"] + 1, "t_hlc": f"{physical}:{int(logical) + 7}:{node}", **changes}
    digest, before = sha256(payload), head["head_chain_link"]
    link = (
        Linker(tenant)
        .link(
            entry["seq"], entry["t_hlc"], entry["job_id"], entry["action"], bytes.fromhex(before), digest.digest(), b""
        )
        .hex()
    )
    site.execute(
        "INSERT INTO scheduler.scheduler_log (tenant_id, seq, t_hlc, hlc_physical, hlc_logical, hlc_node, job_id,"
        " action, link_version, prev_chain_link, chain_link, payload_digest, payload)"
        " VALUES ($1, $2, $3, $4, $5, $6, $7, $8, 2, $9, $10, $11, $12::text::json)",
        *(
            tenant,
            entry["seq"],
            entry["t_hlc"],
            int(physical),
            int(logical) + 7,
            node,
            entry["job_id"],
            entry["action"],
        ),
        *(before, link, digest.hexdigest(), payload.decode()),
    )
    site.execute(
        "UPDATE scheduler.chain_heads SET head_seq = $2, head_chain_link = $3, head_hlc = $4 WHERE tenant_id = $1",
        *(tenant, entry["seq"], link, entry["t_hlc"]),
    )
    return int(entry["seq"])


LIVE: dict[str, dict[str, Any]] = {
    "repeated": {},
    "changed": {"members": {"spec": {"n": 2}}},
    "moved-to-another-job": {"job_id": "another"},
    "moved-to-another-fence": {"members": {"fence_token": 2}},
    "moved-to-another-time": {"t_hlc": "1704931200000:0:n"},
}


@pytest.mark.parametrize("attack", LIVE)
def test_with_node_key_and_database_in_hand_an_event_of_a_caller_is_named_by_service_and_database(
    site: Site, attack: str
) -> None:
    tenant = f"t-live-{attack}"
    body = signed_job(ED25519, tenant, "job-1", attack) | {"durability": "GLOBAL"}
    assert site.client.post("/v1/jobs", json=body).status_code == 201
    (row,) = site.client.get("/v1/chain/entries", params={"tenant_id": tenant}).json()["items"]
    seq = forge(site, tenant, row, **LIVE[attack])
    verdict = verified(site, tenant)
    named = verdict["first_break"]["kind"], verdict["first_break"]["seq"], verdict["verdicts"]["signatures"]
    assert named == ("caller-signature", seq, "broken"), verdict
    dsn = ["verify", "-t", tenant, "--dsn", site.superuser_url, "--keys", str(site.saved_keys()), "--no-state"]
    found = site.tally(*dsn, code=2)
    assert (found["first_break"]["kind"], found["first_break"]["seq"]) == ("caller-signature", seq)


def test_the_examples_of_the_page_run_as_they_are_printed(site: Site, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "signing-events.md").read_text()
    shell = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    (python,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert max(len([*filter(None, each.splitlines())]) for each in (python, shell[-1])) == 15
    tally = Path(sys.executable).parent
    environment = {**os.environ, "TALLY_URL": site.url, "URL": site.url, "PATH": f"{tally}:{os.environ['PATH']}"}
    (tmp_path / "backup.sh").write_text("#!/bin/sh\ntrue\n")
    (tmp_path / "backup.sh").chmod(0o755)
    environment["PATH"] = f"{tmp_path}:{environment['PATH']}"
    (tmp_path / "sign.py").write_text(f"URL = {site.url!r}\n{python}")
    for command in (*shell[:2], f"{sys.executable} sign.py", shell[-1], shell[2]):
        done = subprocess.run(
            ["bash", "-euc", command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=DEADLINE_S
        )
        assert done.returncode == 0, done.stderr + done.stdout
    entries = site.client.get("/v1/chain/entries", params={"tenant_id": "nightly"}).json()["items"]
    assert [each["action"] for each in entries] == ["ENQUEUE", "DEQUEUE", "COMPLETE", "ENQUEUE", "COMPLETE"]
    assert all(MEMBER in json.loads(each["payload"]) for each in entries)
    assert verified(site, "nightly")["valid"]
    assert site.client.get("/v1/callers").json()["signatures_required"][-1]["types"] == ["JobCompleted", "JobFailed"]


def test_an_import_is_judged_by_the_callers_of_the_importing_ledger(site: Site, tmp_path: Path) -> None:
    def take(ledger: Ledger) -> None:
        file = tmp_path / "acme.tar"
        file.write_bytes(bundle_of(mend(ledger)))
        with Client(site.url) as importer:
            importer.import_bundles([file])

    forged = signed_ledger()
    edit(forged.entry(SIGNED_SEQ), dc_id="moon")
    with pytest.raises(ProblemError, match="caller-signature"):
        take(forged)
    of_another = signed_ledger()
    sign(of_another, SIGNED_SEQ, STRANGER)
    take(of_another)
    verdict = verified(site, "acme")
    assert (verdict["valid"], verdict["verdicts"]["signatures"]) == (True, "ok"), verdict
