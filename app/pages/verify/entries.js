// Entries: their lines in a bundle, and the links that bind each to the one before it (docs/formats/chain-link.md).

import { BundleInvalid } from "./container.js";
import { hasLoneSurrogate, hashBytes, toHex, toUtf8 } from "./encoding.js";
import { faultOf } from "./form.js";
import { sha256 } from "./sha256.js";

const HEADER_V2 = toUtf8("tallystick.chain-link.v2\n");
const NO_BYTES = new Uint8Array(0);
const ESCAPED_SURROGATE = "\\ud";

/** The entry that a line without its newline is: canonical JSON, which is written again and compared. */
export function parseEntry(line, tenantId) {
  let row;
  try {
    row = JSON.parse(line);
  } catch (error) {
    throw new BundleInvalid(`a row is not one of an entry: ${error.message}`);
  }
  if (row === null || typeof row !== "object" || canonicalEntry(row) !== line) {
    throw new BundleInvalid("the rows are not canonical JSON, one a line");
  }
  if (row.tenant_id !== tenantId) throw new BundleInvalid("a row belongs to another tenant");
  return row;
}

/** The one line of an entry; throws where a member is not of its type. */
export function canonicalEntry(row) {
  return (
    `{"action":${text(row.action)},"chain_link":${text(row.chain_link)},"hlc_logical":${number(row.hlc_logical)},` +
    `"hlc_node":${text(row.hlc_node)},"hlc_physical":${number(row.hlc_physical)},"job_id":${text(row.job_id)},` +
    `"link_version":${number(row.link_version)},"origin":${row.origin === null ? "null" : text(row.origin)},` +
    `"payload":${text(row.payload)},"payload_digest":${text(row.payload_digest)},` +
    `"prev_chain_link":${row.prev_chain_link === null ? "null" : text(row.prev_chain_link)},` +
    `"seq":${number(row.seq, 1)},"t_hlc":${text(row.t_hlc)},"tenant_id":${text(row.tenant_id)}}`
  );
}

function text(value) {
  if (typeof value !== "string") throw new BundleInvalid("a row is not one of an entry: a text is missing");
  const spelt = JSON.stringify(value);
  if (spelt.includes(ESCAPED_SURROGATE) && hasLoneSurrogate(value)) {
    throw new BundleInvalid("a row is not one of an entry: it holds half of a surrogate pair");
  }
  return spelt;
}

function number(value, min = 0) {
  if (!Number.isSafeInteger(value) || value < min) {
    throw new BundleInvalid("a row is not one of an entry: a number is missing or out of range");
  }
  return value;
}

/** The 32 bytes of the version 2 link over an entry's columns; ``prev`` and ``digest`` are raw. */
export function linkV2(row, prev, digest) {
  const fields = [
    toUtf8(row.tenant_id),
    seqBytes(row.seq),
    toUtf8(row.t_hlc),
    toUtf8(row.job_id),
    toUtf8(row.action),
    prev,
    digest,
    row.origin === null ? NO_BYTES : toUtf8(row.origin),
  ];
  const bytes = new Uint8Array(fields.reduce((sum, field) => sum + 4 + field.length, HEADER_V2.length));
  const view = new DataView(bytes.buffer);
  bytes.set(HEADER_V2);
  let at = HEADER_V2.length;
  for (const field of fields) {
    view.setUint32(at, field.length);
    bytes.set(field, at + 4);
    at += 4 + field.length;
  }
  return sha256(bytes);
}

function seqBytes(seq) {
  const bytes = new Uint8Array(8);
  new DataView(bytes.buffer).setBigUint64(0, BigInt(seq));
  return bytes;
}

function linkV1(row) {
  const previous = row.prev_chain_link ?? "genesis";
  return sha256(toUtf8(`${row.t_hlc}${row.job_id}${row.action}${previous}${row.payload_digest}`));
}

/** The digest of a payload, in hex. */
export function payloadDigest(row) {
  return toHex(sha256(toUtf8(row.payload)));
}

/** The link over the stored columns, and why there can be none. */
export function linkOf(row) {
  if (row.link_version === 1) return { link: linkV1(row), problem: null };
  if (row.link_version !== 2) {
    return { link: NO_BYTES, problem: `link version ${row.link_version} of seq ${row.seq} is not known` };
  }
  const prev = row.prev_chain_link === null ? NO_BYTES : hashBytes(row.prev_chain_link);
  const digest = hashBytes(row.payload_digest);
  if (prev === null || digest === null) {
    const problem = `prev_chain_link or payload_digest of seq ${row.seq} is not 64 lowercase hex digits`;
    return { link: NO_BYTES, problem };
  }
  return { link: linkV2(row, prev, digest), problem: null };
}

/** Walks a chain in seq order, each row by itself and against the row before it; keeps nothing of what it passed. */
export class EntryChecker {
  /** ``prevLink`` is the link before ``firstSeq``; undefined where the first row is believed what it says of it. */
  constructor(findings, firstSeq, prevLink) {
    this.findings = findings;
    this.nextSeq = firstSeq;
    this.lastLink = prevLink;
    this.mayBeV1 = true;
    this.count = 0;
  }

  /** Reports all that is wrong with the row; the link that is its leaf of the tree, null when it has no place here. */
  check(row) {
    const { findings } = this;
    const { seq } = row;
    this.count++;
    if (seq < this.nextSeq) {
      const said = { expected: this.nextSeq, actual: seq };
      findings.add("duplicate-seq", seq, `another entry stands at seq ${seq}`, said);
      return null;
    }
    if (seq > this.nextSeq) {
      const detail = `${seq - this.nextSeq} entries are missing: after seq ${this.nextSeq - 1} comes ${seq}`;
      findings.add("gap", this.nextSeq, detail, { expected: this.nextSeq, actual: seq });
      this.nextSeq = seq;
      this.lastLink = undefined;
    }
    const computed = this.#columns(row);
    this.nextSeq++;
    this.lastLink = row.chain_link;
    return hashBytes(row.chain_link) ?? computed;
  }

  #columns(row) {
    const { findings, lastLink } = this;
    const { seq } = row;
    const digest = payloadDigest(row);
    if (row.payload_digest !== digest) {
      const detail = `the payload of seq ${seq} does not have the digest stored with it`;
      findings.add("payload-digest", seq, detail, { expected: row.payload_digest, actual: digest });
    }
    const hlc = `${row.hlc_physical}:${row.hlc_logical}:${row.hlc_node}`;
    if (row.t_hlc !== hlc) {
      const detail = `the HLC columns of seq ${seq} are not those of its t_hlc`;
      findings.add("hlc-columns", seq, detail, { expected: row.t_hlc, actual: hlc });
    }
    if (lastLink !== undefined && row.prev_chain_link !== lastLink) {
      const detail = `seq ${seq} does not name the link of seq ${seq - 1} as the one before it`;
      findings.add("prev-link", seq, detail, { expected: lastLink, actual: row.prev_chain_link });
    }
    const { link, problem } = linkOf(row);
    const spelt = toHex(link);
    if (problem !== null || spelt !== row.chain_link) {
      const detail = problem ?? `the link of seq ${seq} is not that of its columns`;
      findings.add("link", seq, detail, { expected: spelt || null, actual: row.chain_link });
    } else if (row.link_version === 1 && !this.mayBeV1) {
      const detail = `seq ${seq} has a version 1 link after a later version began`;
      findings.add("link", seq, detail, { expected: null, actual: row.chain_link });
    } else if (row.payload_digest === digest && row.t_hlc === hlc) {
      const fault = faultOf(row);
      if (fault !== null) findings.add("malformed", seq, `seq ${seq} is an entry that no ledger writes: ${fault}`);
    }
    this.mayBeV1 = this.mayBeV1 && row.link_version === 1;
    return link;
  }
}

/**
 * Judges entries that need not follow one another, such as those of one job: each by itself, neighbours together.
 * Returns whether any has a link of version 1.
 */
export function checkApart(rows, findings) {
  let mayBeV1 = true;
  let checker = null;
  for (const row of rows) {
    const { seq, prev_chain_link: prev } = row;
    if (checker?.nextSeq !== seq) {
      checker = new EntryChecker(findings, seq, seq === 1 ? null : undefined);
      checker.mayBeV1 = mayBeV1;
      if (seq > 1 && prev === null) {
        findings.add("prev-link", seq, `seq ${seq} names no link before it`);
      }
    }
    checker.check(row);
    ({ mayBeV1 } = checker);
  }
  return rows.some((row) => row.link_version === 1);
}
