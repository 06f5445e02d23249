"""Session tokens: what a client is given comes back whole, anything else is refused."""

from __future__ import annotations

import base64
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.session import SESSION_TOKENS_MAX, Token, decode_header
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


def plain(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).rstrip(b"=").decode()


@given(st.lists(tokens, min_size=1, max_size=8), st.sampled_from([",", ", ", " ,\t"]))
def test_several_tokens_in_one_header_come_back_in_order(given_tokens: list[Token], separator: str) -> None:
    assert decode_header(separator.join(token.encode() for token in given_tokens)) == given_tokens


@pytest.mark.parametrize("absent", [None, ""])
def test_without_a_header_there_are_no_tokens(absent: str | None) -> None:
    assert decode_header(absent) == []


@pytest.mark.parametrize(
    "header",
    [
        "x",
        "!!!!",
        ",",
        plain("t1 node 1 1"),
        plain("t2 node 1 1 1:0:node"),
        plain("t1 node 0 1 1:0:node"),
        plain("t1 node 1 0 1:0:node"),
        plain("t1 node 01 1 1:0:node"),
        plain("t1 node -1 1 1:0:node"),
        plain("t1 no_de 1 1 1:0:node"),
        plain("t1 node 1 1 1:0:node\n"),
        plain("t1 node 1 1 x:0:node"),
        plain("t1 node 1 1 01:0:node"),
        plain("t1 node 1 1 9999999999999999999:0:node"),
        plain("t1 node 1 1 1:4294967296:node"),
        plain("t1 node 1 1 1:0:nodé"),
        plain("t1 node 1 1 1:0:node") + "=",
        plain("t1 node 1 1 1:0:node") + ",",
        "é",
        ",".join([Token("n", 1, 1, "1:0:n").encode()] * (SESSION_TOKENS_MAX + 1)),
        "A" * 5000,
    ],
)
def test_what_was_not_made_here_is_refused(header: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        decode_header(header)
    assert refused.value.path == ("Tally-Session",)


@given(st.text(alphabet=string.printable + "é\x00", max_size=60))
def test_no_text_does_anything_but_decode_or_be_refused(header: str) -> None:
    try:
        decoded = decode_header(header)
    except InvalidInputError:
        return
    assert all(isinstance(token, Token) for token in decoded)
