"""Verification of whole ledgers, archives and many bundles on Spark, with the verdict that the service gives.

``verify`` of a database or an archive, and ``verify_bundles``, give ``Verified``: verdict objects, verdicts and breaks
as DataFrames. Rows of a ledger never leave the task that reads them::

    1. the driver plans: pieces of every tenant, and what is said of each chain as a whole
    2. a task a piece: checks its rows in one pass; hands on a summary, breaks, and the jobs as far as it folded them
    3. by job: states merged and compared with the stored ones
    4. by tenant: summaries folded into the verdict
    5. ranges that were checked on an assumption that was wrong are checked again; only tampering makes that happen

The verdict is the service's own, since both feed the same checks in ``ledger``.
"""

from pipeline.verify.bundles import verify_bundles
from pipeline.verify.job import BREAKS_DDL, VERDICTS_DDL, Verified, verify

__all__ = ["BREAKS_DDL", "VERDICTS_DDL", "Verified", "verify", "verify_bundles"]
