"""Job analytics over a period: tables, headline numbers and one page, from the entries of any number of tenants.

Entries are read once. What they say of jobs becomes one row a job (``said``, ``fold``), that with the clock of the
report what happened to it and when (``jobs``), and that the tables (``tables``). Who sent them, and what
the ledger recorded of reads, acts and refusals, becomes tables too (``access``). The tables are written as Parquet; the
CSV files, the headline numbers and the page are made from what was written, without Spark.
"""
