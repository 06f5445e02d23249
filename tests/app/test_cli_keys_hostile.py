"""A root key is used on a machine of its own: a service that lies gets no signature but the one that was asked for."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from typer.testing import CliRunner

from cli import tally as command_line
from ledger.hlc import Hlc
from signing import private_keys
from signing.key_history import added_facts, rotated_facts
from tallystick_client import NotTheLedgerError


class Liar(ThreadingHTTPServer):
    """A service that answers what it was told to, and keeps what it is sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.keys: dict[str, Any] = {}
        self.sent: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


def listed_key(key_id: str, **more: object) -> dict[str, Any]:
    """A key as ``/v1/keys`` lists it."""
    absent = ("node_id", "not_before", "not_after", "revoked_from_hlc", "revocation_reason", "admitted_by")
    return {
        "key_id": key_id,
        "algorithm": "ed25519",
        "public_key_pem": "",
        **dict.fromkeys((*absent, "introduced_by")),
        "signs_snapshots": False,
        "signs_checkpoints": False,
        "admitted": True,
        **more,
    }


NODE = {
    "node_id": "node-0",
    "region": "local",
    "gate": "gate",
    "epoch": 1,
    "wal_id": "0" * 32,
    "ack_mode": "LOCAL_GROUP_SYNC",
    "topology": {"postgres_survives": "process", "safekeepers": 0},
    "positions": dict.fromkeys(("written_lsn", "durable_lsn", "commit_lsn", "chained_lsn"), 1),
    "clock": {
        "last_hlc": "1:0:node-0",
        "last_at": None,
        **dict.fromkeys(("offset_ms", "max_clock_skew_ms", "ticks", "skew_rejections"), 0),
    },
    "core": "c",
    "failure": None,
}


class _Handler(BaseHTTPRequestHandler):
    server: Liar

    def do_GET(self) -> None:
        self._answer(self.server.keys if self.path == "/v1/keys" else NODE)

    def do_POST(self) -> None:
        self.server.sent.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self._answer(listed_key("0" * 16))

    def _answer(self, said: object) -> None:
        body = json.dumps(said).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def liar() -> Iterator[Liar]:
    with Liar() as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_the_root_key_vouches_for_the_key_that_was_named_and_ends_none(liar: Liar, tmp_path: Path) -> None:
    root, asked, thief = (private_keys.generate(tmp_path / f"{name}.pem") for name in ("root", "asked", "thief"))
    admit = ["keys", "admit", asked.key_id, "--root-key", str(root.path), "--url", liar.url]
    introduced = {"seq": 2, "chain_link": "ab" * 32}
    listed = listed_key(asked.key_id, is_old_form=False, introduced_by=introduced)
    honest = added_facts(asked.public_key, "node-1")
    for facts in (
        added_facts(thief.public_key, "node-1"),
        {**added_facts(thief.public_key, "node-1"), "key_id": asked.key_id},
        rotated_facts(asked.public_key, "node-1", root.key_id, 1),
    ):
        liar.keys = {
            "root_key_id": root.key_id,
            "keys": [],
            "not_admitted": [{**listed, "facts": facts}],
            "log_verifier_keys": [],
        }
        assert CliRunner().invoke(command_line, admit).exit_code != 0
    assert liar.sent == []
    liar.keys["not_admitted"] = [{**listed, "facts": honest}]
    assert CliRunner().invoke(command_line, admit).exit_code == 0
    assert _signed(liar.sent[0])["facts"] == honest


def test_a_revocation_by_the_root_key_begins_now_by_the_clock_of_its_own_machine(liar: Liar, tmp_path: Path) -> None:
    root = private_keys.generate(tmp_path / "root.pem")
    introduced = {"seq": 1, "chain_link": "ab" * 32}
    liar.keys = {
        "root_key_id": root.key_id,
        "keys": [listed_key(root.key_id, introduced_by=introduced)],
        "not_admitted": [],
        "log_verifier_keys": [],
    }
    began_ms = time.time_ns() // 1_000_000
    CliRunner().invoke(command_line, ["keys", "revoke", root.key_id, "--root-key", str(root.path), "--url", liar.url])
    assert Hlc.parse(_signed(liar.sent[0])["facts"]["revoked_from_hlc"]).physical_ms >= began_ms


@pytest.mark.parametrize("said", [{}, {"root_key_id": 1, "keys": [{}], "not_admitted": [{}]}, []])
def test_a_list_of_keys_of_another_shape_is_told_in_one_line(liar: Liar, tmp_path: Path, said: Any) -> None:
    root = private_keys.generate(tmp_path / "root.pem")
    liar.keys = said
    for command in (
        ["keys", "list"],
        ["keys", "admit", root.key_id],
        ["keys", "admit", "--all-known"],
        ["keys", "revoke", root.key_id, "--root-key", str(root.path)],
    ):
        ended = CliRunner().invoke(command_line, [*command, "--url", liar.url])
        assert isinstance(ended.exception, NotTheLedgerError), command
    assert liar.sent == []


def _signed(body: dict[str, Any]) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(base64.b64decode(body["statement"]["payload"]))
    return said
