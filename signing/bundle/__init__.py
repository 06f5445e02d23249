"""Bundles: a tenant's ledger, or a range of it, in one file that anybody can verify with the public keys alone.

Writing, reading and judging them knows neither the service nor a database nor an event loop.
"""
