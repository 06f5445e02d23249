"""A database and its archive as one place: what left comes from the archive, all else from the database."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ledger.errors import ArchiveInvalidError, InvalidInputError
from pipeline.archive.joined import ArchivedPart
from pipeline.places.protocol import ChainName, Facts, Judgement, OpenPlace, Piece, PieceReader, Sealed, Times
from signing.keys import Keyring


class OpenJoined(OpenPlace):
    """An open database with its archive. Nothing is verified, but that they belong together."""

    is_copy = False
    file: Path | None = None

    def __init__(self, database: OpenPlace, archive: OpenPlace) -> None:
        self._database, self._archive = database, archive

    def __str__(self) -> str:
        return f"{self._database} with {self._archive}"

    def tenants(self) -> list[str]:
        """Those of the database."""
        return self._database.tenants()

    def tenants_among(self, tenants: Sequence[str]) -> Collection[str]:
        """Those of the database."""
        return self._database.tenants_among(tenants)

    def ledgers(self) -> Mapping[str | None, OpenPlace]:
        """Those of the database, without their archives."""
        return self._database.ledgers()

    def pieces_of(
        self, tenants: Sequence[str], rows_a_piece: int, from_seq: int | None, to_seq: int | None, times: Times
    ) -> list[Piece]:
        """What left, by the files of the archive, and the rest.

        Raises:
            ArchiveInvalidError: the archive does not have all that left, or is that of another log.
        """
        floors = self._database.floors(tenants)
        of_database: dict[str, list[Piece]] = {}
        for piece in self._database.pieces_of(tenants, rows_a_piece, from_seq, to_seq, times):
            of_database.setdefault(piece.chain, []).append(piece)
        found: list[Piece] = []
        for chain in tenants:
            rest = of_database.get(chain, [])
            floor_seq = floors[chain].to_seq if chain in floors else 0
            left_to = floor_seq if to_seq is None else min(floor_seq, to_seq)
            if left_to >= (from_seq or 1):
                self._refuse_unfit(chain, floor_seq)
                found += self._archive.pieces_of([chain], rows_a_piece, from_seq, left_to, times)
                rest = [replace(piece, is_first=False) for piece in rest]
            found += rest
        return found

    def reader(self, piece: Piece) -> PieceReader:
        """That of the place which has the piece."""
        return (self._archive if hasattr(piece.where, "file") else self._database).reader(piece)

    def facts(self, tenant_id: str) -> Facts:
        """Those of the database."""
        return self._database.facts(tenant_id)

    def log_origin(self, tenant_id: str) -> str | None:
        """That of the database."""
        return self._database.log_origin(tenant_id)

    def sealed(self, tenant_id: str) -> Sequence[Sealed]:
        """Those of the database."""
        return self._database.sealed(tenant_id)

    def judged(self, tenants: Collection[str], keyring: Keyring | None) -> Judgement:
        """Raises InvalidInputError: each is verified by itself, and the verdicts are joined (``verify_joined``)."""
        raise InvalidInputError("a database and its archive are verified by verify_joined")

    def _refuse_unfit(self, chain: str, left_to: int) -> None:
        tenant_id, origin = ChainName.parse(chain).tenant_id, self._database.log_origin(chain)
        is_there = chain in self._archive.tenants()
        part = ArchivedPart(
            tenant_id, str(self._archive), self._archive.manifests(chain) if is_there else (), {} if is_there else None
        )
        log = None if origin is None else f"{origin}/{tenant_id}"
        if (refusal := part.refusal({"to_seq": left_to, "manifest": None}, log)) is not None:
            raise ArchiveInvalidError(f"tenant {tenant_id}: {refusal.detail}", refusal.seq)
