// Signed notes, the checkpoints of logs, and cosignatures of witnesses (docs/formats/checkpoint.md).

import { Malformed, fromBase64, hasLoneSurrogate, quoted, toBase64, toHex, toUtf8 } from "./encoding.js";
import { ED25519, KEY_BYTES, ML_DSA_44, PublicKey, UnknownKey } from "./keys.js";
import { DIGEST_BYTES, sha256 } from "./sha256.js";

const NOTE_CHARACTERS_MAX = 2 ** 20;
const SIGNATURES_MAX = 100;
const KEY_HASH_BYTES = 4;
const SIGNATURE_MARK = "— ";
const COSIGNED_NAME_BYTES_MAX = 255;
const LOG_KEY = 1;
const WITNESS_KEY = 4;
const ML_DSA_KEY = 6;
const SIGNATURE_BYTES = { [LOG_KEY]: 64, [WITNESS_KEY]: 8 + 64, [ML_DSA_KEY]: 8 + 2420 };
const TREE_HEAD = /^([^\n]+)\n(0|[1-9][0-9]{0,18})\n([A-Za-z0-9+/]{43}=)\n/;
const TREE_SIZE_MAX = 2n ** 63n - 1n;
const TIME_BYTES = 8;
const TIME_MAX_S = 253_402_300_799n;

const CONTROL = /[\0-\x09\x0b-\x1f]/;
// What Python calls a space, so that both read the same names.
const SPACE = /[\t-\r\x1c-\x20\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]/;

/** A public key under a name, which is that of a log or, where ``isWitness``, of a witness. */
export class VerifierKey {
  constructor(name, publicKey, { isWitness = false } = {}) {
    if (!isName(name))
      throw new Malformed(`key name ${quoted(name, 100)} is empty or holds a space, plus or control character`);
    if (publicKey.isSecond && toUtf8(name).length > COSIGNED_NAME_BYTES_MAX)
      throw new Malformed(`key name ${quoted(name, 100)} is longer than ${COSIGNED_NAME_BYTES_MAX} bytes`);
    this.name = name;
    this.publicKey = publicKey;
    this.type = typeOf(publicKey.algorithm, isWitness);
    this.typed = Uint8Array.of(this.type, ...publicKey.raw);
    this.hash = toHex(sha256(toUtf8(`${name}\n`), this.typed).subarray(0, KEY_HASH_BYTES));
  }

  /** The key that ``name+hash+base64`` spells. */
  static parse(text, { isWitness = false } = {}) {
    const [name, hash = "", ...rest] = text.split("+");
    const typed = fromBase64(rest.join("+"), "the verifier key");
    const algorithm = [ED25519, ML_DSA_44].find((each) => typed[0] === typeOf(each, isWitness));
    if (algorithm === undefined || typed.length !== 1 + KEY_BYTES[algorithm]) {
      throw new Malformed(`verifier key ${quoted(text)} is not one of a ${isWitness ? "witness" : "log"}`);
    }
    const key = new VerifierKey(name, PublicKey.ofRaw(typed.subarray(1), algorithm), { isWitness });
    if (key.hash !== hash) throw new Malformed(`verifier key ${quoted(text)} should have the hash ${key.hash}`);
    return key;
  }

  get text() {
    return `${this.name}+${this.hash}+${toBase64(this.typed)}`;
  }

  /** The seconds since 1970 that a signature under a note of ``text`` states, 0 where none; throws where it does not hold. */
  async timeOf(text, signature) {
    const bytes = SIGNATURE_BYTES[this.type];
    if (signature.length !== bytes) throw new Malformed(`the signature by ${this.name} is not ${bytes} bytes`);
    const start = this.type === LOG_KEY ? 0 : TIME_BYTES;
    const timeS = BigInt(`0x0${toHex(signature.subarray(0, start))}`);
    if (timeS > TIME_MAX_S) throw new Malformed(`the signature by ${this.name} names no time`);
    if (!(await this.publicKey.made(signature.subarray(start), this.#signed(text, timeS)))) {
      throw new Malformed(`the note's signature by ${this.name}+${this.hash} does not hold`);
    }
    return Number(timeS);
  }

  /** The bytes that the key signs for a note of ``text``; those of a log with an Ed25519 key name no time. */
  #signed(text, timeS) {
    if (this.type === LOG_KEY) return toUtf8(text);
    if (this.type === WITNESS_KEY) return toUtf8(`cosignature/v1\ntime ${timeS}\n${text}`);
    const [, origin, size, root] = TREE_HEAD.exec(text) ?? [];
    if (origin === undefined || toUtf8(origin).length > COSIGNED_NAME_BYTES_MAX) {
      throw new Malformed(`${ML_DSA_44} signs checkpoints, of an origin of ${COSIGNED_NAME_BYTES_MAX} bytes at most`);
    }
    return Uint8Array.of(
      ...toUtf8("subtree/v1\n\0"),
      ...[...named(this.name), ...u64(timeS)],
      ...[...named(origin), ...u64(0n), ...u64(BigInt(size))],
      ...fromBase64(root, "the root hash"),
    );
  }
}

/** The first byte of a verifier key. */
function typeOf(algorithm, isWitness) {
  if (algorithm === ML_DSA_44) return ML_DSA_KEY;
  return isWitness ? WITNESS_KEY : LOG_KEY;
}

/** A text behind its length in one byte. */
function named(text) {
  const bytes = toUtf8(text);
  return [bytes.length, ...bytes];
}

function u64(number) {
  const bytes = new DataView(new ArrayBuffer(8));
  bytes.setBigUint64(0, number);
  return new Uint8Array(bytes.buffer);
}

export function isName(name) {
  return name !== "" && !name.includes("+") && isClean(name) && !name.includes("\n") && !SPACE.test(name);
}

function isClean(text) {
  return !CONTROL.test(text) && !hasLoneSurrogate(text);
}

/** The text of a note and its signature lines, unverified. */
export function parseNote(content) {
  if ([...content].length > NOTE_CHARACTERS_MAX) {
    throw new Malformed(`the note is longer than ${NOTE_CHARACTERS_MAX} characters`);
  }
  if (!isClean(content)) throw new Malformed("the note holds a control character or a lone surrogate");
  const end = content.lastIndexOf("\n\n");
  const lines = content.slice(end + 2).split("\n");
  if (end < 0 || lines.length < 2 || lines.pop() !== "") {
    throw new Malformed("the note has no signatures after an empty line, or its last line has no end");
  }
  if (lines.length > SIGNATURES_MAX) throw new Malformed(`the note has more than ${SIGNATURES_MAX} signatures`);
  return { text: content.slice(0, end + 1), signatures: lines.map(parseSignatureLine) };
}

function parseSignatureLine(line) {
  const [name, ...rest] = line.slice(SIGNATURE_MARK.length).split(" ");
  if (!line.startsWith(SIGNATURE_MARK) || !isName(name)) {
    throw new Malformed(`signature line ${quoted(line, 100)} of the note is malformed`);
  }
  const data = fromBase64(rest.join(" "), "a signature of the note");
  if (data.length <= KEY_HASH_BYTES)
    throw new Malformed(`signature line ${quoted(line, 100)} of the note holds no signature`);
  return { name, hash: toHex(data.subarray(0, KEY_HASH_BYTES)), signature: data.subarray(KEY_HASH_BYTES) };
}

/** The checkpoint that a note holds, whoever signed it: nobody vouches for it here. */
export function readCheckpoint(content) {
  const note = parseNote(content);
  const lines = note.text.split("\n");
  if (lines.length < 4 || lines.pop() !== "" || lines.includes("")) {
    throw new Malformed("a checkpoint is three or more lines, none of them empty");
  }
  const [origin, size, rootText] = lines;
  if (!/^(0|[1-9][0-9]{0,18})$/.test(size) || BigInt(size) > TREE_SIZE_MAX) {
    throw new Malformed(`tree size ${quoted(size, 40)} of the checkpoint is no number up to ${TREE_SIZE_MAX}`);
  }
  const root = fromBase64(rootText, "root hash of the checkpoint");
  if (root.length !== DIGEST_BYTES)
    throw new Malformed(`root hash of the checkpoint has ${root.length} bytes, not ${DIGEST_BYTES}`);
  // Above 2^53 - 1 a number would be another size.
  return { origin, size: Number.isSafeInteger(Number(size)) ? Number(size) : BigInt(size), root, note };
}

/** The checkpoint in a note, once its log is found to have signed it; with ``origin`` one of that log alone. */
export async function openCheckpoint(content, keyring, origin = null) {
  const checkpoint = readCheckpoint(content);
  if (origin !== null && checkpoint.origin !== origin) {
    throw new Malformed(`the checkpoint is of log ${quoted(checkpoint.origin)}, not of ${quoted(origin)}`);
  }
  if (!isName(checkpoint.origin))
    throw new Malformed(`origin ${quoted(checkpoint.origin)} of the checkpoint cannot name a key`);
  const signers = await noteSignersOf(checkpoint.note, verifiersOf(keyring, checkpoint.origin));
  const own = signers.filter((key) => key.name === checkpoint.origin).map(({ publicKey }) => publicKey);
  if (!own.length) {
    throw new UnknownKey(`none of the keys that signed the checkpoint is one of log ${quoted(checkpoint.origin)}`);
  }
  const lacking = keyring.lacks(own);
  if (lacking !== null) throw new UnknownKey(`the checkpoint carries ${lacking}`);
  return { ...checkpoint, signers };
}

/** The checkpoint in a note and why no held key vouches for it: null where one does, and where no keys are held. */
export async function judgeCheckpoint(content, keyring) {
  const checkpoint = readCheckpoint(content);
  if (keyring === null) return { checkpoint, unknown: null, signers: [] };
  try {
    const { signers } = await openCheckpoint(content, keyring);
    return { checkpoint, unknown: null, signers };
  } catch (error) {
    if (!(error instanceof UnknownKey)) throw error;
    return { checkpoint, unknown: error.message, signers: [] };
  }
}

/** The same of one that the reader kept: it counts against a log and never for it, so one signature is enough. */
export function judgeKept(content, keyring) {
  return judgeCheckpoint(content, keyring?.demandingOne() ?? null);
}

/** A checkpoint carries no time, so a revoked key does not count. */
function verifiersOf(keyring, origin) {
  const isShort = toUtf8(origin).length <= COSIGNED_NAME_BYTES_MAX;
  const verifiers = keyring.keys
    .filter((key) => key.algorithm === ED25519 || (key.isSecond && isShort))
    .map((key) => new VerifierKey(origin, key))
    .concat(keyring.logVerifierKeys.map((text) => VerifierKey.parse(text)));
  return verifiers.filter(({ publicKey }) => !keyring.get(publicKey.id)?.revokedFrom);
}

/** The verifiers that signed a note, at least one; throws where one is named and its signature does not hold. */
export async function noteSignersOf(note, verifiers) {
  const signers = new Map();
  for (const { name, hash, signature } of note.signatures) {
    const key = verifiers.find((each) => each.name === name && each.hash === hash);
    if (key === undefined) continue;
    await key.timeOf(note.text, signature);
    signers.set(key.text, key);
  }
  if (!signers.size) {
    const named = note.signatures.slice(0, 8).map(({ name, hash }) => `${quoted(name)}+${hash}`);
    throw new UnknownKey(`none of the keys that signed the note is known: ${named.join(", ")}`);
  }
  return [...signers.values()];
}

/** The time, in seconds since 1970, at which a witness cosigned; throws where its line is missing or does not hold. */
export async function cosignedTime(content, witness) {
  const note = parseNote(content);
  const lines = note.signatures.filter(({ name, hash }) => name === witness.name && hash === witness.hash);
  if (lines.length !== 1) throw new Malformed(`there are ${lines.length} lines of ${witness.name}, not 1`);
  return witness.timeOf(note.text, lines[0].signature);
}

/** Lines under a checkpoint that others than its log signed: who, and by what key hash. */
export function otherSignatures({ origin, note }) {
  return note.signatures.filter(({ name }) => name !== origin).map(({ name, hash }) => ({ name, hash }));
}
