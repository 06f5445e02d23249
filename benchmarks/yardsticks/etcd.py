"""etcd as the yardstick of ``submit_local_etcd``: one member with fsync on, asked through its JSON gateway.

Debian's ``etcd-server``. Each request is one transaction that puts a value of the size of a job where its key is
absent.
"""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

READY_TIMEOUT_S = 30.0


def program() -> str | None:
    """Where etcd is, None when it is not installed."""
    return shutil.which("etcd")


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The base URL of a member whose data is in ``folder``; stopped on leaving.

    Raises:
        RuntimeError: it did not start.
    """
    found = program()
    if found is None:
        raise RuntimeError("etcd is not installed: apt-get install etcd-server")
    client, peer = _free_port(), _free_port()
    url = f"http://127.0.0.1:{client}"
    process = subprocess.Popen(
        [
            *(found, "--data-dir", str(folder / "etcd"), "--name", "bench"),
            *("--listen-client-urls", url, "--advertise-client-urls", url),
            *("--listen-peer-urls", f"http://127.0.0.1:{peer}"),
            *("--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}"),
            *("--initial-cluster", f"bench=http://127.0.0.1:{peer}", "--log-level", "error"),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_until_healthy(url, process)
        yield url
    finally:
        process.terminate()
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


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


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
