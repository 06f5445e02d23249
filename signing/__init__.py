"""Keys, signed envelopes, batch snapshots and checkpoints: what lets others check the ledger offline.

Formats: docs/formats/keys.md, docs/formats/snapshot.md, docs/formats/checkpoint.md.
"""
