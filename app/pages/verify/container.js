// The container of a bundle (docs/formats/bundle.md): a tar in which nothing is left to choose, read byte by byte.

import { Malformed, quoted, sameBytes, toHex, toUtf8 } from "./encoding.js";
import { Sha256 } from "./sha256.js";

/** The file is no bundle, or is at odds with itself. */
export class BundleInvalid extends Malformed {}

export const SNAPSHOTS = "snapshots.ndjson";
export const CHECKPOINT = "checkpoint";
export const ANCHORS = "anchors.json";
/** What is kept of the index of jobs of entries that left before the first one. */
export const JOB_INDEX = "job_index.json";
export const KEYS = "keys.json";
export const MANIFEST = "manifest.dsse.json";
/** Stands where the manifest must in a file that is evidence of a broken chain, and no bundle. */
export const EVIDENCE = "evidence.dsse.json";
/** Members behind the entries, in this order. */
const TAIL = [SNAPSHOTS, CHECKPOINT, ANCHORS, JOB_INDEX, KEYS, MANIFEST];
/** Those of them that a bundle may lack. */
const OPTIONAL = [ANCHORS, JOB_INDEX];

/** The members behind the entries of a bundle whose members have these names. */
export function tailOf(names) {
  return TAIL.filter((name) => !OPTIONAL.includes(name) || names.slice(-OPTIONAL.length - 1).includes(name));
}

export const ENTRY_PARTS_MAX = 100_000;
export const ROWS_A_PART_MAX = 10_000;
export const PART_BYTES_MAX = 8 << 20;
export const ROW_BYTES_MAX = 136 << 20;
export const SNAPSHOT_ROW_BYTES_MAX = 1 << 20;

const BLOCK_BYTES = 512;
const READ_BYTES = 4 << 20;
/** Characters of a text of evidence that are repeated. */
const EVIDENCE_TEXT_MAX = 400;
const ZEROS = new Uint8Array(BLOCK_BYTES);

export function entriesName(number) {
  return `entries/${String(number).padStart(6, "0")}.ndjson.gz`;
}

export function compressedBytesMax(rawBytes) {
  return rawBytes + Math.floor(rawBytes / 1000) + 1024;
}

/** Most bytes that a member may have, in a bundle with so many entry parts so far. */
export function memberBytesMax(name, entryParts) {
  const bounds = {
    [SNAPSHOTS]: 2 ** 33 - BLOCK_BYTES,
    [CHECKPOINT]: 1 << 20,
    [ANCHORS]: 16 << 20,
    [JOB_INDEX]: 64 << 20,
    [KEYS]: 4 << 20,
    [MANIFEST]: (64 << 10) + 512 * entryParts,
  };
  return bounds[name] ?? compressedBytesMax(ROW_BYTES_MAX);
}

/** The one header of a member of this name and size. */
function tarHeader(name, size) {
  const header = new Uint8Array(BLOCK_BYTES);
  const put = (at, text) => header.set(toUtf8(text), at);
  put(0, name);
  put(100, "0000644\0" + "0000000\0" + "0000000\0");
  put(124, size.toString(8).padStart(11, "0") + "\0" + "00000000000\0");
  put(148, " ".repeat(8) + "0");
  put(257, "ustar\0" + "00");
  const checksum = header.reduce((sum, byte) => sum + byte, 0);
  put(148, checksum.toString(8).padStart(6, "0") + "\0 ");
  return header;
}

function parseTarHeader(block) {
  const ascii = String.fromCharCode(...block.subarray(0, 100)).replace(/\0+$/, "");
  const octal = String.fromCharCode(...block.subarray(124, 135));
  const isPlain = /^[\x00-\x7f]*$/.test(ascii) && /^[0-7]{11}$/.test(octal);
  const size = isPlain ? parseInt(octal, 8) : 0;
  if (!isPlain || !sameBytes(tarHeader(ascii, size), block)) {
    throw new BundleInvalid("a tar header is not one of a plain file as bundles have them");
  }
  return { name: ascii, size };
}

/** Names that may stand behind member ``name``, the ``members``-th; none behind the last. */
function namesAfter(name, members) {
  if (TAIL.includes(name)) {
    const behind = TAIL.slice(TAIL.indexOf(name) + 1);
    return behind.slice(0, behind.findIndex((each) => !OPTIONAL.includes(each)) + 1);
  }
  return members === ENTRY_PARTS_MAX ? [SNAPSHOTS] : [entriesName(members + 1), SNAPSHOTS];
}

/**
 * The members of the container, and digest and size of the file, every byte of which is accounted for.
 *
 * @param {Blob} file
 * @param {(bytes: number) => void} onRead is told how many bytes were read so far.
 */
export async function scanContainer(file, onRead) {
  const reader = new Reader(file, onRead);
  const members = [];
  let expected = [entriesName(1)];
  for (let block; !sameBytes((block = await reader.take(BLOCK_BYTES)), ZEROS);) {
    const { name, size } = parseTarHeader(block);
    if (name === EVIDENCE) {
      throw evidenceRefused(await reader.take(Math.min(size, memberBytesMax(MANIFEST, members.length))));
    }
    if (!expected.includes(name)) {
      const wanted = [...expected].sort().join(" or ") || "the end";
      throw new BundleInvalid(`member ${quoted(name)} stands where ${wanted} must`);
    }
    if (size > memberBytesMax(name, members.length))
      throw new BundleInvalid(`member ${name} is larger than a bundle allows`);
    const offset = reader.at;
    members.push({ name, offset, size, sha256: await reader.hash(size) });
    const padding = await reader.take((BLOCK_BYTES - (size % BLOCK_BYTES)) % BLOCK_BYTES);
    if (padding.some((byte) => byte !== 0)) {
      throw new BundleInvalid(`there are bytes between ${name} and the next member`);
    }
    expected = namesAfter(name, members.length);
  }
  if (expected.length) throw new BundleInvalid(`${expected.sort().join(" or ")} is missing: the bundle is not whole`);
  if (!sameBytes(await reader.take(BLOCK_BYTES), ZEROS)) {
    throw new BundleInvalid("the bundle does not end in two blocks of zeros");
  }
  if (reader.at !== file.size) throw new BundleInvalid("there are bytes behind the end of the bundle");
  return { members, sha256: toHex(reader.whole.digest()), bytes: file.size };
}

/** Why a file that ends with this member is no bundle. Who signed it is not judged: nobody needs to be trusted for
 * saying that something is broken. */
function evidenceRefused(data) {
  const what = "the file is evidence of a broken chain, and no bundle";
  try {
    const utf8 = new TextDecoder("utf-8", { fatal: true });
    const { payload } = JSON.parse(utf8.decode(data));
    const bytes = Uint8Array.from(atob(payload), (each) => each.charCodeAt(0));
    const { tenant_id: tenant, breaks } = JSON.parse(utf8.decode(bytes)).predicate;
    const { kind, seq, detail } = breaks[0];
    const cut = (text) => text.slice(0, EVIDENCE_TEXT_MAX);
    return new BundleInvalid(`${what}: ${cut(kind)} at seq ${seq} of tenant ${cut(tenant)}: ${cut(detail)}`);
  } catch {
    return new BundleInvalid(`${what}; which break it is about cannot be read`);
  }
}

/** Reads a file from its beginning to its end, and hashes all of it. */
class Reader {
  constructor(file, onRead) {
    this.file = file;
    this.onRead = onRead;
    this.at = 0;
    this.whole = new Sha256();
    this.buffer = new Uint8Array(0);
  }

  /** Up to ``count`` bytes, at least one unless the file ends. */
  async some(count) {
    if (!this.buffer.length) {
      this.buffer = new Uint8Array(await this.file.slice(this.at, this.at + READ_BYTES).arrayBuffer());
      this.onRead(this.at);
    }
    const data = this.buffer.subarray(0, count);
    this.buffer = this.buffer.subarray(data.length);
    this.at += data.length;
    this.whole.update(data);
    return data;
  }

  async take(count) {
    const taken = new Uint8Array(count);
    for (let filled = 0; filled < count;) {
      const data = await this.some(count - filled);
      if (!data.length) throw new BundleInvalid(`the bundle is cut short at byte ${this.at}`);
      taken.set(data, filled);
      filled += data.length;
    }
    return taken;
  }

  async hash(count) {
    const hashed = new Sha256();
    for (let left = count; left > 0;) {
      const data = await this.some(left);
      if (!data.length) throw new BundleInvalid(`the bundle is cut short at byte ${this.at}`);
      hashed.update(data);
      left -= data.length;
    }
    return toHex(hashed.digest());
  }
}

/** SHA-256 of a file, whatever it is. */
export async function digestOf(file) {
  const hashed = new Sha256();
  for (let at = 0; at < file.size; at += READ_BYTES) {
    hashed.update(new Uint8Array(await file.slice(at, at + READ_BYTES).arrayBuffer()));
  }
  return toHex(hashed.digest());
}
