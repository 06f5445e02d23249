"""One code for blocking and asynchronous callers: a flow yields what it wants done, and two drivers do it.

A flow is a generator that knows neither sockets nor event loops. It yields ``Call``, ``Open``, ``Piece``, ``Pause`` and
``Work``, is sent what each came to (or has its exception thrown in), and returns the result. One that gives several
values yields each as a ``Give``. ``operation`` makes a method of a flow that blocks in a ``Blocking`` object and is
awaited in an ``Awaiting`` one; ``listing`` makes an iterator of it.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator, Mapping
from concurrent.futures import Future
from contextlib import closing
from functools import partial, update_wrapper
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, TypeAlias, TypeVar, overload

import httpx

from tallystick_client.errors import NotTheLedgerError, UnreachableError

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

ANSWER_BYTES_MAX = 64 << 20
"""Largest answer that is read whole; the longest list of the service has a quarter of that."""


class Call(NamedTuple):
    """A request; what comes of it is a ``Reply``."""

    method: str
    url: str
    headers: Mapping[str, str]
    content: bytes | None
    timeout: httpx.Timeout
    """Of each step of it."""
    within_s: float | None = None
    """Longest time until the whole answer is there, however slowly it drips; None: as long as the steps take."""
    files: Any = None
    """In place of ``content``: files to be sent as multipart/form-data, as httpx takes them."""

    @property
    def node(self) -> str:
        """The address that it goes to, without user and password."""
        return re.sub(r"(//[^/?#]*).*", r"\1", shown(self.url), flags=re.DOTALL)


class Reply(NamedTuple):
    """A whole answer, as it was sent: nothing is decompressed."""

    status: int
    headers: httpx.Headers
    content: bytes
    node: str = ""
    """The address that answered, without user and password."""


class Open(NamedTuple):
    """A request whose answer comes in pieces; what comes of it is a ``Reply``.

    The ``Reply`` is whole, and nothing is open, where the answer has another status than 200 or is of another kind. A
    flow has one open answer at most, which the next ``Open`` closes, as does the end of the flow.
    """

    call: Call
    content_type: str


class Piece(NamedTuple):
    """The next bytes of the open answer, none at its end."""


class Pause(NamedTuple):
    """Nothing, for so long."""

    seconds: float


class Work(NamedTuple):
    """A function that may block for a moment, such as an fsync."""

    do: Callable[[], Any]


class Give(NamedTuple, Generic[T_co]):
    """One of the values of a listing."""

    value: T_co


Effect: TypeAlias = Call | Open | Piece | Pause | Work
Flow: TypeAlias = Generator[Effect, Any, T]
Listing: TypeAlias = Generator[Effect | Give[T], Any, None]


class _Run(Generic[T]):
    """A flow under way: its effects, one by one; what the last one came to goes into ``came`` or ``failed``."""

    def __init__(self, flow: Generator[Any, Any, T]) -> None:
        self._flow = flow
        self.came: Any = None
        self.failed: Exception | None = None
        self.call: Call | None = None
        """The last request."""
        self.response: httpx.Response | None = None
        """The open answer."""
        self.pieces: Any = None
        self.result: Any = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        came, failed, self.came, self.failed = self.came, self.failed, None, None
        try:
            return self._flow.send(came) if failed is None else self._flow.throw(failed)
        except StopIteration as end:
            self.result = end.value
            raise

    def open(self, call: Call, response: httpx.Response, pieces: Any) -> None:
        """There is an open answer."""
        self.response, self.pieces = response, pieces
        self.came = Reply(response.status_code, response.headers, b"", call.node)

    def close(self) -> None:
        """Nobody goes on with it."""
        self._flow.close()


class Blocking:
    """What drives flows by blocking."""

    _http: httpx.Client

    def _drive(self, flow: Flow[T]) -> T:
        with closing(_Run(flow)) as run:
            try:
                for effect in run:
                    self._do(effect, run)
                result: T = run.result
                return result
            finally:
                self._shut(run)

    def _iterate(self, flow: Listing[T]) -> Generator[T, None, None]:
        with closing(_Run(flow)) as run:
            try:
                for effect in run:
                    if isinstance(effect, Give):
                        yield effect.value
                    else:
                        self._do(effect, run)
            finally:
                self._shut(run)

    def _do(self, effect: Effect, run: _Run[Any]) -> None:
        try:
            match effect:
                case Call():
                    run.call = effect
                    run.came = _within(effect.within_s, partial(self._exchange, effect))
                case Open(call, content_type):
                    self._shut(run)
                    run.call = call
                    response = self._http.send(_request(self._http, call), stream=True)
                    if _is_stream(response, content_type):
                        run.open(call, response, response.iter_raw())
                    else:
                        run.came = _read(call, response, _until(call.within_s))
                case Piece():
                    run.came = next(run.pieces, b"")
                case Pause(seconds):
                    time.sleep(seconds)
                case Work(do):
                    run.came = do()
        except Exception as error:
            run.failed = _told(error, run.call)

    def _exchange(self, call: Call, until: float) -> Reply:
        return _read(call, self._http.send(_request(self._http, call), stream=True), until)

    def _shut(self, run: _Run[Any]) -> None:
        if run.response is not None:
            run.response.close()


class Awaiting:
    """What drives flows by awaiting."""

    _http: httpx.AsyncClient

    async def _drive(self, flow: Flow[T]) -> T:
        with closing(_Run(flow)) as run:
            try:
                for effect in run:
                    await self._do(effect, run)
                result: T = run.result
                return result
            finally:
                await self._shut(run)

    async def _iterate(self, flow: Listing[T]) -> AsyncGenerator[T, None]:
        with closing(_Run(flow)) as run:
            try:
                for effect in run:
                    if isinstance(effect, Give):
                        yield effect.value
                    else:
                        await self._do(effect, run)
            finally:
                await self._shut(run)

    async def _do(self, effect: Effect, run: _Run[Any]) -> None:
        try:
            match effect:
                case Call():
                    run.call = effect
                    async with asyncio.timeout(effect.within_s):
                        run.came = await self._whole(effect, await self._send(effect))
                case Open(call, content_type):
                    await self._shut(run)
                    run.call = call
                    response = await self._send(call)
                    if _is_stream(response, content_type):
                        run.open(call, response, response.aiter_raw())
                    else:
                        async with asyncio.timeout(call.within_s):
                            run.came = await self._whole(call, response)
                case Piece():
                    run.came = await anext(run.pieces, b"")
                case Pause(seconds):
                    await asyncio.sleep(seconds)
                case Work(do):
                    run.came = await asyncio.to_thread(do)
        except Exception as error:
            run.failed = _told(error, run.call)

    async def _send(self, call: Call) -> httpx.Response:
        return await self._http.send(_request(self._http, call), stream=True)

    async def _whole(self, call: Call, response: httpx.Response) -> Reply:
        try:
            whole = _Whole(call)
            async for piece in response.aiter_raw():
                whole.take(piece)
            return whole.reply(response)
        finally:
            await response.aclose()

    async def _shut(self, run: _Run[Any]) -> None:
        if run.response is not None:
            await run.response.aclose()


class operation(Generic[P, T]):  # noqa: N801 (a decorator)
    """A method that is a flow: it blocks, or is awaited, as the object does that has it."""

    def __init__(self, flow: Callable[Concatenate[Any, P], Flow[T]]) -> None:
        self.flow = flow
        self.__doc__ = flow.__doc__

    @overload
    def __get__(self, at: Blocking, owner: type) -> Callable[P, T]: ...
    @overload
    def __get__(self, at: Awaiting, owner: type) -> Callable[P, Awaitable[T]]: ...
    @overload
    def __get__(self, at: None, owner: type) -> operation[P, T]: ...
    def __get__(self, at: Any, owner: type) -> Any:
        return self if at is None else _bound(self.flow, at, at._drive)


class listing(Generic[P, T]):  # noqa: N801 (a decorator)
    """A method that gives several values, one by one, to ``for`` or ``async for``."""

    def __init__(self, flow: Callable[Concatenate[Any, P], Listing[T]]) -> None:
        self.flow = flow
        self.__doc__ = flow.__doc__

    @overload
    def __get__(self, at: Blocking, owner: type) -> Callable[P, Generator[T, None, None]]: ...
    @overload
    def __get__(self, at: Awaiting, owner: type) -> Callable[P, AsyncGenerator[T, None]]: ...
    @overload
    def __get__(self, at: None, owner: type) -> listing[P, T]: ...
    def __get__(self, at: Any, owner: type) -> Any:
        return self if at is None else _bound(self.flow, at, at._iterate)


def _bound(flow: Callable[..., Any], at: Any, drive: Callable[[Any], Any]) -> Callable[..., Any]:
    def run(*given: Any, **named: Any) -> Any:
        return drive(flow(at, *given, **named))

    return update_wrapper(run, flow.__get__(at))


class _Whole:
    """An answer that is read to its end, if that comes within ``ANSWER_BYTES_MAX``."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._pieces: list[bytes] = []
        self._size = 0

    def take(self, piece: bytes) -> None:
        self._size += len(piece)
        if self._size > ANSWER_BYTES_MAX:
            raise NotTheLedgerError(f"the answer of {self._call.node} does not end after {ANSWER_BYTES_MAX:,} bytes")
        self._pieces.append(piece)

    def reply(self, response: httpx.Response) -> Reply:
        return Reply(response.status_code, response.headers, b"".join(self._pieces), self._call.node)


def shown(url: str) -> str:
    """``url`` without user and password."""
    return re.sub(r"//[^/?#]*@", "//", url)


def _request(http: httpx.Client | httpx.AsyncClient, call: Call) -> httpx.Request:
    how: dict[str, Any] = {"headers": call.headers, "timeout": call.timeout}
    return http.build_request(call.method, call.url, content=call.content, files=call.files, **how)


def _is_stream(response: httpx.Response, content_type: str) -> bool:
    return response.status_code == 200 and response.headers.get("Content-Type", "").startswith(content_type)


def _read(call: Call, response: httpx.Response, until: float) -> Reply:
    """The whole answer.

    Raises:
        NotTheLedgerError: it is longer than any answer of a ledger.
        TimeoutError: it does not end until ``until``, by ``time.monotonic``.
    """
    with closing(response):
        whole = _Whole(call)
        for piece in response.iter_raw():
            whole.take(piece)
            if time.monotonic() > until:
                raise TimeoutError
        return whole.reply(response)


def _until(within_s: float | None) -> float:
    return float("inf") if within_s is None else time.monotonic() + within_s


def _within(within_s: float | None, work: Callable[[float], Reply]) -> Reply:
    """What ``work`` returns, which is called with the end of its time, by ``time.monotonic``.

    It runs in a thread of its own, which is left behind when the time is over: a name that is looked up, or a head
    that drips, is waited for in no other way that ends. At the end of the interpreter there are no threads any more.

    Raises:
        TimeoutError: it did not return in time.
    """
    if within_s is None:
        return work(float("inf"))
    until = _until(within_s)
    done: Future[Reply] = Future()

    def run() -> None:
        try:
            done.set_result(work(until))
        except Exception as error:
            done.set_exception(error)

    try:
        threading.Thread(target=run, daemon=True).start()
    except RuntimeError:
        run()
    return done.result(within_s)


def _told(error: Exception, call: Call | None) -> Exception:
    """``error``, or in our words what went wrong on the way."""
    if isinstance(error, UnicodeEncodeError) or call is None:
        return error  # what is asked for cannot be sent
    # Where an answer leads to is read though nobody goes there, and may be no address.
    if isinstance(error, httpx.HTTPError | httpx.StreamError | httpx.InvalidURL | UnicodeError):
        told = UnreachableError(f"no answer from {call.node}: {str(error) or type(error).__name__}")
    elif isinstance(error, TimeoutError):
        told = UnreachableError(f"no whole answer from {call.node} in {call.within_s or 0.0:g} s")
    else:
        return error
    told.__cause__ = error
    return told
