"""Importing bundles over HTTP: what is stored, what is not added twice, and what leaves the ledger as it was."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from app.dev.embedded import EmbeddedPostgres
from app.edge.forms.body import FRAMING_BYTES_MAX
from app.share.bundle import merging
from app.share.bundle.staging import Upload
from ledger import canonical
from ledger.bundle.format import PAYLOAD_BYTES_MAX
from ledger.chain.form import ORIGIN_BYTES_MAX
from ledger.errors import NotReadyError, UploadTooLargeError
from signing.judging import BundleVerdict, verify_file
from signing.keys import Keyring
from tests.app.bundles import bundle_of, exit_code, rows_of, statement_of, store
from tests.app.chains import Chains, followed, until
from tests.app.service_thread import serving
from tests.cases.bundles import cases
from tests.conftest import connected_to, spread
from tests.ledger.ledger_in_memory import SIGNER, STRANGER, build
from tests.tally import run_tally

DATABASE = "bundle_import"


@pytest.fixture(scope="module")
def client(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a service that trusts the key of ``SIGNER``."""
    folder = tmp_path_factory.mktemp("import")
    keys = folder / "trusted.pem"
    keys.write_text(SIGNER.public_key_pem)
    with (
        serving(postgres, folder / "data", DATABASE, bundle={"trusted_keys": keys}) as url,
        httpx.Client(base_url=url, timeout=60, trust_env=False) as client,
    ):
        yield client


def send(client: httpx.Client, *bundles: bytes, **params: Any) -> httpx.Response:
    files = [("file", (f"{n}.tar", bundle)) for n, bundle in enumerate(bundles)]
    return client.post("/v1/bundles/import", files=files, params=params)


def imported(client: httpx.Client, *bundles: bytes, **params: Any) -> dict[str, Any]:
    answer = send(client, *bundles, **params)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    assert told["imported"] + told["duplicates"] == told["entries"]
    return told


def verdict_of(client: httpx.Client, tenant: str) -> dict[str, Any]:
    verdict: dict[str, Any] = client.get("/v1/chain/verify", params={"tenant_id": tenant}).json()
    return verdict


def test_a_bundle_is_merged_verified_exported_again_and_adds_nothing_twice(
    client: httpx.Client, tmp_path: Path
) -> None:
    ledger = build(30, tenant_id="whole", snapshots_to=(10, 20, 30))
    bundle = bundle_of(ledger)
    told = imported(client, bundle)
    assert (told["bundles"], told["imported"], told["duplicates"], told["conflicts"]) == (1, 30, 0, [])
    assert told["jobs_changed"] == len(ledger.jobs)
    assert told["new_head"]["seq"] == 30
    again = imported(client, bundle)
    assert (again["imported"], again["duplicates"], again["new_head"]) == (0, 30, told["new_head"])
    assert client.post("/v1/snapshots", json={"tenant_id": "whole"}).status_code in (200, 201)
    verdict = verdict_of(client, "whole")
    assert verdict["valid"], verdict
    assert set(verdict["verdicts"].values()) == {"ok"}, verdict
    items = client.get("/v1/chain/entries", params={"tenant_id": "whole"}).json()["items"]
    origins = [json.loads(item["origin"]) for item in items]
    assert [(one["log"], one["seq"], one["chain_link"]) for one in origins] == [
        ("log.example/whole", row["seq"], row["chain_link"]) for row in ledger.entries
    ]
    answer = client.post("/v1/bundles/export", json={"tenant_id": "whole"})
    found: BundleVerdict = asyncio.run(
        verify_file(store(tmp_path, answer.content), Keyring.from_json(client.get("/v1/keys").json()))
    )
    assert exit_code(found) == 0, found.verdict


# --- what leaves the ledger as it was -----------------------------------------------------------------


def everything(postgres: EmbeddedPostgres, database: str = DATABASE) -> dict[str, int]:
    """Rows of every table."""

    async def count() -> dict[str, int]:
        async with connected_to(postgres.superuser_url(database)) as connection:
            rows = await connection.fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'scheduler'")
            names: list[str] = sorted(row["tablename"] for row in rows)
            return {name: await connection.fetchval(f"SELECT count(*) FROM scheduler.{name}") for name in names}

    return asyncio.run(count())


def kind_of(answer: httpx.Response) -> str:
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    kind: str = answer.json()["type"].rsplit("/", 1)[-1]
    return kind


def settled(client: httpx.Client, postgres: EmbeddedPostgres) -> dict[str, int]:
    """``everything``, once the service has recorded its start and followed and signed all that it chained."""

    async def settle() -> None:
        async with connected_to(postgres.superuser_url(DATABASE)) as connection:
            chains = Chains(connection)
            await until(chains.key_recorded, "the start is recorded")
            for tenant in await chains.tenants():
                client.post("/v1/snapshots", json={"tenant_id": tenant})
            behind = (
                "SELECT EXISTS (SELECT FROM scheduler.chain_heads LEFT JOIN scheduler.merkle_head USING (tenant_id)"
                " WHERE head_seq > coalesce(tree_size, 0) OR checkpoint IS NULL AND head_seq > 0)"
            )

            async def is_followed() -> bool:
                return not await connection.fetchval(behind)

            await until(is_followed, "every tree has followed its chain")
            await until(lambda: followed(connection), "the job table has")

    asyncio.run(settle())
    return everything(postgres)


@pytest.mark.exhaustive
def test_a_bundle_that_does_not_hold_leaves_nothing(client: httpx.Client, postgres: EmbeddedPostgres) -> None:
    before = settled(client, postgres)
    sound = bundle_of(build(4, tenant_id="beside", snapshots_to=(4,)))
    kinds = {2: "bundle-invalid", 4: "untrusted-key"}
    refused = [case for case in cases() if case.code in kinds and case.kept is None]
    assert len(refused) > 100
    for case in spread(refused, 40):
        answer = send(client, sound, case.file)
        assert (answer.status_code, kind_of(answer)) == (422, kinds[case.code]), (case.name, answer.text)
        assert answer.json()["verdict"]["valid"] is False, case.name
        assert answer.json()["file"] == "1.tar"
    later = {"t_hlc": f"{2**52}:0:node-1", "hlc_physical": 2**52, "hlc_logical": 0}
    unusable = resigned(later)
    for case in [case for case in refused if case.code == 2][:8]:
        answer = send(client, unusable, case.file)
        assert (kind_of(answer), answer.json()["file"]) == ("bundle-invalid", "1.tar"), (case.name, answer.text)
    assert everything(postgres) == before


def resigned(row_changes: dict[str, Any], seq: int = 9, tenant: str = "beside") -> bytes:
    """A bundle that a trusted key signed over a chain with one row that cannot stand in a ledger."""
    ledger = build(12, tenant_id=tenant)
    ledger.entry(seq).update(row_changes)
    ledger.relink()
    ledger.sign(12)
    return bundle_of(ledger)


def test_a_row_that_cannot_stand_in_a_ledger_leaves_nothing_whoever_signed_it(
    client: httpx.Client, postgres: EmbeddedPostgres
) -> None:
    before = settled(client, postgres)
    origin = {"bundle_digest": "0" * 64, "chain_link": "0" * 64, "log": "l/t", "node_id": "n", "seq": 1}
    changes: list[dict[str, Any]] = [
        {"payload": '{"type": "JobCompleted"}'},
        {"payload": "[]"},
        {"payload": "not json"},
        {"payload": '{"a":"\\u0000"}'},
        {"job_id": "a b"},
        {"job_id": ""},
        {"action": "complete"},
        {"action": "CONFLICT"},
        {"t_hlc": "5:0:Node", "hlc_physical": 5, "hlc_logical": 0, "hlc_node": "Node"},
        {"origin": "{}"},
        {"origin": "null"},
        {"origin": json.dumps(origin)},
        {"origin": json.dumps({**origin, "seq": 0}, separators=(",", ":"))},
        {"origin": json.dumps({**origin, "more": 1}, separators=(",", ":"))},
        {"origin": json.dumps({**origin, "chain_link": "x"}, separators=(",", ":"))},
        {"origin": json.dumps({**origin, "log": "l" * ORIGIN_BYTES_MAX}, separators=(",", ":"))},
    ]
    for changed in changes:
        answer = send(client, resigned(changed))
        assert (answer.status_code, kind_of(answer)) == (422, "bundle-invalid"), (changed, answer.text)
        assert "seq 9" in answer.json()["detail"], answer.text
    assert everything(postgres) == before


def test_a_payload_that_might_not_be_exported_again_leaves_nothing(
    client: httpx.Client, postgres: EmbeddedPostgres
) -> None:
    before = settled(client, postgres)
    payload = '{"a":"%s"}' % ("x" * PAYLOAD_BYTES_MAX)
    answer = send(client, resigned({"action": "OF_A_LATER_VERSION", "payload": payload}))
    assert (answer.status_code, kind_of(answer)) == (422, "bundle-invalid"), answer.text
    assert "seq 9 cannot be imported: its payload has 33554440 bytes" in answer.json()["detail"]
    assert everything(postgres) == before


def test_an_entry_that_says_it_was_born_here_is_the_one_that_stands_there(
    client: httpx.Client, postgres: EmbeddedPostgres
) -> None:
    for n in range(3):
        client.post("/v1/jobs", json={"tenant_id": "own", "job_id": f"own-{n}"}).raise_for_status()
    exported = client.post("/v1/bundles/export", json={"tenant_id": "own"})
    predicate = statement_of(exported.content)["predicate"]
    log = f"{predicate['log_origin']}/own"
    before = settled(client, postgres)
    for seq, link in ((3, predicate["to_chain_link"]), (3, "0" * 64), (1, "0" * 64)):
        origin = {"bundle_digest": "0" * 64, "chain_link": link, "log": log, "node_id": "node-1", "seq": seq}
        answer = send(client, resigned({"origin": canonical.encode(origin).decode()}, tenant="own"))
        assert (answer.status_code, kind_of(answer)) == (422, "bundle-invalid"), answer.text
        assert "another entry stands there" in answer.json()["detail"]
    assert everything(postgres) == before
    stands = rows_of(exported.content)[2]
    origin = {"bundle_digest": "0" * 64, "chain_link": stands["chain_link"], "log": log, "node_id": "node-1", "seq": 3}
    true = {name: stands[name] for name in stands if name.startswith(("hlc_", "t_hlc", "job_id", "action", "payload"))}
    linked_otherwise = canonical.encode({**origin, "chain_link": "0" * 64}).decode()
    answer = send(client, resigned({**true, "origin": linked_otherwise}, tenant="own"))
    assert (answer.status_code, kind_of(answer)) == (422, "bundle-invalid"), answer.text
    back = imported(client, resigned({**true, "origin": canonical.encode(origin).decode()}, tenant="own"))
    assert (back["duplicates"], back["imported"]) == (1, 11)
    beyond = {"bundle_digest": "0" * 64, "chain_link": "0" * 64, "log": log, "node_id": "node-1", "seq": 900}
    assert imported(client, resigned({"origin": canonical.encode(beyond).decode()}, tenant="own"))["imported"] == 1


def test_an_hlc_of_this_node_that_it_never_issued_is_not_imported(
    client: httpx.Client, postgres: EmbeddedPostgres
) -> None:
    node_id = client.get("/v1/node").json()["node_id"]
    before = settled(client, postgres)
    physical_ms = time.time_ns() // 1_000_000 + 4000
    hlc = {"t_hlc": f"{physical_ms}:7:{node_id}", "hlc_physical": physical_ms, "hlc_logical": 7, "hlc_node": node_id}
    answer = send(client, resigned(hlc, seq=12))
    assert (answer.status_code, kind_of(answer)) == (422, "bundle-invalid"), answer.text
    assert "this node has issued none beyond" in answer.json()["detail"]
    assert everything(postgres) == before


def test_what_is_not_an_upload_of_bundles_is_a_problem(client: httpx.Client, postgres: EmbeddedPostgres) -> None:
    before = settled(client, postgres)
    path = "/v1/bundles/import"
    typed = {"Content-Type": "multipart/form-data; boundary=b"}
    part = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    answers = {
        "no body": (client.post(path), 415, "unsupported-media-type"),
        "JSON": (client.post(path, json={}), 415, "unsupported-media-type"),
        "no boundary": (client.post(path, headers={"Content-Type": "multipart/form-data"}), 422, "invalid-request"),
        "nothing": (client.post(path, headers=typed), 422, "invalid-request"),
        "no part": (client.post(path, headers=typed, content=b"--b--\r\n"), 422, "invalid-request"),
        "garbage": (client.post(path, headers=typed, content=bytes(5000)), 422, "invalid-request"),
        "cut short": (client.post(path, headers=typed, content=part + b"data"), 422, "invalid-request"),
        "a field": (client.post(path, data={"a": "b"}, files={"file": b"x"}), 422, "invalid-request"),
        "text": (send(client, b"text"), 422, "bundle-invalid"),
        "too many": (send(client, *[b"x"] * 101), 422, "invalid-request"),
        "a query": (send(client, b"x", dryrun="true"), 422, "invalid-request"),
        "no answer to it": (send(client, b"x", dry_run="perhaps"), 422, "invalid-request"),
        "GET": (client.get(path), 405, "method-not-allowed"),
    }
    for name, (answer, status, kind) in answers.items():
        assert (answer.status_code, kind_of(answer)) == (status, kind), (name, answer.text)
    assert everything(postgres) == before


def test_what_the_headers_of_an_upload_say_is_never_a_fault_of_the_service(client: httpx.Client) -> None:
    path = "/v1/bundles/import"
    for boundary in ("b" * 71, "b" * 300, '""', "\xe4", "x*=idna''%80", "x"):
        typed = {b"Content-Type": b"multipart/form-data; boundary=" + boundary.encode("latin-1")}
        answer = client.post(path, headers=typed, content=b"--b--\r\n")
        assert (answer.status_code, kind_of(answer)) == (422, "invalid-request"), (boundary, answer.text)
    for given in ("idna''%80..a", "a\0b''..", "no-codec''x", "utf-8''" + "%80" * 9, "'", "x; filename*0*=idna''%80"):
        part = b'--b\r\nContent-Disposition: form-data; name="f"; filename*=' + given.encode() + b"\r\n\r\nx\r\n--b--"
        answer = client.post(path, headers={"Content-Type": "multipart/form-data; boundary=b"}, content=part)
        assert answer.status_code == 422, (given, answer.text)
        assert kind_of(answer) in ("bundle-invalid", "invalid-request"), (given, answer.text)
    for given, name in (("utf-8''%C3%A4.tar", "ä.tar"), ("iso-8859-1''%E4.tar", "ä.tar"), ("idna''xn--4ca.tar", "")):
        part = b'--b\r\nContent-Disposition: form-data; name="f"; filename*=' + given.encode() + b"\r\n\r\nx\r\n--b--"
        answer = client.post(path, headers={"Content-Type": "multipart/form-data; boundary=b"}, content=part)
        assert answer.json()["file"] == name, answer.text


def test_the_chain_of_a_ledger_itself_and_the_future_are_not_imported(
    client: httpx.Client, postgres: EmbeddedPostgres
) -> None:
    before = settled(client, postgres)
    answer = send(client, bundle_of(build(5, tenant_id="_system", snapshots_to=(5,))))
    assert (answer.status_code, kind_of(answer)) == (422, "invalid-request")
    assert "each ledger has that chain of its own" in answer.json()["detail"]
    later_ms = time.time_ns() // 1_000_000 + 3_600_000
    answer = send(client, bundle_of(build(5, tenant_id="late", snapshots_to=(5,), begin_ms=later_ms)))
    assert (answer.status_code, kind_of(answer)) == (400, "clock-skew")
    assert everything(postgres) == before


def test_a_dry_run_says_what_would_be_and_stores_nothing(client: httpx.Client, postgres: EmbeddedPostgres) -> None:
    before = settled(client, postgres)
    bundle = bundle_of(build(30, tenant_id="dry", snapshots_to=(30,)))
    told = imported(client, bundle, dry_run="true")
    assert (told["dry_run"], told["imported"], told["duplicates"], told["new_head"]["seq"]) == (True, 30, 0, 30)
    assert everything(postgres) == before
    done = imported(client, bundle)
    assert {**done, "dry_run": True} == told
    assert imported(client, bundle, dry_run="true")["imported"] == 0


def trusting(folder: Path) -> Path:
    """A file of the key of ``SIGNER``."""
    keys = folder / "trusted.pem"
    keys.write_text(SIGNER.public_key_pem)
    return keys


def test_too_much_is_not_imported(postgres: EmbeddedPostgres, tmp_path: Path) -> None:
    limits = {"import_bytes_max": "4 KiB", "trusted_keys": trusting(tmp_path)}
    with (
        serving(postgres, tmp_path / "data", "bundle_too_much", bundle=limits) as url,
        httpx.Client(base_url=url, timeout=60, trust_env=False) as client,
    ):
        half = bundle_of(build(1, snapshots_to=(1,)))[:4000]
        answer = send(client, half, half)
        assert (answer.status_code, kind_of(answer)) == (413, "payload-too-large")
        (node,) = (path for path in (tmp_path / "data" / "wal").iterdir() if path.is_dir())
        assert list((node / "staging").iterdir()) == []


@pytest.mark.parametrize("place", ["before the first boundary", "behind a boundary", "behind the last boundary"])
def test_an_upload_ends_whatever_is_sent_beside_its_files(client: httpx.Client, place: str) -> None:
    header = b'Content-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    whole = b"--b\r\n" + header + bundle_of(build(1, snapshots_to=(1,))) + b"\r\n--b--\r\n"
    before, filler = {
        "before the first boundary": (b"", b"\r\n"),
        "behind a boundary": (whole.removesuffix(b"--\r\n"), b" "),
        "behind the last boundary": (whole, b"x"),
    }[place]

    def body() -> Iterator[bytes]:
        yield before
        for _ in range(FRAMING_BYTES_MAX >> 15):
            yield filler * ((64 << 10) // len(filler))

    answer = client.post(
        "/v1/bundles/import", headers={"Content-Type": "multipart/form-data; boundary=b"}, content=body()
    )
    assert (answer.status_code, kind_of(answer)) == (413, "payload-too-large"), answer.text
    assert "beside those of its files" in answer.json()["detail"]


def test_an_upload_that_can_never_be_imported_is_refused_before_it_is_read(
    postgres: EmbeddedPostgres, tmp_path: Path
) -> None:
    bundle = bundle_of(build(1, snapshots_to=(1,)))
    not_first = bundle[bundle.index(b"snapshots.ndjson") :]
    limits = {"import_bytes_max": "200 KiB", "trusted_keys": trusting(tmp_path)}
    with (
        serving(postgres, tmp_path / "data", "bundle_trust", bundle=limits) as url,
        httpx.Client(base_url=url, timeout=60, trust_env=False) as client,
    ):
        for content in (bytes(1 << 20), b"PK\3\4" * 200_000, not_first * 200, not_first[:600]):
            answer = send(client, content)
            assert (answer.status_code, kind_of(answer)) == (422, "bundle-invalid")
            assert answer.json()["verdict"]["valid"] is False
            assert "is no bundle" in answer.json()["detail"]
        assert send(client, bundle).status_code == 200


def test_without_trusted_keys_nothing_is_imported(postgres: EmbeddedPostgres, tmp_path: Path) -> None:
    limits = {"import_bytes_max": "4 KiB"}
    with (
        serving(postgres, tmp_path / "data", "bundle_untrusted", bundle=limits) as url,
        httpx.Client(base_url=url, timeout=60, trust_env=False) as client,
    ):
        small = bundle_of(build(1, snapshots_to=(1,)))
        answer = send(client, small[:4000])
        assert (answer.status_code, kind_of(answer)) == (422, "untrusted-key")
        assert "bundle.trusted_keys" in answer.json()["detail"]
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(
                b"POST /v1/bundles/import HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n"
                b"Content-Type: multipart/form-data; boundary=b\r\nExpect: 100-continue\r\n\r\n"
            )
            assert connection.recv(65536).startswith(b"HTTP/1.1 422 "), "the upload was asked for"
        assert not list((tmp_path / "data" / "wal").glob("*/staging"))


def test_an_import_leaves_room_on_the_disk_of_the_wal(postgres: EmbeddedPostgres, tmp_path: Path) -> None:
    reserved = {"disk_reserve_bytes": "1024 GiB", "trusted_keys": trusting(tmp_path)}
    with (
        serving(postgres, tmp_path / "data", "bundle_disk", bundle=reserved) as url,
        httpx.Client(base_url=url, timeout=60, trust_env=False) as client,
    ):
        answer = send(client, bundle_of(build(1, snapshots_to=(1,))))
        assert (answer.status_code, kind_of(answer)) == (503, "not-ready")
        assert "bundle.disk_reserve_bytes keeps 1048576 MiB" in answer.json()["detail"]
        client.post("/v1/jobs", json={"tenant_id": "acme", "job_id": "mine"}).raise_for_status()


def test_a_disk_that_fills_while_files_come_in_stops_them(tmp_path: Path) -> None:
    upload = Upload(tmp_path, bytes_max=100, reserve_bytes=1 << 60)
    upload.begin_file("late")
    with pytest.raises(NotReadyError, match="make room"):
        upload.write(b"1")
    upload.close()


class Usage(NamedTuple):
    """Bytes of a disk."""

    total: int
    used: int
    free: int


def test_a_file_from_another_ledger_leaves_half_of_the_spare_disk_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(total=2000, used=1000, free=1000))
    for is_fetched in (False, True):
        upload = Upload(tmp_path, bytes_max=500, reserve_bytes=900, is_fetched=is_fetched)
        upload.begin_file("acme 1-3 of https://peer")
        upload.write(b"x" * 100)
        with pytest.raises(UploadTooLargeError) if is_fetched else nullcontext():
            upload.write(b"x")


def test_an_upload_whose_end_the_disk_does_not_take_is_closed_all_the_same(tmp_path: Path) -> None:
    upload = Upload(tmp_path, bytes_max=100, reserve_bytes=0)
    upload._file = file = open("/dev/full", "wb")  # noqa: SIM115
    file.write(b"kept until it is closed")
    upload.close()
    assert file.closed


def test_an_import_without_room_to_sort_is_told_so_and_not_that_the_database_is_away(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merging, "HELD_ENTRIES_MAX", 2)
    monkeypatch.setattr(merging, "BLOCK_BYTES", 2000)
    bundle = bundle_of(build(600, tenant_id="no-room"))
    with monkeypatch.context() as full:
        full.setattr(tempfile, "TemporaryFile", lambda **_: open("/dev/full", "r+b"))  # noqa: SIM115
        refused = send(client, bundle, dry_run=True)
    assert (refused.status_code, kind_of(refused)) == (503, "not-ready")
    assert "cannot be sorted in a file beside the WAL: No space left on device" in refused.json()["detail"]
    assert imported(client, bundle, dry_run=True)["imported"] == 600


# --- beside what the service does ---------------------------------------------------------------------


def test_an_import_leaves_the_clock_alone(client: httpx.Client) -> None:
    ahead_ms = time.time_ns() // 1_000_000 + 4_000
    imported(client, bundle_of(build(4, tenant_id="skewed", snapshots_to=(4,), begin_ms=ahead_ms)))
    body = {"tenant_id": "skewed", "job_id": "mine", "durability": "GLOBAL"}
    hlc = client.post("/v1/jobs", json=body).raise_for_status().json()["hlc"]
    assert int(hlc.split(":")[0]) < ahead_ms or time.time_ns() // 1_000_000 > ahead_ms


def test_an_import_and_writers_of_the_same_tenant_do_not_disturb_each_other(client: httpx.Client) -> None:
    bundle = bundle_of(build(4_000, tenant_id="busy", snapshots_to=range(1000, 4001, 1000)))
    is_over = threading.Event()
    written: list[int] = []

    def write() -> None:
        with httpx.Client(base_url=client.base_url, timeout=60, trust_env=False) as writer:
            while not is_over.is_set():
                n = len(written)
                body = {"tenant_id": "busy", "job_id": f"live-{n}", "durability": "GLOBAL"}
                written.append(writer.post("/v1/jobs", json=body).raise_for_status().json()["chain"]["seq"])

    writing = threading.Thread(target=write)
    writing.start()
    try:
        told = imported(client, bundle)
    finally:
        is_over.set()
        writing.join()
    assert told["imported"] == 4_000
    assert len(set(written)) == len(written) > 0
    client.post("/v1/snapshots", json={"tenant_id": "busy"})
    verdict = verdict_of(client, "busy")
    assert (verdict["valid"], verdict["to_seq"]) == (True, 4_000 + len(written)), verdict
    assert verdict["verdicts"]["projection"] == "ok"


def test_a_job_that_ended_elsewhere_has_ended_here(client: httpx.Client) -> None:
    (job,) = {row["job_id"] for row in build(4, tenant_id="ends").entries if row["action"] == "COMPLETE"} or {""}
    client.post("/v1/jobs", json={"tenant_id": "ends", "job_id": job}).raise_for_status()
    imported(client, bundle_of(build(8, tenant_id="ends", snapshots_to=(8,))))
    answer = client.post(f"/v1/jobs/{job}/cancel", json={"tenant_id": "ends", "reason": "r", "requestor": "q"})
    assert (answer.status_code, kind_of(answer)) == (409, "job-ended")


# --- tally bundle import --------------------------------------------------------------------------------


def tally(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_tally("bundle", "import", *arguments, TALLY_URL=url)


def test_the_command_says_what_became_of_the_bundles(client: httpx.Client, tmp_path: Path) -> None:
    url = str(client.base_url)
    good = store(tmp_path, bundle_of(build(6, tenant_id="command", snapshots_to=(6,))), "good.tar")
    bad = store(tmp_path, good.read_bytes()[:-600], "bad.tar")
    strange = store(tmp_path, bundle_of(build(6, tenant_id="command", snapshots_to=(6,)), signer=STRANGER), "s.tar")
    done = tally(url, str(good), "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["imported"], told["new_head"]["tenant_id"]) == (6, "command")
    again = tally(url, str(good), "--dry-run")
    assert (again.returncode, "6 there already" in again.stdout) == (0, True)
    assert [tally(url, str(path)).returncode for path in (bad, strange, tmp_path / "nowhere.tar")] == [2, 4, 1]
