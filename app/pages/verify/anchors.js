// Statements of external witnesses about the log of a bundle (docs/formats/bundle.md, "Anchors"): their form, and what
// a browser can judge of them: cosignatures, by the witness keys that the reader brings, but no time stamps (RFC 3161).

import { BundleInvalid } from "./container.js";
import { HASH, Malformed, fromBase64, fromHex, fromUtf8, toHex } from "./encoding.js";
import { canonical, hasMembers, isText, parseJson } from "./json.js";
import { UnknownKey, timeOf } from "./keys.js";
import { ProofError, verifyConsistency } from "./merkle.js";
import { cosignedTime, openCheckpoint, readCheckpoint } from "./note.js";

export const STAMP_NOT_CHECKED =
  "a browser alone cannot check a time stamp of RFC 3161; tally verify-bundle --tsa-ca CA does, and openssl ts -verify";

const ANCHORS_MAX = 128;
const PROOF_HASHES_MAX = 128;
const WITNESS = "witness";

/** What the member holds; nothing of it is judged. */
export function parseAnchors(bytes) {
  try {
    const text = fromUtf8(bytes, "anchors.json");
    const value = parseJson(text, "anchors.json");
    if (!hasMembers(value, ["anchors"]) || !Array.isArray(value.anchors)) throw new Malformed("it has other members");
    const { anchors } = value;
    if (anchors.length < 1 || anchors.length > ANCHORS_MAX)
      throw new Malformed(`it lists ${anchors.length} statements`);
    if (!anchors.every(isAnchor)) throw new Malformed("a statement is not of its form");
    if (canonical(value) !== text) throw new Malformed("it is not in canonical form");
    return anchors;
  } catch (error) {
    if (!(error instanceof Malformed)) throw error;
    throw new BundleInvalid(`anchors.json is malformed: ${error.message}`);
  }
}

/** Whether a value is a statement of an external witness, of its form; nothing of it is judged. */
export function isAnchor(value) {
  return (
    hasMembers(value, ["by", "checkpoint", "consistency", "kind", "response", "time"]) &&
    isText(value.by, 2048) &&
    isText(value.checkpoint) &&
    Array.isArray(value.consistency) &&
    value.consistency.length <= PROOF_HASHES_MAX &&
    value.consistency.every((each) => isText(each) && HASH.test(each)) &&
    [WITNESS, "rfc3161"].includes(value.kind) &&
    isText(value.response) &&
    isText(value.time, 64)
  );
}

/**
 * What came of each statement, held against the checkpoint ``own`` of the file. ``broken``: it holds and the log is
 * not so; then ``said`` is its size and root. ``key`` is the verifier key of the witness, or the authority.
 */
export async function judgeAnchors(anchors, own, { keyring, witnesses, policy }) {
  const judged = [];
  const known = [...witnesses, ...(policy?.keys ?? [])];
  for (const anchor of anchors) judged.push(await judgeAnchor(anchor, own, keyring, known, policy));
  return judged;
}

async function judgeAnchor(anchor, own, keyring, witnesses, policy) {
  const { kind, by, time } = anchor;
  const name = kind === WITNESS ? by.split("+")[0] : by;
  const found = { kind, by: name, time, to_seq: 0, status: "not_checked", detail: null, said: null, key: by };
  let size;
  try {
    ({ size } = readCheckpoint(anchor.checkpoint));
    found.time = utc(timeOf(time, "the time"));
    fromBase64(anchor.response, "the time stamp");
  } catch (error) {
    if (!(error instanceof Malformed)) throw error;
    return { ...found, status: "invalid", detail: `it is malformed: ${error.message}` };
  }
  found.to_seq = size;
  if (size < 1 || size > own.size) {
    return { ...found, detail: `it covers ${size} entries, the checkpoint here ${own.size}` };
  }
  if (keyring === null) return { ...found, detail: "no key was given, so nobody vouches for its checkpoint" };
  if (kind !== WITNESS) return { ...found, detail: STAMP_NOT_CHECKED };
  const witness = witnesses.find((each) => each.text === by);
  if (witness === undefined) return { ...found, detail: "its key is not among the witness keys that were given" };
  let checkpoint;
  try {
    const timeS = await cosignedTime(anchor.checkpoint, witness);
    found.time = utc({ ms: timeS * 1000 });
    checkpoint = await openCheckpoint(anchor.checkpoint, keyring.asOf(timeS * 1000), own.origin);
    await policy?.requireNamedLog(anchor.checkpoint, own.origin);
  } catch (error) {
    if (error instanceof UnknownKey) return { ...found, detail: error.message };
    if (error instanceof Malformed) {
      return { ...found, status: "invalid", detail: `the cosignature does not hold: ${error.message}` };
    }
    throw error;
  }
  try {
    verifyConsistency(checkpoint.size, own.size, checkpoint.root, own.root, anchor.consistency.map(fromHex));
  } catch (error) {
    if (!(error instanceof ProofError)) throw error;
    const detail = `the log does not begin with what the ${kind} anchor by ${name} is of: ${error.message}`;
    return { ...found, status: "broken", detail, said: { size: checkpoint.size, root: toHex(checkpoint.root) } };
  }
  return { ...found, status: "ok" };
}

function utc({ ms }) {
  return new Date(ms).toISOString().replace(".000Z", "Z");
}
