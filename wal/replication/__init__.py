"""Keeping the log of a node on several machines: who may write it, and what of it is committed.

A node proposes (``proposer``), safekeepers accept (``acceptor``); both are pure state machines that are given messages
and answer with messages (``messages``), over a log that is passed in (``file_log``). Sockets, threads and clocks are
with the modules that drive them::

    at a node         election    winning an epoch, and following the log that counts
                      leading     the threads of that: the election over connections, and shipping (``proposer``)
                      wires       the connections to all members
    at a safekeeper   server      threads and connections; ``frames``, ``tls``: one connection
                      safekeeper  conversations about the logs; ``kept_logs``: the logs, opened and closed
                      archive     segments into an archive, and a log back from it
    both              file_log    a copy of a log in files; ``configuration``: the list of members

Rules, each with a test and a mutant of the model (``docs/model``) that fail when it is taken out::

    promise     only an epoch higher than any promised before, or the same one again to the same run of a proposer;
                the log is synced and the promise durable before it is answered
    elect       the best log is the highest (epoch of its last record, its LSN) among a majority of voters and the
                proposer's own; nothing is appended in an epoch before its history was applied, divergent end cut away
    append      a batch is of one epoch and names the position before it; it fits, whole and sound, or nothing is kept
    commit      what a majority of voters and the proposer hold durably, and only with the first record of this epoch
    members     a list with a generation, durable on each; it changes by one member at a time, and only to one of which
                a majority holds what is committed; one that has lost its log has another id, and does not vote
                before it has caught up

Source: Ongaro, "Consensus: Bridging Theory and Practice" (2014), sections 3 and 4, with single-server changes made only
after a commit of the own epoch; and the safekeepers of Neon, which this is a close relative of.
"""
