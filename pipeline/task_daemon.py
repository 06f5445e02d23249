"""The process that Spark forks Python workers from, on this machine: it imports what tasks use, once for all of them.

Spark's own (``pyspark.daemon``) imports nothing before it forks, for what is imported may start threads, which a fork
leaves behind; so each worker spends half a second on imports. Here what would start them is told not to.
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
    """Import what tasks use; what forked processes share is nothing for their collectors to go through."""
    os.environ.update(THREADLESS)
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    from pyspark.daemon import manager

    prepare()
    manager()
