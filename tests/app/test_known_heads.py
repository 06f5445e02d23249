"""A head that was parsed once is known: what has the same bytes is taken without the parser, and nothing else is."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

import pytest

from app.edge.accepted import ACCEPTED, Services
from app.edge.connection.protocol import ProblemProtocol
from app.edge.fast_path import BLOCK_BYTES_MAX, BLOCKS_MAX, HeaderCache
from tests.app.shared import Shared
from tests.app.test_plain_writes import CREATE, PROMISE, answered, connected, post
from tests.app.test_protocol import Pieces, until

BODY = json.dumps(CREATE).encode()
FIELDS = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"content-length", b"%d" % len(BODY))]
KEYED = [*FIELDS[:2], (b"idempotency-key", b"one"), FIELDS[2]]


@pytest.fixture
def services(shared: Shared) -> Services:
    return shared.services


@pytest.fixture
def heads() -> HeaderCache:
    """Knows the head of ``BODY``, without a key."""
    heads = HeaderCache()
    heads.remember(post("/v1/jobs", BODY), FIELDS)
    return heads


def keyed(key: str, path: str = "/v1/commitments") -> bytes:
    return post(path, BODY, f"Idempotency-Key: {key}")


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/jobs/use1-1-a-1/cancel", "/v1/commitments"])
def test_a_known_head_is_found_whatever_its_path_and_key(heads: HeaderCache, path: str) -> None:
    assert heads.find(post(path, BODY)) == (path.encode(), b"", FIELDS, BODY, None)
    headers = [*FIELDS, (b"idempotency-key", b"a-key")]
    assert heads.find(keyed("a-key", path)) == (path.encode(), b"a-key", headers, BODY, None)
    assert heads.find(keyed("a-key", path).replace(b"Idempotency-Key", b"idempotency-key")) is not None


def test_a_known_head_tells_what_it_says_of_its_caller(heads: HeaderCache) -> None:
    for token in (b"Bearer a", b"Bearer b"):
        shown = post("/v1/jobs", BODY, f"Authorization: {token.decode()}")
        heads.remember(shown, [(b"authorization", token), *FIELDS])
    for token in (b"Bearer a", b"Bearer b"):
        known = heads.find(post("/v1/jobs", BODY, f"Authorization: {token.decode()}"))
        assert known is not None
        assert known.authorization == token


KNOWN = post("/v1/jobs", BODY)
UNKNOWN = {
    "another method": KNOWN.replace(b"POST", b"PUT"),
    "another version": KNOWN.replace(b"HTTP/1.1", b"HTTP/1.0"),
    "a query": post("/v1/jobs?x", BODY),
    "an escape in its path": post("/v1/j%6fbs", BODY),
    "a byte more": KNOWN + b" ",
    "a byte less": KNOWN[:-1],
    "a request behind it": KNOWN + KNOWN,
    "another length": post("/v1/jobs", BODY + b" "),
    "another header": post("/v1/jobs", BODY, "X-Way: 1"),
    "a header twice": post("/v1/jobs", BODY, "Host: localhost"),
    "other letters": KNOWN.replace(b"Host", b"host"),
    "a key twice": post("/v1/commitments", BODY, "Idempotency-Key: one", "Idempotency-Key: two"),
    "an empty key": keyed(""),
    "a key that is not visible": keyed("a b"),
    "a key in other letters": keyed("one").replace(b"Idempotency-Key", b"IDEMPOTENCY-KEY"),
    "a line folded into its key": keyed("one\r\n two"),
    "a line folded into what is before its key": keyed("one\r\n\ttwo"),
    "a newline in its key": keyed("one\ntwo"),
    "no end": KNOWN.partition(b"\r\n\r\n")[0],
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_what_differs_in_anything_else_is_the_parsers(heads: HeaderCache, what: str) -> None:
    assert heads.find(UNKNOWN[what]) is None


@pytest.mark.parametrize(
    ("data", "headers"),
    [
        (KNOWN + KNOWN, FIELDS),
        (post("/v1/jobs", BODY, "Accept: a\r\n b"), [(b"accept", b"a b"), *FIELDS]),
        (keyed("one\r\n two"), [*FIELDS, (b"idempotency-key", b"one two")]),
        (keyed("one"), FIELDS),
        (KNOWN, KEYED),
        (
            post("/v1/jobs", BODY, "Authorization: Bearer a", "Authorization: Bearer b"),
            [(b"authorization", b"Bearer a"), (b"authorization", b"Bearer b"), *FIELDS],
        ),
        (post("/v1/jobs", BODY, f"Accept: {'a' * BLOCK_BYTES_MAX}"), [(b"accept", b"a" * BLOCK_BYTES_MAX), *FIELDS]),
    ],
)
def test_a_head_that_is_spelt_in_an_unusual_way_or_came_with_more_is_not_remembered(
    data: bytes, headers: list[tuple[bytes, bytes]]
) -> None:
    heads = HeaderCache()
    heads.remember(data, headers)
    assert heads.find(data) is None
    assert heads.find(data[: len(KNOWN)]) is None


def test_so_many_heads_are_remembered_and_no_more(heads: HeaderCache) -> None:
    for number in range(BLOCKS_MAX):
        accept = f"Accept: {number}"
        heads.remember(post("/v1/jobs", BODY, accept), [(b"accept", b"%d" % number), *FIELDS])
    assert heads.find(KNOWN) is None, "all were forgotten"
    assert heads.find(post("/v1/jobs", BODY, accept)) is not None


# --- on a connection -------------------------------------------------------------------------------


def never_parses(protocol: ProblemProtocol) -> None:
    """From now on it fails to parse anything."""
    vars(protocol)["parser"] = None


async def warm(services: Services, *sent: bytes) -> tuple[ProblemProtocol, Pieces]:
    """A connection that answered these plain writes."""
    protocol, transport = connected(services)
    for count, each in enumerate(sent, 1):
        protocol.data_received(each)
        assert set(await answered(transport, count)) == {201}
    return protocol, transport


async def test_a_write_with_a_known_head_is_answered_without_the_parser(services: Services) -> None:
    proposal = post("/v1/commitments", PROMISE, "Idempotency-Key: known-1")
    protocol, transport = await warm(services, KNOWN, proposal)
    never_parses(protocol)
    second = {"tenant_id": "acme", "commitment": {"kind": "Lease", "resource": "s", "holder": "h"}}
    for count, sent in enumerate((KNOWN, post("/v1/commitments", second, "Idempotency-Key: known-2"), KNOWN), 3):
        protocol.data_received(sent)
        assert await answered(transport, count) == [201] * count
    assert len({json.loads(piece.partition(b"\r\n\r\n")[2])["hlc"] for piece in transport.pieces}) == 5


async def test_what_the_framework_got_of_a_known_head_it_keeps(services: Services) -> None:
    protocol, transport = await warm(services, KNOWN)
    wrong = post("/v1/jobs", BODY.replace(b"tenant_id", b"tenant-id"))
    assert len(wrong) == len(KNOWN)
    for count, (sent, status) in enumerate(((wrong, 404), (KNOWN, 201), (wrong, 404), (KNOWN, 201), (KNOWN, 201)), 2):
        protocol.data_received(sent)
        assert (await answered(transport, count))[-1] == status


@pytest.mark.parametrize("path", ["/v1/events", "/v1/jobs"])
@pytest.mark.parametrize("is_paused", [False, True])
async def test_what_was_found_out_about_one_request_is_found_out_anew_for_the_next(
    services: Services, path: str, *, is_paused: bool
) -> None:
    """Who calls, and what was taken out of quotas: also where the next is the framework's from its head on, and where
    answers wait for the client, so that nothing is answered from the connection."""
    seen: list[dict[str, object]] = []

    async def framework(scope: dict[str, object], _receive: object, send: Callable[..., Awaitable[None]]) -> None:
        seen.append(scope)
        await send({"type": "http.response.start", "status": 404, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    protocol, transport = connected(services, framework)
    protocol.data_received(KNOWN)
    assert await answered(transport, 1) == [201]
    if is_paused:
        protocol.flow.pause_writing()
    protocol.data_received(post(path, BODY))
    if is_paused or path == "/v1/events":
        await until(lambda: seen)
        assert (seen[0]["path"], seen[0]["method"]) == (path, "POST")
        assert {ACCEPTED, "route"}.isdisjoint(seen[0])
    protocol.flow.resume_writing()
    await until(lambda: len(transport.pieces) > 1)


async def test_a_path_without_end_is_the_parsers(heads: HeaderCache) -> None:
    assert heads.find(post(f"/v1/{'a' * 1024}", BODY)) is not None
    assert heads.find(post(f"/v1/{'a' * 1025}", BODY)) is None


async def test_what_every_answer_says_is_said_as_of_now(services: Services) -> None:
    protocol, transport = await warm(services, KNOWN)
    for count, now in enumerate((b"then", b"later"), 2):
        protocol.server_state.default_headers = [(b"date", now)]
        protocol.data_received(KNOWN)
        await answered(transport, count)
        assert b"\r\ndate: %b\r\n" % now in transport.pieces[-1]


async def test_one_that_comes_in_pieces_is_parsed(services: Services) -> None:
    protocol, transport = await warm(services, KNOWN)
    protocol.data_received(KNOWN[:-1])
    protocol.data_received(KNOWN[-1:] + KNOWN)
    protocol.data_received(KNOWN[:9])
    protocol.data_received(KNOWN[9:])
    assert await answered(transport, 4) == [201] * 4


async def test_one_that_comes_while_another_is_answered_waits_for_its_turn(services: Services) -> None:
    first, second = (post("/v1/jobs", {**CREATE, "durability": level}) for level in ("GLOBAL", "LOCAL"))
    protocol, transport = await warm(services, first, second)
    protocol.data_received(first)
    protocol.data_received(second)
    await answered(transport, 4)
    levels = [json.loads(piece.partition(b"\r\n\r\n")[2])["durability"]["achieved"] for piece in transport.pieces[2:]]
    assert levels == ["GLOBAL", "LOCAL"]


async def test_what_looks_like_one_within_a_head_is_part_of_that(services: Services) -> None:
    protocol, transport = await warm(services, KNOWN)
    protocol.data_received(b"POST /v1/nothing HTTP/1.1\r\nAccept: ")
    protocol.data_received(KNOWN)
    assert await answered(transport, 2) == [201, 404]


async def test_what_looks_like_one_within_a_body_that_nobody_reads_is_part_of_that(services: Services) -> None:
    protocol, transport = await warm(services, KNOWN)
    unread = post("/v1/nothing", KNOWN.rjust(500))
    protocol.data_received(unread[: -len(KNOWN)])
    assert await answered(transport, 2) == [201, 404]
    protocol.data_received(unread[-len(KNOWN) :])
    protocol.data_received(post("/v1/nothing", BODY))
    assert await answered(transport, 3) == [201, 404, 404]


async def test_a_head_is_not_learnt_from_the_middle_of_a_body(services: Services) -> None:
    """Else the end of a body, as the first lines of a head, would come to mean what the real head behind it says."""
    end = b"POST /v1/jobs HTTP/1.1\r\nX-Way: "
    unread = post("/v1/nothing", end.rjust(200))
    protocol, transport = connected(services)
    protocol.data_received(unread[: -len(end)])
    assert await answered(transport, 1) == [404]
    protocol.data_received(end + KNOWN)
    assert await answered(transport, 2) == [404, 201]
    protocol.data_received(end + KNOWN)
    assert await answered(transport, 3) == [404, 201, 404]


async def test_each_byte_of_a_known_head_counts(services: Services) -> None:
    """Whichever is changed, the answer is that of a connection to which no head is known."""
    head_bytes = KNOWN.index(BODY)
    for at in range(head_bytes):
        for changed in {KNOWN[at] ^ 0x20, ord("\r"), ord(" ")} - {KNOWN[at]}:
            sent = KNOWN[:at] + bytes([changed]) + KNOWN[at + 1 :]
            told = [await ended_by(protocol, transport, sent) for protocol, transport in await both(services)]
            assert told[0] == told[1], sent


async def both(services: Services) -> list[tuple[ProblemProtocol, Pieces]]:
    """A connection to which the head is known, and one to which none is."""
    return [await warm(services, KNOWN), connected(services)]


async def ended_by(protocol: ProblemProtocol, transport: Pieces, sent: bytes) -> list[bytes]:
    """The first lines of what is answered to a client that sends this, and then nothing."""
    before = len(transport.pieces)
    protocol.data_received(sent)
    for now_s in (1e9, 2e9):
        protocol.look(now_s)
    await until(lambda: transport.pieces[before:] or transport.closed)
    return [piece.partition(b"\r\n")[0] for piece in transport.pieces[before:]]
