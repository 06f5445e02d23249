"""A small server that speaks as much S3 as an archive needs, with the faults of a network, on a port of its own.

Objects by path, conditional puts (``If-None-Match: *``) and ListObjectsV2. No signature is judged.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import md5
from xml.sax.saxutils import escape

from aiohttp import web

KEYS_A_PAGE = 3
"""Few, so that lists come in pages."""


class BucketServer:
    """One bucket; ``url`` is that of the server."""

    def __init__(self) -> None:
        self.url = ""
        self.objects: dict[str, bytes] = {}
        self.locks: dict[str, tuple[str, str] | None] = {}
        """By path, mode and end of the lock that the put asked for."""
        self.puts = 0
        self.cut_answers: set[int] = set()
        """Puts, from 1, that are done and whose answer is lost."""
        self.cut_bodies: set[int] = set()
        """Puts of which nothing is kept, the connection ends."""
        self.is_closed = False
        """Whether everybody is refused."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer one request."""
        key = request.path.removeprefix("/bucket").removeprefix("/")
        if self.is_closed:
            return _error(403, "AccessDenied")
        if request.method == "PUT":
            return await self._put(request, key)
        if not key:
            return self._list(request)
        if key not in self.objects:
            return _error(404, "NoSuchKey")
        return web.Response(body=self.objects[key], headers=_headers(self.objects[key]))

    async def _put(self, request: web.Request, key: str) -> web.StreamResponse:
        self.puts += 1
        number = self.puts
        data = await request.read()
        if number in self.cut_bodies:
            return _cut(request)
        if request.headers.get("If-None-Match") == "*" and key in self.objects:
            return _error(412, "PreconditionFailed")
        self.objects[key] = data
        mode, until = (request.headers.get(f"x-amz-object-lock-{name}") for name in ("mode", "retain-until-date"))
        self.locks[key] = None if mode is None or until is None else (mode, until)
        return _cut(request) if number in self.cut_answers else web.Response(headers=_headers(data))

    def _list(self, request: web.Request) -> web.Response:
        prefix, delimiter = request.query.get("prefix", ""), request.query.get("delimiter", "")
        after = request.query.get("continuation-token", "")
        folders, entries, last = set(), [], ""
        for key in sorted(self.objects):
            if not key.startswith(prefix) or key <= after:
                continue
            if len(entries) == KEYS_A_PAGE:
                break
            head, found, _ = key.removeprefix(prefix).partition(delimiter) if delimiter else ("", "", "")
            if found:
                folders.add(prefix + head + delimiter)
            else:
                size, tag = len(self.objects[key]), _headers(self.objects[key])["ETag"]
                entries.append(
                    f"<Contents><Key>{escape(key)}</Key><LastModified>2026-11-21T00:00:00.000Z</LastModified>"
                    f"<ETag>{escape(tag)}</ETag><Size>{size}</Size></Contents>"
                )
            last = key
        else:
            last = ""
        more = f"<NextContinuationToken>{escape(last)}</NextContinuationToken>" if last else ""
        prefixes = "".join(f"<CommonPrefixes><Prefix>{escape(each)}</Prefix></CommonPrefixes>" for each in folders)
        text = f"<ListBucketResult><IsTruncated>{str(bool(last)).lower()}</IsTruncated>{more}"
        return web.Response(
            text=f"{text}{''.join(entries)}{prefixes}</ListBucketResult>", content_type="application/xml"
        )


@contextmanager
def bucket_server() -> Iterator[BucketServer]:
    """A running server."""
    bucket, loop, started = BucketServer(), asyncio.new_event_loop(), threading.Event()

    async def serve() -> None:
        server = web.Server(bucket.answer)
        site = await loop.create_server(server, "127.0.0.1", 0)
        bucket.url = f"http://127.0.0.1:{site.sockets[0].getsockname()[1]}"
        started.set()

    def run() -> None:
        loop.run_until_complete(serve())
        loop.run_forever()

    thread = threading.Thread(target=run, name="bucket", daemon=True)
    thread.start()
    assert started.wait(30)
    try:
        yield bucket
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def _headers(data: bytes) -> dict[str, str]:
    return {"ETag": f'"{md5(data).hexdigest()}"', "Last-Modified": "Sat, 21 Nov 2026 00:00:00 GMT"}


def _error(status: int, code: str) -> web.Response:
    return web.Response(status=status, text=f"<Error><Code>{code}</Code></Error>", content_type="application/xml")


def _cut(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()
