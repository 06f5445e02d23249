"""Exporting, verifying and importing bundles in the service. The format is in ``ledger`` and ``signing``."""
