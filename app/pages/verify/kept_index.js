// What a bundle has of the index of jobs of entries that left before its first one (docs/formats/job-index.md): the rules
// of ledger/verification/left_index.py.

import { BundleInvalid } from "./container.js";
import { Malformed, fromBase64, fromUtf8, toHex } from "./encoding.js";
import { JobIndex, coveringRuns, groupBegin, rootOf } from "./job_index.js";
import { canonical, hasMembers, parseJson } from "./json.js";
import { sha256 } from "./sha256.js";
import { claimIn } from "./snapshots.js";

const LEAF_BYTES = 72;
const HASH_BYTES = 32;

/** What the member holds; nothing of it is judged. */
export function parseKept(bytes) {
  try {
    const text = fromUtf8(bytes, "job_index.json");
    const value = parseJson(text, "job_index.json");
    if (!hasMembers(value, ["hashes", "keys", "payload", "runs"]) || !Array.isArray(value.runs)) {
      throw new Malformed("it has other members");
    }
    if (canonical(value) !== text) throw new Malformed("it is not in canonical form");
    const [hashes, keys, payload] = ["hashes", "keys", "payload"].map((name) => fromBase64(value[name], name));
    return { hashes, keys, payload, runs: value.runs.map((run) => fromBase64(run, "a run")) };
  } catch (error) {
    if (!(error instanceof Malformed)) throw error;
    throw new BundleInvalid(`job_index.json is malformed: ${error.message}`);
  }
}

/** The index of the entries that left before ``floor``, as far as what is kept of it is the one that was signed. */
export function indexBehind(floor, kept) {
  const index = new JobIndex(floor.toSeq);
  if (kept === null || toHex(sha256(kept.payload)) !== floor.snapshot) return index;
  const claim = claimIn(kept.payload);
  if (!claim?.job_index || claim.to_seq !== floor.toSeq) return index;
  const places = coveringRuns(claim.to_seq, claim.index_begin);
  const claimed = places.map((place, at) => ({ ...place, root: claim.job_index[at] }));
  const before = claimed.filter(({ end }) => end <= groupBegin(claim.to_seq));
  const found = madeAgain(kept, claimed.slice(before.length), index) ?? index;
  before.forEach((place) => found.restore(place, null));
  return found;
}

/** The runs behind the last group and the open block, null where they have other roots. */
function madeAgain({ runs, keys, hashes }, claimed, index) {
  const count = keys.length / HASH_BYTES;
  const hasBlock = count > 0;
  const isFormed = runs.length === claimed.length - (hasBlock ? 1 : 0) && keys.length === hashes.length;
  if (!isFormed || !Number.isInteger(count) || runs.some((run) => !run.length || run.length % LEAF_BYTES)) return null;
  const restored = new JobIndex(index.size - count);
  if (restored.block === null || claimed.some(({ begin, end }, at) => at < runs.length && end > index.size - count)) {
    return null;
  }
  runs.map(leavesOf).forEach((leaves, at) => restored.restore({ ...claimed[at], root: rootOf(leaves) }, leaves));
  for (let at = 0; at < keys.length; at += HASH_BYTES) {
    restored.put(toHex(keys.subarray(at, at + HASH_BYTES)), hashes.slice(at, at + HASH_BYTES));
  }
  const roots = restored.roots();
  return claimed.every((place) => roots.get(place) === place.root) ? restored : null;
}

function leavesOf(run) {
  const leaves = new Map();
  for (let at = 0; at < run.length; at += LEAF_BYTES) {
    const leaf = run.subarray(at, at + LEAF_BYTES);
    const count = Number(new DataView(leaf.buffer, leaf.byteOffset).getBigUint64(HASH_BYTES));
    leaves.set(toHex(leaf.subarray(0, HASH_BYTES)), { count, digest: leaf.slice(HASH_BYTES + 8) });
  }
  return leaves;
}
