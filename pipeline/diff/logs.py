"""Which log a chain is of: two chains of one log that part are two histories of it, and no import mends that.

An import takes events of other logs. What claims to be born in its own, and is not there, it refuses as a forgery.
"""

from __future__ import annotations

from pipeline.diff.chains import Chain, Meeting
from pipeline.source.archives import OpenArchive
from pipeline.source.bundles import OpenBundle
from pipeline.source.postgres import OpenPostgres


def forked_log(a: Chain, b: Chain, meeting: Meeting) -> str | None:
    """The origin of the log that both are of, when they part before the end of the shorter; None when they do not."""
    if meeting.is_one or min(a.last_seq, b.last_seq) < max(a.first_seq, b.first_seq):
        return None
    log = _log_of(a)
    return log if log == _log_of(b) else None


def _log_of(chain: Chain) -> str | None:
    """The origin of its checkpoints but for the tenant; None when its place does not say."""
    place = chain.side.place
    if isinstance(place, OpenArchive):
        return place.archive(chain.tenant_id).newest.log_origin
    if isinstance(place, OpenBundle):
        return place.bundle.manifest.log_origin
    return place.log_origin() if isinstance(place, OpenPostgres) else None
