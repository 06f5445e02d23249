"""The data pipeline on Spark: verify, archive, merge, diff, report and stats at scale.

A job is a folder of its own, which knows no other job, with a thin command in ``pipeline.cli``. It takes a session of
Spark and the places to work on, has tasks read and judge the rows, and puts together on the driver what they hand on.
Rows are read where they are checked: a task opens its own connection or file, and what crosses to the driver is small.
The parts of a job that go from DataFrames to DataFrames are functions of their own, for notebooks.
"""
