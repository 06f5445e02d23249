"""What callers signed, checked before it is taken: in threads, since a check costs a tenth of a millisecond or more.

The event loop makes the bytes that must be signed, and collects checks until a turn ends and one of ``THREADS`` threads
is idle, which gets them all. It needs the interpreter's lock before and after them, not between two, and wakes the loop
once. A thread that needed it after each check would wait for it until the loop has nothing to do, so they would never
work at the same time.

A signed event is entered under a key of its own route, made of its ``id``, so it is in a chain once. If the request has
an Idempotency-Key, that is the id, and an earlier event is looked up; else the appender finds it.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Final, NamedTuple

from app.runtime.sharing import LINES_PER_TURN, FairTurns
from app.runtime.state.node import Node
from app.trust.caller_keys import CallerKeys
from app.write.pending.requests import Draft, EventLines, RequestKey
from ledger import merkle, signed_events
from ledger.errors import InvalidEventError, InvalidInputError, ProblemError
from ledger.facts import problems
from ledger.hlc import Hlc
from ledger.signed_events import MEMBER, CallerSignature
from signing.callers import refusal_of
from signing.keys import Caller, PublicKey, made_all

SIGNED_ROUTE: Final = 7
"""The route in the keys of signed events, whatever their request. The number is stored."""
STATEMENT_ROUTE: Final = 8
"""That of signed statements."""
MARGIN_MS: Final = 60_000
"""How long before the end of its times an event is refused, as it may get a later HLC than now."""
THREADS: Final = max(1, min(4, (os.cpu_count() or 1) - 1))
"""The loop takes a processor by itself."""

OnChecked = Callable[[bool], object]
"""Called on the loop with whether the key made the signature."""


class CheckingThreads:
    """Threads that check signatures for one event loop, started with the first."""

    def __init__(self) -> None:
        self._collected: list[tuple[PublicKey, bytes, bytes, OnChecked]] = []
        """The checks that no thread has yet."""
        self._idle = THREADS
        """Threads without checks."""
        self._waiting: queue.SimpleQueue[list[tuple[PublicKey, bytes, bytes, OnChecked]]] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None

    def check(self, key: PublicKey, signature: bytes, message: bytes, on_checked: OnChecked) -> None:
        """Check whether ``key`` made the signature over ``message``."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            for number in range(THREADS):
                threading.Thread(target=self._run, name=f"signatures-{number}", daemon=True).start()
        if not self._collected:
            self._loop.call_soon(self._hand_over)
        self._collected.append((key, signature, message, on_checked))

    def _hand_over(self) -> None:
        if self._collected and self._idle:
            collected, self._collected = self._collected, []
            self._idle -= 1
            self._waiting.put(collected)

    def _run(self) -> None:
        assert self._loop is not None
        while True:
            checks = self._waiting.get()
            results = made_all([check[:3] for check in checks])
            try:
                self._loop.call_soon_threadsafe(self._answer, [each for *_, each in checks], results)
            except RuntimeError:
                return  # The loop has ended, so no request waits for the answer.

    def _answer(self, waiting: list[OnChecked], results: list[bool]) -> None:
        self._idle += 1
        self._hand_over()
        for on_checked, made in zip(waiting, results, strict=True):
            on_checked(made)


class PreparedCheck(NamedTuple):
    """A signature that is to be checked, and the key under which the event is then entered."""

    caller: Caller
    signature: bytes
    message: bytes
    key: RequestKey

    def refuse_unless(self, made: bool) -> None:
        """Return if the caller ``made`` the signature.

        Raises:
            ProblemError: it did not.
        """
        if not made:
            caller = self.caller
            what = f"caller {caller.name} did not sign this with key {caller.key.key_id}"
            raise ProblemError(problems.SIGNATURE_INVALID, f"{MEMBER}: {what}")


@dataclass(kw_only=True, eq=False)
class CallerSignatures:
    """Checks the signatures of events, and that events which must have one do. Belongs to one event loop."""

    node: Node
    callers: CallerKeys
    threads: CheckingThreads = field(default_factory=CheckingThreads)

    async def check(self, draft: Draft, key: RequestKey | None) -> RequestKey:
        """The key under which a signed event is entered; ``key`` is that of its request.

        Raises:
            ProblemError: its caller did not sign it so, or may not.
            InvalidInputError: it cannot be signed in this form.
        """
        prepared = self.prepare(draft, key)
        await self._require(prepared)
        return prepared.key

    def prepare(self, draft: Draft, key: RequestKey | None) -> PreparedCheck:
        """What is to be checked of a signed event, once all else is.

        Raises:
            ProblemError, InvalidInputError: as ``check``.
        """
        signature = self._read(CallerSignature(**draft.fields[MEMBER]))  # type: ignore[arg-type]
        if draft.job_id is None or draft.fence_token is None or draft.subject is not None or draft.seal is not None:
            raise InvalidInputError(
                "signature: a signed event names its job_id and fence_token, and has no subject and no private fields",
                (MEMBER,),
            )
        if key is not None and key.key != signature.id:
            raise InvalidInputError("Idempotency-Key: that of a signed event is the id of its signature", (MEMBER,))
        payload = {"type": draft.event.name, "fence_token": draft.fence_token, **draft.fields}
        signed = signed_events.signed_payload(payload)
        message = signed_events.message(draft.tenant_id, draft.job_id, signature.said(), signed)
        # A caller that signs its request again, with other times, repeats it.
        same = signed_events.header(draft.tenant_id, draft.job_id, {"key_id": signature.key_id}) + signed
        entered = RequestKey(SIGNED_ROUTE, signature.id, sha256(same).digest())
        return PreparedCheck(self._caller(signature.key_id, (draft.tenant_id,)), signature.raw(), message, entered)

    async def check_lines(
        self, lines: EventLines, given: Any, key: RequestKey | None, body_digest: bytes, turns: FairTurns
    ) -> RequestKey:
        """As ``check``, for all lines of a request with this ``Tally-Signature``, whose body has this SHA-256; the
        lines get their signatures.

        Raises:
            InvalidEventError, ProblemError, InvalidInputError: as ``check``.
        """
        signature = self._read(signed_events.read(given))
        if key is not None and key.key != signature.id:
            raise InvalidInputError("Idempotency-Key: that of signed events is the id of Tally-Signature", (MEMBER,))
        said = signature.said()
        leaves: list[bytes] = []
        for first in range(0, len(lines), LINES_PER_TURN):
            await turns.next(lines.actor)
            here = range(first, min(first + LINES_PER_TURN, len(lines)))
            jobs = [_named(lines, number) for number in here]
            leaves += signed_events.leaf_hashes(said, jobs, list(map(lines.signed_payload, here)))
        tree = merkle.levels_of(leaves)
        message = signed_events.root_message(said, len(leaves), tree[-1][0])
        entered = RequestKey(SIGNED_ROUTE, signature.id, sha256(signature.key_id.encode() + body_digest).digest())
        caller = self._caller(signature.key_id, lines.tenants)
        await self._require(PreparedCheck(caller, signature.raw(), message, entered))
        await turns.next(lines.actor)
        lines.sign(signed_events.members_of_many(said, signature.sig, tree))
        return entered

    def refuse_unsigned(self, draft: Draft) -> None:
        """Return if the event need not be signed.

        Raises:
            ProblemError: it must.
        """
        if draft.event.name in (required := self.callers.required_of(draft.tenant_id)):
            raise _required(draft.tenant_id, draft.event.name, required)

    def refuse_unsigned_lines(self, lines: EventLines) -> None:
        """As ``refuse_unsigned``, for the lines of a request.

        Raises:
            ProblemError: names the first line that must be signed.
        """
        required = {tenant_id: found for tenant_id in lines.tenants if (found := self.callers.required_of(tenant_id))}
        for number, (tenant_id, _) in enumerate(lines.jobs if required else ()):
            if (name := lines.type_name(number)) in required.get(tenant_id, ()):
                raise _required(tenant_id, name, required[tenant_id], f"line {number + 1}: ")

    def _read(self, signature: CallerSignature) -> CallerSignature:
        if signature.is_of_many:
            raise InvalidInputError(f"{MEMBER} has a path, which the service makes", (MEMBER,))
        try:
            signature.refuse_time(self._now_ms(), MARGIN_MS)
        except InvalidInputError as error:
            raise ProblemError(problems.SIGNATURE_INVALID, str(error)) from None
        return signature

    def _now_ms(self) -> int:
        return max(self.node.wall.now_ms(), self.node.clock.last.physical_ms)

    def caller_of(self, key_id: str, tenant_ids: Iterable[str]) -> Caller:
        """The caller with this key, who may sign for these tenants.

        Raises:
            InvalidInputError: there is none, or the caller may not.
        """
        if (caller := self.callers.known.by_key.get(key_id)) is None:
            raise InvalidInputError(f"key {key_id} is of no caller of this ledger")
        for tenant_id in tenant_ids:
            # As of the latest HLC that the event may get.
            if refusal := refusal_of(caller, tenant_id, Hlc(self._now_ms() + MARGIN_MS, 0, self.node.node_id)):
                raise InvalidInputError(refusal)
        return caller

    def _caller(self, key_id: str, tenant_ids: Iterable[str]) -> Caller:
        try:
            return self.caller_of(key_id, tenant_ids)
        except InvalidInputError as error:
            raise ProblemError(problems.SIGNATURE_INVALID, f"{MEMBER}: {error}") from None

    async def made(self, key: PublicKey, signature: bytes, message: bytes) -> bool:
        """Whether ``key`` made the signature over ``message``."""
        checked: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.threads.check(key, signature, message, lambda made: None if checked.done() else checked.set_result(made))
        return await checked

    async def _require(self, prepared: PreparedCheck) -> None:
        prepared.refuse_unless(await self.made(prepared.caller.key, prepared.signature, prepared.message))

    def begin(self, prepared: PreparedCheck, on_checked: OnChecked) -> None:
        """Check the signature in a thread; ``on_checked`` is called with the result, for ``refuse_unless``."""
        self.threads.check(prepared.caller.key, prepared.signature, prepared.message, on_checked)


def _named(lines: EventLines, number: int) -> tuple[str, str]:
    """Tenant and job of a line that can be signed.

    Raises:
        InvalidEventError: it cannot.
    """
    tenant_id, job_id = lines.jobs[number]
    draft = lines.drafts.get(number)
    is_private = draft is not None and (draft.subject is not None or draft.seal is not None)
    if job_id is None or lines.fences[number] is None or is_private:
        raise InvalidEventError(
            f"line {number + 1}: a signed event names its job_id and fence_token, and has no subject and no private "
            "fields",
            number + 1,
        )
    return tenant_id, job_id


def _required(tenant_id: str, type_name: str, required: Mapping[str, Hlc | None], place: str = "") -> ProblemError:
    why = f"{place}callers of tenant {tenant_id} sign {type_name}, and this is not signed"
    ends = "" if (hlc := required[type_name]) is None else f"; from HLC {hlc} on it need not be"
    return ProblemError(problems.SIGNATURE_REQUIRED, why + ends)
