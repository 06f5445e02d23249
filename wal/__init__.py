"""The write-ahead log of one node: segments, group commit, recovery, retention.

A folder holds ``LOCK`` (flock, one writer), ``control`` (identity and watermarks), segments ``<20-digit base
lsn>-<epoch>.wal``, ``torn-*`` (what recovery cut, kept), ``cut-*`` (what truncation cut, kept). The other files that
a node keeps there are listed in docs/formats/wal.md. ``wal.format`` opens with the bytes of a segment,
``wal.control`` with those of the control file, which also has the history of the epochs (``wal.history``).

Order at start: ``folder.FolderLock``, ``control.load``, ``recovery.recover``, a higher epoch into
``control.store``, ``group_commit.GroupCommit``, which appends to a ``log.Log``. Always true::

    next_lsn > written_lsn >= durable_lsn        of a log
    durable_lsn >= committed_lsn >= chained_lsn >= signed_lsn     of the control file
    a record is acknowledged  =>  its LSN <= durable_lsn
    damage at or below what was synced stops the start; only what was never synced is cut
"""
