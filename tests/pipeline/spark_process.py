"""Programs that start a Spark of their own, forked from a process that has imported what such a program imports."""

from __future__ import annotations

import importlib
import os
import sys

IMPORTED = "from tests.pipeline.spark_process import import_all; import_all()"
"""What has run where they are forked from."""
PIPELINE = "from tests.pipeline.spark_process import pipeline; pipeline()"
"""``tally pipeline`` with the arguments of the program."""


def import_all() -> None:
    """Import what commands import, without a thread that a fork would lose."""
    from pipeline.task_daemon import prepare

    prepare()
    for name in ("pyspark.sql", "pyspark.testing.utils", "pipeline.cli"):
        importlib.import_module(name)


def pipeline() -> None:
    """Run a command in a session of its own, with all that Spark starts."""
    from pipeline.cli import main

    os.setsid()
    sys.argv[0] = "tally pipeline"
    main()
