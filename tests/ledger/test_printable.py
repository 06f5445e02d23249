"""Messages name the first of a long list, and say how many more there are."""

from __future__ import annotations

from ledger.text import first_of


def test_a_list_that_is_short_enough_is_named_whole() -> None:
    assert (first_of([], 2), first_of(["a"], 2), first_of(["a", "b"], 2)) == ("", "a", "a, b")


def test_of_a_longer_one_the_rest_is_counted() -> None:
    assert first_of(["a", "b", "c"], 2) == "a, b and 1 more"
    assert first_of(["a x", "b x", "c x"], 1, "; ") == "a x; and 2 more"
