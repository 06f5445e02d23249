// What to do about what `/readyz` and verification tell of. Every check and every kind of break has its line here.

/** Checks by name: what it is about, and what to do when it is red. docs/runbook.md has more of each. */
export const CHECKS = {
  accepting: [
    "Taking requests",
    "The node stops. If it stays so for more than a minute, look at its log: stop_overdue says what holds it up.",
  ],
  writer: [
    "Writer",
    "The node has stopped writing and its callers get 503. Free space on the disk of the WAL, or use another node if the detail says fenced; then restart this one. Nothing that was acknowledged is lost.",
  ],
  database: [
    "PostgreSQL",
    "PostgreSQL does not answer. Events are still taken and durable at LOCAL until the backlog is full; nothing is lost. Bring PostgreSQL back: chaining goes on by itself.",
  ],
  chaining: [
    "Chaining",
    "Durable events are not chained, for the reason given. They wait in the WAL and are chained once it is gone. Look at PostgreSQL: its disk, its locks, its log.",
  ],
  backlog: [
    "Backlog",
    "More events wait to be chained than may; new ones are refused with 503. See to PostgreSQL first. Clients that repeat with the same Idempotency-Key lose nothing.",
  ],
  quorum: [
    "Safekeepers",
    "Too few safekeepers hold what is written, so nothing is committed. Bring members back: tally safekeeper status HOST:PORT shows each.",
  ],
  system: [
    "Record of the ledger",
    "The chain of tenant _system is damaged and takes no entry, so tokens, keys and acts of operators cannot be recorded: what needs such an entry is refused. Bring its rows back from an archive, a bundle or a backup, then restart the node.",
  ],
  checkpoints: [
    "Kept checkpoints",
    "Checkpoints, or the control file, cannot be kept beside the WAL, so a rollback of the database might go unseen. Look at the disk of the data folder, and at the rights on it.",
  ],
  signing: [
    "Signing",
    "Snapshots are not signed now. Events are taken and chained; signatures follow when the signer is back. Look at the key file, or at the KMS that signing.key_uri names; at what keeps PostgreSQL from storing checkpoints, where that is said.",
  ],
  admission: [
    "Admission",
    "The keys of this node are not admitted, so what it signs does not count. On a node that is: tally keys list, compare the id with this node's, tally keys admit ID.",
  ],
  keys: [
    "Key history",
    "The chain of keys in _system does not hold as it stands: somebody may have edited it. Do not rotate or admit keys. Verify tenant _system and compare with a bundle that was kept elsewhere.",
  ],
  database_role: [
    "Database role",
    "The service logs in with a role that could change what the ledger guards. Give it the role that deploy/postgres/roles.sql makes.",
  ],
  authentication: [
    "Authentication",
    "Tokens were issued and nobody is asked for one: whoever reaches this address may do everything. Set auth.mode to tokens and restart the node.",
  ],
  tls: [
    "TLS",
    "Mend the certificate, or set tls.cert and tls.key (or http.trusted_proxies): tokens that travel in the clear are everybody's on the way.",
  ],
  clock: [
    "Clock",
    "The clock of this machine and that of PostgreSQL differ, or both stood too high before. Set them right (NTP); until they are, or come to where they stood, new events have the times of the ledger's own clock.",
  ],
  breaks: [
    "Breaks in chains",
    "Stored rows are not what was chained; the detail says which part of the node met them. Keep the database as it is, verify the tenant here, and compare with a bundle or a backup. It stays red until the rows are restored, a whole verification is valid, and somebody has acknowledged the break; the detail says which is missing.",
  ],
  lost: [
    "Lost records",
    "Records that were answered are lost with a log that was given up or damaged. The detail and the entries WAL_LOST of _system name them. Tell those whose jobs they are, then: tally verify --tenant _system --acknowledge REASON.",
  ],
  unchained: [
    "Logs left behind",
    "Another node's log holds records that nobody has chained. If that node does not run any more, take its log over as the detail says; docs/runbook.md says more.",
  ],
  tenants: [
    "Damaged tenants",
    "These tenants are quarantined: their rows are damaged and their new events wait in the WAL. Verify the tenant, restore its rows from a backup, restart. Other tenants are not affected.",
  ],
  scrub: [
    "Log on disk",
    "A segment of this node's log is damaged on its disk. The node serves on. Look at the disk, and see docs/runbook.md before the next restart: without safekeepers that vote, a start from this folder is refused.",
  ],
  locks: [
    "Locked rows",
    "Another session keeps rows of these tenants locked. Find it in pg_stat_activity and end it; chaining goes on by itself.",
  ],
  privacy: [
    "Private fields",
    "Private fields cannot be encrypted here, so events that have some are refused. Look at privacy.master_key_uri and at the rows that the detail names.",
  ],
  job_table: [
    "Table of jobs",
    "The table of jobs does not follow the chain. A job is still read right, only slower; lists are refused, or behind. The detail says what PostgreSQL answered.",
  ],
  exchange: [
    "Exchange",
    "Another ledger cannot be imported from. The page Replicas names the peer and why; entries come in by themselves once it answers.",
  ],
  replicas: [
    "Replicas of the database",
    "Hot standbys of database_replica_urls answer no reads, so the primary answers them all. The detail names each and why: its address or login is wrong, it is down, or it holds another ledger.",
  ],
  rows: [
    "Rows that do not hold",
    "Rows of these tenants are broken, so nothing further of them is signed. Verify the tenant to see which; restore them from a backup.",
  ],
  watch: [
    "Newest entries",
    "The newest entries of these tenants are covered by no checkpoint of an admitted key. The node that writes them is down, not admitted or cannot store checkpoints, or they were changed.",
  ],
  issuer: [
    "Issuer of tokens",
    "The issuer's keys cannot be fetched. Known ones count for an hour; tokens of the ledger go on counting. Look at auth.oidc.issuer.",
  ],
};

/** Checks without which the node is not ready; the others are told of while it is. */
export const STOPPING = new Set(["accepting", "writer", "database", "chaining", "backlog", "quorum", "system", "checkpoints"]);

/** Of these, those without which it takes no event whatever its level. */
export const NO_WRITES = new Set(["accepting", "writer", "backlog"]);

/** And those without which it takes events at LOCAL alone. */
export const LOCAL_ALONE = new Set(["database", "chaining", "quorum"]);

/** Checks that say that what is on record was changed, or may have been. */
export const GRAVE = new Set(["breaks", "tenants", "rows", "watch", "keys"]);

/** Kinds of break: what was found, in words. */
export const BREAKS = {
  gap: "An entry is missing: it was removed, or never stored.",
  "duplicate-seq": "Two entries have one place in the chain.",
  "payload-digest": "The content of the entry was changed: it no longer has the digest that was stored with it.",
  "hlc-columns": "The time of the entry was changed in one of the places where it stands.",
  "prev-link": "The entry does not follow the one before it: one of the two was replaced or moved.",
  link: "The entry was changed, and its digest made to fit: its link is not that of its columns.",
  malformed: "No ledger writes such an entry: it was put there by hand, with digest and link made to fit.",
  head: "The end of the chain that is on record is not the last entry.",
  "tail-truncated": "Entries were cut off the end.",
  "snapshot-root": "What was signed is not what stands there now: history was rewritten.",
  "snapshot-signature": "A signature over these entries does not hold, or no key that counts made it.",
  "snapshot-chain": "Signed batches do not follow each other.",
  tree: "The stored Merkle tree is not that of the entries.",
  projection: "The table of jobs, or what was decided, is not what the entries say.",
  rollback: "The chain is shorter than, or another than, a checkpoint that was kept outside.",
  idempotency: "The table of Idempotency-Keys, which is no part of the chain, is not what the entries say.",
  damaged: "Stored rows contradict each other. Verify the tenant: that shows where.",
};

/** What each verdict of verification is about. */
export const VERDICTS = {
  links: "Each entry is bound to the one before it",
  payloads: "The content of each entry has its digest, and is what a ledger writes",
  head: "The chain ends where it is said to",
  snapshots: "Signed batches cover what stands there",
  signatures: "Signatures hold, by keys that count",
  tree: "The Merkle tree is that of the entries",
  projection: "The table of jobs is what the entries say",
  checkpoint: "Nothing is gone that was there before",
};

/** What to do about a problem, by its kind. */
export const PROBLEMS = {
  forbidden: "Ask whoever issues tokens for this right; your rights are listed under Access.",
  unauthenticated: "Sign in again.",
  "tenant-not-found": "Check the name. A tenant begins with its first event.",
  "job-not-found": "Check tenant and job.",
  "quota-exceeded": "Wait a moment and try again.",
  "not-ready": "Try again in a moment; the overview says what is wrong.",
  "untrusted-key": "Whoever runs the service adds the key to bundle.trusted_keys, if it is to be trusted.",
  "bundle-invalid": "Get the bundle again from its ledger. What does not hold stands above.",
  "chain-damaged": "Verify the tenant: that shows where.",
};
