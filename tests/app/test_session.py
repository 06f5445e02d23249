"""Session tokens: what a client is given comes back whole, anything that was not made here is refused."""

from __future__ import annotations

import base64
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.runtime.state.session import MAC_BYTES, SECRET_BYTES, SESSION_TOKENS_MAX, SessionTokens, Token
from ledger.errors import InvalidInputError

node_ids = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?", fullmatch=True)
positions = st.integers(1, 10**17)
tokens = st.builds(
    lambda node, epoch, lsn, ms, logical: Token(node, epoch, lsn, f"{ms}:{logical}:{node}"),
    node_ids,
    positions,
    positions,
    st.integers(0, 10**15),
    st.integers(0, 2**32 - 1),
)


sessions = SessionTokens(bytes(range(SECRET_BYTES)))
ONE = Token("n", 1, 1, "1:0:n")


def plain(text: str) -> str:
    """A token of this text, with the MAC that this ledger would put under it."""
    raw = text.encode()
    return base64.urlsafe_b64encode(raw + sessions._mac(raw)).rstrip(b"=").decode()


@given(st.lists(tokens, min_size=1, max_size=8), st.sampled_from([",", ", ", " ,\t"]))
def test_several_tokens_in_one_header_come_back_in_order(given_tokens: list[Token], separator: str) -> None:
    assert sessions.decode_header(separator.join(map(sessions.encode, given_tokens))) == given_tokens


@pytest.mark.parametrize("absent", [None, ""])
def test_without_a_header_there_are_no_tokens(absent: str | None) -> None:
    assert sessions.decode_header(absent) == []


@pytest.mark.parametrize(
    "header",
    [
        "x",
        "!!!!",
        ",",
        plain("t2 node 1 1"),
        plain("t1 node 1 1 1:0:node"),
        plain("t2 node 0 1 1:0:node"),
        plain("t2 node 1 0 1:0:node"),
        plain("t2 node 01 1 1:0:node"),
        plain("t2 node -1 1 1:0:node"),
        plain("t2 no_de 1 1 1:0:node"),
        plain("t2 node 1 1 1:0:node\n"),
        plain("t2 node 1 1 x:0:node"),
        plain("t2 node 1 1 01:0:node"),
        plain("t2 node 1 1 9999999999999999999:0:node"),
        plain("t2 node 1 1 1:4294967296:node"),
        plain("t2 node 1 1 1:0:nodé"),
        plain("t2 node 1 1 1:0:node") + "=",
        plain("t2 node 1 1 1:0:node") + ",",
        "é",
        ",".join([sessions.encode(ONE)] * (SESSION_TOKENS_MAX + 1)),
        "A" * 5000,
    ],
)
def test_what_was_not_made_here_is_refused(header: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        sessions.decode_header(header)
    assert refused.value.path == ("Tally-Session",)


@given(st.text(alphabet=string.printable + "é\x00", max_size=60))
def test_no_text_does_anything_but_decode_or_be_refused(header: str) -> None:
    try:
        decoded = sessions.decode_header(header)
    except InvalidInputError:
        return
    assert all(isinstance(token, Token) for token in decoded)


def test_a_token_is_read_as_it_was_bound_and_by_no_other_ledger() -> None:
    assert sessions.decode(plain("t2 n 1 1 1:0:n")) == ONE
    with pytest.raises(InvalidInputError, match="drop it"):
        SessionTokens(bytes(SECRET_BYTES)).decode(sessions.encode(ONE))


@given(tokens, tokens, st.integers(0, 8 * MAC_BYTES - 1))
def test_no_other_text_and_no_other_mac_holds(token: Token, other: Token, bit: int) -> None:
    raw = base64.urlsafe_b64decode(sessions.encode(token) + "==")
    flipped = (int.from_bytes(raw, "big") ^ 1 << bit).to_bytes(len(raw), "big")
    forged = [flipped, raw[:-MAC_BYTES], raw[:-1]]
    if other != token:
        theirs = base64.urlsafe_b64decode(sessions.encode(other) + "==")
        forged.append(theirs[:-MAC_BYTES] + raw[-MAC_BYTES:])
    for each in forged:
        with pytest.raises(InvalidInputError):
            sessions.decode(base64.urlsafe_b64encode(each).rstrip(b"=").decode())


def test_a_token_from_before_they_were_bound_is_refused_with_what_to_do() -> None:
    old = base64.urlsafe_b64encode(b"t1 node-7f3a 3 17 1704931200000:1:node-7f3a").rstrip(b"=").decode()
    with pytest.raises(InvalidInputError, match="drop it"):
        sessions.decode(old)
