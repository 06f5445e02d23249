// The manifest of a bundle: a signed statement of what range it holds and which bytes make it up.

import {
  ANCHORS,
  BundleInvalid,
  ENTRY_PARTS_MAX,
  JOB_INDEX,
  MANIFEST,
  PART_BYTES_MAX,
  ROWS_A_PART_MAX,
  ROW_BYTES_MAX,
  SNAPSHOTS,
  compressedBytesMax,
  entriesName,
  memberBytesMax,
  tailOf,
} from "./container.js";
import { PAYLOAD_BYTES_MAX, PAYLOAD_TYPE } from "./dsse.js";
import { HASH, Malformed, fromBase64, fromHex, fromUtf8, quoted, toHex } from "./encoding.js";
import { NODE_ID, TENANT_ID, parseHlc } from "./hlc.js";
import { canonical, hasMembers, isInteger, isObject, isText, parseJson } from "./json.js";
import { sha256 } from "./sha256.js";

export const STATEMENT_TYPE = "https://in-toto.io/Statement/v1";

const PREDICATE_TYPE = "https://tallystick.dev/bundle/v1";
const CONSISTENCY_HASHES_MAX = 128;
const HLC_CHARACTERS_MAX = 200;
export const LOG_ORIGIN = /^[!-*,-~]{1,300}$/;
const HEAD = '{"payload":"';
const TAIL_OF_ENVELOPE = new RegExp(
  `^","payloadType":"${PAYLOAD_TYPE.replace(/[.+/]/g, "\\$&")}","signatures":` +
    String.raw`\[\{"keyid":"([0-9a-f]{16})","sig":"([A-Za-z0-9+/]{2,254}={0,2})"\}\]\}$`,
);

const isHash = (value) => isText(value) && HASH.test(value);
const isHlcText = (value) => isText(value, HLC_CHARACTERS_MAX);

const FIELDS = {
  format_version: (value) => [1, 2, 3].includes(value),
  node_id: (value) => isText(value) && NODE_ID.test(value),
  log_origin: (value) => isText(value) && LOG_ORIGIN.test(value),
  tenant_id: (value) => isText(value) && TENANT_ID.test(value),
  from_seq: (value) => isInteger(value, 1),
  to_seq: (value) => isInteger(value, 1),
  to_chain_link: isHash,
  first_hlc: isHlcText,
  last_hlc: isHlcText,
  entry_count: (value) => isInteger(value, 1),
  tree_size: (value) => isInteger(value, 1),
  tree_root: isHash,
  consistency: (value) => Array.isArray(value) && value.length <= CONSISTENCY_HASHES_MAX && value.every(isHash),
  snapshot_count: (value) => isInteger(value),
  parts: (value) => Array.isArray(value) && value.every(isPart),
};

function isPart(value) {
  return (
    hasMembers(value, ["name", "sha256", "bytes", "raw_bytes", "rows"]) &&
    isText(value.name, 100) &&
    isHash(value.sha256) &&
    ["bytes", "raw_bytes", "rows"].every((name) => isInteger(value[name]))
  );
}

/** The envelope in these bytes, in its one spelling; nothing of it is judged, nor its payload parsed. */
export function openManifest(bytes) {
  const text = new TextDecoder("latin1").decode(bytes);
  const end = text.indexOf('"', HEAD.length);
  const tail = text.startsWith(HEAD) && end >= 0 ? TAIL_OF_ENVELOPE.exec(text.slice(end)) : null;
  if (tail === null) {
    throw new BundleInvalid("the manifest is not an envelope in canonical form with exactly one signature");
  }
  if (end - HEAD.length > (PAYLOAD_BYTES_MAX * 4) / 3 + 4) {
    throw new BundleInvalid(`the manifest's payload is over ${PAYLOAD_BYTES_MAX} bytes`);
  }
  try {
    const payload = fromBase64(text.slice(HEAD.length, end), "payload");
    return { payload, signatures: [{ keyId: tail[1], signature: fromBase64(tail[2], "sig") }] };
  } catch (error) {
    throw new BundleInvalid(`the manifest is malformed: ${error.message}`);
  }
}

/** A signature of the manifest, by a key that is held, does not hold. */
export class ManifestForged extends BundleInvalid {}

/** What the payload of a manifest says, once it is of its form and agrees with itself. */
export function readManifest(payload) {
  let said;
  try {
    const statement = parseJson(fromUtf8(payload, "the statement"), "the statement");
    said = isObject(statement) && isObject(statement.predicate) ? statement.predicate : {};
    if (!hasMembers(said, Object.keys(FIELDS))) throw new Malformed("its predicate has other fields");
    for (const [name, isOfItsForm] of Object.entries(FIELDS)) {
      if (!isOfItsForm(said[name])) throw new Malformed(`${name} is not of its form`);
    }
    parseHlc(said.first_hlc);
    parseHlc(said.last_hlc);
  } catch (error) {
    if (!(error instanceof Malformed)) throw error;
    throw new BundleInvalid(`the manifest is malformed, or of another version: ${error.message}`);
  }
  checkManifest(said);
  if (canonical(statementOf(said)) !== fromUtf8(payload, "the statement")) {
    throw new BundleInvalid("the manifest's statement is not in canonical form, or its subject is another");
  }
  const tail = tailOf(namesOf(said.parts));
  return {
    ...said,
    origin: `${said.log_origin}/${said.tenant_id}`,
    hasAnchors: tail.includes(ANCHORS),
    hasJobIndex: tail.includes(JOB_INDEX),
    entryParts: said.parts.slice(0, 1 - tail.length),
  };
}

function statementOf(said) {
  const digests = said.parts.map((part) => fromHex(part.sha256));
  const name = `${said.tenant_id}/${said.from_seq}-${said.to_seq}`;
  return {
    _type: STATEMENT_TYPE,
    subject: [{ name, digest: { sha256: toHex(sha256(...digests)) } }],
    predicateType: PREDICATE_TYPE,
    predicate: said,
  };
}

const namesOf = (parts) => parts.map(({ name }) => name);

function checkManifest(said) {
  const entryParts = checkParts(said.parts);
  const tail = tailOf(namesOf(said.parts));
  const version = tail.includes(JOB_INDEX) ? 3 : tail.includes(ANCHORS) ? 2 : 1;
  if (said.format_version !== version) {
    throw new BundleInvalid(`the manifest has parts that no bundle of version ${said.format_version} has`);
  }
  const rows = said.parts.slice(0, entryParts).reduce((sum, part) => sum + part.rows, 0);
  if (said.to_seq - said.from_seq + 1 !== said.entry_count || said.entry_count !== rows) {
    throw new BundleInvalid("range, entry_count and rows of the manifest do not agree");
  }
  if (said.snapshot_count !== said.parts.find(({ name }) => name === SNAPSHOTS).rows) {
    throw new BundleInvalid("snapshot_count of the manifest is not the number of rows of its part");
  }
  if (said.tree_size !== said.to_seq) throw new BundleInvalid("tree_size of the manifest is not its to_seq");
}

/** Refuses parts that are not those of a bundle, its manifest left out; returns the number of entry parts. */
function checkParts(parts) {
  const tail = tailOf(namesOf(parts));
  const entryParts = parts.length - tail.length + 1;
  if (entryParts < 1 || entryParts > ENTRY_PARTS_MAX) {
    throw new BundleInvalid(`a bundle has 1 to ${ENTRY_PARTS_MAX} entry parts`);
  }
  parts.forEach((part, at) => {
    const name = at < entryParts ? entriesName(at + 1) : tail[at - entryParts];
    if (part.name !== name) {
      throw new BundleInvalid(`the manifest lists ${quoted(part.name, 100)} where ${name} must stand`);
    }
    const isSized = at < entryParts ? isSizedEntryPart(part) : isSizedMember(part, entryParts);
    if (!isSized) throw new BundleInvalid(`${name} is larger than a bundle allows, or has a wrong number of rows`);
  });
  return entryParts;
}

function isSizedEntryPart({ rows, raw_bytes: rawBytes, bytes }) {
  const rawBytesMax = rows === 1 ? ROW_BYTES_MAX : PART_BYTES_MAX;
  return rows >= 1 && rows <= ROWS_A_PART_MAX && rawBytes <= rawBytesMax && bytes <= compressedBytesMax(rawBytes);
}

function isSizedMember({ name, rows, raw_bytes: rawBytes, bytes }, entryParts) {
  return rawBytes === bytes && bytes <= memberBytesMax(name, entryParts) && (name === SNAPSHOTS || rows === 0);
}

/** Refuses members that are not those that the manifest lists. */
export function checkMembers(members, { parts }) {
  const listed = members.filter(({ name }) => name !== MANIFEST);
  if (listed.length !== parts.length) {
    throw new BundleInvalid(`the manifest lists ${parts.length} parts, there are ${listed.length}`);
  }
  listed.forEach((member, at) => {
    const part = parts[at];
    if (member.name !== part.name || member.size !== part.bytes) {
      throw new BundleInvalid(`part ${quoted(part.name, 100)} is not of the size that the manifest names`);
    }
    if (member.sha256 !== part.sha256) {
      throw new BundleInvalid(`part ${part.name} is not the one that the manifest names: its digest is another`);
    }
  });
}
