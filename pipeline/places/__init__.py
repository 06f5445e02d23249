"""Places of a ledger: PostgreSQL, an archive, a bundle. One protocol, with one implementation each.

``parse_place`` parses the name of a place; ``with place.open() as opened`` holds it in one state on the driver.
``opened.pieces()`` are plain values that travel to tasks, where each has a reader. ``opened.facts``, ``judged`` and
``sealed`` describe a chain as a whole. No other module distinguishes kinds of places.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ledger.errors import ConfigurationError
from objects.store import BUCKET_SCHEMES
from pipeline.places.archive import ArchivePlace
from pipeline.places.bundle import BundlePlace
from pipeline.places.postgres import SCHEMES, Dsn, PostgresPlace
from pipeline.places.protocol import Facts, OpenPlace, Piece, PieceReader, Place, Times

__all__ = ["Facts", "OpenPlace", "Piece", "PieceReader", "Place", "Times", "parse_place", "place_of"]


NAMED_BY: Final = {
    "dsn": "a database (postgresql://...)",
    "archive": "an archive (a folder, s3://...)",
    "bundle": "a bundle file",
}
"""Option to the description of its value."""


def place_of(option: str, text: str) -> Place:
    """The place that ``option`` names, one of ``NAMED_BY`` with or without dashes. Nothing is opened yet.

    Raises:
        ConfigurationError: ``text`` names no place of that kind.
    """
    name = option.lstrip("-")
    # The text may hold a password outside a URL.
    refusal = f"{option} takes {NAMED_BY[name]}, and {_shown(text)} is none"
    try:
        place = parse_place(text)
    except ConfigurationError:
        raise ConfigurationError(refusal) from None
    if place.kind != name:
        raise ConfigurationError(refusal)
    return place


def _shown(text: str) -> str:
    return "what it is given" if "=" in text or "@" in text else repr(text)


def parse_place(text: str) -> Place:
    """The place that ``text`` names. Nothing is opened yet.

    A path becomes absolute, as tasks run in other folders.

    Raises:
        ConfigurationError: it names no place.
    """
    scheme, separator, _ = text.partition("://")
    if separator and scheme in SCHEMES:
        return PostgresPlace(Dsn(text))
    if not separator and Path(text).is_file():
        return BundlePlace(Path(text).absolute())
    if separator and scheme in ("file", *BUCKET_SCHEMES):
        return ArchivePlace(text)
    if text and not separator and Path(text).is_dir():
        return ArchivePlace(str(Path(text).absolute()))
    raise ConfigurationError(
        f"{_shown(text)} is no ledger: name a database (postgresql://...), an "
        "archive (a folder, s3://...) or a bundle file"
    )
