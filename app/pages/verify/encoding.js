// Bytes and texts: hex, base64 and UTF-8, each with one spelling for each value. Two readers that disagree about the
// same text are how signed documents get forged, so what could be read in two ways is refused.

/** What is read is not of its form. */
export class Malformed extends Error {}

const HEX = Array.from({ length: 256 }, (_, byte) => byte.toString(16).padStart(2, "0"));

export const HASH = /^[0-9a-f]{64}$/;

export function toHex(bytes) {
  let text = "";
  for (const byte of bytes) text += HEX[byte];
  return text;
}

/** The bytes that lowercase hex spells; null where ``text`` is not 64 such digits. */
export function hashBytes(text) {
  return typeof text === "string" && HASH.test(text) ? fromHex(text) : null;
}

/** The bytes that lowercase hex spells, which ``text`` MUST be. */
export function fromHex(text) {
  const bytes = new Uint8Array(text.length / 2);
  for (let at = 0; at < bytes.length; at++) {
    bytes[at] = (digit(text.charCodeAt(2 * at)) << 4) | digit(text.charCodeAt(2 * at + 1));
  }
  return bytes;
}

function digit(code) {
  return (code & 15) + 9 * (code >> 6);
}

export function sameBytes(one, other) {
  return one.length === other.length && one.every((byte, at) => byte === other[at]);
}

/** RFC 4648 section 4, padding included; with ``urlSafe`` section 5 too, but never a mix of both. */
export function fromBase64(text, what, { urlSafe = false } = {}) {
  if (typeof text !== "string") throw new Malformed(`${what} is not base64 text`);
  const isUrlSafe = urlSafe && /[-_]/.test(text);
  if (isUrlSafe && /[+/]/.test(text)) throw new Malformed(`${what} is base64 of two alphabets`);
  const standard = isUrlSafe ? text.replaceAll("-", "+").replaceAll("_", "/") : text;
  let binary;
  try {
    binary = atob(standard);
  } catch {
    throw new Malformed(`${what} is not base64`);
  }
  if (btoa(binary) !== standard) throw new Malformed(`${what} is not base64: stray bits or characters`);
  return Uint8Array.from(binary, (character) => character.charCodeAt(0));
}

export function toBase64(bytes) {
  let binary = "";
  for (const byte of bytes) binary += String.fromCharCode(byte);
  return btoa(binary);
}

const decoder = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
const encoder = new TextEncoder();

export function fromUtf8(bytes, what) {
  try {
    return decoder.decode(bytes);
  } catch {
    throw new Malformed(`${what} is not UTF-8`);
  }
}

export function toUtf8(text) {
  return encoder.encode(text);
}

/** Half of a surrogate pair stands in ``text``, so it is not Unicode. */
export function hasLoneSurrogate(text) {
  return /\p{Surrogate}/u.test(text);
}

/** A text from a file as it may stand within a sentence. */
export function quoted(text, charactersMax = 200) {
  return `'${[...String(text)].slice(0, charactersMax).join("")}'`;
}
