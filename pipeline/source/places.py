"""What a user names a ledger by: the URL of a database, an archive, or a bundle file."""

from __future__ import annotations

import re
from pathlib import Path

from ledger.errors import ConfigurationError
from pipeline.archive.store import BUCKET_SCHEMES
from pipeline.source.archives import ArchivePlace
from pipeline.source.bundles import BundlePlace
from pipeline.source.pieces import Place
from pipeline.source.postgres import SCHEMES, Dsn, PostgresPlace


def parse_place(text: str) -> Place:
    """The place that ``text`` names. Nothing is opened yet.

    Raises:
        ConfigurationError: it is none.
    """
    scheme, separator, _ = text.partition("://")
    if separator and scheme in SCHEMES:
        return PostgresPlace(Dsn(text))
    if not separator and Path(text).is_file():
        return BundlePlace(Path(text))
    if (separator and scheme in ("file", *BUCKET_SCHEMES)) or (text and not separator and Path(text).is_dir()):
        return ArchivePlace(text)
    raise ConfigurationError(
        f"{_without_password(text)!r} is no ledger: name a database (postgresql://...), an "
        "archive (a folder, s3://...) or a bundle file"
    )


def _without_password(text: str) -> str:
    """``text`` without what may be a login, or follows the word."""
    head, at, tail = text.rpartition("@")
    scheme, separator, _ = head.partition("://")
    shown = f"{scheme if separator else ''}{separator}…@{tail}" if at else text
    found = re.search("password", shown, re.IGNORECASE)
    return f"{shown[: found.end()]}…" if found else shown
