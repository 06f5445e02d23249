"""Quotas of callers and tenants: rates, and numbers of concurrent operations.

A rate is a token bucket. It holds ``burst`` tokens, starts full, and refills at the rate. In any time t at most burst +
rate * t is taken; the arithmetic is exact, in integers. Each bucket is one number, the time at which it is full again.
A full bucket is forgotten.

    0 <= buckets of a rate <= KEYS_MAX + 1        further callers share one

Everything here belongs to one event loop, and reads a clock that only goes forward.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from app.runtime.settings.config import QUOTAS
from ledger.errors import QuotaExceededError, RequestTooLargeError

Key = str | None
"""A principal or a tenant; None is every caller, if callers are not authenticated."""

KEYS_MAX: Final = 65_536
RETRY_AT_ONCE_S: Final = 1
"""Seconds to wait before a retry, as the end of the work under way is not known."""
_OTHERS: Final = ""
"""The key shared by all that get no bucket of their own; no principal or tenant has this name."""
_SECOND_NS: Final = 1_000_000_000
_HOUR_S: Final = 3600
_UNITS: Final = {1: "a second", _HOUR_S: "an hour"}

OnRefused = Callable[[str], object]
"""Called with the name of a quota at each refusal."""


class Rate:
    """Token buckets of one size, by key. ``count`` tokens come in ``per_s`` seconds; a bucket holds ``burst``."""

    __slots__ = ("_clock_ns", "_count", "_full_at", "_name", "_on_refused", "_per_s", "_sweep_at", "_token", "burst")

    def __init__(
        self,
        name: str,
        count: int,
        burst: int,
        *,
        per_s: int = 1,
        on_refused: OnRefused = lambda _name: None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        assert name in QUOTAS
        assert count > 0
        assert burst > 0
        self._name = name
        self._count = count
        self.burst = burst
        """Most tokens that may be taken at once."""
        self._per_s = per_s
        self._on_refused = on_refused
        self._clock_ns = clock_ns
        # Time and tokens have one unit: so many of it go by in a nanosecond, and make a token.
        self._token = per_s * _SECOND_NS
        self._full_at: dict[Key, int] = {}
        self._sweep_at = 0

    def __len__(self) -> int:
        """Number of buckets kept."""
        return len(self._full_at)

    def take(self, key: Key, amount: int) -> None:
        """Take ``amount`` from the bucket of ``key``.

        Raises:
            QuotaExceededError: the bucket does not hold as much now; nothing was taken. RequestTooLargeError: it never
            does.
        """
        self.check(key, amount)
        self.owe(key, amount)

    def check(self, key: Key, amount: int, more_max: int = 0) -> None:
        """Return if ``take`` of ``amount`` would return. The request may later ask for up to ``more_max`` more.

        Raises:
            as ``take``; the time to wait is for the whole request.
        """
        if self._owed(key) + amount * self._token > self.burst * self._token:
            self._refuse(key, amount, min(amount + more_max, max(amount, self.burst)))

    def owe(self, key: Key, amount: int) -> float:
        """Take ``amount`` even if the bucket lacks it; returns the seconds until it would have held it, 0 if it did."""
        now = self._clock_ns() * self._count
        key = self._key_of(key)
        full_at = max(self._full_at.get(key, 0), now) + amount * self._token
        self._full_at[key] = full_at
        return max(0, full_at - now - self.burst * self._token) / (self._count * _SECOND_NS)

    def _owed(self, key: Key) -> int:
        """How far the bucket of ``key`` is from full, in units of ``_token``."""
        return max(self._full_at.get(self._key_of(key), 0) - self._clock_ns() * self._count, 0)

    def _key_of(self, key: Key) -> Key:
        """The bucket that ``key`` has: its own as long as there are some left."""
        if key in self._full_at:
            return key
        now = self._clock_ns() * self._count
        if now >= self._sweep_at:
            self._full_at = {each: full_at for each, full_at in self._full_at.items() if full_at > now}
            self._sweep_at = now + self.burst * self._token
        return key if len(self._full_at) < KEYS_MAX else _OTHERS

    def _refuse(self, key: Key, amount: int, whole: int) -> None:
        self._on_refused(self._name)
        unit = _UNITS[self._per_s]
        if amount > self.burst:
            raise RequestTooLargeError(
                f"the request asks for {amount} of quota.{self._name}, which is {self._count} {unit} and never more "
                f"than {self.burst} at once: send less"
            )
        missing = self._owed(key) + (whole - self.burst) * self._token
        wait_s = max(1, -(-missing // (self._count * _SECOND_NS)))
        raise QuotaExceededError(
            f"quota.{self._name} of {self._count} {unit} is used up; there is enough of it again in {wait_s} s", wait_s
        )


class AtOnce:
    """Bounds the concurrent operations of each principal."""

    def __init__(self, name: str, count: int, on_refused: OnRefused = lambda _name: None) -> None:
        assert name in QUOTAS
        self._name = name
        self._count = count
        self._on_refused = on_refused
        self._under_way: Counter[str] = Counter()

    @contextmanager
    def one(self, key: Key) -> Iterator[None]:
        """Count one more operation until the context ends. Without authentication only the node's own bounds apply.

        Raises:
            QuotaExceededError: the principal has as many under way as it may.
        """
        if key is None:
            yield
            return
        if self._under_way[key] >= self._count:
            self._on_refused(self._name)
            raise QuotaExceededError(
                f"quota.{self._name} of {self._count} at once is used up; try again when one is done", RETRY_AT_ONCE_S
            )
        self._under_way[key] += 1
        try:
            yield
        finally:
            self._under_way[key] -= 1
            if not self._under_way[key]:
                del self._under_way[key]


@dataclass(kw_only=True, slots=True)
class Quotas:
    """All quotas of a node; a rate that is None has no bound."""

    principal_requests: Rate | None
    principal_bytes: Rate | None
    tenant_requests: Rate | None
    tenant_bytes: Rate | None
    new_tenants: Rate | None
    exports: AtOnce
    imports: AtOnce
    verifications: AtOnce
    watches: AtOnce

    @classmethod
    def of(
        cls,
        counts: Mapping[str, int | None],
        burst_s: float,
        on_refused: OnRefused = lambda _name: None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> Quotas:
        """The quotas of these sizes, by name; rates of requests and bytes hold what ``burst_s`` seconds bring."""

        def rate(name: str, held_s: float = burst_s, per_s: int = 1) -> Rate | None:
            if (count := counts[name]) is None:
                return None
            return Rate(name, count, int(count * held_s), per_s=per_s, on_refused=on_refused, clock_ns=clock_ns)

        def at_once(name: str) -> AtOnce:
            return AtOnce(name, counts[name] or 1, on_refused)

        return cls(
            principal_requests=rate("principal_requests"),
            principal_bytes=rate("principal_bytes"),
            tenant_requests=rate("tenant_requests"),
            tenant_bytes=rate("tenant_bytes"),
            new_tenants=rate("new_tenants", 1, _HOUR_S),
            exports=at_once("exports"),
            imports=at_once("imports"),
            verifications=at_once("verifications"),
            watches=at_once("watches"),
        )

    @property
    def bounds_principals(self) -> bool:
        """Whether ``admit`` ever refuses."""
        return self.principal_requests is not None or self.principal_bytes is not None

    @property
    def bounds_tenants(self) -> bool:
        """Whether ``admit_tenants`` ever refuses."""
        return self.tenant_requests is not None or self.tenant_bytes is not None

    def admit(self, principal: Key, body_bytes: int) -> None:
        """Take one request with a body of ``body_bytes`` from the caller's quotas.

        Raises:
            QuotaExceededError: it may not send as much now; nothing was taken.
        """
        if self.principal_bytes is not None and body_bytes:
            if self.principal_requests is not None:
                self.principal_requests.check(principal, 1)
            self.principal_bytes.take(principal, body_bytes)
        if self.principal_requests is not None:
            self.principal_requests.take(principal, 1)

    def check_tenants(
        self, requests: Mapping[str, int], sizes: Mapping[str, int], more_requests: int = 0, more_bytes: int = 0
    ) -> None:
        """Return if each tenant has these requests and bytes left; up to ``more_*`` may follow for any of them.

        Raises:
            QuotaExceededError: a tenant has less left now; the error names it. RequestTooLargeError: more than a bucket
            ever holds.
        """
        for rate, amounts, more in (
            (self.tenant_requests, requests, more_requests),
            (self.tenant_bytes, sizes, more_bytes),
        ):
            if rate is not None:
                for tenant_id, amount in amounts.items():
                    try:
                        rate.check(tenant_id, amount, more)
                    except QuotaExceededError as error:
                        error.tenant_id = tenant_id
                        raise

    def admit_tenants(self, requests: Mapping[str, int], sizes: Mapping[str, int]) -> None:
        """Take these requests and bytes from the quotas of each tenant: all of it or nothing.

        Raises:
            as ``check_tenants``.
        """
        self.check_tenants(requests, sizes)
        for rate, amounts in ((self.tenant_requests, requests), (self.tenant_bytes, sizes)):
            if rate is not None:
                for tenant_id, amount in amounts.items():
                    rate.take(tenant_id, amount)
