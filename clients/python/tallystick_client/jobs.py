"""A job from its scheduler's side: started, reported on, and ended with its result."""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import inspect
import platform
import re
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import wraps
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar, cast

from tallystick_client.answers import Recorded
from tallystick_client.core import Core, current_span, json_of, new_key, value_of
from tallystick_client.errors import JobEndedError, TallystickError
from tallystick_client.facts import ENDED
from tallystick_client.outbox import Outbox
from tallystick_client.spool import KEY, Part, Request
from tallystick_client.transport import Awaiting, Blocking, Reply, operation

P = ParamSpec("P")
T = TypeVar("T")
Spec = Mapping[str, Any] | Callable[..., Mapping[str, Any]] | None
"""The spec of a job, or a function that makes it from the arguments of a decorated function."""
JobId = str | Callable[..., str] | None

ERROR_CHARACTERS_MAX = 4000
_JOB_ID = re.compile(r"(?!\.\.?$)[A-Za-z0-9._:-]{1,128}")


def new_job_id() -> str:
    """A new id of a job."""
    return f"run-{time.time_ns() // 1_000_000:013d}-{secrets.token_hex(8)}"


def job_id_of(name: str) -> str:
    """The id of the job that a scheduler calls ``name``: the name itself, or one made of it if it is no id."""
    readable = re.sub(r"[^A-Za-z0-9._:-]", "_", name)
    if readable == name and _JOB_ID.fullmatch(name):
        return name
    return f"{readable[:110]}.{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"


def job_path(job_id: str, more: str = "") -> str:
    """The path of a job. An id that would lead elsewhere is a ``ValueError``."""
    if not _JOB_ID.fullmatch(job_id):
        raise ValueError(f"{job_id!r} is no job id: 1 to 128 of A-Z a-z 0-9 . _ : -, and not . or ..")
    return f"/v1/jobs/{job_id}{more}"


class JobMethods:
    """One job. ``job_id`` is chosen before anything is sent.

    The Idempotency-Keys of a start are derived from the job id: a caller that starts a job of this id and spec again,
    such as a scheduler after a crash, adds nothing. An end has its own key.

    A recording method returns the ledger's answer, None if the spool keeps the event (``is_spooled``) or another sender
    has sent it from there.
    """

    def __init__(
        self,
        ledger: tuple[Core, Outbox],
        common: Mapping[str, Any],
        spec: Spec,
        job_id: JobId,
        dc_id: str | None,
    ) -> None:
        """``common`` are the members of all its events."""
        self._ledger = ledger
        self._given = (common, spec, job_id, dc_id)
        self.job_id = job_id if isinstance(job_id, str) else new_job_id()
        self._path = job_path(self.job_id)
        self.tenant_id: str = common["tenant_id"]
        self.is_spooled = False
        """Whether the last event waits in the spool."""
        self.dc_id = dc_id or platform.node() or "localhost"
        self._is_named = job_id is not None
        self._spec = {} if spec is None or callable(spec) or callable(job_id) else spec
        self._common = common
        self._began: tuple[datetime, float] | None = None
        """When the job was started, if by this object: wall clock, and monotonic seconds."""
        self._is_over = False
        """Whether ``complete`` or ``fail`` was called."""

    @operation
    async def create(self) -> Recorded | None:
        """Record that the job exists: JobCreated.

        Raises:
            JobEndedError: a job of this id has ended, as far as the ledger or the spool knows: do not run it again.
            ProblemError: the ledger refuses the job.
        """
        return await self._begin([self._created()])

    @operation
    async def accept(self, worker_count: int = 1) -> Recorded | None:
        """Record that the job begins here: JobAccepted. Raises as ``create``."""
        return await self._begin([self._accepted(worker_count)])

    @operation
    async def begin(self) -> Recorded | None:
        """``create`` and ``accept`` in one."""
        return await self._begin([self._created(), self._accepted(1)])

    @operation
    async def event(self, /, type: str, **fields: Any) -> Recorded | None:
        """Record an event between beginning and end, such as WorkflowDispatched (docs/events.md)."""
        return _last_of(await self._record("event", [self._event({"type": type, **fields}, new_key())]))

    @operation
    async def progress(self, completed: int, failed: int = 0) -> Recorded | None:
        """Record how far the job is: totals, not differences."""
        body = {"type": "JobProgressReported", "dc_id": self.dc_id, "completed": completed, "failed": failed}
        return _last_of(await self._record("event", [self._event(body, new_key())]))

    @operation
    async def complete(
        self, final_status: str = "completed", metrics: Mapping[str, Any] | None = None
    ) -> Recorded | None:
        """Record a good end: JobCompleted."""
        return await self._end(self._completion(final_status, metrics))

    @operation
    async def fail(self, error: BaseException | str) -> Recorded | None:
        """Record a bad end: JobFailed, with the type and text of an exception."""
        return await self._end(self._failure(error))

    def _of(self, given: tuple[Any, ...], named: dict[str, Any]) -> Self:
        """A job of its own for one call of a decorated function."""
        common, spec, job_id, dc_id = self._given
        spec = spec(*given, **named) if callable(spec) else spec
        job_id = job_id(*given, **named) if callable(job_id) else job_id
        return type(self)(self._ledger, common, spec, job_id, dc_id)

    @operation
    async def _leave(self, error: BaseException | None) -> None:
        """Record the end of a block that ended with ``error``, unless ``complete`` or ``fail`` was called in it."""
        if self._is_over:
            return
        if error is None or (isinstance(error, SystemExit) and not error.code):
            await self._end(self._completion("completed", None))
            return
        try:
            await self._end(self._failure(error))
        except TallystickError as unrecorded:
            error.add_note(f"the end of job {self.job_id} is not on record: {unrecorded}")

    async def _begin(self, requests: list[Request]) -> Recorded | None:
        core, outbox = self._ledger
        if self._is_named and await outbox.knows_end(self.tenant_id, self.job_id):
            raise self._ended("its end waits in the spool")
        replies = await self._record("begin", requests)
        is_repeated = replies is not None and (not replies or replies[0].headers.get("Idempotent-Replay") == "true")
        if self._is_named and is_repeated:
            # It was started before, by a process that may have ended it too.
            status = value_of(await core.ask("GET", self._path, params={"tenant_id": self.tenant_id}))["status"]
            if status in ENDED:
                raise self._ended(f"it is {status}")
        return _last_of(replies)

    async def _end(self, event: dict[str, Any]) -> Recorded | None:
        self._is_over = True
        return _last_of(await self._record("end", [self._event(event, new_key())]))

    async def _record(self, part: Part, requests: list[Request]) -> list[Reply] | None:
        replies = await self._ledger[1].record(self.tenant_id, self.job_id, part, requests)
        self.is_spooled = replies is None
        return replies

    # --- events -----------------------------------------------------------------------------------

    def _created(self) -> Request:
        body: dict[str, Any] = {**self._common, "job_id": self.job_id, "spec": self._spec}
        if (assigned := self._given[3]) is not None:
            # The default place is this host, and a job that is started again on another host is the same job.
            body["assigned_dcs"] = [assigned]
        return self._request("/v1/jobs", f"py-{self.job_id}-created", body)

    def _accepted(self, worker_count: int) -> Request:
        self._began = datetime.now(UTC), time.monotonic()
        body = {"type": "JobAccepted", "dc_id": self.dc_id, "worker_count": worker_count}
        is_fit = KEY.fullmatch(f"py-{self.job_id}-accepted-{self.dc_id}")
        place = self.dc_id if is_fit else hashlib.sha256(self.dc_id.encode()).hexdigest()
        return self._event(body, f"py-{self.job_id}-accepted-{place}")

    def _event(self, event: dict[str, Any], key: str) -> Request:
        return self._request(f"{self._path}/events", key, {**self._common, **event})

    def _request(self, path: str, key: str, body: dict[str, Any]) -> Request:
        signing = self._ledger[0].signing
        request = Request(path=path, key=key, body=json_of(body if signing is None else signing.body(path, body, key)))
        return request if (span := current_span()) is None else {**request, "traceparent": span}

    def _completion(self, final_status: str, metrics: Mapping[str, Any] | None) -> dict[str, Any]:
        said: dict[str, Any] = {}
        if self._began is not None:
            began_at, began_s = self._began
            said["began_at"] = began_at.isoformat(timespec="milliseconds")
            said["duration_s"] = round(time.monotonic() - began_s, 3)
        return {"type": "JobCompleted", "final_status": final_status, "aggregate_metrics": said | dict(metrics or {})}

    def _failure(self, error: BaseException | str) -> dict[str, Any]:
        said = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        # The ledger keeps neither U+0000 nor half a surrogate pair.
        kept = said[:ERROR_CHARACTERS_MAX].replace("\0", "\ufffd").encode(errors="replace").decode()
        return {"type": "JobFailed", "error": kept, "failed_dc": self.dc_id}

    def _ended(self, how: str) -> JobEndedError:
        return JobEndedError(409, "job-ended", f"job {self.job_id} has ended: {how}", {"job_id": self.job_id})


class Job(JobMethods, Blocking):
    """A job for ``with``, or around a function as a decorator: begun, then completed, or failed with the exception."""

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        self._leave(error)

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        """``function``, each call of which is a job.

        Raises:
            TypeError: a call of it ends before its work does. If only the returned value shows that, the job fails.
        """
        if _is_kind(inspect.iscoroutinefunction, function):
            raise TypeError(f"{_named(function)} is a coroutine function: decorate it by an AsyncClient")
        _refuse_deferred(function)

        @wraps(function)
        def run(*given: P.args, **named: P.kwargs) -> T:
            with self._of(given, named):
                return _ended(function(*given, **named))

        return run


class AsyncJob(JobMethods, Awaiting):
    """As ``Job``, for ``async with`` and coroutine functions."""

    async def __aenter__(self) -> Self:
        await self.begin()
        return self

    async def __aexit__(
        self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None
    ) -> None:
        await self._leave(error)

    def __call__(self, function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
        """As ``Job``, for a coroutine function; any other is a TypeError."""
        _refuse_deferred(function)
        if not _is_kind(inspect.iscoroutinefunction, function):
            raise TypeError(f"{_named(function)} is no coroutine function: make it async, or decorate it by a Client")

        @wraps(function)
        async def run(*given: P.args, **named: P.kwargs) -> T:
            async with self._of(given, named):
                return _ended(await function(*given, **named))

        return run


def _last_of(replies: list[Reply] | None) -> Recorded | None:
    return cast(Recorded, value_of(replies[-1])) if replies else None


def unended(value: object) -> str | None:
    """The kind of unfinished work that ``value`` is, such as a coroutine; None if it is none."""
    if inspect.iscoroutine(value):
        return "a coroutine"
    if inspect.isgenerator(value) or inspect.isasyncgen(value):
        return "a generator"
    if isinstance(value, asyncio.Future | concurrent.futures.Future):
        return None if value.done() else "a future"
    return "an awaitable" if inspect.isawaitable(value) else None


def _ended(value: T) -> T:
    """``value``, unless it is unfinished work: then its job fails."""
    kind = unended(value)
    if kind is None:
        return value
    if inspect.iscoroutine(value):
        value.close()
    raise TypeError(f"the function returned {kind}, whose work has not ended: run it to its end in the function")


def _refuse_deferred(function: Callable[..., Any]) -> None:
    """Reject a function whose call ends before its work, as it would be recorded as completed."""
    if inspect.isclass(function) or isinstance(function, staticmethod | classmethod):
        raise TypeError(f"{_named(function)} is no function: decorate the function itself, below other decorators")
    if _is_kind(inspect.isgeneratorfunction, function) or _is_kind(inspect.isasyncgenfunction, function):
        raise TypeError(f"{_named(function)} is a generator function: a call of it runs nothing; decorate who iterates")
    code = getattr(function, "__code__", None)
    if code is not None and code.co_filename == contextmanager.__code__.co_filename:
        raise TypeError(f"{_named(function)} makes a context manager: a call of it runs nothing; use the job in a with")


def _is_kind(asked: Callable[[Any], bool], function: Any) -> bool:
    """Whether a function, or the ``__call__`` of an object, is of a kind."""
    return asked(function) or asked(getattr(function, "__call__", None))  # noqa: B004 (of which kind, not whether)


def _named(function: Any) -> str:
    return getattr(function, "__qualname__", None) or repr(function)
