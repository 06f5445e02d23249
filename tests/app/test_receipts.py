"""Receipts from a running service: what is asked for, signed by keys that count, and nothing where rows do not hold."""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest
from securesystemslib.dsse import Envelope
from securesystemslib.signer import SSlibKey

from app.runtime.settings.config import Settings
from app.share.bundle.receipts import ReceiptMaker
from ledger.exit_code import exit_code_of_receipt
from ledger.facts.events import SYSTEM_TENANT
from signing import envelope, private_keys
from signing import receipt as form
from signing.anchors import ExternalWitnesses
from signing.checkpoint import Checkpoint, open_checkpoint, sign_checkpoint
from signing.entry_proof import COSE_MEDIA_TYPE, verify_cose
from signing.keys import Keyring
from signing.note import parse as parse_note
from signing.receipt_judging import judged
from tests.app.chain_builder import edit
from tests.app.chains import until
from tests.app.client import Client
from tests.app.conftest import MakeSettings, RunServer, Serve
from tests.app.second_verifier import twin_in
from tests.app.shared import Shared, sharing
from tests.app.timestamp_authority import Authority, serving_stamps
from tests.app.witness import Witness
from tests.conftest import Database
from tests.ledger.ledger_in_memory import STRANGER, link_of
from tests.signing.test_documented_examples import documented_ring
from tests.tally import COLD, run_tally

WITNESS = Witness()
STATUS_OK = 200


@pytest.fixture
def authority(tmp_path: Path) -> Iterator[Authority]:
    with serving_stamps(tmp_path / "one") as authority:
        yield authority


@pytest.fixture(scope="module")
async def shared(make_shared_settings: MakeSettings, shared_database: Database) -> AsyncIterator[Shared]:
    settings = make_shared_settings(
        chain={"checkpoint_interval": "20ms"}, log={"witnesses": [WITNESS.verifier_key]}, read={"wait": "20s"}
    )
    async with sharing(settings, shared_database) as shared:
        yield shared


@pytest.fixture
def client(shared_client: Client) -> Client:
    return shared_client


async def write(client: Client, job_id: str, *types: str, tenant_id: str | None = None) -> str:
    """Create a job, report these events, and return the session."""
    tenant_id = tenant_id or client.tenant
    answer = await client.post("/v1/jobs", json={"tenant_id": tenant_id, "job_id": job_id, "spec": {"image": "a:1"}})
    for event in types:
        body = {"tenant_id": tenant_id, "type": event, "dc_id": "use1", **_FIELDS[event]}
        answer = await client.post(f"/v1/jobs/{job_id}/events", json=body)
    session: str = answer.raise_for_status().headers["Tally-Session"]
    return session


_FIELDS: dict[str, dict[str, Any]] = {
    "JobAccepted": {"worker_count": 2},
    "JobProgressReported": {"completed": 1, "failed": 0},
}


async def receipt_of(client: Client, job_id: str, session: str = "", **asked: Any) -> bytes:
    headers = {"Tally-Session": session} if session else {}
    params = {"tenant_id": client.tenant, **asked}
    return (await client.get(f"/v1/jobs/{job_id}/receipt", params=params, headers=headers)).raise_for_status().content


async def keys_of(client: Client) -> Keyring:
    return Keyring.from_json((await client.get("/v1/keys")).json())


def refusal(answer: httpx.Response) -> tuple[int, str]:
    """Status and kind of a problem."""
    return answer.status_code, answer.json()["type"].rsplit("/", 1)[-1]


async def test_a_receipt_of_a_job_just_written_waits_for_its_checkpoint_and_verifies_by_both_programs(
    client: Client, tmp_path: Path
) -> None:
    await write(client, "other", "JobAccepted")
    session = await write(client, "job-1", "JobAccepted", "JobProgressReported")
    file = await receipt_of(client, "job-1", session)
    (tmp_path / "receipt").write_bytes(file)
    keys = await keys_of(client)
    outcome = judged(file, keys)
    assert exit_code_of_receipt(outcome.verdict) == twin_in(tmp_path)(tmp_path / "receipt", keys) == 0
    receipt = form.read(file)[0]
    assert (receipt.covers, receipt.job_id, len(receipt.entries)) == ("job", "job-1", 3)
    shown = (await client.get("/v1/chain/entries", params={"tenant_id": client.tenant})).json()["items"]
    by_seq = {each["seq"]: each for each in shown}
    for entry in receipt.entries:
        stored = by_seq[entry.row.seq]
        assert {name: getattr(entry.row, name) for name in entry.row.__struct_fields__}.items() <= stored.items()
    # Of one entry.
    answer = await client.get("/v1/chain/receipt", params={"tenant_id": client.tenant, "seq": receipt.seqs[1]})
    one = form.read(answer.content)[0]
    assert (one.covers, one.job_id, one.seqs) == ("entry", "job-1", [receipt.seqs[1]])
    assert "attachment" in answer.headers["Content-Disposition"]
    assert exit_code_of_receipt(judged(answer.content, keys).verdict) == 0
    path = f"/v1/chain/receipt?tenant_id={client.tenant}&seq={one.seqs[0]}&form="
    answer = await client.get(f"{path}cose")
    assert answer.headers["content-type"] == COSE_MEDIA_TYPE
    proof = verify_cose(answer.content, bytes.fromhex(one.entries[0].row.chain_link), keys)
    assert (proof.origin, proof.leaf_index) == (one.origin, one.seqs[0] - 1)
    assert refusal(await client.get(f"{path}xml")) == (422, "invalid-request")


async def test_the_ledger_s_own_chain_has_receipts_too(client: Client) -> None:
    async def proved() -> httpx.Response | None:
        answer = await client.get("/v1/chain/receipt", params={"tenant_id": SYSTEM_TENANT, "seq": 1})
        return answer if answer.status_code == STATUS_OK else None

    answer = await until(proved, "the chain of the ledger has begun")
    assert exit_code_of_receipt(judged(answer.content, await keys_of(client)).verdict) == 0


async def test_what_is_not_there_is_told_as_other_reads_tell_it(client: Client) -> None:
    session = await write(client, "job-1")
    await receipt_of(client, "job-1", session)
    asked = {
        f"/v1/jobs/none/receipt?tenant_id={client.tenant}": (404, "job-not-found"),
        "/v1/jobs/job-1/receipt?tenant_id=nobody": (404, "tenant-not-found"),
        "/v1/jobs/job-1/receipt": (422, "invalid-request"),
        f"/v1/jobs/job-1/receipt?tenant_id={client.tenant}&extends=0": (422, "invalid-request"),
        f"/v1/jobs/job-1/receipt?tenant_id={client.tenant}&extends=99": (422, "seq-out-of-range"),
        f"/v1/chain/receipt?tenant_id={client.tenant}&seq=99": (422, "seq-out-of-range"),
        "/v1/chain/receipt?tenant_id=nobody&seq=1": (404, "tenant-not-found"),
    }
    assert {path: refusal(await client.get(path)) for path in asked} == asked


async def test_without_a_checkpoint_in_time_it_says_so_and_when_to_ask_again(
    run_server: RunServer, make_settings: MakeSettings
) -> None:
    settings = make_settings(chain={"checkpoint_interval": "1h"}, read={"wait": "200ms"})
    async with run_server(settings) as client:
        await write(client, "job-1")
        session = await write(client, "job-1", "JobAccepted")
        answer = await client.get(
            "/v1/jobs/job-1/receipt", params={"tenant_id": "acme"}, headers={"Tally-Session": session}
        )
        assert refusal(answer) == (503, "signing-unavailable")
        assert "Retry-After" in answer.headers
        assert "no checkpoint" in answer.json()["detail"]


# --- damage -------------------------------------------------------------------------------------------


DAMAGE = {
    "payload": ("payload = '{}'", "payload-digest at seq 2"),
    "action": ("action = 'FAIL'", "link at seq 2"),
    "time": ("hlc_physical = hlc_physical + 1", "hlc-columns at seq 2"),
    "digest": ("payload = '{}', payload_digest = encode(sha256('{}'), 'hex')", "link at seq 2"),
    "made-to-fit": ("action = 'OF_A_LATER_VERSION', chain_link = '{link}'", "not the one that was signed"),
}
"""By tenant, what somebody does to the second entry, and what is said of it."""


@pytest.fixture
async def damageable(run_server: RunServer, make_settings: MakeSettings) -> AsyncIterator[Client]:
    """A node of its own: it may end where history was rewritten."""
    async with run_server(make_settings(chain={"checkpoint_interval": "20ms"})) as client:
        yield client


async def test_no_receipt_is_signed_of_rows_that_were_changed(
    damageable: Client, superuser: asyncpg.Connection
) -> None:
    for tenant, (change, named) in DAMAGE.items():
        session = await write(damageable, "job-1", "JobAccepted", tenant_id=tenant)
        await receipt_of(damageable, "job-1", session, tenant_id=tenant)
        where = f"WHERE tenant_id = '{tenant}' AND seq = 2"
        row = dict(await superuser.fetchrow(f"SELECT * FROM scheduler.scheduler_log {where}"))
        link = link_of(tenant, {**row, "action": "OF_A_LATER_VERSION"})
        await edit(superuser, f"UPDATE scheduler.scheduler_log SET {change.replace('{link}', link)} {where}")
        for path in (f"/v1/jobs/job-1/receipt?tenant_id={tenant}", f"/v1/chain/receipt?tenant_id={tenant}&seq=2"):
            answer = await damageable.get(path)
            assert refusal(answer) == (409, "chain-damaged"), tenant
            assert named in answer.json()["detail"], tenant


async def test_a_receipt_of_a_job_is_refused_once_verification_knows_what_may_be_missing_from_it(
    client: Client, shared: Shared
) -> None:
    await receipt_of(client, "job-1", await write(client, "job-1", "JobAccepted"))
    damage = {"scheduler_log": "job_id = 'other' WHERE seq = 2", "jobs": "seqs = '{1}' WHERE job_id = 'job-1'"}
    for table, change in damage.items():
        await edit(shared.superuser, f"UPDATE scheduler.{table} SET {change} AND tenant_id = $1", client.tenant)
    found = json.loads(await receipt_of(client, "job-1"))["receipt"]["entries"]
    assert [each["row"]["seq"] for each in found] == [1], "it holds what is found under that name"
    assert not (await client.get(f"/v1/chain/verify?tenant_id={client.tenant}")).json()["valid"]
    refused = await client.get(f"/v1/jobs/job-1/receipt?tenant_id={client.tenant}")
    assert refusal(refused) == (409, "chain-damaged")
    assert f"at seq 2 of {client.tenant}" in refused.json()["detail"]
    # One entry says nothing of others.
    assert (await client.get(f"/v1/chain/receipt?tenant_id={client.tenant}&seq=1")).status_code == 200


async def test_no_receipt_is_signed_on_a_checkpoint_that_the_ledger_did_not_sign(
    damageable: Client, superuser: asyncpg.Connection
) -> None:
    for tenant, problem in (("stranger", "key-conflict"), ("changed", "chain-damaged")):
        session = await write(damageable, "job-1", "JobAccepted", tenant_id=tenant)
        receipt = form.read(await receipt_of(damageable, "job-1", session, tenant_id=tenant))[0]
        note = sign_checkpoint(receipt.tree_head, STRANGER)
        if tenant == "changed":
            note = receipt.checkpoint.replace("\n2\n", "\n3\n")

        async def refused(tenant: str = tenant, note: str = note) -> tuple[int, str] | None:
            change = "UPDATE scheduler.merkle_head SET checkpoint = $1 WHERE tenant_id = $2"
            await edit(superuser, change, note, tenant)
            answer = await damageable.get(f"/v1/jobs/job-1/receipt?tenant_id={tenant}")
            # The node looks at its checkpoints by itself, too, and may have made this one again.
            is_mended = answer.is_success and form.read(answer.content)[0].checkpoint != note
            return None if is_mended else refusal(answer)

        assert await until(refused, "a receipt is asked for before the checkpoint is made again") == (409, problem)

        async def given(tenant: str = tenant) -> bool:
            return (await damageable.get(f"/v1/jobs/job-1/receipt?tenant_id={tenant}")).is_success

        await until(given, "the checkpoint is signed again because somebody asked")


async def test_a_receipt_is_made_though_the_key_of_its_checkpoint_was_admitted_once_the_keys_were_asked_for(
    client: Client, shared: Shared
) -> None:
    await write(client, "job-1")
    now = shared.services[ReceiptMaker].published
    rings = [Keyring([])]

    async def published(tenant_id: str) -> Keyring:
        return rings.pop() if rings else await now(tenant_id)

    made = await replace(shared.services[ReceiptMaker], published=published).of_job(client.tenant, "job-1", None)
    assert (rings, made.entries) == ([], 1)
    assert exit_code_of_receipt(judged(made.file, await keys_of(client)).verdict) == 0


async def test_a_job_that_is_more_than_a_receipt_holds_is_told_what_to_do(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await write(client, "job-1", "JobAccepted", "JobProgressReported")
    await receipt_of(client, "job-1", session)
    monkeypatch.setattr("app.share.bundle.receipts.ENTRIES_MAX", 2)
    answer = await client.get(f"/v1/jobs/job-1/receipt?tenant_id={client.tenant}")
    assert refusal(answer) == (422, "receipt-too-large")
    assert "--seq" in answer.json()["detail"]


# --- external witnesses ----------------------------------------------------------------------------------------


async def cosign(client: Client, at_s: int) -> int:
    """Have the witness cosign the newest checkpoint; returns its size."""
    note = (await client.get(f"/v1/log/{client.tenant}/checkpoint")).raise_for_status().text
    lines = note.partition("\n\n")
    own = next(line for line in lines[2].splitlines() if not line.startswith(f"— {WITNESS.name} "))
    headers = {"content-type": "text/plain"}
    body = WITNESS.cosign(f"{lines[0]}\n\n{own}\n", at_s)
    answer = await client.post(f"/v1/log/{client.tenant}/cosignatures", content=body, headers=headers)
    size: int = answer.raise_for_status().json()["tree_size"]
    return size


async def test_a_receipt_carries_the_oldest_word_of_a_witness_that_covers_it(client: Client, shared: Shared) -> None:
    now_s = int(time.time())
    sizes = []
    for number in range(3):
        session = await write(client, f"job-{number}", "JobAccepted")
        await receipt_of(client, f"job-{number}", session)
        sizes.append(await cosign(client, now_s - 100 + number))
        # As long ago as it says: of one minute only the last word is kept.
        aged = "UPDATE scheduler.checkpoint_cosignature SET created_at = created_at - interval '100 seconds'"
        await edit(shared.superuser, f"{aged} WHERE tenant_id = $1", client.tenant)
    await receipt_of(client, "job-3", await write(client, "job-3", "JobAccepted"))
    external = ExternalWitnesses.load([WITNESS.verifier_key], None)
    found = {}
    for number in range(4):
        outcome = judged(await receipt_of(client, f"job-{number}"), await keys_of(client), external=external)
        found[number] = [(each["to_seq"], each["status"]) for each in outcome.verdict["anchors"]]
    assert found == {0: [(sizes[0], "ok")], 1: [(sizes[1], "ok")], 2: [(sizes[2], "ok")], 3: []}
    # A job that goes on after it was cosigned: the newest word covers its beginning.
    body = {"tenant_id": client.tenant, "type": "JobProgressReported", "dc_id": "use1", "completed": 1, "failed": 0}
    session = (await client.post("/v1/jobs/job-0/events", json=body)).headers["Tally-Session"]
    outcome = judged(await receipt_of(client, "job-0", session), await keys_of(client), external=external)
    assert [(each["to_seq"], each["status"]) for each in outcome.verdict["anchors"]] == [(sizes[2], "ok")]


async def test_a_receipt_carries_the_time_stamp_that_openssl_vouches_for(
    run_server: RunServer, make_settings: MakeSettings, authority: Authority
) -> None:
    log = {
        "timestamp_authorities": [{"url": authority.url, "ca_file": str(authority.ca_file)}],
        "timestamp_interval": "1s",
    }
    settings = make_settings(log=log, chain={"checkpoint_interval": "20ms"}, read={"wait": "20s"})
    async with run_server(settings) as client:
        session = await write(client, "job-1", "JobAccepted")

        async def stamped() -> bytes | None:
            file = await receipt_of(client, "job-1", session)
            return file if form.read(file)[0].anchors else None

        file = await until(stamped, "the checkpoint is stamped")
        (anchor,) = form.read(file)[0].anchors
        outcome = judged(file, await keys_of(client), external=ExternalWitnesses.load([], authority.ca_file))
        (found,) = outcome.verdict["anchors"]
        assert (found["kind"], found["to_seq"], found["status"]) == ("rfc3161", 2, "ok")
        assert authority.vouches_for(anchor.checkpoint.encode(), base64.b64decode(anchor.response))


# --- rights and records -------------------------------------------------------------------------------


async def test_who_may_read_a_job_may_have_its_receipt_and_who_may_audit_one_of_any_entry(serve: Serve) -> None:
    async with serve(chain={"checkpoint_interval": "20ms"}, read={"wait": "20s"}) as served:
        async with served.client(served.root) as root:
            session = await write(root, "job-1", "JobAccepted")
            await receipt_of(root, "job-1", session)
        job, entry = "/v1/jobs/job-1/receipt?tenant_id=acme", "/v1/chain/receipt?tenant_id=acme&seq=1"
        for right, tenants, expected in (
            ("read", "acme", (200, 403)),
            ("audit", "acme", (403, 200)),
            ("read", "other", (403, 403)),
        ):
            token = (await served.issue(right, tenants=tenants))["token"]
            async with served.client(token) as client:
                statuses = (await client.get(job)).status_code, (await client.get(entry)).status_code
            assert statuses == expected, (right, tenants)


async def test_private_fields_stand_in_a_receipt_as_they_were_chained(client: Client) -> None:
    declared = {"fields": ["spec.user"], "subject": "spec.user"}
    (await client.put(f"/v1/tenants/{client.tenant}/privacy", json=declared)).raise_for_status()
    body = {"tenant_id": client.tenant, "job_id": "job-1", "spec": {"user": "alice"}}
    session = (await client.post("/v1/jobs", json=body)).raise_for_status().headers["Tally-Session"]
    file = await receipt_of(client, "job-1", session)
    assert b"alice" not in file
    assert b"$private" in file
    assert exit_code_of_receipt(judged(file, await keys_of(client)).verdict) == 0


# --- other judges -------------------------------------------------------------------------------------


async def test_the_statement_opens_with_securesystemslib_and_its_signature_with_openssl(
    client: Client, tmp_path: Path
) -> None:
    file = await receipt_of(client, "job-1", await write(client, "job-1"))
    statement = json.loads(file)["statement"]
    (key,) = await keys_of(client)
    raw = key.raw().hex()
    foreign = SSlibKey(key.key_id, "ed25519", "ed25519", {"public": raw})
    assert list(Envelope.from_dict(statement).verify([foreign], 1)) == [key.key_id]
    _, opened = form.read(file)
    (tmp_path / "message").write_bytes(envelope.pae(opened.payload_type, opened.payload))
    (tmp_path / "signature").write_bytes(opened.signatures[0].signature)
    (tmp_path / "key.pem").write_text(key.public_key_pem)
    command = "openssl pkeyutl -verify -pubin -inkey key.pem -rawin -in message -sigfile signature"
    done = subprocess.run(command.split(), cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# --- the commands -------------------------------------------------------------------------------------


WHOLE_JOB = "proved by the index of jobs: nothing of this job is missing from seq 1 to "


async def tally(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(run_tally, *arguments)


async def test_prove_writes_what_verify_proof_finds_to_hold(client: Client, tmp_path: Path) -> None:
    url = str(client.base_url)
    await write(client, "job-1", "JobAccepted")
    await until(lambda: _is_there(client), "the job is chained")
    receipt, keys, kept = tmp_path / "job.json", tmp_path / "keys.json", tmp_path / "kept"
    keys.write_text((await client.get("/v1/keys")).text)
    done = await tally("prove", "-t", client.tenant, "--job", "job-1", "-o", receipt, "--url", url)
    assert done.returncode == 0, done.stderr
    assert f"all 2 entries of job job-1 of tenant {client.tenant}" in done.stdout
    verified = await tally("verify-proof", receipt, "--keys", keys)
    assert (verified.returncode, "PROVED" in verified.stdout) == (0, True), verified.stdout + verified.stderr
    assert "JobAccepted" in verified.stdout
    assert "never shown by a receipt" in verified.stdout
    assert (await tally("verify-proof", receipt)).returncode == 3
    # The receipt of a job that never was, once a snapshot signs which jobs there are.
    await client.post("/v1/snapshots", json={"tenant_id": client.tenant})
    absent = tmp_path / "absent.json"
    done = await tally("prove", "-t", client.tenant, "--job", "job-404", "--absent", "-o", absent, "--url", url)
    verified = await tally("verify-proof", absent, "--keys", keys)
    unknown = await tally("verify-proof", absent)
    assert [WHOLE_JOB in each.stdout for each in (done, verified, unknown)] == [True, True, False], verified.stdout
    # A checkpoint kept from then, and a receipt made later that says how the log went on from it.
    kept.write_text((await client.get(f"/v1/log/{client.tenant}/checkpoint")).text)
    await write(client, "job-2")
    later = tmp_path / "later.json"
    done = await tally(
        "prove", "-t", client.tenant, "--seq", "1", "-o", later, "--url", url, "--checkpoint", kept, "--json"
    )
    told = json.loads(done.stdout)
    assert (told["compared_with"], told["receipt"]["covers"], told["file"]) == ("file", "entry", str(later))
    verified = await tally("verify-proof", receipt, later, "--keys", keys, "--checkpoint", kept, "--json")
    found = json.loads(verified.stdout)["receipts"]
    assert [each["compared_with"] for each in found] == ["file", "file"]
    assert verified.returncode == 0


async def test_prove_writes_one_entry_in_the_forms_of_other_programs(client: Client, tmp_path: Path) -> None:
    await receipt_of(client, "job-1", await write(client, "job-1", "JobAccepted"))
    cosigned_size = await cosign(client, int(time.time()))
    await receipt_of(client, "job-2", await write(client, "job-2"))
    keys, out = await keys_of(client), tmp_path / "proof"
    prove = ("prove", "-t", client.tenant, "-o", out, "--url", str(client.base_url), "--no-state")
    entries = (await client.get("/v1/chain/entries", params={"tenant_id": client.tenant})).json()["items"]
    for seq in (1, len(entries)):
        done = await tally(*prove, "--seq", str(seq), "--tlog-proof")
        assert (done.returncode, "reads a tlog-proof" in done.stdout) == (0, True), done.stdout + done.stderr
        proof, _, note = out.read_text().partition("\n\n")
        head, names = open_checkpoint(note, keys), [line.name for line in parse_note(note).signatures]
        assert (head.size == cosigned_size, WITNESS.name in names) == (seq <= cosigned_size, seq <= cosigned_size)
        assert f"\nindex {seq - 1}\n" in proof
        done = await tally(*prove, "--seq", str(seq), "--cose", "--json")
        assert json.loads(done.stdout)["receipt"]["bytes"] == len(out.read_bytes())
        assert verify_cose(out.read_bytes(), bytes.fromhex(entries[seq - 1]["chain_link"]), keys).leaf_index == seq - 1
    for wrong in (("--job", "job-1", "--cose"), ("--seq", "1", "--cose", "--tlog-proof")):
        assert (await tally(*prove, *wrong)).returncode == 1


async def _is_there(client: Client) -> bool:
    return (await client.get("/v1/jobs/job-1/receipt", params={"tenant_id": client.tenant})).status_code == STATUS_OK


async def test_prove_compares_with_what_was_verified_before(client: Client, tmp_path: Path) -> None:
    url, state = str(client.base_url), ("--state", tmp_path / "state")
    await receipt_of(client, "job-1", await write(client, "job-1", "JobAccepted"))
    (tmp_path / "keys.json").write_text((await client.get("/v1/keys")).text)
    (await client.post("/v1/snapshots", json={"tenant_id": client.tenant})).raise_for_status()
    verified = await tally("verify", "-t", client.tenant, "--url", url, *state)
    assert verified.returncode == 0, verified.stdout
    await receipt_of(client, "job-2", await write(client, "job-2"))
    receipt = tmp_path / "job.json"
    done = await tally("prove", "-t", client.tenant, "--job", "job-2", "-o", receipt, "--url", url, *state)
    assert (done.returncode, "begins with the checkpoint that you had" in done.stdout) == (0, True), done.stdout
    verified = await tally("verify-proof", receipt, "--keys", tmp_path / "keys.json", *state, "--json")
    assert json.loads(verified.stdout)["compared_with"] == "memory"


async def test_prove_finds_a_log_that_went_back_behind_what_was_kept(
    client: Client, shared: Shared, tmp_path: Path
) -> None:
    await receipt_of(client, "job-1", await write(client, "job-1"))
    own = form.read(await receipt_of(client, "job-1"))[0].tree_head
    signer = private_keys.load(str(shared.services[Settings].data_dir / "keys" / "signing.pem"))
    kept = tmp_path / "kept"
    for size, root in ((own.size + 5, own.root), (own.size, bytes(32))):
        kept.write_text(sign_checkpoint(Checkpoint(own.origin, size, root), signer))
        arguments = ("-t", client.tenant, "--job", "job-1", "-o", tmp_path / "out.json", "--checkpoint", kept)
        done = await tally("prove", *arguments, "--url", str(client.base_url), "--no-state")
        assert done.returncode == 2, done.stdout + done.stderr
        assert not (tmp_path / "out.json").exists()


async def test_prove_asks_for_one_thing(tmp_path: Path) -> None:
    for arguments in ((), ("--job", "a", "--seq", "1")):
        done = await tally("prove", "-t", "acme", "-o", tmp_path / "x", *arguments)
        assert (done.returncode, "--job J, or --seq N" in done.stderr) == (1, True)


def test_verify_proof_loads_no_database_package(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "docs" / "formats" / "example.receipt.json"
    script = f"""
import sys
sys.argv = ["tally", "verify-proof", {str(example)!r}, "--no-state"]
from cli import main
try:
    main()
except SystemExit as ended:
    code = ended.code
roots = {{name.partition(".")[0] for name in sys.modules}}
print(code, sorted(roots & {{"asyncpg", "sqlalchemy", "psycopg", "alembic", "fastapi", "uvicorn"}}))
"""
    done = subprocess.run([COLD[0], "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "3 []"


def test_verify_proof_says_of_each_file_what_is_wrong_and_ends_with_the_gravest(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "docs" / "formats" / "example.receipt.json"
    bad = tmp_path / "bad.json"
    bad.write_bytes(example.read_bytes().replace(b"SUCCEEDED", b"FAILED"))
    done = run_tally("verify-proof", example, bad, tmp_path / "gone.json", "--no-state")
    assert done.returncode == 2
    assert "INCOMPLETE" in done.stdout
    assert "TAMPERED WITH OR CORRUPT" in done.stdout
    assert "something was changed since it was signed" in done.stdout
    assert "COULD NOT BE READ" in done.stdout
    witness = (Path(__file__).parents[2] / "docs" / "formats" / "checkpoint.md").read_text().split("```text\n")[5]
    (tmp_path / "witness.vkey").write_text(witness.partition("```")[0])
    done = run_tally("verify-proof", example, "--witness-key", tmp_path / "witness.vkey", "--no-state", "--json")
    assert [each["status"] for each in json.loads(done.stdout)["anchors"]] == ["not_checked"], (
        "nobody vouches for the log"
    )
    (tmp_path / "keys.json").write_text(json.dumps(documented_ring().to_json()))
    options = ("--keys", tmp_path / "keys.json", "--witness-key", tmp_path / "witness.vkey", "--no-state")
    done = run_tally("verify-proof", example, *options)
    assert (done.returncode, "witness.example/w1 at 2024-01-11T00:00:10Z: ok" in done.stdout) == (0, True), done.stdout
    done = run_tally("verify-proof", bad, "--json")
    assert json.loads(done.stdout)["first_break"]["kind"] == "receipt"
