"""The data pipeline on Spark: verify, archive, merge, diff, report and stats at scale.

Each job is a folder that imports no other job, with a thin command in ``pipeline.cli``. A job takes a Spark session
and places. Its tasks read and check the rows, and the driver combines their results. A task opens its own connection
or file, so little data crosses to the driver. The parts of a job that go from DataFrames to DataFrames are functions
of their own, for notebooks.

A node uses the packages that read and write archives (``archive``, ``archiving``, ``places``), and the form of pages
(``page``), which start no Spark.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

NEEDED: Final = ("adbc_driver_postgresql", "boto3", "pandas", "pyarrow", "pyiceberg", "pyspark")
"""Packages of others, which ``tallystick[pipeline]`` installs."""
PROGRESS_VARIABLE: Final = "TALLY_PIPELINE_PROGRESS"
"""When set, a command writes lines on its progress to standard error, each behind ``PROGRESS``, and ends once nobody
reads them any more."""
PROGRESS: Final = "progress: "


def is_installed() -> bool:
    """Whether all packages are there that a command needs."""
    return all(find_spec(each) is not None for each in NEEDED)
