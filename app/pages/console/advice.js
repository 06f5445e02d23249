// What verification and retention report, in words: every kind of break, every verdict, and every reason why entries stay.

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
  "caller-signature": "The event is not what its caller signed, or stands a second time, or its key does not count.",
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

/** Why an entry stops the prefix that may leave: what that means, and what to do about it, if anything. */
export const WHYS = {
  system: { because: "It is of the ledger's own chain, which keeps everything." },
  "no-period": {
    because: "Without one, entries stay for ever.",
    remedy: "tally retention set --period sets one.",
  },
  young: { because: "It is younger than the period or the minimum." },
  hold: {
    because: "A hold holds it, or it placed a hold that is open.",
    remedy: "An admin releases the hold once its reason is gone: tally hold release.",
  },
  "open-job": {
    because: "Its job has not ended. It may leave once the job's newest entry is older than twice the period.",
    remedy: "Complete, fail or cancel the job if its work is over.",
  },
  unsigned: {
    because: "No signed snapshot covers it.",
    remedy: "The node signs each batch; tally snapshot signs one now.",
  },
  archive: {
    because: "The archive does not have it, or cannot be read.",
    remedy: "See the archive's lag and fault on this page; tally archive status says more.",
  },
  exclusion: {
    because: "It decides whether another ledger's log counts.",
    remedy: "State that again; then the older entry may leave.",
  },
  commitment: { because: "It is about commitments: each verdict follows from all before." },
  privacy: { because: "It declares or erases private fields." },
  keyed: { because: "Its Idempotency-Key is still kept, for 7 days." },
  webhook: {
    because: "A webhook that is not stopped has not delivered it, or keeps it as a dead letter.",
    remedy: "Mend its receiver, deliver the dead letters again, or stop the webhook.",
  },
  "to-seq": { because: "The request ends before it." },
};
