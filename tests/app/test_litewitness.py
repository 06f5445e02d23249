"""litewitness, a witness that others wrote, cosigns what a node pushes; `make torture` builds it from its source."""

from __future__ import annotations

import base64
import os
import shutil
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from signing.keys import PublicKey
from signing.note import VerifierKey, WitnessKey, cosignatures_of, parse
from signing.private_keys import load
from tests.app.chains import until
from tests.app.conftest import MakeSettings, RunServer
from tests.app.witness import Witness
from tests.go_programs import built, free_port, is_open, process

VERSION = "v0.9.0"
LOG_ORIGIN = "ledger.example"
QUORUM_P95_S = 3.0
pytestmark = [pytest.mark.torture, pytest.mark.foreign]


class Litewitness(NamedTuple):
    """A running litewitness."""

    key: WitnessKey
    url: str
    database: Path

    def know(self, log: VerifierKey) -> None:
        """From now on it cosigns this log, as after ``witnessctl add-log`` and ``add-key``."""
        with sqlite3.connect(self.database, timeout=30) as database:
            no_tree = base64.b64encode(bytes(32)).decode()
            database.execute("INSERT INTO log (origin, tree_size, tree_hash) VALUES (?, 0, ?)", (log.name, no_tree))
            database.execute("INSERT INTO key (origin, key) VALUES (?, ?)", (log.name, log.text()))

    def seen(self, origin: str) -> int:
        """The size of the tree that it has seen of a log."""
        with sqlite3.connect(self.database, timeout=30) as database:
            return database.execute("SELECT tree_size FROM log WHERE origin = ?", (origin,)).fetchone()[0]


@pytest.fixture(scope="module")
def program() -> Path:
    """litewitness, built."""
    assert shutil.which("ssh-agent") is not None, "install openssh-client: litewitness signs by ssh-agent"
    return built("litewitness", ("go", "install", f"filippo.io/torchwood/cmd/litewitness@{VERSION}"))


@contextmanager
def running(program: Path, name: str) -> Iterator[Litewitness]:
    """A litewitness of this name, with a key of its own."""
    with tempfile.TemporaryDirectory() as kept, ExitStack() as stack:
        folder = Path(kept)
        key_file, agent, database = folder / "key", folder / "agent", folder / "witness.db"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key_file], check=True)
        raw = base64.b64decode((folder / "key.pub").read_text().split()[1])[-32:]
        stack.enter_context(process("ssh-agent", "-D", "-a", agent, is_ready=agent.exists))
        with_agent = {**os.environ, "SSH_AUTH_SOCK": str(agent)}
        subprocess.run(["ssh-add", "-q", key_file], env=with_agent, check=True)
        listed = subprocess.run(["ssh-keygen", "-lf", key_file], capture_output=True, text=True, check=True)
        port = free_port()
        given = ("-ssh-agent", agent, "-key", listed.stdout.split()[1], "-db", database, "-name", name)
        stack.enter_context(process(program, *given, "-listen", f"127.0.0.1:{port}", is_ready=lambda: is_open(port)))
        yield Litewitness(WitnessKey.of(name, PublicKey.of_raw(raw)), f"http://127.0.0.1:{port}", database)


async def test_append_to_quorum_takes_three_seconds_at_p95_with_two_of_three_that_others_wrote(
    program: Path, run_server: RunServer, make_settings: MakeSettings, tmp_path: Path
) -> None:
    with running(program, "witness.example/one") as one, running(program, "witness.example/two") as two:
        dead = Witness("witness.example/dead").verifier_key
        policy = tmp_path / "policy"
        policy.write_text(
            f"witness one {one.key.text()} {one.url}\nwitness two {two.key.text()} {two.url}\n"
            f"witness dead {dead} http://127.0.0.1:9/\ngroup outside 2 one two dead\nquorum outside\n"
        )
        settings = make_settings(log={"policy": str(policy), "origin": LOG_ORIGIN})
        async with run_server(settings) as client:
            log = VerifierKey.of(f"{LOG_ORIGIN}/acme", load(f"file:{settings.data_dir}/keys/signing.pem").public_key)
            for each in (one, two):
                each.know(log)
            taken_s = []
            for number in range(1, 21):
                began_s = time.monotonic()
                body = {"tenant_id": "acme", "durability": "GLOBAL"}
                (await client.post("/v1/jobs", json=body)).raise_for_status()
                await until(lambda seq=number: _is_met(client, seq), "two witnesses cosign")  # type: ignore[misc]
                taken_s.append(time.monotonic() - began_s)
            assert sorted(taken_s)[18] <= QUORUM_P95_S, taken_s
            assert (one.seen(log.name), two.seen(log.name)) == (20, 20)
            note = (await client.get("/v1/log/acme/checkpoint")).text
            assert {each.witness for each in cosignatures_of(parse(note), [one.key, two.key])} == {one.key, two.key}


async def _is_met(client: httpx.AsyncClient, seq: int) -> bool:
    answer = await client.get("/v1/log/acme/witnesses")
    return answer.status_code == 200 and answer.json()["tree_size"] >= seq and answer.json()["policy"]["met"]
