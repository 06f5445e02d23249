// Public keys: how they are read and named, in what time they count, how a signature is checked (docs/formats/keys.md).
// Signatures are judged by WebCrypto, those of ML-DSA by a library, as browsers lack it. What is in a ring is trusted, so a ring never comes from the file it judges.

import { Malformed, fromBase64, quoted, sameBytes, toBase64, toHex } from "./encoding.js";
import { compareHlcs, parseHlc } from "./hlc.js";
import { isObject, parseJson } from "./json.js";
import { ml_dsa44 } from "./ml_dsa.js";
import { sha256 } from "./sha256.js";

export const ED25519 = "ed25519";
export const ECDSA_P256 = "ecdsa-p256";
export const ML_DSA_44 = "ml-dsa-44";

const KEYS_MAX = 1000;

/** DER of a SubjectPublicKeyInfo up to the key itself; there is no other spelling of these. */
const PREFIXES = {
  [ED25519]: Uint8Array.of(0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00),
  [ECDSA_P256]: Uint8Array.of(
    ...[0x30, 0x59, 0x30, 0x13, 0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01],
    ...[0x06, 0x08, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x03, 0x01, 0x07, 0x03, 0x42, 0x00, 0x04],
  ),
  [ML_DSA_44]: Uint8Array.of(
    ...[0x30, 0x82, 0x05, 0x32, 0x30, 0x0b, 0x06, 0x09, 0x60, 0x86, 0x48, 0x01, 0x65, 0x03, 0x04, 0x03, 0x11],
    ...[0x03, 0x82, 0x05, 0x21, 0x00],
  ),
};
export const KEY_BYTES = { [ED25519]: 32, [ECDSA_P256]: 64, [ML_DSA_44]: 1312 };
const WEB_CRYPTO = { [ED25519]: { name: "Ed25519" }, [ECDSA_P256]: { name: "ECDSA", namedCurve: "P-256" } };
const VERIFYING = { [ED25519]: { name: "Ed25519" }, [ECDSA_P256]: { name: "ECDSA", hash: "SHA-256" } };
const ED25519_SIGNATURE_BYTES = 64;

/** The key that signed is not held, or does not count. */
export class UnknownKey extends Error {}

/** One key and when it counts; bounds that are null do not bind. Times are texts and milliseconds of 1970. */
export class PublicKey {
  constructor(der, { notBefore = null, notAfter = null, revokedFrom = null } = {}) {
    this.der = der;
    this.algorithm = Object.keys(PREFIXES).find(
      (name) =>
        der.length === PREFIXES[name].length + KEY_BYTES[name] &&
        sameBytes(der.subarray(0, PREFIXES[name].length), PREFIXES[name]),
    );
    if (this.algorithm === undefined) throw new Malformed("keys must be Ed25519, ECDSA P-256 or ML-DSA-44");
    this.id = toHex(sha256(der)).slice(0, 16);
    this.notBefore = notBefore;
    this.notAfter = notAfter;
    this.revokedFrom = revokedFrom;
    if (notBefore && notAfter && notAfter.ms < notBefore.ms)
      throw new Malformed(`key ${this.id} ends before it begins`);
  }

  static ofRaw(raw, algorithm) {
    return new PublicKey(Uint8Array.of(...PREFIXES[algorithm], ...raw));
  }

  static ofPem(block) {
    return new PublicKey(derOfPem(block));
  }

  /** The key that one item of ``/v1/keys`` describes. */
  static ofJson(value) {
    if (!isObject(value)) throw new Malformed("a key must be a JSON object");
    const text = (name) => {
      const found = value[name] ?? null;
      if (found !== null && typeof found !== "string") throw new Malformed(`${name} of a key must be text`);
      return found;
    };
    const revoked = text("revoked_from_hlc");
    const key = new PublicKey(derOfPem(text("public_key_pem") ?? ""), {
      notBefore: timeOf(text("not_before"), "not_before"),
      notAfter: timeOf(text("not_after"), "not_after"),
      revokedFrom: revoked === null ? null : parseHlc(revoked),
    });
    if (text("key_id") !== key.id)
      throw new Malformed(`key id ${quoted(text("key_id"))} is not that of its key, ${key.id}`);
    if (text("algorithm") !== key.algorithm) throw new Malformed(`key ${key.id} is not ${quoted(text("algorithm"))}`);
    return key;
  }

  /** Whether a node signs with it only beside another key. */
  get isSecond() {
    return this.algorithm === ML_DSA_44;
  }

  /** The key without the bytes that name its algorithm. */
  get raw() {
    return this.der.subarray(PREFIXES[this.algorithm].length);
  }

  get pem() {
    return `-----BEGIN PUBLIC KEY-----\n${toBase64(this.der)}\n-----END PUBLIC KEY-----\n`;
  }

  /** Whether this key made ``signature`` over ``message``; says nothing of windows. */
  async made(signature, message) {
    if (this.isSecond) return ml_dsa44.verify(signature, message, this.raw);
    const plain = this.algorithm === ED25519 ? signature : rawOfDer(signature);
    if (plain === null || plain.length !== ED25519_SIGNATURE_BYTES) return false;
    this.imported ??= crypto.subtle.importKey("spki", this.der, WEB_CRYPTO[this.algorithm], false, ["verify"]);
    let key;
    try {
      key = await this.imported;
    } catch (error) {
      if (error.name === "NotSupportedError") throw error;
      return false; // Its bytes are no point of the curve, so nothing was ever signed with it.
    }
    return crypto.subtle.verify(VERIFYING[this.algorithm], key, plain, message);
  }

  /** Why this key does not count for what was signed at an HLC; null when it does. */
  refusal(hlc) {
    if (this.notBefore && hlc.physicalMs < BigInt(this.notBefore.ms)) {
      return `key ${this.id} is valid from ${this.notBefore.text}, after HLC ${hlc.text}`;
    }
    if (this.notAfter && hlc.physicalMs > BigInt(this.notAfter.ms)) {
      return `key ${this.id} expired at ${this.notAfter.text}, before HLC ${hlc.text}`;
    }
    if (this.revokedFrom && compareHlcs(hlc, this.revokedFrom) >= 0) {
      return `key ${this.id} is revoked from HLC ${this.revokedFrom.text} on, and this is HLC ${hlc.text}`;
    }
    return null;
  }

  /** The same key with the narrower of both windows and the earlier revocation. */
  narrowed(other) {
    const either = (one, two, isFirst) => (one && two ? (isFirst(one, two) ? one : two) : (one ?? two));
    return new PublicKey(this.der, {
      notBefore: either(this.notBefore, other.notBefore, (one, two) => one.ms >= two.ms),
      notAfter: either(this.notAfter, other.notAfter, (one, two) => one.ms <= two.ms),
      revokedFrom: either(this.revokedFrom, other.revokedFrom, (one, two) => compareHlcs(one, two) <= 0),
    });
  }

  toJson() {
    return {
      key_id: this.id,
      algorithm: this.algorithm,
      public_key_pem: this.pem,
      not_before: this.notBefore?.text ?? null,
      not_after: this.notAfter?.text ?? null,
      revoked_from_hlc: this.revokedFrom?.text ?? null,
    };
  }
}

/** Keys by id. A key given twice counts where both say so. With ``needsBoth`` a first and a second one must have signed. */
export class Keyring {
  constructor(keys, logVerifierKeys = [], callers = null, needsBoth = false) {
    this.byId = new Map();
    this.callers = callers;
    this.needsBoth = needsBoth;
    for (const key of keys) {
      const known = this.byId.get(key.id);
      this.byId.set(key.id, known === undefined ? key : known.narrowed(key));
    }
    if (this.byId.size > KEYS_MAX) throw new Malformed(`a keyring holds at most ${KEYS_MAX} keys`);
    this.logVerifierKeys = [...new Set(logVerifierKeys)];
  }

  /** The ring in the text of a file: PEM, or saved /v1/keys JSON. */
  static ofText(text) {
    return text.trimStart().startsWith("{")
      ? Keyring.ofJson(parseJson(text, "the file"))
      : new Keyring(keysOfPem(text));
  }

  static ofJson(value) {
    const { keys, second_keys: secondKeys = [] } = isObject(value) ? value : {};
    if (!Array.isArray(keys) || !Array.isArray(secondKeys)) {
      throw new Malformed('keys must be {"keys": [...]} as /v1/keys answers');
    }
    const verifierKeys = value.log_verifier_keys ?? [];
    if (!Array.isArray(verifierKeys) || verifierKeys.some((each) => typeof each !== "string")) {
      throw new Malformed("log_verifier_keys must be a list of texts");
    }
    const callers = Array.isArray(value.callers) ? callersOf(value.callers, value.signatures_required ?? []) : null;
    return new Keyring([...keys, ...secondKeys].map(PublicKey.ofJson), verifierKeys, callers);
  }

  static merged(rings) {
    return new Keyring(
      rings.flatMap((ring) => ring.keys),
      rings.flatMap((ring) => ring.logVerifierKeys),
      mergedCallers(rings.flatMap((ring) => ring.callers ?? [])),
    );
  }

  get keys() {
    return [...this.byId.values()];
  }

  get(id) {
    return this.byId.get(id) ?? null;
  }

  /** The same ring, by which a snapshot or a checkpoint counts only if a first and a second key signed it. */
  demandingBoth() {
    if (!this.keys.some((key) => key.isSecond)) {
      const why = "give a list of keys that has one";
      throw new Malformed(`both signatures are demanded, and none of the keys is ${ML_DSA_44}: ${why}`);
    }
    return new Keyring(this.keys, this.logVerifierKeys, this.callers, true);
  }

  /** The same ring, by which any held key is enough. */
  demandingOne() {
    return this.needsBoth ? new Keyring(this.keys, this.logVerifierKeys, this.callers) : this;
  }

  /** Which of the two signatures that are demanded is not among these that hold; null if none is. */
  lacks(signers) {
    if (!this.needsBoth || new Set(signers.map((key) => key.isSecond)).size === 2) return null;
    const missing = signers.some((key) => key.isSecond) ? "first key" : `key of ${ML_DSA_44}`;
    return `no signature by a held ${missing}, and both are demanded`;
  }

  /** The ring as it was at a time: what an external witness saw before a key was revoked still counts. */
  asOf(timeMs) {
    const keys = this.keys.map((key) =>
      key.revokedFrom && BigInt(timeMs) < key.revokedFrom.physicalMs
        ? new PublicKey(key.der, { notBefore: key.notBefore, notAfter: key.notAfter })
        : key,
    );
    return new Keyring(keys, this.logVerifierKeys, this.callers);
  }
}

/** The callers by key id, and what they must sign from when on, as ``/v1/keys`` lists them. */
function callersOf(callers, required) {
  const found = callers.map((item) => {
    if (!isObject(item) || !Array.isArray(item.tenants)) throw new Malformed("a caller must name its tenants");
    const key = PublicKey.ofJson(item);
    const { id, revokedFrom } = key;
    return [id, { id, key, revokedFrom, name: String(item.name), tenants: item.tenants.map(String) }];
  });
  const wanted = required.map((item) => ({
    fromHlc: parseHlc(item.from_hlc),
    tenantId: item.tenant_id,
    types: item.types,
  }));
  return { byId: new Map(found), required: wanted.sort((one, other) => compareHlcs(one.fromHlc, other.fromHlc)) };
}

/** All of these; a key is revoked from where any says. */
function mergedCallers(known) {
  if (!known.length) return null;
  const byId = new Map();
  for (const caller of known.flatMap((each) => [...each.byId.values()])) {
    const other = byId.get(caller.id) ?? caller;
    const ends = [caller.revokedFrom, other.revokedFrom].filter((each) => each !== null).sort(compareHlcs);
    const tenants = [...other.tenants, ...caller.tenants];
    byId.set(caller.id, { ...caller, tenants, revokedFrom: ends[0] ?? null });
  }
  const required = known.flatMap((each) => each.required);
  return { byId, required: required.sort((one, other) => compareHlcs(one.fromHlc, other.fromHlc)) };
}

function derOfPem(block) {
  const body = /^-----BEGIN PUBLIC KEY-----\s+([A-Za-z0-9+/=\s]+)-----END PUBLIC KEY-----$/.exec(String(block).trim());
  if (body === null) throw new Malformed("not a PEM public key");
  return fromBase64(body[1].replace(/\s/g, ""), "a PEM public key");
}

function keysOfPem(text) {
  const blocks = [...text.matchAll(/-----BEGIN ([A-Z0-9 ]+)-----.*?-----END \1-----/gs)];
  if (blocks.some(([, kind]) => kind.endsWith("PRIVATE KEY"))) {
    throw new Malformed("this is a private key: keep it to yourself, and give its public half here");
  }
  if (!blocks.length) throw new Malformed("there is no PEM key in the text");
  return blocks.map(([block]) => PublicKey.ofPem(block));
}

const TIME = /^(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d)(?::(\d\d)(?:[.,](\d+))?)?(Z|[+-]\d\d:?\d\d)?$/i;

/** A time of RFC 3339 as its text and whole milliseconds since 1970; null of null. */
export function timeOf(text, what) {
  if (text === null) return null;
  const match = TIME.exec(text);
  if (match === null) throw new Malformed(`${what} of a key is no RFC 3339 time: ${quoted(text, 40)}`);
  const [, year, month, day, hour, minute, second = "0", fraction = "", zone] = match;
  if (zone === undefined) throw new Malformed(`${what} of a key has no time zone`);
  const fields = [year, month, day, hour, minute, second].map(Number);
  const wall = Date.UTC(fields[0], fields[1] - 1, ...fields.slice(2));
  const spelt = new Date(wall).toISOString().slice(0, 19);
  if (spelt !== `${year}-${month}-${day}T${hour}:${minute}:${second.padStart(2, "0")}`) {
    throw new Malformed(`${what} of a key is no RFC 3339 time: ${quoted(text, 40)}`);
  }
  const [, sign, hours, minutes] = /([+-])(\d\d):?(\d\d)/.exec(zone) ?? [null, "+", "0", "0"];
  const offsetMinutes = (sign === "-" ? -1 : 1) * (60 * Number(hours) + Number(minutes));
  return { text, ms: wall + Number(fraction.padEnd(3, "0").slice(0, 3)) - 60_000 * offsetMinutes };
}

/** The 64 bytes r || s of an ECDSA signature in DER, as WebCrypto takes it; null where it is not DER of two numbers. */
export function rawOfDer(der) {
  const body = der[0] === 0x30 && der[1] === der.length - 2 && der.length < 128 ? der.subarray(2) : null;
  const raw = new Uint8Array(ED25519_SIGNATURE_BYTES);
  let at = 0;
  for (const end of [32, 64]) {
    if (body === null || body[at] !== 0x02) return null;
    const length = body[at + 1];
    const number = body.subarray(at + 2, at + 2 + length);
    const isPadded = number[0] === 0;
    const isNumber = number.length === length && length > 0 && number[0] < 0x80;
    if (!isNumber || (isPadded && !(number[1] >= 0x80))) return null;
    const digits = isPadded ? number.subarray(1) : number;
    if (digits.length > 32) return null;
    raw.set(digits, end - digits.length);
    at += 2 + length;
  }
  return at === body.length ? raw : null;
}
