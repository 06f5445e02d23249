"""The pure part of the bundle format: container, rows, and the rules for merging bundles.

The service merges bundles into its chains and the pipeline merges them into another bundle; both decide about each
entry with the same functions. Signatures and files are in ``signing.bundle``.
"""
