"""The write-ahead log of one node: segments, group commit, recovery, retention.

A folder holds ``LOCK`` (flock, one writer), ``control`` (identity and watermarks), segments ``<20-digit base
lsn>-<epoch>.wal``, ``torn-*`` (what recovery cut, kept), ``cut-*`` (what truncation cut, kept). The other files that
a node keeps there are listed in docs/formats/wal.md.

A node writes a log so::

    lock = FolderLock(folder)
    found = recovery.recover(folder, node_id)      cuts a torn tail off, or refuses the start
    control.store(folder, ...)                     a higher epoch, durable before its first record
    writer = GroupCommit(Log(folder, epoch=..., next_lsn=found.last_lsn + 1, ...), on_failure=...)
    lsn = writer.append(hlc, record_type, payload)
    writer.durable_lsn >= lsn                      only then may the record be acknowledged

and reads it with ``reader.read(folder, from_lsn, node_id, upto_lsn)``. Where things are::

    format        the bytes of a segment, its batches and records
    segment       the files of the folder: the lock, and how segments are made
    control       the control file, and the history: which epoch wrote from which LSN on
    log           batches to segments: append, rotate, sync; the guard that notices missing files
    queue         records to batches; ``native``: the same in C; ``group_commit``: the writer's thread
    reader        batches and records back, each checked; ``recovery``: torn tail or corruption
    truncation    what leaves a log, and is kept; reading that again
    scrub         reading logs again at rest; ``inspect``: verifying and dumping them
    replication   keeping a log on several machines

Always true::

    next_lsn > written_lsn >= durable_lsn        of a log
    durable_lsn >= committed_lsn >= chained_lsn >= signed_lsn     of the control file
    a record is acknowledged  =>  its LSN <= durable_lsn
    damage at or below what was synced stops the start; only what was never synced is cut
"""
