"""Bundles: a tenant's ledger, or a range of it, in one file that anyone can verify with the public keys alone.

This package depends on neither the service nor a database nor an event loop.
"""
