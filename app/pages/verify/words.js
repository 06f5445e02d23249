// What the page says: the outcomes and the words of tally verify-bundle, and what each verdict is about.

export const OUTCOMES = {
  0: "WHOLE AND SIGNED: all that a bundle can show was checked and holds",
  1: "COULD NOT BE READ",
  2: "TAMPERED WITH OR CORRUPT: do not rely on it",
  3: "INCOMPLETE: nothing wrong was found, not everything could be checked",
  4: "KEY UNKNOWN: a key that signed is not held, had expired or was revoked",
};

export const RECEIPT_OUTCOMES = {
  ...OUTCOMES,
  0: "PROVED: it holds, and a key that you trust signed it",
  4: "KEY UNKNOWN: a key that signed is not held, or was revoked",
};

export const STATES = { 0: "fine", 1: "unread", 2: "tampered", 3: "incomplete", 4: "unknown" };

export const ICONS = {
  fine: "M4 12.5l5.5 5.5L20 7",
  unread: "M6 3h8l4 4v14H6zM9 12l6 6m0-6l-6 6",
  tampered: "M6 6l12 12M18 6L6 18",
  incomplete: "M12 5v9m0 3.5v1.5",
  unknown: "M15.5 9.5a3.5 3.5 0 1 1-4.6-3.3 3.5 3.5 0 0 1 4.6 3.3zM12 13v8m0-3h3m-3-2.6h2.4",
};

export const VERDICT_WORDS = {
  ok: "ok",
  broken: "broken",
  not_checked: "not checked",
  unknown_key: "unknown key",
  invalid: "invalid",
};

/** What ``compared_with`` names. */
export const SOURCES = { bundle: "the checkpoint in the file", file: "the checkpoint that you gave" };

export const MEANINGS = {
  bundle: "the file, its parts and the signed manifest that lists them",
  receipt: "the file, every byte of it, and the node's signature of it",
  links: "each entry binds the one before it; none is missing, added or moved",
  payloads: "each payload is the one that was chained, and each entry one that a ledger writes",
  head: "the chain ends where the manifest says",
  snapshots: "the signed statements say what the entries say",
  signatures: "the signatures of those statements",
  tree: "the Merkle tree over all entries",
  projection: "verdicts on proposals follow from the entries before them",
  checkpoint: "checkpoints, of the bundle and kept elsewhere",
};

export const RECEIPT_MEANINGS = {
  ...MEANINGS,
  links: "each entry is what its link was computed from",
  signatures: "the log's signature of the checkpoint",
  tree: "the checkpoint covers each entry as it is shown",
  completeness: "the job has no other entries, up to the end of a signed snapshot",
  checkpoint: "the checkpoint that you kept",
};

/** What a kind of break means, for somebody who sees it for the first time. */
export const BREAKS = {
  bundle: "The file itself is not what a bundle is, or not what its manifest lists.",
  "bundle-signature": "The manifest was not signed by the key that it names, or by none that counts.",
  completeness: "That the job has no other entries is not what the index of jobs says.",
  receipt: "The file itself is not what a receipt is, or was changed since it was signed.",
  "receipt-signature": "The receipt was not signed by the key that it names, or by none that counts.",
  "checkpoint-signature": "The checkpoint was not signed in the log's name by a key that counts.",
  "checkpoint-given": "The checkpoint that you gave is malformed, or its signature does not hold.",
  gap: "Entries are missing here.",
  "duplicate-seq": "Two entries claim one place.",
  "payload-digest": "The payload was changed after it was chained.",
  "hlc-columns": "The time of the entry was changed in one column and not in the other.",
  "prev-link": "The entry does not follow the one before it.",
  link: "A column of the entry was changed after it was chained.",
  malformed: "No ledger writes such an entry, so two readers may read it in two ways; whoever signed it made it.",
  head: "The chain does not end where the manifest says.",
  "tail-truncated": "Entries at the end are missing.",
  "snapshot-root": "A signed statement says something else than the entries.",
  "snapshot-signature": "The signature of a statement about these entries does not hold, or its key does not count.",
  "snapshot-chain": "The signed statements do not follow one another.",
  "caller-signature": "The event is not what its caller signed, or is there a second time, or its key does not count.",
  tree: "The Merkle tree is not that of the entries.",
  projection: "A verdict on a proposal does not follow from the entries before it.",
  rollback: "The log is not the one that somebody outside saw: it was cut or rewritten.",
};

/** What was shown, in sentences; none where the file does not hold, or nobody whom the reader trusts signed it. */
export function proved(exitCode, verdict) {
  const { verdicts } = verdict;
  if (exitCode === 2 || (verdicts.bundle ?? verdicts.receipt) !== "ok") return [];
  const ok = (...aspects) => aspects.every((aspect) => verdicts[aspect] === "ok");
  return ("receipt" in verdicts ? provedByReceipt : provedByBundle)(verdict, ok).concat(provedOutside(verdict, ok));
}

function provedByBundle(verdict, ok) {
  const { bundle: about, from_seq: from, to_seq: to, signed_to_seq: signedTo } = verdict;
  const said = [];
  if (ok("bundle"))
    said.push(
      `Every byte of this file is what ${named(about.manifest_key_ids)} signed, as exported by node ${about.node_id}.`,
    );
  if (ok("links", "payloads")) {
    said.push(
      `Each of the ${grouped(verdict.entries_checked)} entries binds the one before it: from seq ${from} to ${to} ` +
        "none was changed, added, moved or left out since they were chained.",
    );
  }
  if (verdict.pruned !== null && ok("signatures")) {
    said.push(
      `The entries up to seq ${verdict.pruned.to_seq} left for the archive at ${verdict.pruned.at}, as a signed entry ` +
        `says, under the archive's manifest ${verdict.pruned.manifest}.`,
    );
  }
  if (ok("snapshots", "signatures") && signedTo >= from) {
    said.push(`Up to seq ${signedTo}, ${named(about.snapshot_key_ids)} signed what these entries are.`);
  }
  if (ok("tree") && about.checkpoint_key_ids?.length) {
    said.push(
      `The log's checkpoint of ${grouped(about.checkpoint.size)} entries, signed by ` +
        `${named(about.checkpoint_key_ids)}, begins with exactly these entries.`,
    );
  }
  return said;
}

function provedByReceipt(verdict, ok) {
  const { receipt: about } = verdict;
  const said = [];
  if (ok("links", "payloads", "tree") && about.checkpoint_key_ids.length) {
    said.push(
      `Each of the ${about.entries.length} entries stands in log ${about.checkpoint.origin} as it is shown, under ` +
        `the checkpoint of ${grouped(about.checkpoint.size)} entries that ${named(about.checkpoint_key_ids)} signed.`,
    );
  }
  if (ok("receipt", "completeness")) {
    const none = about.covers === "absent" ? "has no entry" : "has no other entries";
    const { complete_from_seq: first, complete_to_seq: last } = about;
    const among = first === 1 ? `the first ${grouped(last)}` : `entries ${grouped(first)} to ${grouped(last)}`;
    said.push(`Job ${about.job_id} ${none} among ${among} of the log, says its index.`);
  }
  if (ok("receipt")) {
    const all =
      about.covers === "job"
        ? ", and says that these are all entries of the job that it found up to the checkpoint"
        : "";
    said.push(`Every byte of this file is what ${named(about.key_ids)} signed: node ${about.node_id} made it${all}.`);
  }
  return said;
}

function provedOutside(verdict, ok) {
  const said = [];
  if (ok("checkpoint") && (verdict.compared_with ?? "").split(", ").includes("file")) {
    said.push("The checkpoint that you kept is of this same history: the log was not rewritten below it.");
  }
  for (const { status, by, time, to_seq: toSeq } of verdict.anchors) {
    if (status === "ok") said.push(`${by} saw the first ${grouped(toSeq)} entries by ${time}, by its own clock.`);
  }
  return said;
}

function grouped(number) {
  return number.toLocaleString("en");
}

function named(keyIds) {
  const ids = [...new Set(keyIds)];
  return `${ids.length === 1 ? "key" : "keys"} ${ids.join(", ")}`;
}

/** What no file proves, whatever was checked. */
export function notProved(verdict) {
  if (verdict.verdicts.completeness === "ok") {
    const { complete_from_seq: first, complete_to_seq: last } = verdict.receipt;
    const before = first === 1 ? [] : [`What came before seq ${grouped(first)}, where the index of jobs begins.`];
    return [
      `What came after seq ${grouped(last)}: later entries of the job may not be in it.`,
      ...before,
      ...COMMON_LIMITS,
    ];
  }
  if ("receipt" in verdict.verdicts) {
    return [
      "That the job has no other entries: what came after the checkpoint is not in it, " +
        "and what the node left out cannot be seen here.",
      ...COMMON_LIMITS,
    ];
  }
  return ["Anything after the last entry: the log may have gone on since.", ...COMMON_LIMITS];
}

const COMMON_LIMITS = [
  "That what an event says is true, or that the clocks of the nodes were right: " +
    "the ledger records who said what, and in which order.",
  "Whose the keys are: you brought them, and they are as good as the way they came to you.",
  "What private fields hold: they stand here as they were chained, encrypted.",
];
