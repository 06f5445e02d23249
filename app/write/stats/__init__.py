"""The data plane: reports about running jobs, taken at once, kept without promise, read by others as files.

    request ──► edge ──► sampling ──► queue ──► writer thread ──► open file ──► closed file
                strict   under        bounded   no fsync          hidden        whole, never written again
                checks   pressure

Nothing here reaches the WAL, the chain or PostgreSQL, and no failure here is one of the node.
"""
