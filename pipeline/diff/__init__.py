"""Two ledgers compared: what each has that the other lacks, and bundles that bring it there.

::

    chains    the driver    are both the same log? trees are compared, from what is stored     pipeline.diff.chains
    blocks    Spark         the hashes of a tree that is not stored, from rows                 pipeline.diff.blocks
    events    Spark         sets of events, by digests of HLC ranges, then by rows             pipeline.diff.events
    cover     the driver    ranges of seqs that hold what the other lacks                      pipeline.diff.repair
    endings   the driver    where such a range may end, so that a checkpoint covers it         pipeline.diff.repair
    repair    the driver    those ranges as signed bundles                                     pipeline.diff.repair

Two chains that have one tree are one history, whatever is in their rows; ``tally pipeline verify`` says whether rows
are what their tree says. Chains of other logs never have one tree, but may hold the same events: those are compared as
sets.
"""
