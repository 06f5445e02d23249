// The index of jobs of a log (docs/formats/job-index.md): made from its entries, as ledger/job_index/growth.py does, and
// proofs of one job by it, as ledger/job_index/proof.py checks them.

import { fromHex, toHex, toUtf8 } from "./encoding.js";
import { Frontier, ProofError, leafHash, verifyInclusion } from "./merkle.js";
import { sha256 } from "./sha256.js";

const BLOCK_ENTRIES = 1024;
const RUNS_MERGED = 8;
const LEVEL_MAX = 3;

const OF_ENTRIES = Uint8Array.of(2);
const OF_PARTS = Uint8Array.of(3);

const runEntries = (level) => BLOCK_ENTRIES * RUNS_MERGED ** level;

/** Where the runs begin that a later one is merged of, in an index that ends at ``size``. */
export const groupBegin = (size) => size - (size % runEntries(LEVEL_MAX));

/** Where an index may begin: at a border of blocks. */
export const isBegin = (begin) => begin % BLOCK_ENTRIES === 0;

/** Level, first and last leaf index (exclusive) of the runs of an index of leaves ``begin..size - 1``. */
export function coveringRuns(size, begin = 0) {
  const runs = [];
  while (begin < size) {
    let level = LEVEL_MAX;
    while (level && (begin % runEntries(level) || size - begin < runEntries(level))) level--;
    const end = Math.min(begin + runEntries(level), size);
    runs.push({ level, begin, end });
    begin = end;
  }
  return runs;
}

const keyOf = (jobId) => sha256(toUtf8(jobId));

function number(value) {
  const bytes = new Uint8Array(8);
  new DataView(bytes.buffer).setBigUint64(0, BigInt(value));
  return bytes;
}

/** The hash of the leaf of a job. */
function jobLeafHash(key, { count, digest }) {
  const leaf = new Uint8Array(72);
  leaf.set(key);
  leaf.set(number(count), 32);
  leaf.set(digest, 40);
  return leafHash(leaf);
}

/** Of the entries of a job in one block. */
function ofEntries(entries) {
  const records = entries.flatMap(({ index, leaf }) => [number(index), leaf]);
  return { count: entries.length, digest: sha256(OF_ENTRIES, ...records) };
}

/** Of a job that has leaves in these runs, which are merged. */
function ofParts(parts) {
  if (parts.length === 1) return parts[0];
  const records = parts.flatMap(({ count, digest }) => [number(count), digest]);
  return { count: parts.reduce((all, { count }) => all + count, 0), digest: sha256(OF_PARTS, ...records) };
}

/** Root in hex of a run, whose leaves are in a map by key in hex. */
export function rootOf(leaves) {
  const tree = new Frontier();
  for (const key of [...leaves.keys()].sort()) tree.append(jobLeafHash(fromHex(key), leaves.get(key)));
  return toHex(tree.root());
}

/** The index of a log, which grows by entry. Runs that reach into entries which are not here are not known. */
export class JobIndex {
  /** ``size`` entries came before, and are not here. */
  constructor(size) {
    this.size = size;
    this.runs = [];
    /** Roots in hex of all runs that there were, by their places. */
    this.known = new Map();
    this.block = size % BLOCK_ENTRIES ? null : new Map();
  }

  append(jobId, leaf) {
    this.put(toHex(keyOf(jobId)), leaf);
  }

  /** Adds an entry of the job of this key. */
  put(key, leaf) {
    if (this.block !== null) {
      const entry = { index: this.size, leaf };
      if (this.block.has(key)) this.block.get(key).push(entry);
      else this.block.set(key, [entry]);
    }
    this.size++;
    if (this.size % BLOCK_ENTRIES) return;
    if (this.block !== null) this.#add(0, this.size - BLOCK_ENTRIES, this.#leavesOfBlock());
    this.block = new Map();
  }

  /** Adds a run of this root. */
  restore({ level, begin, end, root }, leaves) {
    this.runs.push({ level, begin, end, leaves });
    this.known.set(nameOf({ level, begin, end }), root);
  }

  #leavesOfBlock() {
    return new Map([...this.block].map(([key, entries]) => [key, ofEntries(entries)]));
  }

  /** Adds a run, and merges the last eight where they are those under one of the next level. */
  #add(level, begin, leaves) {
    const end = begin + runEntries(level);
    this.restore({ level, begin, end, root: rootOf(leaves) }, level < LEVEL_MAX ? leaves : null);
    const last = this.runs.filter((run) => run.level === level).slice(-RUNS_MERGED);
    const isGroup = last.length === RUNS_MERGED && end % runEntries(level + 1) === 0;
    if (level === LEVEL_MAX || !isGroup) return;
    const parts = new Map();
    for (const run of last) {
      for (const [key, leaf] of run.leaves) {
        if (parts.has(key)) parts.get(key).push(leaf);
        else parts.set(key, [leaf]);
      }
    }
    this.runs = this.runs.filter((run) => !last.includes(run));
    this.#add(level + 1, last[0].begin, new Map([...parts].map(([key, each]) => [key, ofParts(each)])));
  }

  /** Roots in hex of the runs that are known, by their places. */
  roots() {
    const { size, known } = this;
    const open = this.block?.size ? rootOf(this.#leavesOfBlock()) : null;
    const isOpen = ({ begin, end }) => end === size && begin === size - (size % BLOCK_ENTRIES);
    return { get: (place) => (isOpen(place) ? open : (known.get(nameOf(place)) ?? null)) };
  }
}

const nameOf = ({ level, begin, end }) => `${level}:${begin}:${end}`;

// --- proofs ---------------------------------------------------------------------------------------

/**
 * Throws unless the job has these entries, each an index and a leaf hash, among leaves ``begin..size - 1``, and no others.
 */
export function verifyJob(jobId, { begin, size, roots }, entries, proofs) {
  const places = coveringRuns(size, begin);
  const key = keyOf(jobId);
  if (roots.length !== places.length) throw new ProofError(`an index of ${size} entries has other than its runs`);
  if (proofs.length !== places.length) throw new ProofError(`${proofs.length} runs are proved, of ${places.length}`);
  if (entries.some(({ index }, at) => index < begin || index >= size || (at && index <= entries[at - 1].index))) {
    throw new ProofError("the entries do not ascend, or one is not covered by the index");
  }
  places.forEach((place, at) => {
    const inside = entries.filter(({ index }) => index >= place.begin && index < place.end);
    try {
      if (inside.length) verifyPresence(key, place, inside, proofs[at], fromHex(roots[at]));
      else verifyAbsence(key, proofs[at], fromHex(roots[at]));
    } catch (error) {
      if (!(error instanceof ProofError)) throw error;
      throw new ProofError(`entries ${place.begin + 1} to ${place.end}: ${error.message}`);
    }
  });
}

function verifyPresence(key, place, entries, proof, root) {
  if (proof.hashes === null || proof.left !== null || proof.right !== null) {
    throw new ProofError("the job has entries here, and the proof is of none");
  }
  const leaf = jobLeafHash(key, digestIn(place, entries));
  verifyInclusion(proof.at, proof.jobs, leaf, proof.hashes.map(fromHex), root);
}

/** Count and digest of the job in a run, from its entries there. */
function digestIn({ level, begin, end }, entries) {
  if (level === 0) return ofEntries(entries);
  const step = runEntries(level - 1);
  const parts = [];
  for (let at = begin; at < end; at += step) {
    const inside = entries.filter(({ index }) => index >= at && index < at + step);
    if (inside.length) parts.push(digestIn({ level: level - 1, begin: at, end: at + step }, inside));
  }
  return ofParts(parts);
}

function verifyAbsence(key, { at, hashes, jobs, left, right }, root) {
  const name = toHex(key);
  const faults = [
    [hashes !== null, "the job has no entry here, and the proof is of some"],
    [at > jobs, `place ${at} is beyond the ${jobs} jobs of the run`],
    [(left === null) !== (at === 0), "the left neighbour is missing, or there is one too many"],
    [(right === null) !== (at === jobs), "the right neighbour is missing, or there is one too many"],
    [left !== null && left.key >= name, "the left neighbour is not before the job"],
    [right !== null && right.key <= name, "the right neighbour is not behind the job"],
  ];
  for (const [isWrong, detail] of faults) if (isWrong) throw new ProofError(detail);
  if (left === null) {
    verifyInclusion(0, jobs, neighbourHash(right), right.hashes.map(fromHex), root);
    return;
  }
  const path = left.hashes.map(fromHex);
  verifyInclusion(at - 1, jobs, neighbourHash(left), path, root);
  if (right === null) return;
  // The subtree behind the left neighbour, of which the right one is the first leaf.
  const leaves = BigInt(at) & -BigInt(at);
  const behind = Number(leaves < BigInt(jobs - at) ? leaves : BigInt(jobs - at));
  verifyInclusion(0, behind, neighbourHash(right), right.hashes.map(fromHex), path[leaves.toString(2).length - 1]);
}

const neighbourHash = ({ count, digest, key }) => jobLeafHash(fromHex(key), { count, digest: fromHex(digest) });
