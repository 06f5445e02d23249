"""A client that is made from the description alone calls every operation, and reads each answer by its model."""

from __future__ import annotations

import asyncio
import hashlib
import io
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiopenapi3
import cbor2
import httpx
import httpx2
import pytest
from aiopenapi3.plugin import Document, Message

from app.dev.cluster import free_port
from app.dev.embedded import EmbeddedPostgres
from app.node.wiring import running
from app.runtime.settings.config import load_settings
from tests.app.bundles import bundle_of
from tests.app.chains import until
from tests.app.otlp_requests import record, request_of
from tests.app.service_thread import serving
from tests.app.signed_statements import statement
from tests.app.witness import Witness
from tests.conftest import execute
from tests.ledger.callers import P256
from tests.ledger.ledger_in_memory import SIGNER, build

DATABASE = "openapi_client"
WITNESS = Witness()
JOB = {"tenant_id": "acme", "job_id": "job-1"}
LINE = '{"tenant_id":"acme","type":"JobCreated","job_id":"job-2"}\n'
RUN_EVENT = {"eventType": "START", "run": {"runId": "run-1"}, "job": {"namespace": "dags", "name": "daily"}}
RAW = ("application/x-ndjson", "text/plain", "application/cose")
"""Bodies that this client cannot send by itself. Others that are made from a description can."""

STATEMENT = statement(P256)

Answers = dict[str, Any]
"""What was answered so far, by operation."""
Call = Callable[[Answers], tuple[dict[str, Any] | None, Any]]

CALLS: dict[str, Call] = {
    "declare_private_fields": lambda _: ({"tenant_id": "acme"}, {"fields": ["spec.user"], "subject": "spec.user"}),
    "read_private_fields": lambda _: ({"tenant_id": "acme"}, None),
    "declare_search_fields": lambda _: ({"tenant_id": "acme"}, {"fields": ["spec.image", "dc"]}),
    "read_search_fields": lambda _: ({"tenant_id": "acme"}, None),
    "submit_job": lambda _: ({"Idempotency-Key": "once"}, {**JOB, "spec": {"user": "u-1"}, "durability": "GLOBAL"}),
    "report_event": lambda seen: (
        {"job_id": "job-1", "Tally-Session": seen["submit_job"].session},
        {"tenant_id": "acme", "type": "JobAccepted", "dc_id": "use1", "durability": "GLOBAL"},
    ),
    "submit_events": lambda _: ({"durability": "GLOBAL"}, LINE),
    "record_lineage": lambda _: (None, RUN_EVENT),
    "record_logs": lambda _: (None, request_of(record("JobCreated", "job-of-logs", tenant_id="acme"))),
    "cancel_job": lambda _: ({"job_id": "job-2"}, {"tenant_id": "acme", "reason": "no need", "durability": "GLOBAL"}),
    "read_job": lambda seen: (JOB | {"consistency": "session", "tally-session": seen["report_event"].session}, None),
    "list_jobs": lambda _: ({"tenant_id": "acme", "status": ["CANCELLING"], "where": ["spec.a:b"], "limit": 1}, None),
    "list_job_events": lambda _: (JOB, None),
    "prove_job": lambda seen: (JOB | {"Tally-Session": seen["report_event"].session, "extends": 1}, None),
    "prove_entry": lambda _: ({"tenant_id": "settled", "seq": 1}, None),
    "summarise_jobs": lambda _: ({"tenant_id": "acme", "by": "hour"}, None),
    "start_report": lambda _: (None, {"tenant_id": "acme"}),
    "read_report": lambda seen: ({"report_id": seen["start_report"].report_id}, None),
    "list_cancellations": lambda _: ({"tenant_id": "acme", "dc": "use1"}, None),
    "set_capacity": lambda _: (
        {"node": "n1"},
        {"tenant_id": "acme", "capacity": {"cpu_millis": 1}, "overcommit": {"cpu_millis": "1.5"}},
    ),
    "set_rules": lambda _: ({"tenant_id": "settled"}, {"version": 2}),
    "propose": lambda _: (
        {"Idempotency-Key": "promise"},
        {"tenant_id": "acme", "commitment": {"kind": "Lease", "resource": "r", "holder": "h"}},
    ),
    "list_commitments": lambda _: ({"tenant_id": "acme"}, None),
    "list_nodes": lambda _: ({"tenant_id": "acme", "limit": 1}, None),
    "report_stats": lambda _: (None, {**JOB, "dc_id": "use1", "completed": 1}),
    "verify_chain": lambda _: ({"tenant_id": "acme"}, None),
    "acknowledge_breaks": lambda _: (None, {"tenant_id": "broken", "reason": "broken on purpose"}),
    "read_head": lambda _: ({"tenant_id": "acme"}, None),
    "list_entries": lambda _: ({"tenant_id": "acme", "from_seq": 2}, None),
    "watch_chain": lambda _: ({"tenant_id": "settled", "from_seq": 1, "to_seq": 2}, None),
    "sign_snapshot": lambda _: (None, {"tenant_id": "acme"}),
    "list_snapshots": lambda _: ({"tenant_id": "acme"}, None),
    "read_snapshot": lambda seen: ({"snapshot_id": seen["sign_snapshot"].id}, None),
    "prove_inclusion": lambda _: ({"tenant_id": "settled", "seq": 1}, None),
    "prove_job_by_index": lambda _: ({"tenant_id": "acme", "job_id": "nobody-made-me"}, None),
    "prove_consistency": lambda _: ({"tenant_id": "settled", "first": 1}, None),
    "export_bundle": lambda _: (None, {"tenant_id": "settled"}),
    "import_bundles": lambda _: ({"dry_run": True}, [("file", ("one.tar", io.BytesIO(bundle_of(build(5)))))]),
    "read_exchange": lambda _: (None, None),
    "list_held": lambda _: ({"origin": "ledger.example.org"}, None),
    "read_news": lambda _: ({"origin": "ledger.example.org"}, None),
    "list_lacking": lambda _: ({"tenant_id": "settled", "from_seq": 1, "to_seq": 2}, None),
    "exclude_log": lambda _: (None, {"tenant_id": "settled", "log": "bad.example/settled", "reason": "it lies"}),
    "list_exclusions": lambda _: ({"tenant_id": "settled"}, None),
    "read_retention": lambda _: ({"tenant_id": "settled"}, None),
    "set_retention": lambda _: ({"tenant_id": "settled"}, {"period": "400d", "minimum": "180d"}),
    "place_hold": lambda _: (None, {"tenant_id": "settled", "reason": "a lawsuit"}),
    "list_holds": lambda _: ({"tenant_id": "settled"}, None),
    "release_hold": lambda seen: (
        {"tenant_id": "settled", "hold_id": seen["place_hold"].hold_id, "reason": "closed"},
        None,
    ),
    "prune": lambda _: (None, {"tenant_id": "settled", "dry_run": True}),
    "list_tenants": lambda _: ({"limit": 2}, None),
    "erase_subject": lambda _: ({"tenant_id": "acme"}, {"subject": "u-1", "reason": "asked for"}),
    "read_checkpoint": lambda _: ({"tenant_id": "settled"}, None),
    "read_entry_bundle": lambda _: ({"tenant_id": "settled", "bundle": "000.p/2"}, None),
    "read_tile": lambda _: ({"tenant_id": "settled", "tile": "0/000.p/2"}, None),
    "add_cosignatures": lambda seen: (
        {"tenant_id": "settled"},
        WITNESS.cosign(seen["read_checkpoint"].decode(), int(time.time())),
    ),
    "list_cosignatures": lambda _: ({"tenant_id": "settled"}, None),
    "list_witnesses": lambda _: ({"tenant_id": "settled"}, None),
    "list_anchors": lambda _: ({"tenant_id": "settled"}, None),
    "issue_token": lambda _: (None, {"name": "ci", "rights": ["write"], "tenants": ["acme"], "expires_in": "1d"}),
    "list_tokens": lambda _: (None, None),
    "revoke_token": lambda seen: ({"token_id": seen["issue_token"].token_id}, None),
    "add_webhook": lambda _: (None, {"tenant_id": "acme", "url": "https://receiver.invalid/", "actions": ["CANCEL"]}),
    "list_webhooks": lambda _: ({"tenant_id": "acme"}, None),
    "pause_webhook": lambda seen: ({"webhook_id": seen["add_webhook"].webhook_id}, None),
    "resume_webhook": lambda seen: ({"webhook_id": seen["add_webhook"].webhook_id}, None),
    "replay_webhook": lambda seen: ({"webhook_id": seen["add_webhook"].webhook_id}, {"from_seq": 1}),
    "redeliver_webhook": lambda seen: ({"webhook_id": seen["add_webhook"].webhook_id}, None),
    "remove_webhook": lambda seen: ({"webhook_id": seen["add_webhook"].webhook_id}, None),
    "read_console_session": lambda _: (None, None),
    "sign_in": lambda _: (None, {"token": "of-no-use-where-nobody-is-asked"}),
    "sign_out": lambda _: (None, None),
    "tell_caller": lambda _: (None, None),
    "list_access": lambda _: ({"tenant_id": "settled"}, None),
    "register_caller": lambda _: (
        None,
        {"name": "ci", "tenants": ["acme"], "public_key_pem": P256.caller.key.public_key_pem},
    ),
    "list_callers": lambda _: (None, None),
    "register_statement": lambda _: ({"tenant_id": "acme"}, STATEMENT),
    "resolve_receipt": lambda _: (
        {"tenant_id": "acme", "statement_id": hashlib.sha256(STATEMENT).hexdigest()},
        None,
    ),
    "list_scitt_keys": lambda _: (None, None),
    "read_scitt_key": lambda seen: ({"kid": cbor2.loads(seen["list_scitt_keys"])[0][2].decode()}, None),
    "revoke_caller": lambda seen: ({"key_id": seen["register_caller"].key_id, "reason": "left"}, None),
    "require_signatures": lambda _: ({"tenant_id": "signing"}, {"types": ["JobCompleted"]}),
    "list_keys": lambda _: (None, None),
    "retire_region": lambda _: ({"region": "eu1"}, {"reason": "lost", "force": True}),
    "admit_region": lambda seen: ({"region": "eu1"}, {"key_id": seen["list_keys"].keys[0].key_id}),
    "revoke_region_key": lambda _: ({"region": "eu1"}, {"key_id": SIGNER.key_id, "reason": "stolen"}),
    "rotate_key": lambda _: (None, {}),
    "admit_key": lambda seen: ({"key_id": seen["list_keys"].not_admitted[0].key_id}, {}),
    "revoke_key": lambda seen: ({"key_id": seen["list_keys"].keys[0].key_id}, {"reason": "lost"}),
    "read_node": lambda _: (None, None),
    "read_archive": lambda _: (None, None),
    "read_liveness": lambda _: (None, None),
    "read_readiness": lambda _: (None, None),
    "read_metrics": lambda _: (None, None),
}
"""Arguments of every operation: parameters and body. In this order, as some need what others have answered, and keys
change last: checkpoints are signed with the new one a moment after it took the place of one that is revoked."""


class RawBodies(Document):
    """Presents the bodies of ``RAW`` as bytes, which this client can send."""

    def __init__(self) -> None:
        super().__init__()
        self.media_types: dict[str, str] = {}

    def parsed(self, ctx: Document.Context) -> Document.Context:
        for operation in (each for methods in ctx.document["paths"].values() for each in methods.values()):
            content = operation.get("requestBody", {}).get("content", {})
            for media_type in [each for each in content if each in RAW and len(content) == 1]:
                self.media_types[operation["operationId"]] = media_type
                content["application/octet-stream"] = content.pop(media_type)
        return ctx


class SentAs(Message):
    """Sends them as what they are."""

    def __init__(self, bodies: RawBodies) -> None:
        super().__init__()
        self._bodies = bodies

    def sending(self, ctx: Message.Context) -> Message.Context:
        if media_type := self._bodies.media_types.get(ctx.operationId):
            ctx.headers["Content-Type"] = media_type
        return ctx


class Session(httpx2.Client):
    """Asks no proxy, speaks no TLS, for which each would read the certificate authorities, and waits as long as a busy
    machine takes."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, verify=False, timeout=60, trust_env=False)


@pytest.fixture(scope="module")
def base_url(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A service with a settled tenant of two entries, and a broken one whose break was found."""
    folder = tmp_path_factory.mktemp("openapi_client")
    (folder / "trusted.pem").write_text(SIGNER.public_key_pem)
    port = free_port()
    settings = {
        "port": port,
        # A peer that publishes keys: the service itself.
        "exchange": {"peers": [{"url": f"http://127.0.0.1:{port}", "region": "eu1"}]},
        "bundle": {"trusted_keys": folder / "trusted.pem"},
        "chain": {"checkpoint_interval": "20ms"},
        "lineage": {"tenants": {"*": "acme"}},
        "log": {"witnesses": [WITNESS.verifier_key]},
    }
    with (
        serving(postgres, folder / "data", DATABASE, **settings) as url,
        httpx.Client(base_url=url, timeout=60, trust_env=False) as client,
    ):
        for tenant in ("settled", "settled", "broken"):
            body = {"tenant_id": tenant, "durability": "GLOBAL"}
            client.post("/v1/jobs", json=body).raise_for_status()
        damage = "UPDATE scheduler.scheduler_log SET payload = '{}' WHERE tenant_id = 'broken'"
        asyncio.run(execute(postgres.superuser_url(DATABASE), f"SET session_replication_role = replica; {damage}"))
        assert not client.get("/v1/chain/verify", params={"tenant_id": "broken"}).json()["valid"]
        deadline_s = time.monotonic() + 60
        while not (note := client.get("/v1/log/settled/checkpoint").text).startswith("tally") or "\n2\n" not in note:
            assert time.monotonic() < deadline_s, note
        asyncio.run(introduce_a_key(folder / "other", postgres.service_url(DATABASE)))
        yield url


async def introduce_a_key(folder: Path, database_url: str) -> None:
    """Run another node until the key that it made itself is in the chain, which nobody admits."""
    async with running(load_settings(data_dir=folder, port=0), database_url) as (node, _):

        async def is_waiting() -> bool:
            return bool((await node.trust.published()).waiting)

        await until(is_waiting, "the node's key is in the chain")


def client_of(url: str) -> aiopenapi3.OpenAPI:
    """A client of the service at ``url``, made from what it says of itself."""
    bodies = RawBodies()
    return aiopenapi3.OpenAPI.load_sync(f"{url}/openapi.json", Session, plugins=[bodies, SentAs(bodies)])


def test_a_client_made_from_the_description_calls_every_operation_and_reads_every_answer(base_url: str) -> None:
    client = client_of(base_url)
    operations = {name: client.createRequest(name) for name in client._}
    assert operations.keys() == CALLS.keys()
    answers: Answers = {}
    for name, arguments in CALLS.items():
        parameters, body = arguments(answers)
        # Raises for a problem, and for an answer that is not as the description has it.
        _, answers[name], answer = operations[name].request(parameters=parameters, data=body)
        assert str(answer.status_code) in operations[name].operation.responses, name
    assert answers["submit_events"].accepted == 1
    assert answers["read_job"].status == "ACCEPTED"
    assert answers["verify_chain"].valid
    assert answers["import_bundles"].entries == 5
    assert answers["admit_key"].admitted
