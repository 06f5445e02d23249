"""Keys, signed envelopes, batch snapshots and checkpoints: they let others verify the ledger offline.

Formats: docs/formats/keys.md, docs/formats/snapshot.md, docs/formats/checkpoint.md.
"""
