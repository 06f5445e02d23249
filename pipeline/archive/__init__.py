"""Archives: chained, signed ranges of a ledger as Parquet files under signed manifests, written once and for all.

The format is described in docs/formats/archive.md.
"""
