"""Policies over witnesses: which files are one, and how far the witnesses of one vouch for a log."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger.errors import InvalidInputError
from signing.policy import Policy
from tests.app.witness import Witness
from tests.cases.policies import MALFORMED
from tests.signing.test_documented_examples import examples

KEYS = [Witness(f"witness.example/w{number}", number).verifier_key for number in range(1, 41)]
W1, W2, W3, W4 = (f"witness w{number} {KEYS[number - 1]} https://w{number}.example/\n" for number in range(1, 5))
LOG_KEY = "log.example/acme+8ac34cc3+AddamAGCsQq31Uv+08lkBzoO4XLz2qYjJa8CGmj3B1Ea"


def sizes(**of: int) -> dict[str, int]:
    """By verifier key, from the size of each name w1, w2, ..."""
    return {KEYS[int(name[1:]) - 1]: size for name, size in of.items()}


def test_the_documented_policy_is_read_and_its_verdict_is_as_shown() -> None:
    text, shown = examples("policy.md")
    policy = Policy.parse(text)
    assert [each.url for each in policy.witnesses.values()] == [f"https://w{n}.example/" for n in (1, 2, 3)]
    first, second, _ = (each.key.text() for each in policy.witnesses.values())
    assert {"policy": policy.judge({first: 15, second: 12}, 15).to_json()} == json.loads(shown)


def test_a_quorum_covers_what_enough_members_have_cosigned() -> None:
    policy = Policy.parse(f"{W1}{W2}{W3}group g 2 w1 w2 w3\nquorum g\n")
    assert policy.judge(sizes(w1=15, w2=12, w3=3), 12).is_met
    below = policy.judge(sizes(w1=15, w2=12, w3=3), 15)
    assert (below.is_met, below.size) == (False, 12)
    assert below.missing == ("w2: has cosigned 12 of 15 entries", "w3: has cosigned 3 of 15 entries")
    assert policy.judge({}, 1).size == 0
    assert policy.judge({}, 0).is_met, "an empty log"


def test_groups_of_groups_hold_when_enough_of_them_do() -> None:
    policy = Policy.parse(f"{W1}{W2}{W3}{W4}group a any w1 w2\ngroup b all w3 w4\ngroup both 2 a b\nquorum both\n")
    assert policy.judge(sizes(w1=9, w3=5, w4=7), 5).is_met
    assert policy.judge(sizes(w1=9, w3=5, w4=7), 6).missing == (
        "w2: has cosigned nothing of this log",
        "w3: has cosigned 5 of 6 entries",
    )
    assert policy.judge(sizes(w1=9, w2=9, w3=9), 1).size == 0


def test_one_witness_may_be_the_quorum_and_none_asks_for_nothing() -> None:
    assert Policy.parse(f"{W1}{W2}quorum w2").judge(sizes(w1=5), 5).missing == ("w2: has cosigned nothing of this log",)
    assert Policy.parse("quorum none").judge({}, 9).is_met


def test_spaces_tabs_comments_and_the_order_of_definitions_are_read_as_specified() -> None:
    policy = Policy.parse(
        f"# one\n\n \t# two\nlog {LOG_KEY}\n\twitness\tw1  {KEYS[0]} \nquorum w1\nwitness w2 {KEYS[1]}\n"
    )
    assert (list(policy.witnesses), policy.witnesses["w1"].url) == (["w1", "w2"], None)
    assert policy.covers("log.example/acme")
    assert not policy.covers("log.example/other")


@pytest.mark.parametrize(("text", "why"), [(each.text, each.said) for each in MALFORMED])
def test_a_malformed_policy_is_refused_with_its_line(text: str, why: str) -> None:
    with pytest.raises(InvalidInputError, match=why):
        Policy.parse(text)


def naive_holds(policy: Policy, name: str, cosigned: Mapping[str, int], to_seq: int) -> bool:
    """Straight from the specification: whether ``name`` holds for the tree of ``to_seq`` entries."""
    if name in policy.witnesses:
        return cosigned.get(policy.witnesses[name].key.text(), 0) >= to_seq
    group = policy.groups[name]
    return sum(naive_holds(policy, member, cosigned, to_seq) for member in group.members) >= group.threshold


@given(st.lists(st.integers(0, 6), min_size=8, max_size=8), st.lists(st.integers(1, 3), min_size=3, max_size=3))
def test_the_quorum_covers_the_largest_tree_for_which_it_holds(cosigned: list[int], thresholds: list[int]) -> None:
    witnesses = "".join(f"witness w{n} {key}\n" for n, key in enumerate(KEYS[:8]))
    groups = f"group a {thresholds[0]} w0 w1 w2\ngroup b {thresholds[1]} w3 w4 w5\ngroup c {thresholds[2]} a b w6\n"
    policy = Policy.parse(f"{witnesses}{groups}quorum c\n")
    of = dict(zip(KEYS, cosigned, strict=False))
    holds = [to_seq for to_seq in range(1, 8) if naive_holds(policy, "c", of, to_seq)]
    found = policy.judge(of, 4)
    assert found.size == max(holds, default=0)
    assert found.is_met == (4 in holds) == (not found.missing)
    assert list(itertools.takewhile(lambda seq: seq <= found.size, range(1, 8))) == holds
