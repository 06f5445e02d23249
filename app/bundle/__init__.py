"""Bundles: a tenant's ledger, or a range of it, in one file that anybody can verify with the public keys alone.

The format, reading, writing and verifying know neither the service nor a database; only the export does.
"""
