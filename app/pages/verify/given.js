// What the reader gives: files, told apart by what is in them, and read as texts where they are small.

const HEAD_BYTES = 4096;
const TEXT_BYTES_MAX = 4 << 20;

const CHECKPOINT = /^[^\n]+\n\d+\n[A-Za-z0-9+/]+=*\n[^]*\n\n?— /;
const VERIFIER_KEY = /^[^\s+]+\+[0-9a-f]{8}\+[A-Za-z0-9+/]+=*\s*$/m;

/**
 * What a file is: ``keys``, ``checkpoint``, ``witness``, or ``subject``, which is what is to be verified. Whatever is
 * none of the others is a subject: a damaged file is one that somebody wants a verdict on.
 */
export async function kindOf(file) {
  const head = await file.slice(0, HEAD_BYTES).text();
  const start = head.trimStart();
  if (start.startsWith("-----BEGIN ")) return "keys";
  if (start.startsWith("{")) return isKeyList(await textOf(file).catch(() => "")) ? "keys" : "subject";
  if (CHECKPOINT.test(head)) return "checkpoint";
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

/** Whether a file is to be judged as a receipt; anything else is judged as a bundle. */
export async function isReceipt(file) {
  return (await file.slice(0, 64).text()).trimStart().startsWith("{");
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
