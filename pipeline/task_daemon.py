"""The process from which Spark forks local Python workers; it imports the modules of tasks once for all workers.

Spark's own (``pyspark.daemon``) imports nothing before it forks, as an import may start threads, which a fork loses;
so each worker spends half a second on imports. This daemon disables these threads.
"""

from __future__ import annotations

import gc
import importlib
import os
from typing import Final

THREADLESS: Final = {"JE_ARROW_MALLOC_CONF": "background_thread:false", "OMP_NUM_THREADS": "1"}
"""Environment in which neither Arrow's allocator nor NumPy starts a thread when it is imported."""
IMPORTED: Final = (
    *("pyspark.worker", "pyarrow.compute", "pipeline.places", "pipeline.source", "pipeline.verify.tasks"),
    *("pipeline.archiving.filing", "pipeline.report.jobs"),
)


def prepare() -> None:
    """Import the modules of tasks, and exclude these shared objects from garbage collection in forked processes."""
    os.environ.update(THREADLESS)
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    from pyspark.daemon import manager

    prepare()
    manager()
