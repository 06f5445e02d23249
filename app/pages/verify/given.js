// What the reader gives: files, told apart by what is in them, and read as texts where they are small.

const HEAD_BYTES = 4096;
const TEXT_BYTES_MAX = 4 << 20;

const FIRST_MEMBER = "entries/000001.ndjson.gz";
const MEMBERS = [
  FIRST_MEMBER,
  ...["snapshots.ndjson", "checkpoint", "anchors.json", "job_index.json", "keys.json"],
  ...["manifest.dsse.json", "evidence.dsse.json"],
];
const DAMAGED_MAX = 4;
const RECEIPT_NAMES = ['{"receipt"', '"receipt":', '{"anchors":'];
const RECEIPT_HEAD = 64;
const MAGIC = [
  ["\x89PNG", "a picture"],
  ["\xff\xd8\xff", "a picture"],
  ["GIF8", "a picture"],
  ["%PDF-", "a PDF document"],
  ["PK\x03\x04", "a ZIP archive"],
  ["\x1f\x8b", "a file compressed with gzip; decompress it first"],
  ["\x28\xb5\x2f\xfd", "a file compressed with zstd; decompress it first"],
  ["PAR1", "a Parquet file, such as an archive has"],
  ["\x7fELF", "a program"],
  ["c2sp.org/tlog-proof@v1\n", "a tlog-proof, which programs that read C2SP tlog-proofs verify"],
  ["\xd2\x84", "a COSE_Sign1, such as a COSE receipt, which libraries for RFC 9942 verify"],
];
const TEXTS = [
  [/^-----BEGIN /, "a PEM file, such as a key"],
  [/^(?:<!doctype html|<html)/i, "a page (HTML), such as a report of a verification"],
  [/^# /, "a text in Markdown, such as a report of a verification"],
  [/^[^\n]+\n[0-9]+\n[A-Za-z0-9+/]+=*\n/, "a checkpoint"],
  [/^\{\s*"payload(?:Type)?"/, "a signature in a DSSE envelope, such as that of a report"],
  [/^\{\s*"keys"/, "a list of keys"],
  [/^[[{]/, "JSON, such as a report of a verification"],
];

const CHECKPOINT = /^[^\n]+\n\d+\n[A-Za-z0-9+/]+=*\n[^]*\n\n?— /;
const POLICY = /^[ \t]*quorum[ \t]+[^ \t\n]+[ \t]*$/m;
const VERIFIER_KEY = /^[^\s+]+\+[0-9a-f]{8}\+[A-Za-z0-9+/]+=*\s*$/m;

/**
 * What a file is: ``keys``, ``checkpoint``, ``policy``, ``witness``, or ``subject``, which is what is to be verified. Whatever is
 * none of the others is a subject: a damaged file is one that somebody wants a verdict on.
 */
export async function kindOf(file) {
  const head = await file.slice(0, HEAD_BYTES).text();
  const start = head.trimStart();
  if (start.startsWith("-----BEGIN ")) return "keys";
  if (start.startsWith("{")) return isKeyList(await textOf(file).catch(() => "")) ? "keys" : "subject";
  if (CHECKPOINT.test(head)) return "checkpoint";
  if (!head.includes("\0") && POLICY.test(await textOf(file).catch(() => ""))) return "policy";
  return VERIFIER_KEY.test(head) && !head.includes("\0") ? "witness" : "subject";
}

function isKeyList(text) {
  try {
    const value = JSON.parse(text);
    return Array.isArray(value.keys) && value.receipt === undefined;
  } catch {
    return false;
  }
}

/**
 * What a file is to be judged as, ``bundle`` or ``receipt``, damaged or not; and what it looks like where it is neither.
 * The rules are those of signing/file_kinds.py.
 */
export async function subjectOf(file) {
  const bytes = new Uint8Array(await file.slice(0, HEAD_BYTES).arrayBuffer());
  let head = "";
  for (const byte of bytes) head += String.fromCharCode(byte);
  if (isLikeBundle(head)) return { kind: "bundle", looksLike: null };
  if (RECEIPT_NAMES.some((name) => head.slice(0, RECEIPT_HEAD).includes(name))) {
    return { kind: "receipt", looksLike: null };
  }
  return { kind: null, looksLike: looksLike(head, bytes) };
}

function isLikeBundle(head) {
  if (head !== "" && FIRST_MEMBER.startsWith(head)) return true;
  const same = [...FIRST_MEMBER].filter((character, at) => head[at] === character).length;
  return same >= FIRST_MEMBER.length - DAMAGED_MAX || (isTar(head) && MEMBERS.some((name) => head.includes(name)));
}

function isTar(head) {
  return head.slice(257, 262) === "ustar";
}

function looksLike(head, bytes) {
  if (head === "") return "an empty file";
  const magic = MAGIC.find(([begins]) => head.startsWith(begins));
  if (magic) return magic[1];
  if (isTar(head)) return "a tar archive of something else";
  const text = TEXTS.find(([form]) => form.test(head.trimStart()));
  if (text) return text[1];
  return isText(bytes) ? "text" : "binary data";
}

function isText(bytes) {
  if (bytes.includes(0)) return false;
  try {
    new TextDecoder("utf-8", { fatal: true }).decode(bytes, { stream: true });
    return true;
  } catch {
    return false;
  }
}

/** The text of a small file. */
export async function textOf(file) {
  if (file.size > TEXT_BYTES_MAX)
    throw new Error(`${file.name} is over ${TEXT_BYTES_MAX} bytes, too much for keys or a checkpoint`);
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch (error) {
    if (error instanceof TypeError) throw new Error(`${file.name} is not text`);
    throw error;
  }
}

export function sizeOf(bytes) {
  if (bytes < 1024) return `${bytes} bytes`;
  const power = Math.min(3, Math.floor(Math.log2(bytes) / 10));
  return `${(bytes / 2 ** (10 * power)).toFixed(1)} ${["", "KiB", "MiB", "GiB"][power]}`;
}
