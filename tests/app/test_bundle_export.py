"""Bundles that a running service exports: whole, signed, in ranges, and refused where there is nothing to export."""

from __future__ import annotations

import asyncio
import copy
import json
import subprocess
import tarfile
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest

from app.dev.embedded import EmbeddedPostgres
from app.share.bundle.export import BundleExporter
from signing.bundle import writer
from signing.bundle.reader import BundleReader
from signing.judging import BundleVerdict, verify_file
from signing.keys import Keyring
from tests.app.bundles import exit_code, store
from tests.app.chains import until
from tests.app.client import Client
from tests.app.conftest import MakeSettings
from tests.app.service_thread import serving
from tests.app.shared import sharing
from tests.conftest import Database, execute
from tests.tally import run_tally

DATABASE = "bundle_export"


@pytest.fixture(scope="module")
def client(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a service that signs a snapshot every 30 entries."""
    folder = tmp_path_factory.mktemp("export")
    with (
        serving(postgres, folder, DATABASE, chain={"batch_size": 30}) as url,
        httpx.Client(base_url=url, timeout=30, trust_env=False) as client,
    ):
        yield client


def submit(client: httpx.Client, tenant: str, jobs: int) -> None:
    """So many jobs, each created and completed: two entries."""
    lines = []
    for n in range(jobs):
        lines.append({"tenant_id": tenant, "type": "JobCreated", "job_id": f"j-{n}", "spec": {"n": n}})
        lines.append({"tenant_id": tenant, "type": "JobCompleted", "job_id": f"j-{n}", "final_status": "ok €"})
    content = "".join(json.dumps(line) + "\n" for line in lines)
    headers = {"Content-Type": "application/x-ndjson"}
    answer = client.post("/v1/events?durability=GLOBAL", content=content, headers=headers)
    assert answer.status_code == 200, answer.text


def export(client: httpx.Client, folder: Path, **wanted: Any) -> Path:
    answer = client.post("/v1/bundles/export", json=wanted)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-tar"
    return store(folder, answer.content, f"{wanted['tenant_id']}-{len(list(folder.iterdir()))}.tar")


def keys_of(client: httpx.Client) -> Keyring:
    return Keyring.from_json(client.get("/v1/keys").json())


def verify(client: httpx.Client, path: Path) -> BundleVerdict:
    return asyncio.run(verify_file(path, keys_of(client)))


def test_what_leaves_is_whole_and_signed(client: httpx.Client, tmp_path: Path) -> None:
    submit(client, "whole", 35)
    found = verify(client, export(client, tmp_path, tenant_id="whole"))
    assert exit_code(found) == 0
    assert (found.verdict["from_seq"], found.verdict["to_seq"], found.verdict["signed_to_seq"]) == (1, 70, 70)
    assert found.verdict["compared_with"] == "bundle"


def test_entries_snapshots_and_keys_leave_as_they_are_stored(client: httpx.Client, tmp_path: Path) -> None:
    submit(client, "stored", 40)
    path = export(client, tmp_path, tenant_id="stored")
    listed = client.get("/v1/chain/entries?tenant_id=stored").json()["items"]
    with BundleReader.open(path) as bundle:
        rows = [row for batch in bundle.entry_batches() for row in batch]
        snapshots = list(bundle.snapshot_rows())
    with tarfile.open(path) as container:
        held = json.load(container.extractfile("keys.json"))
    assert [(row[0], row[1], row[9], row[11], row[12]) for row in rows] == [
        (item["seq"], item["t_hlc"], item["chain_link"], item["payload"], item["origin"]) for item in listed
    ]
    stored = client.get("/v1/snapshots?tenant_id=stored").json()["items"]
    for row, item in zip(snapshots, reversed(stored), strict=True):
        whole = client.get(f"/v1/snapshots/{item['id']}").json()
        assert (row[0], row[1], row[6]) == (item["from_seq"], item["to_seq"], item["merkle_root"])
        assert json.loads(row[7]) == whole["dsse_envelope"]
    answer = client.get("/v1/keys?tenant_id=stored").json()
    assert [key["key_id"] for key in held["keys"]] == [key["key_id"] for key in answer["keys"]]
    assert held["log_verifier_keys"] == answer["log_verifier_keys"]


def test_nothing_is_signed_for_a_range_that_a_checkpoint_covers_if_asked(client: httpx.Client, tmp_path: Path) -> None:
    submit(client, "covered", 2)
    client.post("/v1/snapshots", json={"tenant_id": "covered"}).raise_for_status()
    client.post("/v1/jobs", json={"tenant_id": "covered", "spec": {}, "durability": "GLOBAL"}).raise_for_status()

    def size() -> int:
        return int(client.get("/v1/log/covered/checkpoint").text.split("\n")[1])

    asyncio.run(until(lambda: size() == 5, "a checkpoint covers all"))
    wanted = {"tenant_id": "covered", "to_seq": 5}
    found = verify(client, export(client, tmp_path, **wanted, without_signing=True))
    assert (exit_code(found), found.verdict["to_seq"], found.verdict["signed_to_seq"]) == (3, 5, 4)
    assert exit_code(verify(client, export(client, tmp_path, **wanted))) == 0


async def test_the_keys_of_a_bundle_are_asked_for_once_it_is_settled_what_leaves(
    make_settings: MakeSettings, database: Database, tmp_path: Path
) -> None:
    async with sharing(make_settings(), database) as shared, Client(base_url=shared.url, trust_env=False) as client:

        async def sign(job_id: str) -> None:
            body = {"tenant_id": "acme", "job_id": job_id, "durability": "GLOBAL"}
            (await client.post("/v1/jobs", json=body)).raise_for_status()
            (await client.post("/v1/snapshots", json={"tenant_id": "acme"})).raise_for_status()

        async def keyring(tenant_id: str) -> Keyring:
            await sign("job-2")
            return await shared.service.trust.keys_of(tenant_id)

        await sign("job-1")
        exporter = copy.copy(shared.services[BundleExporter])
        exporter._keyring = keyring
        path = store(tmp_path, b"".join([piece async for piece in exporter.export("acme")]), "acme.tar")
    with BundleReader.open(path) as bundle:
        assert bundle.manifest.to_seq == 1, "a key that was admitted for the next one is missing in no bundle"


def test_the_chain_of_the_ledger_itself_can_be_exported(client: httpx.Client, tmp_path: Path) -> None:
    submit(client, "other", 1)
    found = verify(client, export(client, tmp_path, tenant_id="_system"))
    assert (exit_code(found), found.verdict["tenant_id"]) == (0, "_system")


def test_a_range_holds_what_it_says_and_what_it_leaves_open_is_incomplete(client: httpx.Client, tmp_path: Path) -> None:
    submit(client, "ranges", 30)
    for from_seq, to_seq, code in (
        (1, 30, 0),
        (1, 25, 3),
        (None, 60, 0),
        (2, 30, 3),
        (31, None, 3),
        (60, 60, 3),
        (1, 1, 3),
    ):
        bounds = {name: seq for name, seq in (("from_seq", from_seq), ("to_seq", to_seq)) if seq is not None}
        found = verify(client, export(client, tmp_path, tenant_id="ranges", **bounds))
        assert (found.verdict["from_seq"], found.verdict["to_seq"]) == (from_seq or 1, to_seq or 60)
        assert (exit_code(found), found.verdict["valid"]) == (code, True), bounds
        assert found.checkpoint is not None
        assert found.checkpoint.size == 60
        assert found.verdict["verdicts"]["checkpoint"] == "not_checked", "none from outside was there"
        assert found.verdict["compared_with"] == ("bundle" if from_seq in (1, None) else None)


def test_the_same_ledger_exports_the_same_bytes(client: httpx.Client, tmp_path: Path) -> None:
    submit(client, "same", 20)
    first, second = [export(client, tmp_path, tenant_id="same") for _ in range(2)]
    assert first.read_bytes() == second.read_bytes()


def test_writing_goes_on_while_a_bundle_leaves(client: httpx.Client, tmp_path: Path) -> None:
    submit(client, "busy", 50)
    is_over = threading.Event()

    def write() -> None:
        with httpx.Client(base_url=client.base_url, timeout=30, trust_env=False) as busy:
            n = 0
            while not is_over.is_set():
                body = {"tenant_id": "busy", "job_id": f"late-{n}", "durability": "GLOBAL"}
                busy.post("/v1/jobs", json=body).raise_for_status()
                n += 1

    writing = threading.Thread(target=write)
    writing.start()
    try:
        paths = [export(client, tmp_path, tenant_id="busy") for _ in range(5)]
    finally:
        is_over.set()
        writing.join()
    assert [exit_code(verify(client, path)) for path in paths] == [0] * 5


def test_what_cannot_be_exported_is_a_problem_and_no_file(client: httpx.Client) -> None:
    submit(client, "few", 1)
    refused: list[tuple[dict[str, Any], int, str]] = [
        ({"tenant_id": "nobody"}, 404, "tenant-not-found"),
        ({"tenant_id": "few", "to_seq": 3}, 422, "seq-out-of-range"),
        ({"tenant_id": "few", "from_seq": 3}, 422, "seq-out-of-range"),
        ({"tenant_id": "few", "from_seq": 2, "to_seq": 1}, 422, "seq-out-of-range"),
        ({"tenant_id": "few", "from_seq": 0}, 422, "invalid-request"),
        ({"tenant_id": "few", "to_seq": "1"}, 422, "invalid-request"),
        ({"tenant_id": "few", "until": 1}, 422, "invalid-request"),
        ({"from_seq": 1}, 422, "invalid-request"),
    ]
    for wanted, status, kind in refused:
        answer = client.post("/v1/bundles/export", json=wanted)
        assert (answer.status_code, answer.json()["type"].rsplit("/", 1)[-1]) == (status, kind), wanted


def test_an_edited_row_ends_the_export_before_its_manifest_is_signed(
    client: httpx.Client, postgres: EmbeddedPostgres, tmp_path: Path
) -> None:
    submit(client, "edited", 600)
    export(client, tmp_path, tenant_id="edited")

    async def edit() -> None:
        connection = await asyncpg.connect(postgres.superuser_url(DATABASE))
        await connection.execute("SET session_replication_role = replica")
        await connection.execute(
            "UPDATE scheduler.scheduler_log SET payload = replace(payload::text, 'ok', 'no')::json"
            " WHERE tenant_id = 'edited' AND seq = 1100"
        )
        await connection.close()

    asyncio.run(edit())
    refused = client.post("/v1/bundles/export", json={"tenant_id": "edited"})
    assert (refused.status_code, refused.json()["type"].rsplit("/", 1)[-1]) == (409, "chain-damaged")
    assert "seq 1100" in refused.json()["detail"]
    whole = verify(client, export(client, tmp_path, tenant_id="edited", to_seq=1099))
    assert whole.verdict["valid"]


@pytest.mark.parametrize(
    ("name", "edit", "kind"),
    [
        ("bare", "dsse_envelope = NULL", "snapshot-chain"),
        ("rooted", "merkle_root = repeat('0', 64)", "snapshot-root"),
        ("counted", "entry_count = 2", "snapshot-root"),
    ],
)
def test_snapshots_that_no_verifier_takes_end_the_export_before_its_first_piece(
    name: str, edit: str, kind: str, client: httpx.Client, tmp_path: Path, postgres: EmbeddedPostgres
) -> None:
    for _ in range(3):
        client.post("/v1/jobs", json={"tenant_id": name, "durability": "GLOBAL"}).raise_for_status()
        client.post("/v1/snapshots", json={"tenant_id": name}).raise_for_status()
    where = f"WHERE tenant_id = '{name}' AND from_seq = 2"
    update = f"SET session_replication_role = replica; UPDATE scheduler.batch_snapshot SET {edit} {where}"
    asyncio.run(execute(postgres.superuser_url(DATABASE), update))
    refused = client.post("/v1/bundles/export", json={"tenant_id": name})
    assert (refused.status_code, refused.json()["type"].rsplit("/", 1)[-1]) == (409, "chain-damaged")
    assert kind in refused.json()["detail"]
    if kind == "snapshot-chain":
        # The snapshot behind shows it, so a range that ends before that one is whole.
        assert exit_code(verify(client, export(client, tmp_path, tenant_id=name, to_seq=2))) == 3


def test_an_export_without_room_for_its_snapshots_is_answered_with_the_folder(
    client: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(client, "no-room", 35)
    folder = tmp_path / "temporary"
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(writer, "SPOOL_BYTES", 1000)
    refused = client.post("/v1/bundles/export", json={"tenant_id": "no-room"})
    assert (refused.status_code, refused.json()["type"].rsplit("/", 1)[-1]) == (503, "not-ready")
    assert f"the temporary folder ({folder}): No such file or directory" in refused.json()["detail"]
    folder.mkdir()
    assert exit_code(verify(client, export(client, tmp_path, tenant_id="no-room"))) == 0


def test_a_client_that_goes_away_frees_the_export(client: httpx.Client, tmp_path: Path) -> None:
    submit(client, "gone", 30)
    for _ in range(5):
        with client.stream("POST", "/v1/bundles/export", json={"tenant_id": "gone"}) as answer:
            assert answer.status_code == 200
    assert exit_code(verify(client, export(client, tmp_path, tenant_id="gone"))) == 0


# --- tally bundle export ------------------------------------------------------------------------------


def tally(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_tally("bundle", "export", *arguments, TALLY_URL=url)


def test_the_command_writes_a_whole_file_and_says_what_it_holds(client: httpx.Client, tmp_path: Path) -> None:
    submit(client, "command", 20)
    path = tmp_path / "command.tar"
    done = tally(str(client.base_url), "--tenant", "command", "--to-seq", "30", "-o", str(path), "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["file"], told["from_seq"], told["to_seq"], told["entry_count"]) == (str(path), 1, 30, 30)
    found = verify(client, path)
    assert (found.digest, exit_code(found)) == (told["sha256"], 0)


def test_the_command_leaves_no_file_when_it_fails(client: httpx.Client, tmp_path: Path) -> None:
    kept = store(tmp_path, b"what was there", "kept.tar")
    done = tally(str(client.base_url), "--tenant", "nobody", "-o", str(kept))
    assert (done.returncode, "tenant-not-found" in done.stderr) == (1, True)
    assert [path.name for path in tmp_path.iterdir()] == ["kept.tar"]
    assert kept.read_bytes() == b"what was there"
