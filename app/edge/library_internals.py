"""All uses of uvicorn, httptools and FastAPI beyond their public interfaces.

``pyproject.toml`` bounds their versions. A start checks that all of it exists, as a later version may move it.
"""

from __future__ import annotations

import asyncio
import dis
import inspect
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final, Protocol

import uvicorn
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from ledger.errors import StartRefusedError

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application as Application
    from uvicorn._types import HTTPScope
else:
    Application = HTTPScope = Any

__all__ = [
    "STATUS_LINE",
    "AnswerTransport",
    "Application",
    "Dependant",
    "FlowControl",
    "HTTPScope",
    "HttpParserError",
    "HttpParserUpgrade",
    "HttpRequestParser",
    "HttpToolsProtocol",
    "RequestResponseCycle",
    "check_libraries",
]

USED: Final[Mapping[type, tuple[str, str]]] = {
    HttpToolsProtocol: (
        "uvicorn",
        "_start_asgi_task app client connection_lost connection_made connections cycle data_received eof_received "
        "expect_100_continue flow headers loop on_body on_header on_headers_complete on_message_begin "
        "on_message_complete on_response_complete parser pipeline scheme scope server_state shutdown transport url",
    ),
    RequestResponseCycle: (
        "uvicorn",
        "body default_headers disconnected keep_alive message_event more_body response_complete response_started scope "
        "transport",
    ),
    FlowControl: ("uvicorn", "pause_reading read_paused resume_reading write_paused"),
    uvicorn.Server: ("uvicorn", "capture_signals on_tick serve server_state should_exit"),
    HttpRequestParser: (
        "httptools",
        "feed_data get_http_version get_method set_dangerous_leniencies should_upgrade",
    ),
    APIRoute: (
        "fastapi",
        "app body_field dependant get_route_handler methods path path_format path_regex",
    ),
    Dependant: (
        "fastapi",
        "body_params call cookie_params dependencies header_params name path_params query_params request_param_name",
    ),
}
"""By class: the library, and the methods and attributes that are overridden, read or set here."""

SET: Final = "STORE_ATTR"
_OF_KNOWN_LENGTH = b"content-length: "
"""Part of the head of an answer whose body is ready, or follows at once."""


def check_libraries() -> None:
    """Return if every used part of the libraries exists.

    Raises:
        StartRefusedError: a part is missing; names it, and the version to install.
    """
    for kind, (library, names) in USED.items():
        if missing := set(names.split()) - _names_of(kind):
            declared = metadata.requires("tallystick") or ()
            wanted = next((each for each in declared if each.startswith((library + "<", library + ">"))), library)
            raise StartRefusedError(
                f"{library} {metadata.version(library)} does not fit: {kind.__name__} has no {min(missing)}; "
                f"install {wanted}"
            )


@cache
def _names_of(kind: type) -> frozenset[str]:
    """The attributes of an object of this class: of its class, its fields, and those set by its methods."""
    if kind is APIRoute:
        return frozenset(dir(APIRoute("/", check_libraries)))  # functions outside of the class set its attributes
    methods = [each for base in kind.__mro__ for each in vars(base).values() if inspect.isfunction(each)]
    set_by_them = {each.argval for method in methods for each in dis.get_instructions(method) if each.opname == SET}
    return frozenset((*dir(kind), *getattr(kind, "__dataclass_fields__", ()), *set_by_them))


class Writer(Protocol):
    """The connection that an answer is written to."""

    transport: asyncio.Transport
    written_bytes: int


class AnswerTransport(asyncio.Transport):
    """The transport of a connection for one answer: a head with Content-Length waits for the first piece of the body,
    which may be empty."""

    __slots__ = ("_connection", "_cycle", "_head", "_transport", "_was_held")

    def __init__(self, connection: Writer, cycle: RequestResponseCycle) -> None:
        self._connection = connection
        self._transport = connection.transport
        self._cycle = cycle
        self._head: bytes | None = None
        self._was_held = False

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        """Write the next piece of the answer."""
        if self._head is not None:
            data, self._head = b"".join((self._head, data)), None
        elif self._cycle.response_started and not self._was_held and _OF_KNOWN_LENGTH in data:
            self._head, self._was_held = bytes(data), True
            return
        self._connection.written_bytes += len(data)
        self._transport.write(data)

    def close(self) -> None:
        """Close the connection once all is written."""
        if self._head is not None:
            self.write(b"")
        self._transport.close()

    def is_closing(self) -> bool:
        """Whether the connection is closing or closed."""
        return self._transport.is_closing()
