// An open bundle: its container, digests and manifest checked; its rows read as a verification asks for them, each part
// hashed again before its bytes are decompressed, and not further than the manifest says.

import {
  ANCHORS,
  BundleInvalid,
  CHECKPOINT,
  JOB_INDEX,
  KEYS,
  MANIFEST,
  SNAPSHOTS,
  SNAPSHOT_ROW_BYTES_MAX,
  scanContainer,
} from "./container.js";
import { Malformed, fromUtf8, toHex } from "./encoding.js";
import { parseEntry } from "./entries.js";
import { parseKept } from "./kept_index.js";
import { judgeEnvelope } from "./dsse.js";
import { ManifestForged, checkMembers, openManifest, readManifest } from "./manifest.js";
import { Sha256, sha256 } from "./sha256.js";
import { parseSnapshotRow } from "./snapshots.js";

const NEWLINE = 0x0a;
const READ_BYTES = 1 << 20;

export class Bundle {
  /** Opens a file. A manifest that a key of ``keyring`` is named for and did not sign is refused and not parsed. */
  static async open(file, keyring, onRead = () => {}) {
    const bundle = new Bundle();
    const { members, sha256: digest, bytes } = await scanContainer(file, onRead);
    Object.assign(bundle, { file, digest, bytes, members: new Map(members.map((each) => [each.name, each])) });
    const envelope = openManifest(await bundle.small(MANIFEST));
    const forged = (why) => new ManifestForged(`the manifest's signature does not hold: ${why}`);
    bundle.signed = await judgeEnvelope(envelope, keyring, forged);
    bundle.manifest = readManifest(envelope.payload);
    checkMembers(members, bundle.manifest);
    return bundle;
  }

  /** The bytes of a member, once its digest is again what it was. */
  async small(name) {
    const { offset, size, sha256: digest } = this.members.get(name);
    const data = new Uint8Array(await this.file.slice(offset, offset + size).arrayBuffer());
    if (toHex(sha256(data)) !== digest) throw new BundleInvalid(`${name} changed while it was read`);
    return data;
  }

  async checkpoint() {
    const data = await this.small(CHECKPOINT);
    try {
      return fromUtf8(data, "the checkpoint");
    } catch (error) {
      throw new BundleInvalid(error.message);
    }
  }

  /** The bytes of statements of external witnesses about the log, null where the bundle has no such member. */
  async anchors() {
    return this.manifest.hasAnchors ? this.small(ANCHORS) : null;
  }

  /** What is kept of the index of jobs of entries that left, null where the bundle has no such member. */
  async jobIndex() {
    return this.manifest.hasJobIndex ? parseKept(await this.small(JOB_INDEX)) : null;
  }

  /** What the bundle itself says its keys are; nothing is verified with them. */
  async keysInside() {
    return fromUtf8(await this.small(KEYS), "keys.json");
  }

  /** The rows of each part, in order; those before the range are left out. */
  async *parts() {
    for (let number = 0; number < this.manifest.entryParts.length; number++) {
      yield { number, rows: await this.rowsOf(number) };
    }
  }

  /** The rows of one part, from 0. */
  async rowsOf(number) {
    const { manifest } = this;
    const part = manifest.entryParts[number];
    const lines = linesOf(await decompressed(part, await this.small(part.name)), part);
    const rows = lines.map((line) => parseEntry(line, manifest.tenant_id));
    if (number === 0) this.#checkFirst(rows[0]);
    return rows;
  }

  #checkFirst(row) {
    if (row.t_hlc !== this.manifest.first_hlc) {
      throw new BundleInvalid("the first entry does not have the HLC that the manifest names");
    }
    if (row.seq > 1 && row.prev_chain_link === null) {
      throw new BundleInvalid("the first entry names none before it, and is not that of a chain");
    }
  }

  /** The rows about one job id, in order; others are not parsed. */
  async rowsAbout(jobId) {
    const { entryParts, tenant_id: tenantId } = this.manifest;
    const member = `"job_id":${JSON.stringify(jobId)},`;
    const found = [];
    for (const part of entryParts) {
      const lines = linesOf(await decompressed(part, await this.small(part.name)), part);
      found.push(...lines.filter((line) => line.includes(member)).map((line) => parseEntry(line, tenantId)));
    }
    return found;
  }

  /** The entry of highest seq in the last part. */
  async lastEntry() {
    const rows = await this.rowsOf(this.manifest.entryParts.length - 1);
    return rows.reduce((last, row) => (row.seq > last.seq ? row : last));
  }

  /** Number of the part that should hold an entry. */
  partOf(seq) {
    let first = this.manifest.from_seq;
    return this.manifest.entryParts.findIndex(({ rows }) => seq < (first += rows));
  }

  /** The rows of all snapshots, in order. */
  async *snapshotRows() {
    const { manifest } = this;
    let after = manifest.from_seq - 1;
    let count = 0;
    for await (const line of this.#snapshotLines()) {
      const row = parseSnapshotRow(line, manifest.tenant_id);
      if (!(after < row.from_seq && row.from_seq <= row.to_seq && row.to_seq <= manifest.to_seq)) {
        throw new BundleInvalid(`the snapshot of ${row.from_seq}..${row.to_seq} is out of order or outside the range`);
      }
      after = row.from_seq;
      count++;
      yield row;
    }
    if (count !== manifest.snapshot_count) {
      throw new BundleInvalid(`there are ${count} snapshots, and ${manifest.snapshot_count} are listed`);
    }
  }

  async *#snapshotLines() {
    const { offset, size, sha256: digest } = this.members.get(SNAPSHOTS);
    const hashed = new Sha256();
    let rest = new Uint8Array(0);
    for (let at = 0; at < size; at += READ_BYTES) {
      const end = offset + Math.min(size, at + READ_BYTES);
      const data = new Uint8Array(await this.file.slice(offset + at, end).arrayBuffer());
      hashed.update(data);
      let begin = 0;
      for (let newline; (newline = data.indexOf(NEWLINE, begin)) >= 0; begin = newline + 1) {
        yield snapshotLine(joined(rest, data.subarray(begin, newline)));
        rest = new Uint8Array(0);
      }
      rest = joined(rest, data.subarray(begin));
      if (rest.length > SNAPSHOT_ROW_BYTES_MAX) snapshotLine(rest);
    }
    if (toHex(hashed.digest()) !== digest) throw new BundleInvalid(`${SNAPSHOTS} changed while it was read`);
    if (rest.length) throw new BundleInvalid(`the last row of ${SNAPSHOTS} has no end`);
  }
}

function snapshotLine(bytes) {
  if (bytes.length > SNAPSHOT_ROW_BYTES_MAX) {
    throw new BundleInvalid(`a row of ${SNAPSHOTS} is longer than ${SNAPSHOT_ROW_BYTES_MAX} bytes`);
  }
  try {
    return fromUtf8(bytes, "a row");
  } catch (error) {
    throw new BundleInvalid(`a row is not one of a snapshot: ${error.message}`);
  }
}

function joined(one, other) {
  if (!one.length) return other;
  const both = new Uint8Array(one.length + other.length);
  both.set(one);
  both.set(other, one.length);
  return both;
}

/** The bytes of a part, which the manifest says the length of: one gzip member, and nothing behind it. */
async function decompressed(part, data) {
  const raw = new Uint8Array(part.raw_bytes);
  let filled = 0;
  const reader = new Blob([data]).stream().pipeThrough(new DecompressionStream("gzip")).getReader();
  try {
    for (let piece; !(piece = await reader.read()).done; filled += piece.value.length) {
      if (filled + piece.value.length > raw.length) {
        throw new BundleInvalid(`part ${part.name} is not one gzip member of ${part.raw_bytes} bytes`);
      }
      raw.set(piece.value, filled);
    }
  } catch (error) {
    reader.cancel().catch(() => {});
    if (error instanceof Malformed) throw error;
    throw new BundleInvalid(`part ${part.name} is not one gzip member of ${part.raw_bytes} bytes: ${error.message}`);
  }
  if (filled !== raw.length || !endsAsMemberOf(raw, data)) {
    throw new BundleInvalid(`part ${part.name} is not one gzip member of ${part.raw_bytes} bytes`);
  }
  return raw;
}

/**
 * Whether the last bytes of ``data`` are the checksum and length that a gzip member of ``raw`` ends with (RFC 1952,
 * 2.3.1): so nothing follows it, and it is one, whether or not a browser minds.
 */
function endsAsMemberOf(raw, data) {
  const end = new DataView(data.buffer, data.byteOffset + data.length - 8);
  return end.getUint32(0, true) === crc32(raw) && end.getUint32(4, true) === raw.length;
}

const CRC_TABLE = Uint32Array.from({ length: 256 }, (_, byte) => {
  let rest = byte;
  for (let bit = 0; bit < 8; bit++) rest = rest & 1 ? (rest >>> 1) ^ 0xedb88320 : rest >>> 1;
  return rest;
});

function crc32(bytes) {
  let rest = -1;
  for (let at = 0; at < bytes.length; at++) rest = (rest >>> 8) ^ CRC_TABLE[(rest ^ bytes[at]) & 255];
  return (rest ^ -1) >>> 0;
}

function linesOf(raw, part) {
  let text;
  try {
    text = fromUtf8(raw, "a part");
  } catch {
    throw new BundleInvalid("a row is not one of an entry: it is not UTF-8");
  }
  const lines = text.split("\n");
  if (lines.pop() !== "" || lines.length !== part.rows) {
    throw new BundleInvalid(`a part does not have the ${part.rows} rows that are listed`);
  }
  return lines;
}
