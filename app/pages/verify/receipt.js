// Judging a receipt (docs/formats/receipt.md): what signing/receipt_judging.py does, in its words, by keys that the reader brings.
// Steps, those of the document:
//
//     1. form, spelling, bounds; whose entries they are
//     2. the statement that covers every byte, and its signature
//     3. each entry
//     4. the checkpoint
//     5. the proof that it covers each entry
//     6. Statements of external witnesses about the log
//     7. the checkpoint that the reader kept
//     8. that there are no other entries, by the index of jobs
//
// Where 1 or 2 is broken nothing else is looked at. Keys inside the file are never used.

import { isAnchor, judgeAnchors } from "./anchors.js";
import { PAYLOAD_TYPE, judgeEnvelope } from "./dsse.js";
import {
  HASH,
  Malformed,
  fromBase64,
  fromHex,
  fromUtf8,
  hashBytes,
  quoted,
  sameBytes,
  toHex,
  toUtf8,
} from "./encoding.js";
import { canonicalEntry, checkApart } from "./entries.js";
import { CallerChecker } from "./callers.js";
import { Findings } from "./findings.js";
import { NODE_ID, TENANT_ID } from "./hlc.js";
import { canonical, hasMembers, isInteger, isObject, isText, parseJson } from "./json.js";
import { verifyJob } from "./job_index.js";
import { LOG_ORIGIN, STATEMENT_TYPE } from "./manifest.js";
import { ProofError, leafHash, verifyConsistency, verifyInclusion } from "./merkle.js";
import { judgeCheckpoint, judgeKept, otherSignatures, readCheckpoint } from "./note.js";
import { withQuorum } from "./policy.js";
import { sha256 } from "./sha256.js";
import { LACKS_ONE, openSnapshot } from "./snapshots.js";
import { KEPT, breakOf, graver, rollbackAt, withBreak, withCheckpoint } from "./verdicts.js";

const PREDICATE_TYPE = "https://tallystick.dev/receipt/v1";
const FILE_BYTES_MAX = 64 << 20;
const ENTRIES_MAX = 10_000;
const INCLUSION_HASHES_MAX = 64;
const CONSISTENCY_HASHES_MAX = 128;
const ANCHORS_MAX = 128;
const CHECKPOINT_CHARACTERS_MAX = 1 << 20;
const KEYS_MAX = 1000;
const JOB_ID_CHARACTERS_MAX = 1024;
const ASPECTS = ["receipt", "links", "payloads", "tree", "signatures", "checkpoint"];
const STATED = ["covers", "format_version", "job_id", "log_origin", "node_id", "tenant_id"];

/** What no receipt shows, in words. */
const SAYS = "what the entries say: the ledger records who said what, and when by its clocks";
const LIMITS = ["what came after the checkpoint, and that there are no other entries: a receipt shows those in it", SAYS];
const NO_PROOF = "the receipt says nothing of the log at that size; tally prove --checkpoint makes one that does";

/** The file is no receipt, or is at odds with itself. */
export class ReceiptInvalid extends Malformed {}

// --- 1. The form ----------------------------------------------------------------------------------

const isHashes = (value, most) =>
  Array.isArray(value) && value.length <= most && value.every((each) => isText(each) && HASH.test(each));
const isList = (value, most, isItem) => Array.isArray(value) && value.length <= most && value.every(isItem);
const isTextOrNull = (value) => value === null || isText(value);

const FIELDS = {
  anchors: (value) => isList(value, ANCHORS_MAX, isAnchor),
  checkpoint: (value) => isText(value, CHECKPOINT_CHARACTERS_MAX),
  covers: (value) => ["job", "entry", "absent"].includes(value),
  entries: (value) => isList(value, ENTRIES_MAX, isEntry),
  extends: (value) => value === null || isExtended(value),
  format_version: (value) => value === 1 || value === 2,
  job_id: (value) => isText(value, JOB_ID_CHARACTERS_MAX) && value !== "",
  keys: isKeys,
  log_origin: (value) => isText(value) && LOG_ORIGIN.test(value),
  node_id: (value) => isText(value) && NODE_ID.test(value),
  tenant_id: (value) => isText(value) && TENANT_ID.test(value),
};

const RUNS_MAX = 10_000;
const SIGNATURES_MAX = 16;

function isCompleteness(value) {
  return (
    hasMembers(value, ["consistency", "runs", "snapshot"]) &&
    isHashes(value.consistency, CONSISTENCY_HASHES_MAX) &&
    isList(value.runs, RUNS_MAX, isRun) &&
    hasMembers(value.snapshot, ["payload", "payloadType", "signatures"]) &&
    isText(value.snapshot.payload) &&
    isText(value.snapshot.payloadType) &&
    isList(value.snapshot.signatures, SIGNATURES_MAX, isSnapshotSignature) &&
    value.snapshot.signatures.length > 0
  );
}

const isSnapshotSignature = (value) => hasMembers(value, ["keyid", "sig"]) && isText(value.keyid) && isText(value.sig);

function isRun(value) {
  return (
    hasMembers(value, ["at", "hashes", "jobs", "left", "right"]) &&
    isInteger(value.at, 0) &&
    (value.hashes === null || isHashes(value.hashes, INCLUSION_HASHES_MAX)) &&
    isInteger(value.jobs, 1) &&
    [value.left, value.right].every((each) => each === null || isNeighbour(each))
  );
}

function isNeighbour(value) {
  return (
    hasMembers(value, ["count", "digest", "hashes", "key"]) &&
    isInteger(value.count, 1) &&
    isHashes([value.digest, value.key], 2) &&
    isHashes(value.hashes, INCLUSION_HASHES_MAX)
  );
}

function isEntry(value) {
  if (!hasMembers(value, ["inclusion", "row"]) || !isHashes(value.inclusion, INCLUSION_HASHES_MAX)) return false;
  // The members of a row and their types are those that its one line has.
  return isObject(value.row) && canonical(value.row) === canonicalEntry(value.row);
}

function isExtended(value) {
  return (
    hasMembers(value, ["consistency", "size"]) &&
    isHashes(value.consistency, CONSISTENCY_HASHES_MAX) &&
    isInteger(value.size, 1)
  );
}

function isKeys(value) {
  const members = ["algorithm", "key_id", "not_after", "not_before", "public_key_pem", "revoked_from_hlc"];
  const isKey = (key) =>
    hasMembers(key, members) &&
    ["algorithm", "key_id", "public_key_pem"].every((name) => isText(key[name])) &&
    ["not_after", "not_before", "revoked_from_hlc"].every((name) => isTextOrNull(key[name]));
  return (
    hasMembers(value, ["keys", "log_verifier_keys", "root_key_id"]) &&
    isList(value.keys, KEYS_MAX, isKey) &&
    isList(value.log_verifier_keys, KEYS_MAX, (each) => isText(each)) &&
    isTextOrNull(value.root_key_id)
  );
}

/** The receipt in a file, of its form and in its one spelling, its statement about it; no signature is judged. */
function openReceipt(bytes) {
  if (bytes.length > FILE_BYTES_MAX) {
    throw new ReceiptInvalid(`a receipt is at most ${FILE_BYTES_MAX} bytes long, this file is longer`);
  }
  let file;
  let envelope;
  try {
    const text = fromUtf8(bytes, "the file");
    file = parseJson(text, "the file");
    refuseOtherForms(file);
    if (canonical(file) !== text) throw new ReceiptInvalid("the file is not canonical JSON");
    const [{ keyid: keyId, sig }] = file.statement.signatures;
    envelope = { payload: fromBase64(file.statement.payload, "payload"), signatures: [] };
    envelope.signatures.push({ keyId, signature: fromBase64(sig, "sig") });
  } catch (error) {
    if (error instanceof ReceiptInvalid || !(error instanceof Malformed)) throw error;
    throw new ReceiptInvalid(`it is no receipt, or one of another version: ${error.message}`);
  }
  if (canonical(statementOf(file.receipt)) !== new TextDecoder().decode(envelope.payload)) {
    throw new ReceiptInvalid("the statement is not about this receipt: something was changed since it was signed");
  }
  return { receipt: file.receipt, envelope, own: checked(file.receipt) };
}

function refuseOtherForms(file) {
  if (!hasMembers(file, ["receipt", "statement"])) throw new Malformed("it has other members");
  const { receipt, statement } = file;
  const isWhole = isObject(receipt) && "completeness" in receipt;
  const members = [...Object.keys(FIELDS), ...(isWhole ? ["completeness"] : [])];
  if (!hasMembers(receipt, members)) throw new Malformed("its receipt has other members");
  if (isWhole && !isCompleteness(receipt.completeness)) throw new Malformed("completeness is not of its form");
  for (const [name, isOfItsForm] of Object.entries(FIELDS)) {
    if (!isOfItsForm(receipt[name])) throw new Malformed(`${name} is not of its form`);
  }
  const isStatement =
    hasMembers(statement, ["payload", "payloadType", "signatures"]) &&
    isText(statement.payload) &&
    statement.payloadType === PAYLOAD_TYPE &&
    isList(statement.signatures, 1, isSignature) &&
    statement.signatures.length === 1;
  if (!isStatement) throw new Malformed("its statement is no envelope with one signature");
}

function isSignature(value) {
  const isKeyId = hasMembers(value, ["keyid", "sig"]) && isText(value.keyid) && /^[0-9a-f]{16}$/.test(value.keyid);
  return isKeyId && isText(value.sig, 256);
}

/** What is signed: a statement with the digest of the receipt as it stands in the file. */
function statementOf(receipt) {
  const digest = { sha256: toHex(sha256(toUtf8(canonical(receipt)))) };
  return {
    _type: STATEMENT_TYPE,
    subject: [{ name: `${receipt.tenant_id}/${receipt.job_id}`, digest }],
    predicateType: PREDICATE_TYPE,
    predicate: Object.fromEntries(STATED.map((name) => [name, receipt[name]])),
  };
}

/** The receipt's checkpoint, once the receipt is not at odds with itself. */
function checked(receipt) {
  const seqs = seqsOf(receipt);
  const lastSeq = seqs.at(-1) ?? 0;
  if (seqs.some((seq, at) => at > 0 && seqs[at - 1] >= seq)) {
    throw new ReceiptInvalid("the entries do not stand in the order of their seq, each once");
  }
  const isWhole = "completeness" in receipt;
  const faults = [
    [receipt.covers === "entry" && seqs.length !== 1, `a receipt for one entry holds ${seqs.length}`],
    [(seqs.length > 0) === (receipt.covers === "absent"), `it covers ${receipt.covers} and holds ${seqs.length} entries`],
    [receipt.format_version !== (isWhole ? 2 : 1), "format_version and completeness disagree"],
    [isWhole && receipt.covers === "entry", "a receipt for one entry speaks of others"],
    [!isWhole && receipt.covers === "absent", "a receipt for a job without entries proves nothing"],
  ];
  for (const [isWrong, detail] of faults) if (isWrong) throw new ReceiptInvalid(detail);
  let own;
  try {
    own = readCheckpoint(receipt.checkpoint);
  } catch (error) {
    throw new ReceiptInvalid(`the receipt's checkpoint is none: ${error.message}`);
  }
  const origin = `${receipt.log_origin}/${receipt.tenant_id}`;
  if (own.origin !== origin) {
    throw new ReceiptInvalid(`the checkpoint is of log ${quoted(own.origin)}, not of ${quoted(origin)}`);
  }
  if (own.size < lastSeq)
    throw new ReceiptInvalid(`the checkpoint covers ${own.size} entries, and seq ${lastSeq} is here`);
  for (const { row } of receipt.entries) {
    if (row.tenant_id !== receipt.tenant_id || row.job_id !== receipt.job_id) {
      throw new ReceiptInvalid(`seq ${row.seq} is of another tenant or job`);
    }
  }
  return own;
}

function seqsOf(receipt) {
  return receipt.entries.map(({ row }) => row.seq);
}

// --- the steps ------------------------------------------------------------------------------------

/** The verdict on a file, whatever it holds, and the receipt where it could be opened. */
export async function judgeReceipt(file, { keyring, kept: keptNote, witnesses, policy }) {
  const bytes = new Uint8Array(await file.slice(0, FILE_BYTES_MAX + 1).arrayBuffer());
  const about = { sha256: toHex(sha256(bytes)), bytes: file.size };
  let kept = null;
  if (keptNote !== null) {
    try {
      kept = await judgeKept(keptNote, keyring);
    } catch (error) {
      if (!(error instanceof Malformed)) throw error;
      const why = `the checkpoint that was given does not hold: ${error.message}`;
      return { verdict: brokenVerdict("checkpoint", "checkpoint-given", why, null, about), receipt: null };
    }
  }
  let receipt = null;
  let own;
  let signed;
  try {
    // 1. The file, and the statement that covers every byte of it.
    const opened = openReceipt(bytes);
    ({ receipt, own } = opened);
    // 2. Who signed that.
    signed = await judgeEnvelope(
      opened.envelope,
      keyring,
      (why) => new ReceiptForged(`the receipt's signature does not hold: ${why}`),
    );
  } catch (error) {
    if (!(error instanceof ReceiptInvalid)) throw error;
    const kind = error instanceof ReceiptForged ? "receipt-signature" : "receipt";
    const told = receipt === null ? about : { ...about, ...aboutReceipt(receipt, own) };
    return { verdict: brokenVerdict("receipt", kind, error.message, receipt, told), receipt: null };
  }
  // 3. The entries, 4. the checkpoint's signature, and 5. that the checkpoint covers the entries.
  const findings = new Findings();
  findings.begin("links", "payloads", "tree", "signatures");
  const reliedOnV1 = checkApart(
    receipt.entries.map(({ row }) => row),
    findings,
  );
  const callers = new CallerChecker(receipt.tenant_id, findings, keyring);
  for (const { row } of receipt.entries) await callers.check(row);
  const logSigned = await judgeOwn(receipt, keyring);
  checkInclusion(receipt, own, findings);
  let verdict = verdictOf(receipt, findings, reliedOnV1, signed, logSigned);
  // 6. Statements of external witnesses, 7. what was kept.
  const anchors = await judgeAnchors(receipt.anchors, own, { keyring, witnesses, policy });
  for (const { status, detail, said } of anchors) {
    if (status === "broken") {
      verdict = withBreak(
        verdict,
        rollbackAt(said.size, detail, said.root, own.size === said.size ? toHex(own.root) : null),
      );
    }
  }
  verdict = withKept({ ...verdict, anchors: anchors.map(({ said, key, ...told }) => told) }, receipt, own, kept);
  // 8. That there are no other entries.
  const whole = await judgeCompleteness(receipt, own, keyring);
  if (whole !== null) {
    const verdicts = { ...verdict.verdicts, completeness: whole.verdict };
    verdict = { ...verdict, verdicts, valid: verdict.valid && !["broken", "unknown_key"].includes(whole.verdict) };
  }
  verdict = withSignatures(verdict, signed, logSigned, whole);
  verdict = withQuorum(verdict, anchors, policy, Math.max(verdict.to_seq, whole?.toSeq ?? 0));
  const complete = { complete_from_seq: whole?.fromSeq ?? null, complete_to_seq: whole?.toSeq ?? null };
  const told = { ...about, ...aboutReceipt(receipt, own, signed, logSigned), ...complete };
  const limits = limitsOf(complete);
  return {
    verdict: { ...verdict, not_checked: leftOut(verdict, own, keyring, kept), limits, receipt: told },
    receipt,
  };
}

/** What the receipt does not prove, in words. */
function limitsOf({ complete_from_seq: first, complete_to_seq: last }) {
  if (last === null) return LIMITS;
  const before = first === 1 ? [] : [`what came before seq ${first}, where the index of jobs begins`];
  return [`what came after seq ${last}: of later entries a receipt shows those in it`, ...before, SAYS];
}

/** Whether the receipt proves that there are no other entries, and up to which one; null if it does not say so. */
async function judgeCompleteness(receipt, own, keyring) {
  const said = receipt.completeness;
  if (said === undefined) return null;
  let opened;
  try {
    opened = await openSnapshot(said.snapshot, keyring);
    const { claim } = opened;
    const faults = [
      [claim.tenant_id !== receipt.tenant_id, `the snapshot is of tenant ${claim.tenant_id}`],
      [claim.job_index === undefined, "the snapshot has no index of jobs"],
      [claim.to_seq > own.size, `the snapshot covers ${claim.to_seq} entries, the checkpoint ${own.size}`],
    ];
    for (const [isWrong, detail] of faults) if (isWrong) throw new ProofError(detail);
    verifyConsistency(claim.tree_size, own.size, fromHex(claim.tree_root), own.root, said.consistency.map(fromHex));
    const entries = receipt.entries
      .filter(({ row }) => row.seq > claim.index_begin && row.seq <= claim.to_seq)
      .map(({ row }) => ({ index: row.seq - 1, leaf: leafHash(fromHex(row.chain_link)) }));
    const index = { begin: claim.index_begin, size: claim.to_seq, roots: claim.job_index };
    verifyJob(receipt.job_id, index, entries, said.runs);
  } catch (error) {
    if (!(error instanceof ProofError || error instanceof Malformed)) throw error;
    return { verdict: "broken", detail: `that there are no other entries: ${error.message}`, toSeq: null };
  }
  const { verdict, detail, claim } = opened;
  if (verdict === "ok" || verdict === "not_checked") {
    return { verdict, detail, fromSeq: claim.index_begin + 1, toSeq: claim.to_seq };
  }
  const what = "the snapshot with the index of jobs";
  if (verdict === LACKS_ONE) return { verdict: "not_checked", detail: `${what} carries ${detail}`, toSeq: null };
  return { verdict, detail: `${what}: ${detail}`, toSeq: null };
}

/** A signature of the statement, by a key that is held, does not hold. */
class ReceiptForged extends ReceiptInvalid {}

async function judgeOwn(receipt, keyring) {
  if (keyring === null) return { verdict: "not_checked", detail: null, signers: [] };
  try {
    const { unknown, signers } = await judgeCheckpoint(receipt.checkpoint, keyring);
    if (unknown === null) return { verdict: "ok", detail: null, signers };
    return { verdict: "unknown_key", detail: `the checkpoint: ${unknown}`, signers };
  } catch (error) {
    if (!(error instanceof Malformed)) throw error;
    return {
      verdict: "broken",
      detail: `the signature of the checkpoint does not hold: ${error.message}`,
      signers: [],
    };
  }
}

function checkInclusion(receipt, own, findings) {
  for (const { row, inclusion } of receipt.entries) {
    const link = hashBytes(row.chain_link);
    try {
      if (link === null) throw new ProofError("its link is not 64 lowercase hex digits");
      verifyInclusion(row.seq - 1, own.size, leafHash(link), inclusion.map(fromHex), own.root);
    } catch (error) {
      if (!(error instanceof ProofError)) throw error;
      findings.add("tree", row.seq, `the checkpoint does not cover seq ${row.seq} as it is here: ${error.message}`);
    }
  }
}

function verdictOf(receipt, findings, reliedOnV1, signed, logSigned) {
  const found = findings.verdicts();
  const seqs = seqsOf(receipt);
  const verdicts = {
    receipt: signed.verdict,
    links: found.links === "ok" && reliedOnV1 ? "not_checked" : found.links,
    payloads: found.payloads,
    tree: found.tree,
    signatures: graver(logSigned.verdict, found.signatures),
    checkpoint: "not_checked",
  };
  return {
    tenant_id: receipt.tenant_id,
    valid: !Object.values(verdicts).some((each) => each === "broken" || each === "unknown_key"),
    entries_checked: seqs.length,
    from_seq: seqs[0] ?? 0,
    to_seq: seqs.at(-1) ?? 0,
    verdicts,
    first_break: findings.firstBreak(),
    breaks: findings.breaks(),
    compared_with: null,
    not_compared: [],
    anchors: [],
  };
}

function withKept(verdict, receipt, own, kept) {
  if (kept === null) return verdict;
  if (kept.unknown !== null) return withCheckpoint(verdict, "unknown_key");
  const { checkpoint } = kept;
  const agrees = checkpoint.origin === own.origin ? agreesWith(receipt, own, checkpoint) : null;
  if (agrees === null) return { ...verdict, not_compared: [KEPT] };
  if (agrees) return withCheckpoint(verdict, "ok");
  const detail = `the log of the receipt does not begin with the checkpoint of ${KEPT}, of ${checkpoint.size} entries`;
  const root = own.size === checkpoint.size ? toHex(own.root) : null;
  return withBreak(
    withCheckpoint(verdict, "broken"),
    rollbackAt(checkpoint.size, detail, toHex(checkpoint.root), root),
  );
}

/** Whether the log had the root of ``kept`` at its size, null where the receipt does not say. */
function agreesWith(receipt, own, kept) {
  if (kept.size === own.size) return sameBytes(kept.root, own.root);
  if (receipt.extends?.size === kept.size) return leads(kept, receipt.extends.consistency, own);
  for (const anchor of receipt.anchors) {
    let said;
    try {
      said = readCheckpoint(anchor.checkpoint);
    } catch {
      continue;
    }
    if (said.size === kept.size && leads(said, anchor.consistency, own)) return sameBytes(kept.root, said.root);
  }
  return null;
}

/** Whether a proof leads from the tree of ``first`` to that of ``own``. */
function leads(first, consistency, own) {
  try {
    verifyConsistency(first.size, own.size, first.root, own.root, consistency.map(fromHex));
    return true;
  } catch (error) {
    if (!(error instanceof ProofError)) throw error;
    return false;
  }
}

// --- the verdict ----------------------------------------------------------------------------------

function withSignatures(verdict, signed, logSigned, whole) {
  const outcomes = { "checkpoint-signature": logSigned, "receipt-signature": signed, ...(whole && { completeness: whole }) };
  const breaks = { ...verdict.breaks };
  let first = verdict.first_break;
  for (const [kind, { verdict: outcome, detail }] of Object.entries(outcomes)) {
    if (outcome === "broken" || outcome === "unknown_key") {
      breaks[kind] = 1;
      first ??= breakOf(kind, detail);
    }
  }
  return { ...verdict, first_break: first, breaks };
}

function brokenVerdict(aspect, kind, detail, receipt, about) {
  return {
    tenant_id: receipt?.tenant_id ?? null,
    valid: false,
    entries_checked: 0,
    from_seq: 0,
    to_seq: 0,
    verdicts: Object.fromEntries(ASPECTS.map((each) => [each, each === aspect ? "broken" : "not_checked"])),
    first_break: breakOf(kind, detail),
    breaks: { [kind]: 1 },
    compared_with: null,
    not_compared: [],
    anchors: [],
    not_checked: ["the entries: the receipt itself does not hold, so nothing in it says anything"],
    limits: LIMITS,
    receipt: about,
  };
}

function leftOut(verdict, own, keyring, kept) {
  const left = [];
  if (keyring === null) {
    left.push("no key was given, so no signature was checked: the author of the file may have invented all of it");
  }
  if (verdict.verdicts.links === "not_checked") {
    left.push(
      "which entry a link of version 1 is of: it binds neither tenant nor seq, and other entries have the same",
    );
  }
  if (kept === null) {
    left.push("no checkpoint kept elsewhere was given: that the log was longer once would not be seen");
  } else if (kept.unknown !== null) {
    left.push(`the checkpoint given: ${kept.unknown}`);
  } else if (verdict.not_compared.length && kept.checkpoint.origin !== own.origin) {
    left.push(
      `the checkpoint given: it is of log ${quoted(kept.checkpoint.origin)}, the receipt of ${quoted(own.origin)}`,
    );
  } else if (verdict.not_compared.length) {
    left.push(`the checkpoint given: it covers ${kept.checkpoint.size} entries, and ${NO_PROOF}`);
  }
  return left;
}

function aboutReceipt(receipt, own, signed = { keyIds: [] }, logSigned = { signers: [] }) {
  return {
    ...Object.fromEntries(STATED.map((name) => [name, receipt[name]])),
    entries: receipt.entries.map(({ row }) => ({ seq: row.seq, hlc: row.t_hlc, action: row.action })),
    checkpoint: { origin: own.origin, size: own.size, root: toHex(own.root) },
    checkpoint_key_ids: logSigned.signers.map(({ publicKey }) => publicKey.id),
    checkpoint_other_signatures: otherSignatures(own),
    key_ids: signed.keyIds,
  };
}
