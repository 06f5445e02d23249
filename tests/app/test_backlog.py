"""The backlog is shared: one tenant may fill it, and others have room all the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.write.pending import backlog as backlog_module
from app.write.pending.backlog import BYTES_AROUND_PAYLOAD, Backlog, Pending, record_bytes_of
from ledger.errors import RequestTooLargeError, WalFullError
from ledger.hlc import Hlc
from tests.app.chains import until
from tests.app.conftest import MakeSettings, RunNode
from tests.app.drafts import LOCAL, created
from tests.app.postgres_proxy import PostgresProxy


class Filled:
    """A backlog, and the next LSN."""

    def __init__(self, entries_max: int) -> None:
        self.backlog = Backlog(entries_max)
        self.lsn = 0

    def add(self, tenant_id: str, payload: bytes = b"{}") -> bool:
        """One event more of the tenant, if there is room."""
        try:
            self.backlog.check(1, record_bytes_of(1, len(payload)), (tenant_id,))
        except WalFullError:
            return False
        self.lsn += 1
        self.backlog.add((Pending(self.lsn, 1, Hlc(1, self.lsn, "node"), 1, tenant_id, "job", payload, None, None),))
        return True

    def chain(self, entries: int) -> None:
        self.backlog.drop(self.backlog.peek(self.lsn, entries, 1 << 40), ())

    def fill(self, tenant_id: str, payload: bytes = b"{}") -> int:
        entered = 0
        while self.add(tenant_id, payload):
            entered += 1
        return entered


def test_one_tenant_fills_what_may_wait_and_each_other_has_a_part_of_what_is_kept() -> None:
    filled = Filled(1600)
    assert filled.fill("flood") == 1600
    assert filled.fill("one") == 100
    assert [filled.fill(f"other-{number}") for number in range(5)] == [100, 100, 100, 0, 0]
    assert len(filled.backlog) == 2000
    filled.chain(600)
    assert filled.fill("flood") == 200, "as soon as there is room below what may wait"
    filled.chain(2000)
    assert len(filled.backlog) == 0
    assert filled.fill("one") == 1600


def test_the_next_batch_ends_with_what_is_committed_and_within_its_bounds() -> None:
    filled = Filled(100)
    for payload in (b"1", b"22", b"333", b"4444"):
        assert filled.add("acme", payload)

    def peeked(*bounds: int) -> list[int]:
        return [each.lsn for each in filled.backlog.peek(*bounds)]

    assert peeked(4, 9, 10) == [1, 2, 3, 4]
    assert peeked(3, 9, 10) == [1, 2, 3]
    assert peeked(0, 9, 10) == []
    assert peeked(4, 2, 10) == [1, 2]
    assert peeked(4, 9, 9) == peeked(4, 9, 6) == [1, 2, 3]
    assert peeked(4, 9, 5) == [1, 2]
    assert peeked(4, 9, 0) == [1], "one at least, however large"
    filled.chain(2)
    assert peeked(4, 9, 7) == [3, 4]
    assert peeked(4, 9, 6) == [3]
    filled.chain(2)
    assert peeked(4, 9, 10) == []


def test_bytes_are_kept_for_others_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog_module, "BYTES_MAX_MIN", 1_600_000)
    filled = Filled(1600)
    payload = b"x" * (10_000 - BYTES_AROUND_PAYLOAD)
    assert filled.fill("flood", payload) == filled.backlog.bytes_max // 10_000
    assert filled.fill("one", payload) == 10
    assert not filled.add("flood")
    assert filled.add("other")


def test_what_is_entered_together_has_room_only_if_little_waits_of_all_its_tenants() -> None:
    filled = Filled(1600)
    filled.fill("flood")
    filled.backlog.check(50, 0, ("one", "other"))
    for tenants in (("one", "flood"), ("flood",), ()):
        with pytest.raises(WalFullError):
            filled.backlog.check(50, 0, tenants)
    with pytest.raises(RequestTooLargeError):
        filled.backlog.check(1601, 0, ("one",))
    filled.backlog.reserve(100, 1000, ("one",))
    filled.backlog.reserve(0, 1000, ("one",))
    filled.backlog.release(100, 2000)


@given(
    st.lists(st.tuples(st.sampled_from(["add", "add", "add", "chain"]), st.sampled_from("abc"), st.integers(1, 40))),
    st.sets(st.sampled_from("abc"), max_size=1),
)
def test_what_is_known_of_tenants_is_what_waits_of_them(steps: list[tuple[str, str, int]], locked: set[str]) -> None:
    filled = Filled(64)
    for step, tenant_id, count in steps:
        if step == "add":
            for number in range(count):
                filled.add(tenant_id, b"x" * number)
        elif batch := filled.backlog.peek(filled.lsn, count, 1 << 40):
            filled.backlog.drop(batch, locked)
    for tenant_id in locked:
        while deferred := filled.backlog.peek_deferred(tenant_id, 5, 1 << 40):
            filled.backlog.drop(deferred, ())
    waiting: dict[str, tuple[int, int]] = {}
    for pending in filled.backlog:
        entries, held_bytes = waiting.get(pending.tenant_id, (0, 0))
        waiting[pending.tenant_id] = entries + 1, held_bytes + len(pending.payload) + BYTES_AROUND_PAYLOAD
    assert filled.backlog._of_tenants == waiting
    assert filled.backlog._bytes == sum(held_bytes for _, held_bytes in waiting.values())


async def test_while_the_database_is_away_a_tenant_that_fills_the_backlog_leaves_others_and_the_ledger_room(
    run_node: RunNode, make_settings: MakeSettings, proxy: PostgresProxy
) -> None:
    async with run_node(make_settings(wal={"backlog_max_entries": 64}), url=proxy.url) as service:
        for tenant in ("flood", "other"):
            await service.submitter.submit(created(tenant, 0), key=None)
        await service.key_changes.recorded.wait()
        await until(lambda: not service.backlog, "nothing waits")
        await proxy.refuse()
        for n in range(64):
            await service.submitter.submit(created("flood", n, durability=LOCAL), key=None)
        with pytest.raises(WalFullError):
            await service.submitter.submit(created("flood", 64, durability=LOCAL), key=None)
        assert len(service.backlog) == 64
        assert service.backlog_fault() is not None
        for n in range(4):
            await service.submitter.submit(created("other", n, durability=LOCAL), key=None)
        with pytest.raises(WalFullError):
            await service.submitter.submit(created("other", 5, durability=LOCAL), key=None)
        await proxy.accept()
        await until(lambda: not service.backlog, "the backlog drains")
