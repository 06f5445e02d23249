"""The data pipeline on Spark: verify, archive, merge, diff, report and stats at scale.

A job is a function from DataFrames to DataFrames in a folder of its own, with a thin command in ``pipeline.cli``.
Rows are read where they are checked: a task opens its own connection or file, and what crosses to the driver is small.
"""
