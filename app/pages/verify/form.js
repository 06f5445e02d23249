// The form of an entry: what holds of every entry that a ledger writes or imports (docs/formats/chain-link.md).

import { HASH, Malformed, toHex, toUtf8 } from "./encoding.js";
import { JOB_EVENTS, TYPE_OF_ACTION } from "./facts.js";
import { parseHlc } from "./hlc.js";
import { canonical, hasMembers, isInteger, isObject, isText, parseJson } from "./json.js";
import { sha256 } from "./sha256.js";

const ACTION = /^[A-Z_]{1,64}$/;
const JOB_ID = /^[A-Za-z0-9._:-]{1,128}$/;
const SUBJECT_BYTES_MAX = 255;
const ORIGIN_BYTES_MAX = 4096;
const ORIGIN_MEMBERS = ["bundle_digest", "chain_link", "log", "node_id", "seq"];
const CONFLICT_MEMBERS = ["action", "digest", "hlc", "kept_digest", "payload", "type"];
const CONFLICT_DIGITS = 40;

/** What no ledger writes about an entry whose columns hold together; null where it has the form of an entry. */
export function faultOf(row) {
  try {
    parseHlc(row.t_hlc);
    checkNames(row.action, row.job_id);
    if (row.link_version === 1) {
      if (row.origin !== null) throw new Malformed("link version 1 binds no origin, yet it has one");
      canonical(asNumbers(parseJson(row.payload, "its payload")));
      return null;
    }
    if (row.origin !== null) checkOrigin(row.origin);
    const payload = canonicalObject(row.payload, "its payload");
    checkMembers(row.action, payload);
    if (row.action === "CONFLICT") checkConflict(row, payload);
    return null;
  } catch (error) {
    if (!(error instanceof Malformed)) throw error;
    return error.message;
  }
}

function checkNames(action, jobId) {
  if (!ACTION.test(action)) throw new Malformed("its action is none");
  const isNamed = isJobEvent(action)
    ? JOB_ID.test(jobId)
    : jobId !== "" && toUtf8(jobId).length <= SUBJECT_BYTES_MAX && [...jobId].every((character) => character >= " ");
  if (!isNamed) throw new Malformed("its job id is none");
}

function isJobEvent(action) {
  return Object.hasOwn(JOB_EVENTS, action);
}

function checkOrigin(text) {
  const origin = toUtf8(text).length <= ORIGIN_BYTES_MAX ? canonicalObject(text, "its origin") : null;
  const isOrigin =
    hasMembers(origin, ORIGIN_MEMBERS) &&
    isText(origin.log) &&
    isText(origin.node_id) &&
    isHash(origin.bundle_digest) &&
    isHash(origin.chain_link) &&
    isInteger(origin.seq, 1);
  if (!isOrigin) throw new Malformed("its origin is not one");
}

function isHash(value) {
  return isText(value) && HASH.test(value);
}

/** What the payload of an entry with this action says in every ledger. */
function checkMembers(action, payload) {
  const type = Object.hasOwn(TYPE_OF_ACTION, action) ? TYPE_OF_ACTION[action] : undefined;
  if (type !== undefined && payload.type !== type) {
    throw new Malformed(`the type of its payload is not ${type}, which ${action} entries have`);
  }
  if (isJobEvent(action) && !isInteger(payload.fence_token)) {
    throw new Malformed("its fence_token is not an integer from 0 to 2^53 - 1");
  }
}

/** A CONFLICT entry holds the event that its HLC is named for (docs/formats/bundle.md, "CONFLICT entries"). */
function checkConflict(row, held) {
  if (!hasMembers(held, CONFLICT_MEMBERS) || !Object.values(held).every((value) => isText(value))) {
    throw new Malformed("it is a CONFLICT entry that holds no event");
  }
  const { physicalMs, logical } = parseHlc(held.hlc);
  const event = toUtf8(canonical([held.hlc, row.job_id, held.action, held.digest]));
  const node = `conflict-${toHex(sha256(event)).slice(0, CONFLICT_DIGITS)}`;
  const digest = toHex(sha256(toUtf8(held.payload)));
  if (digest !== held.digest || row.t_hlc !== `${physicalMs}:${logical}:${node}` || held.action === "CONFLICT") {
    throw new Malformed("it is a CONFLICT entry that does not hold the event it is named for");
  }
  checkNames(held.action, row.job_id);
  checkMembers(held.action, canonicalObject(held.payload, "the payload of the event that it holds"));
}

/** The object that a text in canonical JSON is. */
function canonicalObject(text, what) {
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new Malformed(`${what} is not JSON: ${error.message}`);
  }
  if (!isObject(value) || canonical(value) !== text) throw new Malformed(`${what} is not an object in canonical JSON`);
  return value;
}

/** A value with the numbers that binary64 makes of integers beyond it. */
function asNumbers(value) {
  if (typeof value === "bigint") return Number(value);
  if (Array.isArray(value)) return value.map(asNumbers);
  if (!isObject(value)) return value;
  const found = Object.create(null);
  for (const [name, item] of Object.entries(value)) found[name] = asNumbers(item);
  return found;
}
