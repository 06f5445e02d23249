"""The data pipeline on Spark: verify, archive, merge, diff, report and stats at scale.

Each job is a folder that imports no other job, with a thin command in ``pipeline.cli``. A job takes a Spark session
and places. Its tasks read and check the rows, and the driver combines their results. A task opens its own connection
or file, so little data crosses to the driver. The parts of a job that go from DataFrames to DataFrames are functions
of their own, for notebooks.

A node uses the packages that read and write archives (``archive``, ``archiving``, ``places``), and the form of pages
(``page``), which start no Spark.
"""
