"""Reading request bodies, bounded while they arrive. JSON is parsed strictly, once; uploads (RFC 7578,
multipart/form-data) go to disk, file by file.

0 <= len(body) <= bytes_max       nothing past it is read or kept
0 <= held of all bodies, but for the first FREE_BYTES of each, <= the memory budget, until they are answered
bytes of an upload beside those of its files <= FRAMING_BYTES_MAX, or it is read no further
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from email.message import Message
from typing import TYPE_CHECKING, Any

from fastapi import Depends
from pydantic import TypeAdapter
from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from starlette.requests import Request

from app.edge.accepted import ACCEPTED, AcceptedDep, Service, body_chunks
from app.edge.answers import JSON_MEDIA_TYPE
from app.edge.forms.validation import parse
from app.runtime.state.node import Node
from ledger.errors import InvalidInputError, NotReadyError, ProblemError, UploadTooLargeError, reported_as
from ledger.facts.problems import PAYLOAD_TOO_LARGE, UNSUPPORTED_MEDIA_TYPE

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

    from app.share.bundle.staging import Staging, Upload

NDJSON_MEDIA_TYPE = "application/x-ndjson"
TEXT_MEDIA_TYPE = "text/plain"
COSE_MEDIA_TYPE = "application/cose"
_UTF_8 = ("charset=utf-8", 'charset="utf-8"')
_PARAMETERS = {COSE_MEDIA_TYPE: ("cose-type=cose-sign1", 'cose-type="cose-sign1"')}
"""By media type, the parameters that a Content-Type may have; those of any other are ``_UTF_8``."""
FREE_BYTES = 64 * 1024
"""A body up to this length is always taken: clients that send large or endless bodies must not lock out the others."""
PIECE_BYTES = 256 * 1024
"""Most bytes that are decoded in one turn."""
SCHEMA_REF = "#/components/schemas/{model}"
COMMAND_BYTES_MAX = 128 * 1024
"""Longest body of a request that is neither events nor files; the bounds of its fields are lower."""


async def read_body(request: Request, media_type: str, bytes_max: int, *, takes_gzip: bool = False) -> bytes:
    """The whole body, if it is of ``media_type`` and no longer than ``bytes_max`` bytes.

    ``takes_gzip`` allows the encoding gzip (RFC 1952, one member); then ``bytes_max`` bounds the decoded bytes, too.

    Raises:
        ProblemError: another media type, another encoding, another charset than UTF-8, or too long.
        InvalidInputError: the body is not gzip.
        NotReadyError: other requests hold as many bytes as may be in memory.
    """
    headers = request.headers
    if (content_type := headers.get("content-type", "")) != media_type:
        _check_media_type(content_type, media_type)
    encoding = headers.get("content-encoding")
    if encoding is not None and not (takes_gzip and encoding == "gzip"):
        plain = "plain or as gzip" if takes_gzip else "plain, without a Content-Encoding"
        raise ProblemError(UNSUPPORTED_MEDIA_TYPE, f"send the body {plain}")
    declared = headers.get("content-length", "")
    if declared.isdigit() and (len(declared) > 18 or int(declared) > bytes_max):
        raise _too_large(bytes_max)
    body = await _read(request, body_chunks(request), bytes_max)
    return body if encoding is None else await _read(request, _decoded(body), bytes_max)


async def _read(request: Request, chunks: AsyncIterator[bytes], bytes_max: int) -> bytes:
    body = bytearray()
    async for chunk in chunks:
        body += chunk
        if len(body) > bytes_max:
            raise _too_large(bytes_max)
        if (counted := min(len(chunk), len(body) - FREE_BYTES)) > 0:
            request.scope[ACCEPTED].hold(counted)
    return bytes(body)


async def _decoded(body: bytes) -> AsyncIterator[bytes]:
    """The pieces of ``body``, which is gzip; other requests go first between two."""
    decoder = zlib.decompressobj(zlib.MAX_WBITS | 16)
    while not decoder.eof:
        with reported_as(InvalidInputError, "the body is not gzip", zlib.error):
            piece = decoder.decompress(body, PIECE_BYTES)
        body = decoder.unconsumed_tail
        if not (piece or body or decoder.eof):
            raise InvalidInputError("the body is not gzip: it is truncated")
        yield piece
        await asyncio.sleep(0)
    if decoder.unused_data:
        raise InvalidInputError("the body has bytes behind its gzip")


class JsonBody:
    """The JSON body of a request that changes something, read as ``model``: a dependency that its route describes."""

    def __init__(self, model: Any) -> None:
        self._adapter: TypeAdapter[Any] = TypeAdapter(model)
        self.description = body_of(self._adapter)

    async def __call__(self, request: Request, node: Service[Node], accepted: AcceptedDep) -> Any:
        """The checked and authorized request; refused unread while this node takes no writes."""
        node.check_writable()
        body = await read_body(request, JSON_MEDIA_TYPE, COMMAND_BYTES_MAX)
        wanted = parse(self._adapter, body)
        if "tenant_id" in wanted:
            accepted.charge_tenant(wanted["tenant_id"], len(body))
        await accepted.allow(*filter(None, wanted.get("tenants") or [wanted.get("tenant_id")]))
        return wanted


def json_body(model: Any) -> Any:
    """``JsonBody`` as an endpoint asks for it."""
    return Depends(JsonBody(model))


def body_of(adapter: TypeAdapter[Any]) -> dict[str, Any]:
    """Describes a JSON body that the endpoint reads by itself."""
    return {"required": True, "content": {JSON_MEDIA_TYPE: {"schema": adapter.json_schema(ref_template=SCHEMA_REF)}}}


def _check_media_type(content_type: str, media_type: str) -> None:
    given, *parameters = [part.strip().lower() for part in content_type.split(";")]
    if given != media_type:
        raise ProblemError(UNSUPPORTED_MEDIA_TYPE, f"send {media_type}, not {given[:100] or 'nothing'}")
    for parameter in filter(None, parameters):
        if parameter not in (allowed := _PARAMETERS.get(media_type, _UTF_8)):
            raise ProblemError(UNSUPPORTED_MEDIA_TYPE, f"{parameter[:100]!r} is not allowed; send {allowed[0]}")


def _too_large(bytes_max: int) -> ProblemError:
    """The connection stays open: the rest of the body is discarded, so that the client can read this answer."""
    return ProblemError(PAYLOAD_TOO_LARGE, f"a body may have {bytes_max} bytes here; send less")


MULTIPART_MEDIA_TYPE = "multipart/form-data"
FILE_NAME_CHARACTERS_MAX = 200
BOUNDARY_CHARACTERS_MAX = 70
"""RFC 2046, section 5.1.1."""
FRAMING_BYTES_MAX = 1 << 20
"""Most bytes of boundaries, headers of parts, and data before the first and after the last boundary."""
_CODECS = {"utf-8": "utf-8", "iso-8859-1": "latin-1", "us-ascii": "ascii"}


@asynccontextmanager
async def uploaded(request: Request, staging: Staging) -> AsyncIterator[Upload]:
    """Every file of the body, in ``staging``, where a client that sends nothing takes no space.

    Raises:
        ProblemError: not multipart/form-data, or encoded.
        InvalidInputError: the body is malformed, truncated, holds no file, or anything but files.
        UploadTooLargeError: it is over the bound of ``staging``, or has too much beside its files.
        BundleRefusedError: a file is no bundle.
        NotReadyError: the disk takes no more, or too many send at once.
    """
    boundary = _boundary(request)
    pieces = body_chunks(request)
    first = await anext(pieces)
    async with staging.upload() as upload:
        await _read_files(first, pieces, boundary, upload)
        yield upload


async def _read_files(first: bytes, pieces: AsyncIterator[bytes], boundary: bytes, upload: Upload) -> None:
    files = _Files(upload)
    malformed = reported_as(InvalidInputError, "the body is not well-formed multipart/form-data", FormParserError)
    with malformed, reported_as(NotReadyError, "the files cannot be kept beside the WAL", OSError):
        parser = MultipartParser(boundary, files.callbacks())
        await asyncio.to_thread(parser.write, first)
        body_bytes = len(first)
        async for piece in pieces:
            await asyncio.to_thread(parser.write, piece)
            body_bytes += len(piece)
            if body_bytes - upload.bytes > FRAMING_BYTES_MAX:
                raise UploadTooLargeError(
                    f"the body has more than {FRAMING_BYTES_MAX} bytes beside those of its files; send the files alone"
                )
    if not files.is_whole:
        raise InvalidInputError("the body ends before its last boundary")
    if not upload.files:
        raise InvalidInputError("the body holds no file")


def _boundary(request: Request) -> bytes:
    header = Message()
    header["Content-Type"] = request.headers.get("content-type", "")
    if header.get_content_type() != MULTIPART_MEDIA_TYPE or "content-encoding" in request.headers:
        raise ProblemError(UNSUPPORTED_MEDIA_TYPE, f"send {MULTIPART_MEDIA_TYPE}, without a Content-Encoding")
    boundary = (_parameter(header, "Content-Type", "boundary") or "").rstrip()
    if not 1 <= len(boundary) <= BOUNDARY_CHARACTERS_MAX or not boundary.isascii():
        raise InvalidInputError(
            f"the Content-Type names no boundary of 1 to {BOUNDARY_CHARACTERS_MAX} ASCII characters", ("boundary",)
        )
    return boundary.encode()


def _parameter(header: Message, name: str, parameter: str) -> str | None:
    """A parameter of a header, None when there is none.

    A parameter in the extended form of RFC 2231 is empty unless it is UTF-8 or Latin-1: other codecs that a sender
    names are not loaded.

    Raises:
        InvalidInputError: the header's parameters are malformed.
    """
    try:
        value = header.get_param(parameter, header=name)
        if not isinstance(value, tuple):
            return value
        charset, _, text = value
        codec = _CODECS.get((charset or "us-ascii").lower())
        return text.encode("latin-1").decode(codec, "replace") if codec is not None else ""
    except (LookupError, TypeError, ValueError) as error:
        raise InvalidInputError(f"the parameters of {name} are malformed") from error


class _Files:
    """The parts of one body, as the parser reports them."""

    def __init__(self, upload: Upload) -> None:
        self._upload = upload
        self._name = self._value = self._disposition = b""
        self.is_whole = False

    def callbacks(self) -> MultipartCallbacks:
        """The callbacks of the parser."""
        return {
            "on_header_field": self._header_field,
            "on_header_value": self._header_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": self._data,
            "on_part_end": self._upload.end_file,
            "on_end": self._end,
        }

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        if self._name.lower() == b"content-disposition":
            self._disposition = self._value
        self._name = self._value = b""

    def _end_headers(self) -> None:
        header = Message()
        header["Content-Disposition"], self._disposition = self._disposition.decode("utf-8", "replace"), b""
        name = _parameter(header, "Content-Disposition", "filename")
        if name is None:
            raise InvalidInputError("the body may hold files only, each with a filename")
        self._upload.begin_file("".join(filter(str.isprintable, name.strip()))[:FILE_NAME_CHARACTERS_MAX])

    def _data(self, data: bytes, start: int, end: int) -> None:
        self._upload.write(data[start:end])

    def _end(self) -> None:
        self.is_whole = True
