"""The attacks that SECURITY.md refers to: each names tests, and they are there."""

from __future__ import annotations

from tests.attacks import ATTACKS, PAGE, attacks, page


def test_every_attack_has_a_test_of_the_name_it_says() -> None:
    found = attacks()
    assert len(found) > 120
    for attack in found:
        assert attack.tests, attack.does
        for file, _, test in (named.partition("::") for named in attack.tests):
            assert f"def {test}(" in (ATTACKS.parent / file).read_text(), f"{file} has no {test}"


def test_the_page_of_attacks_is_the_one_that_is_generated() -> None:
    assert PAGE.read_text() == page(), "python -m tests.attacks writes it"
