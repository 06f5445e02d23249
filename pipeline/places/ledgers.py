"""Several ledgers as one place. Each has a name, so tenants with the same id stay apart.

Where a place takes or returns a tenant, this one has the name of a chain, the text of a ``ChainName``. Pieces carry
the name of their ledger, and their readers are those of the ledger.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import quote

from ledger.errors import ArchiveInvalidError, InvalidInputError
from ledger.machines.retention import Floor
from ledger.verification.left_index import IndexSource
from ledger.verification.range_fold import ChainBounds
from ledger.verification.verdict import Anchor
from pipeline.archive import SealedManifest
from pipeline.places.protocol import (
    ROWS_A_PIECE,
    ChainName,
    Facts,
    Judged,
    Judgement,
    OpenPlace,
    Piece,
    PieceReader,
    Sealed,
    Times,
)
from signing.anchors import ExternalWitnesses
from signing.keys import Keyring


def folder_of(ledger: str) -> str:
    """The name of the folder for files of the ledger of that name.

    Raises:
        InvalidInputError: no folder can have such a name.
    """
    if not ledger.strip("."):
        raise InvalidInputError(f"a ledger named {ledger!r} can have no folder: name it otherwise, as NAME=URL")
    return quote(ledger, safe="")


class OpenLedgers(OpenPlace):
    """Open ledgers by their names, at least one; all are copies of ledgers, or none is."""

    def __init__(self, ledgers: Mapping[str | None, OpenPlace]) -> None:
        self._ledgers = {name: ledgers[name] for name in sorted(ledgers, key=str)}
        self.is_copy = all(each.is_copy for each in ledgers.values())
        assert self.is_copy == any(each.is_copy for each in ledgers.values())

    def __str__(self) -> str:
        return ", ".join(map(str, self._ledgers.values()))

    def ledgers(self) -> Mapping[str | None, OpenPlace]:
        """The ledgers by name, in the order of their names."""
        return self._ledgers

    def tenants(self) -> list[str]:
        """The chains of all ledgers, ledger by ledger."""
        return [str(ChainName(name, tenant)) for name, each in self._ledgers.items() for tenant in each.tenants()]

    def pieces_of(
        self, tenants: Sequence[str], rows_a_piece: int, from_seq: int | None, to_seq: int | None, times: Times
    ) -> list[Piece]:
        """As in each ledger, with its name."""
        return [
            replace(piece, ledger=name)
            for name, some in self._by_ledger(tenants)
            for piece in self._ledgers[name].pieces_of(some, rows_a_piece, from_seq, to_seq, times)
        ]

    def left_pieces(self, tenants: Collection[str], rows_a_piece: int = ROWS_A_PIECE) -> list[Piece]:
        """As in each ledger, with its name."""
        return [
            replace(piece, ledger=name)
            for name, some in self._by_ledger(tenants)
            for piece in self._ledgers[name].left_pieces(some, rows_a_piece)
        ]

    def floors(self, tenants: Collection[str]) -> Mapping[str, Floor]:
        """As in each ledger, by the names of chains."""
        return {
            str(ChainName(name, tenant)): floor
            for name, some in self._by_ledger(tenants)
            for tenant, floor in self._ledgers[name].floors(some).items()
        }

    def begun(
        self, ends: Mapping[str, ChainBounds], keyring: Keyring | None, archived: Mapping[str, IndexSource]
    ) -> dict[str, ChainBounds]:
        """As in each ledger, by the names of chains."""
        begun: dict[str, ChainBounds] = {}
        for name, some in self._by_ledger(ends):
            chains = {tenant: str(ChainName(name, tenant)) for tenant in some}
            of_ledger = {tenant: ends[chain] for tenant, chain in chains.items()}
            left = {tenant: archived[chain] for tenant, chain in chains.items() if chain in archived}
            found = self._ledgers[name].begun(of_ledger, keyring, left)
            begun |= {str(ChainName(name, tenant)): each for tenant, each in found.items()}
        return begun

    def existing(self, tenants: Collection[str]) -> list[str]:
        """``tenants``, each once, in order; the error names the ledger that lacks one."""
        return [
            str(ChainName(name, tenant))
            for name, some in self._by_ledger(tenants)
            for tenant in self._ledgers[name].existing(some)
        ]

    def reader(self, piece: Piece) -> PieceReader:
        """The reader of its ledger."""
        return self._ledgers[piece.ledger].reader(piece)

    def facts(self, tenant_id: str) -> Facts:
        """As in its ledger."""
        place, tenant = self._at(tenant_id)
        return place.facts(tenant)

    def log_origin(self, tenant_id: str) -> str | None:
        """As in its ledger."""
        place, tenant = self._at(tenant_id)
        return place.log_origin(tenant)

    def sealed(self, tenant_id: str) -> Sequence[Sealed]:
        """As in its ledger."""
        place, tenant = self._at(tenant_id)
        return place.sealed(tenant)

    def cosigned(self, tenant_id: str, keyring: Keyring | None, external: ExternalWitnesses) -> tuple[Anchor, ...]:
        """As in its ledger."""
        place, tenant = self._at(tenant_id)
        return place.cosigned(tenant, keyring, external)

    def manifests(self, tenant_id: str) -> Sequence[SealedManifest]:
        """As in its ledger."""
        place, tenant = self._at(tenant_id)
        return place.manifests(tenant)

    def tables(self, keyring: Keyring | None, broken: Collection[str]) -> list[dict[str, Any]]:
        """Those of each ledger."""
        of_ledger = dict(self._by_ledger(broken))
        return [
            found for name, each in self._ledgers.items() for found in each.tables(keyring, of_ledger.get(name, ()))
        ]

    def judged(self, tenants: Collection[str], keyring: Keyring | None) -> Judgement:
        """As in each ledger, by the names of chains."""
        judged: dict[str, Judged] = {}
        broken: dict[str, ArchiveInvalidError] = {}
        for name, some in self._by_ledger(tenants):
            of_ledger, broken_here = self._ledgers[name].judged(some, keyring)
            judged |= {str(ChainName(name, tenant)): each for tenant, each in of_ledger.items()}
            broken |= {str(ChainName(name, tenant)): each for tenant, each in broken_here.items()}
        return judged, broken

    def _at(self, chain: str) -> tuple[OpenPlace, str]:
        name, tenant = ChainName.parse(chain)
        return self._ledgers[name], tenant

    def _by_ledger(self, chains: Collection[str]) -> Iterator[tuple[str | None, list[str]]]:
        """The tenants of these chains by ledger; ledgers without one are left out."""
        found: dict[str | None, list[str]] = {}
        for name, tenant in map(ChainName.parse, sorted(chains)):
            found.setdefault(name, []).append(tenant)
        return iter(found.items())
