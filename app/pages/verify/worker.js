// What runs beside the page, in a worker of its own, so that a large file never holds up the reader: one task a
// message, answered under its id; progress in between.

import { Malformed } from "./encoding.js";
import { JobIndex } from "./jobs.js";
import { judgeBundle } from "./judging.js";
import { Keyring } from "./keys.js";
import { VerifierKey, readCheckpoint } from "./note.js";
import { Policy } from "./policy.js";
import { judgeReceipt } from "./receipt.js";
import { selfTest } from "./sha256.js";
import { exitCodeOf } from "./verdicts.js";

const PROGRESS_INTERVAL_MS = 80;
const EVENTS_SHOWN_MAX = 500;
const ROWS_AROUND = 2;

/** What was judged last, for what the reader asks of it. */
let judged = null;

/** Whether hashes of this page are those of the browser, once that was looked at. */
let isSound;

const TASKS = {
  /** The keys in a file, so that the reader sees which they bring. */
  readKeys: ({ text }) => {
    const ring = Keyring.ofText(text);
    return { keys: ring.keys.map((key) => key.toJson()), logVerifierKeys: ring.logVerifierKeys };
  },

  readCheckpoint: ({ text }) => {
    const { origin, size } = readCheckpoint(text);
    return { origin, size };
  },

  readWitnessKey: ({ text }) => {
    const { name, hash } = VerifierKey.parse(text.trim(), { isWitness: true });
    return { name, hash };
  },

  readPolicy: ({ text }) => {
    const { quorum, witnesses } = Policy.parse(text);
    return { quorum, witnesses: witnesses.size };
  },

  judge: async ({ file, isReceipt, keys, checkpoint, witnessKeys, policy, signatures }, onProgress) => {
    judged = null;
    if (!(await (isSound ??= selfTest())))
      throw new Error("SHA-256 of this page does not agree with that of the browser");
    const against = {
      keyring: keyringOf(keys, signatures),
      kept: checkpoint,
      policy: policy === null ? null : Policy.parse(policy),
      witnesses: witnessKeys.map((text) => VerifierKey.parse(text.trim(), { isWitness: true })),
    };
    const beganMs = performance.now();
    const found = isReceipt ? await receiptOf(file, against) : await bundleOf(file, against, onProgress);
    judged = found;
    const verdict = { ...found.verdict, duration_ms: Math.round(performance.now() - beganMs) };
    const keysUsed = against.keyring?.keys.map((key) => key.toJson()) ?? null;
    const { jobs, keysInside } = found;
    return { exitCode: exitCodeOf(verdict), verdict, jobs, keysInside, keysUsed, needsBoth: signatures === "both" };
  },

  /** The entries of a job, as they stand in the file. */
  events: async ({ jobId }) => {
    const rows = [];
    const seqs = judged.index.seqsOf(jobId);
    for (const seq of seqs.slice(0, EVENTS_SHOWN_MAX)) rows.push(...(await judged.rowsAt(seq, 0)));
    return { rows: rows.filter((row) => row.job_id === jobId), total: seqs.length };
  },

  /** The entries around a seq, as they stand in the file. */
  around: async ({ seq }) => ({ rows: await judged.rowsAt(seq, ROWS_AROUND) }),
};

function keyringOf(keys, signatures) {
  const keyring = keys === null ? null : Keyring.merged(keys.map(Keyring.ofText));
  return signatures === "both" ? (keyring ?? new Keyring([])).demandingBoth() : keyring;
}

async function bundleOf(file, against, onProgress) {
  const index = new JobIndex();
  const { verdict, bundle } = await judgeBundle(file, against, { onProgress, onRow: (row) => index.take(row) });
  if (bundle === null) return { verdict, index, jobs: null, keysInside: null };
  let last = { number: -1, rows: [] };
  const partRows = async (number) => {
    if (last.number !== number) last = { number, rows: await bundle.rowsOf(number) };
    return last.rows;
  };
  const rowsAt = async (seq, around) => {
    const number = Math.max(
      0,
      bundle.partOf(Math.min(Math.max(seq, bundle.manifest.from_seq), bundle.manifest.to_seq)),
    );
    return nearest(await partRows(number), seq, around);
  };
  return { verdict, index, rowsAt, jobs: index.told(), keysInside: await keysInside(bundle) };
}

async function keysInside(bundle) {
  try {
    return Keyring.ofText(await bundle.keysInside()).keys.map((key) => key.id);
  } catch (error) {
    if (error instanceof Malformed) return [];
    throw error;
  }
}

async function receiptOf(file, against) {
  const index = new JobIndex();
  const { verdict, receipt } = await judgeReceipt(file, against);
  if (receipt === null) return { verdict, index, jobs: null, keysInside: null };
  const rows = receipt.entries.map(({ row }) => row);
  rows.forEach((row) => index.take(row));
  const rowsAt = async (seq, around) => nearest(rows, seq, around);
  return { verdict, index, rowsAt, jobs: index.told(), keysInside: receipt.keys.keys.map((key) => key.key_id) };
}

/** The row of a seq, or the one that stands where it should, with those around it. */
function nearest(rows, seq, around) {
  const exact = rows.findIndex((row) => row.seq === seq);
  const after = rows.findIndex((row) => row.seq > seq);
  const at = exact >= 0 ? exact : after >= 0 ? after : rows.length - 1;
  return rows.slice(Math.max(0, at - around), at + around + 1);
}

self.onmessage = async ({ data: { id, task, given } }) => {
  let toldMs = 0;
  const onProgress = (phase, done, total) => {
    if (performance.now() - toldMs < PROGRESS_INTERVAL_MS) return;
    toldMs = performance.now();
    self.postMessage({ id, progress: { phase, done, total } });
  };
  try {
    self.postMessage({ id, result: await TASKS[task](given, onProgress) });
  } catch (error) {
    self.postMessage({ id, error: { message: error.message, isMalformed: error instanceof Malformed } });
  }
};
