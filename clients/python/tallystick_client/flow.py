"""One code for blocking and asynchronous callers: a flow yields what it wants done, and two drivers do it.

A flow is a generator that knows neither sockets nor event loops. It yields ``Call``, ``Open``, ``Piece``, ``Pause`` and
``Work``, is sent what each came to (or has its exception thrown in), and returns the result. One that gives several
values yields each as a ``Give``. ``operation`` makes a method of a flow that blocks in a ``Blocking`` object and is
awaited in an ``Awaiting`` one; ``listing`` makes an iterator of it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator, Mapping
from contextlib import closing
from functools import update_wrapper
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, TypeAlias, TypeVar, overload

import httpx

from tallystick_client.errors import UnreachableError

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Call(NamedTuple):
    """A request; what comes of it is a ``Reply``."""

    method: str
    url: str
    headers: Mapping[str, str]
    content: bytes | None
    timeout: httpx.Timeout


class Reply(NamedTuple):
    """A whole answer."""

    status: int
    headers: httpx.Headers
    content: bytes


class Open(NamedTuple):
    """A request whose answer, if its status is 200, comes in pieces; what comes of it is a ``Reply``.

    A flow has one open answer at most, which the next ``Open`` closes, as does the end of the flow.
    """

    call: Call


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

    def open(self, response: httpx.Response, pieces: Any, content: bytes) -> None:
        """There is an open answer."""
        self.response, self.pieces = response, pieces
        self.came = Reply(response.status_code, response.headers, content)

    def close(self) -> None:
        """Nobody goes on with it."""
        self._flow.close()


class Blocking:
    """What drives flows by blocking."""

    _http: httpx.Client

    def _drive(self, flow: Flow[T]) -> T:
        with closing(_Run(flow)) as run:
            for effect in run:
                self._do(effect, run)
            result: T = run.result
            return result

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
                    run.came = _reply(self._http.send(_request(self._http, effect)))
                case Open(call):
                    self._shut(run)
                    response = self._http.send(_request(self._http, call), stream=True)
                    run.open(response, response.iter_bytes(), b"" if _is_stream(response) else response.read())
                case Piece():
                    run.came = next(run.pieces, b"")
                case Pause(seconds):
                    time.sleep(seconds)
                case Work(do):
                    run.came = do()
        except Exception as error:
            run.failed = _told(error)

    def _shut(self, run: _Run[Any]) -> None:
        if run.response is not None:
            run.response.close()


class Awaiting:
    """What drives flows by awaiting."""

    _http: httpx.AsyncClient

    async def _drive(self, flow: Flow[T]) -> T:
        with closing(_Run(flow)) as run:
            for effect in run:
                await self._do(effect, run)
            result: T = run.result
            return result

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
                    run.came = _reply(await self._http.send(_request(self._http, effect)))
                case Open(call):
                    await self._shut(run)
                    response = await self._http.send(_request(self._http, call), stream=True)
                    run.open(response, response.aiter_bytes(), b"" if _is_stream(response) else await response.aread())
                case Piece():
                    run.came = await anext(run.pieces, b"")
                case Pause(seconds):
                    await asyncio.sleep(seconds)
                case Work(do):
                    run.came = await asyncio.to_thread(do)
        except Exception as error:
            run.failed = _told(error)

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


def _request(http: httpx.Client | httpx.AsyncClient, call: Call) -> httpx.Request:
    return http.build_request(call.method, call.url, headers=call.headers, content=call.content, timeout=call.timeout)


def _is_stream(response: httpx.Response) -> bool:
    return response.status_code == 200


def _reply(response: httpx.Response) -> Reply:
    return Reply(response.status_code, response.headers, response.content)


def _told(error: Exception) -> Exception:
    """``error``, or in our words what went wrong on the way."""
    if isinstance(error, UnicodeEncodeError):
        return error  # what is asked for cannot be sent
    # Where an answer leads to is read though nobody goes there, and may be no address.
    if isinstance(error, httpx.HTTPError | httpx.StreamError | httpx.InvalidURL | UnicodeError):
        told = UnreachableError(f"no answer: {str(error) or type(error).__name__}")
        told.__cause__ = error
        return told
    return error
