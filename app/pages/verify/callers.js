// What callers signed (docs/formats/signed-events.md). The rules are those of ledger/verification/caller_check.py.

import { Malformed, fromBase64, quoted, toHex, toUtf8 } from "./encoding.js";
import { JOB_EVENTS } from "./facts.js";
import { compareHlcs, parseHlc } from "./hlc.js";
import { canonical, hasMembers, isInteger, isObject, isText, parseJson } from "./json.js";
import { ProofError, leafHash, rootOfPath } from "./merkle.js";

const KIND = "caller-signature";
const MARK = "signature";
const UNSIGNED = ["actor", "idempotency", "signature"];
const SAID = ["id", "key_id", "not_after_ms", "not_before_ms"];
const OF_ONE = [...SAID, "sig"];
const OF_MANY = [...OF_ONE, "index", "path", "size"];
const WINDOW_MS_MAX = 6 * 86_400_000;
const SIGNATURE_CHARACTERS_MAX = 4096;
const PATH_CHARACTERS_MAX = 2048;
const DIGEST_BYTES = 32;

/** Checks entries one after the other; what callers signed is judged by those that the keyring names. */
export class CallerChecker {
  constructor(tenantId, findings, keyring) {
    Object.assign(this, { tenantId, findings, callers: keyring?.callers ?? null });
    this.required = (this.callers?.required ?? []).filter((each) => each.tenantId === tenantId);
    this.seen = new Map();
  }

  /** Entries of link version 1 are older than signatures. */
  async check(row) {
    if (row.link_version === 1) return;
    if (typeof row.payload !== "string" || !(this.required.length || row.payload.includes(MARK))) return;
    const event = eventIn(row);
    if (event === null) return;
    if (!Object.hasOwn(event.payload, "signature")) {
      this.#checkRequired(row, event);
      return;
    }
    let signature;
    let message;
    try {
      signature = read(event.payload.signature);
      checkTime(signature, event.hlc);
      message = this.#message(event, signature);
    } catch (error) {
      if (!(error instanceof Malformed || error instanceof ProofError)) throw error;
      this.findings.add(KIND, row.seq, `seq ${row.seq} is not as a caller signed it: ${error.message}`);
      return;
    }
    await this.#judge(row, event, signature, message);
    if (row.action !== "CONFLICT") this.#refuseRepetition(row, signature);
  }

  #checkRequired(row, { typeName, hlc }) {
    const applying = this.required.filter((each) => compareHlcs(each.fromHlc, hlc) <= 0);
    if (row.origin !== null || row.action === "CONFLICT" || !applying.at(-1)?.types.includes(typeName)) return;
    this.findings.add(KIND, row.seq, `the caller of seq ${row.seq} must sign ${typeName}, and did not`);
  }

  /** The bytes that the caller must have signed. */
  #message({ jobId, payload }, signature) {
    const said = Object.fromEntries(SAID.map((name) => [name, signature[name]]));
    const signed = Object.fromEntries(Object.entries(payload).filter(([name]) => !UNSIGNED.includes(name)));
    const header = canonical({ ...said, job_id: jobId, tenant_id: this.tenantId });
    const message = toUtf8(`tallystick.signed-event.v1\n${header}\n${canonical(signed)}`);
    if (signature.size === undefined) return message;
    const path = fromBase64(signature.path, "the path");
    const hashes = [];
    for (let at = 0; at < path.length; at += DIGEST_BYTES) hashes.push(path.subarray(at, at + DIGEST_BYTES));
    const root = toHex(rootOfPath(signature.index, signature.size, leafHash(message), hashes));
    return toUtf8(`tallystick.signed-events.v1\n${canonical({ ...said, root, size: signature.size })}`);
  }

  async #judge(row, { hlc }, signature, message) {
    const { findings, callers } = this;
    if (callers === null) {
      findings.leaveUndecided("signatures");
      return;
    }
    const caller = callers.byId.get(signature.key_id);
    const refusal =
      caller === undefined
        ? `key ${signature.key_id} is of no caller that is known`
        : refusalOf(caller, this.tenantId, hlc);
    if (refusal !== null) {
      const detail = `the caller of seq ${row.seq}: ${refusal}`;
      if (row.origin === null) findings.add(KIND, row.seq, detail, { isKeyUnknown: true });
      return;
    }
    if (!(await caller.key.made(fromBase64(signature.sig, "sig"), message))) {
      findings.add(KIND, row.seq, `seq ${row.seq} is not as its caller signed it: key ${signature.key_id} did not`);
    }
  }

  #refuseRepetition(row, signature) {
    const log = row.origin === null ? null : originLog(row.origin);
    const place = canonical([signature.key_id, signature.id, signature.index ?? null, log]);
    const earlier = this.seen.get(place);
    if (earlier === undefined) this.seen.set(place, row.seq);
    else {
      const detail = `seq ${row.seq} repeats what its caller signed once, for seq ${earlier}`;
      this.findings.add(KIND, row.seq, detail);
    }
  }
}

function refusalOf(caller, tenantId, hlc) {
  const isOf = (pattern) => (pattern.endsWith("*") ? tenantId.startsWith(pattern.slice(0, -1)) : pattern === tenantId);
  if (!caller.tenants.some(isOf)) return `caller ${quoted(caller.name)} may not sign events of tenant ${tenantId}`;
  if (caller.revokedFrom === null || compareHlcs(hlc, caller.revokedFrom) < 0) return null;
  return `key ${caller.id} is revoked from HLC ${caller.revokedFrom.text} on, and this is HLC ${hlc.text}`;
}

/** The job event of an entry, or in a CONFLICT entry; null where there is none that can be read. */
function eventIn(row) {
  try {
    let { action, payload, t_hlc: hlc } = row;
    if (action === "CONFLICT") ({ action, payload, hlc } = parseJson(payload, "its payload"));
    if (!Object.hasOwn(JOB_EVENTS, action)) return null;
    const read = parseJson(payload, "its payload");
    if (!isObject(read)) return null;
    return { payload: read, hlc: parseHlc(hlc), jobId: row.job_id, typeName: JOB_EVENTS[action] };
  } catch (error) {
    if (error instanceof Malformed) return null;
    throw error;
  }
}

function read(value) {
  const isOfMany = isObject(value) && OF_MANY.some((name) => !OF_ONE.includes(name) && Object.hasOwn(value, name));
  const isWhole =
    hasMembers(value, isOfMany ? OF_MANY : OF_ONE) &&
    isText(value.id) &&
    /^[!-~]{1,255}$/.test(value.id) &&
    isText(value.key_id) &&
    /^[0-9a-f]{16}$/.test(value.key_id) &&
    isText(value.sig, SIGNATURE_CHARACTERS_MAX) &&
    ["not_after_ms", "not_before_ms"].every((name) => isInteger(value[name])) &&
    (!isOfMany || (isInteger(value.index) && isInteger(value.size) && isText(value.path, PATH_CHARACTERS_MAX)));
  if (!isWhole) throw new Malformed("signature is malformed");
  fromBase64(value.sig, "sig");
  return value;
}

function checkTime(signature, hlc) {
  const lengthMs = signature.not_after_ms - signature.not_before_ms;
  const isInside = BigInt(signature.not_before_ms) <= hlc.physicalMs && hlc.physicalMs <= BigInt(signature.not_after_ms);
  if (!(lengthMs >= 0 && lengthMs <= WINDOW_MS_MAX && isInside)) throw new Malformed("signature: is for other times");
}

/** The log in an origin; null where it has none, as it is then malformed, which is reported elsewhere. */
function originLog(text) {
  try {
    const origin = parseJson(text, "its origin");
    return isObject(origin) && isText(origin.log) ? origin.log : null;
  } catch (error) {
    if (error instanceof Malformed) return null;
    throw error;
  }
}
