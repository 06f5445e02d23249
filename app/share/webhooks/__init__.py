"""Receivers of entries: the ledger delivers to them in order, signed, until they confirm (docs/webhooks.md)."""
