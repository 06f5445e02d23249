"""Where a ledger is: in PostgreSQL, in an archive, in a bundle. One protocol, and one implementation of it each.

``parse_place`` names a place; ``with place.open() as opened`` holds it in one state on the driver. ``opened.pieces()``
are plain values that travel to tasks, where each has a reader; ``opened.facts``, ``judged`` and ``sealed`` are what the
place says of a chain as a whole. Nobody else asks which kind of place it is.
"""

from pipeline.places.naming import parse_place, place_of
from pipeline.places.protocol import Facts, OpenPlace, Piece, PieceReader, Place, Times

__all__ = ["Facts", "OpenPlace", "Piece", "PieceReader", "Place", "Times", "parse_place", "place_of"]
