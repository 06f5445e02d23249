"""Many bundles become one a tenant: verified, without duplicates, in HLC order, every conflict kept and told.

::

    take      a task a bundle      verified wholly, its entries behind it            pipeline.merge.taking
    decide    a task a range       sorted by HLC; what becomes of each entry         pipeline.merge.deciding
    link      the driver           one chain a tenant, streamed into a signed file   pipeline.merge.linking

What becomes of an entry is decided by the functions that an import asks (``ledger.bundle.merge``), in the same order.
So the bundle that comes out, imported into an empty ledger, leaves what importing all of them at once would leave.
"""
