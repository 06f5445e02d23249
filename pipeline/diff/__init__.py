"""Two ledgers compared: what each has that the other lacks, and bundles that bring it there.

::

    chains    the driver    are both one history? stored links are compared, a few of each     pipeline.diff.chains
    links     Spark         the same by links that are computed from every row                 pipeline.diff.links
    events    Spark         sets of events, joined by their ids                                pipeline.diff.events
    cover     the driver    ranges of seqs that hold what the other lacks                      pipeline.diff.repair
    endings   the driver    where such a range may end, so that a checkpoint covers it         pipeline.diff.repair
    repair    the driver    those ranges as signed bundles                                     pipeline.diff.repair

Two chains that have one link are one history up to it, whatever is in their rows; ``tally pipeline verify`` says
whether rows are what their links say. Chains of other logs never have one link, but may hold the same events: those are
compared as sets.
"""
