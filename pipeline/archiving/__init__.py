"""Archiving a ledger: what is chained and signed of it gets into an archive, in rounds, and nothing twice."""
