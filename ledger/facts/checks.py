"""The checks of ``/readyz``: what each is about, what it stops while it fails, and what to do then.

To add one:

1. declare it here, and run ``make facts``
2. compute it in ``app.node.readiness``: in ``readiness_checks`` if it stops something, else in ``reported_checks``
3. give it a section of its name in docs/runbook.md
4. in deploy/prometheus/alerts.yml a check that stops something is named in ``NotReady`` and excluded from
   ``CheckFailing``, which covers all others but those that have an alert of their own
"""

from enum import Enum, auto
from typing import Final, NamedTuple


class Stops(Enum):
    """What the node does not do while a check fails."""

    NOTHING = auto()
    READINESS = auto()
    """It is not ready, and takes events all the same."""
    BEYOND_LOCAL = auto()
    """It is not ready, and takes events at LOCAL alone."""
    WRITES = auto()
    """It is not ready, and takes no event."""


class Check(NamedTuple):
    """One check."""

    name: str
    title: str
    remedy: str
    """What to do, for a person at the console; docs/runbook.md has more."""
    stops: Stops = Stops.NOTHING
    is_grave: bool = False
    """Whether it says that what is on record was changed, or may have been."""
    names_tenants: bool = False
    """Whether its detail names tenants, which not every caller may read."""


CHECKS: Final = (
    Check(
        "accepting",
        "Taking requests",
        "The node stops. If it stays so for more than a minute, look at its log: stop_overdue says what holds it up.",
        stops=Stops.WRITES,
    ),
    Check(
        "writer",
        "Writer",
        "The node has stopped writing and its callers get 503. Free space on the disk of the WAL, or use another "
        "node if the detail says fenced; then restart this one. Nothing that was acknowledged is lost.",
        stops=Stops.WRITES,
    ),
    Check(
        "database",
        "PostgreSQL",
        "PostgreSQL does not answer. Events are still taken and durable at LOCAL until the backlog is full; "
        "nothing is lost. Bring PostgreSQL back: chaining goes on by itself.",
        stops=Stops.BEYOND_LOCAL,
    ),
    Check(
        "chaining",
        "Chaining",
        "Durable events are not chained, for the reason given. They wait in the WAL and are chained once it is "
        "gone. Look at PostgreSQL: its disk, its locks, its log.",
        stops=Stops.BEYOND_LOCAL,
    ),
    Check(
        "backlog",
        "Backlog",
        "More events wait to be chained than may; new ones are refused with 503. See to PostgreSQL first. Clients "
        "that repeat with the same Idempotency-Key lose nothing.",
        stops=Stops.WRITES,
    ),
    Check(
        "quorum",
        "Safekeepers",
        "Too few safekeepers hold what is written, so nothing is committed. Bring members back: tally safekeeper "
        "status HOST:PORT shows each.",
        stops=Stops.BEYOND_LOCAL,
    ),
    Check(
        "system",
        "Record of the ledger",
        "The chain of tenant _system is damaged and takes no entry, so tokens, keys and acts of operators cannot "
        "be recorded: what needs such an entry is refused. Bring its rows back from an archive, a bundle or a "
        "backup, then restart the node.",
        stops=Stops.READINESS,
    ),
    Check(
        "checkpoints",
        "Kept checkpoints",
        "Checkpoints, or the control file, cannot be kept beside the WAL, so a rollback of the database might go "
        "unseen. Look at the disk of the data folder, and at the rights on it.",
        stops=Stops.READINESS,
    ),
    Check(
        "signing",
        "Signing",
        "Snapshots are not signed now. Events are taken and chained; signatures follow when the signer is back. "
        "Look at the key file, or at the KMS that signing.key_uri names; at what keeps PostgreSQL from storing "
        "checkpoints, where that is said.",
    ),
    Check(
        "admission",
        "Admission",
        "The keys of this node are not admitted, so what it signs does not count. On a node that is: tally keys "
        "list, compare the id with this node's, tally keys admit ID.",
    ),
    Check(
        "keys",
        "Key history",
        "The chain of keys in _system does not hold as it stands: somebody may have edited it. Do not rotate or "
        "admit keys. Verify tenant _system and compare with a bundle that was kept elsewhere.",
        is_grave=True,
    ),
    Check(
        "database_role",
        "Database role",
        "The service logs in with a role that could change what the ledger guards. Give it the role that "
        "deploy/postgres/roles.sql makes.",
    ),
    Check(
        "authentication",
        "Authentication",
        "Tokens were issued and nobody is asked for one: whoever reaches this address may do everything. Set "
        "auth.mode to tokens and restart the node.",
    ),
    Check(
        "tls",
        "TLS",
        "Mend the certificate, or set tls.cert and tls.key (or http.trusted_proxies): tokens that travel in the "
        "clear are everybody's on the way.",
    ),
    Check(
        "clock",
        "Clock",
        "The clock of this machine and that of PostgreSQL differ, or both stood too high before. Set them right "
        "(NTP); until they are, or come to where they stood, new events have the times of the ledger's own clock.",
    ),
    Check(
        "breaks",
        "Breaks in chains",
        "Stored rows are not what was chained; the detail says which part of the node met them. Keep the database "
        "as it is, verify the tenant here, and compare with a bundle or a backup. It stays red until the rows are "
        "restored, a whole verification is valid, and somebody has acknowledged the break; the detail says which "
        "is missing.",
        is_grave=True,
        names_tenants=True,
    ),
    Check(
        "lost",
        "Lost records",
        "Records that were answered are lost with a log that was given up or damaged. The detail and the entries "
        "WAL_LOST of _system name them. Tell those whose jobs they are, then: tally verify --tenant _system "
        "--acknowledge REASON.",
        names_tenants=True,
    ),
    Check(
        "unchained",
        "Logs left behind",
        "Another node's log holds records that nobody has chained. If that node does not run any more, take its "
        "log over as the detail says; docs/runbook.md says more.",
    ),
    Check(
        "tenants",
        "Damaged tenants",
        "These tenants are quarantined: their rows are damaged and their new events wait in the WAL. Verify the "
        "tenant, restore its rows from a backup, restart. Other tenants are not affected.",
        is_grave=True,
        names_tenants=True,
    ),
    Check(
        "scrub",
        "Log on disk",
        "A segment of this node's log is damaged on its disk. The node serves on. Look at the disk, and see "
        "docs/runbook.md before the next restart: without safekeepers that vote, a start from this folder is "
        "refused.",
    ),
    Check(
        "locks",
        "Locked rows",
        "Another session keeps rows of these tenants locked. Find it in pg_stat_activity and end it; chaining "
        "goes on by itself.",
        names_tenants=True,
    ),
    Check(
        "privacy",
        "Private fields",
        "Private fields cannot be encrypted here, so events that have some are refused. Look at "
        "privacy.master_key_uri and at the rows that the detail names.",
        names_tenants=True,
    ),
    Check(
        "job_table",
        "Table of jobs",
        "The table of jobs does not follow the chain. A job is still read right, only slower; lists are refused, "
        "or behind. The detail says what PostgreSQL answered.",
    ),
    Check(
        "exchange",
        "Exchange",
        "Another ledger cannot be imported from. The page Replicas names the peer and why; entries come in by "
        "themselves once it answers.",
    ),
    Check(
        "replicas",
        "Replicas of the database",
        "Hot standbys of database_replica_urls answer no reads, so the primary answers them all. The detail names "
        "each and why: its address or login is wrong, it is down, or it holds another ledger.",
    ),
    Check(
        "witnesses",
        "Witnesses",
        "A witness of log.policy does not cosign, or has seen more or other entries of a log. The node works "
        "on; entries that too few witnesses cover are below the quorum. tally witness status names each log.",
        names_tenants=True,
    ),
    Check(
        "archive",
        "Archive",
        "The archive is not filled, or not of all tenants. Nothing is lost: what is not archived waits in the database "
        "and does not leave it. Mend the place or its credentials; tally archive status names tenants and reasons.",
        names_tenants=True,
    ),
    Check(
        "rows",
        "Rows that do not hold",
        "Rows of these tenants are broken, so nothing further of them is signed. Verify the tenant to see which; "
        "restore them from a backup.",
        is_grave=True,
        names_tenants=True,
    ),
    Check(
        "watch",
        "Newest entries",
        "The newest entries of these tenants are covered by no checkpoint of an admitted key. The node that "
        "writes them is down, not admitted or cannot store checkpoints, or they were changed.",
        is_grave=True,
        names_tenants=True,
    ),
    Check(
        "issuer",
        "Issuer of tokens",
        "The issuer's keys cannot be fetched. Known ones count for an hour; tokens of the ledger go on counting. "
        "Look at auth.oidc.issuer.",
    ),
)
