"""Stats of running jobs: JSON lines that nodes write, streamed into windows that a report can read.

    closed files ──► lines ──► judged ──► measures ──► a job's window ──► a data centre's window ──► Parquet
    (format in                   └─► rejected: bad, ahead, late ────────────────────────────────────►  (one commit log)
     docs/formats/stats.md)

``run`` streams; ``read`` and ``rejected`` give what was committed, and nothing else.
"""

from pipeline.stats.output import committed_files, read, rejected
from pipeline.stats.stream import Summary, run

__all__ = ["Summary", "committed_files", "read", "rejected", "run"]
