"""Where entries come from, for every job: places that hold a ledger, cut into pieces that tasks read.

``parse_place`` names a place; ``with place.open() as opened`` holds it in one state on the driver. ``opened.pieces()``
are plain values that travel to tasks, where ``over_pieces`` gives a function each piece and its reader; ``entries`` is
all of them as a DataFrame; ``opened.facts`` is what the place says of a chain as a whole. ``over_numbers`` is for tasks
that read whole files.
"""

from pipeline.source.frames import entries, in_tasks, open_pieces, over_numbers, over_pieces
from pipeline.source.pieces import Facts, OpenPlace, Piece, PieceReader, Place, Times
from pipeline.source.places import parse_place, place_of

__all__ = [
    "Facts",
    "OpenPlace",
    "Piece",
    "PieceReader",
    "Place",
    "Times",
    "entries",
    "in_tasks",
    "open_pieces",
    "over_numbers",
    "over_pieces",
    "parse_place",
    "place_of",
]
