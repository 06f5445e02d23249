"""Shapes of answers about commitments and capacities of nodes."""

from __future__ import annotations

from typing import Any, Literal

from typing_extensions import TypedDict

from app.runtime.answers import HlcText


class VerdictOfProposal(TypedDict):
    """A proposal that was accepted; ``index`` is the seq of its entry. One that was rejected is a problem."""

    index: int
    hlc: HlcText
    verdict: Literal["accepted"]


class CapacityAnswer(TypedDict):
    """A capacity that was recorded."""

    index: int
    hlc: HlcText
    node: str


class CommitmentItem(TypedDict):
    """One active commitment."""

    index: int
    commitment: dict[str, Any]


class CommitmentList(TypedDict):
    """Active commitments as of one seq, in order of their index."""

    as_of_seq: int
    items: list[CommitmentItem]
    next_cursor: str | None


class NodeItem(TypedDict):
    """What one node has."""

    index: int
    node: str
    capacity: dict[str, Any]


class NodeList(TypedDict):
    """Capacities as of one seq, in order of the entries that set them."""

    as_of_seq: int
    items: list[NodeItem]
    next_cursor: str | None
