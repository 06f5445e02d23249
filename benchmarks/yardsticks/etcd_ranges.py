"""etcd as the yardstick of ``read_job`` and ``list_jobs``: keys of one size, and range reads of one or of several.

Answers of the JSON gateway hold key and value in base64, and some 100 bytes beside them for each key.
"""

from __future__ import annotations

import base64
import json
import urllib.request
from collections.abc import Sequence

PUTS_A_TRANSACTION = 128
"""What etcd takes in one transaction."""


def fill(url: str, count: int, value_bytes: int) -> None:
    """Put keys 0 to ``count`` - 1, each with a value of so many bytes."""
    value = base64.b64encode(b"v" * value_bytes).decode()
    for first in range(0, count, PUTS_A_TRANSACTION):
        numbers = range(first, min(first + PUTS_A_TRANSACTION, count))
        data = {"success": [{"request_put": {"key": _key(number), "value": value}} for number in numbers]}
        request = urllib.request.Request(f"{url}/v3/kv/txn", json.dumps(data).encode())
        with urllib.request.urlopen(request, timeout=30) as answer:
            answer.read()


def ranges(starts: Sequence[int], count: int) -> list[bytes]:
    """HTTP requests, each reading ``count`` keys from one of ``starts`` on, linearizable as etcd reads by default."""
    return [_range(start, count) for start in starts]


def _range(start: int, count: int) -> bytes:
    asked = {"key": _key(start)} if count == 1 else {"key": _key(start), "range_end": _key(start + count)}
    data = json.dumps(asked, separators=(",", ":")).encode()
    headers = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    return f"POST /v3/kv/range HTTP/1.1\r\n{headers}\r\n\r\n".encode() + data


def _key(number: int) -> str:
    return base64.b64encode(b"job/%012d" % number).decode()
