"""The bundle format as far as it is a matter of values: container, rows, and the rules by which bundles are merged.

Whoever merges bundles, the service into its chains or the pipeline into one more bundle, asks the same functions what
becomes of each entry. What is signed, and files, are in ``signing.bundle``.
"""
