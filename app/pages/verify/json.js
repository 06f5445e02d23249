// JSON as it is signed: read without names that stand twice, written in the one canonical form (RFC 8785).

import { Malformed, hasLoneSurrogate } from "./encoding.js";

const NESTING_MAX = 64;
const READ_NESTING_MAX = 900;
const NUMBER = /-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/y;
const SPACE = /[ \t\n\r]*/y;
const WORDS = { true: true, false: false, null: null };

/** The value of a JSON text. Integers beyond what binary64 holds become BigInt, which has no canonical form. */
export function parseJson(text, what) {
  const reader = new Reader(text);
  try {
    const value = reader.value(0);
    reader.space();
    if (reader.at !== text.length) throw new Malformed("characters follow the value");
    return value;
  } catch (error) {
    if (!(error instanceof Malformed)) throw error;
    throw new Malformed(`${what} is not JSON: ${error.message}`);
  }
}

class Reader {
  constructor(text) {
    this.text = text;
    this.at = 0;
  }

  space() {
    SPACE.lastIndex = this.at;
    SPACE.exec(this.text);
    this.at = SPACE.lastIndex;
  }

  /** Whether ``character`` comes next, which is then passed. */
  passes(character) {
    this.space();
    if (this.text[this.at] !== character) return false;
    this.at++;
    return true;
  }

  expect(character) {
    if (!this.passes(character)) throw new Malformed(`${character} is missing at character ${this.at}`);
  }

  value(depth) {
    if (depth > READ_NESTING_MAX) throw new Malformed("it is nested too deep");
    this.space();
    const first = this.text[this.at];
    if (first === "{") return this.object(depth);
    if (first === "[") return this.array(depth);
    if (first === '"') return this.string();
    for (const [word, value] of Object.entries(WORDS)) {
      if (this.text.startsWith(word, this.at)) {
        this.at += word.length;
        return value;
      }
    }
    return this.number();
  }

  object(depth) {
    const found = Object.create(null);
    this.expect("{");
    if (this.passes("}")) return found;
    do {
      this.space();
      const name = this.string();
      if (name in found) throw new Malformed("a name stands twice in one object");
      this.expect(":");
      found[name] = this.value(depth + 1);
    } while (this.passes(","));
    this.expect("}");
    return found;
  }

  array(depth) {
    const found = [];
    this.expect("[");
    if (this.passes("]")) return found;
    do found.push(this.value(depth + 1));
    while (this.passes(","));
    this.expect("]");
    return found;
  }

  string() {
    const begin = this.at;
    if (this.text[begin] !== '"') throw new Malformed(`a text is missing at character ${begin}`);
    let end = begin;
    do {
      end = this.text.indexOf('"', end + 1);
      if (end < 0) throw new Malformed("a text has no end");
    } while (isEscaped(this.text, end));
    this.at = end + 1;
    try {
      return JSON.parse(this.text.slice(begin, this.at));
    } catch {
      throw new Malformed(`a text is malformed at character ${begin}`);
    }
  }

  number() {
    NUMBER.lastIndex = this.at;
    const match = NUMBER.exec(this.text);
    if (match === null) throw new Malformed(`there is no value at character ${this.at}`);
    this.at = NUMBER.lastIndex;
    const number = Number(match[0]);
    const isInteger = match[1] === undefined && match[2] === undefined;
    return isInteger && !Number.isSafeInteger(number) ? BigInt(match[0]) : number;
  }
}

function isEscaped(text, at) {
  let backslashes = 0;
  while (text[at - 1 - backslashes] === "\\") backslashes++;
  return backslashes % 2 === 1;
}

/** The canonical text of a value. */
export function canonical(value, depth = 0) {
  if (value === null || typeof value === "boolean") return String(value);
  if (typeof value === "string") return canonicalText(value);
  if (typeof value === "number" && Number.isFinite(value)) return String(value === 0 ? 0 : value);
  if (typeof value !== "object") throw new Malformed("a number has no canonical form");
  if (depth === NESTING_MAX) throw new Malformed(`arrays and objects are nested more than ${NESTING_MAX} deep`);
  if (Array.isArray(value)) return `[${value.map((item) => canonical(item, depth + 1)).join(",")}]`;
  // The order of JavaScript's own sort is that of UTF-16 code units, which RFC 8785 asks for.
  const members = Object.keys(value).sort();
  return `{${members.map((name) => `${canonicalText(name)}:${canonical(value[name], depth + 1)}`).join(",")}}`;
}

function canonicalText(text) {
  if (text.includes("\0")) throw new Malformed("a string holds U+0000");
  if (hasLoneSurrogate(text)) throw new Malformed("a string holds half of a surrogate pair");
  return JSON.stringify(text);
}

/** Whether a value is an object with exactly these members. */
export function hasMembers(value, names) {
  if (!isObject(value)) return false;
  const found = Object.keys(value);
  return found.length === names.length && names.every((name) => Object.hasOwn(value, name));
}

export function isObject(value) {
  return value !== null && typeof value === "object" && !Array.isArray(value);
}

export function isText(value, charactersMax = Infinity) {
  return typeof value === "string" && (value.length <= charactersMax || [...value].length <= charactersMax);
}

export function isInteger(value, min = 0) {
  return Number.isSafeInteger(value) && value >= min;
}
