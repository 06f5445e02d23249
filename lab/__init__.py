"""The laboratory: demonstrations, simulations and replays of traces, in a checkout. An installed node does without it.

``cli`` adds ``COMMANDS`` to those of ``tally`` where this package is found. ``make facts`` runs ``lab.facts``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from cli import EntryPoint

COMMANDS: Final[Mapping[str, EntryPoint]] = {
    "replay": EntryPoint("lab.replay", "replay"),
    "simulate": EntryPoint("lab.simulate", "simulate"),
    "demo": EntryPoint("lab.tamper", "demo"),
}
