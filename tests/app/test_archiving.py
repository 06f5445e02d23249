"""The archive that a node fills: it is verified alone, and one node at a time fills it, whatever is away."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from asyncio.subprocess import PIPE
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from app.runtime.settings.config import Settings
from ledger.errors import ConfigurationError
from objects.store import ArchiveStore
from pipeline.archiving.continuous import Archiver
from tests.app.chains import until
from tests.app.client import Client
from tests.app.conftest import MakeSettings, RunServer
from tests.app.postgres_proxy import proxy_to
from tests.app.served import Serve
from tests.app.starting import assert_no_start
from tests.app.test_package import ROOT, pins
from tests.conftest import Database
from tests.tally import COLD, bare_environment, run_tally

EVENT = {"tenant_id": "acme", "spec": {"image": "a/b:1"}, "assigned_dcs": ["use1"], "durability": "GLOBAL"}


def archiving(make_settings: MakeSettings, place: Path | str, folder: str = "node", **given: Any) -> Settings:
    """Settings of a node that archives to ``place``, soon after every event."""
    return make_settings(
        folder, archive={"url": str(place), "interval": "1s"}, chain={"batch_interval": "100ms"}, **given
    )


async def archived(client: Client, tenant_id: str, seq: int) -> dict[str, Any]:
    """The answer of the node that archives, once the tenant is archived up to ``seq``."""

    async def has() -> dict[str, Any] | None:
        answer: dict[str, Any] = (await client.get("/v1/archive")).json()
        ends = {each["tenant_id"]: each["archived_to_seq"] for each in answer["tenants"]}
        return answer if answer["has_turn"] and ends.get(tenant_id, 0) >= seq else None

    found: dict[str, Any] = await until(has, f"{tenant_id} is archived to seq {seq}")
    return found


async def tally(client: Client, *arguments: str, code: int = 0) -> str:
    done = await asyncio.to_thread(run_tally, *arguments, TALLY_URL=str(client.base_url))
    assert done.returncode == code, done.stderr + done.stdout
    return done.stdout


async def test_what_is_signed_is_archived_and_verified_alone(
    run_server: RunServer, make_settings: MakeSettings, tmp_path: Path
) -> None:
    place, keys = tmp_path / "archive", tmp_path / "keys.json"
    async with run_server(archiving(make_settings, place)) as client:
        assert (await client.post("/v1/jobs", json=EVENT)).status_code == 201
        first = await archived(client, "acme", 1)
        assert (await client.post("/v1/jobs", json=EVENT)).status_code == 201
        second = await archived(client, "acme", 2)
        keys.write_text((await client.get("/v1/keys")).text)
        status = await tally(client, "archive", "status")
        measured = (await client.get("/metrics")).text

    assert (first["url"], first["has_turn"], first["error"]) == (str(place), True, None)
    assert second["table_version"] > first["table_version"] > 0
    assert Path(second["table_metadata"]).exists()
    assert "acme: archived to seq 2 of 2 signed" in status
    assert "archive_has_turn 1.0" in measured
    told = json.loads(await tally(client, "verify", "--archive", str(place), "--keys", str(keys), "--json"))
    assert {each["tenant_id"]: each["valid"] for each in told["tenants"]} == {"_system": True, "acme": True}
    assert told["table"]["verdict"] == "ok"


async def test_another_node_takes_over_when_the_one_that_archives_stops(
    run_server: RunServer, make_settings: MakeSettings, tmp_path: Path
) -> None:
    place, key = tmp_path / "archive", {"key_uri": f"file:{tmp_path / 'signing.pem'}"}
    settings = [
        archiving(make_settings, place, name, node_id=name, gate=gate, signing=key)
        for name, gate in (("node-a", "a"), ("node-b", "b"))
    ]
    async with run_server(settings[1]) as second:
        async with run_server(settings[0]) as first:
            await until(lambda: (place / "table").exists(), "one archives")
            await until(lambda: _turns(first, second), "one of them has the turn")
            answers = [(await each.get("/v1/archive")).json() for each in (first, second)]
            assert sorted(each["has_turn"] for each in answers) == [False, True]
            waiting = next(each for each in answers if not each["has_turn"])
            assert [each["tenant_id"] for each in waiting["tenants"]] == ["_system"]
        await second.post("/v1/jobs", json=EVENT)

        assert (await archived(second, "acme", 1))["has_turn"]


async def test_a_node_that_stops_gives_the_turn_back(
    run_server: RunServer, make_settings: MakeSettings, database: Database, tmp_path: Path
) -> None:
    async with run_server(archiving(make_settings, tmp_path / "archive")) as client:
        await until(lambda: _turns(client), "it has the turn")

    next_one = Archiver(database.service_url, ArchiveStore(str(tmp_path / "archive")))
    try:
        await until(lambda: next_one._takes_turn(next_one._open()), "the turn is free")
    finally:
        next_one.close()


async def test_a_place_that_is_away_stops_nothing_but_the_archive_and_prunes_and_is_named_everywhere(
    run_server: RunServer, make_settings: MakeSettings, tmp_path: Path
) -> None:
    place = tmp_path / "archive"
    place.write_text("no folder")
    async with run_server(archiving(make_settings, place)) as client:
        await until(lambda: _fault(client), "the first step fails")
        assert "cannot be written to" in str(await _fault(client))
        job_id = (await client.post("/v1/jobs", json=EVENT)).json()["job_id"]
        ended = {"tenant_id": "acme", "type": "JobCompleted", "durability": "GLOBAL"}
        assert (await client.post(f"/v1/jobs/{job_id}/events", json=ended)).status_code == 201
        await client.put("/v1/retention", params={"tenant_id": "acme"}, json={"period": "1s"})
        await until(lambda: _waits_for_the_archive(client), "the entries are old enough")
        assert (await client.post("/v1/prunes", json={"tenant_id": "acme"})).json()["seq"] is None
        assert (await client.get("/v1/chain/verify", params={"tenant_id": "acme"})).json()["valid"]
        assert "fails: " in await tally(client, "archive", "status", code=1)
        measured = (await client.get("/metrics")).text
        assert 'readyz_check_failing{check="archive"} 1.0' in measured
        assert re.search(r"^archive_failures_total [1-9]", measured, re.MULTILINE)
        place.unlink()

        assert (await archived(client, "acme", 2))["error"] is None
        assert await _fault(client) is None
        await until(lambda: _prunes(client), "they leave")


async def _waits_for_the_archive(client: Client) -> bool:
    found = (await client.get("/v1/retention", params={"tenant_id": "acme"})).json()["stopped_by"]
    return found is not None and found["why"] == "archive"


async def _prunes(client: Client) -> bool:
    return (await client.post("/v1/prunes", json={"tenant_id": "acme"})).json()["seq"] is not None


async def _turns(*clients: Client) -> bool:
    return any([(await each.get("/v1/archive")).json()["has_turn"] for each in clients])


async def _fault(client: Client) -> str | None:
    """What /readyz says of the archive, which stops nothing."""
    answer = await client.get("/readyz")
    assert answer.status_code == 200
    found: str | None = answer.json()["checks"]["archive"]["detail"]
    return found


async def test_a_caller_sees_the_tenants_that_it_may_audit(serve: Serve, tmp_path: Path) -> None:
    given = {"archive": {"url": str(tmp_path / "archive"), "interval": "1s"}, "chain": {"batch_interval": "100ms"}}
    async with serve(**given) as served, served.client(served.root) as root:
        for tenant_id in ("acme", "beta"):
            await root.post("/v1/jobs", json={**EVENT, "tenant_id": tenant_id})
        await archived(root, "beta", 1)
        token = await served.issue("audit", tenants="acme")
        async with served.client(token["token"]) as auditor:
            answer = (await auditor.get("/v1/archive")).json()

    assert [each["tenant_id"] for each in answer["tenants"]] == ["acme"]


async def test_without_an_archive_there_is_nothing_to_tell(client: Client) -> None:
    answer = (await client.get("/v1/archive")).json()

    assert (answer["url"], answer["tenants"]) == (None, [])
    assert "no archive: set archive.url" in await tally(client, "archive", "status", code=1)


async def test_a_node_without_the_packages_says_what_to_install(
    run_server: RunServer, make_settings: MakeSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.share.archive.PACKAGES", ("package_that_is_not_there",))

    await assert_no_start(
        run_server(archiving(make_settings, tmp_path / "archive")),
        ConfigurationError,
        match=r"pip install 'tallystick\[archive\]'",
    )


@pytest.mark.parametrize("lock", ["governance:400d", "compliance:1d"])
def test_only_an_archive_in_s3_can_be_locked(make_settings: MakeSettings, tmp_path: Path, lock: str) -> None:
    assert make_settings(archive={"url": "s3://bucket/prod", "lock": lock}).archive.lock == lock
    with pytest.raises((ConfigurationError, ValidationError), match="lock needs an archive in S3"):
        make_settings(archive={"url": str(tmp_path), "lock": lock})


def test_a_lock_of_another_form_is_refused(make_settings: MakeSettings) -> None:
    with pytest.raises((ConfigurationError, ValidationError), match=r"archive\.lock|lock"):
        make_settings(archive={"url": "s3://bucket/prod", "lock": "forever"})


async def test_a_process_of_its_own_archives_once_or_waits_its_turn(
    run_server: RunServer, make_settings: MakeSettings, database: Database, tmp_path: Path
) -> None:
    place, settings = tmp_path / "archive", make_settings(chain={"batch_interval": "100ms"})
    environment = {
        "TALLY_DATABASE_URL": database.service_url,
        "TALLY_DATA_DIR": str(settings.data_dir),
        "TALLY_ARCHIVE__URL": str(place),
    }

    async def run_once() -> Any:
        return await asyncio.to_thread(run_tally, "archive", "run", "--once", "--json", **environment)

    async with run_server(settings) as client:
        await client.post("/v1/jobs", json=EVENT)
        await until(lambda: _signed(client), "acme is signed")
        done = await run_once()
    told = json.loads(done.stdout)
    assert (done.returncode, told["has_turn"], told["error"]) == (0, True, None), done.stderr
    assert {each["tenant_id"]: each["archived_to_seq"] for each in told["tenants"]}["acme"] == 1
    held = Archiver(database.service_url, ArchiveStore(str(place)))
    try:
        held._takes_turn(held._open())
        waiting = await run_once()
    finally:
        held.close()
    assert (waiting.returncode, json.loads(waiting.stdout)["has_turn"]) == (0, False)


async def test_a_process_of_its_own_waits_for_postgres_and_signs_with_the_key_of_now(
    run_server: RunServer, make_settings: MakeSettings, database: Database, tmp_path: Path
) -> None:
    place, settings = tmp_path / "archive", make_settings(chain={"batch_interval": "100ms"})

    def signers() -> list[str]:
        files = sorted((place / "manifests" / "acme").glob("*"))
        return [json.loads(file.read_bytes())["signatures"][0]["keyid"] for file in files]

    async with run_server(settings) as client, proxy_to(database.service_url) as proxy:
        environment = {
            "TALLY_DATABASE_URL": proxy.url,
            "TALLY_DATA_DIR": str(settings.data_dir),
            "TALLY_ARCHIVE__URL": str(place),
            "TALLY_ARCHIVE__INTERVAL": "1s",
        }
        await client.post("/v1/jobs", json=EVENT)
        process = await asyncio.create_subprocess_exec(
            *(*COLD, "archive", "run"), env=bare_environment() | environment, stdout=PIPE, cwd=ROOT
        )
        assert process.stdout is not None
        try:
            await until(signers, "the first entry is archived")
            await proxy.refuse()
            proxy.cut()
            while not (line := await process.stdout.readline()).startswith(b"fails:"):
                assert line, "it has ended"
            rotated = (await client.post("/v1/keys/rotate", json={})).raise_for_status().json()
            await proxy.accept()
            await client.post("/v1/jobs", json=EVENT)
            await until(lambda: len(signers()) > 1, "the second entry is archived")
        finally:
            process.terminate()
            await process.wait()
    assert signers()[-1] == rotated["key"]["key_id"] != signers()[0]


def installed(folder: Path, lock: set[str]) -> Path:
    """A folder of packages that has those of ``lock`` and no others."""
    folder.mkdir()
    wanted = {pin.partition("==")[0] for pin in lock}
    for each in distributions():
        if re.sub(r"[-_.]+", "-", each.name).lower() in wanted:
            for name in {file.parts[0] for file in each.files or ()} - {"..", "__pycache__"}:
                if not (folder / name).exists():
                    (folder / name).symlink_to(Path(str(each.locate_file(name))))
    return folder


async def test_the_packages_of_the_extra_are_enough_to_archive(
    run_server: RunServer, make_settings: MakeSettings, database: Database, tmp_path: Path
) -> None:
    packages = installed(tmp_path / "packages", pins("-archive"))
    assert (packages / "pyarrow").exists()
    assert not (packages / "numpy").exists()
    settings = make_settings(chain={"batch_interval": "100ms"})
    there = bare_environment() | {
        "TALLY_DATABASE_URL": database.service_url,
        "TALLY_DATA_DIR": str(settings.data_dir),
        "TALLY_ARCHIVE__URL": str(tmp_path / "archive"),
        "PYTHONPATH": f"{packages}:{ROOT}:{ROOT}/clients/python",
    }
    async with run_server(settings) as client:
        await client.post("/v1/jobs", json=EVENT)
        await until(lambda: _signed(client), "acme is signed")
        command = [sys.executable, "-S", *COLD[1:], "archive", "run", "--once", "--json"]
        done = await asyncio.to_thread(subprocess.run, command, env=there, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["files"] > 0


async def _signed(client: Client) -> bool:
    answer = await client.get("/v1/snapshots", params={"tenant_id": "acme"})
    return bool(answer.json().get("items"))
