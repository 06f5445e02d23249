"""The attacks and faults that were tried, from ``tests/attacks.toml``: ``python -m tests.attacks`` writes the page."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec

ATTACKS = Path(__file__).with_suffix(".toml")
PAGE = ATTACKS.parents[1] / "docs/attacks.md"
_HEAD = """# Attacks and faults, and what is seen

Evidence for [SECURITY.md](../SECURITY.md), generated from `tests/attacks.toml`. Each line is an attack or a fault, what
the ledger does, and the tests below `tests/` that show it. Each was seen to succeed on a running service before it was
repaired, but for those about an issuer, forged tokens, rights and archives, which were refused from the first.
"""


class Attack(msgspec.Struct, frozen=True):
    """One attack or fault."""

    by: str
    """Whose it is: the heading on the page."""
    does: str
    seen: str
    tests: tuple[str, ...]
    """Names as pytest has them, from ``tests/`` on."""


def attacks() -> list[Attack]:
    """All of them, in the order of the file."""
    return msgspec.convert(tomllib.loads(ATTACKS.read_text())["attack"], list[Attack])


def page() -> str:
    """The page as it must be checked in."""
    lines = [_HEAD]
    heading = ""
    for attack in attacks():
        if attack.by != heading:
            heading = attack.by
            lines.append(f"\n## {heading}\n\n")
        lines.append(f"- **{attack.does}**: {attack.seen}\n")
        lines += [f"  - `{test}`\n" for test in attack.tests]
    return "".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
