"""Benchmarks: each row compares what we do with what it could cost at the least, on one machine in one run.

Rules that hold for every row:

    settings     the service's defaults; PostgreSQL with fsync and synchronous_commit on, the same server for both
    disk         one folder on one file system that is not in memory, for both; its fsync p50 is reported
    order        ours, against, ours, against, ...: five of each, or three; see benchmarks/README.md for the ratio
    state        a fresh database and a fresh folder each time, a checkpoint before each
    honesty      after each run entries are counted, fsyncs are counted, and chains are verified; else the row fails

``benchmarks/README.md`` says what each row compares.
"""
