"""The write path: submit (edge to WAL), appender (WAL to chain), notary (chain to signed heads).

Positions only ever move in this order, and nothing is acknowledged before the level asked for::

    written >= durable >= committed >= chained        (LSNs of this node)
    chained_seq >= tree size >= signed_seq            (per tenant)
"""
