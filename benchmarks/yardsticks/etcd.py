"""etcd as the yardstick of ``submit_*_etcd``: one member or more with fsync on, asked through a JSON gateway.

Debian's ``etcd-server``. Each request is one transaction that puts a value of the size of a job where its key is
absent.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from app.dev.cluster import free_port

READY_TIMEOUT_S = 30.0


def program() -> str | None:
    """Where etcd is, None when it is not installed."""
    return shutil.which("etcd")


@contextmanager
def served(folder: Path, members: int = 1) -> Iterator[str]:
    """The base URL of the leader of so many members whose data is in ``folder``; stopped on leaving.

    Raises:
        RuntimeError: it did not start.
    """
    found = program()
    if found is None:
        raise RuntimeError("etcd is not installed: apt-get install etcd-server")
    names = [f"bench{number}" for number in range(members)]
    clients, peers = ([f"http://127.0.0.1:{free_port()}" for _ in names] for _ in range(2))
    cluster = ",".join(f"{name}={peer}" for name, peer in zip(names, peers, strict=True))
    processes = [
        subprocess.Popen(
            [
                *(found, "--data-dir", str(folder / name), "--name", name),
                *("--listen-client-urls", client, "--advertise-client-urls", client),
                *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                *("--initial-cluster", cluster, "--log-level", "error"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for name, client, peer in zip(names, clients, peers, strict=True)
    ]
    try:
        for client, process in zip(clients, processes, strict=True):
            _wait_until_healthy(client, process)
        yield next(client for client in clients if _leads(client))
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


def transactions(bodies: Sequence[bytes]) -> Iterator[bytes]:
    """HTTP requests, each putting one of ``bodies`` where a key of its own is absent."""
    for number, body in enumerate(bodies):
        key = base64.b64encode(b"job/%012d" % number).decode()
        transaction = {
            "compare": [{"key": key, "target": "CREATE", "create_revision": "0"}],
            "success": [{"request_put": {"key": key, "value": base64.b64encode(body).decode()}}],
        }
        data = json.dumps(transaction, separators=(",", ":")).encode()
        headers = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
        yield f"POST /v3/kv/txn HTTP/1.1\r\n{headers}\r\n\r\n".encode() + data


def puts(url: str) -> int:
    """Keys that the member holds."""
    everything = base64.b64encode(b"\0").decode()
    data = json.dumps({"key": everything, "range_end": everything, "count_only": True}).encode()
    with urllib.request.urlopen(f"{url}/v3/kv/range", data, timeout=10) as answer:
        return int(json.load(answer).get("count", 0))


def _leads(url: str) -> bool:
    """Whether the member at ``url`` is the leader."""
    with urllib.request.urlopen(f"{url}/v3/maintenance/status", b"{}", timeout=10) as answer:
        status = json.load(answer)
        return bool(status["leader"] == status["header"]["member_id"])


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=1) as answer:
                if json.load(answer).get("health") == "true":
                    return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError("etcd did not start")
