"""The write-ahead log of one node: segments, group commit, recovery, retention.

A folder holds ``LOCK`` (flock, one writer), ``control`` (identity and watermarks), segments ``<20-digit base
lsn>-<epoch>.wal``, ``torn-*`` (copies of tails that recovery cut), ``cut-*`` (copies of ends that truncation cut).
docs/formats/wal.md lists the other files that a node keeps there.

A node writes a log as follows::

    lock = FolderLock(folder)
    found = recovery.recover(folder, node_id)      cuts a torn tail off, or refuses the start
    control.store(folder, ...)                     a higher epoch, durable before its first record
    writer = GroupCommit(Log(folder, epoch=..., next_lsn=found.last_lsn + 1, ...), on_failure=...)
    lsn = writer.append(hlc, record_type, payload)
    writer.durable_lsn >= lsn                      only then may the record be acknowledged

It reads the log with ``reader.read(folder, from_lsn, node_id, upto_lsn)``. The modules::

    format        the bytes of a segment, its batches and records
    segment       the files of the folder: the lock, and how segments are made
    control       the control file, and the history: which epoch wrote from which LSN on
    log           batches to segments: append, rotate, sync; the guard that notices missing files
    queue         records to batches; ``native``: the same in C; ``group_commit``: the writer's thread
    reader        reads batches and records, and checks each; ``recovery``: torn tail or corruption
    truncation    cuts records off a log and keeps copies; reads these copies
    scrub         reads logs at rest again; ``inspect``: verifies and dumps them
    replication   keeping a log on several machines

Always true::

    next_lsn > written_lsn >= durable_lsn        of a log
    durable_lsn >= committed_lsn >= chained_lsn >= signed_lsn     of the control file
    a record is acknowledged  =>  its LSN <= durable_lsn
    damage to synced records stops the start; only records that were never synced are cut
"""
