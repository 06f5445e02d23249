"""The replication of a log, simulated: the protocol is the real code; network, disks, clocks and PostgreSQL are not.

One seed decides everything. Processes are event loops of their own on simulated time (``world``): safekeepers
(``member``) and runs of one node at several sites (``site``), over a network that delays, loses, repeats and cuts
(``network``), on disks that forget what was not synced (``disk``), chaining into one database (``database``). What must
hold is judged by an ``oracle`` that knows nothing of the protocol; ``scenario`` draws what goes wrong.
"""
