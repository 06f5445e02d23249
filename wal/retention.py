"""Removing segments that nobody needs any more, oldest first.

Always true afterwards::

    the last segment is there
    the segments that are there follow one another without a gap
    every record above upto_lsn is there
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from wal.segment import list_segments, sync_folder


def remove_segments(
    folder: Path, upto_lsn: int, older_than_s: float, now_s: float, retire: Callable[[str], None] = lambda _: None
) -> list[str]:
    """Remove segments that end at or below ``upto_lsn`` and were last written ``older_than_s`` ago; their names.

    ``upto_lsn`` MUST be chained and signed. ``now_s`` is seconds since 1970, as the file system counts them. ``retire``
    is told each name before it goes: the writer's, where one is at work. A crash in the middle leaves fewer removed.
    """
    segments = list_segments(folder)
    removed = []
    for segment, follower in pairwise(segments):
        written_s = segment.path.stat().st_mtime
        if follower.base_lsn - 1 > upto_lsn or written_s > now_s - older_than_s:
            break
        retire(segment.name)
        segment.path.unlink()
        removed.append(segment.name)
        sync_folder(folder)
    return removed
