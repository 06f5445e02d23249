"""What the service does with bundles: exporting, verifying, importing. The format is in ``ledger`` and ``signing``."""
