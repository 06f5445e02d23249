// What left a chain before the first entry of a bundle (docs/formats/retention.md): the rules of
// ledger/machines/retention.py and signing/retention_statement.py, for the newest PRUNED entry that counts.

import { Forged, parseEnvelope, signersOf } from "./dsse.js";
import { HASH, Malformed, fromHex, fromUtf8, toHex, toUtf8 } from "./encoding.js";
import { parseHlc } from "./hlc.js";
import { canonical, isInteger, isObject, isText, parseJson } from "./json.js";
import { UnknownKey } from "./keys.js";
import { Frontier } from "./merkle.js";
import { sha256 } from "./sha256.js";

const SUBJECT = "retention policy";
const LOOSENING = ["RETENTION_SET", "HOLD_RELEASED", "PRUNED"];
const STATEMENT_TYPE = "application/vnd.tallystick.retention-statement+json";
const KEPT_S_MAX = 100 * 366 * 86_400;
const HLC_CHARACTERS_MAX = 200;

const isHash = (value) => isText(value) && HASH.test(value);
const isHashes = (value) => Array.isArray(value) && value.every(isHash);
const isSeq = (value) => isInteger(value, 1);
const isCount = (value) => isInteger(value, 0);
const isObjectOrNone = (value) => value === undefined || value === null || isObject(value);
const isKept = (value) => isInteger(value, 1) && value <= KEPT_S_MAX;
const FORM = {
  from_seq: isSeq,
  to_seq: isSeq,
  entry_count: isSeq,
  chain_link: isHash,
  tree_root: isHash,
  compact_range: isHashes,
  snapshot: isHash,
  highest_hlc: (value) => isText(value, HLC_CHARACTERS_MAX),
  archive: (value) => isText(value),
  manifests: isHashes,
  decided_ms: isCount,
  never_ended: isCount,
  commitments: isObjectOrNone,
  private_fields: isObjectOrNone,
  period_s: isKept,
  minimum_s: (value) => value === undefined || value === null || isKept(value),
  after: (value) => isObject(value) && Number.isSafeInteger(value.seq) && isText(value.chain_link),
};

/**
 * The floor that a bundle begins at, null where it is a range of a chain. Statements about retention that no held key
 * made are reported, once one of them says that all before the first entry left.
 */
export async function floorOf(bundle, keyring, findings) {
  const { from_seq: fromSeq, tenant_id: tenantId } = bundle.manifest;
  if (fromSeq === 1 || tenantId === "_system") return null;
  const entries = (await bundle.rowsAbout(SUBJECT)).map((row) => ({ row, facts: factsOf(row), loosens: loosens(row) }));
  const states = ({ row, facts, loosens: can }) => can && row.action === "PRUNED" && facts.to_seq === fromSeq - 1;
  if (!entries.some(states)) return null;
  let found = null;
  for (const [at, entry] of entries.entries()) {
    if (!entry.loosens) continue;
    const verdict = await judgeStatement(entry, tenantId, keyring);
    report(entry.row, verdict, findings);
    if (verdict !== "broken" && isFloor(entry, entries[at - 1]?.row)) found = entry;
  }
  if (found === null || found.facts.to_seq !== fromSeq - 1) return null;
  const { facts, row } = found;
  const tree = Frontier.restore(facts.to_seq, facts.compact_range.map(fromHex));
  return { seq: row.seq, toSeq: facts.to_seq, link: facts.chain_link, snapshot: facts.snapshot, tree, facts, row };
}

/** As verdicts have it. */
export function shownFloor({ facts, row }) {
  const { physicalMs } = parseHlc(row.t_hlc);
  const at = physicalMs <= 253_402_300_799_999n ? new Date(Number(physicalMs)).toISOString() : null;
  const commitments = digestOfCarried(facts.commitments ?? null);
  return { to_seq: facts.to_seq, manifest: facts.manifests.at(-1) ?? null, at, seq: row.seq, commitments };
}

/** SHA-256 of the commitments that are carried, null where none are, empty where they have no canonical form. */
function digestOfCarried(said) {
  if (said === null) return null;
  try {
    return toHex(sha256(toUtf8(canonical(said))));
  } catch (error) {
    if (!(error instanceof Malformed)) throw error;
    return "";
  }
}

function factsOf(row) {
  try {
    const facts = parseJson(row.payload, "a payload");
    return isObject(facts) ? facts : {};
  } catch (error) {
    if (!(error instanceof Malformed)) throw error;
    return {};
  }
}

function loosens({ origin, action }) {
  return origin === null && LOOSENING.includes(action);
}

/** Whether a held key that counted then stated exactly these facts of a log of this tenant. */
async function judgeStatement({ row, facts }, tenantId, keyring) {
  try {
    const hlc = parseHlc(row.t_hlc);
    const envelope = parseEnvelope(facts.statement, STATEMENT_TYPE);
    const { statement, type, ...said } = facts;
    const stated = fromUtf8(envelope.payload, "a statement");
    const log = parseJson(stated, "a statement")?.log;
    if (!isText(log) || log.split("/").at(-1) !== tenantId) return "broken";
    if (stated !== canonical({ action: row.action, facts: said, log })) return "broken";
    if (keyring === null) return "not_checked";
    const signers = await signersOf(envelope, keyring, STATEMENT_TYPE);
    return signers.some((key) => key.refusal(hlc) === null) ? "ok" : "unknown_key";
  } catch (error) {
    if (error instanceof UnknownKey) return "unknown_key";
    if (error instanceof Malformed || error instanceof Forged) return "broken";
    throw error;
  }
}

function report({ seq, action }, verdict, findings) {
  findings.begin("signatures");
  if (verdict === "not_checked") findings.leaveUndecided("signatures");
  if (verdict === "unknown_key") {
    const detail = `${action} is signed by a key that is not known, or was not valid then`;
    findings.add("snapshot-signature", seq, detail, { isKeyUnknown: true });
  }
  if (verdict === "broken") {
    findings.add("malformed", seq, `${action} has no statement of an admitted key about what it says`);
  }
}

/** Whether a PRUNED entry is of its form and follows the entry about retention before it. */
function isFloor({ row, facts }, before) {
  if (row.action !== "PRUNED" || !Object.entries(FORM).every(([name, isOfForm]) => isOfForm(facts[name]))) return false;
  const { after, from_seq: from, to_seq: to, entry_count: count, compact_range: hashes } = facts;
  const isNext = before ? after.seq === before.seq && after.chain_link === before.chain_link : after.seq <= to;
  if (!isNext || count !== to - from + 1 || to >= row.seq) return false;
  const tree = Frontier.restore(to, hashes.map(fromHex));
  return tree !== null && toHex(tree.root()) === facts.tree_root;
}
