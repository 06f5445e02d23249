"""Verification of whole ledgers, archives and many bundles on Spark, with the verdict that the service gives.

``verify`` of an open place gives ``Verified``: verdict objects, and verdicts and breaks as DataFrames.
"""

from pipeline.verify.job import BREAKS_DDL, Verified, verify

__all__ = ["BREAKS_DDL", "Verified", "verify"]
