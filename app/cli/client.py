"""The HTTP client of the ``tally`` command: one place for timeouts, retries and problem documents.

A request is repeated only when repeating cannot do harm: reads, and writes with an ``Idempotency-Key``.
Waits double from 0.25 s to 10 s with jitter; a ``Retry-After`` longer than that is honoured up to a minute.
"""

from __future__ import annotations

import contextlib
import io
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import httpx
import orjson

from ledger.errors import LedgerError

REQUEST_TIMEOUT_S = 60.0
"""Longest wait for one answer; above ``write.timeout``, so that the service's own answer comes first."""
DOWNLOAD_PAUSE_MAX_S = 600.0
"""Longest wait for the next piece of a download; before the first, a long chain may have to be signed."""
PATIENCE_S = 60.0
"""How long a request is repeated by default before the command gives up."""
UPLOAD_ANSWER_MAX_S = 4 * 3600.0
"""Longest wait for the answer once files were sent: they are verified and merged first."""
BACKOFF_MIN_S, BACKOFF_MAX_S = 0.25, 10.0
RETRY_AFTER_MAX_S = 60.0


class UnreachableError(LedgerError):
    """Nothing answers at the service's address, or not in time."""


class RequestRefusedError(LedgerError):
    """The service answered with a problem document. ``kind`` is the last part of its ``type``."""

    def __init__(self, status: int, kind: str, detail: str, body: Mapping[str, Any]) -> None:
        super().__init__(f"{kind} ({status}): {detail}")
        self.status = status
        self.kind = kind
        self.detail = detail
        self.body = body


def problem_of(response: httpx.Response) -> RequestRefusedError:
    """The problem that an answer of 400 or above carries, whatever its body is."""
    try:
        body = orjson.loads(response.content)
    except orjson.JSONDecodeError:
        body = {}
    if not isinstance(body, dict):
        body = {}
    kind = str(body.get("type", "")).rsplit("/", 1)[-1] or f"http-{response.status_code}"
    detail = str(body.get("detail") or body.get("title") or response.reason_phrase)
    if "line" in body:
        detail = f"line {body['line']}: {detail}"
    return RequestRefusedError(response.status_code, kind, detail, body)


def wait_s(attempt: int, retry_after: str | None, jitter: float) -> float:
    """Seconds to wait after failed attempt number ``attempt`` (from 0); ``jitter`` is within [0, 1)."""
    backoff: float = min(BACKOFF_MAX_S, BACKOFF_MIN_S * 2**attempt) * (0.5 + jitter / 2)
    asked = float(retry_after) if retry_after and retry_after.isascii() and retry_after.isdigit() else 0.0
    return max(backoff, min(asked, RETRY_AFTER_MAX_S))


class _CountedFile(io.FileIO):
    """A file that tells how much of it is read."""

    def __init__(self, path: Path, advance: Callable[[int], object]) -> None:
        super().__init__(path, "rb")
        self._advance = advance

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size) or b""
        self._advance(len(data))
        return data


class LedgerClient:
    """A connection to one service. ``on_wait`` is told why, and how many seconds, a retry waits."""

    def __init__(
        self,
        url: str,
        *,
        patience_s: float = PATIENCE_S,
        on_wait: Callable[[LedgerError, float], None] | None = None,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise UnreachableError(f"{url} is not an address of a service; it begins with http:// or https://")
        self.url = url.rstrip("/")
        self._http = httpx.Client(timeout=REQUEST_TIMEOUT_S)
        self._patience_s = patience_s
        self._on_wait = on_wait

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def get(self, path: str, **params: str | int | None) -> Any:
        """The JSON that ``GET path`` answers; parameters that are None are left out.

        Raises:
            RequestRefusedError: the service refused.
            UnreachableError: no answer within the patience.
        """
        return orjson.loads(self._send("GET", path, params=params, repeatable=True).content)

    def get_text(self, path: str) -> str:
        """The text that ``GET path`` answers; errors as ``get``."""
        return self._send("GET", path, repeatable=True).text

    def post(self, path: str, body: Mapping[str, Any], *, key: str | None = None, repeatable: bool = False) -> Any:
        """The JSON that ``POST path`` answers. Repeated on failure with an Idempotency-Key ``key``, or if it is
        ``repeatable``: twice is once."""
        repeatable = repeatable or key is not None
        answer = self._send("POST", path, content=orjson.dumps(body), key=key, repeatable=repeatable)
        return orjson.loads(answer.content)

    def put(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON that ``PUT path`` answers. Repeated on failure: saying it twice is saying it once."""
        return orjson.loads(self._send("PUT", path, content=orjson.dumps(body), repeatable=True).content)

    def post_text(self, path: str, text: bytes) -> Any:
        """The JSON that ``POST path`` answers to a body of text; errors as ``get``. Never repeated."""
        return orjson.loads(self._send("POST", path, content=text, content_type="text/plain", repeatable=False).content)

    def download(self, path: str, body: Mapping[str, Any], write: Callable[[bytes], object]) -> None:
        """Hand what ``POST path`` answers to ``write``, piece by piece; errors as ``get``. Never repeated.

        When it returns, the answer came to its end.
        """
        timeout = httpx.Timeout(REQUEST_TIMEOUT_S, read=DOWNLOAD_PAUSE_MAX_S)
        try:
            with self._http.stream("POST", f"{self.url}{path}", json=body, timeout=timeout) as response:
                if response.status_code >= 400:
                    response.read()
                    raise problem_of(response)
                for piece in response.iter_bytes():
                    write(piece)
        except httpx.HTTPError as error:
            raise UnreachableError(f"no whole answer from {self.url}: {str(error) or type(error).__name__}") from error

    def upload(
        self, path: str, files: Sequence[Path], advance: Callable[[int], object], **params: str | None
    ) -> dict[str, Any]:
        """Send files as multipart/form-data, streamed; returns the JSON that answers. Never repeated.

        ``advance`` is told how many bytes of the files were sent, piece by piece.

        Raises:
            RequestRefusedError, UnreachableError: as ``get``.
            OSError: a file cannot be read.
        """
        timeout = httpx.Timeout(REQUEST_TIMEOUT_S, read=UPLOAD_ANSWER_MAX_S)
        query = {name: value for name, value in params.items() if value is not None}
        with contextlib.ExitStack() as stack:
            parts = [
                ("file", (file.name, stack.enter_context(_CountedFile(file, advance)), "application/x-tar"))
                for file in files
            ]
            try:
                response = self._http.post(f"{self.url}{path}", params=query, files=parts, timeout=timeout)
            except httpx.HTTPError as error:
                raise UnreachableError(f"no answer from {self.url}: {str(error) or type(error).__name__}") from error
        if response.status_code >= 400:
            raise problem_of(response)
        told: dict[str, Any] = orjson.loads(response.content)
        return told

    def post_lines(self, path: str, lines: bytes, *, key: str, **params: str | None) -> tuple[dict[str, Any], bool]:
        """Send NDJSON; returns the answer and whether the ledger already had it (``Idempotent-Replay``)."""
        response = self._send(
            "POST",
            path,
            content=lines,
            content_type="application/x-ndjson",
            key=key,
            params=params,
            repeatable=True,
        )
        return orjson.loads(response.content), response.headers.get("Idempotent-Replay") == "true"

    def _send(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str | int | None] | None = None,
        content: bytes | None = None,
        content_type: str = "application/json",
        key: str | None = None,
        repeatable: bool,
    ) -> httpx.Response:
        headers = {} if content is None else {"Content-Type": content_type}
        if key is not None:
            headers["Idempotency-Key"] = key
        query = {name: value for name, value in (params or {}).items() if value is not None}
        give_up_at = time.monotonic() + self._patience_s
        attempt = 0
        while True:
            outcome = self._once(method, path, query, content, headers)
            if isinstance(outcome, httpx.Response):
                return outcome
            error, retry_after, transient = outcome
            delay = wait_s(attempt, retry_after, random.random())  # noqa: S311 (spreads retries, no secret)
            if not (repeatable and transient) or time.monotonic() + delay > give_up_at:
                raise error
            if self._on_wait is not None:
                self._on_wait(error, delay)
            time.sleep(delay)
            attempt += 1

    def _once(
        self,
        method: str,
        path: str,
        query: Mapping[str, str | int],
        content: bytes | None,
        headers: Mapping[str, str],
    ) -> httpx.Response | tuple[LedgerError, str | None, bool]:
        """The answer, or the error, the Retry-After that came with it, and whether trying again may help."""
        try:
            response = self._http.request(method, f"{self.url}{path}", params=query, content=content, headers=headers)
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            return UnreachableError(f"no answer from {self.url}: {reason}"), None, True
        if response.status_code < 400:
            return response
        return problem_of(response), response.headers.get("Retry-After"), response.status_code == 503
