"""Keeps the log of a node on several machines: decides which process may write it, and which records are committed.

A node proposes (``proposer``), safekeepers accept (``acceptor``); both are pure state machines that receive messages
and answer with messages (``messages``), over a log that is passed in (``file_log``). Sockets, threads and clocks are
in the modules that drive them::

    at a node         election    winning an epoch, and following the elected log
                      leading     its threads: the election over connections, and shipping (``proposer``)
                      wires       the connections to all members
    at a safekeeper   server      threads and connections; ``frames``, ``tls``: one connection
                      safekeeper  conversations about the logs; ``kept_logs``: the logs, opened and closed
                      archive     archives segments, and restores a log from the archive
    both              file_log    a copy of a log in files; ``configuration``: the list of members

Rules; each has a test and a mutant of the model (``docs/model``) that fail if the rule is removed::

    promise     only an epoch higher than any promised before, or the same one again to the same run of a proposer;
                the log is synced and the promise durable before it is answered
    elect       the best log is the highest (epoch of its last record, its LSN) among a majority of voters and the
                proposer's own; nothing is appended in an epoch before its history was applied, divergent end cut away
    append      a batch is of one epoch and names the position before it; it fits, whole and sound, or nothing is kept
    commit      records that a majority of voters and the proposer hold durably, once one of them is of this epoch
    members     a list with a generation, durable on each; it changes by one member at a time, and only to a list of
                which a majority holds all committed records; a member that has lost its log gets a new id, and does
                not vote before it has caught up

Source: Ongaro, "Consensus: Bridging Theory and Practice" (2014), sections 3 and 4, with single-server changes only
after a commit of the own epoch; and the safekeepers of Neon, of which this is a close relative.
"""
