// Batch snapshots (docs/formats/snapshot.md): signed statements of what a range of a chain holds, opened, and held
// against the entries they cover. The rules are those of ledger/verification/snapshot_check.py.

import { BundleInvalid } from "./container.js";
import { Forged, parseEnvelope, signersOf } from "./dsse.js";
import { HASH, Malformed, fromUtf8, toHex, toUtf8 } from "./encoding.js";
import { NODE_ID, TENANT_ID, parseHlc } from "./hlc.js";
import { coveringRuns, isBegin } from "./job_index.js";
import { canonical, hasMembers, isInteger, isObject, isText, parseJson } from "./json.js";
import { UnknownKey } from "./keys.js";
import { STATEMENT_TYPE } from "./manifest.js";
import { sha256 } from "./sha256.js";

/** The verdict on a snapshot that lacks one of two signatures that are demanded. */
export const LACKS_ONE = "lacks_one";

const PREDICATE_TYPE = "https://tallystick.dev/batch-snapshot/v1";
const HLC_CHARACTERS_MAX = 200;

const ROW_MEMBERS = [
  "dsse_envelope",
  "entry_count",
  "from_chain_link",
  "from_seq",
  "merkle_root",
  "snapshot_hlc",
  "tenant_id",
  "to_chain_link",
  "to_seq",
];
const CLAIMED_IN_ROW = [
  "from_seq",
  "to_seq",
  "snapshot_hlc",
  "from_chain_link",
  "to_chain_link",
  "entry_count",
  "merkle_root",
];
const COMPUTED = ["from_chain_link", "to_chain_link", "snapshot_hlc", "entry_count", "merkle_root"];

const isHash = (value) => isText(value) && HASH.test(value);
const isSeq = (value) => isInteger(value, 1);
const CLAIM = {
  tenant_id: (value) => isText(value) && TENANT_ID.test(value),
  from_seq: isSeq,
  to_seq: isSeq,
  from_chain_link: isHash,
  to_chain_link: isHash,
  entry_count: isSeq,
  merkle_root: isHash,
  tree_size: isSeq,
  tree_root: isHash,
  snapshot_hlc: (value) => isText(value, HLC_CHARACTERS_MAX),
  previous_snapshot: (value) => value === null || isHash(value),
  node_id: (value) => isText(value) && NODE_ID.test(value),
  key_id: (value) => isText(value) && /^[0-9a-f]{16}$/.test(value),
};
const isIndex = (value) => Array.isArray(value) && value.every(isHash);

/** The snapshot in a line without its newline. */
export function parseSnapshotRow(line, tenantId) {
  let row;
  try {
    row = parseJson(line, "a row");
    if (!hasMembers(row, ROW_MEMBERS) || canonical(row) !== line) {
      throw new BundleInvalid("a row of a snapshot is not of its form in canonical JSON");
    }
  } catch (error) {
    if (!(error instanceof Malformed)) throw error;
    throw new BundleInvalid(`a row is not one of a snapshot: ${error.message}`);
  }
  if (row.tenant_id !== tenantId) throw new BundleInvalid("a snapshot belongs to another tenant");
  for (const name of ROW_MEMBERS) {
    const isNumber = ["from_seq", "to_seq", "entry_count"].includes(name);
    const isEnvelope = (value) => value === null || isObject(value);
    const isRight = isNumber ? isSeq(row[name]) : name === "dsse_envelope" ? isEnvelope(row[name]) : isText(row[name]);
    if (!isRight) throw new BundleInvalid(`${name} of a snapshot is malformed`);
  }
  return row;
}

/** What an envelope holds: the claim, the digest of its payload, and a verdict on who made it. */
export async function openSnapshot(envelope, keyring) {
  const parsed = parseEnvelope(envelope);
  const claim = claimOf(parsed.payload);
  const payloadSha256 = toHex(sha256(parsed.payload));
  return { claim, payloadSha256, ...(await judgeSigners(parsed, claim, keyring)) };
}

async function judgeSigners(parsed, claim, keyring) {
  if (keyring === null) return { verdict: "not_checked", detail: "no key was given to check the signature with" };
  let signers;
  try {
    signers = await signersOf(parsed, keyring);
  } catch (error) {
    if (error instanceof UnknownKey) return { verdict: "unknown_key", detail: error.message };
    if (error instanceof Forged) return { verdict: "broken", detail: error.message };
    throw error;
  }
  if (keyring.get(claim.key_id) !== null && !signers.some((key) => key.id === claim.key_id)) {
    return { verdict: "broken", detail: `it says that key ${claim.key_id} signed it, which did not` };
  }
  const hlc = parseHlc(claim.snapshot_hlc);
  const valid = signers.filter((key) => key.refusal(hlc) === null);
  if (!valid.length) return { verdict: "unknown_key", detail: signers.map((key) => key.refusal(hlc)).join("; ") };
  const detail = keyring.lacks(valid);
  return { verdict: detail === null ? "ok" : LACKS_ONE, detail };
}

function claimOf(payload) {
  const said = parseJson(fromUtf8(payload, "the statement"), "the statement");
  if (
    !isObject(said) ||
    said._type !== STATEMENT_TYPE ||
    said.predicateType !== PREDICATE_TYPE ||
    !isObject(said.predicate) ||
    !("subject" in said)
  ) {
    throw new Malformed("the statement is not one of a snapshot");
  }
  const claim = {};
  for (const [name, isOfItsForm] of Object.entries(CLAIM)) {
    if (!(name in said.predicate) || !isOfItsForm(said.predicate[name])) {
      throw new Malformed(`the predicate of the snapshot is malformed: ${name}`);
    }
    claim[name] = said.predicate[name];
  }
  readIndex(claim, said.predicate);
  parseHlc(claim.snapshot_hlc);
  if (claim.to_seq - claim.from_seq + 1 !== claim.entry_count) {
    throw new Malformed("entry_count of the snapshot is not the size of its range");
  }
  if (claim.tree_size !== claim.to_seq) throw new Malformed("tree_size of the snapshot is not its to_seq");
  if ((claim.from_seq === 1) !== (claim.previous_snapshot === null)) {
    throw new Malformed("only the snapshot that begins at seq 1 has no previous_snapshot");
  }
  const name = `${claim.tenant_id}/${claim.from_seq}-${claim.to_seq}`;
  if (canonical(said.subject) !== canonical([{ name, digest: { sha256: claim.merkle_root } }])) {
    throw new Malformed("subject of the statement is not what its predicate says");
  }
  return claim;
}

/** Adds what the predicate says of the index of jobs: where it begins, and its roots if there are any. */
function readIndex(claim, predicate) {
  const { job_index: roots, job_index_from: from } = predicate;
  claim.index_begin = from === undefined ? 0 : from - 1;
  const isRight = isInteger(from, 2) && isBegin(from - 1) && from <= claim.to_seq && roots !== undefined;
  if ("job_index_from" in predicate && !isRight) {
    throw new Malformed("job_index_from of the snapshot is not behind a full block below its to_seq");
  }
  if (!("job_index" in predicate)) return;
  claim.job_index = roots;
  if (!isIndex(roots)) throw new Malformed("the predicate of the snapshot is malformed: job_index");
  if (roots.length !== coveringRuns(claim.to_seq, claim.index_begin).length) {
    throw new Malformed("job_index of the snapshot has not the number of runs that its to_seq needs");
  }
}

/** The claim in the payload of a snapshot, whoever signed it; null if there is none. */
export function claimIn(payload) {
  try {
    return claimOf(payload);
  } catch (error) {
    if (!(error instanceof Malformed)) throw error;
    return null;
  }
}

/** The digest of an unsigned snapshot, which the next one names: that of its columns but the envelope. */
export function unsignedDigest(row) {
  return toHex(sha256(toUtf8(canonical(Object.fromEntries(CLAIMED_IN_ROW.map((name) => [name, row[name]]))))));
}

/** A stored snapshot with its envelope opened, if it has one; reports a signature that does not hold or cannot be judged. */
export async function openRow(row, keyring, findings) {
  const stored = { row, storedFrom: row.from_seq, storedTo: row.to_seq, claim: null, digest: null, mayCount: false };
  const unusable = withRange(stored);
  if (row.dsse_envelope === null) return { ...unusable, digest: unsignedDigest(row), isUnsigned: true };
  let opened;
  try {
    opened = await openSnapshot(row.dsse_envelope, keyring);
  } catch (error) {
    if (!(error instanceof Malformed)) throw error;
    findings.add("snapshot-signature", row.to_seq, `the ${unusable.name} is malformed: ${error.message}`);
    return unusable;
  }
  findings.begin("signatures");
  const { claim, verdict, detail } = opened;
  if (verdict === "broken") {
    findings.add("snapshot-signature", row.to_seq, `${unusable.name}: ${detail}`);
    return { ...unusable, keyId: claim.key_id };
  }
  if (verdict === "unknown_key") {
    const said = { actual: claim.key_id, isKeyUnknown: true };
    findings.add("snapshot-signature", row.to_seq, `${unusable.name}: ${detail}`, said);
  } else if (verdict === "not_checked") {
    findings.leaveUndecided("signatures");
  }
  const isUnsigned = verdict === LACKS_ONE;
  const mayCount = !isUnsigned && verdict !== "unknown_key";
  return withRange({ ...stored, claim, digest: opened.payloadSha256, mayCount, isUnsigned, keyId: claim.key_id });
}

function withRange(stored) {
  const fromSeq = stored.claim?.from_seq ?? stored.storedFrom;
  const toSeq = stored.claim?.to_seq ?? stored.storedTo;
  return { ...stored, fromSeq, toSeq, name: `snapshot of ${fromSeq}..${toSeq}` };
}

/** Whether a snapshot covers entries from where the one before it ends; only such a one is compared with them. */
export function isNext(snapshot, coveredTo) {
  const begin = Math.max(snapshot.storedFrom, coveredTo + 1);
  return begin === snapshot.fromSeq && snapshot.fromSeq <= snapshot.toSeq;
}

/** Judges the snapshots of one chain, one after another as they are stored. */
export class SnapshotJudge {
  /**
   * ``previous`` is the digest of the snapshot that ends before ``firstSeq``, null where it is not known;
   * ``isIndexWhole``, whether snapshots are undecided where a root of their index of jobs is not known.
   */
  constructor(tenantId, findings, firstSeq, previous = null, isIndexWhole = false) {
    this.isIndexWhole = isIndexWhole;
    this.tenantId = tenantId;
    this.findings = findings;
    this.isPreviousKnown = firstSeq === 1 || previous !== null;
    this.expectedFrom = this.isPreviousKnown ? firstSeq : null;
    this.previousDigest = previous;
    this.coveredTo = firstSeq - 1;
    this.signedToSeq = firstSeq - 1;
    this.unsignedToSeq = 0;
  }

  /** Whether an unsigned snapshot covers entries that no signed one covers. */
  get endsUnsigned() {
    return this.unsignedToSeq > this.signedToSeq;
  }

  isNext(snapshot) {
    return isNext(snapshot, this.coveredTo);
  }

  /** Reports what does not fit; ``computed`` is what the entries say, null where they are not all there. */
  judge(snapshot, recomputed) {
    const { findings } = this;
    let fits = this.#follows(snapshot);
    let computed = null;
    if (snapshot.isUnsigned) this.unsignedToSeq = Math.max(this.unsignedToSeq, snapshot.toSeq);
    if (this.isNext(snapshot)) {
      this.coveredTo = snapshot.toSeq;
      computed = recomputed;
    }
    for (const [detail, said] of disagreements(snapshot, this.tenantId)) {
      findings.add("snapshot-root", snapshot.toSeq, detail, said);
      fits = false;
    }
    if (computed === null) {
      findings.leaveUndecided("snapshots");
      return;
    }
    if (this.isIndexWhole && !isIndexKnown(snapshot.claim, computed.job_index)) findings.leaveUndecided("snapshots");
    for (const [detail, said] of differences(snapshot, computed)) {
      fits = false;
      if (findings.isChainBrokenBy(snapshot.toSeq)) findings.leaveUndecided("snapshots");
      else findings.add("snapshot-root", snapshot.toSeq, detail, said);
    }
    if (fits && snapshot.mayCount) this.signedToSeq = snapshot.toSeq;
  }

  #follows(snapshot) {
    const { findings, expectedFrom: expected, previousDigest: previous, isPreviousKnown } = this;
    const { fromSeq, claim } = snapshot;
    this.expectedFrom = Math.max(snapshot.toSeq + 1, expected ?? 0);
    this.previousDigest = snapshot.digest;
    this.isPreviousKnown = snapshot.digest !== null;
    if (expected !== null && fromSeq !== expected) {
      const detail = `a snapshot begins at ${fromSeq} where one from ${expected} must follow`;
      findings.add("snapshot-chain", Math.min(expected, fromSeq), detail, { expected, actual: fromSeq });
      return false;
    }
    if (claim !== null && isPreviousKnown && claim.previous_snapshot !== previous) {
      const detail = `the snapshot from ${fromSeq} names another one before it than the stored one`;
      findings.add("snapshot-chain", fromSeq, detail, { expected: previous, actual: claim.previous_snapshot });
      return false;
    }
    return true;
  }
}

/** Where the stored row and the signed claim, or parts of the claim, say different things. */
function* disagreements({ claim, row, name }, tenantId) {
  if (claim === null) return;
  if (claim.tenant_id !== tenantId) {
    yield [`${name} was signed for another tenant`, { expected: tenantId, actual: claim.tenant_id }];
  }
  for (const column of CLAIMED_IN_ROW) {
    if (row[column] !== claim[column]) {
      yield [`${name}: column ${column} is not what was signed`, { expected: claim[column], actual: row[column] }];
    }
  }
}

/** Where the claim, or without one the row, does not say what the entries say. */
function* differences({ claim, row, name }, computed) {
  for (const column of COMPUTED) {
    const actual = (claim ?? row)[column];
    if (actual !== computed[column]) {
      yield [`${name}: ${column} is not that of the entries`, { expected: computed[column], actual }];
    }
  }
  if (claim !== null && computed.tree_root !== null && computed.tree_root !== claim.tree_root) {
    const said = { expected: computed.tree_root, actual: claim.tree_root };
    yield [`${name}: tree_root is not that of the entries`, said];
  }
  yield* differencesOfIndex(claim, name, computed.job_index);
}

function isIndexKnown(claim, roots) {
  if (!claim?.job_index) return true;
  return coveringRuns(claim.to_seq, claim.index_begin).every((place) => roots.get(place) !== null);
}

/** Where the claimed index of jobs, if there is one, has other roots than those that are known. */
function* differencesOfIndex(claim, name, roots) {
  if (!claim?.job_index) return;
  for (const [at, place] of coveringRuns(claim.to_seq, claim.index_begin).entries()) {
    const actual = claim.job_index[at];
    const expected = roots.get(place);
    if (expected !== null && actual !== expected) {
      const run = `of entries ${place.begin + 1} to ${place.end}`;
      yield [`${name}: job_index ${run} is not that of the entries`, { expected, actual }];
    }
  }
}
