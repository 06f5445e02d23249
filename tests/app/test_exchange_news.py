"""What a ledger tells its peers: the changes since a cursor, and which entries they lack."""

from __future__ import annotations

import asyncio

import pytest

from app.share.exchange.news import ECHO_S, RANGES_MAX, TOLD_MAX, Cursor, Lacking, News
from ledger import canonical
from ledger.errors import InvalidInputError

SOON_S = 0.01
LONG_S = 3600.0


def origin(log: str, seq: int) -> str:
    """An origin as it is stored with an imported entry."""
    return canonical.encode(
        {"bundle_digest": "0" * 64, "chain_link": "0" * 64, "log": log, "node_id": "n", "seq": seq}
    ).decode()


# --- news ------------------------------------------------------------------------------------------------


async def test_what_changed_is_told_in_the_order_of_changes_and_each_tenant_once() -> None:
    news = News()
    told = news.read("")
    assert told == Cursor(0, "")
    news.changed(["a", "b"])
    news.changed(["a"])
    assert await news.after(0, 0, "one") == ({"b": True, "a": True}, 3)
    assert await news.after(2, 0, "one") == ({"a": True}, 3)
    assert await news.after(3, 0, "one") == ({}, 3)


async def test_more_changes_than_an_answer_has_are_told_in_the_next_one() -> None:
    news = News()
    names = [f"t{number}" for number in range(TOLD_MAX + 5)]
    news.changed(names)
    told, number = await news.after(0, 0, "one")
    assert ([*told], number) == (names[:TOLD_MAX], TOLD_MAX)
    news.changed([names[0]])
    told, number = await news.after(TOLD_MAX, 0, "one")
    assert ([*told], number) == ([*names[TOLD_MAX:], names[0]], TOLD_MAX + 6)


async def test_a_checkpoint_is_news_only_if_it_is_longer() -> None:
    news = News()
    news.signed({"a": 3, "b": 0})
    news.signed({"a": 3, "b": 0})
    news.signed({"a": 2})
    assert await news.after(0, 0, "one") == ({"a": True, "b": True}, 2)
    news.signed({"a": 4})
    assert await news.after(2, 0, "one") == ({"a": True}, 3)


async def test_a_checkpoint_over_imported_entries_alone_wakes_nobody_at_once() -> None:
    news = News()
    news.signed({"a": 3})
    waiting = asyncio.create_task(news.after(1, LONG_S, "one"))
    await asyncio.sleep(0)
    news.imported("a", 4, 6)
    news.signed({"a": 6})
    await asyncio.sleep(0)
    assert not waiting.done()
    news.changed(["a"], "two")
    assert await news.after(1, 0, "two") == ({"a": False}, 2), "nor is it told with how much is imported"
    async with asyncio.timeout(5):
        assert await waiting == ({"a": True}, 3), "by and by"
        # Entry 7 was chained here.
        waiting = asyncio.create_task(news.after(3, LONG_S, "one"))
        await asyncio.sleep(0)
        news.imported("a", 8, 9)
        asked_s = asyncio.get_running_loop().time()
        news.signed({"a": 9})
        assert await waiting == ({"a": True}, 4)
        assert asyncio.get_running_loop().time() < asked_s + ECHO_S, "at once"


async def test_what_writes_wait_for_is_signed_before_a_peer_is_answered_or_in_time() -> None:
    news = News()
    news.signed({"a": 3})
    assert news.unsigned({"a": 3, "b": 1}) == {"b": 1}
    await news.wait_signed({"a": 3}, LONG_S)
    await news.wait_signed({"a": 4}, SOON_S)
    waiting = asyncio.create_task(news.wait_signed({"a": 4, "b": 1}, LONG_S))
    for sizes in ({"a": 4}, {"b": 1}):
        await asyncio.sleep(0)
        assert not waiting.done()
        news.signed(sizes)
    async with asyncio.timeout(5):
        await waiting


async def test_what_concerns_one_ledger_is_told_to_it_alone() -> None:
    news = News()
    news.changed(["a"], "one")
    assert await news.after(0, 0, "one") == ({"a": False}, 1)
    assert await news.after(0, 0, "two") == ({}, 1)
    news.changed(["a"])
    assert await news.after(0, 0, "one") == ({"a": True}, 2)
    assert await news.after(0, 0, "two") == ({"a": True}, 2)


async def test_a_cursor_goes_on_in_its_run_and_lists_again_in_another() -> None:
    news, another = News(), News()
    news.changed(["a", "b"])
    assert news.read(news.cursor(1)) == Cursor(1)
    assert news.read(news.cursor(1, "a")) == Cursor(1, "a")
    assert news.read("") == news.read(another.cursor(0)) == Cursor(2, "")
    assert news.read(news.cursor(3)) == Cursor(2, ""), "no change has this number yet"
    # The list that another node began goes on, and no change of this one may be missed.
    assert news.read(another.cursor(7, "a")) == Cursor(0, "a")


async def test_who_waits_is_answered_by_a_change_or_the_end_or_in_time() -> None:
    news = News()
    assert await news.after(0, SOON_S, "one") == ({}, 0)
    waiting = [asyncio.create_task(news.after(0, LONG_S, "one")) for _ in range(2)]
    await asyncio.sleep(0)
    news.signed({})  # nothing new, so they go on waiting
    await asyncio.sleep(0)
    assert not any(each.done() for each in waiting)
    news.changed(["a"])
    async with asyncio.timeout(5):
        assert await asyncio.gather(*waiting) == 2 * [({"a": True}, 1)]
        late = asyncio.create_task(news.after(1, LONG_S, "one"))
        await asyncio.sleep(0)
        news.end()
        assert await late == ({}, 1)
        assert await news.after(1, LONG_S, "one") == ({}, 1), "nobody waits any longer"


# --- lacking ---------------------------------------------------------------------------------------------


def test_entries_of_logs_up_to_what_is_had_are_not_lacking() -> None:
    lacking = Lacking(["2 one/acme", "9 two/acme"])
    lacking.add([(5, None), (6, origin("one/acme", 2)), (7, origin("one/acme", 3)), (8, origin("three/acme", 1))])
    lacking.add([(9, "no origin"), (10, origin("two/acme", 9)), (11, origin("two/acme", 1))])
    assert lacking.ranges() == [(5, 5), (7, 9)]
    everything = Lacking([])
    everything.add([(1, None), (2, origin("one/acme", 1))])
    assert everything.ranges() == [(1, 2)]
    assert Lacking([]).ranges() == []


def test_many_ranges_become_few_over_the_shortest_gaps() -> None:
    lacking = Lacking(["99 one/acme"])
    at, lacks, gaps = 1, [], [*range(1, RANGES_MAX + 3)]
    for gap in gaps:
        lacks.append(at)
        lacking.add([(at, None), *((at + each, origin("one/acme", each)) for each in range(1, gap + 1))])
        at += gap + 1
    lacking.add([(at, None)])
    found = lacking.ranges()
    # The three shortest gaps, of one entry to three, are in the first range.
    assert len(found) == RANGES_MAX
    assert found == [(1, lacks[3]), *((each, each) for each in lacks[4:]), (at, at)]


@pytest.mark.parametrize("text", ["", "1", "one log", "1 two logs", " 1 log", "-1 log", "1² log", "9" * 5000 + " log"])
def test_what_is_had_needs_a_seq_and_a_log(text: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        Lacking([text])
    assert (str(caught.value), caught.value.path) == ("have: takes `seq log`", ("have",))
