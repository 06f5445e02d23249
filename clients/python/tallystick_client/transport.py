"""One code for blocking and asynchronous callers: coroutines over a ``Transport``, which sends requests and waits.

``AsyncTransport`` awaits the network. ``BlockingTransport`` blocks instead and never suspends, so that a coroutine over
it runs to its end in one step, without an event loop. ``operation`` makes a method of a coroutine function: it blocks
on a ``Blocking`` object and is awaited on an ``Awaiting`` one; ``listing`` does the same for an asynchronous generator.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator, Iterator, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from functools import update_wrapper
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, TypeAlias, TypeVar, overload

import httpx

from tallystick_client.errors import NotTheLedgerError, UnreachableError

P = ParamSpec("P")
T = TypeVar("T")
Answer: TypeAlias = Coroutine[Any, Any, T]
"""The coroutine of an operation."""
Values: TypeAlias = AsyncGenerator[T, None]
"""The values of a ``listing``, one by one; a blocking object has a ``Generator`` of them."""

ANSWER_BYTES_MAX = 64 << 20
"""Largest answer that is read whole; the service's longest list is a quarter of that."""
_DIRECT = dict.fromkeys(("all://localhost", "all://127.0.0.1", "all://[::1]"))
"""Addresses that bypass a proxy of the environment, so that no proxy sees the token for this machine."""


class Call(NamedTuple):
    """A request."""

    method: str
    url: str
    headers: Mapping[str, str]
    content: bytes | None
    timeout: httpx.Timeout
    """Timeout of each step."""
    within_s: float | None = None
    """Longest time for the whole answer, however slowly it arrives; None: as long as the steps take."""
    files: Any = None
    """Files to send as multipart/form-data in place of ``content``, in httpx's form."""

    @property
    def node(self) -> str:
        """Its address, without user and password."""
        return re.sub(r"(//[^/?#]*).*", r"\1", shown(self.url), flags=re.DOTALL)


class Reply(NamedTuple):
    """A whole answer, as it was sent: nothing is decompressed."""

    status: int
    headers: httpx.Headers
    content: bytes
    node: str = ""
    """The address that answered, without user and password."""


class Transport(ABC):
    """Sends requests and waits. Failures on the way are an ``UnreachableError``."""

    _http: httpx.Client | httpx.AsyncClient

    async def exchange(self, call: Call) -> Reply:
        """Send a request; the whole answer."""
        with _failures(call):
            return await self._within(call.within_s, self._exchange(call))

    @asynccontextmanager
    async def open(self, call: Call, content_type: str) -> AsyncIterator[Reply | AsyncIterator[bytes]]:
        """Send a request whose answer comes in pieces: its bytes, or the whole ``Reply`` if its status is not 200 or
        its content type differs."""
        with _failures(call):
            response = await self._send(call)
        try:
            kind = response.headers.get("Content-Type", "")
            if response.status_code == 200 and kind.startswith(content_type):
                yield self._opened(call, response)
                return
            with _failures(call):
                reply = await self._within(call.within_s, self._read(call, response))
            yield reply
        finally:
            await self._close(response)

    async def _exchange(self, call: Call) -> Reply:
        response = await self._send(call)
        try:
            return await self._read(call, response)
        finally:
            await self._close(response)

    async def _opened(self, call: Call, response: httpx.Response) -> AsyncIterator[bytes]:
        with _failures(call):
            async for piece in self._pieces(response):
                yield piece

    async def _read(self, call: Call, response: httpx.Response) -> Reply:
        """The whole answer.

        Raises:
            NotTheLedgerError: it is longer than any answer of a ledger.
            TimeoutError: it does not end in time.
        """
        until = float("inf") if call.within_s is None else time.monotonic() + call.within_s
        content = bytearray()
        async for piece in self._pieces(response):
            content += piece
            if len(content) > ANSWER_BYTES_MAX:
                raise NotTheLedgerError(f"the answer of {call.node} does not end after {ANSWER_BYTES_MAX:,} bytes")
            if time.monotonic() > until:
                raise TimeoutError
        return Reply(response.status_code, response.headers, bytes(content), call.node)

    def _request(self, call: Call) -> httpx.Request:
        return self._http.build_request(
            call.method,
            call.url,
            content=call.content,
            files=call.files,
            headers=call.headers,
            timeout=call.timeout,
        )

    @abstractmethod
    async def pause(self, seconds: float) -> None:
        """Wait."""

    @abstractmethod
    async def work(self, do: Callable[..., T], *given: Any) -> T:
        """The result of ``do``, which may block briefly, as for an fsync."""

    @abstractmethod
    async def close(self) -> None:
        """Close all connections."""

    @abstractmethod
    async def _send(self, call: Call) -> httpx.Response: ...

    @abstractmethod
    def _pieces(self, response: httpx.Response) -> AsyncIterator[bytes]: ...

    @abstractmethod
    async def _close(self, response: httpx.Response) -> None: ...

    @abstractmethod
    async def _within(self, within_s: float | None, answer: Answer[Reply]) -> Reply:
        """The answer, or a TimeoutError."""


class BlockingTransport(Transport):
    """Blocks, and never suspends."""

    _http: httpx.Client

    def __init__(self, trusted: ssl.SSLContext) -> None:
        self._http = httpx.Client(verify=trusted, mounts=_DIRECT)

    async def pause(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 (no event loop waits for it)

    async def work(self, do: Callable[..., T], *given: Any) -> T:
        return do(*given)

    async def close(self) -> None:
        self._http.close()

    async def _send(self, call: Call) -> httpx.Response:
        return self._http.send(self._request(call), stream=True)

    async def _pieces(self, response: httpx.Response) -> AsyncIterator[bytes]:
        for piece in response.iter_raw():
            yield piece

    async def _close(self, response: httpx.Response) -> None:
        response.close()

    async def _within(self, within_s: float | None, answer: Answer[Reply]) -> Reply:
        """The answer, read in a separate thread, which is abandoned at the timeout. Nothing else bounds a name lookup,
        or headers that arrive slowly."""
        if within_s is None:
            return await answer
        done: Future[Reply] = Future()

        def read() -> None:
            try:
                done.set_result(_at_its_end(answer))
            except Exception as error:
                done.set_exception(error)

        try:
            threading.Thread(target=read, daemon=True).start()
        except RuntimeError:
            read()  # at the end of the interpreter there are no threads any more
        return done.result(within_s)


class AsyncTransport(Transport):
    """Awaits, in one event loop."""

    _http: httpx.AsyncClient

    def __init__(self, trusted: ssl.SSLContext) -> None:
        self._http = httpx.AsyncClient(verify=trusted, mounts=_DIRECT)

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def work(self, do: Callable[..., T], *given: Any) -> T:
        return await asyncio.to_thread(do, *given)

    async def close(self) -> None:
        await self._http.aclose()

    async def _send(self, call: Call) -> httpx.Response:
        return await self._http.send(self._request(call), stream=True)

    def _pieces(self, response: httpx.Response) -> AsyncIterator[bytes]:
        return response.aiter_raw()

    async def _close(self, response: httpx.Response) -> None:
        await response.aclose()

    async def _within(self, within_s: float | None, answer: Answer[Reply]) -> Reply:
        async with asyncio.timeout(within_s):
            return await answer


class Blocking:
    """An object whose operations block: its transport is a ``BlockingTransport``."""


class Awaiting:
    """An object whose operations are awaited: its transport is an ``AsyncTransport``."""


class operation(Generic[P, T]):  # noqa: N801 (a decorator)
    """A coroutine function as a method: it blocks on a ``Blocking`` object and is awaited on an ``Awaiting`` one."""

    def __init__(self, method: Callable[Concatenate[Any, P], Answer[T]]) -> None:
        self.method = method
        self.__doc__ = method.__doc__

    @overload
    def __get__(self, at: Blocking, owner: type) -> Callable[P, T]: ...
    @overload
    def __get__(self, at: Awaiting, owner: type) -> Callable[P, Answer[T]]: ...
    @overload
    def __get__(self, at: None, owner: type) -> Callable[..., Any]: ...
    def __get__(self, at: Any, owner: type) -> Any:
        return _method(self.method, at, owner, _at_its_end)


class listing(Generic[P, T]):  # noqa: N801 (a decorator)
    """An asynchronous generator as a method: its values come one by one, to ``for`` or ``async for``."""

    def __init__(self, method: Callable[Concatenate[Any, P], Values[T]]) -> None:
        self.method = method
        self.__doc__ = method.__doc__

    @overload
    def __get__(self, at: Blocking, owner: type) -> Callable[P, Generator[T, None, None]]: ...
    @overload
    def __get__(self, at: Awaiting, owner: type) -> Callable[P, Values[T]]: ...
    @overload
    def __get__(self, at: None, owner: type) -> Callable[..., Any]: ...
    def __get__(self, at: Any, owner: type) -> Any:
        return _method(self.method, at, owner, _one_by_one)


def _method(method: Callable[..., Any], at: Any, owner: type, block: Callable[[Any], Any]) -> Callable[..., Any]:
    """``method`` bound to ``at``, or, when that is None, the function of the class ``owner``, as ``help`` shows it."""
    bound: Callable[..., Any] = method if at is None else method.__get__(at)
    if not issubclass(owner, Blocking):
        return bound

    def run(*given: Any, **named: Any) -> Any:
        return block(bound(*given, **named))

    return update_wrapper(run, bound)


def _at_its_end(coroutine: Answer[T]) -> T:
    """The result of ``coroutine``, which never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("a coroutine over a blocking transport has suspended")


def _one_by_one(values: Values[T]) -> Generator[T, None, None]:
    """The values of an asynchronous generator that never suspends."""
    try:
        while True:
            yield _at_its_end(anext(values))
    except StopAsyncIteration:
        return
    finally:
        _at_its_end(values.aclose())


def shown(url: str) -> str:
    """``url`` without user and password."""
    return re.sub(r"//[^/?#]*@", "//", url)


@contextmanager
def _failures(call: Call) -> Iterator[None]:
    """Turn failures on the way into errors of this package."""
    try:
        yield
    except UnicodeEncodeError:
        raise  # what is asked for cannot be sent
    except (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL, UnicodeError) as error:
        # httpx parses the target of a redirect although it is not followed, and it may be no address.
        raise UnreachableError(f"no answer from {call.node}: {str(error) or type(error).__name__}") from error
    except TimeoutError as error:
        raise UnreachableError(f"no whole answer from {call.node} in {call.within_s or 0.0:g} s") from error
